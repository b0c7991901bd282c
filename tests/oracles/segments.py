"""slime's segments as a slow, obvious twin: chains, then rows token by token.

Turns are dicts as in `tests.oracles.rows`. Messages carry the ids of tool calls:
``tool_calls[i].id`` and ``tool_call_id``, or blocks ``tool_use`` and ``tool_result``.
"""

import json
from dataclasses import dataclass, field

from tests.oracles.rows import (
    held,
)


@dataclass
class Segments:
    """What became of one session: frozen chains in order, and each turn's route."""

    frozen: list[tuple[str, list[int]]] = field(default_factory=list)
    # None: passed over
    routes: list[str | None] = field(default_factory=list)

    def freeze(self, kind, chain):
        if chain:
            self.frozen.append((kind, [*chain]))


def uncached(value):
    """A JSON value without any cache_control."""
    if isinstance(value, list):
        return [uncached(one) for one in value]
    if isinstance(value, dict):
        return {k: uncached(v) for k, v in value.items() if k != "cache_control"}
    return value


def text(message):
    """The text that equal messages have in common."""
    return json.dumps(uncached(message), sort_keys=True)


def continues(turns, chain, i, identity):
    """Whether turn i goes on where the chain stands, by messages or else by tokens."""
    last = turns[chain[-1]]
    seen, shown = last.get("prompt_messages"), turns[i].get("prompt_messages")
    if seen is None or shown is None:
        path, prompt = held(last), turns[i]["prompt_ids"]
        if prompt[: len(path)] == path:
            return True
        opening = last["prompt_ids"]
        longer = 0 < len(opening) < len(prompt)
        return longer and prompt[: len(opening)] == opening
    return [*map(identity, shown[: len(seen)])] == [*map(identity, seen)]


def answers(message):
    """Ids of the tool calls that a message answers."""
    found = [message.get("tool_call_id")]
    content = message.get("content")
    for block in content if isinstance(content, list) else []:
        if block.get("type") == "tool_result":
            found.append(block.get("tool_use_id"))
    return [call for call in found if call is not None]


def dispatched(message, tools):
    """Ids of the calls to the tools, in order; None stands for a call without id."""
    message = message or {}
    found = [
        call.get("id")
        for call in message.get("tool_calls") or []
        if call.get("function", {}).get("name") in tools
    ]
    content = message.get("content")
    for block in content if isinstance(content, list) else []:
        if block.get("type") == "tool_use" and block["name"] in tools:
            found.append(block.get("id"))
    return found


def segments_of(turns, tools=("Task", "Agent"), identity=text):
    """Who speaks, and which runs of turns are frozen when.

    ``identity`` gives what counts of a message.
    """
    result = Segments()
    # the turns of an agent since its history was last replaced; None: there is no agent
    main, sub, watched = [], None, None
    for i, turn in enumerate(turns):
        shown = turn.get("prompt_messages")
        if shown == []:
            result.routes.append(None)
            continue
        if sub is not None and any(
            watched == call for message in shown or [] for call in answers(message)
        ):
            result.freeze("subagent", sub)
            sub = watched = None
        goes_to_main = sub is None or (main and continues(turns, main, i, identity))
        chain = main if goes_to_main else sub
        if not chain:
            said = "new"
        elif continues(turns, chain, i, identity):
            said = "append"
        else:
            said = "wipe"
            result.freeze("history_replaced", chain)
            chain.clear()
        chain.append(i)
        result.routes.append(f"{'main' if goes_to_main else 'sub'}/{said}")
        sent_out = dispatched(turn.get("response_message"), tools)
        if goes_to_main and sent_out:
            watched = sent_out[-1]
            sub = [] if sub is None else sub
    result.freeze("subagent", sub)
    result.freeze("final", main)
    return result

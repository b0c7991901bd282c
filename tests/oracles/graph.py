"""The slow, obvious twin of prime-rl's message graph (policy ``graph``).

Turns are as in `tests.oracles.rows`. A node of the graph is a message below a node; it is
kept for a later request while that shows an equal message there and repeats its tokens.
Without attribution the tokens of one message are not known, those of a request and its
reply together are: so what a turn sampled is kept where a later request shows all of its
messages and its reply first, and repeats all of its tokens.
"""

import json

from tests.oracles.rows import Link, held, most_repeated, turn_indices


def identity(message):
    """What counts of a message."""
    said = [message.get("role"), message.get("content")]
    if said[1] is None:
        said[1] = ""
    if message.get("role") == "assistant":
        said.append(message.get("reasoning_content"))
        said.append(message.get("provider_state"))
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            said.append([called(call) for call in calls])
    if message.get("role") == "tool":
        said.append(message.get("tool_call_id"))
    return json.dumps(said, sort_keys=True)


def called(call):
    """Id, name and arguments of a tool call."""
    function = call.get("function", call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            arguments = ["no JSON", arguments]
    return [call.get("id"), function.get("name"), arguments]


def links_of(turns):
    """One dict per turn, as the columns of ``schema.LINKS`` without session_id."""
    links, placed = [], []
    for i, turn in enumerate(turns):
        messages = turn["prompt_messages"]
        if messages is not None and not messages:
            links.append(Link(why="unrouted"))
            continue
        if messages is None:
            parent = most_repeated(turns, placed, turn["prompt_ids"])
            why = "tokens"
        else:
            kept = [x for x in placed if is_kept(turns[x], turn)]
            # the last of those that come furthest
            parent = max(
                kept, key=lambda x: (len(turns[x]["prompt_messages"]), x), default=None
            )
            why = "messages"
        links.append(Link(parent, "root" if parent is None else why, len(placed)))
        placed.append(i)
    names = turn_indices(turns)
    return [
        {
            "turn_index": names[i],
            "parent": None if one.parent is None else names[one.parent],
            "link_reason": one.why,
            "order": one.order,
            "rewritten_by": None,
        }
        for i, one in enumerate(links)
    ]


def is_kept(before, turn):
    """Whether a request goes on from an earlier reply."""
    reply = before["response_message"]
    if before["prompt_messages"] is None or reply is None:
        return False
    if reply.get("role") != "assistant":
        return False
    if before.get("tools_key") != turn.get("tools_key"):
        return False
    path = [identity(one) for one in [*before["prompt_messages"], reply]]
    shown = [identity(one) for one in turn["prompt_messages"]][: len(path)]
    tokens = held(before)
    return shown == path and turn["prompt_ids"][: len(tokens)] == tokens

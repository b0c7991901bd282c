"""Tool calls that start sub-agents, and the messages that answer them."""

import re
from dataclasses import dataclass

import numpy as np

from trajkit._arrow import lazy_compute as pc
from trajkit.turns.calls import Ints, Longs
from trajkit.turns.message_equality import Classes
from trajkit.turns.messages import message_body, parse_json

# The JSON key that names the answered tool call, and the id in quotes.
_ANSWERS = re.compile(r'"tool_(?:call|use)_id":\s*("(?:[^"\\]|\\.)*")')


@dataclass(frozen=True, slots=True)
class Dispatches:
    """Tool calls that start sub-agents, numbered by their ids."""

    # shape (n_calls,): the last such tool call in each call's reply, or -1
    calls: Ints
    # shape (n_classes + 1,): class c answers ``answers[offsets[c]:offsets[c + 1]]``
    offsets: Longs
    answers: Ints


def find_dispatches(classes: Classes, tools: tuple[str, ...]) -> Dispatches:
    """The tool calls to ``tools`` in the replies, and the messages that answer them.

    The last of several in a reply counts. Nothing answers a tool call without an id
    (``pending_dispatch_id`` of slime's
    https://github.com/THUDM/slime/blob/b6764131d/examples/coding_agent_rl/middleware.py).
    """
    numbers: dict[str | None, int] = {}
    of_class = np.full(len(classes.bodies) + 1, -1, np.int32)  # [-1]: no reply
    replies = np.unique(classes.replies[classes.replies >= 0])
    if tools:
        bodies = classes.bodies.take(replies)
        # Only replies that may call one of the tools are parsed.
        names = "|".join(re.escape(_quoted(tool)) for tool in tools)
        calling = pc.match_substring_regex(bodies, rf'"name":\s*(?:{names})')
        for k, body in zip(
            replies[np.asarray(calling)],
            bodies.filter(calling).to_pylist(),
            strict=True,
        ):
            ids = [
                call for name, call in _tool_calls(parse_json(body)) if name in tools
            ]
            if ids:
                of_class[k] = numbers.setdefault(ids[-1], len(numbers))
    offsets = np.zeros(len(classes.bodies) + 1, np.int64)
    answers: list[int] = []
    quoted = {_quoted(call) for call in numbers if call is not None}
    if quoted:
        for k, body in enumerate(classes.bodies.to_pylist()):
            if not quoted.isdisjoint(_ANSWERS.findall(body)):
                found = {numbers.get(call, -1) for call in _answered(parse_json(body))}
                answers.extend(found - {-1})
            offsets[k + 1] = len(answers)
    return Dispatches(of_class[classes.replies], offsets, np.array(answers, np.int32))


def _quoted(text: str) -> str:
    """A string as message bodies contain it."""
    return message_body({"": text})[len('{"":') : -1]


def _tool_calls(message: object) -> list[tuple[object, str | None]]:
    """Name and id of a message's tool calls: ``tool_calls``, or blocks ``tool_use``."""
    found: list[tuple[object, str | None]] = []
    for call in _objects(message, "tool_calls"):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        found.append((name, _text(call.get("id"))))
    for block in _objects(message, "content"):
        if block.get("type") == "tool_use":
            found.append((block.get("name"), _text(block.get("id"))))
    return found


def _answered(message: object) -> list[str]:
    """Ids of the answered tool calls, from ``tool_call_id`` or ``tool_result`` blocks."""
    ids = [message.get("tool_call_id")] if isinstance(message, dict) else []
    for block in _objects(message, "content"):
        if block.get("type") == "tool_result":
            ids.append(block.get("tool_use_id"))
    return [call for call in ids if isinstance(call, str)]


def _objects(message: object, name: str) -> list[dict[str, object]]:
    """The objects in the list under a key of the message, if there is one."""
    values = message.get(name) if isinstance(message, dict) else None
    if not isinstance(values, list):
        return []
    return [value for value in values if isinstance(value, dict)]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None

"""Message equalities of policies other than equal keys.

Stored keys are equal exactly if Python calls the messages equal (`trajkit.turns.messages`).
Every other equality is a projection of a body onto what counts of it. It is computed once
per distinct body, and the kernels compare the classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.errors import InvalidTurnsError, MissingBodyError
from trajkit.policies import MessageEquality
from trajkit.schema import KEY_BYTES
from trajkit.schema.engine import field_of
from trajkit.tables.ragged import Array, Longs, codes
from trajkit.turns.messages import message_body, message_texts, parse_json
from trajkit.turns.sessions import Sessions

Message: TypeAlias = dict[str, object]
Projection: TypeAlias = Callable[[str], str]
"""Maps a body to a text that is equal if the messages are."""

# characters of a body in an error text
_SHOWN = 80


def with_equality(calls: Sessions, equality: MessageEquality) -> Sessions:
    """Replace the keys of requests so that equal messages have equal keys.

    Raises as `classify` for an equality that compares bodies.
    """
    return calls if equality == "values" else classify(calls, equality).keyed(calls)


@dataclass(frozen=True, slots=True)
class Classes:
    """The messages of calls, grouped by their body, or by what counts of it."""

    # a body of each class
    bodies: pa.Array
    # shape (n_places,): the class of each message that a request stores; -1: no body
    places: Longs
    # shape (n_calls,): the class of each reply; -1: no reply, or no body
    replies: Longs

    def keyed(self, calls: Sessions) -> Sessions:
        """The calls with the class as the first 8 bytes of each key, in native order."""
        n_places, n_calls = len(self.places), len(self.replies)
        keys = np.zeros((n_places + n_calls, KEY_BYTES // 8), np.int64)
        keys[:n_places, 0] = self.places
        keys[n_places:, 0] = self.replies
        address, sizes = keys.ctypes.data, np.maximum(calls.requests["n_keys"], 0)
        requests = calls.requests.copy()
        requests["keys"] = address + (np.cumsum(sizes) - sizes) * KEY_BYTES
        replies = address + (n_places + np.arange(n_calls)) * KEY_BYTES
        requests["reply_key"] = np.where(self.replies >= 0, replies, 0)
        return replace(calls, requests=requests, keys=keys)


def classify(calls: Sessions, equality: MessageEquality) -> Classes:
    """Group the messages of calls into classes of equal messages.

    Raises MissingBodyError if a message has no body, here or earlier in its session,
    and InvalidTurnsError if a body is parsed that is not a JSON object.
    """
    current = current_bodies(calls)
    both = np.concatenate([current.places, current.replies])
    lacking = both < 0
    lacking[len(current.places) :] &= calls.requests["reply_key"] != 0
    if lacking.any():
        raise MissingBodyError(
            f"{_place_of(calls, int(lacking.argmax()))} has no body, here or earlier in "
            "the session (rows filtered away?): the policy compares messages by their "
            "bodies"
        )
    project, texts = _PROJECTIONS[equality], []
    for number, body in enumerate(current.bodies.to_pylist()):
        try:
            texts.append(project(body))
        except ValueError as error:
            where = _place_of(calls, int(np.flatnonzero(both == number)[0]))
            shown = body if len(body) <= _SHOWN else f"{body[:_SHOWN]}..."
            raise InvalidTurnsError(
                f"{where} has the body {shown!r}, which is not a JSON object: {error}"
            ) from None
    class_of = codes(pa.array(texts, pa.string()))
    first = np.unique(class_of, return_index=True)[1]
    class_of = np.append(class_of, -1)  # so that -1, no reply, stays -1
    return Classes(
        current.bodies.take(pa.array(first)),
        class_of[current.places],
        class_of[current.replies],
    )


def current_bodies(calls: Sessions) -> Classes:
    """The body that each message of the calls refers to: its key's last one so far."""
    messages = [chunk.flatten() for chunk in calls.stored_messages.chunks]
    responses = calls.table.column("response").chunks
    shown, replied = (
        [field_of(chunk, "body") for chunk in chunks]
        for chunks in (messages, responses)
    )
    places = np.empty(sum(map(len, shown)), np.int64)
    replies = np.empty(calls.n_calls, np.int64)
    _core.find_bodies(
        calls.requests, calls.offsets, _valid(shown), _valid(replied), places, replies
    )
    bodies = pa.concat_arrays([pa.array([], pa.string()), *shown, *replied])
    encoded = bodies.dictionary_encode()
    body_at = np.append(np.asarray(encoded.indices.fill_null(-1), np.int64), -1)
    return Classes(encoded.dictionary, body_at[places], body_at[replies])


def _valid(chunks: list[pa.Array]) -> Array:
    """1 for each value that is not null."""
    parts = [np.asarray(chunk.is_valid()) for chunk in chunks]
    return np.concatenate([np.zeros(0, np.bool_), *parts]).view(np.uint8)


def _place_of(calls: Sessions, number: int) -> str:
    """A message's name in errors; numbers count stored messages, then replies."""
    sizes = np.maximum(calls.requests["n_keys"], 0)
    stops = np.cumsum(sizes)
    n_places = int(sizes.sum())
    if number >= n_places:
        return f"{calls.place(number - n_places)}: response"
    call = int(np.searchsorted(stops, number, side="right"))
    index = calls.requests["shared"][call] + number - stops[call] + sizes[call]
    return f"{calls.place(call)}: messages[{index}]"


def _message(body: str) -> Message:
    message = parse_json(body)
    if not isinstance(message, dict):
        raise ValueError(f"it is of type {type(message).__name__}")
    return message


def _text(body: str) -> str:
    """A body without ``cache_control`` at any depth."""
    if '"cache_control"' not in body:
        return body
    message = _message(body)
    within: list[object] = [message]
    for value in within:
        if isinstance(value, dict):
            value.pop("cache_control", None)
            within += value.values()
        elif isinstance(value, list):
            within += value
    return message_body(message)


def _values(body: str) -> str:
    """The identity text of a message."""
    return message_texts(_message(body)).identity


_COUNTED = {
    "role": "",
    "content": "",
    "reasoning_content": "assistant",
    "provider_state": "assistant",
    "tool_call_id": "tool",
}
"""The fields that `_content` compares, and the role that has them; "" is every role.

Tool calls are compared as well."""


def _content(body: str) -> str:
    """What counts of a message's role, text, reasoning and tool calls, as JSON."""
    message = _message(body)
    role = message.get("role")
    counted: Message = {}
    for name, its_role in _COUNTED.items():
        value = message.get(name)
        # "", null and a missing field are the same
        missing = value is None or (name == "content" and value == "")
        if not missing and its_role in ("", role):
            counted[name] = value
    calls = message.get("tool_calls")
    if role == "assistant" and isinstance(calls, list):
        counted["tool_calls"] = [_called(call) for call in calls]
    return message_body(counted)


def _called(call: object) -> object:
    """A tool call's id, name and arguments, parsed if they are JSON text."""
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    holder = function if isinstance(function, dict) else call
    arguments = holder.get("arguments")
    form = "parsed"
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments)
        except ValueError:
            form = "text"
    return [call.get("id"), holder.get("name"), {form: arguments}]


def _of_fields(*names: str) -> Projection:
    """Compare only these fields; None, "" and [] are the same as a missing field.

    The ``index`` of a tool call is ignored.
    """

    def project(body: str) -> str:
        message, counted = _message(body), {}
        for name in names:
            value = message.get(name)
            if name == "tool_calls" and isinstance(value, list):
                value = [_without_index(call) for call in value]
            if value is not None and value != "" and value != []:
                counted[name] = value
        return message_texts(counted).identity

    return project


def _without_index(call: object) -> object:
    if not isinstance(call, dict):
        return call
    return {name: value for name, value in call.items() if name != "index"}


_PROJECTIONS: dict[MessageEquality, Projection] = {
    "values": _values,
    "text": _text,
    "content": _content,
    "strict": _of_fields("role", "content", "reasoning_content", "tool_calls"),
    "role_content_only": _of_fields("role", "content"),
}
"""The equalities by name, as `trajkit.policies.Policy` describes them. 1 and 1.0 differ in
``text`` (``segments``) and ``content`` (``graph``); ``strict`` is that of ``miles``."""

"""Message equalities of policies other than equal keys.

Stored keys are equal exactly if Python calls the messages equal (`trajkit.turns.messages`).
Every other equality is a projection of a body onto what counts of it. It is computed once
per distinct body, and the kernels compare the classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.errors import InvalidTurnsError, MissingBodyError
from trajkit.policies import MessageEquality
from trajkit.schema import KEY_BYTES
from trajkit.tables import lazy_compute as pc
from trajkit.tables.ragged import Ints, Longs
from trajkit.turns.messages import message_body, message_texts, parse_json
from trajkit.turns.sessions import Sessions

Message: TypeAlias = dict[str, object]
Projection: TypeAlias = Callable[[str], str]
"""Maps a body to a text that is equal if the messages are."""

_KEY_WORDS = KEY_BYTES // 8
_CACHE_CONTROL = "cache_control"
# characters of a body in an error text
_SHOWN = 80


def with_equality(calls: Sessions, equality: MessageEquality) -> Sessions:
    """Replace the keys of requests so that equal messages have equal keys.

    Raises as `classify` for an equality that compares bodies.
    """
    return calls if equality == "values" else classify(calls, equality).keyed(calls)


@dataclass(frozen=True, slots=True)
class Classes:
    """The messages of calls, grouped into classes of equal messages."""

    # shape (n_classes,): a body of each class
    bodies: pa.Array
    # shape (n_places,): the class of each message that a request stores
    places: Longs
    # shape (n_calls,): the class of each reply, or -1
    replies: Longs

    def keyed(self, calls: Sessions) -> Sessions:
        """The calls with the class as the first 8 bytes of each key, in native order."""
        n_places, n_calls = len(self.places), len(self.replies)
        keys = np.zeros((n_places + n_calls, _KEY_WORDS), np.int64)
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
    _check_shown(calls, current)
    bodies = current.bodies
    if not len(bodies):
        return Classes(bodies, current.places, current.replies)
    project, texts = _PROJECTIONS[equality], []
    for number, body in enumerate(bodies.to_pylist()):
        try:
            texts.append(project(body))
        except ValueError as error:
            both = np.concatenate([current.places, current.replies])
            call, what = _place_of(calls, int(np.flatnonzero(both == number)[0]))
            shown = body if len(body) <= _SHOWN else f"{body[:_SHOWN]}..."
            raise InvalidTurnsError(
                f"{calls.place(call)}: {what} has the body {shown!r}, which is not a JSON "
                f"object: {error}"
            ) from None
    encoded = pa.array(texts, pa.string()).dictionary_encode()
    class_of = encoded.indices.to_numpy().astype(np.int64)
    first = np.unique(class_of, return_index=True)[1]
    class_of = np.append(class_of, -1)  # so that -1, no reply, stays -1
    return Classes(
        bodies.take(pa.array(first)),
        class_of[current.places],
        class_of[current.replies],
    )


@dataclass(frozen=True, slots=True)
class Bodies:
    """The body that each message of calls refers to: its key's last one so far."""

    # distinct
    bodies: pa.Array
    # shape (n_places,): the number of the body of each message that a request stores, or -1
    places: Longs
    # shape (n_calls,): the number of the body of each reply; -1: no reply, or no body
    replies: Longs


def current_bodies(calls: Sessions) -> Bodies:
    """The body that each message of the calls refers to."""
    messages = [chunk.flatten() for chunk in calls.stored_messages.chunks]
    responses = calls.table.column("response").chunks
    # unlike field(), this gives null for a null reply
    shown, replied = (
        [pc.struct_field(chunk, "body") for chunk in chunks]
        for chunks in (messages, responses)
    )
    has_body, reply_has_body = _valid(shown), _valid(replied)
    places = np.empty(len(has_body), np.int64)
    replies = np.empty(len(calls.requests), np.int64)
    _core.find_bodies(
        calls.requests, calls.offsets, has_body, reply_has_body, places, replies
    )
    encoded = pa.chunked_array([*shown, *replied], pa.string()).dictionary_encode()
    if not encoded.num_chunks:
        return Bodies(pa.array([], pa.string()), places, replies)
    body_at = np.concatenate([_numbers(chunk.indices) for chunk in encoded.chunks])
    body_at = np.append(body_at.astype(np.int64), -1)
    return Bodies(encoded.chunk(0).dictionary, body_at[places], body_at[replies])


def _numbers(indices: pa.Array) -> Ints:
    """The indices of a dictionary array; arbitrary for null."""
    data = indices.buffers()[1] or b""
    return np.frombuffer(data, np.int32, len(indices), 4 * indices.offset)


def _valid(chunks: list[pa.Array]) -> npt.NDArray[np.uint8]:
    """1 for each value that is not null."""
    parts = [np.zeros(0, np.uint8)]
    for chunk in chunks:
        valid = chunk.is_valid().to_numpy(zero_copy_only=False)
        parts.append(valid.astype(np.uint8))
    return np.concatenate(parts)


def _message(body: str) -> Message:
    message = parse_json(body)
    if not isinstance(message, dict):
        raise ValueError(f"it is of type {type(message).__name__}")
    return message


def _place_of(calls: Sessions, number: int) -> tuple[int, str]:
    """The call of a message and its name there; numbers count messages, then replies."""
    sizes = np.maximum(calls.requests["n_keys"], 0)
    stops = np.cumsum(sizes)
    n_places = int(sizes.sum())
    if number >= n_places:
        return number - n_places, "response"
    call = int(np.searchsorted(stops, number, side="right"))
    index = calls.requests["shared"][call] + number - stops[call] + sizes[call]
    return call, f"messages[{index}]"


def _check_shown(calls: Sessions, current: Bodies) -> None:
    bodiless = np.flatnonzero(current.places < 0)
    if len(bodiless):
        call, what = _place_of(calls, int(bodiless[0]))
    else:
        missing = (current.replies < 0) & (calls.requests["reply_key"] != 0)
        if not missing.any():
            return
        call, what = int(missing.argmax()), "response"
    raise MissingBodyError(
        f"{calls.place(call)}: {what} has no body, here or earlier in the session "
        "(rows filtered away?): the policy compares messages by their bodies"
    )


def _text(body: str) -> str:
    """A body without ``cache_control`` at any depth."""
    if f'"{_CACHE_CONTROL}"' not in body:
        return body
    message = _message(body)
    within: list[object] = [message]
    for value in within:
        if isinstance(value, dict):
            value.pop(_CACHE_CONTROL, None)
            within += value.values()
        elif isinstance(value, list):
            within += value
    return message_body(message)


def _values(body: str) -> str:
    """The identity text of a message."""
    return message_texts(_message(body)).identity


def _content(body: str) -> str:
    """What counts of a message's role, text, reasoning and tool calls, as JSON."""
    return message_body(_counted(_message(body)))


_COUNTED = {
    "role": "",
    "content": "",
    "reasoning_content": "assistant",
    "provider_state": "assistant",
    "tool_call_id": "tool",
}
"""The fields that `_content` compares, and the role that has them; "" is every role.

Tool calls are compared as well."""


def _counted(message: Message) -> Message:
    role = message.get("role")
    counted: Message = {}
    for name, its_role in _COUNTED.items():
        value = message.get(name)
        # "", null and a missing field are the same
        missing = value is None or (name == "content" and value == "")
        if not missing and its_role in ("", role):
            counted[name] = value
    if role == "assistant":
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            counted["tool_calls"] = [_called(call) for call in calls]
    return counted


def _called(call: object) -> object:
    """A tool call's id, name and arguments, parsed if they are JSON text."""
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    holder = function if isinstance(function, dict) else call
    arguments = holder.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = {"parsed": parse_json(arguments)}
        except ValueError:
            arguments = {"text": arguments}
    else:
        arguments = {"parsed": arguments}
    return [call.get("id"), holder.get("name"), arguments]


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
"""The equalities by name.

values
    Python's ``==``: key order does not matter, 1 == 1.0 == True.
text
    The same JSON text with sorted keys and without ``cache_control`` at any depth; 1 and
    1.0 differ (``segments``).
content
    The same role, content (null is the empty text), reasoning, provider state, tool calls
    (id, name, arguments as JSON values, whether given as text or not) and, of a tool's
    message, tool_call_id; other fields are ignored (``graph``). 1 and 1.0 differ.
strict
    Python's ``==`` of role, content, reasoning_content and tool_calls only, without the
    ``index`` of a tool call; None, "" and [] are the same (``miles``).
role_content_only
    As ``strict``, for role and content only.
"""

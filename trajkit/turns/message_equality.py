"""Message equalities of policies other than equal JSON.

The keys in a table are equal if the messages are the same JSON. Python's ``==`` compares
only their first bytes (see `trajkit.turns.messages`). Other equalities compute new keys
from the bodies, once per distinct body, and the kernels compare these.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.ragged import Ints, Longs
from trajkit.errors import InvalidTurnsError, MissingBodyError
from trajkit.policies import MessageEquality
from trajkit.schema import KEY_BYTES, VALUE_BYTES
from trajkit.turns.deep_json import parse
from trajkit.turns.sessions import Sessions

Identity: TypeAlias = Callable[[pa.Array], pa.Array]
"""Maps distinct bodies (strings) to texts that are equal if the messages are."""

_KEY_WORDS = KEY_BYTES // 8
_CACHE_CONTROL = "cache_control"
# characters of a body in an error text
_SHOWN = 80


def with_equality(calls: Sessions, equality: MessageEquality) -> Sessions:
    """Replace the keys of requests so that equal messages have equal keys.

    Raises as `classify` for an equality that compares bodies.
    """
    if equality == "values":
        return _by_value(calls)
    return classify(calls, identity_of(equality)).keyed(calls)


def _by_value(calls: Sessions) -> Sessions:
    """The calls with keys that are equal if Python's ``==`` is true of the messages."""
    if calls.keys is not None:
        return calls
    lists = calls.stored_messages
    chunks = [chunk.flatten() for chunk in lists.chunks]
    words = [
        np.frombuffer(keys.buffers()[1], np.int64, _KEY_WORDS * len(keys), start)
        for chunk in [*chunks, *calls.table.column("response").chunks]
        for keys in [chunk.field("key")]
        if len(keys)
        for start in [8 * _KEY_WORDS * keys.offset]
    ]
    # usually no message has a number that could have a simpler type
    if not any(part.view(np.int32)[3::4].any() for part in words):
        return calls
    keys = np.concatenate(words).reshape(-1, _KEY_WORDS)
    keys.view(np.uint8)[:, VALUE_BYTES:] = 0
    return _with_keys(calls, keys, calls.requests["reply_key"] != 0)


def _with_keys(
    calls: Sessions, keys: Longs, replied: npt.NDArray[np.bool_]
) -> Sessions:
    """The calls with other keys.

    ``keys`` has shape (n_messages + n_calls, 2): the messages that requests store, then
    the replies.
    """
    requests = calls.requests.copy()
    address = keys.ctypes.data
    sizes = np.maximum(requests["n_keys"], 0)
    requests["keys"] = address + (np.cumsum(sizes) - sizes) * KEY_BYTES
    replies = (
        address + (len(keys) - len(requests) + np.arange(len(requests))) * KEY_BYTES
    )
    requests["reply_key"] = np.where(replied, replies, 0)
    return replace(calls, requests=requests, keys=keys)


def identity_of(equality: MessageEquality) -> Identity:
    """The function that implements an equality."""
    return _IDENTITIES[equality]


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
        return _with_keys(calls, keys, self.replies >= 0)


def classify(calls: Sessions, identity: Identity) -> Classes:
    """Group the messages of calls into classes; ``identity`` gets each body once.

    Raises MissingBodyError if a message has no body, here or earlier in its session,
    and InvalidTurnsError if ``identity`` parses a body that is not a JSON object.
    """
    requests = calls.requests
    column = calls.stored_messages
    shown = [chunk.flatten() for chunk in column.chunks]
    said = calls.table.column("response").chunks
    # unlike field(), this gives null for a null reply
    shown, said = (
        [pc.struct_field(chunk, "body") for chunk in chunks] for chunks in (shown, said)
    )
    has_body, reply_has_body = _valid(shown), _valid(said)
    n_places = len(has_body)
    places = np.empty(n_places, np.int64)
    replies = np.empty(len(requests), np.int64)
    _core.find_bodies(
        requests,
        calls.offsets,
        has_body,
        reply_has_body,
        places,
        replies,
    )
    _check_shown(calls, places, replies)
    encoded = pa.chunked_array([*shown, *said], pa.string()).dictionary_encode()
    if not encoded.num_chunks or not len(encoded.chunk(0).dictionary):
        return Classes(pa.array([], pa.string()), places, replies)
    bodies = encoded.chunk(0).dictionary
    body_of = np.concatenate([_numbers(chunk.indices) for chunk in encoded.chunks])
    body_of[np.concatenate([has_body, reply_has_body]) == 0] = -1
    try:
        texts = identity(bodies)
    except _NoMessageError as error:
        where = int(np.flatnonzero(body_of == pc.index(bodies, error.body).as_py())[0])
        call, what = _place_of(calls, where)
        raise InvalidTurnsError(f"{calls.place(call)}: {what} {error}") from None
    if texts is bodies:  # distinct already
        class_of = np.arange(len(bodies))
    else:
        class_of = texts.dictionary_encode().indices.to_numpy().astype(np.int64)
        first = np.unique(class_of, return_index=True)[1]
        bodies = bodies.take(pa.array(first))
    class_at = np.append(class_of[body_of], -1)  # so that -1, no reply, stays -1
    return Classes(bodies, class_at[places], class_at[replies])


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


class _NoMessageError(ValueError):
    """A body is not a JSON object."""

    def __init__(self, body: str) -> None:
        shown = body if len(body) <= _SHOWN else f"{body[:_SHOWN]}..."
        super().__init__(f"has the body {shown!r}, which is not a JSON object")
        self.body = body


def _message(body: str) -> dict[str, object]:
    try:
        message = parse(body)
    except ValueError:
        raise _NoMessageError(body) from None
    if not isinstance(message, dict):
        raise _NoMessageError(body)
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


def _check_shown(calls: Sessions, places: Longs, replies: Longs) -> None:
    bodiless = np.flatnonzero(places < 0)
    if len(bodiless):
        call, what = _place_of(calls, int(bodiless[0]))
    else:
        missing = (replies < 0) & (calls.requests["reply_key"] != 0)
        if not missing.any():
            return
        call, what = int(missing.argmax()), "response"
    raise MissingBodyError(
        f"{calls.place(call)}: {what} has no body, here or earlier in the session "
        "(rows filtered away?): the policy compares messages by their bodies"
    )


def _text(bodies: pa.Array) -> pa.Array:
    """The bodies without ``cache_control`` at any depth."""
    # about thirty times faster than Arrow's search for plain text
    marked = pc.match_substring_regex(bodies, f'"{_CACHE_CONTROL}"')
    if not pc.any(marked).as_py():
        return bodies
    texts = [
        _without_cache_control(body) if found else body
        for body, found in zip(bodies.to_pylist(), marked.to_pylist(), strict=True)
    ]
    return pa.array(texts, bodies.type)


def _without_cache_control(body: str) -> str:
    """Canonical JSON of a body without ``cache_control`` at any depth."""
    message = _message(body)
    within: list[object] = [message]
    while within:
        value = within.pop()
        if isinstance(value, dict):
            value.pop(_CACHE_CONTROL, None)
            within.extend(value.values())
        elif isinstance(value, list):
            within.extend(value)
    text: str = _core.encode_message(message)[0]
    return text


def _values(bodies: pa.Array) -> pa.Array:
    """For each body, the text that is hashed into the first bytes of its key."""
    texts = [_core.encode_message(_message(body))[1] for body in bodies.to_pylist()]
    return pa.array(texts, bodies.type)


def _content(bodies: pa.Array) -> pa.Array:
    """For each body, its text, tool calls and tool_call_id as one JSON text."""
    plain = find_plain_bodies(bodies, tuple(_SAID), tuple(_SAID.values()))
    return _rewritten(
        bodies, plain, lambda body: _core.encode_message(_said(_message(body)))[0]
    )


def _rewritten(
    bodies: pa.Array, plain: npt.NDArray[np.bool_], text_of: Callable[[str], str]
) -> pa.Array:
    """The bodies, with those that are not plain replaced by their texts."""
    if plain.all():
        return bodies
    others = pa.array(~plain)
    texts = [text_of(body) for body in bodies.filter(others).to_pylist()]
    return pc.replace_with_mask(bodies, others, pa.array(texts, bodies.type))


_SAID = {
    "role": "",
    "content": "",
    "reasoning_content": "assistant",
    "provider_state": "assistant",
    "tool_call_id": "tool",
}
"""The fields that `_content` compares, and the role that has them; "" is every role.

Tool calls are compared as well."""


def _said(message: dict[str, object]) -> dict[str, object]:
    role = message.get("role")
    said: dict[str, object] = {}
    for name, its_role in _SAID.items():
        value = message.get(name)
        # "", null and a missing field are the same
        missing = value is None or (name == "content" and value == "")
        if not missing and its_role in ("", role):
            said[name] = value
    if role == "assistant":
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            said["tool_calls"] = [_called(call) for call in calls]
    return said


def _called(call: object) -> object:
    """A tool call's id, name and arguments, parsed if they are JSON text."""
    if not isinstance(call, dict):
        return call
    function = call.get("function")
    holder = function if isinstance(function, dict) else call
    arguments = holder.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = {"parsed": parse(arguments)}
        except ValueError:
            arguments = {"text": arguments}
    else:
        arguments = {"parsed": arguments}
    return [call.get("id"), holder.get("name"), arguments]


def _of_fields(*names: str) -> Identity:
    """Compare only these fields; None, "" and [] are the same as a missing field.

    The ``index`` of a tool call is ignored.
    """

    def identity(bodies: pa.Array) -> pa.Array:
        plain = find_plain_bodies(bodies, names)
        return _rewritten(bodies, plain, lambda body: text_of_fields(body, names))

    return identity


def find_plain_bodies(
    bodies: pa.Array, names: tuple[str, ...], roles: tuple[str, ...] = ()
) -> npt.NDArray[np.bool_]:
    """Whether a quick look shows that bodies contain only the named fields.

    Shape (n_bodies,). ``roles`` has one role per name, "" for every role; empty: every
    role for all names. Such a body equals its `text_of_fields`. Most bodies are plain,
    because the messages of models contain few numbers.
    """
    _, offsets, data = bodies.buffers()
    plain = np.empty(len(bodies), np.uint8)
    _core.find_plain(
        np.frombuffer(offsets, np.int32, len(bodies) + 1, 4 * bodies.offset),
        np.frombuffer(data or b"", np.uint8),
        _ended(*names),
        _ended(*roles or ("",) * len(names)),
        plain,
    )
    return plain.view(np.bool_)


def _ended(*names: str) -> npt.NDArray[np.uint8]:
    """Names as bytes, each followed by a zero."""
    return np.frombuffer("".join(f"{name}\0" for name in names).encode(), np.uint8)


def text_of_fields(body: str, names: tuple[str, ...]) -> str:
    """The named fields of a body that are not empty, as canonical JSON."""
    message = _message(body)
    said: dict[str, object] = {}
    for name in names:
        value = message.get(name)
        if name == "tool_calls" and isinstance(value, list):
            value = [_without_index(call) for call in value]
        if value is not None and value != "" and value != []:
            said[name] = value
    text: str = _core.encode_message(said)[1]
    return text


def _without_index(call: object) -> object:
    if not isinstance(call, dict):
        return call
    return {name: value for name, value in call.items() if name != "index"}


_IDENTITIES: dict[MessageEquality, Identity] = {
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

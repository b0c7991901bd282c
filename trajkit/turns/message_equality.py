"""Which messages a policy calls equal, where that is not the same JSON.

The keys that a table stores are equal where the messages are the same JSON. Python's
``==`` compares their first bytes alone (see `trajkit.turns.messages`). Under another
equality new keys are made from the bodies, once per distinct body. Whatever routes by
keys then works the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow import lazy_compute as pc
from trajkit.errors import InvalidTurnsError, MissingBodyError
from trajkit.policies import MessageEquality
from trajkit.schema import KEY_BYTES, VALUE_BYTES
from trajkit.turns.calls import Calls, Ints, Longs
from trajkit.turns.deep_json import parse

Identity: TypeAlias = Callable[[pa.Array], pa.Array]
"""Of distinct bodies (strings), texts that are equal where the messages are to be."""

_KEY_WORDS = KEY_BYTES // 8
_CACHE_CONTROL = "cache_control"
# characters of a body that an error shows
_SHOWN = 80


def rekeyed(calls: Calls, equality: MessageEquality) -> Calls:
    """The same calls, their requests with the keys of an equality.

    Raises
    ------
    MissingBodyError
        A message's body is nowhere in its session, and the equality asks for it.
    InvalidTurnsError
        A body that the equality looks into is no JSON object.
    """
    if equality == "values":
        return _by_value(calls)
    return classify(calls, identity_of(equality)).keyed(calls)


def _by_value(calls: Calls) -> Calls:
    """The calls, with keys that are equal where Python calls the messages equal."""
    if calls.keys is not None:
        return calls
    lists = calls.table.column("suffix_messages" if calls.is_delta else "messages")
    chunks = [chunk.flatten() for chunk in lists.chunks]
    words = [
        np.frombuffer(keys.buffers()[1] or b"", np.int64)[
            _KEY_WORDS * keys.offset : _KEY_WORDS * (keys.offset + len(keys))
        ]
        for chunk in [*chunks, *calls.table.column("response").chunks]
        for keys in [chunk.field("key")]
    ]
    # most messages have no number that could be written in a simpler type
    if not any(part.view(np.int32)[3::4].any() for part in words):
        return calls
    keys = np.concatenate(words).reshape(-1, _KEY_WORDS)
    keys.view(np.uint8)[:, VALUE_BYTES:] = 0
    return _with_keys(calls, keys, calls.requests["reply_key"] != 0)


def _with_keys(calls: Calls, keys: Longs, replied: npt.NDArray[np.bool_]) -> Calls:
    """The calls with other keys: of the messages that they bring, then of the replies.

    ``keys`` has shape (n_places + n_calls, 2).
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
    """What tells messages apart under an equality."""
    return _IDENTITIES[equality]


@dataclass(frozen=True, slots=True)
class Classes:
    """The messages of calls, sorted into classes of equal ones."""

    # shape (n_classes,): a body of each class
    bodies: pa.Array
    # shape (n_places,): the class of each message that the requests bring themselves
    places: Longs
    # shape (n_calls,): the class of each reply; -1: there is none
    replies: Longs

    def keyed(self, calls: Calls) -> Calls:
        """The calls, with keys that say the class: in their first 8 bytes, native order."""
        n_places, n_calls = len(self.places), len(self.replies)
        keys = np.zeros((n_places + n_calls, _KEY_WORDS), np.int64)
        keys[:n_places, 0] = self.places
        keys[n_places:, 0] = self.replies
        return _with_keys(calls, keys, self.replies >= 0)


def classify(calls: Calls, identity: Identity) -> Classes:
    """Sort the messages of calls into classes; ``identity`` sees each body once.

    Raises
    ------
    MissingBodyError
        A message's body is nowhere in its session up to its place.
    InvalidTurnsError
        A body that ``identity`` looks into is no JSON object.
    """
    requests = calls.requests
    column = calls.table.column("suffix_messages" if calls.is_delta else "messages")
    shown = [chunk.flatten() for chunk in column.chunks]
    said = calls.table.column("response").chunks
    # unlike field(), this is null under a reply that is null
    shown, said = (
        [pc.struct_field(chunk, "body") for chunk in chunks] for chunks in (shown, said)
    )
    has_body, reply_has_body = _valid(shown), _valid(said)
    n_places = len(has_body)
    n_table = _core.body_table(requests, calls.session_offsets, has_body)
    places = np.empty(n_places, np.int64)
    replies = np.empty(len(requests), np.int64)
    _core.find_bodies(
        requests,
        calls.session_offsets,
        has_body,
        reply_has_body,
        np.empty((n_table, 2), np.int64),
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
    """The numbers of a dictionary array; any number stands where there is none."""
    data = indices.buffers()[1] or b""
    return np.frombuffer(data, np.int32, len(indices), 4 * indices.offset)


def _valid(chunks: list[pa.Array]) -> npt.NDArray[np.uint8]:
    """1 where the values of chunks are not null."""
    parts = [np.zeros(0, np.uint8)]
    for chunk in chunks:
        valid = chunk.is_valid().to_numpy(zero_copy_only=False)
        parts.append(valid.astype(np.uint8))
    return np.concatenate(parts)


class _NoMessageError(ValueError):
    """A body is no JSON object."""

    def __init__(self, body: str) -> None:
        shown = body if len(body) <= _SHOWN else f"{body[:_SHOWN]}..."
        super().__init__(f"has the body {shown!r}, which is no JSON object")
        self.body = body


def _message(body: str) -> dict[str, object]:
    try:
        message = parse(body)
    except ValueError:
        raise _NoMessageError(body) from None
    if not isinstance(message, dict):
        raise _NoMessageError(body)
    return message


def _place_of(calls: Calls, number: int) -> tuple[int, str]:
    """The call of a message, and what it is there: own messages first, then replies."""
    sizes = np.maximum(calls.requests["n_keys"], 0)
    stops = np.cumsum(sizes)
    n_places = int(sizes.sum())
    if number >= n_places:
        return number - n_places, "response"
    call = int(np.searchsorted(stops, number, side="right"))
    index = calls.requests["shared"][call] + number - stops[call] + sizes[call]
    return call, f"messages[{index}]"


def _check_shown(calls: Calls, places: Longs, replies: Longs) -> None:
    bodiless = np.flatnonzero(places < 0)
    if len(bodiless):
        call, what = _place_of(calls, int(bodiless[0]))
    else:
        silent = (replies < 0) & (calls.requests["reply_key"] != 0)
        if not silent.any():
            return
        call, what = int(silent.argmax()), "response"
    raise MissingBodyError(
        f"{calls.place(call)}: {what} has no body, here or earlier in the session "
        "(rows filtered away?): the policy compares messages by their bodies"
    )


def _text(bodies: pa.Array) -> pa.Array:
    """The bodies without any ``cache_control``."""
    # some thirty times faster than Arrow's search for plain text
    marked = pc.match_substring_regex(bodies, f'"{_CACHE_CONTROL}"')
    if not pc.any(marked).as_py():
        return bodies
    texts = [
        _without_cache_control(body) if found else body
        for body, found in zip(bodies.to_pylist(), marked.to_pylist(), strict=True)
    ]
    return pa.array(texts, bodies.type)


def _without_cache_control(body: str) -> str:
    """Canonical JSON without the keys ``cache_control``, at any depth."""
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
    """Of each body, the text that the first bytes of its key are the digest of."""
    texts = [_core.encode_message(_message(body))[1] for body in bodies.to_pylist()]
    return pa.array(texts, bodies.type)


def _content(bodies: pa.Array) -> pa.Array:
    """Of each body, what a message says, calls and answers, as one JSON text."""
    plain = find_plain_bodies(bodies, tuple(_SAID), tuple(_SAID.values()))
    return _rewritten(
        bodies, plain, lambda body: _core.encode_message(_said(_message(body)))[0]
    )


def _rewritten(
    bodies: pa.Array, plain: npt.NDArray[np.bool_], text_of: Callable[[str], str]
) -> pa.Array:
    """The bodies, those that are not plain as the texts that stand for them."""
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
"""What `_content` takes of a message as it is, and of which role's; calls come beside."""


def _said(message: dict[str, object]) -> dict[str, object]:
    role = message.get("role")
    said: dict[str, object] = {}
    for name, its_role in _SAID.items():
        value = message.get(name)
        # nothing said is "" or null, or no field at all
        silent = value is None or (name == "content" and value == "")
        if not silent and its_role in ("", role):
            said[name] = value
    if role == "assistant":
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            said["tool_calls"] = [_called(call) for call in calls]
    return said


def _called(call: object) -> object:
    """A tool call's id, name and arguments; arguments that are JSON text, parsed."""
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
    """The named fields alone; None, "" and [] are one, like a field that is absent.

    The ``index`` of a tool call does not count.
    """

    def identity(bodies: pa.Array) -> pa.Array:
        plain = find_plain_bodies(bodies, names)
        return _rewritten(bodies, plain, lambda body: text_of_fields(body, names))

    return identity


def find_plain_bodies(
    bodies: pa.Array, names: tuple[str, ...], roles: tuple[str, ...] = ()
) -> npt.NDArray[np.bool_]:
    """Which bodies hold nothing but named fields, as far as a glance tells.

    Shape (n_bodies,). Of ``roles``, one per name, "" is any role; no roles are any. Such
    bodies are what `text_of_fields` makes of them; most are: a model's messages hold few
    numbers.
    """
    _, offsets, data = bodies.buffers()
    plain = np.empty(len(bodies), np.uint8)
    _core.find_plain(
        np.frombuffer(offsets, np.int32, len(bodies) + 1, 4 * bodies.offset),
        np.frombuffer(data or b"", np.uint8),
        _ended(*names),
        _ended(*roles or ("",) * len(names)),
        _ended("index"),
        plain,
    )
    return plain.view(np.bool_)


def _ended(*names: str) -> npt.NDArray[np.uint8]:
    """Names as bytes, each with a zero behind it."""
    return np.frombuffer("".join(f"{name}\0" for name in names).encode(), np.uint8)


def text_of_fields(body: str, names: tuple[str, ...]) -> str:
    """The named fields that a body has and that are not empty, as canonical JSON."""
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
"""What each name stands for.

values
    Python's ``==``: key order does not matter, 1 == 1.0 == True.
text
    The same JSON text with keys sorted and every ``cache_control`` left out, at any
    depth; 1 and 1.0 differ (spec: segments 1).
content
    The same role, content (null is the empty text), reasoning, provider state, tool calls
    (id, name, arguments as JSON values, whether given as text or not) and, of a tool's
    message, tool_call_id; nothing else counts (spec: prime-rl 2.2). 1 and 1.0 differ.
strict
    Python's ``==`` of role, content, reasoning_content and tool_calls alone, without the
    ``index`` of a tool call; None, "" and [] are one (spec: miles 1.2).
role_content_only
    The same of role and content.
"""

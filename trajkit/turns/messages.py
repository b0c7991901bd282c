"""Chat messages: their identity, their body, and storage of distinct messages.

Two messages are the same exactly when Python's ``==`` is true of their dicts: key order
does not matter, list order does, a missing key is not a null, 1 == 1.0 == True, and "1" is
another value. NaN equals NaN.

The *body* of a message is its JSON with sorted keys and its numbers as they are. The
*identity text* has each number in its simplest type, an integer where it can be one; most
messages have no number, and both texts are the same. The *key* is the 128-bit digest of
the identity text. So messages that differ in 1 and 1.0 alone have one key and two bodies.
"""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import eq
from typing import NamedTuple

import numpy as np
import orjson
import pyarrow as pa

from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema import KEY_BYTES, MESSAGE, TURNS
from trajkit.tables.ragged import Bools, Ints, Longs, Ragged, offsets_of

# Types that orjson and the standard library write alike, in one way only.
_WRITTEN_ALIKE = {str, type(None), dict, list, int}
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, sort_keys=True, separators=(",", ":"), check_circular=False
)


def message_key(message: dict[str, object]) -> bytes:
    """The 16-byte key: the same for messages that are ``==``; see `message_record`."""
    return message_record(message)[0]


def message_body(message: dict[str, object]) -> str:
    """JSON with sorted keys, no white space, in valid UTF-8; see `message_record`.

    Two lone surrogates side by side are written as the pair that they look like; their
    key is still their own.
    """
    return message_record(message)[1]


def message_record(message: dict[str, object]) -> tuple[bytes, str]:
    """The key and the body of a chat message, read once.

    Parameters
    ----------
    message : dict
        Of JSON values throughout.

    Returns
    -------
    tuple of bytes and str
        What `message_key` and `message_body` give.

    Raises
    ------
    ArgumentError
        It is no dict.
    InvalidTurnsError
        The message contains a value that JSON cannot express, and the text names its path;
        or it is nested deeper than Python's recursion limit.
    """
    texts = message_texts(message)
    return _digest(texts.identity), texts.body


def tools_key(tools: list[dict[str, object]]) -> str:
    """The key of the tools that a request offers: the same for tools of the same JSON.

    It is that of the columns `trajkit.schema.ROUTING`. A null is the same as a missing
    field, as in verifiers
    (https://github.com/PrimeIntellect-ai/verifiers/blob/v0.4.0/verifiers/v1/graph.py).

    Parameters
    ----------
    tools : list of dict
        Of JSON values throughout; empty for a request without tools.

    Returns
    -------
    str

    Raises
    ------
    ArgumentError
        ``tools`` is no list of dicts.
    InvalidTurnsError
        As for `message_record`.
    """
    if not isinstance(tools, list) or not all(isinstance(one, dict) for one in tools):
        raise ArgumentError(f"tools={tools!r}: expected a list of dicts")
    try:
        return message_key({"tools": _without_nulls(tools)}).hex()
    except RecursionError:
        raise InvalidTurnsError("tools are nested too deep for a key") from None


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


class Texts(NamedTuple):
    """The two texts of a message."""

    identity: str
    body: str
    # no number and no truth value: what is == has the same body
    is_plain: bool


def message_texts(message: dict[str, object]) -> Texts:
    """The identity text and the body of a message; raises as `message_record`."""
    if not isinstance(message, dict):
        raise ArgumentError(
            f"message is of type {type(message).__name__}: expected a dict"
        )
    try:
        text = orjson.dumps(message, option=orjson.OPT_SORT_KEYS)
    except TypeError:  # big integers, lone surrogates, more than 254 levels, no JSON
        text = b""
    if text and (types := _types_in(message)) <= _WRITTEN_ALIKE:
        body = text.decode()
        return Texts(body, body, int not in types)
    try:
        # read once, so that both texts agree whatever the caller's own classes do
        copy = _copied(message)
        identity, body = map(_ENCODER.encode, (_simplest(copy, ()), copy))
        return Texts(with_escapes(identity), with_escapes(body), False)
    except RecursionError:
        raise InvalidTurnsError("is nested too deep, or holds itself") from None


def _digest(identity: str) -> bytes:
    return blake2b(identity.encode(), digest_size=KEY_BYTES).digest()


def _types_in(message: dict[str, object]) -> set[type]:
    """The types of a message and of all values in it; of containers, exact types only.

    Another type than exactly dict or list is not looked into.
    """
    types: set[type] = {type(message)}
    within: list[dict[str, object] | list[object]] = []
    if type(message) is dict:
        within.append(message)
    for container in within:
        values = container.values() if type(container) is dict else container
        for value in values:
            kind = type(value)
            if kind is not str:
                types.add(kind)
                if kind is dict or kind is list:
                    within.append(value)  # type: ignore[arg-type]
    return types


def _copied(value: object) -> object:
    """A value whose objects and lists are a dict and a list."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _simplest(value: object, path: tuple[object, ...]) -> object:
    """A copy of a JSON value with each number in its simplest type."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        for name in value:
            if not isinstance(name, str):
                raise _refusal(path, f"has the key {name!r}: JSON keys are strings")
        return {name: _simplest(one, (*path, name)) for name, one in value.items()}
    if isinstance(value, list):
        return [_simplest(one, (*path, at)) for at, one in enumerate(value)]
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, int):
        try:
            int.__repr__(value)
        except ValueError:  # the interpreter's limit
            raise _refusal(path, "is an integer of too many digits") from None
        return int(value)
    raise _refusal(path, f"is of type {type(value).__name__}: no JSON value")


def _refusal(path: tuple[object, ...], reason: str) -> InvalidTurnsError:
    """The error for a value, named by its path in the message."""
    steps = [f"[{step!r}]" for step in path]
    if len(steps) > 12:  # a path of hundreds of steps helps nobody
        steps = [*steps[:6], f"... {len(steps) - 12} levels ...", *steps[-6:]]
    return InvalidTurnsError("".join(steps) + (" " if steps else "") + reason)


def with_escapes(text: str) -> str:
    """JSON with its lone surrogates escaped, so that UTF-8 can encode it."""
    if text.isascii():
        return text
    # a surrogate occurs only within a JSON string, where its escape means the same
    return _SURROGATE.sub(lambda one: f"\\u{ord(one[0]):04x}", text)


class TooDeepError(json.JSONDecodeError):
    """A JSON text is nested deeper than Python's recursion limit."""


def parse_json(text: str) -> object:
    """As ``json.loads``, but raises TooDeepError, a ValueError, for a RecursionError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise TooDeepError("nested too deep", text, 0) from None


class Encoded(NamedTuple):
    """A message as a table stores it."""

    key: bytes
    role: str
    # None: only the key is known
    body: str | None
    # as in `Texts`
    is_plain: bool


def encode(message: object, where: str) -> Encoded:
    """A chat message with its key and body; ``where`` is its name in error texts.

    Raises `InvalidTurnsError` if it is no dict with a ``role``, or is not all JSON.
    """
    if not isinstance(message, dict):
        raise InvalidTurnsError(
            f"{where} is of type {type(message).__name__}: expected a dict"
        )
    role = message.get("role")
    if not isinstance(role, str):
        has = f"the role {role!r}" if "role" in message else "no role"
        raise InvalidTurnsError(f"{where} has {has}: expected a string")
    check_text(role, f"{where} role")
    try:
        identity, body, is_plain = message_texts(message)
    except InvalidTurnsError as error:
        gap = "" if str(error).startswith("[") else " "
        raise InvalidTurnsError(f"{where}{gap}{error}") from None
    return Encoded(_digest(identity), role, body, is_plain)


def check_text(text: str, where: str) -> None:
    """Raise InvalidTurnsError unless UTF-8 can encode the text."""
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidTurnsError(
                f"{where} {text!r} is not valid Unicode: {error.reason}"
            ) from None


class _WithNumbers:
    """A message that is not plain; it equals those that are ``==`` and have its body."""

    __slots__ = ("_message", "_text")
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, message: object) -> None:
        self._message, self._text = message, _quickly_written(message)

    def __eq__(self, other: object) -> bool:
        # NaN and null are written alike, but are not ==
        return (
            self._message == other
            and self._text is not None
            and self._text == _quickly_written(other)
        )


def _quickly_written(message: object) -> bytes | None:
    """JSON with keys in their own order; None if only the standard library writes it."""
    try:
        return orjson.dumps(message)
    except TypeError:
        return None


def comparable(message: object, is_plain: bool) -> object:
    """An object that is ``==`` to messages with the same body alone."""
    return message if is_plain else _WithNumbers(message)


def unequal_places(messages: Sequence[object], others: Iterable[object]) -> list[int]:
    """The places of messages that are not ``==`` to the other one there, ascending.

    Where there is no other one, they are not. The others are `comparable`.
    """
    try:
        equal = list(map(eq, messages, others))
        unequal = [] if all(equal) else [k for k, same in enumerate(equal) if not same]
    except Exception:  # any object's own, such as an array's that has no truth value
        equal, unequal = [], []
    return [*unequal, *range(len(equal), len(messages))]


@dataclass(slots=True)
class MessageBook:
    """Every distinct body of some calls, under a small id, in order of arrival."""

    messages: list[Encoded] = field(default_factory=list)
    # ids by body, and by key and role
    _numbers: dict[object, int] = field(default_factory=dict)
    # the first id with a body, by key
    _first: dict[bytes, int] = field(default_factory=dict)
    # ids of bodies whose key has another body as well, and the first id of that key
    respelled: dict[int, int] = field(default_factory=dict)

    def add(self, message: Encoded) -> int:
        """The id of a message; one with a body replaces one without."""
        name = message.body
        number = self._numbers.get(
            (message.key, message.role) if name is None else name, -1
        )
        if number < 0:
            number = len(self.messages)
            self.messages.append(message)
            self._numbers[message.key, message.role] = number
            if message.body is not None:
                self._numbers[message.body] = number
                first = self._first.setdefault(message.key, number)
                if first != number:
                    self.respelled[first] = self.respelled[number] = first
        return number

    def columns(
        self, ids: Ints, lengths: Longs | Ints, responses: Ints, sessions: Ints
    ) -> tuple[pa.Array, pa.Array]:
        """The columns messages and response of turns that are sorted by session.

        ``ids`` are the messages of all turns, end to end, and ``lengths`` their number in
        each turn (-1: no list); ``responses`` are messages (-1: none), ``sessions``
        numbers.
        """
        null = lengths < 0
        offsets = offsets_of(np.where(null, 0, lengths))
        n_turns, n = len(lengths), len(ids)
        # in order of time: the messages of a turn, then its response
        stops = offsets[1:] + np.arange(n_turns)
        at = np.ones(n + n_turns, np.bool_)
        at[stops] = False
        in_time = np.empty(n + n_turns, np.int32)
        in_time[at], in_time[stops] = ids, responses
        owners = np.repeat(sessions, np.diff(stops, prepend=-1))
        known = in_time >= 0
        first = np.zeros(n + n_turns, np.bool_)
        first[known] = self.shown(in_time[known], owners[known])
        structs = self._array(
            np.concatenate([ids, responses]), np.concatenate([first[at], first[stops]])
        )
        lists = Ragged(structs[:n], offsets)
        return lists.to_arrow(null, TURNS.field("messages").type), structs[n:]

    def shown(self, ids: Ints, sessions: Ints) -> Bools:
        """Whether the body of each message is written: its key last had none, or another.

        Messages are in the order of their sessions (prompt, reply, next prompt, ...).
        """
        messages = pa.array(sessions * np.int64(len(self.messages)) + ids)
        # numbered in order of appearance, so a new one exceeds all before it
        numbers = messages.dictionary_encode().indices.to_numpy()
        new: Bools = np.diff(np.maximum.accumulate(numbers), prepend=-1) > 0
        if self.respelled:
            first = np.full(len(self.messages), -1)
            first[[*self.respelled]] = [*self.respelled.values()]
            at = np.flatnonzero(first[ids] >= 0)
            key = np.stack([sessions[at], first[ids[at]]])
            order = np.lexsort(key)
            at, key = at[order], key[:, order]
            again = (np.diff(key, prepend=-1) == 0).all(axis=0)
            new[at] = ~again | (np.diff(ids[at], prepend=-1) != 0)
        return new

    def _array(self, ids: Ints, shown: Bools) -> pa.StructArray:
        """The messages as the schema's struct: null for -1, a body only where shown."""
        # an id of -1 takes the last key
        keys = b"".join([*(message.key for message in self.messages), bytes(KEY_BYTES)])
        words = pa.py_buffer(np.frombuffer(keys, f"V{KEY_BYTES}")[ids])
        roles = pa.array([message.role for message in self.messages], pa.string())
        bodies = pa.array([message.body for message in self.messages], pa.string())
        absent = ids < 0
        return pa.StructArray.from_arrays(
            [
                pa.Array.from_buffers(pa.binary(KEY_BYTES), len(ids), [None, words]),
                roles.take(pa.array(ids, mask=absent)),
                bodies.take(pa.array(ids, mask=~shown)),
            ],
            fields=list(MESSAGE),
            mask=pa.array(absent) if absent.any() else None,
        )

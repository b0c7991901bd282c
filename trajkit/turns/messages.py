"""Chat messages: their identity, their body, storage of distinct ones, and equalities.

Two messages are the same exactly when Python's ``==`` is true of their dicts: key order
does not matter, list order does, a missing key is not a null, 1 == 1.0 == True, and "1" is
another value. NaN equals NaN.

The *body* of a message is its JSON with sorted keys and its numbers as they are. The
*identity text* has each number in its simplest type, an integer where it can be one; most
messages have no number, and both texts are the same. The *key* is the 128-bit digest of
the identity text. So messages that differ in 1 and 1.0 alone have one key and two bodies.

Every other equality of a policy is a projection of a body onto what counts of it. It is
computed once per distinct body, and the kernels compare the classes.
"""

import json
import re
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from operator import eq
from typing import NamedTuple, TypeAlias

import numpy as np
import orjson
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import CALL
from trajkit.errors import ArgumentError, InvalidTurnsError, MissingBodyError
from trajkit.policies import MessageEquality
from trajkit.schema import KEY_BYTES, MESSAGE, TURNS
from trajkit.schema.engine import field_of
from trajkit.tables.ragged import (
    Bools,
    Ints,
    Longs,
    Ragged,
    Records,
    codes,
    combined,
    offsets_of,
)
from trajkit.turns.sessions import Forest, Sessions

Message: TypeAlias = dict[str, object]
Projection: TypeAlias = Callable[[str], str]
"""Maps a body to a text that is equal if the messages are."""

# Types that orjson and the standard library write alike, in one way only.
_WRITTEN_ALIKE = {str, type(None), dict, list, int}
_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODER = json.JSONEncoder(
    ensure_ascii=False, sort_keys=True, separators=(",", ":"), check_circular=False
)
_NO_MESSAGE = object()
KEY_TOKENS = KEY_BYTES // 4
"""Tokens of a message in a path, see `grow_messages`."""
# characters of a body in an error text
_SHOWN = 80


def message_key(message: Message) -> bytes:
    """The 16-byte key: the same for messages that are ``==``; see `message_record`."""
    return message_record(message)[0]


def message_record(message: Message) -> tuple[bytes, str]:
    """The key and the body of a chat message, read once.

    Parameters
    ----------
    message : dict
        Of JSON values throughout.

    Returns
    -------
    tuple of bytes and str
        What `message_key` gives, and JSON with sorted keys, no white space, in valid UTF-8.
        Two lone surrogates side by side are written as the pair that they look like; their
        key is still their own.

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


def tools_key(tools: list[Message]) -> str:
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


def message_texts(message: Message) -> Texts:
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


def _types_in(message: Message) -> set[type]:
    """The exact types of a message and of all values in its dicts and lists."""
    types: set[type] = {type(message)}
    within: list[Message | list[object]] = [message] if type(message) is dict else []
    for container in within:
        for value in container.values() if type(container) is dict else container:
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


def tool_calls_of(message: object) -> list[tuple[object, object]]:
    """Name and id of a message's tool calls: ``tool_calls``, or blocks ``tool_use``."""
    found = []
    for call in objects_in(message, "tool_calls"):
        function = call.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        found.append((name, call.get("id")))
    for block in objects_in(message, "content"):
        if block.get("type") == "tool_use":
            found.append((block.get("name"), block.get("id")))
    return [(name, call if isinstance(call, str) else None) for name, call in found]


def objects_in(message: object, name: str) -> list[dict[str, object]]:
    values = message.get(name) if isinstance(message, dict) else None
    listed = values if isinstance(values, list) else []
    return [value for value in listed if isinstance(value, dict)]


class Encoded(NamedTuple):
    """A message as a table stores it."""

    key: bytes
    role: str
    # None: only the key is known
    body: str | None
    # as in `Texts`
    is_plain: bool


def encode(message: object, where: str) -> Encoded:
    """A chat message with key and body; ``where`` is its name in error texts."""
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
    try:
        if not text.isascii():
            text.encode()
    except UnicodeEncodeError as error:
        raise InvalidTurnsError(
            f"{where} {text!r} is not valid Unicode: {error.reason}"
        ) from None


def comparable(message: object, is_plain: bool) -> object:
    """An object that is ``==`` to messages with the same body alone.

    One with numbers is ``==`` to messages with other bodies, so it is equal to none.
    """
    return message if is_plain else _NO_MESSAGE


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
    # by id: a copy as `comparable`
    copies: list[object] = field(default_factory=list)
    # ids by body, or by key and role
    _numbers: dict[object, int] = field(default_factory=dict)
    # the first id with a body, by key
    _first: dict[bytes, int] = field(default_factory=dict)
    # ids of bodies whose key has another body as well, and the first id of that key
    respelled: dict[int, int] = field(default_factory=dict)

    def add(self, message: Encoded, copy: object = None) -> int:
        """The id of a message; ``copy`` is what others are compared with."""
        body = message.body
        name = (message.key, message.role) if body is None else body
        number = self._numbers.get(name, -1)
        if number < 0:
            number = len(self.messages)
            # in the place of one that was interrupted
            self.copies[number:] = [copy]
            self.messages.append(message)
            self._numbers[name] = number
            if body is not None:
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
        null, n = lengths < 0, len(ids)
        offsets = offsets_of(np.where(null, 0, lengths))
        # in order of time: the messages of a turn, then its response
        in_time, ends = np.insert(ids, offsets[1:], responses), offsets[1:]
        owners = np.repeat(sessions, np.diff(offsets) + 1)
        is_reply = np.zeros(len(in_time), np.bool_)
        is_reply[ends + np.arange(len(lengths))] = True
        known, first = in_time >= 0, np.zeros(len(in_time), np.bool_)
        first[known] = self.shown(in_time[known], owners[known])
        shown = np.append(first[~is_reply], first[is_reply])
        structs = self._array(np.append(ids, responses), shown)
        lists = Ragged(structs[:n], offsets)
        return lists.to_arrow(null, TURNS.field("messages").type), structs[n:]

    def shown(self, ids: Ints, sessions: Ints) -> Bools:
        """Whether the body of each message is written: its key last had none, or another.

        Messages are in the order of their sessions (prompt, reply, next prompt, ...).
        """
        key_of = np.arange(len(self.messages))
        key_of[[*self.respelled]] = [*self.respelled.values()]
        keys = np.stack([sessions, key_of[ids]])
        order = np.lexsort(keys)
        again = (np.diff(keys[:, order], prepend=-1) == 0).all(axis=0)
        new = np.empty(len(ids), np.bool_)
        new[order] = ~again | (np.diff(ids[order], prepend=-1) != 0)
        return new

    def _array(self, ids: Ints, shown: Bools) -> pa.StructArray:
        """The messages as the schema's struct: null for -1, a body only where shown."""
        # an id of -1 takes the last key
        keys = b"".join([*(message.key for message in self.messages), bytes(KEY_BYTES)])
        words = pa.py_buffer(np.frombuffer(keys, f"V{KEY_BYTES}")[ids])
        roles = pa.array([message.role for message in self.messages], pa.string())
        bodies = pa.array([message.body for message in self.messages], pa.string())
        absent = ids < 0
        fields = [
            pa.Array.from_buffers(pa.binary(KEY_BYTES), len(ids), [None, words]),
            roles.take(pa.array(ids, mask=absent)),
            bodies.take(pa.array(ids, mask=~shown)),
        ]
        mask = pa.array(absent) if absent.any() else None
        return pa.StructArray.from_arrays(fields, fields=list(MESSAGE), mask=mask)


Numbers: TypeAlias = "array[int]"
"""Messages by number."""

Read: TypeAlias = tuple[Encoded, object]
"""A message, and a copy that the caller cannot change, to compare others with."""

ReadCall: TypeAlias = "tuple[Numbers, Numbers | None, dict[int, Read], Read | None]"
"""The messages of a call that is not added yet: the path of its base; its own messages, of
which those at the places of the third part are not numbered yet (None: no list); these
messages by place; and its reply."""


class CallMessages(NamedTuple):
    """The messages of a call."""

    # None: no list
    numbers: "Numbers | None"
    # -1: none
    reply: int
    # leading messages that the messages and the reply of the base begin with
    shared: int

    def path(self) -> Numbers:
        """The messages and the reply; empty for a call without a list."""
        replied = self.numbers is not None and self.reply >= 0
        return (self.numbers or array("i")) + array("i", [self.reply] * replied)

    def own(self) -> memoryview:
        return memoryview(self.numbers or array("i"))[self.shared :]


def counts_of(calls: Sequence[CallMessages]) -> tuple[Ints, Ints]:
    """The messages that the base of each call does not supply.

    First, of shape (n_calls, 3): how many the base supplies, how many it does not
    (-1: the call has no list of messages), and the reply (-1: none). Then those it
    does not, end to end.
    """
    own = [one.own() for one in calls]
    counts = [
        (one.shared, -1 if one.numbers is None else len(mine), one.reply)
        for one, mine in zip(calls, own, strict=True)
    ]
    return np.array(counts, np.int32).reshape(-1, 3), np.frombuffer(
        b"".join(own), np.int32
    )


def not_listed(messages: object) -> InvalidTurnsError:
    return InvalidTurnsError(
        f"prompt_messages is of type {type(messages).__name__}: expected a list of dicts"
    )


@dataclass(slots=True)
class MessageLog:
    """The messages of a session's calls.

    A message that occurred before is compared with a copy, as Python compares dicts, and
    not encoded again.
    """

    # the distinct messages, with their numbers; sessions may have one book together
    book: MessageBook = field(default_factory=MessageBook)
    calls: list[CallMessages] = field(default_factory=list)

    def read(
        self, messages: object, response: object, base: int, n_calls: int
    ) -> ReadCall:
        """The messages of the next call, compared with those of its base or, without one,
        of the last call.

        Nothing changes until they are added.
        """
        numbers, others, known = None, {}, array("i")
        if messages is not None:
            if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
                raise not_listed(messages)
            listed, near = list(messages), base if base >= 0 else n_calls - 1
            known = self.calls[near].path() if near >= 0 else known
            copies = map(self.book.copies.__getitem__, known)
            places = unequal_places(listed, copies)
            numbers = known[: len(listed)]
            numbers.extend([-1] * (len(listed) - len(numbers)))
            others = {i: self._read(listed[i], f"prompt_messages[{i}]") for i in places}
        reply = None if response is None else self._read(response, "response_message")
        return known if base >= 0 else array("i"), numbers, others, reply

    def add(self, read: ReadCall, call: int) -> None:
        """Add the messages of a call, in the place of one that was interrupted.

        Those of earlier calls were added before.
        """
        base, numbers, others, response = read
        for place, other in others.items():
            numbers[place] = self.book.add(*other)  # type: ignore[index]
        reply, shared = -1 if response is None else self.book.add(*response), 0
        if numbers is not None:
            shared = self._n_current(numbers, _core.lcp(numbers, base), call)
        self.calls[call:] = [CallMessages(numbers, reply, shared)]

    def _n_current(self, numbers: Numbers, n: int, call: int) -> int:
        """How many of the first n messages of a call have the body that is current.

        A message without body refers to the last body that the session has for its key.
        """
        respelled = self.book.respelled
        if not respelled or not n:
            return n
        last: dict[int, int] = {}
        for one in self.calls[:call]:
            for number in [*one.own(), one.reply]:
                last[respelled.get(number, number)] = number
        current = (last.get(respelled.get(one, one), one) == one for one in numbers[:n])
        return next((at for at, same in enumerate(current) if not same), n)

    def _read(self, message: object, where: str) -> Read:
        encoded = encode(message, where)
        try:
            # so that key, body and copy agree, whatever the caller's code does
            copy = parse_json(str(encoded.body))
        except ValueError as error:
            raise InvalidTurnsError(f"{where} is {error}") from None
        return encoded, comparable(copy, encoded.is_plain)


def grow_messages(calls: Sessions) -> Forest:
    """The forest of the calls' messages, which are equal if their keys are.

    A key of 16 bytes is read as four tokens, so the kernel that grows the forest of token
    paths compares messages too. A call's path is its messages and its reply. A call without
    a list of messages has an empty path, and a call whose reply is not known ends with its
    last message.
    """
    requests = calls.requests
    paths = np.zeros(len(requests), CALL)
    paths["own"], paths["out"] = requests["keys"], requests["reply_key"]
    paths["own_start"] = KEY_TOKENS * requests["shared"].astype(np.int64)
    n_own = np.maximum(requests["n_keys"], 0)
    paths["prompt_len"] = paths["own_start"] + KEY_TOKENS * n_own
    paths["out_len"] = np.where(has_reply(requests), KEY_TOKENS, 0)
    paths["base"] = np.where(requests["shared"] > 0, calls.calls["base"], -1)
    return Forest.of(paths, calls.offsets)


def has_reply(requests: Records) -> Bools:
    """Requests with a list of messages and a known reply, shape (n_calls,)."""
    replied: Bools = (requests["n_keys"] >= 0) & (requests["reply_key"] != 0)
    return replied


def with_equality(calls: Sessions, equality: MessageEquality) -> Sessions:
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
        keys[:, 0] = np.append(self.places, self.replies)
        requests, address = calls.requests.copy(), keys.ctypes.data
        begins = offsets_of(np.maximum(requests["n_keys"], 0))[:-1]
        requests["keys"] = address + begins * KEY_BYTES
        replies = address + (n_places + np.arange(n_calls)) * KEY_BYTES
        requests["reply_key"] = np.where(self.replies >= 0, replies, 0)
        return replace(calls, requests=requests, keys=keys)


def classify(calls: Sessions, equality: MessageEquality) -> Classes:
    """Group the messages of calls into classes of equal messages, by their bodies."""
    current = current_bodies(calls)
    both = np.append(current.places, current.replies)
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
            where = _place_of(calls, int((both == number).argmax()))
            shown = body if len(body) <= _SHOWN else f"{body[:_SHOWN]}..."
            raise InvalidTurnsError(
                f"{where} has the body {shown!r}, which is not a JSON object: {error}"
            ) from None
    class_of = codes(pa.array(texts, pa.string()))
    first = np.unique(class_of, return_index=True)[1]
    class_of = np.append(class_of, -1)  # so that -1, no reply, stays -1
    bodies = current.bodies.take(pa.array(first))
    return Classes(bodies, class_of[current.places], class_of[current.replies])


def current_bodies(calls: Sessions) -> Classes:
    """The body that each message of the calls refers to: its key's last one so far."""
    stored = Ragged.of(calls.stored_messages).values
    shown, replied = (
        field_of(messages, "body")
        for messages in (stored, combined(calls.table.column("response")))
    )
    given = [np.asarray(one.is_valid()).view(np.uint8) for one in (shown, replied)]
    at = [np.empty(len(one), np.int64) for one in (shown, replied)]
    _core.find_bodies(calls.requests, calls.offsets, given[0], given[1], at[0], at[1])
    encoded = pa.concat_arrays([shown, replied]).dictionary_encode()
    body_at = np.append(np.asarray(encoded.indices.fill_null(-1), np.int64), -1)
    return Classes(encoded.dictionary, body_at[at[0]], body_at[at[1]])


def _place_of(calls: Sessions, number: int) -> str:
    """A message's name in errors; numbers count stored messages, then replies."""
    begins = offsets_of(np.maximum(calls.requests["n_keys"], 0))
    if number >= begins[-1]:
        return f"{calls.place(number - int(begins[-1]))}: response"
    call = int(np.searchsorted(begins, number, side="right")) - 1
    index = calls.requests["shared"][call] + number - begins[call]
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
    return message_texts(message).body


# The fields that `_content` compares, and the role that has them; "" is every role.
_COUNTED = {
    "role": "",
    "content": "",
    "reasoning_content": "assistant",
    "provider_state": "assistant",
    "tool_call_id": "tool",
}


def _content(body: str) -> str:
    """What counts of a message's role, text, reasoning and tool calls, as JSON."""
    message = _message(body)
    role, calls = message.get("role"), message.get("tool_calls")
    counted: Message = {}
    for name, its_role in _COUNTED.items():
        value = message.get(name)
        # "", null and a missing field are the same
        missing = value is None or (name == "content" and value == "")
        if not missing and its_role in ("", role):
            counted[name] = value
    if role == "assistant" and isinstance(calls, list):
        counted["tool_calls"] = [_called(call) for call in calls]
    return message_texts(counted).body


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
    """Compare only these fields; None, "" and [] are the same as a missing field."""

    def without_index(call: object) -> object:
        if not isinstance(call, dict):
            return call
        return {name: value for name, value in call.items() if name != "index"}

    def project(body: str) -> str:
        message, counted = _message(body), {}
        for name in names:
            value = message.get(name)
            if name == "tool_calls" and isinstance(value, list):
                value = list(map(without_index, value))
            if value is not None and value != "" and value != []:
                counted[name] = value
        return message_texts(counted).identity

    return project


_PROJECTIONS: dict[MessageEquality, Projection] = {
    "values": lambda body: message_texts(_message(body)).identity,
    "text": _text,
    "content": _content,
    "strict": _of_fields("role", "content", "reasoning_content", "tool_calls"),
    "role_content_only": _of_fields("role", "content"),
}
"""The equalities by name, as `trajkit.policies.Policy` describes them. 1 and 1.0 differ in
``text`` (``segments``) and ``content`` (``graph``); ``strict`` is that of ``miles``."""

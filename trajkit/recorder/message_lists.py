"""The message lists of a session: each message and each common prefix stored once."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from trajkit import _core
from trajkit.errors import InvalidTurnsError
from trajkit.schema import KEY_BYTES
from trajkit.turns.calls import Ints, Longs, Records
from trajkit.turns.flat_buffers import offsets_of
from trajkit.turns.messages import (
    Encoded,
    MessageBook,
    check_text,
    comparable,
    encode,
    unequal_places,
)
from trajkit.turns.structs import REQUEST

Read: TypeAlias = tuple[Encoded, object]
"""A message, and a copy that the caller cannot change, to compare others with."""


class ReadCall(NamedTuple):
    """The messages of a call that is not added yet."""

    # its base, or -1
    base: int
    # the messages, where they are those of the base. None: no list
    numbers: "array[int] | None"
    # the other messages, by place
    others: dict[int, Read]
    response: Read | None


class CallMessages(NamedTuple):
    """The messages of a call as what they share with its base."""

    base: int
    # leading messages that the messages and the reply of the base begin with
    shared: int
    # number of the other messages; -1: the call has no list of messages
    n_own: int
    # -1: none
    reply: int
    # the other messages, as 32-bit integers
    own: bytes

    def shown(self) -> "array[int]":
        """The other messages and the reply; empty for a call without a list."""
        numbers = array("i", self.own)
        if self.n_own >= 0 and self.reply >= 0:
            numbers.append(self.reply)
        return numbers


# a call without messages
_NOTHING_READ = ReadCall(-1, None, {}, None)
_NOTHING = CallMessages(-1, 0, -1, -1, b"")


@dataclass(slots=True)
class MessageLog:
    """The messages of a session's calls.

    A message that occurred before is compared with a copy, as Python compares dicts, and
    not encoded again.
    """

    # the distinct messages, with their numbers
    book: MessageBook = field(default_factory=MessageBook)
    # by number: a copy as `comparable`, or a pair of key and role
    copies: list[object] = field(default_factory=list)
    calls: list[CallMessages] = field(default_factory=list)
    # a call, and the messages of `path`
    _last: tuple[int, "array[int]"] = field(default_factory=lambda: (-1, array("i")))

    def path(self, call: int) -> "array[int]":
        """The messages of a call and its reply, by number; empty for -1.

        The next `add` changes it.
        """
        if call != self._last[0]:
            chain, numbers, at = [], array("i"), call
            while at >= 0:
                chain.append(self.calls[at])
                at = self.calls[at].base
            for one in reversed(chain):
                del numbers[one.shared :]
                numbers += one.shown()
            self._last = call, numbers
        return self._last[1]

    def read(
        self, messages: object, response: object, base: int, n_calls: int
    ) -> ReadCall:
        """The messages of the next call.

        Nothing changes until they are added. Raises `InvalidTurnsError` if one is no
        message.
        """
        if messages is None and response is None:
            return _NOTHING_READ
        numbers, others = None, {}
        if messages is not None:
            listed, numbers, places = self._compared(messages, base, n_calls)
            others = {i: _read(listed[i], f"prompt_messages[{i}]") for i in places}
        reply = None if response is None else _read(response, "response_message")
        return ReadCall(base, numbers, others, reply)

    def _compared(
        self, messages: object, base: int, n_calls: int
    ) -> tuple[list[object], "array[int]", list[int]]:
        """A list of messages, the numbers that a call has there, and where they differ.

        The call is the base or, without one, the last.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise InvalidTurnsError(
                f"prompt_messages is of type {type(messages).__name__}: expected a list "
                "of dicts"
            )
        listed, known = list(messages), self.path(base if base >= 0 else n_calls - 1)
        places = unequal_places(listed, map(self.copies.__getitem__, known))
        numbers = known[: len(listed)]
        numbers.extend([-1] * (len(listed) - len(numbers)))
        return listed, numbers, places

    def add(self, read: ReadCall, call: int) -> None:
        """Add the messages of a call; those of earlier calls were added before."""
        if read is _NOTHING_READ:
            self.calls[call:] = [_NOTHING]
            # the path may be that of an interrupted call
            self._last = -1, array("i")
            return
        base, numbers, others, response = read
        for place, other in others.items():
            numbers[place] = self._number(other)  # type: ignore[index]
        reply = -1 if response is None else self._number(response)
        shared, n_own, own, path = 0, -1, b"", self.path(base)
        if numbers is not None:
            shared = self._n_current(numbers, _core.lcp(numbers, path), call)
            n_own, own = len(numbers) - shared, numbers[shared:].tobytes()
        added = CallMessages(base, shared, n_own, reply, own)
        # in the place of a call that was interrupted
        self.calls[call:] = [added]
        self._last = call, path
        del path[shared:]
        path += added.shown()

    def match(self, messages: object, base: int, n_calls: int) -> tuple[int, int]:
        """The call whose messages a list begins with for longest, and how many they are.

        ``base``: compare with this call alone; -1: with every call, the first of equals
        counts. The call is -1 if none shares a message.
        """
        listed, numbers, places = self._compared(messages, base, n_calls)
        for i in places:
            numbers[i] = self.book.find(_read(listed[i], f"prompt_messages[{i}]")[0])
            if numbers[i] < 0:
                break
        if base >= 0:
            n_shared = _core.lcp(self.path(base), numbers)
            return base, self._n_current(numbers, n_shared, n_calls)
        found: list[int] = []
        for one in self.calls[:n_calls]:
            n = found[one.base] if one.base >= 0 else 0
            if n >= one.shared:
                n = one.shared + _core.lcp(one.shown(), numbers[one.shared :])
            found.append(n)
        most = max(found, default=0)
        return (found.index(most), most) if most else (-1, 0)

    def suffixes(self, n_calls: int) -> tuple[Ints, Ints]:
        """The messages that the base of each call does not supply.

        First, of shape (n_calls, 3): how many the base supplies, how many it does not
        (-1: the call has no list of messages), and the reply (-1: none). Then those it
        does not, end to end.
        """
        calls = self.calls[:n_calls]
        if calls.count(_NOTHING) == n_calls:
            # of token ids alone, where the general way would take longest
            return np.full((n_calls, 3), _NOTHING[1:4], np.int32), np.empty(0, np.int32)
        counts = np.array([one[1:4] for one in calls], np.int32).reshape(-1, 3)
        return counts, np.frombuffer(b"".join([one.own for one in calls]), np.int32)

    def requests(self, n_calls: int) -> tuple[Records, Longs, tuple[object, ...]]:
        """The requests of all calls, their keys, and the buffers of their roles."""
        counts, numbers = self.suffixes(n_calls)
        shared, lengths, replies = counts.T
        has_reply = replies >= 0
        messages = self.book.messages
        own = [messages[number] for number in numbers.tolist()]
        replied = [messages[number] for number in replies[has_reply].tolist()]
        words = b"".join([message.key for message in (*own, *replied)])
        keys = np.frombuffer(words, np.int64)
        roles = [message.role.encode() for message in own]
        ends = offsets_of(np.array([len(role) for role in roles])).astype(np.int32)
        text = np.frombuffer(b"".join(roles) + b" ", np.uint8)
        sizes = np.maximum(lengths, 0)
        first = np.cumsum(sizes) - sizes
        requests = np.zeros(n_calls, REQUEST)
        requests["shared"], requests["n_keys"] = shared, lengths
        requests["keys"] = keys.ctypes.data + first * KEY_BYTES
        requests["role_offsets"] = ends.ctypes.data + first * ends.itemsize
        requests["role_bytes"] = text.ctypes.data
        after = len(own) + np.arange(len(replied))
        requests["reply_key"][has_reply] = keys.ctypes.data + after * KEY_BYTES
        requests["reply_is_assistant"][has_reply] = [
            message.role == "assistant" for message in replied
        ]
        return requests, keys, (ends, text)

    def _n_current(self, numbers: "array[int]", n: int, call: int) -> int:
        """How many of the first n messages of a call have the body that is current.

        A message without body refers to the last body that the session has for its key.
        """
        respelled = self.book.respelled
        if not respelled:
            return n
        last: dict[int, int] = {}
        for one in self.calls[:call]:
            for number in [*array("i", one.own), one.reply]:
                if number in respelled:
                    last[respelled[number]] = number
        for at, number in enumerate(numbers[:n]):
            if number in respelled and last.get(respelled[number]) != number:
                return at
        return n

    def _number(self, read: Read) -> int:
        """The number of a message, which is new or known."""
        message, copy = read
        number = self.book.add(message)
        if number >= len(self.copies):
            # without those of a call that was interrupted
            missing = number - len(self.copies)
            self.copies += [*[None] * missing, copy]
        return number


def _copied(value: object) -> object:
    """A copy of a JSON value that shares its texts."""
    if isinstance(value, dict):
        return {name: _copied(one) for name, one in value.items()}
    return [_copied(one) for one in value] if isinstance(value, list) else value


def _read(message: object, where: str) -> Read:
    if not isinstance(message, tuple):
        encoded = encode(message, where)
        return encoded, comparable(_copied(message), encoded.is_plain)
    if len(message) == 2:
        key, role = message
        if isinstance(key, bytes) and len(key) == KEY_BYTES and isinstance(role, str):
            check_text(role, f"{where} role")
            return Encoded(key, role, None, False), message
    raise InvalidTurnsError(
        f"{where} is {message!r}: expected a dict, or a pair of its "
        f"{KEY_BYTES}-byte key and its role"
    )

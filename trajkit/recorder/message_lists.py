"""The message lists of a session: each message and each common prefix stored once."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import numpy as np

from trajkit import _core
from trajkit._arrow.ragged import Ints, Longs, Records
from trajkit.errors import InvalidTurnsError
from trajkit.schema import KEY_BYTES
from trajkit.turns.messages import Encoded, MessageBook, check_text, encode
from trajkit.turns.structs import REQUEST

Read: TypeAlias = tuple[int, dict[str, object]] | Encoded
"""A message as its hash and a copy, or encoded if it can have no copy."""


# of a message that can have none; the same as no message
_NO_COPY = object()


class ReadCall(NamedTuple):
    """The messages of a call that is not added yet."""

    # its base, or -1
    base: int
    # the messages; -1: not the one at the same place of the base. None: no list
    numbers: Ints | None
    # the messages of -1, in order
    others: list[Read]
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
_NOTHING_READ = ReadCall(-1, None, [], None)
_NOTHING = CallMessages(-1, 0, -1, -1, b"")


@dataclass(slots=True)
class MessageLog:
    """The messages of a session's calls.

    A message that occurred before is compared with a copy, as Python compares dicts, and
    not encoded again. Bodies and keys are computed when they are first needed (`write`).
    """

    # by number: a copy, a pair of key and role, or _NO_COPY
    copies: list[object] = field(default_factory=list)
    # the numbers of copies by their hash
    by_hash: dict[int, list[int]] = field(default_factory=dict)
    # bodies and keys of messages, by number; some may be missing (`write`)
    book: MessageBook = field(default_factory=MessageBook)
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
        numbers, others = None, []
        if messages is not None:
            listed, numbers = self._compared(messages, base, n_calls)
            others = [
                _read(listed[i], f"prompt_messages[{i}]")
                for i in np.flatnonzero(numbers < 0).tolist()
            ]
        reply = None if response is None else _read(response, "response_message")
        return ReadCall(base, numbers, others, reply)

    def _compared(
        self, messages: object, base: int, n_calls: int
    ) -> tuple[list[object], Ints]:
        """A list of messages, and the numbers of those that a call has there, else -1.

        The call is the base or, without one, the last.
        """
        if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
            raise InvalidTurnsError(
                f"prompt_messages is of type {type(messages).__name__}: expected a list "
                "of dicts"
            )
        listed, known = list(messages), self.path(base if base >= 0 else n_calls - 1)
        numbers = np.empty(len(listed), np.int32)
        _core.match_messages(listed, self.copies, known, numbers)
        return listed, numbers

    def add(self, read: ReadCall, call: int) -> None:
        """Add the messages of a call; those of earlier calls were added before."""
        if read is _NOTHING_READ:
            self.calls[call:] = [_NOTHING]
            # the path may be that of an interrupted call
            self._last = -1, array("i")
            return
        base, numbers, others, response = read
        if numbers is not None and others:
            numbers[numbers < 0] = [self._number(other) for other in others]
        reply = -1 if response is None else self._number(response)
        shared, n_own, own, path = 0, -1, b"", self.path(base)
        if numbers is not None:
            shared = _core.lcp(numbers, path)
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
        listed, numbers = self._compared(messages, base, n_calls)
        for i in np.flatnonzero(numbers < 0).tolist():
            numbers[i] = self._find(_read(listed[i], f"prompt_messages[{i}]"))
            if numbers[i] < 0:
                break
        if base >= 0:
            return base, _core.lcp(self.path(base), numbers)
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
        self.write()
        calls = self.calls[:n_calls]
        if calls.count(_NOTHING) == n_calls:
            # of token ids alone, where the general way would take longest
            return np.full((n_calls, 3), _NOTHING[1:4], np.int32), np.empty(0, np.int32)
        counts = np.array([one[1:4] for one in calls], np.int32).reshape(-1, 3)
        return counts, np.frombuffer(b"".join([one.own for one in calls]), np.int32)

    def requests(self, n_calls: int) -> tuple[Records, Longs, tuple[object, ...]]:
        """The requests of all calls, their keys, and the buffers of their roles."""
        requests = np.empty(n_calls, REQUEST)
        keys, *roles = _core.fill_requests(
            *self.suffixes(n_calls), self.book.keys, self.book.roles, requests
        )
        return requests, keys, tuple(roles)

    def write(self) -> None:
        """Compute the bodies and keys of messages that have none yet."""
        for copy in self.copies[len(self.book.bodies) :]:
            self.book.add(encode(copy, ""))

    def _number(self, read: Read) -> int:
        """The number of a message, which is new or known."""
        number = self._find(read)
        if number < 0:
            number = len(self.copies)
            if isinstance(read, Encoded):
                self.book.add(read)
                self.copies.append(
                    (read.key, read.role) if read.body is None else _NO_COPY
                )
            else:
                self.by_hash.setdefault(read[0], []).append(number)
                self.copies.append(read[1])
        return number

    def _find(self, read: Read) -> int:
        """The number of a message; -1 if it is new."""
        if isinstance(read, Encoded):
            self.write()
            return self.book.find(read)
        digest, copy = read
        for number in self.by_hash.get(digest, ()):
            if _core.same_message(self.copies[number], copy):
                return number
        return -1


def _read(message: object, where: str) -> Read:
    copied = _core.copy_message(message)
    if copied is not None:
        return copied
    if not isinstance(message, tuple):
        return encode(message, where)
    if len(message) == 2:
        key, role = message
        if isinstance(key, bytes) and len(key) == KEY_BYTES and isinstance(role, str):
            check_text(role, f"{where} role")
            return Encoded(key, role, None)
    raise InvalidTurnsError(
        f"{where} is {message!r}: expected a dict, or a pair of its "
        f"{KEY_BYTES}-byte key and its role"
    )

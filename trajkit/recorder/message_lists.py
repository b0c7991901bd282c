"""The message lists of a session: each message and each common prefix stored once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trajkit import _core
from trajkit.errors import InvalidTurnsError
from trajkit.schema import KEY_BYTES
from trajkit.turns.calls import Longs, Records
from trajkit.turns.messages import Ids, MessageBook, check_text
from trajkit.turns.structs import HEARD, PLACE, longer


@dataclass(slots=True)
class MessageLog:
    """The messages of a session's calls.

    A message that occurred before is compared with a copy, as Python compares dicts, and
    not encoded again. Bodies and keys are computed when they are first needed (`write`).
    """

    # the arguments of `_core.Lists`
    copies: list[dict[str, object] | tuple[object, ...]] = field(default_factory=list)
    by_hash: dict[int, list[int]] = field(default_factory=dict)
    counted: list[int] = field(default_factory=list)
    lists: _core.Lists = field(init=False)
    places: Records = field(init=False)
    calls: Records = field(default_factory=lambda: np.empty(0, HEARD))
    # bodies and keys of messages, by number; some may be missing (`write`)
    book: MessageBook = field(default_factory=MessageBook)
    # the message that a key and a role stand for, among the first n_known of `counted`
    by_key: dict[tuple[bytes, str], int] = field(default_factory=dict)
    n_known: int = 0

    def __post_init__(self) -> None:
        self.lists = _core.Lists(self.copies, self.by_hash, self.counted)
        self.places = np.empty(1, PLACE)
        self.lists.attach(self.places, self.calls)

    def make_room(self, n_calls: int, n_places: int) -> None:
        """Grow the arrays to this many calls and lists of messages."""
        if n_places > len(self.places):
            self.places = longer(self.places, n_places + n_places // 8 + 16)
        if n_calls > len(self.calls):
            self.calls = longer(self.calls, n_calls)
        self.lists.attach(self.places, self.calls)

    def suffixes(self, n_calls: int) -> tuple[Ids, Longs]:
        """The messages of each call that its base does not supply.

        Returns
        -------
        numbers : ndarray of int32
            Of all calls, end to end.
        lengths : ndarray of int64, shape (n_calls,)
            Messages of each call; -1: it has no list of messages.
        """
        calls: Records = self.calls[:n_calls]
        end, shared = calls["end"], calls["shared"]
        sizes = np.where(end < 0, -1, self.places["depth"][end] - shared)
        numbers = np.empty(int(sizes[end >= 0].sum()), np.int32)
        self.lists.fill_suffixes(numbers)
        return numbers, sizes.astype(np.int64)

    def requests(self, requests: Records) -> tuple[Longs, Ids, bytes]:
        """Fill the requests of all calls (`_core.Lists.requests`)."""
        self.write()
        return self.lists.requests(self.book.keys, self.book.roles, requests)

    def number(self, message: object, place: int) -> int:
        """The number of a message for which the kernel makes no copy: see `_core.Lists`."""
        where = "response_message" if place < 0 else f"prompt_messages[{place}]"
        said: tuple[object, ...] = ()  # equal to no message
        if isinstance(message, tuple):
            key, role = _pair(message, where)
            self.index_keys()
            known = self.by_key.get((key, role))
            number = self.book.add_key(key, role) if known is None else known
            said = message if type(message) is tuple else (key, role)
        else:
            self.write()
            number = self.book.add(message, where)
        if number == len(self.copies):
            self.copies.append(said)
        return number

    def find(self, message: object, place: int) -> int:
        """As `number`, but a message that is new gets no number: -1."""
        where = f"prompt_messages[{place}]"
        if isinstance(message, tuple):
            name = _pair(message, where)
            self.index_keys()
            return self.by_key.get(name, -1)
        self.write()
        return self.book.find(message, where)

    def write(self) -> None:
        """Compute the bodies and keys of messages that have none yet."""
        for number in range(len(self.book.bodies), len(self.copies)):
            self.book.add(self.copies[number], "")

    def index_keys(self) -> None:
        """Index the counted messages by key and role; those with a body have priority."""
        self.write()
        keys, roles, bodies = self.book.keys, self.book.roles, self.book.bodies
        for number in self.counted[self.n_known :]:
            name = keys[number], roles[number]
            known = self.by_key.setdefault(name, number)
            if bodies[known] is None and known != number:
                self.by_key[name] = number
                self.copies[known] = ()  # from now on its key finds the other message
        self.n_known = len(self.counted)


def read_messages(messages: object) -> list[object]:
    """The messages of a call as a list.

    Raises
    ------
    InvalidTurnsError
        They are not a sequence of messages.
    """
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
        return list(messages)
    raise InvalidTurnsError(
        f"prompt_messages is of type {type(messages).__name__}: expected a list of dicts"
    )


def _pair(pair: tuple[object, ...], where: str) -> tuple[bytes, str]:
    """Key and role of a message that is given as such a pair."""
    if len(pair) == 2:
        key, role = pair
        if isinstance(key, bytes) and len(key) == KEY_BYTES and isinstance(role, str):
            check_text(role, f"{where} role")
            return key, role
    raise InvalidTurnsError(
        f"{where} is {pair!r}: expected a dict, or a pair of its "
        f"{KEY_BYTES}-byte key and its role"
    )

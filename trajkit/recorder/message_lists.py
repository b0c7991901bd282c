"""The message lists of a session: each message read once, each common head held once."""

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
    """What a session's calls say, call by call.

    A message that a call shows again is compared with what is held of it, as Python
    compares dicts, and not read anew. What is held is no object of the caller's that can
    change: dicts and lists are laid out flat, their strings are shared. Bodies and keys
    are written when they are first asked for (`write`).
    """

    # see `_core.Lists`
    forms: list[tuple[object, ...]] = field(default_factory=list)
    by_hash: dict[int, int | list[int]] = field(default_factory=dict)
    counted: list[int] = field(default_factory=list)
    lists: _core.Lists = field(init=False)
    places: Records = field(init=False)
    calls: Records = field(default_factory=lambda: np.empty(0, HEARD))
    # the messages written so far, by their numbers
    book: MessageBook = field(default_factory=MessageBook)
    # which message a key alone means, of those that count: the first n_known of `counted`
    by_key: dict[tuple[bytes, str], int] = field(default_factory=dict)
    n_known: int = 0

    def __post_init__(self) -> None:
        self.lists = _core.Lists(self.forms, self.by_hash, self.counted)
        self.places = np.empty(1, PLACE)
        self.lists.attach(self.places, self.calls)

    def make_room(self, n_calls: int, n_places: int) -> None:
        """Room for this many calls, and lists of messages."""
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

    def number(self, message: object, place: int) -> int:
        """The number of a message that is no dict as most are: see `_core.Lists.read`."""
        where = "response_message" if place < 0 else f"prompt_messages[{place}]"
        said: tuple[object, ...] = ()  # found equal to nothing
        if isinstance(message, tuple):
            key, role = _pair(message, where)
            self.index_keys()
            known = self.by_key.get((key, role))
            number = self.book.add_key(key, role) if known is None else known
            said = message if type(message) is tuple else (key, role)
        else:
            self.write()
            number = self.book.add(message, where)
        if number == len(self.forms):
            self.forms.append(said)
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
        """Write the messages into the book that are not there yet."""
        for number in range(len(self.book.bodies), len(self.forms)):
            self.book.add(_core.message_of(self.forms[number]), "")

    def index_keys(self) -> None:
        """Let the keys of messages stand for them, those with a body first."""
        self.write()
        keys, roles, bodies = self.book.keys, self.book.roles, self.book.bodies
        for number in self.counted[self.n_known :]:
            name = keys[number], roles[number]
            known = self.by_key.setdefault(name, number)
            if bodies[known] is None and known != number:
                self.by_key[name] = number
                self.forms[known] = ()  # its key is found as the other's from now on
        self.n_known = len(self.counted)


def read_messages(messages: object) -> list[object]:
    """The messages of a call as a list.

    Raises
    ------
    InvalidTurnsError
        They are no sequence of messages.
    """
    if isinstance(messages, Sequence) and not isinstance(messages, (str, bytes)):
        return list(messages)
    raise InvalidTurnsError(
        f"prompt_messages is of type {type(messages).__name__}: expected a list of dicts"
    )


def _pair(pair: tuple[object, ...], where: str) -> tuple[bytes, str]:
    """A message given by its key: the key and the role."""
    if len(pair) == 2:
        key, role = pair
        if isinstance(key, bytes) and len(key) == KEY_BYTES and isinstance(role, str):
            check_text(role, f"{where} role")
            return key, role
    raise InvalidTurnsError(
        f"{where} is {pair!r}: a message that is no dict is a pair of its "
        f"{KEY_BYTES}-byte key and its role"
    )

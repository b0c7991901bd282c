"""The message lists of a session: each message read once, each common head held once."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from trajkit import _core
from trajkit.calls import Records
from trajkit.errors import InvalidTurnsError
from trajkit.layout import HEARD, PLACE, longer
from trajkit.messages import Ids, MessageBook, check_text
from trajkit.schema import KEY_BYTES


@dataclass(slots=True)
class Talk:
    """What a session's calls say, call by call.

    A message that a call shows again is compared with what is held of it, as Python
    compares dicts, and not read anew. What is held is no object of the caller's that can
    change: dicts and lists are laid out flat, their strings are shared. Bodies and keys
    are written when they are first asked for (`write`).
    """

    # see `_core.Lists`
    said: list[tuple[object, ...]] = field(default_factory=list)
    by_hash: dict[int, int | list[int]] = field(default_factory=dict)
    counted: list[int] = field(default_factory=list)
    lists: _core.Lists = field(init=False)
    places: Records = field(init=False)
    heard: Records = field(default_factory=lambda: np.empty(0, HEARD))
    # the messages written so far, by their numbers
    book: MessageBook = field(default_factory=MessageBook)
    # whether a message was given by its key; then, which one a key means, of those that
    # count: the first n_known of `counted`
    keyed: bool = False
    by_key: dict[tuple[bytes, str], int] = field(default_factory=dict)
    n_known: int = 0

    def __post_init__(self) -> None:
        self.lists = _core.Lists(self.said, self.by_hash, self.counted)
        self.places = np.empty(1, PLACE)
        self.lists.attach(self.places, self.heard)

    def make_room(self, n_calls: int) -> None:
        """Room for this many calls."""
        self.heard = longer(self.heard, n_calls)
        self.lists.attach(self.places, self.heard)

    def read(self, messages: object, reply: object) -> None:
        """Read what a call says; nothing counts before `add`.

        Parameters
        ----------
        messages : sequence of dict and pairs of key and role, or None
        reply : dict, pair of key and role, or None

        Raises
        ------
        InvalidTurnsError
            They are something else.
        """
        if type(messages) is not list and messages is not None:
            if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)):
                raise InvalidTurnsError(
                    f"prompt_messages is of type {type(messages).__name__}: "
                    "expected a list of dicts"
                )
            messages = list(messages)
        needed = self.lists.read(messages, reply, self._number)
        if needed > len(self.places):
            self.places = longer(self.places, needed + needed // 8 + 16)
            self.lists.attach(self.places, self.heard)

    def add(self, base: int) -> None:
        """Let what was read count, as the messages of the next call.

        Parameters
        ----------
        base : int
            An earlier call, which supplies what the two lists have in common; -1: none.
        """
        self.lists.add(base)
        if self.keyed and len(self.counted) > self.n_known:
            self._mean()

    def suffixes(self, n_calls: int) -> list[Ids | None]:
        """Of each call the numbers of its messages that the base does not supply.

        None: it has no list of messages.
        """
        heard: Records = self.heard[:n_calls]
        spoken = heard["end"] >= 0
        sizes = np.where(
            spoken, self.places["depth"][heard["end"]] - heard["shared"], 0
        )
        stops = np.cumsum(sizes)
        numbers = np.empty(int(sizes.sum()), np.int32)
        self.lists.fill_suffixes(numbers)
        runs = zip(spoken, stops - sizes, stops, strict=True)
        return [numbers[start:stop] if has else None for has, start, stop in runs]

    def _number(self, message: object, place: int) -> int:
        """The number of a message that is no dict as most are."""
        where = "response_message" if place < 0 else f"prompt_messages[{place}]"
        said: tuple[object, ...] = ()  # found equal to nothing
        if isinstance(message, tuple):
            key, role = _pair(message, where)
            if not self.keyed:
                self.keyed = True
                self._mean()
            known = self.by_key.get((key, role))
            number = self.book.add_key(key, role) if known is None else known
            said = message if type(message) is tuple else (key, role)
        else:
            self.write()
            number = self.book.add(message, where)
        if number == len(self.said):
            self.said.append(said)
        return number

    def write(self) -> None:
        """Write the messages into the book that are not there yet."""
        for number in range(len(self.book.bodies), len(self.said)):
            self.book.add(_core.message_of(self.said[number]), "")

    def _mean(self) -> None:
        """Let the keys of messages stand for them, those with a body first."""
        self.write()
        keys, roles, bodies = self.book.keys, self.book.roles, self.book.bodies
        for number in self.counted[self.n_known :]:
            name = keys[number], roles[number]
            known = self.by_key.setdefault(name, number)
            if bodies[known] is None and known != number:
                self.by_key[name] = number
                self.said[known] = ()  # its key is found as the other's from now on
        self.n_known = len(self.counted)


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

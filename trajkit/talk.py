"""The message lists of a session: each message read once, each common head held once."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from trajkit import _core
from trajkit.errors import InvalidTurnsError
from trajkit.messages import NO_IDS, Ids, MessageBook, check_text
from trajkit.schema import KEY_BYTES

Places: TypeAlias = "array[int]"


@dataclass(frozen=True, slots=True)
class Heard:
    """What a call's messages are, before they count."""

    # None: it has no list of messages
    ids: Ids | None
    # of the first messages, those whose list is known: the node of the list up to each
    nodes: Ids
    # -1: no reply
    reply: int


_NOTHING = Heard(None, NO_IDS, -1)


@dataclass(slots=True)
class Talk:
    """Lists of messages as paths of a tree, so that their common heads are one.

    A node stands for the list that its path spells; node 0 for the empty list.

    A message that a call shows again is compared with what is held of it, as Python
    compares dicts, and not encoded anew. What is held is no object of the caller's that
    can change: dicts and lists are laid out flat, their strings are shared.
    """

    book: MessageBook = field(default_factory=MessageBook)
    # every distinct message, by its id in the book: see `_core.known_messages`
    said: list[tuple[object, ...]] = field(default_factory=list)
    parents: Places = field(default_factory=lambda: array("i", [-1]))
    depths: Places = field(default_factory=lambda: array("i", [0]))
    # the last message of each list
    message_of: Places = field(default_factory=lambda: array("i", [-1]))
    # the newest longer list by one message, and the next older one of the same parent
    child: Places = field(default_factory=lambda: array("i", [-1]))
    sibling: Places = field(default_factory=lambda: array("i", [-1]))
    # which message a key alone means, once the session has it
    by_key: dict[tuple[bytes, str], int] = field(default_factory=dict)
    # messages that may stand in the tree: those with a smaller id
    n_placed: int = 0

    def read(self, messages: object, reply: object, where: str) -> Heard:
        """What a call says; nothing counts yet.

        Parameters
        ----------
        messages : sequence of dict and pairs of key and role, or None
        reply : dict, pair of key and role, or None
        where : str
            For the error: ``session 'a', turn 7: ``.

        Raises
        ------
        InvalidTurnsError
            They are something else.
        """
        if messages is reply is None:
            return _NOTHING
        ids, nodes = None, NO_IDS
        if messages is not None:
            if not isinstance(messages, list) and (
                not isinstance(messages, Sequence) or isinstance(messages, (str, bytes))
            ):
                raise InvalidTurnsError(
                    f"{where}prompt_messages is of type {type(messages).__name__}: "
                    "expected a list of dicts"
                )
            given = messages if isinstance(messages, list) else list(messages)
            ids, nodes = self._read_all(given, f"{where}prompt_messages")
        number = -1
        if reply is not None:
            number = self._read(reply, f"{where}response_message")
        return Heard(ids, nodes, number)

    def _read_all(self, messages: list[object], where: str) -> tuple[Ids, Ids]:
        n = len(messages)
        ids, nodes = np.empty(n, np.int32), np.empty(n, np.int32)
        node = found = 0
        tree = self.message_of, self.child, self.sibling
        while True:
            found = _core.known_messages(
                messages, found, node, self.said, *tree, ids, nodes
            )
            if found == n:
                return ids, nodes
            if found:
                node = int(nodes[found - 1])
            # a message known elsewhere, or one of many that stand at this place
            number = self._read(messages[found], f"{where}[{found}]")
            child = self._child(node, number)
            if child < 0:
                break
            ids[found], nodes[found] = number, child
            node, found = child, found + 1
        ids[found] = number
        known, rest = found, found + 1
        if rest == n:
            return ids, nodes[:known]
        _core.realign_messages(messages, rest, node, self.said, *tree[:2], ids)
        for i in (rest + np.flatnonzero(ids[rest:] < 0)).tolist():
            ids[i] = self._read(messages[i], f"{where}[{i}]")
        return ids, nodes[:known]

    def _read(self, message: object, where: str) -> int:
        """The id of a message."""
        if isinstance(message, tuple):
            key, role = _pair(message, where)
            number = self.by_key.get((key, role))
            if number is None:
                number = self.book.add_key(key, role)
            held: tuple[object, ...] = (
                message if type(message) is tuple else (key, role)
            )
        else:
            number = self.book.add(message, where)
            held = _core.flat_message(message)
        if number == len(self.said):
            self.said.append(held)
        elif isinstance(message, dict):
            self.said[number] = held  # as it is given now: its keys in another order
        return number

    def add(self, heard: Heard, base: int) -> tuple[int, int]:
        """Let a call's messages count.

        Parameters
        ----------
        heard : Heard
        base : int
            The node of an earlier call; -1: none.

        Returns
        -------
        shared : int
            Messages that its list has in common with the base's.
        node : int
            The node of its messages and its reply; -1: it has no list.
        """
        if heard is _NOTHING:
            return 0, -1
        nodes, ids = heard.nodes, heard.ids
        n_known = len(nodes)
        new = [] if ids is None else ids[n_known:].tolist()
        self._mean([*new, heard.reply] if heard.reply >= 0 else new)
        if ids is None:
            return 0, -1
        end = int(nodes[-1]) if n_known else 0
        tail = []
        for message in new:
            end = self._step(end, message)
            tail.append(end)
            self.n_placed = max(self.n_placed, message + 1)
        shared = 0
        if base >= 0:
            # up the base's list, as far as it is this one
            depths, parents = self.depths, self.parents
            node = base
            while (shared := depths[node]) and (
                shared > len(ids)
                or node
                != (
                    nodes[shared - 1]
                    if shared <= n_known
                    else tail[shared - n_known - 1]
                )
            ):
                node = parents[node]
        shown = end if heard.reply < 0 else self._step(end, heard.reply)
        self.n_placed = len(self.said)
        return shared, shown

    def _mean(self, numbers: list[int]) -> None:
        """Let the keys of these messages stand for them, those with a body first."""
        keys, roles, bodies = self.book.keys, self.book.roles, self.book.bodies
        for number in numbers:
            name = keys[number], roles[number]
            known = self.by_key.setdefault(name, number)
            if bodies[known] is None and known != number:
                self.by_key[name] = number
                self.said[known] = ()  # its key is found as the other's from now on

    def _child(self, node: int, message: int) -> int:
        if message >= self.n_placed:
            return -1
        return _core.child_with(
            self.message_of, self.child, self.sibling, node, message
        )

    def _step(self, node: int, message: int) -> int:
        """The node of a node's list and one message more."""
        known = self._child(node, message)
        if known >= 0:
            return known
        child = len(self.parents)
        self.parents.append(node)
        self.depths.append(self.depths[node] + 1)
        self.message_of.append(message)
        self.sibling.append(self.child[node])
        self.child.append(-1)
        self.child[node] = child
        return child


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

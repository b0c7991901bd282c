"""What calls share of their messages where a key is spelled in several ways.

Messages with 1, 1.0 and true at one place are equal in Python and have one key, but not
one body. A table gives a body wherever the key's last one was another, and shares a
message only where it gives none; so what a call shares depends on what was said last.
"""

import numpy as np

from trajkit.calls import Records
from trajkit.messages import Ids, MessageBook


class Spelled:
    """The calls of a session, in order, each with what a table shares of its messages.

    Only messages whose key has several bodies are looked at, and what is new.

    Parameters
    ----------
    book : MessageBook
    places : ndarray of PLACE
        The tree of the session's lists: see `trajkit._core.Lists`.
    """

    def __init__(self, book: MessageBook, places: Records) -> None:
        self._book = book
        counts = np.bincount(book.key_ids)
        self._several = counts[book.key_ids] > 1
        self._message: list[int] = places["message"].tolist()
        self._parent: list[int] = places["parent"].tolist()
        self._depth: list[int] = places["depth"].tolist()
        # of each node the last of its path whose message is one of several, or -1
        self._nearest = [-1]
        for node in range(1, len(places)):
            one_of = self._several[self._message[node]]
            self._nearest.append(node if one_of else self._nearest[self._parent[node]])
        # which message each key stood for last
        self._last: dict[int, int] = {}

    def share(
        self, suffix: Ids | None, shared: int, end: int, base: int, reply: int
    ) -> tuple[Ids | None, int]:
        """Take the next call.

        Parameters
        ----------
        suffix : ndarray of int32 or None
            Its messages behind the first ``shared``; None: it has no list.
        shared : int
            How many of its messages are those of its base, of the same bodies.
        end, base : int
            The nodes of its list, and of what its base shows; -1: none.
        reply : int
            -1: none.

        Returns
        -------
        suffix : ndarray of int32 or None
        shared : int
            How many messages have the keys and the roles of the base's, and no body.
        """
        bare = shared
        if suffix is not None:
            for node in self._before(end, shared):
                if self._gives_body(self._message[node]):
                    bare = min(bare, self._depth[node] - 1)
            behind = suffix.tolist()
            given = [self._gives_body(message) for message in behind]
            if bare < shared:
                suffix = np.array([*self._path(end, bare)], np.int32)
            elif base >= 0:
                for message, other, body in zip(
                    behind, self._path(base, shared), given, strict=False
                ):
                    if body or self._name(message) != self._name(other):
                        break
                    bare += 1
                suffix = suffix[bare - shared :]
        if reply >= 0:
            self._gives_body(reply)
        return suffix, bare

    def _gives_body(self, message: int) -> bool:
        """Whether a message that stands here has its body."""
        key = self._book.key_ids[message]
        known = self._last.get(key)
        self._last[key] = message
        return known != message and self._book.bodies[message] is not None

    def _name(self, message: int) -> tuple[int, str]:
        return self._book.key_ids[message], self._book.roles[message]

    def _before(self, node: int, depth: int) -> list[int]:
        """The nodes on the path to a node, no deeper than this, of several bodies."""
        found = []
        node = self._nearest[node]
        while node >= 0:
            if self._depth[node] <= depth:
                found.append(node)
            node = self._nearest[self._parent[node]]
        return found[::-1]

    def _path(self, node: int, depth: int) -> list[int]:
        """The messages on the path to a node behind the first so many."""
        found = []
        while self._depth[node] > depth:
            found.append(self._message[node])
            node = self._parent[node]
        return found[::-1]

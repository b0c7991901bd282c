"""The token paths of a session: what the engine consumed and sampled, by its place.

A path is a prompt and the output behind it. A prompt that was built behind another path
repeats none of it: it refers to it, so a conversation takes memory once, however many
turns and forks it has. Paths are bounded for all sessions together; where there are too
many, the session that was quiet for longest loses its oldest ones.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trajkit_shim.attribution import Attribution, Ids
from trajkit_shim.standing import Standing

# of a path beside its tokens: the object, its place and its arrays
_OVERHEAD = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldPath:
    """One prompt and the output that was sampled for it."""

    # behind its reply (`Heard.places`)
    place: bytes
    # the path that it goes on from; None: it begins here
    base: "HeldPath | None"
    # shape (n_own,): what stands behind the base, up to the end of the output
    own_ids: Ids
    # of own_ids: the columns of schema.ATTRIBUTION; None: nobody can tell
    own_shown: Attribution | None
    # the output ends its message
    closed: bool
    # of the prompt; None: the template's text cannot be relied on
    standing: Standing | None
    # of the tools that were on offer
    tools: bytes

    def ids(self) -> Ids:
        """Prompt and output, int32 of shape (n_held,)."""
        return np.concatenate([path.own_ids for path in self._from_start()])

    def shown(self) -> Attribution:
        """What each of `ids` shows; where nobody can tell it is taken for structure."""
        parts = [path._shown() for path in self._from_start()]
        return Attribution(
            np.concatenate([part.message_index for part in parts]),
            np.concatenate([part.is_content for part in parts]),
        )

    def bases(self) -> "Iterator[HeldPath]":
        """The path, the one that it goes on from, and so on to the first."""
        path: HeldPath | None = self
        while path is not None:
            yield path
            path = path.base

    @property
    def n_bytes(self) -> int:
        """Memory that is this path's alone."""
        n_shown = 0 if self.own_shown is None else 5 * len(self.own_ids)
        return _OVERHEAD + 4 * len(self.own_ids) + n_shown

    def _from_start(self) -> "list[HeldPath]":
        return [*self.bases()][::-1]

    def _shown(self) -> Attribution:
        if self.own_shown is not None:
            return self.own_shown
        n = len(self.own_ids)
        return Attribution(np.full(n, -1, np.int32), np.zeros(n, np.bool_))


class HeldPaths:
    """The paths of one session, by the place behind their reply (`Heard.places`).

    `get` only reads, and may run on another thread while the others are called.
    """

    def __init__(self) -> None:
        # those used last come last, and each behind all that go on from it
        self._paths: OrderedDict[bytes, HeldPath] = OrderedDict()
        self._budget: HeldBudget | None = None

    def __len__(self) -> int:
        return len(self._paths)

    def get(self, place: bytes) -> HeldPath | None:
        """The path of the reply that ends at a place."""
        return self._paths.get(place)

    def remember(self, path: HeldPath, budget: "HeldBudget") -> None:
        """Keep the path of a reply; of equal replies the last one counts.

        Parameters
        ----------
        path : HeldPath
        budget : HeldBudget
            Of the gateway; always the same one.
        """
        self._budget = budget
        self._drop(path.place)
        self._paths[path.place] = path
        for each in path.bases():
            # one that another took the place of stays with those that go on from it
            if self._paths.get(each.place) is each:
                self._paths.move_to_end(each.place)
        budget.add(self, path.n_bytes)

    def release_oldest(self) -> None:
        """Give one path up that no other goes on from."""
        self._drop(next(iter(self._paths)))

    def clear(self) -> None:
        """Give all paths up."""
        while self._paths:
            self.release_oldest()

    def _drop(self, place: bytes) -> None:
        path = self._paths.pop(place, None)
        if path is not None:
            assert self._budget is not None
            self._budget.remove(self, path.n_bytes)


class HeldBudget:
    """A bound on the memory of all sessions' paths.

    Parameters
    ----------
    max_bytes : int
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        # those that were added to last come last
        self._sessions: OrderedDict[HeldPaths, None] = OrderedDict()

    def add(self, paths: HeldPaths, n_bytes: int) -> None:
        """Count a path in, and make room for it where there is none."""
        self.n_bytes += n_bytes
        self._sessions[paths] = None
        self._sessions.move_to_end(paths)
        while self.n_bytes > self.max_bytes:
            next(iter(self._sessions)).release_oldest()

    def remove(self, paths: HeldPaths, n_bytes: int) -> None:
        """Count a path out."""
        self.n_bytes -= n_bytes
        if not len(paths):
            del self._sessions[paths]

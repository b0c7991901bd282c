"""Cached token paths of a session: what the engine consumed and sampled, by position.

A path is a prompt followed by its output. A path that extends another one refers to it
instead of repeating it, so a conversation is stored once however many turns and forks it
has. The memory of all sessions together is bounded; beyond that the session that was
idle longest loses its oldest paths.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trajkit_shim.prompting.attribution import Attribution, Ids, joined
from trajkit_shim.prompting.rendered_prefix import RenderedPrefix

# bytes of a path besides its tokens: the object, its position and its arrays
_OVERHEAD = 1024


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CachedPath:
    """One prompt and its output."""

    position: bytes  # after its reply (`RestoredRequest.positions`)
    base: "CachedPath | None"  # the path that it extends
    own_ids: Ids  # shape (n_own,): the ids after the base, up to the end of the output
    own_attribution: Attribution | None  # of own_ids; None: unknown
    closed: bool  # the output ends with an end-of-message token
    # of the prompt; None: the template is not safe to append to
    rendered: RenderedPrefix | None
    tools: bytes  # digest of the offered tools

    def ids(self) -> Ids:
        """Return prompt and output ids, int32 of shape (n_path,)."""
        return np.concatenate([path.own_ids for path in self._from_start()])

    def attribution(self) -> Attribution:
        """Return the attribution of `ids`; unknown tokens count as structure."""
        return joined([path._own_attribution() for path in self._from_start()])

    def bases(self) -> "Iterator[CachedPath]":
        """Yield the path, the one that it extends, and so on to the first."""
        path: CachedPath | None = self
        while path is not None:
            yield path
            path = path.base

    @property
    def n_bytes(self) -> int:
        """Memory of this path without its base."""
        n_shown = 0 if self.own_attribution is None else 5 * len(self.own_ids)
        return _OVERHEAD + 4 * len(self.own_ids) + n_shown

    def _from_start(self) -> "list[CachedPath]":
        return [*self.bases()][::-1]

    def _own_attribution(self) -> Attribution:
        if self.own_attribution is not None:
            return self.own_attribution
        n = len(self.own_ids)
        return Attribution(np.full(n, -1, np.int32), np.zeros(n, np.bool_))


class TokenCache:
    """The paths of one session, by the position after their reply.

    `get` only reads, and may run on another thread during calls of the others.
    """

    def __init__(self) -> None:
        # most recently used last, and each path after all that extend it
        self._paths: OrderedDict[bytes, CachedPath] = OrderedDict()
        self._budget: CacheBudget | None = None

    def __len__(self) -> int:
        return len(self._paths)

    def get(self, position: bytes) -> CachedPath | None:
        """Return the path whose reply ends at a position."""
        return self._paths.get(position)

    def remember(self, path: CachedPath, budget: "CacheBudget") -> None:
        """Store the path of a reply; of equal replies the last one is kept.

        ``budget`` is the gateway's, always the same one.
        """
        self._budget = budget
        self._drop(path.position)
        self._paths[path.position] = path
        for each in path.bases():
            # a replaced path stays alive as the base of those that extend it
            if self._paths.get(each.position) is each:
                self._paths.move_to_end(each.position)
        budget.add(self, path.n_bytes)

    def release_oldest(self) -> None:
        """Drop one path that no other extends."""
        self._drop(next(iter(self._paths)))

    def clear(self) -> None:
        """Drop all paths."""
        while self._paths:
            self.release_oldest()

    def _drop(self, position: bytes) -> None:
        path = self._paths.pop(position, None)
        if path is not None:
            assert self._budget is not None
            self._budget.remove(self, path.n_bytes)


class CacheBudget:
    """A limit in bytes on the memory of all sessions' paths."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        # most recently added to last
        self._sessions: OrderedDict[TokenCache, None] = OrderedDict()

    def add(self, paths: TokenCache, n_bytes: int) -> None:
        """Count a path, and drop the oldest ones if the limit is exceeded."""
        self.n_bytes += n_bytes
        self._sessions[paths] = None
        self._sessions.move_to_end(paths)
        while self.n_bytes > self.max_bytes:
            next(iter(self._sessions)).release_oldest()

    def remove(self, paths: TokenCache, n_bytes: int) -> None:
        """Uncount a path."""
        self.n_bytes -= n_bytes
        if not len(paths):
            del self._sessions[paths]

"""Cached token paths of a session: what the engine consumed and sampled, by position.

A path is a prompt followed by its output. Paths that extend each other are one branch,
whose ids are stored once. A fork is another branch, with a copy of the ids before it.
Beyond a limit for all sessions together, the branches that were idle longest are dropped.
"""

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from hashlib import blake2b
from threading import Lock

import numpy as np

from trajkit_shim.prompting.attribution import Ids
from trajkit_shim.prompting.known_requests import ReadRequest
from trajkit_shim.prompting.template_probe import RenderedPrefix

# bytes of a path besides its tokens: the object, its position and two digests
_OVERHEAD = 1536
# branches whose latest request is compared with a new one
_COMPARED = 8


class Branch:
    """The ids of paths that extend each other, with room for more.

    Ids in it do not change, so that a prompt and the ones that extend it are views of
    one array, and each costs only what it adds.
    """

    def __init__(self, n_ids: int = 0) -> None:
        room = n_ids // 8 + min(n_ids // 2, 1024)
        self.ids: Ids = np.empty(n_ids + room, np.int32)
        self.paths: dict[bytes, CachedPath] = {}  # by position, the longest last
        self.request: ReadRequest | None = None  # its latest
        self._n_used = n_ids
        self._lock = Lock()

    def extend(self, ids: Ids, new: Ids) -> "tuple[Ids, Branch]":
        """Return ids with new ones after them, and their branch.

        It is another one, with a copy of ``ids``, if they are not the first ones here,
        others follow them, or there is no room.
        """
        n_ids, end = len(ids), len(ids) + len(new)
        branch = self
        with self._lock:
            if n_ids == self._n_used and end <= len(self.ids):
                self._n_used = end
            else:
                branch = Branch(end)
                branch.ids[:n_ids] = ids
        branch.ids[n_ids:end] = new
        return branch.ids[:end], branch


@dataclass(slots=True, kw_only=True, eq=False)
class CachedPath:
    """One prompt and its output."""

    position: bytes  # after its reply (`RestoredRequest.positions`)
    rendered: RenderedPrefix  # of the prompt
    base: "CachedPath | None" = None  # the path that it extends
    branch: Branch = field(default_factory=Branch)
    # 0: the output has no end-of-message token, so no prompt may extend it
    n_ids: int = 0
    # BLAKE2b of its ids
    hasher: blake2b = field(default_factory=partial(blake2b, digest_size=16))

    @property
    def ids(self) -> Ids:
        """The ids of prompt and output."""
        return self.branch.ids[: self.n_ids]


class TokenCache:
    """The paths of one session, by the position after their reply.

    `get` may run on another thread during calls of the others.
    """

    def __init__(self) -> None:
        # most recent last
        self._paths: dict[bytes, CachedPath] = {}
        self._budget: CacheBudget | None = None

    def get(self, position: bytes) -> CachedPath | None:
        """Return the path whose reply ends at a position."""
        return self._paths.get(position)

    def requests(self) -> Iterator[ReadRequest]:
        """Yield the latest request of each branch used lately, latest first."""
        seen: set[Branch] = set()
        for path in reversed(self._paths.values()):
            if path.branch not in seen and path.branch.request is not None:
                yield path.branch.request
            seen.add(path.branch)
            if len(seen) == _COMPARED:
                break

    def remember(
        self,
        path: CachedPath,
        budget: "CacheBudget",
        request: ReadRequest | None = None,
    ) -> None:
        """Store the path of a reply; of equal replies the last one is kept."""
        self._budget = budget
        if (replaced := self._paths.pop(path.position, None)) is not None:
            del replaced.branch.paths[path.position]
            if not replaced.branch.paths:
                self.release(replaced.branch)
        branch, before = path.branch, path.base.branch if path.base else path.branch
        longest = next(reversed(before.paths.values()), None)
        # other ids may follow the longest path of its base, of calls that were not
        # answered; the branch continues in the copy
        if path.n_ids and before is not branch and longest is path.base:
            branch.paths, before.paths = before.paths | branch.paths, {}
            for each in branch.paths.values():
                each.branch = branch
            self.release(before)
        self._paths[path.position] = branch.paths[path.position] = path
        path.base = None
        branch.request = request
        budget.count(self, branch)

    def release(self, branch: Branch) -> None:
        """Drop a branch and its paths."""
        while branch.paths:
            del self._paths[branch.paths.popitem()[0]]
        assert self._budget is not None
        self._budget.uncount(branch)

    def clear(self) -> None:
        """Drop all paths."""
        while self._paths:
            self.release(next(iter(self._paths.values())).branch)


class CacheBudget:
    """A limit in bytes on the memory of all sessions' branches.

    Requests are dropped first, since they only save work: a prompt whose ids are gone is
    rendered, and may differ from them.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        # the session and bytes of each branch, and the bytes of its request; most recently
        # used last
        self._branches: OrderedDict[Branch, tuple[TokenCache, int]] = OrderedDict()
        self._requests: OrderedDict[Branch, int] = OrderedDict()

    def count(self, session: TokenCache, branch: Branch) -> None:
        """Count a branch that has changed; drop the oldest if the limit is exceeded."""
        self.uncount(branch)
        n_bytes = branch.ids.nbytes + _OVERHEAD * len(branch.paths)
        self._branches[branch] = session, n_bytes
        if branch.request is not None:
            self._requests[branch] = branch.request.n_bytes
        self.n_bytes += n_bytes + self._requests.get(branch, 0)
        while self.n_bytes > self.max_bytes and self._requests:
            oldest, n_bytes = self._requests.popitem(last=False)
            oldest.request = None
            self.n_bytes -= n_bytes
        while self.n_bytes > self.max_bytes:
            oldest, (session, _) = next(iter(self._branches.items()))
            session.release(oldest)

    def uncount(self, branch: Branch) -> None:
        """Forget a branch, if it was counted."""
        _, n_bytes = self._branches.pop(branch, (None, 0))
        self.n_bytes -= n_bytes + self._requests.pop(branch, 0)

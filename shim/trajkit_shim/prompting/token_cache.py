"""Cached token paths of a session: what the engine consumed and sampled, by position.

A path is a prompt followed by its output. Paths that extend each other are one branch,
whose ids are stored once, as the arrays of its last turn. A fork is a branch of its own
that refers to the path that it leaves. The memory of all sessions together is bounded;
beyond that the session that was idle longest loses its oldest branches.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from threading import Lock

import numpy as np

from trajkit_shim.prompting.attribution import Ids
from trajkit_shim.prompting.known_requests import KnownRequest
from trajkit_shim.prompting.rendered_prefix import RenderedPrefix

# bytes of a path besides its tokens: the object, its position and two digests
_OVERHEAD = 1536
# branches whose latest request is compared with a new one
_COMPARED = 8


class IdBuffer:
    """Room for the ids of paths that extend each other.

    Ids in it do not change, so that a prompt and the ones that extend it are views of
    one array, and each costs only what it adds.
    """

    def __init__(self, n_ids: int) -> None:
        room = n_ids // 8 + min(n_ids // 2, 1024)
        self._ids = np.empty(n_ids + room, np.int32)
        self._n_used = 0
        self._lock = Lock()

    @property
    def n_bytes(self) -> int:
        """Memory of the ids and of the room for more."""
        return self._ids.nbytes

    def extend(self, n_ids: int, new: Ids) -> Ids | None:
        """Return the first ``n_ids`` and new ones; None: others follow, or no room."""
        with self._lock:
            end = n_ids + len(new)
            if n_ids != self._n_used or end > len(self._ids):
                return None
            self._n_used = end
        self._ids[n_ids:end] = new
        return self._ids[:end]


def extended(
    before: Sequence[Ids], new: Ids, buffer: IdBuffer | None
) -> tuple[Ids, IdBuffer]:
    """Return ids with new ones after them, and their buffer.

    ``buffer``: has the ids, unless they are not in one. If others were appended to them
    there, all are copied to another one.
    """
    n_before = sum(map(len, before))
    ids = None if buffer is None else buffer.extend(n_before, new)
    if buffer is None or ids is None:
        buffer = IdBuffer(n_before + len(new))
        ids = buffer.extend(0, np.concatenate([*before, new]))
        assert ids is not None
    return ids, buffer


@dataclass(slots=True, eq=False)
class Branch:
    """The tokens of paths that extend each other."""

    ids: Ids  # after those of the base
    buffer: IdBuffer | None = None  # that these are in
    base: "CachedPath | None" = None  # the path of another branch that it extends
    positions: list[bytes] = field(default_factory=list)  # of its paths
    request: KnownRequest | None = None  # its latest

    @property
    def n_base(self) -> int:
        """Length of its base."""
        return 0 if self.base is None else self.base.n_ids

    @property
    def n_bytes(self) -> int:
        """Memory of the branch without its base."""
        n_ids = self.ids.nbytes if self.buffer is None else self.buffer.n_bytes
        n_request = 0 if self.request is None else self.request.n_bytes
        return n_ids + n_request + _OVERHEAD * max(1, len(self.positions))


@dataclass(slots=True, kw_only=True, eq=False)
class CachedPath:
    """One prompt and its output."""

    position: bytes  # after its reply (`RestoredRequest.positions`)
    base: "CachedPath | None"  # the path that it extends
    branch: Branch
    n_ids: int
    closed: bool  # the output ends with an end-of-message token
    rendered: RenderedPrefix  # of the prompt
    tools: bytes  # digest of the offered tools
    reasons: bool  # a message of its prompt has reasoning
    hasher: blake2b  # BLAKE2b of its ids

    def ids(self) -> list[Ids]:
        """Return the ids of prompt and output, in parts."""
        found, path = list[Ids](), self
        while True:
            branch = path.branch
            found.append(branch.ids[: path.n_ids - branch.n_base])
            if branch.base is None:
                return found[::-1]
            path = branch.base


class TokenCache:
    """The paths of one session, by the position after their reply.

    `get` and `requests` only read, and may run on another thread during calls of the
    others.
    """

    def __init__(self) -> None:
        self._paths: dict[bytes, CachedPath] = {}
        # most recently used last, and each branch after all that fork from it
        self._branches: OrderedDict[Branch, None] = OrderedDict()
        self._budget: CacheBudget | None = None

    def __len__(self) -> int:
        return len(self._paths)

    def get(self, position: bytes) -> CachedPath | None:
        """Return the path whose reply ends at a position."""
        return self._paths.get(position)

    def requests(self) -> list[KnownRequest]:
        """Return the latest request of each branch used lately, latest first."""
        latest = islice(reversed(self._branches), _COMPARED)
        return [each.request for each in latest if each.request is not None]

    def remember(
        self,
        path: CachedPath,
        budget: "CacheBudget",
        request: KnownRequest | None = None,
    ) -> None:
        """Store the path of a reply; of equal replies the last one is kept.

        ``path`` has a branch of its own, with all its tokens. ``budget`` is the
        gateway's, always the same one. ``request``: for `requests`.
        """
        self._budget = budget
        replaced = self._paths.pop(path.position, None)
        own, base = path.branch, path.base
        branch = own
        if base is not None and base.branch in self._branches and len(own.ids):
            if base.n_ids == base.branch.n_base + len(base.branch.ids):
                branch = base.branch
            else:
                branch.base = base
            if branch.base is not None:
                # a view would keep the tokens of the base in memory once more
                own.ids, own.buffer = own.ids[branch.n_base :].copy(), None
        before = branch.n_bytes if branch in self._branches else 0
        branch.ids, branch.buffer, path.branch = own.ids, own.buffer, branch
        branch.positions.append(path.position)
        branch.request = request
        self._paths[path.position] = path
        used: Branch | None = branch
        while used is not None:
            self._branches[used] = None
            self._branches.move_to_end(used)
            used = None if used.base is None else used.base.branch
        if replaced is not None and not self._needs(replaced.branch):
            self._release(replaced.branch)
        budget.add(self, branch, branch.n_bytes - before)

    def release_oldest(self) -> None:
        """Drop one branch that no other extends."""
        self._release(next(iter(self._branches)))

    def clear(self) -> None:
        """Drop all paths."""
        while self._branches:
            self.release_oldest()

    def _needs(self, branch: Branch) -> bool:
        """Whether a branch has a path, or another branch extends it."""
        paths = map(self._paths.get, branch.positions)
        bases = (other.base for other in self._branches)
        return any(
            path is not None and path.branch is branch for path in (*paths, *bases)
        )

    def _release(self, branch: Branch) -> None:
        del self._branches[branch]
        for position in branch.positions:
            if (path := self._paths.get(position)) and path.branch is branch:
                del self._paths[position]
        assert self._budget is not None
        self._budget.remove(self, branch, last=not self._branches)


class CacheBudget:
    """A limit in bytes on the memory of all sessions' branches.

    Requests are dropped first, since they only save work: a prompt whose ids are gone is
    rendered, and may differ from them.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.n_bytes = 0
        # sessions, and branches with a request; most recently added to last
        self._sessions: OrderedDict[TokenCache, None] = OrderedDict()
        self._requests: OrderedDict[Branch, None] = OrderedDict()

    def add(self, session: TokenCache, branch: Branch, n_bytes: int) -> None:
        """Count what a branch grew by, and drop the oldest if the limit is exceeded."""
        self.n_bytes += n_bytes
        self._sessions[session] = None
        self._sessions.move_to_end(session)
        self._requests.pop(branch, None)
        if branch.request is not None:
            self._requests[branch] = None
        while self.n_bytes > self.max_bytes and self._requests:
            oldest, _ = self._requests.popitem(last=False)
            n_before, oldest.request = oldest.n_bytes, None
            self.n_bytes -= n_before - oldest.n_bytes
        while self.n_bytes > self.max_bytes:
            next(iter(self._sessions)).release_oldest()

    def remove(self, session: TokenCache, branch: Branch, *, last: bool) -> None:
        """Uncount a branch, the session's last one or not."""
        self.n_bytes -= branch.n_bytes
        self._requests.pop(branch, None)
        if last:
            del self._sessions[session]

"""Packs as runs of tokens without a branch inside, and `varlen`, which attends by them."""

from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from trajkit._arguments import plain_array
from trajkit.errors import ArgumentError, LayoutError
from trajkit.tables.ragged import Longs, offsets_of


@dataclass(frozen=True, slots=True)
class Runs:
    """The longest runs of tokens that share one subtree_end.

    A run has no branch inside: the first token of another follows the last one of the run
    above it.
    """

    # shape (n_runs,): the first token, the end, tokens above the first one, and the
    # number of the run above; -1: none
    start: Longs
    stop: Longs
    depth: Longs
    above: Longs
    # a token whose subtree is not nested, and what is wrong with it
    fault: tuple[int, str] | None = None

    @classmethod
    def of(cls, end: Longs, n_prefix: int = 0) -> Self:
        """Cut tokens with these ends of subtrees; faults count after ``n_prefix``."""
        start = np.flatnonzero(np.diff(end, prepend=end[:1] + 1))
        stop = np.append(start, len(end))[1:]
        depth, above = np.zeros((2, len(start)), np.int64)
        open_runs: list[int] = []
        for run, first in enumerate(start.tolist()):
            while open_runs and end[start[open_runs[-1]]] <= first:
                open_runs.pop()
            above[run] = top = open_runs[-1] if open_runs else -1
            limit = end[start[top]] if open_runs else len(end)
            if open_runs:
                depth[run] = depth[top] + stop[top] - start[top]
            if not stop[run] <= end[first] <= limit:
                found = f"subtree_end is {end[first] - n_prefix}, and the run of tokens"
                found += f" that share it ends at {stop[run] - n_prefix}, the subtree"
                found += f" around it at {limit - n_prefix}"
                return cls(start, stop, depth, above, (first - n_prefix, found))
            open_runs.append(run)
        return cls(start, stop, depth, above)

    def at(self, tokens: Longs) -> Longs:
        """The run of each token."""
        return np.searchsorted(self.start, tokens, side="right") - 1

    def path(self, run: int) -> Longs:
        """The tokens from the root to the last one of a run."""
        parts = []
        while run >= 0:
            parts.append(np.arange(self.start[run], self.stop[run]))
            run = int(self.above[run])
        return np.concatenate(parts[::-1])


@dataclass(frozen=True, slots=True)
class Varlen:
    """A tree as sequences of queries and of keys, for varlen attention without a mask.

    Queries are the tokens of the pack in order, cut into segments without a branch. The
    keys of a segment are gathered: the path from its root to its last token.

    Attributes
    ----------
    kv_index : int64, shape (n_keys,)
        The token of the pack at each key: ``key.index_select(0, kv_index)``.
    cu_seqlens_q, cu_seqlens_k : int32, shape (n_segments + 1,)
        Bounds of the segments among the queries, and of their paths among the keys.
    max_seqlen_q, max_seqlen_k : int
        The longest segment and the longest path.
    """

    kv_index: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    max_seqlen_q: int
    max_seqlen_k: int


def varlen(pack: Any) -> Varlen:
    """The layout of a pack for FlashAttention's varlen functions and those like them.

    Rotary positions are applied before keys are gathered, from the pack's
    ``position_ids``. The kernel's causal mask must be aligned at the ends of queries and
    keys (FlashAttention 2.1 and later), and a window of ``w`` tokens is
    ``window_size=(w - 1, 0)``: the keys of a path have positions without a gap.

    Parameters
    ----------
    pack : Pack, dict or array
        A `trajkit.torch.Pack`, a line of a packs table, or its ``subtree_end``.

    Returns
    -------
    Varlen
        Of tensors on the device of ``subtree_end`` if that is a tensor, else of arrays.

    Raises
    ------
    LayoutError
        Subtrees are not nested; or the pack attends tokens of another one
        (``oversize="carry"``), which are not among its keys.

    Examples
    --------
    >>> import trajkit as tk
    >>> layout = tk.packs.varlen([6, 6, 4, 4, 6, 6])
    >>> layout.cu_seqlens_q.tolist(), layout.cu_seqlens_k.tolist()
    ([0, 2, 4, 6], [0, 2, 6, 10])
    >>> layout.kv_index.tolist()
    [0, 1, 0, 1, 2, 3, 0, 1, 4, 5]
    """
    for name in ("prefix_end", "next_source"):
        part = _field(pack, name)
        if part is not None and len(part):
            raise LayoutError(
                f"the pack has {name}: a tree goes on in another pack, whose keys and "
                "values are not here. Pack with oversize='repeat'"
            )
    given = _field(pack, "subtree_end")
    given = pack if given is None else given
    try:
        ends = np.asarray(plain_array(given), np.int64)
        (_,) = ends.shape
        runs = Runs.of(ends)
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(
            f"pack is of type {type(pack).__name__}: expected a Pack, a line of packs, or "
            "its subtree_end"
        ) from None
    if runs.fault is not None:
        raise LayoutError("token {}: {}".format(*runs.fault))
    paths = [runs.path(run) for run in range(len(runs.start))]
    kv_index: Any = np.concatenate([np.zeros(0, np.int64), *paths])
    n_queries, n_keys = runs.stop - runs.start, runs.depth + runs.stop - runs.start
    q, k = (offsets_of(n).astype(np.int32) for n in (n_queries, n_keys))
    if hasattr(given, "new_tensor"):
        kv_index = given.new_tensor(kv_index).long()
        q, k = (given.new_tensor(bounds).int() for bounds in (q, k))
    most = (int(n.max(initial=0)) for n in (n_queries, n_keys))
    return Varlen(kv_index, q, k, *most)


def _field(pack: Any, name: str) -> Any:
    return pack.get(name) if isinstance(pack, dict) else getattr(pack, name, None)

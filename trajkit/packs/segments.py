"""`varlen`: a pack for attention kernels that take sequences of unequal length."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trajkit.errors import LayoutError


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
    pack : Pack, mapping or array
        What has ``subtree_end``: a `trajkit.torch.Pack`, a line of a packs table as a
        dict, or the array itself.

    Returns
    -------
    Varlen
        Of tensors on the device of ``subtree_end`` if that is a tensor, else of arrays.

    Raises
    ------
    LayoutError
        Subtrees are not nested; or the pack attends tokens of another one
        (``oversize="carry"``), which are not among its keys.

    Notes
    -----
    The number of keys is the sum of the path lengths over all segments: close to the
    number of tokens for samples of a prompt, a multiple for long runs with drift.

    Examples
    --------
    >>> import trajkit as tk
    >>> layout = tk.packs.varlen([6, 6, 4, 4, 6, 6])
    >>> layout.cu_seqlens_q.tolist(), layout.cu_seqlens_k.tolist()
    ([0, 2, 4, 6], [0, 2, 6, 10])
    >>> layout.kv_index.tolist()
    [0, 1, 0, 1, 2, 3, 0, 1, 4, 5]
    """
    given = _field(pack, "subtree_end", pack)
    for name in ("prefix_end", "next_source"):
        if len(_field(pack, name, ())):
            raise LayoutError(
                f"the pack has {name}: a tree goes on in another pack, whose keys and "
                "values are not here. Pack with oversize='repeat'"
            )
    end = np.asarray(given.cpu() if hasattr(given, "cpu") else given, np.int64)
    n = len(end)
    starts = np.flatnonzero(np.diff(end, prepend=-1))
    stops = np.append(starts[1:], n)
    paths: list[np.ndarray[Any, Any]] = []
    open_segments: list[tuple[int, int]] = []
    for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
        while open_segments and open_segments[-1][0] <= start:
            open_segments.pop()
        limit, parent = open_segments[-1] if open_segments else (n, -1)
        if not stop <= end[start] <= limit:
            raise LayoutError(
                f"token {start}: subtree_end is {end[start]}, and the run of tokens that "
                f"share it ends at {stop}, the subtree around it at {limit}"
            )
        own = np.arange(start, stop)
        paths.append(np.concatenate([paths[parent], own]) if parent >= 0 else own)
        open_segments.append((int(end[start]), number))
    lengths = np.array([len(path) for path in paths], np.int64)
    kv_index = np.concatenate(paths) if paths else np.zeros(0, np.int64)
    bounds = np.append(starts, n), np.append(0, np.cumsum(lengths))
    q, k = (x.astype(np.int32) for x in bounds)
    most = (int((stops - starts).max(initial=0)), int(lengths.max(initial=0)))
    if hasattr(given, "new_tensor"):
        tensors = (given.new_tensor(x) for x in (kv_index, q, k))
        kv_index, q, k = (
            x.long() if at == 0 else x.int() for at, x in enumerate(tensors)
        )
    return Varlen(kv_index, q, k, *most)


def _field(pack: Any, name: str, absent: Any) -> Any:
    """A field of a pack, whatever holds it; a null as ``absent``."""
    if isinstance(pack, dict):
        value = pack.get(name)
    else:
        value = getattr(pack, name, None)
    return absent if value is None else value

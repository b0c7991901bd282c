"""The tree mask in the forms that attention kernels take.

``subtree_end`` defines the mask: token ``q`` attends token ``kv`` where
``kv <= q < subtree_end[kv]``. A sliding window of ``w`` also asks for
``position_ids[q] - position_ids[kv] < w``: positions are depths in the tree, so the
window counts tokens of the row and not of the pack.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trajkit.errors import LayoutError

Ints: TypeAlias = npt.NDArray[np.integer]
Bools: TypeAlias = npt.NDArray[np.bool_]
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Window: TypeAlias = int | MaskMod | None
"""What a layer attends of a row: the last tokens, by a function of positions, or all."""

BLOCK = 128
"""Tokens a side of a block of a `BlockMask`; the fastest that was measured."""


@dataclass(frozen=True, slots=True)
class TokenRanges:
    """Where tokens of one side of the mask are in pre-order.

    Attributes
    ----------
    enter : ndarray of int, shape (n,)
        The index of each token in the pack, in any order.
    end : ndarray of int, shape (n,)
        ``subtree_end`` of each token.
    position : ndarray of int, shape (n,)
        The depth of each token.
    """

    enter: Ints
    end: Ints
    position: Ints

    def select(self, order: Ints) -> "TokenRanges":
        """These tokens in another order."""
        return TokenRanges(self.enter[order], self.end[order], self.position[order])


def token_ranges(
    subtree_end: Tensor, position_ids: Tensor | None, window: int | None = None
) -> TokenRanges:
    """The ranges of all tokens of a pack, in its order; reads tensors of any device.

    Without a window, positions are not needed.
    """
    end = host_ints(subtree_end)
    if position_ids is None and window is None:
        position: Ints = np.zeros_like(end)
    elif position_ids is None or position_ids.shape != end.shape:
        raise LayoutError(
            f"a window needs position_ids of shape {end.shape}: distances in the pack "
            "are not distances in a row"
        )
    else:
        position = host_ints(position_ids)
    return TokenRanges(np.arange(len(end), dtype=np.int32), end, position)


def host_ints(values: Tensor) -> Ints:
    """The values as a numpy array; a tensor of another device is copied."""
    result: Ints = values.cpu().numpy()
    return result


def dense_mask(
    subtree_end: Tensor, position_ids: Tensor | None = None, window: int | None = None
) -> Tensor:
    """The mask as one bool for each pair of tokens, for short packs and for tests.

    Parameters
    ----------
    subtree_end : int tensor, shape (n,)
    position_ids : int tensor, shape (n,), optional
        Required with a window.
    window : int, optional
        Attend only the last ``window`` tokens of the row, the token itself included.

    Returns
    -------
    bool tensor, shape (1, 1, n, n)
        True where the query (third axis) attends the key; on the device of
        ``subtree_end``. `torch.nn.functional.scaled_dot_product_attention` takes it.
    """
    tokens = token_ranges(subtree_end, position_ids, window)
    return pair_mask(tokens, tokens, subtree_end.device, window)


def pair_mask(
    query: TokenRanges, key: TokenRanges, device: torch.device, window: Window
) -> Tensor:
    """As `dense_mask`, of queries against keys, each in an order of its own."""
    mask_mod = _mask_mod(query, key, device, window)
    q, kv = (torch.arange(len(side.enter), device=device) for side in (query, key))
    zero = q.new_zeros(())
    return mask_mod(zero, zero, q[:, None], kv[None, :])[None, None]


def _mask_mod(
    query: TokenRanges, key: TokenRanges, device: torch.device, window: Window
) -> MaskMod:
    """The mask of a pair of indices, as FlexAttention compiles it."""
    end = _int32(key.end, device)
    if query is key:

        def tree(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (kv <= q) & (q < end[kv])

    else:
        enter_q, enter_k = (_int32(side.enter, device) for side in (query, key))

        def tree(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (enter_k[kv] <= enter_q[q]) & (enter_q[q] < end[kv])

    if window is None:
        return tree
    depth_q, depth_k = (_int32(side.position, device) for side in (query, key))
    if callable(window):
        seen = window

        def inside(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return tree(b, h, q, kv) & seen(b, h, depth_q[q], depth_k[kv])

        return inside

    def near(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return tree(b, h, q, kv) & (depth_q[q] - depth_k[kv] < window)

    return near


def _int32(values: Ints, device: torch.device) -> Tensor:
    return torch.from_numpy(values.astype(np.int32)).to(device, non_blocking=True)


def flex_block_mask(
    subtree_end: Tensor,
    position_ids: Tensor | None = None,
    window: int | None = None,
    *,
    block_size: int = BLOCK,
    device: torch.device | str | None = None,
) -> BlockMask:
    """The mask for `torch.nn.attention.flex_attention`, without `create_block_mask`.

    Blocks that every query attends entirely are listed apart from partly masked ones,
    so the kernel evaluates the mask only in the latter. The lists come from the least
    and the greatest ``subtree_end`` of each block: the cost grows with the number of
    blocks, not of pairs of tokens.

    Parameters
    ----------
    subtree_end, position_ids : int tensors, shape (n,)
        Of one pack. Tensors on the CPU are read in place; others are copied to it.
    window : int, optional
        As for `dense_mask`.
    block_size : int
        Tokens a side.
    device : torch device, optional
        Where the mask is used. Default: the device of ``subtree_end``.

    Returns
    -------
    BlockMask
        For one batch entry and all heads. ``mask_mod`` reads ``subtree_end``, so a
        kernel that is compiled once serves all packs of a length.
    """
    tokens = token_ranges(subtree_end, position_ids, window)
    place = torch.device(device if device is not None else subtree_end.device)
    return block_mask(tokens, tokens, place, window, block_size)


def block_mask(
    query: TokenRanges,
    key: TokenRanges,
    device: torch.device,
    window: Window = None,
    block_size: int = BLOCK,
) -> BlockMask:
    """The `BlockMask` of queries against keys, each in an order of its own.

    Parameters
    ----------
    query, key : TokenRanges
        The tokens of either side, in the order in which the kernel sees them. The same
        object: all tokens of a pack, in its order.
    device, window, block_size
        As for `flex_block_mask`.
    """
    visited, full = _blocks(query, key, window, block_size)
    partial = visited & ~full
    lists = {}
    sides = {"kv": partial, "full_kv": full, "q": partial.T, "full_q": full.T}
    for name, blocks in sides.items():
        for what, x in zip(
            ("num_blocks", "indices"), _index_lists(blocks), strict=True
        ):
            lists[f"{name}_{what}"] = torch.from_numpy(x).to(device, non_blocking=True)
    return BlockMask(
        **lists,
        seq_lengths=(len(query.enter), len(key.enter)),
        BLOCK_SIZE=(block_size, block_size),
        mask_mod=_mask_mod(query, key, device, window),
    )


def _blocks(
    query: TokenRanges, key: TokenRanges, window: Window, block_size: int
) -> tuple[Bools, Bools]:
    first, last = (f(query.enter, block_size)[:, None] for f in (_least, _greatest))
    low, high = (f(key.enter, block_size)[None, :] for f in (_least, _greatest))
    visited = (low <= last) & (first < _greatest(key.end, block_size)[None, :])
    full = (high <= first) & (last < _least(key.end, block_size)[None, :])
    if callable(window):
        full[:] = False
    elif window is not None:
        near = _least(query.position, block_size)[:, None] - _greatest(
            key.position, block_size
        )
        far = _greatest(query.position, block_size)[:, None] - _least(
            key.position, block_size
        )
        visited &= near < window
        full &= far < window
    return visited, full


def _least(values: Ints, block_size: int) -> Ints:
    result: Ints = np.minimum.reduceat(values, np.arange(0, len(values), block_size))
    return result


def _greatest(values: Ints, block_size: int) -> Ints:
    result: Ints = np.maximum.reduceat(values, np.arange(0, len(values), block_size))
    return result


def _index_lists(blocks: Bools) -> tuple[Ints, Ints]:
    """How many blocks each line has, and their columns first in its list."""
    counts = blocks.sum(axis=1, dtype=np.int32)
    indices = np.zeros(blocks.shape, np.int32)
    line, column = np.nonzero(blocks)
    starts = np.cumsum(counts) - counts
    indices[line, np.arange(len(line)) - starts[line]] = column
    return counts[None, None], indices[None, None]


def cu_seqlens(subtree_end: Tensor) -> Tensor:
    """The bounds of the rows of a pack without branches, for varlen attention.

    Parameters
    ----------
    subtree_end : int tensor, shape (n,)

    Returns
    -------
    int32 tensor, shape (n_rows + 1,)
        Ascending, from 0 to ``n``; a padding token is a row of its own.

    Raises
    ------
    LayoutError
        A tree of the pack has a branch: bounds cannot express its mask.
    """
    end = host_ints(subtree_end)
    bounds = [0]
    while bounds[-1] < len(end):
        start = bounds[-1]
        stop = int(end[start])
        bent = np.flatnonzero(end[start:stop] != stop)
        if len(bent):
            token = start + int(bent[0])
            raise LayoutError(
                f"token {token}: the tree of tokens {start} to {stop} branches after "
                f"it (subtree_end {end[token]}), which one cu_seqlens cannot express: "
                "use trajkit.packs.varlen, which gives two and the keys to gather, "
                "flex_block_mask, or packs with layout='rows'"
            )
        bounds.append(stop)
    return torch.tensor(bounds, dtype=torch.int32, device=subtree_end.device)


def flashmask_columns(subtree_end: Tensor) -> Tensor:
    """FlashMask's ``startend_row_indices`` of the mask, for ``causal=True``.

    Parameters
    ----------
    subtree_end : int tensor, shape (n,)

    Returns
    -------
    int32 tensor, shape (1, 1, n, 1)
        For each key, the first query that does not attend it any more: the causal form
        with one column (paddle.nn.functional.flashmask_attention).
    """
    return subtree_end.to(torch.int32)[None, None, :, None]


def magi_slices(subtree_end: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """MagiAttention's slices of the mask: two for each segment without a branch.

    A segment ``[a, b)`` whose tokens all end at ``e`` is attended causally by itself
    and entirely by ``[b, e)``.

    Parameters
    ----------
    subtree_end : int tensor, shape (n,)

    Returns
    -------
    q_ranges, k_ranges : int32 tensors, shape (n_slices, 2)
        Half-open ranges of tokens.
    types : int32 tensor, shape (n_slices,)
        0 for full, 1 for causal (MagiAttention's ``AttnMaskType``).
    """
    end = host_ints(subtree_end)
    starts = np.flatnonzero(np.diff(end, prepend=-1))
    stops = np.append(starts[1:], len(end))
    ends = end[starts]
    own = np.stack([starts, stops], 1)
    below = np.stack([stops, ends], 1)
    filled = stops < ends
    q_ranges = np.concatenate([own, below[filled]])
    k_ranges = np.concatenate([own, own[filled]])
    types = np.repeat([1, 0], [len(own), int(filled.sum())])
    device = subtree_end.device
    return _int32(q_ranges, device), _int32(k_ranges, device), _int32(types, device)

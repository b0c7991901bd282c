"""The tree mask in the forms that attention kernels take.

``subtree_end`` defines the mask: token ``q`` attends token ``kv`` where
``kv <= q < subtree_end[kv]``. A sliding window of ``w`` also asks for
``position_ids[q] - position_ids[kv] < w``: positions are depths in the tree, so the
window counts tokens of the row and not of the pack. In all functions ``subtree_end`` and
``position_ids`` are int tensors of shape (n,), of one pack.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from trajkit.errors import LayoutError

Ints: TypeAlias = npt.NDArray[np.integer]
Tokens: TypeAlias = npt.NDArray[np.int32]
"""Of each token its index in the pack, ``subtree_end`` and depth: shape (3, n)."""
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Window: TypeAlias = int | MaskMod | None
"""What a layer attends of a row: the last tokens, by a function of positions, or all."""

BLOCK = 128
"""Tokens a side of a block of a `BlockMask`; the fastest that was measured."""


def tokens_of(
    subtree_end: Tensor, position_ids: Tensor | None, window: int | None = None
) -> Tokens:
    """The tokens of a pack in its order; positions are needed for a window alone."""
    n = subtree_end.shape
    if position_ids is None and window is None:
        position_ids = torch.zeros(n)
    elif position_ids is None or position_ids.shape != n:
        raise LayoutError(
            f"a window needs position_ids of shape {tuple(n)}: distances in the pack are "
            "not distances in a row"
        )
    end, position = (x.cpu().numpy() for x in (subtree_end, position_ids))
    return np.stack([np.arange(len(end)), end, position]).astype(np.int32)


def dense_mask(
    subtree_end: Tensor, position_ids: Tensor | None = None, window: int | None = None
) -> Tensor:
    """The mask as one bool for each pair of tokens, for short packs and for tests.

    Parameters
    ----------
    subtree_end, position_ids
        See above; ``position_ids`` is required with a window.
    window : int, optional
        Attend only the last ``window`` tokens of the row, the token itself included.

    Returns
    -------
    bool tensor, shape (1, 1, n, n)
        True where the query (third axis) attends the key; on the device of
        ``subtree_end``. `torch.nn.functional.scaled_dot_product_attention` takes it.
    """
    tokens = tokens_of(subtree_end, position_ids, window)
    return pair_mask(tokens, tokens, subtree_end.device, window)


def pair_mask(
    query: Tokens, key: Tokens, device: torch.device, window: Window
) -> Tensor:
    """As `dense_mask`, of queries against keys, each in an order of its own."""
    q, kv = (torch.arange(side.shape[1], device=device) for side in (query, key))
    zero = q.new_zeros(())
    attends = _mask_mod(query, key, device, window)
    return attends(zero, zero, q[:, None], kv[None, :])[None, None]


def _mask_mod(
    query: Tokens, key: Tokens, device: torch.device, window: Window
) -> MaskMod:
    """The mask of a pair of indices, as FlexAttention compiles it."""
    in_order = query is key
    enter_q, _, depth_q = torch.from_numpy(query).to(device)
    enter_k, end, depth_k = torch.from_numpy(key).to(device)

    def attends(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        at, of = (q, kv) if in_order else (enter_q[q], enter_k[kv])
        inside = (of <= at) & (at < end[kv])
        if window is None:
            return inside
        if callable(window):
            return inside & window(b, h, depth_q[q], depth_k[kv])
        return inside & (depth_q[q] - depth_k[kv] < window)

    return attends


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
    subtree_end, position_ids, window
        As for `dense_mask`. Tensors of other devices are copied to the CPU.
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
    tokens = tokens_of(subtree_end, position_ids, window)
    where = torch.device(subtree_end.device if device is None else device)
    return block_mask(tokens, tokens, where, window, block_size)


def block_mask(
    query: Tokens,
    key: Tokens,
    device: torch.device,
    window: Window = None,
    block_size: int = BLOCK,
) -> BlockMask:
    """The `BlockMask` of queries against keys, each in an order of its own.

    The same object for both: all tokens of a pack, in its order.
    """
    low, high = _bounds(query[:, :, None], block_size)
    key_low, key_high = _bounds(key[:, None, :], block_size, axis=2)
    visited = (key_low[0] <= high[0]) & (low[0] < key_high[1])
    full = (key_high[0] <= low[0]) & (high[0] < key_low[1])
    if callable(window):
        full[:] = False
    elif window is not None:
        visited &= low[2] - key_high[2] < window
        full &= high[2] - key_low[2] < window
    partial = visited & ~full
    lists = {}
    sides = {"kv": partial, "full_kv": full, "q": partial.T, "full_q": full.T}
    for name, blocks in sides.items():
        order = np.argsort(~blocks, axis=1, kind="stable")
        for what, x in (("num_blocks", blocks.sum(1)), ("indices", order)):
            values = torch.from_numpy(x[None, None].astype(np.int32))
            lists[f"{name}_{what}"] = values.to(device, non_blocking=True)
    return BlockMask(
        **lists,
        seq_lengths=(query.shape[1], key.shape[1]),
        BLOCK_SIZE=(block_size, block_size),
        mask_mod=_mask_mod(query, key, device, window),
    )


def _bounds(tokens: Any, block_size: int, axis: int = 1) -> tuple[Ints, Ints]:
    """The least and the greatest index, ``subtree_end`` and depth of each block."""
    starts = np.arange(0, tokens.shape[axis], block_size)
    low, high = (
        bound.reduceat(tokens, starts, axis=axis) for bound in (np.minimum, np.maximum)
    )
    return low, high


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
    end = subtree_end.cpu().numpy()
    # no token before a root has a subtree that holds it
    starts = np.maximum.accumulate(np.append(0, end[:-1])) <= np.arange(len(end))
    bounds = np.append(np.flatnonzero(starts), len(end)).astype(np.int32)
    ends = np.repeat(bounds[1:], np.diff(bounds))
    if len(bent := np.flatnonzero(end != ends)):
        token = int(bent[0])
        raise LayoutError(
            f"token {token}: its tree, which ends at {ends[token]}, branches after it "
            f"(subtree_end {end[token]}), which one cu_seqlens cannot express: use "
            "trajkit.packs.varlen, which gives two and the keys to gather, "
            "flex_block_mask, or packs with layout='rows'"
        )
    return torch.from_numpy(bounds).to(subtree_end.device)

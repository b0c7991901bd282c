"""Attention over a tree of tokens, for models of Hugging Face transformers.

Importing this module registers the attention ``"trajkit"``. It reads the tree from the
keyword argument ``tree``, which `model_inputs` puts among a model's inputs and which
models hand down to their attention layers. Without it, it raises: transformers would
otherwise derive a mask from the positions, which go back at every branch.
"""

import functools
import itertools
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface
from transformers.integrations.flex_attention import (
    compile_friendly_flex_attention,
    flex_attention_forward,
)

from trajkit._arguments import check_choice
from trajkit.errors import LayoutError, UnsupportedModelError
from trajkit.torch.carried import CarriedStates
from trajkit.torch.linear import Segments
from trajkit.torch.masks import (
    Ints,
    TokenRanges,
    block_mask,
    host_ints,
    pair_mask,
    token_ranges,
)
from trajkit.torch.packs import Pack

ATTENTION = "trajkit"
"""The name to pass as ``attn_implementation``."""

Kernel: TypeAlias = Literal["masked", "trunk"]
Mask: TypeAlias = Tensor | BlockMask

_LEAST_SHARE = 0.01
"""Of the attended pairs of a pack, for a trunk that is attended apart."""


class TreeAttention:
    """The mask of one pack, in the form that each attention layer needs.

    On CUDA masks are those of FlexAttention, elsewhere one bool for each pair of tokens.
    They are built when a layer first asks for them and kept for the other layers and
    for the recomputation of activations.

    Parameters
    ----------
    device : torch device
        Where the model's attention runs.
    kernel : {"masked", "trunk"}
        "masked": attention under the complete mask. "trunk": the deepest path of each
        tree with a hundredth of the work or more by causal
        `scaled_dot_product_attention`, which needs no mask, and the other tokens under
        a mask. Layers with a sliding window are always masked.
    kernel_options : dict, optional
        For FlexAttention, such as block sizes.
    carried : CarriedStates, optional
        Required for a part of a tree that was cut (``oversize="carry"``). Packs with a
        prefix are always masked.

    Raises
    ------
    LayoutError
        ``carried`` is missing.
    """

    def __init__(
        self,
        pack: Pack,
        device: torch.device | str,
        kernel: Kernel = "masked",
        kernel_options: dict[str, Any] | None = None,
        carried: CarriedStates | None = None,
    ) -> None:
        check_choice("kernel", kernel, Kernel)
        if pack.is_part and carried is None:
            raise LayoutError(
                "a tree of the pack continues in another pack, and gradients go back "
                "through its keys and values: run all packs of the tree with "
                "trajkit.torch.carry_backward or carry_logprobs"
            )
        self.device = torch.device(device)
        self.kernel_options = kernel_options
        self.n_tokens = len(pack.subtree_end)
        self.carried = carried
        self._tokens = token_ranges(pack.subtree_end, pack.position_ids)
        self._keys = _after_prefix(self._tokens, host_ints(pack.prefix_end))
        self._masks: dict[int | None, Mask] = {}
        self._trunks: Trunks | None = None
        if kernel == "trunk" and self._keys is self._tokens:
            self._trunks = Trunks(self._tokens, self.device)

    def mask(self, window: int | None) -> Mask:
        """The mask of a layer with this sliding window."""
        if window not in self._masks:
            self._masks[window] = _mask(self._tokens, self._keys, self.device, window)
        return self._masks[window]

    @functools.cached_property
    def segments(self) -> Segments:
        """The segments of the pack, for layers of linear attention."""
        return Segments(self._tokens, self.device)

    def trunks(self, window: int | None) -> "Trunks | None":
        """The trunks of the pack, if layers with this window attend them apart."""
        return self._trunks if window is None else None


def _after_prefix(tokens: TokenRanges, prefix_end: Ints) -> TokenRanges:
    """The tokens of a pack after those of its prefix, which is a path from a root."""
    n = len(prefix_end)
    if not n:
        return tokens
    return TokenRanges(
        np.concatenate([np.arange(-n, 0), tokens.enter]),
        np.concatenate([prefix_end, tokens.end]),
        np.concatenate([np.arange(n), tokens.position]),
    )


def _mask(
    query: TokenRanges, key: TokenRanges, device: torch.device, window: int | None
) -> Mask:
    if device.type == "cuda":
        return block_mask(query, key, device, window)
    return pair_mask(query, key, device, window)


class Trunks:
    """The deepest paths of large trees, and an order of tokens that begins with them.

    Attributes
    ----------
    bounds : list of int, length n_trunks + 1
        Bounds of the trunks in that order.
    order, inverse : int64 tensor, shape (n_tokens,)
        The token at each place, and the place of each token.
    branches : BlockMask, bool tensor or None
        The mask of the tokens on no trunk against all, in that order.
    """

    def __init__(self, tokens: TokenRanges, device: torch.device) -> None:
        enter, end, position = tokens.enter, tokens.end, tokens.position
        roots = _roots(end)
        # A token is on the trunk of its tree if the tree's first deepest token is below.
        tree = np.searchsorted(roots, enter, side="right") - 1
        deepest = np.array(
            [
                a + int(position[a:b].argmax())
                for a, b in itertools.pairwise([*roots, len(end)])
            ],
            np.int64,
        )
        leaf = deepest[tree]
        on_trunk = (enter <= leaf) & (leaf < end)
        lengths = np.bincount(tree[on_trunk], minlength=len(roots))
        # Each trunk is a kernel call: those with little work (padding) stay masked.
        work = lengths * (lengths + 1) / 2
        apart = work >= _LEAST_SHARE * (end - enter).sum(dtype=np.float64)
        on_trunk &= apart[tree]
        self.bounds: list[int] = [0, *np.cumsum(lengths[apart]).tolist()]
        order = np.concatenate([np.flatnonzero(on_trunk), np.flatnonzero(~on_trunk)])
        inverse = np.empty_like(order)
        inverse[order] = np.arange(len(order))
        self.order = torch.from_numpy(order).to(device)
        self.inverse = torch.from_numpy(inverse).to(device)
        query = tokens.select(order[self.bounds[-1] :])
        self.branches: Mask | None = None
        if len(query.enter):
            self.branches = _mask(query, tokens.select(order), device, None)


def _roots(end: Ints) -> list[int]:
    """The first token of each tree."""
    roots, start = [], 0
    while start < len(end):
        roots.append(start)
        start = int(end[start])
    return roots


class _Reorder(torch.autograd.Function):  # type: ignore[misc]
    """``x[:, :, order]``, whose gradient is gathered rather than scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.inverse = inverse
        return x.index_select(2, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.index_select(2, ctx.inverse), None, None


def _reorder(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    result: Tensor = _Reorder.apply(x, order, inverse)
    return result


def tree_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    tree: TreeAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers calls in each layer.

    ``query`` is of shape (1, n_heads, n_tokens, head_dim), ``key`` and ``value`` have
    n_key_heads, and the output is of shape (1, n_tokens, n_heads, head_dim). A dropout is
    refused: a dropped weight of a shared token would be dropped for all rows. A token
    attends ``sliding_window`` tokens of its row, itself included. ``softcap`` and
    ``s_aux`` need CUDA.
    """
    _check_call(module, query, key, attention_mask, dropout, tree, kwargs)
    assert tree is not None
    if tree.carried is not None:
        key, value = tree.carried.extend(module, key, value)
    trunks = tree.trunks(sliding_window)
    plain = kwargs.get("softcap") is None and kwargs.get("s_aux") is None
    if trunks is not None and plain:
        return _trunk_attention(query, key, value, trunks, scaling, tree), None
    mask = tree.mask(sliding_window)
    if isinstance(mask, BlockMask):
        output: tuple[Tensor, Tensor | None] = flex_attention_forward(
            module,
            query,
            key,
            value,
            mask,
            scaling=scaling,
            kernel_options=tree.kernel_options,
            **kwargs,
        )
        return output
    if not plain:
        raise UnsupportedModelError(
            f"{type(module).__name__} uses softcap or attention sinks, which only run "
            "on CUDA (FlexAttention has no backward pass elsewhere)"
        )
    return _masked(query, key, value, mask, scaling, None).transpose(1, 2), None


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scaling: float | None,
    kernel_options: dict[str, Any] | None,
) -> Tensor:
    """Attention under a mask, by the kernel that takes it."""
    shared = query.shape[1] != key.shape[1]
    if isinstance(mask, BlockMask):
        output: Tensor = compile_friendly_flex_attention(
            query,
            key,
            value,
            training=True,
            block_mask=mask,
            scale=scaling,
            enable_gqa=shared,
            kernel_options=kernel_options,
        )
        return output
    return F.scaled_dot_product_attention(
        query, key, value, mask, scale=scaling, enable_gqa=shared
    )


def _check_call(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: Tensor | None,
    dropout: float,
    tree: TreeAttention | None,
    kwargs: dict[str, Any],
) -> None:
    name = type(module).__name__
    if tree is None:
        raise LayoutError(
            f"{name} got no tree: call the model with trajkit.torch.model_inputs(model, "
            "pack). A mask guessed from the positions would be wrong at every branch"
        )
    if attention_mask is not None:
        raise LayoutError(
            f"{name} got an attention_mask and a tree: pass the tree alone"
        )
    shape = (query.shape[0], query.shape[2], key.shape[2])
    if shape != (1, tree.n_tokens, tree.n_tokens):
        raise LayoutError(
            f"{name} got queries and keys of shape {tuple(query.shape)} and "
            f"{tuple(key.shape)} for a pack of {tree.n_tokens} tokens: pass one pack a "
            "call, without a cache"
        )
    if dropout:
        raise UnsupportedModelError(
            f"{name} drops attention weights with probability {dropout}: set "
            "attention_dropout to 0, since several rows share a token"
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError(
            f"{name} adds a bias that depends on places in the pack, not in a row"
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedModelError(f"{name} attends in both directions")


def _trunk_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    trunks: Trunks,
    scaling: float | None,
    tree: TreeAttention,
) -> Tensor:
    """Trunks by causal attention, the other tokens by FlexAttention."""
    q, k, v = (_reorder(x, trunks.order, trunks.inverse) for x in (query, key, value))
    parts = [
        F.scaled_dot_product_attention(
            q[:, :, a:b],
            k[:, :, a:b],
            v[:, :, a:b],
            is_causal=True,
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        for a, b in itertools.pairwise(trunks.bounds)
    ]
    if trunks.branches is not None:
        rest = q[:, :, trunks.bounds[-1] :]
        parts.append(_masked(rest, k, v, trunks.branches, scaling, tree.kernel_options))
    output = _reorder(torch.cat(parts, 2), trunks.inverse, trunks.order)
    return output.transpose(1, 2)


AttentionInterface.register(ATTENTION, tree_attention)

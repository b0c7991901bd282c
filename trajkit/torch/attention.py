"""Attention over a tree of tokens, for models of Hugging Face transformers.

Importing this module registers the attention ``"trajkit"``. It reads the tree from the
keyword argument ``tree``, which `model_inputs` puts among a model's inputs and which
models hand down to their attention layers. Without it, it raises: transformers would
otherwise derive a mask from the positions, which go back at every branch.

What a layer attends of a row (a window, a chunk), models say with the mask that they
build. The masks of ``"trajkit"`` are `LayerMask`, which keep this as a function of
positions; the tree says the rest.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.flex_attention import (
    compile_friendly_flex_attention,
    flex_attention_forward,
)
from transformers.masking_utils import causal_mask_function

from trajkit._arguments import check_choice
from trajkit.errors import LayoutError, UnsupportedModelError
from trajkit.torch.datasets import Pack
from trajkit.torch.masks import (
    Ints,
    MaskMod,
    TokenRanges,
    Window,
    block_mask,
    host_ints,
    pair_mask,
    token_ranges,
)
from trajkit.torch.states import CarriedStates, Segments

ATTENTION = "trajkit"
"""The name to pass as ``attn_implementation``."""

Kernel: TypeAlias = Literal["masked", "trunk"]
Mask: TypeAlias = Tensor | BlockMask


@dataclass(frozen=True, slots=True)
class LayerMask:
    """What a model lets layers attend of a row, in the place of their attention mask.

    Attributes
    ----------
    window : int, callable or None
        The last tokens, pairs by a function of their positions, or all.
    """

    window: Window


def layer_mask(
    *,
    mask_function: MaskMod,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> LayerMask | Tensor:
    """The mask that transformers builds for ``"trajkit"``, from its rule for a row."""
    window = _window(mask_function, local_size, device)
    tree = _TENSOR_MASKS.get()
    return LayerMask(window) if tree is None else tree.pairs(window)


_TENSOR_MASKS: ContextVar[TreeAttention | None] = ContextVar("tree", default=None)


@contextlib.contextmanager
def tensor_masks(tree: TreeAttention) -> Iterator[None]:
    """Gives layers the tree as one bool for each pair of tokens.

    For layers that choose the tokens that they attend (sparse attention): among those
    that the mask allows.
    """
    tree.gave_tensors = True
    token = _TENSOR_MASKS.set(tree)
    try:
        yield
    finally:
        _TENSOR_MASKS.reset(token)


def _window(
    mask_function: MaskMod, local_size: int | None, device: torch.device | str
) -> Window:
    if mask_function is causal_mask_function:
        return None
    zero = torch.zeros((), dtype=torch.int64, device=device)

    def attends(q: int, kv: int) -> bool:
        return bool(mask_function(zero, zero, zero + q, zero + kv))

    if attends(0, 1):
        raise UnsupportedModelError(
            "a layer lets tokens attend those after them, which a tree cannot express: "
            "train on rows"
        )
    size = local_size
    if (
        size
        and not attends(size, 0)
        and attends(size, 1)
        and attends(2 * size, size + 1)
    ):
        return size
    return mask_function


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
        self.gave_tensors = False
        self._tokens = token_ranges(pack.subtree_end, pack.position_ids)
        self._keys = _after_prefix(self._tokens, host_ints(pack.prefix_end))
        self._masks: dict[Window, Mask] = {}
        self._trunks: Trunks | None = None
        if kernel == "trunk" and self._keys is self._tokens:
            self._trunks = Trunks(self._tokens, self.device)

    def mask(self, window: Window) -> Mask:
        """The mask of a layer with this window."""
        if window not in self._masks:
            self._masks[window] = _mask(self._tokens, self._keys, self.device, window)
        return self._masks[window]

    def pairs(self, window: Window) -> Tensor:
        """As `mask`, as one bool for each pair of tokens on every device."""
        return pair_mask(self._tokens, self._keys, self.device, window)

    @functools.cached_property
    def segments(self) -> Segments:
        """The segments of the pack, for layers with a state."""
        return Segments(self._tokens, self.device)

    def trunks(self, window: Window) -> Trunks | None:
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
    query: TokenRanges, key: TokenRanges, device: torch.device, window: Window
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
    attention_mask: LayerMask | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    tree: TreeAttention | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function that transformers calls in each layer.

    ``query`` is of shape (1, n_heads, n_tokens, head_dim), ``key`` and ``value`` have
    n_key_heads, and the output is of shape (1, n_tokens, n_heads, head_dim). A dropout is
    refused: a dropped weight of a shared token would be dropped for all rows. What the
    mask says of a window counts, as in transformers' own attention; ``sliding_window``
    is for models that build none. ``s_aux`` are attention sinks, ``indices`` the tokens
    that a layer chose for each query under a mask of `tensor_masks`.
    """
    _check_call(module, query, key, attention_mask, dropout, tree, kwargs)
    assert tree is not None
    if tree.carried is not None:
        key, value = tree.carried.extend(module, key, value)
    plain = softcap is None and s_aux is None
    if isinstance(attention_mask, Tensor):
        mask: Mask = attention_mask
        if indices is not None:
            chosen = torch.zeros_like(attention_mask[:, 0])
            chosen.scatter_(-1, indices.long(), True)
            mask = attention_mask & chosen[:, None]
    else:
        window = attention_mask.window if attention_mask else sliding_window
        trunks = tree.trunks(window)
        if trunks is not None and plain:
            return _trunk_attention(query, key, value, trunks, scaling, tree), None
        mask = tree.mask(window)
    if isinstance(mask, BlockMask):
        flex: tuple[Tensor, Tensor | None] = flex_attention_forward(
            module,
            query,
            key,
            value,
            mask,
            scaling=scaling,
            softcap=softcap,
            s_aux=s_aux,
            kernel_options=tree.kernel_options,
        )
        return flex
    if plain:
        output = _masked(query, key, value, mask, scaling, None)
    else:
        output = _capped(query, key, value, mask, scaling, softcap, s_aux)
    # layers may view it, as they may the output of transformers' own attention
    return output.transpose(1, 2).contiguous(), None


def _capped(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with a soft cap or sinks, written out: no kernel of the CPU has them."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    if scaling is None:
        scaling = query.shape[-1] ** -0.5
    scores = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores).reshape(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, column], 3)
    wide = torch.promote_types(scores.dtype, torch.float32)
    shares = scores.softmax(3, dtype=wide).to(value.dtype)
    return shares[..., : key.shape[2]] @ value


def _masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask,
    scaling: float | None,
    kernel_options: dict[str, Any] | None,
) -> Tensor:
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


_REFUSED = {
    "position_bias": "adds a bias that depends on places in the pack, not in a row",
    "block_indices": "attends chosen blocks of the pack, not of a row",
}
"""What a layer may pass to its attention that a tree cannot follow."""


def _check_call(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: LayerMask | Tensor | None,
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
    if isinstance(attention_mask, Tensor) and not (
        tree.gave_tensors and attention_mask.dtype == torch.bool
    ):
        raise LayoutError(
            f"{name} got an attention mask (Tensor) and a tree. Pass the inputs of "
            "model_inputs as they are; a model that builds its mask by itself cannot "
            "train on packs"
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
    for key_word, what in _REFUSED.items():
        if kwargs.get(key_word) is not None:
            raise UnsupportedModelError(f"{name} {what}: train on rows")
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
    return output.transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, layer_mask)

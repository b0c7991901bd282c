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
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import causal_mask_function

from trajkit._arguments import check_choice
from trajkit.errors import LayoutError, UnsupportedModelError
from trajkit.torch.datasets import Pack
from trajkit.torch.masks import (
    MaskMod,
    Tokens,
    Window,
    block_mask,
    pair_mask,
    tokens_of,
)
from trajkit.torch.states import CarriedStates, Segments

ATTENTION = "trajkit"
"""The name to pass as ``attn_implementation``."""

Kernel: TypeAlias = Literal["masked", "trunk"]
Mask: TypeAlias = Tensor | BlockMask

_LEAST_SHARE = 0.01
"""Of the attended pairs of a pack, for a trunk that is attended apart."""
_REFUSED = {
    "position_bias": "adds a bias that depends on places in the pack, not in a row",
    "block_indices": "attends chosen blocks of the pack, not of a row",
}
"""What a layer may pass to its attention that a tree cannot follow."""


@dataclass(frozen=True, slots=True)
class LayerMask:
    """What a model lets layers attend of a row, in the place of their attention mask."""

    window: Window


_TENSOR_MASKS: ContextVar[TreeAttention | None] = ContextVar("tree", default=None)


@contextlib.contextmanager
def tensor_masks(tree: TreeAttention) -> Iterator[None]:
    """Gives layers the tree as one bool for each pair of tokens.

    For layers that choose the tokens that they attend, among those of the mask.
    """
    tree.gave_tensors = True
    token = _TENSOR_MASKS.set(tree)
    try:
        yield
    finally:
        _TENSOR_MASKS.reset(token)


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


def _window(
    mask_function: MaskMod, size: int | None, device: torch.device | str
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
    if size and attends(size, 1) and attends(2 * size, size + 1):
        return mask_function if attends(size, 0) else size
    return mask_function


class TreeAttention:
    """The mask of one pack, in the form that each attention layer needs.

    On CUDA masks are those of FlexAttention, elsewhere one bool for each pair of tokens.
    They are built when a layer first asks for them and kept for the other layers and
    for the recomputation of activations.

    Parameters
    ----------
    pack : Pack
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
        self.carried = carried
        self.gave_tensors = False
        self.tokens = self.keys = tokens_of(pack.subtree_end, pack.position_ids)
        self._masks: dict[Window, Mask] = {}
        n_prefix = len(pack.prefix_end)
        self._trunks = kernel == "trunk" and not n_prefix
        if n_prefix:
            # a path from a root, before all tokens of the pack
            depth = np.arange(n_prefix)
            path = [depth - n_prefix, pack.prefix_end.cpu().numpy(), depth]
            self.keys = np.concatenate([np.stack(path), self.tokens], 1, dtype=np.int32)

    def mask(self, window: Window) -> Mask:
        """The mask of a layer with this window."""
        if window not in self._masks:
            self._masks[window] = self.part(self.tokens, self.keys, window)
        return self._masks[window]

    def part(self, query: Tokens, key: Tokens, window: Window = None) -> Mask:
        """The mask of some queries against some keys."""
        build = block_mask if self.device.type == "cuda" else pair_mask
        return build(query, key, self.device, window)

    def pairs(self, window: Window) -> Tensor:
        """As `mask`, as one bool for each pair of tokens on every device."""
        return pair_mask(self.tokens, self.keys, self.device, window)

    @functools.cached_property
    def segments(self) -> Segments:
        """The segments of the pack, for layers with a state."""
        return Segments(self.tokens, self.device)

    @functools.cached_property
    def trunks(self) -> tuple[list[int], Tensor, Tensor, Mask | None] | None:
        """The trunks that are attended apart, if the kernel is "trunk".

        Bounds of the trunks in an order of the tokens that begins with them; the token
        at each place of this order, and the place of each token; and the mask of the
        tokens on no trunk against all, in this order.
        """
        if not self._trunks:
            return None
        bounds, order = trunks(self.tokens)
        inverse = np.argsort(order)
        at, places = (torch.from_numpy(x).to(self.device) for x in (order, inverse))
        tokens = self.tokens[:, order]
        rest = tokens[:, bounds[-1] :]
        return bounds, at, places, self.part(rest, tokens) if rest.size else None


def trunks(tokens: Tokens) -> tuple[list[int], Any]:
    """The bounds of the deepest paths of large trees, and the order of tokens for them."""
    enter, end, depth = tokens
    roots = np.flatnonzero(depth == 0)
    tree = np.cumsum(depth == 0) - 1
    # A token is on the trunk of its tree if the tree's first deepest token is below.
    leaf = np.lexsort((-depth, tree))[roots]
    on_trunk = (enter <= leaf[tree]) & (leaf[tree] < end)
    lengths = depth[leaf].astype(np.int64) + 1
    # Each trunk is a kernel call: those with little work (padding) stay masked.
    work = lengths * (lengths + 1) / 2
    apart = work >= _LEAST_SHARE * (end - enter).sum(dtype=np.float64)
    order = np.argsort(~(on_trunk & apart[tree]), kind="stable")
    return [0, *np.cumsum(lengths[apart]).tolist()], order


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
    indices: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls in each layer.

    ``query`` is of shape (1, n_heads, n_tokens, head_dim), ``key`` and ``value`` have
    n_key_heads, and the output is of shape (1, n_tokens, n_heads, head_dim). A dropout is
    refused: a dropped weight of a shared token would be dropped for all rows. What the
    mask says of a window counts, as in transformers' own attention; ``sliding_window``
    is for models that build none. ``indices`` are the tokens that a layer chose for each
    query under a mask of `tensor_masks`; other keyword arguments are a ``softcap`` and
    ``s_aux``, attention sinks.
    """
    tree = _checked(module, query, key, attention_mask, dropout, tree, kwargs)
    if tree.carried is not None:
        key, value = tree.carried.extend(module, key, value)
    options = {name: kwargs.get(name) for name in ("softcap", "s_aux")}
    plain = not any(x is not None for x in options.values())
    options |= {"scaling": scaling, "kernel_options": tree.kernel_options}
    if isinstance(attention_mask, Tensor):
        if indices is not None:
            chosen = torch.zeros_like(attention_mask[:, 0])
            chosen.scatter_(-1, indices.long(), True)
            attention_mask = attention_mask & chosen[:, None]
        return _attend(module, query, key, value, attention_mask, **options), None
    window = attention_mask.window if attention_mask else sliding_window
    if window is not None or not plain or tree.trunks is None:
        return _attend(module, query, key, value, tree.mask(window), **options), None
    bounds, order, places, mask = tree.trunks
    query, key, value = (x.index_select(2, order) for x in (query, key, value))
    parts = []
    for a, b in itertools.pairwise(bounds):
        q, k, v = (x[:, :, a:b] for x in (query, key, value))
        parts.append(_attend(module, q, k, v, None, **options))
    if mask is not None:
        rest = query[:, :, bounds[-1] :]
        parts.append(_attend(module, rest, key, value, mask, **options))
    return torch.cat(parts, 1).index_select(1, places), None


def _checked(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    attention_mask: LayerMask | Tensor | None,
    dropout: float,
    tree: TreeAttention | None,
    kwargs: dict[str, Any],
) -> TreeAttention:
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
    n = tree.tokens.shape[1]
    if (query.shape[0], query.shape[2], key.shape[2]) != (1, n, n):
        raise LayoutError(
            f"{name} got queries and keys of shape {tuple(query.shape)} and "
            f"{tuple(key.shape)} for a pack of {n} tokens: pass one pack a call, without "
            "a cache"
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
    return tree


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    **options: Any,
) -> Tensor:
    """Attention under a mask, or causal without one: (1, n_tokens, n_heads, head_dim)."""
    if isinstance(mask, BlockMask):
        found: Tensor = flex_attention_forward(
            module, query, key, value, mask, **options
        )[0]
        return found
    scaling, softcap, sinks = (options[k] for k in ("scaling", "softcap", "s_aux"))
    if mask is None or (softcap is None and sinks is None):
        output = F.scaled_dot_product_attention(
            query,
            key,
            value,
            mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
    else:
        # written out: no kernel of the CPU has them
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        scores = query @ key.transpose(2, 3) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~mask, -torch.inf)
        if sinks is not None:
            column = sinks.to(scores).reshape(1, -1, 1, 1)
            column = column.expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, column], 3)
        wide = torch.promote_types(scores.dtype, torch.float32)
        shares = scores.softmax(3, dtype=wide).to(value.dtype)
        output = shares[..., : key.shape[2]] @ value
    # layers may view it, as they may the output of transformers' own attention
    return output.transpose(1, 2).contiguous()


AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, layer_mask)

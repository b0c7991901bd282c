"""Masks, attention and layers with a state over trees of tokens, for transformers.

Token ``q`` attends token ``kv`` where ``kv <= q < subtree_end[kv]``. A sliding window of
``w`` also asks for ``position_ids[q] - position_ids[kv] < w``: positions are depths in
the tree, so the window counts tokens of the row and not of the pack.

Importing this module registers the attention ``"trajkit"``. It reads the tree from the
keyword argument ``tree``, which `model_inputs` puts among a model's inputs and which
models hand down to their layers. What a layer attends of a row (a window, a chunk),
models say with the mask that they build, here a `LayerMask`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.flex_attention import flex_attention_forward
from transformers.masking_utils import causal_mask_function

from trajkit._arguments import check_choice
from trajkit.errors import LayoutError, UnsupportedModelError
from trajkit.packs.segments import Runs
from trajkit.torch.packs import Pack

ATTENTION = "trajkit"  # to pass as attn_implementation

Tokens: TypeAlias = npt.NDArray[np.int32]
"""Of each token its index in the pack, ``subtree_end`` and depth: shape (3, n)."""
MaskMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
Window: TypeAlias = int | MaskMod | None
"""What a layer attends of a row: the last tokens, by a function of positions, or all."""

# Every window, order of tokens and layout of keys has FlexAttention kernels of its own.
# Beyond torch's limit of 8 it would compute the scores of all pairs, without a word.
_COMPILER = {"recompile_limit": 64, "fail_on_recompile_limit_hit": True}
BLOCK = 128  # tokens a side of a block of a mask; the fastest that was measured

Kernel: TypeAlias = Literal["masked", "trunk"]
Mask: TypeAlias = Tensor | BlockMask
States: TypeAlias = dict[torch.nn.Module, list[Tensor]]
"""Per attention layer key and value, of shape (1, n_key_heads, n_prefix, head_dim)."""

_LEAST_SHARE = 0.01  # of a pack's attended pairs, for a trunk that is attended apart
_REFUSED = {
    "position_bias": "adds a bias that depends on places in the pack, not in a row",
    "block_indices": "attends chosen blocks of the pack, not of a row",
}
"""What a layer may pass to its attention that a tree cannot follow."""
_STORES = ("cache.update_recurrent_state(", "cache.update_conv_state(")


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
    subtree_end, position_ids : int tensors, shape (n,)
        Of a pack; ``position_ids`` is required with a window.
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
) -> BlockMask:
    """The mask for `torch.nn.attention.flex_attention`, without `create_block_mask`.

    Blocks that every query attends entirely are listed apart from partly masked ones,
    so the kernel evaluates the mask only in those. The cost grows with the number
    of blocks, not of pairs of tokens.

    The mask is on the device of ``subtree_end``, for one batch entry and all heads. A
    kernel is compiled anew for the first lengths of packs, and then serves all lengths.

    Parameters
    ----------
    subtree_end, position_ids, window, block_size
        As for `dense_mask`; a block has ``block_size`` tokens a side.
    """
    tokens = tokens_of(subtree_end, position_ids, window)
    return block_mask(tokens, tokens, subtree_end.device, window, block_size)


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


def _bounds(tokens: Any, block_size: int, axis: int = 1) -> tuple[Any, Any]:
    """The least and the greatest index, ``subtree_end`` and depth of each block."""
    starts = np.arange(0, tokens.shape[axis], block_size)
    low = np.minimum.reduceat(tokens, starts, axis=axis)
    return low, np.maximum.reduceat(tokens, starts, axis=axis)


def cu_seqlens(subtree_end: Tensor) -> Tensor:
    """The bounds of the rows of a pack without branches, for varlen attention.

    They are int32, of shape (n_rows + 1,), from 0 to the tokens of the pack; a padding
    token is a row of its own. LayoutError is raised for a branch.

    Parameters
    ----------
    subtree_end : int tensor, shape (n_tokens,)
    """
    end = subtree_end.cpu().numpy()
    runs = Runs.of(end)
    for token in runs.stop[end[runs.start] != runs.stop][:1] - 1:
        raise LayoutError(
            f"token {token} (subtree_end {end[token]}): its tree branches after it, which "
            "one cu_seqlens cannot express: use trajkit.packs.varlen, flex_block_mask or "
            "packs with layout='rows'"
        )
    bounds = np.append(runs.start, len(end)).astype(np.int32)
    return torch.from_numpy(bounds).to(subtree_end.device)


@dataclass(frozen=True, slots=True)
class LayerMask:
    """What a model lets layers attend of a row, in the place of their attention mask."""

    window: Window

    def __getitem__(self, tokens: Any) -> LayerMask:
        # Gemma 4 takes the tokens whose logits are kept: in a pack all
        if tokens != (slice(None), slice(None), slice(0, None), slice(None)):
            raise LayoutError(
                f"mask[{tokens}]: the mask of a pack is for all its tokens"
            )
        return self


_RUNNING: ContextVar[TreeAttention | None] = ContextVar("tree", default=None)


@contextlib.contextmanager
def running(tree: TreeAttention, *, tensors: bool, trial: bool) -> Iterator[None]:
    """While a pack runs, layers with a state must get its tree.

    ``tensors``: the masks of layers are one bool for each pair, for layers that choose the
    tokens that they attend. ``trial``: layers must read the states that they store.
    """
    tree.gave_tensors, tree.is_trial = tensors, trial
    token = _RUNNING.set(tree)
    try:
        yield
    finally:
        _RUNNING.reset(token)


def layer_mask(
    *,
    mask_function: MaskMod,
    local_size: int | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> LayerMask | Tensor:
    """The mask that transformers builds for ``"trajkit"``, from its rule for a row."""
    window: Window = None
    if mask_function is not causal_mask_function:
        zero = torch.zeros((), dtype=torch.int64, device=device)

        def attends(q: int, kv: int) -> bool:
            return bool(mask_function(zero, zero, zero + q, zero + kv))

        if attends(0, 1):
            raise UnsupportedModelError(
                "a layer lets tokens attend those after them: train on rows"
            )
        size = local_size or 0
        slides = size and attends(size, 1) and attends(2 * size, size + 1)
        window = size if slides and not attends(size, 0) else mask_function
    tree = _RUNNING.get()
    if tree is not None and tree.gave_tensors:
        return pair_mask(tree.tokens, tree.keys, tree.device, window)
    return LayerMask(window)


class TreeAttention:
    """The mask of one pack, in the form that each attention layer needs.

    On CUDA masks are those of FlexAttention, elsewhere one bool for each pair of tokens.
    They are built when a layer first asks for them and kept for the other layers and
    for the recomputation of activations.

    Parameters
    ----------
    pack, device : Pack, torch device
        The device is that of the model's attention.
    kernel : {"masked", "trunk"}
        "masked": attention under the complete mask. "trunk": the deepest path of each
        tree with a hundredth of the work or more by causal
        `scaled_dot_product_attention`, which needs no mask, and the other tokens under
        a mask. Layers with a window and packs with a prefix are always masked.
    kernel_options : dict, optional
        For FlexAttention, such as block sizes.
    carried : CarriedStates, optional
        Required for a part of a tree that was cut, or LayoutError is raised.
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
                "a tree of the pack continues in another pack: run all packs of the tree "
                "with trajkit.torch.carry_backward or carry_logprobs"
            )
        self.device = torch.device(device)
        self._build = block_mask if self.device.type == "cuda" else pair_mask
        self.kernel_options = kernel_options
        self.carried = carried
        self.gave_tensors = self.is_trial = False
        self.tokens = self.keys = tokens_of(pack.subtree_end, pack.position_ids)
        self._masks: dict[Window, Mask] = {}
        n_prefix = len(pack.prefix_end)
        self._has_trunks = kernel == "trunk" and not n_prefix
        if n_prefix:
            # a path from a root, before all tokens of the pack
            depth = np.arange(n_prefix)
            path = [depth - n_prefix, pack.prefix_end.cpu().numpy(), depth]
            self.keys = np.concatenate([np.stack(path), self.tokens], 1, dtype=np.int32)

    def mask(self, window: Window) -> Mask:
        """The mask of a layer with this window."""
        if window not in self._masks:
            mask = self._build(self.tokens, self.keys, self.device, window)
            self._masks[window] = mask
        return self._masks[window]

    @functools.cached_property
    def segments(self) -> Segments:
        """The segments of the pack, for layers with a state."""
        return Segments(self.tokens, self.device)

    @functools.cached_property
    def trunks(self) -> tuple[list[int], Tensor, Tensor, Mask | None] | None:
        """What the kernel "trunk" attends apart: bounds of trunks, in an order of tokens.

        With the token at each place of this order, the place of each token, and the mask
        of the tokens on no trunk against all, in this order.
        """
        if not self._has_trunks:
            return None
        enter, end, depth = self.tokens
        roots = np.flatnonzero(depth == 0)
        number = np.cumsum(depth == 0) - 1
        # A token is on the trunk of its tree if the tree's first deepest token is below.
        leaf = np.lexsort((-depth, number))[roots]
        on_trunk = (enter <= leaf[number]) & (leaf[number] < end)
        lengths = depth[leaf].astype(np.int64) + 1
        # Each trunk is a kernel call: those with little work (padding) stay masked.
        work = lengths * (lengths + 1) / 2
        apart = work >= _LEAST_SHARE * (end - enter).sum(dtype=np.float64)
        order = np.argsort(~(on_trunk & apart[number]), kind="stable")
        bounds = [0, *np.cumsum(lengths[apart]).tolist()]
        tokens = self.tokens[:, order]
        rest = tokens[:, bounds[-1] :]
        mask = self._build(rest, tokens, self.device, None) if rest.size else None
        at = torch.from_numpy(order).to(self.device)
        return bounds, at, torch.argsort(at), mask


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
    n_key_heads, and the output is of shape (1, n_tokens, n_heads, head_dim). What the
    mask says of a window counts, as in transformers' own attention; ``sliding_window``
    is for models that build none. ``indices`` are the tokens that a layer chose for each
    query under a mask of `running`. ``s_aux`` are attention sinks.
    """
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
            f"{name} got an attention mask (Tensor) and a tree: pass what model_inputs "
            "gives as it is. A model that builds its own mask cannot train on packs"
        )
    n = tree.tokens.shape[1]
    if (query.shape[0], query.shape[2], key.shape[2]) != (1, n, n):
        raise LayoutError(
            f"{name} got queries and keys of {tuple(query.shape)} and {tuple(key.shape)} "
            f"for a pack of {n} tokens: pass one pack a call, without a cache"
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


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | None,
    **options: Any,
) -> Tensor:
    """Attention under a mask, or causal without one: (1, n_tokens, n_heads, head_dim)."""
    found: Tensor
    if isinstance(mask, BlockMask):
        with torch.compiler.config.patch(**_COMPILER):
            found, _ = flex_attention_forward(
                module, query, key, value, mask, **options
            )
        return found
    scaling, softcap, sinks = (options[k] for k in ("scaling", "softcap", "s_aux"))
    if mask is None or (softcap is None and sinks is None):
        how = {"scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
        causal = mask is None
        found = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, **how
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
            scores = torch.cat([scores, column.expand(*scores.shape[:3], 1)], 3)
        wide = torch.promote_types(scores.dtype, torch.float32)
        shares = scores.softmax(3, dtype=wide).to(value.dtype)
        found = shares[..., : key.shape[2]] @ value
    # layers may view it, as they may the output of transformers' own attention
    return found.transpose(1, 2).contiguous()


class CarriedStates:
    """What the attention layers of one pack take from the pack before and hand to the next.

    ``prefix`` is what the pack before handed. Under `torch.no_grad`, ``handed`` is filled
    for the next pack. Otherwise the prefix gets gradients, and ``gradients``, the
    `prefix_gradients` of the next pack, are added in the backward pass.
    """

    def __init__(
        self, pack: Pack, prefix: States, gradients: States | None = None
    ) -> None:
        self.handed: States = {}
        self._source = pack.next_source
        self._gradients = gradients or {}
        # Leaves: inside checkpointed layers, too, their gradients add up in ``grad``.
        with_grad = torch.is_grad_enabled()
        self._prefix = {
            layer: [x.detach().requires_grad_(with_grad) for x in states]
            for layer, states in prefix.items()
        }

    def extend(self, layer: torch.nn.Module, *states: Tensor) -> list[Tensor]:
        """Keys and values of the prefix and then of the pack."""
        found = [*states]
        if before := self._prefix.get(layer):
            found = [torch.cat(x, 2) for x in zip(before, states, strict=True)]
        source = self._source.to(found[0].device)
        if layer in self._gradients:
            for x, handed in zip(found, self._gradients[layer], strict=True):
                if x.requires_grad:
                    x.register_hook(functools.partial(_added, source, handed))
        elif len(source) and not torch.is_grad_enabled():
            if layer in self.handed:
                raise UnsupportedModelError(
                    f"{type(layer).__name__} runs twice in one forward pass, so its keys "
                    "and values cannot be carried: pack with oversize='repeat'"
                )
            self.handed[layer] = [x.index_select(2, source) for x in found]
        return found

    def prefix_gradients(self) -> States:
        """The gradients of the prefix, after the backward pass."""
        return {k: [x.grad for x in states] for k, states in self._prefix.items()}


def _added(source: Tensor, handed: Tensor, grad: Tensor) -> Tensor:
    return grad.index_add(2, source, handed)


class Segments:
    """The segments of a pack, in the order in which their states become known.

    A layer's own forward runs on segments without a branch, with a cache that holds what
    it stored after the parent of each. A layer takes one token with a state for decoding,
    without gradients. So a segment of one token runs together with the segment before it,
    from the state before that.

    Each of ``batches`` has segments that run together: their numbers, the segments whose
    final states they start from (all -1: none), an (n, length) tensor of their tokens, and
    how many at the end are their own. ``inverse`` is where each token is among the own
    tokens of all batches.
    """

    def __init__(self, tokens: Tokens, device: torch.device) -> None:
        runs = Runs.of(tokens[1])
        above = [*runs.above.tolist(), -1]  # with one for no segment
        level = [0] * len(above)
        groups: dict[tuple[int, int, int, bool], list[tuple[int, int, Any]]] = {}
        for number, (start, stop) in enumerate(zip(runs.start, runs.stop, strict=True)):
            source = above[number]
            level[number] = level[source] + 1
            run = np.arange(start, stop)
            if len(run) == 1 and source >= 0:
                before = np.arange(runs.start[source], runs.stop[source])
                run, source = np.append(before, run), above[source]
            key = level[number], len(run), int(stop - start), source >= 0
            groups.setdefault(key, []).append((number, source, run))
        self.batches: list[tuple[list[int], list[int], Tensor, int]] = []
        for (_, _, own, _), group in sorted(groups.items()):
            numbers, sources, parts = map(list, zip(*group, strict=True))
            at = torch.from_numpy(np.stack(parts)).to(device)
            self.batches.append((numbers, sources, at, own))
        places = [at[:, -own:].flatten() for _, _, at, own in self.batches]
        self.inverse = torch.argsort(torch.cat(places))


class _SegmentCache:
    """What one layer stores after a segment, in the place of transformers' cache.

    It differs from `transformers.DynamicCache` in that states keep their gradients.
    ``before`` has the states that the segments start from, stacked; none at a root.
    """

    def __init__(self, before: dict[Any, Tensor]) -> None:
        self._before = before
        self.after: dict[Any, Tensor] = {}

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._before.get(("conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._before.get(("recurrent", state_idx))

    def update_conv_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        """The inputs before and those of the segment; the last ones are stored."""
        n = kwargs["conv_kernel_size"]
        before = self.get_conv_state(layer_idx, state_idx)
        if before is None:
            before = states.new_zeros(*states.shape[:-1], n)
        states = torch.cat([before, states], -1)
        self.after["conv", state_idx] = states[..., -n:]
        return states

    def update_recurrent_state(
        self, states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        self.after["recurrent", state_idx] = states
        return states

    def is_recording_past(self, layer_idx: int) -> bool:
        """True keeps layers from the path of decoding, which changes states in place."""
        return True


def follow_trees(model: PreTrainedModel) -> None:
    """Lets the layers of a model that store states in its cache follow trees."""
    for module in model.modules():
        kind: Any = type(module)
        if _stores(kind) and not follows(module):
            module.forward = functools.partial(_along_tree, module.forward)


@functools.cache
def _stores(kind: Any) -> bool:
    """Whether the layer stores states as `_SegmentCache` takes them."""
    try:
        source = inspect.getsource(kind.forward)
    except (OSError, TypeError):
        return False
    return any(call in source for call in _STORES)


def follows(module: torch.nn.Module) -> bool:
    """Whether `follow_trees` made a module follow trees."""
    return getattr(module.forward, "func", None) is _along_tree


def _along_tree(
    rows: Callable[..., Tensor],
    hidden_states: Tensor,
    *args: Any,
    tree: Any = None,
    **kwargs: Any,
) -> Tensor:
    name = getattr(rows, "__qualname__", rows)
    if tree is None and _RUNNING.get() is not None:
        raise UnsupportedModelError(
            f"{name} stores a state, and the layer around it does not hand it the tree, so "
            "it would mix tokens along the pack: train on rows"
        )
    if tree is None:
        return rows(hidden_states, *args, **kwargs)
    if args:
        raise UnsupportedModelError(
            f"{name} stores a state and takes more than hidden states, which would have to "
            "follow the tree as well: train on rows"
        )
    kwargs |= {"attention_mask": None}
    states: dict[int, dict[Any, Tensor]] = {}
    outputs = []
    for numbers, sources, tokens, n_own in tree.segments.batches:
        given = [states[source] for source in sources if source >= 0]
        before = {key: torch.cat([s[key] for s in given]) for key in (given or [{}])[0]}
        cache = _SegmentCache(before)
        own = hidden_states[0, tokens]
        for key, state in before.items():
            if not (tree.is_trial and state.is_floating_point()):
                continue
            unknown = _SegmentCache(before | {key: state * torch.nan})
            if rows(own, **kwargs | {"cache": unknown})[:, 0].isfinite().all():
                raise UnsupportedModelError(
                    f"{name} does not start from the {key[0]} state that it stores, so "
                    "branches would not know the tokens before them: train on rows"
                )
        output = rows(own, **kwargs | {"cache": cache})
        outputs.append(output[:, -n_own:].flatten(0, 1))
        for k, number in enumerate(numbers):
            states[number] = {key: x[k : k + 1] for key, x in cache.after.items()}
    return torch.cat(outputs)[tree.segments.inverse][None]


def not_following(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a model, without those that follow trees and what is in them."""
    following: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if follows(module):
            following += (f"{path}.",)
        elif not path.startswith(following or ("\0",)):
            yield path, module


AttentionInterface.register(ATTENTION, tree_attention)
AttentionMaskInterface.register(ATTENTION, layer_mask)

"""Layers with a state along a tree: each branch starts from the state at its parent.

Linear attention, Mamba and short convolutions run through whatever order their tokens
have. Here a tree is cut into segments without a branch, and a layer's own forward runs on
them, with a cache that holds what it stored after the parent of each segment.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from trajkit.errors import UnsupportedModelError
from trajkit.torch.datasets import Pack
from trajkit.torch.masks import Ints, TokenRanges

States: TypeAlias = dict[torch.nn.Module, tuple[Tensor, Tensor]]
"""Per attention layer two tensors of shape (1, n_key_heads, n_prefix, head_dim)."""


class CarriedStates:
    """What the attention layers of one pack take from the pack before and hand to the next.

    Under `torch.no_grad`, ``handed`` is filled for the next pack. Otherwise the prefix
    gets gradients, and those of the next pack's prefix are added in the backward pass.

    Parameters
    ----------
    prefix : dict of layer to (key, value)
        ``handed`` of the pack before; empty for the first pack of a tree.
    gradients : dict of layer to (key, value), optional
        What `prefix_gradients` gave for the next pack.

    Attributes
    ----------
    handed : dict of layer to (key, value)
        Of the tokens that the next pack attends.
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
            layer: (
                key.detach().requires_grad_(with_grad),
                value.detach().requires_grad_(with_grad),
            )
            for layer, (key, value) in prefix.items()
        }

    def extend(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of the prefix and of the pack, in this order.

        Raises
        ------
        UnsupportedModelError
            A layer runs more than once.
        """
        if layer in self._prefix:
            before = self._prefix[layer]
            key, value = (
                torch.cat([before[0], key], 2),
                torch.cat([before[1], value], 2),
            )
        if layer in self._gradients:
            handed = self._gradients[layer]
            key = _Handed.apply(key, self._source, handed[0])
            value = _Handed.apply(value, self._source, handed[1])
        elif len(self._source) and not torch.is_grad_enabled():
            if layer in self.handed:
                raise UnsupportedModelError(
                    f"{type(layer).__name__} runs twice in one forward pass, so its keys "
                    "and values cannot be carried: pack with oversize='repeat'"
                )
            at = self._source.to(key.device)
            self.handed[layer] = key.index_select(2, at), value.index_select(2, at)
        return key, value

    def prefix_gradients(self) -> States:
        """The gradients of the prefix, after the backward pass."""
        found: States = {}
        for layer, (key, value) in self._prefix.items():
            assert key.grad is not None
            assert value.grad is not None
            found[layer] = key.grad, value.grad
        return found


class _Handed(torch.autograd.Function):  # type: ignore[misc]
    """Its first argument; its gradient also has that of tokens handed to another pack."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, handed: Tensor) -> Tensor:
        ctx.save_for_backward(source.to(x.device), handed)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        source, handed = ctx.saved_tensors
        return grad.index_add(2, source, handed), None, None


_STORES = ("cache.update_recurrent_state(", "cache.update_conv_state(")


class Segments:
    """The segments of a pack, in the order in which their states become known.

    A layer takes one token with a state for decoding, without gradients. So a segment of
    one token runs together with the segment before it, from the state before that.

    Attributes
    ----------
    batches : list of (segments, sources, tokens, n_own)
        Segments that run together: their numbers, the segments whose final states they
        start from (all -1: none), an (n, length) tensor of their tokens, and how many at
        the end are their own.
    inverse : int64 tensor, shape (n_tokens,)
        Where each token is among the own tokens of all batches.
    """

    def __init__(self, tokens: TokenRanges, device: torch.device) -> None:
        end = tokens.end
        starts = np.flatnonzero(np.diff(end, prepend=-1))
        stops = np.append(starts[1:], len(end))
        parents, depth = _parents(starts, end)
        runs: dict[tuple[int, int, int, bool], list[tuple[int, int, Ints]]] = {}
        for number, (start, stop, parent) in enumerate(
            zip(starts, stops, parents, strict=True)
        ):
            own, source = stop - start, parent
            run = np.arange(start, stop)
            if own == 1 and parent >= 0:
                source = parents[parent]
                run = np.append(np.arange(starts[parent], stops[parent]), run)
            key = (int(depth[number]), len(run), own, source >= 0)
            runs.setdefault(key, []).append((number, source, run))
        self.batches: list[tuple[list[int], list[int], Tensor, int]] = []
        places = []
        for (_, _, own, _), group in sorted(runs.items()):
            numbers, sources, parts = map(list, zip(*group, strict=True))
            at = np.stack(parts)
            places.append(at[:, -own:].ravel())
            self.batches.append(
                (numbers, sources, torch.from_numpy(at).to(device), int(own))
            )
        inverse = np.argsort(np.concatenate(places))
        self.inverse = torch.from_numpy(inverse).to(device)


def _parents(starts: Ints, end: Ints) -> tuple[list[int], Ints]:
    """The segment before each segment, and the number of segments above it."""
    parents: list[int] = []
    depth = []
    path: list[int] = []
    for number, start in enumerate(starts):
        while path and end[starts[path[-1]]] <= start:
            path.pop()
        parents.append(path[-1] if path else -1)
        depth.append(len(path))
        path.append(number)
    return parents, np.array(depth)


class _SegmentCache:
    """What one layer stores after a segment, in the place of transformers' cache.

    It differs from `transformers.DynamicCache` in that states keep their gradients.

    Parameters
    ----------
    before : dict
        The states that the segments start from, stacked; empty at a root.
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
    """Lets the layers of a model that store states in its cache follow trees.

    Rows run as before. A pack needs a call of the layer for each depth of segments and
    each length in it, so many short branches in a row (drift) make these layers slow.
    """
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
    forward = module.forward
    return isinstance(forward, functools.partial) and forward.func is _along_tree


def _along_tree(
    rows: Callable[..., Tensor],
    hidden_states: Tensor,
    *args: Any,
    tree: Any = None,
    **kwargs: Any,
) -> Tensor:
    if tree is None:
        return rows(hidden_states, *args, **kwargs)
    if args:
        raise UnsupportedModelError(
            f"{getattr(rows, '__qualname__', rows)} stores a state and takes more than "
            "hidden states, which would have to follow the tree as well: train on rows"
        )
    kwargs |= {"attention_mask": None}
    states: dict[int, dict[Any, Tensor]] = {}
    outputs = []
    for numbers, sources, tokens, n_own in tree.segments.batches:
        before: dict[Any, Tensor] = {}
        if sources[0] >= 0:
            given = [states[source] for source in sources]
            before = {key: torch.cat([s[key] for s in given]) for key in given[0]}
        cache = _SegmentCache(before)
        output = rows(hidden_states[0, tokens], **kwargs | {"cache": cache})
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

"""Layers with a state along a tree: each branch starts from the state at its parent.

Linear attention, Mamba and short convolutions run through whatever order their tokens
have. Here a tree is cut into segments without a branch, and a layer's own forward runs on
them, with a cache that holds what it stored after the parent of each segment. Attention
layers hand keys and values of a prefix from pack to pack (`CarriedStates`).
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
from trajkit.torch.masks import Tokens

States: TypeAlias = dict[torch.nn.Module, list[Tensor]]
"""Per attention layer key and value, of shape (1, n_key_heads, n_prefix, head_dim)."""

_STORES = ("cache.update_recurrent_state(", "cache.update_conv_state(")


class CarriedStates:
    """What the attention layers of one pack take from the pack before and hand to the next.

    Under `torch.no_grad`, ``handed`` is filled for the next pack. Otherwise the prefix
    gets gradients, and those of the next pack's prefix are added in the backward pass.

    Parameters
    ----------
    pack : Pack
    prefix : dict of layer to [key, value]
        ``handed`` of the pack before; empty for the first pack of a tree.
    gradients : dict of layer to [key, value], optional
        What `prefix_gradients` gave for the next pack.
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
        """Keys and values of the prefix and then of the pack.

        Raises
        ------
        UnsupportedModelError
            A layer runs more than once.
        """
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
    """A gradient with that of the tokens that were handed to another pack."""
    return grad.index_add(2, source, handed)


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

    def __init__(self, tokens: Tokens, device: torch.device) -> None:
        end = tokens[1]
        starts = np.flatnonzero(np.diff(end, prepend=-1)).tolist()
        stops = [*starts[1:], len(end)]
        parents, depth = [-1], [0]  # of each segment, with one before all
        runs: dict[tuple[int, int, int, bool], list[tuple[int, int, Any]]] = {}
        for number, (start, stop) in enumerate(zip(starts, stops, strict=True)):
            source = number - 1
            while source >= 0 and end[starts[source]] <= start:
                source = parents[source + 1]
            parents.append(source)
            depth.append(depth[source + 1] + 1)
            run = np.arange(start, stop)
            if len(run) == 1 and source >= 0:
                run = np.append(np.arange(starts[source], stops[source]), run)
                source = parents[source + 1]
            key = depth[-1], len(run), stop - start, source >= 0
            runs.setdefault(key, []).append((number, source, run))
        self.batches: list[tuple[list[int], list[int], Tensor, int]] = []
        for (_, _, own, _), group in sorted(runs.items()):
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
    return getattr(module.forward, "func", None) is _along_tree


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
        given = [states[source] for source in sources if source >= 0]
        before = {key: torch.cat([s[key] for s in given]) for key in (given or [{}])[0]}
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

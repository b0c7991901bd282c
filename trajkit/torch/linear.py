"""Linear attention along a tree: each branch starts from the state at its parent.

The recurrence of a gated delta rule runs through whatever order its tokens have. Here a
tree is cut into segments without a branch. The first token of a segment continues the
state after its parent, and segments of one depth run together.
"""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from trajkit.torch.masks import Bools, Ints, TokenRanges


class Segments:
    """The segments of a pack, in the order in which their states become known.

    Attributes
    ----------
    parent : list of int, length n_segments
        The segment whose last token precedes the first of each; -1: none.
    batches : list of (segments, tokens, filled)
        Segments that run together: their numbers, and (n, length) tensors of their
        tokens and of where there is one. Lengths differ by less than a factor of two.
    inverse : int64 tensor, shape (n_tokens,)
        Where each token is among the filled places of all batches.
    """

    def __init__(self, tokens: TokenRanges, device: torch.device) -> None:
        end = tokens.end
        starts = np.flatnonzero(np.diff(end, prepend=-1))
        stops = np.append(starts[1:], len(end))
        self.parent, depth = _parents(starts, end)
        self._before = np.arange(-1, len(end) - 1)
        known = np.array(self.parent, np.int64)
        self._before[starts] = np.where(known >= 0, stops[known] - 1, -1)
        self._device = device
        lengths = stops - starts
        # Zero steps fill a batch up: like lengths keep them few.
        octave = np.frexp(lengths)[1]
        order = np.lexsort((octave, depth))
        cuts = np.flatnonzero(np.diff(depth[order]) | np.diff(octave[order])) + 1
        self.batches: list[tuple[list[int], Tensor, Tensor]] = []
        places = []
        for group in np.split(order, cuts):
            index = np.arange(lengths[group].max())
            filled = index < lengths[group, None]
            at = np.where(filled, starts[group, None] + index, 0)
            places.append(at[filled])
            self.batches.append(
                (group.tolist(), self._tensor(at), self._tensor(filled))
            )
        self.inverse = self._tensor(np.argsort(np.concatenate(places)))
        self._ancestors: dict[int, Tensor] = {}

    def ancestors(self, n: int) -> Tensor:
        """The token, its parent and so on: shape (n, n_tokens), with n_tokens for none."""
        if n not in self._ancestors:
            rows = [np.arange(len(self._before))]
            before = np.append(self._before, -1)
            for _ in range(n - 1):
                rows.append(before[rows[-1]])
            table = np.stack(rows)
            self._ancestors[n] = self._tensor(
                np.where(table < 0, len(before) - 1, table)
            )
        return self._ancestors[n]

    def _tensor(self, values: Ints | Bools) -> Tensor:
        return torch.from_numpy(values).to(self._device)


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


def carry_states(model: PreTrainedModel) -> None:
    """Lets the linear attention of a model carry its state along trees.

    Rows run as before. A pack needs a call of the kernel for each depth of segments, so
    many short branches in a row (drift) make these layers slow.

    Parameters
    ----------
    model : PreTrainedModel
        Layers of other kinds than Qwen3-Next's gated delta rule are left alone, and
        `check_model` refuses them.
    """
    for module in model.modules():
        if isinstance(module, qwen3_next.Qwen3NextGatedDeltaNet):
            module.forward = functools.partial(_gated_delta_net, module)


def carries_states(module: torch.nn.Module) -> bool:
    """Whether `carry_states` made a module follow trees."""
    forward = module.forward
    return isinstance(forward, functools.partial) and forward.func is _gated_delta_net


def _gated_delta_net(
    module: Any, hidden_states: Tensor, *, tree: Any = None, **kwargs: Any
) -> Tensor:
    """Qwen3NextGatedDeltaNet's forward, along a tree if there is one."""
    if tree is None:
        rows: Tensor = type(module).forward(module, hidden_states, **kwargs)
        return rows
    segments: Segments = tree.segments
    parts = module.fix_query_key_value_ordering(
        module.in_proj_qkvz(hidden_states), module.in_proj_ba(hidden_states)
    )
    query, key, value, z, b, a = (x[0] for x in parts)
    mixed = torch.cat([x.flatten(1) for x in (query, key, value)], 1)
    mixed = _convolve(mixed, module.conv1d, segments)
    mixed = ACT2FN[module.activation](mixed).to(hidden_states.dtype)
    query, key, value = mixed.split(
        [module.key_dim, module.key_dim, module.value_dim], 1
    )
    query, key = (x.unflatten(1, (-1, module.head_k_dim)) for x in (query, key))
    value = value.unflatten(1, (-1, module.head_v_dim))
    decay = -module.A_log.float().exp() * torch.nn.functional.softplus(
        a.float() + module.dt_bias
    )
    output = _recurrence(query, key, value, decay, b.sigmoid(), segments)
    normed = module.norm(output.flatten(0, 1), z.flatten(0, 1))
    result: Tensor = module.out_proj(normed.reshape(1, len(output), -1))
    return result


def _convolve(x: Tensor, conv: torch.nn.Conv1d, segments: Segments) -> Tensor:
    """The short causal convolution of each channel over the path of each token."""
    weight = conv.weight[:, 0]
    padded = torch.cat([x.to(weight.dtype), x.new_zeros(1, x.shape[1])])
    taps = segments.ancestors(weight.shape[1])
    steps = zip(taps, reversed(weight.unbind(1)), strict=True)
    result: Tensor = sum(padded[tap] * w for tap, w in steps)
    return result if conv.bias is None else result + conv.bias


def _recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    segments: Segments,
) -> Tensor:
    """The gated delta rule, each segment from the state after its parent."""
    states: dict[int, Tensor] = {}
    shape = (value.shape[1], key.shape[2], value.shape[2])
    outputs = []
    for numbers, tokens, filled in segments.batches:
        parents = [segments.parent[number] for number in numbers]
        start = [
            states[p] if p >= 0 else value.new_zeros(shape, dtype=torch.float32)
            for p in parents
        ]
        # no decay and no update: a step that changes no state
        steps = [x[tokens] * filled[..., None] for x in (decay, beta)]
        output, final = qwen3_next.torch_chunk_gated_delta_rule(
            query[tokens],
            key[tokens],
            value[tokens],
            g=steps[0],
            beta=steps[1],
            initial_state=torch.stack(start),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        outputs.append(output[filled])
        states.update(zip(numbers, final.unbind(), strict=True))
    return torch.cat(outputs)[segments.inverse]


def uncarried(model: PreTrainedModel) -> Iterator[tuple[str, torch.nn.Module]]:
    """The modules of a model, without those that follow trees and what is in them."""
    carried: tuple[str, ...] = ()
    for path, module in model.named_modules():
        if carries_states(module):
            carried += (f"{path}.",)
        elif not path.startswith(carried):
            yield path, module

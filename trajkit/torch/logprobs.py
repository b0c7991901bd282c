"""Logprobs of the targets of edges, from hidden states at their sources alone."""

import itertools
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trajkit.errors import LayoutError
from trajkit.torch.packs import Pack

Head: TypeAlias = Callable[[Tensor], Tensor]
"""From hidden states to logits, such as a model's output projection."""


def gather_logprobs(
    hidden: Tensor,
    lm_head: Head,
    pack: Pack,
    *,
    temperature: float = 1.0,
    chunk_size: int = 2048,
) -> Tensor:
    """The logprob of each edge's target after its source.

    Logits exist for ``chunk_size`` tokens at a time, and only of tokens that are the
    source of an edge, once each: the backward pass computes them again. Softmax runs
    in at least float32.

    Parameters
    ----------
    hidden : float tensor, shape (n_tokens, width) or (1, n_tokens, width)
        The model's last hidden states, after its last norm.
    lm_head : callable
        From hidden states of shape (k, width) to logits of shape (k, n_vocabulary).
    pack : Pack
    temperature : float
        The logits are divided by it, as the engine did when it sampled.
    chunk_size : int
        Sources a chunk; memory for logits is a few times ``chunk_size * n_vocabulary``.

    Returns
    -------
    float tensor, shape (n_edges,)
        On the device of ``hidden``, in the order of the pack's edges.

    Raises
    ------
    LayoutError
        ``hidden`` is not of the pack's length.
    """
    n = len(pack.input_ids)
    if hidden.shape[:-1] not in ((n,), (1, n)):
        raise LayoutError(
            f"hidden states of shape {tuple(hidden.shape)} for a pack of {n} tokens"
        )
    hidden = hidden.reshape(n, hidden.shape[-1])
    # Bounds of chunks are needed on the host, where packs come from.
    source = pack.edge_source.cpu()
    unique, slot = torch.unique(source, return_inverse=True)
    order = torch.argsort(slot, stable=True)
    slot = slot[order]
    # One chunk at least: without an edge, the head takes part with zero gradients.
    bounds = torch.arange(0, max(len(unique), 1) + chunk_size, chunk_size)
    edges = torch.searchsorted(slot, bounds).tolist()
    place = hidden.device
    target = pack.edge_target.cpu()[order].to(place, non_blocking=True)
    unique, slot = (x.to(place, non_blocking=True) for x in (unique, slot))
    states = hidden[unique]
    parts = []
    for k, (a, b) in enumerate(itertools.pairwise(edges)):
        start = k * chunk_size
        here, at = states[start : start + chunk_size], slot[a:b] - start
        given = (here, lm_head, at, target[a:b], temperature)
        parts.append(checkpoint(_chunk, *given, use_reentrant=False))
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order))
    return torch.cat(parts)[inverse.to(place)]


def _chunk(
    states: Tensor, lm_head: Head, slot: Tensor, target: Tensor, temperature: float
) -> Tensor:
    logits = lm_head(states)
    logits = logits.to(_wide(logits.dtype)) / temperature
    total: Tensor = logits.logsumexp(1)
    return logits[slot, target] - total[slot]


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)

"""Losses as sums over the edges of a pack.

Each function returns one sum. Sums over the packs of a step add up; divide by what the
loss is a mean of, such as the number of rollouts in the step. What
`trajkit.learn.reference_loss` gives for the rows is what these give for their packs.
"""

import itertools
import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from trajkit._arguments import check_choice
from trajkit.errors import InvalidTurnsError, LayoutError
from trajkit.torch.datasets import Pack

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


Ratio: TypeAlias = Literal["token", "sequence"]


def policy_loss(
    logprobs: Tensor,
    pack: Pack,
    *,
    clip: tuple[float, float] | None = None,
    ratio: Ratio = "token",
    advantage: str = "advantage",
    old_logprobs: Tensor | None = None,
) -> Tensor:
    """The policy-gradient loss with importance ratios, summed over edges.

    With ``w`` the edge's weight, ``A`` its advantage and ``r`` its ratio::

        sum over edges of  -w * min(r * A, clamp(r, 1 - low, 1 + high) * A)

    Parameters
    ----------
    logprobs : float tensor, shape (n_edges,)
        As `gather_logprobs` gives them.
    pack : Pack
        With the column ``advantage``.
    clip : (low, high), optional
        Distances from 1 at which ratios are clipped (PPO's clipped objective; unequal
        ones are DAPO's). Default: no clipping, as in `reference_loss`.
    ratio : {"token", "sequence"}
        "token": each edge's own, ``exp(logprob - old)``. "sequence": the geometric mean
        over the edges of its row that have a weight, for all of them (GSPO, equation 7).
        The pack must hold all edges of its rows.
    advantage : str
        The column that holds it.
    old_logprobs : float tensor, shape (n_edges,), optional
        Logprobs of the behaviour policy, as computed over the same packs. Default:
        those recorded by the engine.

    Raises
    ------
    InvalidTurnsError
        An edge with a weight has an advantage or a logprob of the behaviour policy that
        is null, NaN or infinite. An edge with a weight of 0 may have any.
    LayoutError
        ``logprobs`` is not one value for each edge; or a ratio of sequences is asked for
        a part of a tree that was cut.
    """
    check_choice("ratio", ratio, Ratio)
    _check_length(logprobs, pack)
    if ratio == "sequence" and pack.is_part:
        raise LayoutError(
            "ratio='sequence' needs all edges of a row in one pack, and a tree of this "
            "pack continues in another one: pack with oversize='repeat'"
        )
    used = _used(pack, pack.edge_weight, "row_weight")
    _check_finite(pack, pack.column(advantage), used, advantage)
    if old_logprobs is None:
        _check_finite(pack, pack.edge_logprob, used, "logprob")
        old_logprobs = pack.edge_logprob
    else:
        _check_finite(pack, old_logprobs, used, "old logprob")
    old, weight, value = (
        x.to(logprobs) for x in (old_logprobs, pack.edge_weight, pack.column(advantage))
    )
    used = used.to(logprobs.device)
    # An edge without a weight has no part in the loss, whatever its values.
    old, value = (torch.where(used, x, 0.0) for x in (old, value))
    difference = torch.where(used, logprobs - old, 0.0)
    if ratio == "sequence":
        difference = _row_means(difference, used, pack.edge_row.to(logprobs.device))
    ratios = difference.exp()
    gain = ratios * value
    if clip is not None:
        low, high = clip
        gain = torch.minimum(gain, ratios.clamp(1 - low, 1 + high) * value)
    return -(weight * torch.where(used, gain, 0.0)).sum()


def _used(pack: Pack, weight: Tensor, name: str) -> Tensor:
    """The edges that a loss counts, after a check of what it weighs them with."""
    everywhere = torch.ones_like(weight, dtype=torch.bool)
    _check_finite(pack, weight, everywhere, name)
    return weight != 0


def _check_finite(pack: Pack, values: Tensor, used: Tensor, name: str) -> None:
    bad = ~torch.isfinite(values) & used.to(values.device)
    if not bool(bad.any()):
        return
    edge = int(bad.nonzero()[0])
    value = float(values[edge])
    rows = pack.edge_row[bad.to(pack.edge_row.device)].unique().tolist()
    listed = ", ".join(map(str, rows[:10])) + (" ..." if len(rows) > 10 else "")
    raise InvalidTurnsError(
        f"{name} is {'null or NaN' if math.isnan(value) else value} for {len(rows)} of "
        f"the pack's rows ({listed}), first at edge {edge} (row "
        f"{int(pack.edge_row[edge])}, position {int(pack.edge_position[edge])}): the "
        "loss and every gradient would be NaN or infinite. Give these rows a number, "
        "or leave them out before packing"
    )


def _row_means(values: Tensor, used: Tensor, row: Tensor) -> Tensor:
    """For each edge, the mean over the used edges of its row."""
    _, code = torch.unique(row, return_inverse=True)
    zeros = values.new_zeros(len(row))
    total = zeros.index_add(0, code, values)
    count = zeros.index_add(0, code, used.to(values)).clamp(min=1)
    return (total / count)[code]


def nll_loss(logprobs: Tensor, pack: Pack) -> Tensor:
    """The negative log-likelihood, weighed: ``sum over edges of -w * logprob``.

    Parameters
    ----------
    logprobs : float tensor, shape (n_edges,)
        As `gather_logprobs` gives them.
    pack : Pack

    Raises
    ------
    InvalidTurnsError
        A weight is null, NaN or infinite.
    """
    _check_length(logprobs, pack)
    return _weighed(logprobs, pack, pack.edge_weight, "row_weight")


def observation_loss(
    logprobs: Tensor, pack: Pack, *, weight: str = "observation_weight"
) -> Tensor:
    """The loss of observed tokens: ``sum over edges of -v * logprob``.

    Parameters
    ----------
    logprobs : float tensor, shape (n_edges,)
        As `gather_logprobs` gives them.
    pack : Pack
        With a column of observation weights, ``v``.
    weight : str
        The column that holds them.

    Raises
    ------
    InvalidTurnsError
        A weight is null, NaN or infinite.
    """
    _check_length(logprobs, pack)
    return _weighed(logprobs, pack, pack.column(weight), weight)


def _weighed(logprobs: Tensor, pack: Pack, weight: Tensor, name: str) -> Tensor:
    used = _used(pack, weight, name).to(logprobs.device)
    # An edge without a weight has no part in the loss, whatever its logprob.
    return -torch.where(used, weight.to(logprobs) * logprobs, 0.0).sum()


def _check_length(logprobs: Tensor, pack: Pack) -> None:
    if logprobs.shape != pack.edge_source.shape:
        raise LayoutError(
            f"logprobs of shape {tuple(logprobs.shape)} for {len(pack.edge_source)} edges"
        )

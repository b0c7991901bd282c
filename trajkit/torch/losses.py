"""Losses as sums over the edges of a pack.

Each function returns one sum. Sums over the packs of a step add up; divide by what the
loss is a mean of, such as the number of rollouts in the step. What
`trajkit.learn.reference_loss` gives for the rows is what these give for their packs.
"""

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
Ratio: TypeAlias = Literal["token", "sequence"]


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
        The model's last hidden states, after its last norm; LayoutError without one for
        each token of the pack.
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
    """
    n = len(pack.input_ids)
    if hidden.shape[:-1] not in ((n,), (1, n)):
        raise LayoutError(
            f"hidden states of shape {tuple(hidden.shape)} for a pack of {n} tokens"
        )
    # Sizes of chunks are needed on the host, where packs come from.
    source, slot, counts = torch.unique(
        pack.edge_source.cpu(), return_inverse=True, return_counts=True
    )
    order = torch.argsort(slot, stable=True)
    # One chunk at least: without an edge, the head takes part with zero gradients.
    sizes = [int(count.sum()) for count in counts.split(chunk_size)]
    slot, target = slot[order] % chunk_size, pack.edge_target.cpu()[order]
    source, slot, target, places = (
        x.to(hidden.device, non_blocking=True)
        for x in (source, slot, target, torch.argsort(order))
    )
    states = hidden.reshape(n, hidden.shape[-1])[source].split(chunk_size)
    chunks = zip(states, slot.split(sizes), target.split(sizes), strict=True)
    parts = [
        checkpoint(_chunk, *chunk, lm_head, temperature, use_reentrant=False)
        for chunk in chunks
    ]
    return torch.cat(parts)[places]


def _chunk(
    states: Tensor, slot: Tensor, target: Tensor, lm_head: Head, temperature: float
) -> Tensor:
    logits = lm_head(states)
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide) / temperature
    total: Tensor = logits.logsumexp(1)
    return logits[slot, target] - total[slot]


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
    clip : (low, high), optional
        Distances from 1 at which ratios are clipped (PPO's clipped objective; unequal
        ones are DAPO's). Default: no clipping, as in `reference_loss`.
    ratio : {"token", "sequence"}
        "token": each edge's own, ``exp(logprob - old)``. "sequence": the geometric mean
        over the edges of its row that have a weight, for all of them (GSPO, equation 7).
    advantage : str
        The column that holds it.
    old_logprobs : float tensor, shape (n_edges,), optional
        Logprobs of the behaviour policy. Default: those recorded by the engine.

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
    if ratio == "sequence" and pack.is_part:
        raise LayoutError(
            "ratio='sequence' needs all edges of a row in one pack, and a tree of this "
            "one goes on in another: pack with oversize='repeat'"
        )
    weight = _finite(logprobs, pack, "row_weight", pack.edge_weight)
    used = weight != 0
    value = _finite(logprobs, pack, advantage, None, used)
    name = "logprob" if old_logprobs is None else "old logprob"
    old = pack.edge_logprob if old_logprobs is None else old_logprobs
    old = _finite(logprobs, pack, name, old, used)
    difference = torch.where(used, logprobs - old, 0.0)
    if ratio == "sequence":
        _, row = torch.unique(pack.edge_row.to(used.device), return_inverse=True)
        total, count = (
            torch.zeros_like(difference).index_add(0, row, x.to(difference))
            for x in (difference, used)
        )
        difference = torch.where(used, (total / count.clamp(min=1))[row], 0.0)
    ratios = difference.exp()
    gain = ratios * value
    if clip is not None:
        low, high = clip
        gain = torch.minimum(gain, ratios.clamp(1 - low, 1 + high) * value)
    return -(weight * gain).sum()


def nll_loss(logprobs: Tensor, pack: Pack) -> Tensor:
    """The negative log-likelihood, weighed: ``sum over edges of -w * logprob``.

    Parameters are those of `policy_loss`, and so are errors, for weights.
    """
    return _weighed(logprobs, _finite(logprobs, pack, "row_weight", pack.edge_weight))


def observation_loss(
    logprobs: Tensor, pack: Pack, *, weight: str = "observation_weight"
) -> Tensor:
    """The loss of observed tokens: ``sum over edges of -v * logprob``, as `nll_loss`.

    ``weight`` names the column that holds the observation weights, ``v``.
    """
    return _weighed(logprobs, _finite(logprobs, pack, weight))


def _weighed(logprobs: Tensor, weight: Tensor) -> Tensor:
    # An edge without a weight has no part in the loss, whatever its logprob.
    return -(weight * torch.where(weight != 0, logprobs, 0.0)).sum()


def _finite(
    logprobs: Tensor,
    pack: Pack,
    name: str,
    values: Tensor | None = None,
    used: Tensor | None = None,
) -> Tensor:
    """Values of edges, by default of a column, as ``logprobs``; 0 where not used."""
    if logprobs.shape != pack.edge_source.shape:
        raise LayoutError(
            f"logprobs of shape {tuple(logprobs.shape)} for {len(pack.edge_source)} edges"
        )
    values = (pack.column(name) if values is None else values).to(logprobs.device)
    bad = ~torch.isfinite(values) & (True if used is None else used)
    if bool(bad.any()):
        edge = int(bad.nonzero()[0])
        value = float(values[edge])
        rows = pack.edge_row[bad.to(pack.edge_row.device)].unique().tolist()
        listed = ", ".join(map(str, rows[:10])) + (" ..." if len(rows) > 10 else "")
        raise InvalidTurnsError(
            f"{name} is {'null or NaN' if math.isnan(value) else value} for {len(rows)} "
            f"of the pack's rows ({listed}), first at edge {edge} (row "
            f"{int(pack.edge_row[edge])}, position {int(pack.edge_position[edge])}): give "
            "these rows a number, or leave them out before packing"
        )
    values = values.to(logprobs.dtype)
    return values if used is None else torch.where(used, values, 0.0)

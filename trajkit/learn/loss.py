"""A policy-gradient loss with an observation term, written to be read.

It defines in ten lines the meaning of the weights in a rows table. Tests compare the
losses of trainers with it.
"""

import math
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema.engine import row_lengths
from trajkit.tables.canonical import TableLike, as_table, canonical_rows, is_list, place
from trajkit.tables.ragged import Longs, Ragged, codes
from trajkit.turns.validation import check_all

Floats: TypeAlias = npt.NDArray[np.float64]
Tensor: TypeAlias = Any
"""A numpy array or a torch tensor; trajkit does not import torch."""

Reduce: TypeAlias = Literal["mean", "sum"]


@dataclass(frozen=True, slots=True)
class Loss:
    """Two sums and their denominators, which add up over ranks.

    Attributes
    ----------
    rl_sum, observation_sum : scalar array or tensor
        In nats; differentiable if the logprobs are.
    rl_count, observation_count : int
        Their denominators, which are independent.
    """

    rl_sum: Tensor
    rl_count: int
    observation_sum: Tensor
    observation_count: int

    @property
    def total(self) -> Tensor:
        """The loss; a term without tokens is 0."""
        rl = self.rl_sum / max(self.rl_count, 1)
        return rl + self.observation_sum / max(self.observation_count, 1)


def reference_loss(
    rows: TableLike, logprobs: Tensor, *, reduce: Reduce = "mean"
) -> Loss:
    """The loss of rows whose tokens have these logprobs under the trained model.

    ``w`` is the row_weight, ``A`` the advantage and ``M`` the trained tokens of a row,
    ``r = exp(logprobs - behaviour logprobs)``, and ``v`` the observation_weight::

        rl_sum          = sum over rows of  w * A * mean(-r over M)     reduce="mean"
                                            w * A * sum(-r over M)      reduce="sum"
        observation_sum = sum over tokens of  -v * logprobs

    Observed tokens have no ratio, advantage or clipping: the derivative of
    ``observation_sum`` by their logprob is ``-v``, that of ``rl_sum`` is 0.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS` with a column ``advantage`` (from
        `trajkit.add_advantages`, per row or per token; default: the reward) and,
        optionally, ``observation_weight``.
    logprobs : array, list or torch tensor of floats, shape (n_tokens,)
        Log-probability of every token of every row given the tokens before it in its
        row, rows concatenated. The first of each row is not read.
    reduce : {"mean", "sum"}
        Reduction over the tokens of a row: "mean" for row weights by "token" or "row",
        "sum" for those by "rollout" (see `trajkit.add_weights`).

    Returns
    -------
    Loss
        ``rl_count`` is the number of rollouts with a trained token,
        ``observation_count`` that of observed tokens. Rows with a null
        advantage count neither in ``rl_sum`` nor in ``rl_count``.

    Raises
    ------
    ArgumentError
        ``reduce`` has an unknown value, or ``logprobs`` are no floats.
    InvalidTurnsError
        ``logprobs`` or the weights of a row have the wrong length; a trained token has
        no finite behaviour logprob, advantage or weight.
    """
    check_choice("reduce", reduce, Reduce)
    table = check_all(canonical_rows(as_table(rows)), [row_lengths])
    ids = Ragged.of(table.column("input_ids"))
    row, logprobs = ids.owner, _floats(logprobs)
    if tuple(logprobs.shape) != row.shape:
        raise InvalidTurnsError(
            f"logprobs has shape {tuple(logprobs.shape)}: the rows have {len(row)} tokens"
        )

    def check_finite(values: Floats, tokens: Longs, fault: str) -> None:
        """``fault`` may name the ``value`` and the ``token`` in its row."""
        for k in np.flatnonzero(~np.isfinite(values))[:1]:
            of = int(row[tokens[k]])
            fault = fault.format(value=values[k], token=tokens[k] - ids.offsets[of])
            raise InvalidTurnsError(f"{place(table, of)}: {fault}")

    name = "advantage" if "advantage" in table.column_names else "reward"
    counts = np.asarray(table.column(name).is_valid())
    mask = Ragged.of(table.column("loss_mask"), fill=False).values
    trained = np.flatnonzero(mask & counts[row])
    of = row[trained]
    weight = table.column("row_weight").fill_null(np.nan).to_numpy()
    fault = "row_weight is null or not finite. Set it with trajkit.add_weights"
    check_finite(weight[of], trained, fault)
    if reduce == "mean":
        weight = weight / np.maximum(np.bincount(of, minlength=len(table)), 1)
    behaviour = Ragged.of(table.column("logprobs"), fill=np.nan).values[trained]
    fault = "token {token} is trained and has no finite logprob, which the ratio needs"
    check_finite(behaviour, trained, fault)
    advantage = _per_token(table, name, ids)[trained]
    fault = name + " of a trained token is {value}: expected a finite number"
    check_finite(advantage, trained, fault)
    ratio = math.e ** (logprobs[trained] - _constant(behaviour, logprobs))
    rl_sum = -(_constant(weight[of] * advantage, logprobs) * ratio).sum()

    values = _per_token(table, "observation_weight", ids)
    observed = np.flatnonzero(values)
    value = values[observed]
    fault = "observation_weight {value} of a token: expected a finite number"
    check_finite(value, observed, fault)
    observation_sum = -(_constant(value, logprobs) * logprobs[observed]).sum()
    session = codes(table.column("session_id"))
    n_rollouts = len(np.unique(session[of]))
    return Loss(rl_sum, n_rollouts, observation_sum, len(observed))


def _floats(logprobs: Any) -> Tensor:
    if not hasattr(logprobs, "new_tensor"):
        with suppress(TypeError, ValueError):
            logprobs = np.asarray(logprobs)
    kind = str(getattr(logprobs, "dtype", type(logprobs).__name__))
    if "float" not in kind:
        raise ArgumentError(
            f"logprobs of type {kind}: expected an array, a tensor or a list of floats"
        )
    return logprobs


def _constant(values: Floats, like: Tensor) -> Tensor:
    """The values as an array of the library and device of ``like``."""
    return values if isinstance(like, np.ndarray) else like.new_tensor(values)


def _per_token(table: pa.Table, name: str, ids: Ragged) -> Floats:
    """The values of a column for all tokens; 0 where a row or the table has none."""
    if name not in table.column_names:
        return np.zeros(len(ids.owner))
    column = table.column(name)
    if not is_list(column.type):
        return np.asarray(column.fill_null(0.0), np.float64)[ids.owner]
    given = Ragged.of(column.cast(pa.large_list(pa.float64())), fill=np.nan)
    there = np.asarray(column.is_valid())
    for row in np.flatnonzero(there & (given.lengths != ids.lengths))[:1]:
        raise InvalidTurnsError(
            f"{place(table, int(row))}: {given.lengths[row]} values of {name} for "
            f"{ids.lengths[row]} tokens"
        )
    values = np.zeros(len(ids.owner))
    values[there[ids.owner]] = given.values
    return values

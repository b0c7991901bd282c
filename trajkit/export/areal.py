"""Rows as AReaL's trajectory tensors.

Source: https://github.com/areal-project/AReaL/tree/cbff54d (``utils/data.py``,
``trainer/ppo/actor.py``, ``trainer/ppo/gae.py``).
"""

from typing import Any, Literal, TypeAlias

import numpy as np

from trajkit._arguments import check_choice, chosen_int
from trajkit.errors import ExportError
from trajkit.export._rows import (
    ExportRow,
    StepCounts,
    advantages_of,
    checked_rows,
    objects_of,
    optional_column,
    padded,
    rewards_of,
    step_scales,
)
from trajkit.tables.canonical import TableLike

Reward: TypeAlias = Literal["reward", "advantage"]

CONTEXT_VERSION = -1
"""The version, and the turn, of a token that was not sampled."""


def trajectory_fields(
    rows: TableLike,
    *,
    version: int | None = None,
    reward: Reward = "reward",
    weighted: bool | StepCounts = False,
) -> list[dict[str, Any]]:
    """Rows as dicts of arrays, one for each group: AReaL takes a dict for a group.

    Context after the last trained token is removed: AReaL puts the reward at the end of
    the row and loses it if that token is not trained.

    Parameters
    ----------
    rows : table
        A payload ``weight_version`` of integers in text becomes ``versions``.
    version : int, optional
        The version of sampled tokens that have none in that payload. None: 0 if the rows
        have no such payload, else they need it in every sampled token.
    reward : {"reward", "advantage"}
        The column that becomes ``rewards``. With "advantage" set ``reward_norm=None``,
        ``adv_norm=None``, ``gamma=lambda=1`` and no KL term, so that each trained token has
        the advantage. AReaL normalises rewards over the rows of a group, so rollouts with
        several rows need "advantage".
    weighted : StepCounts, optional
        Fold row weights into the advantages, so that the loss of a step, a mean over its
        trained tokens, is `trajkit.learn.reference_loss` of the step's rows. The counts
        are those of all rows of the step (`trajkit.export.step_counts`), with
        ``ppo_n_minibatches=1``. Implies ``reward="advantage"``.

    Returns
    -------
    list of dict of str to ndarray
        ``input_ids``, ``loss_mask``, ``versions``, ``turn_ids`` (int32), ``logprobs``
        (float32), ``attention_mask`` (bool), each of shape (rows of the group, tokens of
        the longest), padded right; ``rewards`` (float32), one per row. ``turn_ids``
        counts the trained turns of a row from 0; -1 is context.

    Raises
    ------
    ExportError
        A reward or an advantage is null, a weight version is null or no integer, a rollout
        has several rows without advantages, or ``weighted`` is true without counts.
    """
    check_choice("reward", reward, Reward)
    if version is not None:
        version = chosen_int("version", version, CONTEXT_VERSION)
    checked = checked_rows(rows, "AReaL")
    scales = step_scales(checked, weighted, "AReaL")
    if scales is not None or reward == "advantage":
        gains: list[Any] = advantages_of(checked, scales)
    else:
        for row in checked:
            if not row.is_last:
                raise ExportError(
                    f"session {row.session_id!r} has several rows: AReaL would compute "
                    "baselines over rows. Add advantages and pass reward='advantage'"
                )
        gains = rewards_of(checked)
    named = optional_column(rows, "weight_version")
    groups: dict[int, list[dict[str, Any]]] = {}
    for row, gain in zip(checked, gains, strict=True):
        n = int(np.flatnonzero(row.loss_mask)[-1]) + 1
        arrays = {
            "input_ids": row.input_ids,
            "loss_mask": row.loss_mask.astype(np.int32),
            "logprobs": row.logprobs,
            "versions": _versions(row, named[row.line], version),
            "turn_ids": _turns(row),
            "attention_mask": np.ones(n, np.bool_),
        }
        own = {name: array[:n] for name, array in arrays.items()}
        groups.setdefault(row.group, []).append(own | {"rewards": np.float32(gain)})
    found = []
    for members in groups.values():
        width = max(len(own["input_ids"]) for own in members)
        found.append({"rewards": np.array([own.pop("rewards") for own in members])})
        for name in members[0]:
            fill = CONTEXT_VERSION if name == "turn_ids" else 0
            found[-1][name] = padded([own[name] for own in members], width, fill)
    return found


def _turns(row: ExportRow) -> Any:
    """The number of the trained turn of each token, -1 for context."""
    found = np.full(len(row.input_ids), CONTEXT_VERSION, np.int32)
    numbers: dict[int, int] = {}
    for span in row.spans:
        part = slice(span["start"], span["stop"])
        if row.loss_mask[part].any():
            number = numbers.setdefault(span["turn_index"], len(numbers))
            found[part] = np.where(row.loss_mask[part], number, CONTEXT_VERSION)
    for k in np.flatnonzero(row.loss_mask & (found < 0))[:1]:
        raise ExportError(f"{row.place}: token {k} is trained, but of no turn in spans")
    return found


def _versions(
    row: ExportRow, names: list[str | None] | None, version: int | None
) -> Any:
    versions = np.where(row.loss_mask, version or 0, CONTEXT_VERSION).astype(np.int32)
    if names is None:
        return versions
    for k in np.flatnonzero(row.loss_mask):
        name = names[k] if k < len(names) else None
        if name is None and version is not None:
            continue
        try:
            versions[k] = int(name)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            raise ExportError(
                f"{row.place}: weight version {name!r} of token {k} is not an integer, "
                "which AReaL expects. Drop the payload weight_version and pass version="
            ) from None
    return versions


@objects_of(trajectory_fields)
def trajectories(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`trajectory_fields` with torch tensors, as AReaL's trainer takes them."""
    import torch

    return [
        {name: torch.from_numpy(np.array(array)) for name, array in each.items()}
        for each in fields
    ]

"""Rows as AReaL's trajectory tensors.

Source: AReaL at 4aef98d (``workflow/rlvr.py``, ``trainer/ppo/actor.py``,
``utils/data.py``); spec, training formats 9.
"""

from typing import Any

import numpy as np

from trajkit._arrow.canonical import TableLike
from trajkit.errors import ExportError
from trajkit.export._rows import (
    ExportRow,
    advantages_of,
    checked_rows,
    objects_of,
    optional_column,
    rewards_of,
)

CONTEXT_VERSION = -1
"""The version of a token that was not sampled."""


def trajectory_fields(
    rows: TableLike, *, version: int = 0, weighted: bool = False
) -> list[dict[str, Any]]:
    """Rows as dicts of arrays of shape (1, n_tokens).

    Context after the last trained token is removed: AReaL puts the reward at the end of
    the row and loses it if that token is not trained.

    Parameters
    ----------
    rows : table
        A payload ``weight_version`` of integers in text becomes ``versions``.
    version : int
        The version of sampled tokens without that payload.
    weighted : bool
        Write advantages with folded row weights as ``rewards``, for ``reward_norm=None``,
        ``gamma=lambda=1`` and no KL term. AReaL normalises over consecutive rows, which is
        wrong if rollouts have several; so such rows need ``weighted=True``.

    Returns
    -------
    list of dict of str to ndarray
        ``input_ids``, ``loss_mask``, ``versions`` (int32), ``logprobs`` (float32),
        ``attention_mask`` (bool), each of shape (1, n_tokens); ``rewards`` (float32) of
        shape (1,).

    Raises
    ------
    ExportError
        A reward (with ``weighted``, an advantage) is null, a weight version is not an
        integer, or a rollout has several rows and ``weighted`` is false.
    """
    checked = checked_rows(rows)
    if weighted:
        gains = advantages_of(checked, weighted)
    else:
        for row in checked:
            if not row.is_last:
                raise ExportError(
                    f"session {row.session_id!r} has several rows: AReaL would compute "
                    "baselines over rows. Add advantages and pass weighted=True"
                )
        gains = rewards_of(checked)
    named = optional_column(rows, "weight_version")
    found = []
    for row, gain in zip(checked, gains, strict=True):
        n = int(np.flatnonzero(row.loss_mask)[-1]) + 1
        found.append(
            {
                "input_ids": row.input_ids[None, :n],
                "loss_mask": row.loss_mask[None, :n].astype(np.int32),
                "logprobs": row.logprobs[None, :n],
                "versions": _versions(row, named[row.line], version)[None, :n],
                "attention_mask": np.ones((1, n), np.bool_),
                "rewards": np.array([gain], np.float32),
            }
        )
    return found


def _versions(row: ExportRow, names: list[str | None] | None, version: int) -> Any:
    versions = np.where(row.loss_mask, version, CONTEXT_VERSION).astype(np.int32)
    if not names:
        return versions
    for k in np.flatnonzero(row.loss_mask):
        name = names[k]
        if name is None:
            continue
        try:
            versions[k] = int(name)
        except ValueError:
            raise ExportError(
                f"{row.place}: weight version {name!r} of token {k} is not an integer, "
                "which AReaL expects. Drop the payload weight_version and pass version="
            ) from None
    return versions


@objects_of(trajectory_fields)
def trajectories(fields: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`trajectory_fields` with torch tensors, as a ``RolloutWorkflow`` returns them."""
    import torch

    return [
        {name: torch.from_numpy(np.array(array)) for name, array in each.items()}
        for each in fields
    ]

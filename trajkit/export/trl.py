"""Rows for TRL's GRPOTrainer and AsyncGRPOTrainer.

Source: TRL 1.16.0 (``trainer/grpo_trainer.py``, ``experimental/async_grpo``); spec,
training formats 3.
"""

from typing import Any

import numpy as np

from trajkit._arrow.canonical import TableLike
from trajkit.export._rows import (
    advantages_of,
    checked_rows,
    objects_of,
    one_row_per_rollout,
)


def rollout_func_fields(rows: TableLike) -> dict[str, list[Any]]:
    """Rows as the dict that a ``rollout_func`` of GRPOTrainer returns.

    Parameters
    ----------
    rows : table
        With one row per rollout, in the order of the prompts that the trainer passed:
        each ``num_generations`` times.

    Returns
    -------
    dict of str to list
        ``prompt_ids``, ``completion_ids``, ``logprobs`` and ``env_mask`` (1: sampled);
        and ``reward``, which reward functions receive. A null reward stays None, and TRL
        leaves such a rollout out of the baseline.

    Raises
    ------
    ExportError
        A rollout has several rows.
    """
    checked = checked_rows(rows, response=True)
    one_row_per_rollout(checked, "GRPOTrainer")
    return {
        "prompt_ids": [row.prompt for row in checked],
        "completion_ids": [row.response(row.input_ids) for row in checked],
        "logprobs": [row.response(row.logprobs) for row in checked],
        "env_mask": [row.response(row.loss_mask) for row in checked],
        "reward": [row.reward for row in checked],
    }


def rollout_sample_fields(
    rows: TableLike,
    *,
    model_version: int = 0,
    first_group_id: int = 0,
    weighted: bool = False,
) -> list[dict[str, Any]]:
    """Rows as the keyword arguments of AsyncGRPOTrainer's ``RolloutSample``.

    Parameters
    ----------
    rows : table
        With a column ``advantage``.
    model_version : int
        The weights that sampled the rows; the trainer drops samples that are too old.
    first_group_id : int
        ``group_id`` of the first group. Groups count up in order of the rows.
    weighted : bool
        Fold row weights into the advantages. The trainer's loss, a mean over trained
        tokens, is then `trajkit.training.reference_loss`. Otherwise each trained token
        weighs the same.

    Returns
    -------
    list of dict
        One per row, with int64 and float32 arrays over the complete row.

    Raises
    ------
    ExportError
        An advantage is null or absent.
    """
    checked = checked_rows(rows)
    return [
        {
            "prompt": [],
            "completion": [],
            "input_ids": row.input_ids.astype(np.int64),
            "completion_mask": row.loss_mask.astype(np.int64),
            "old_log_probs": row.logprobs,
            "advantage": gain,
            "model_version": model_version,
            "group_id": first_group_id + row.group,
            "metrics": {} if row.reward is None else {"reward": row.reward},
        }
        for row, gain in zip(checked, advantages_of(checked, weighted), strict=True)
    ]


@objects_of(rollout_sample_fields)
def rollout_samples(fields: list[dict[str, Any]]) -> list[Any]:
    """Rows as ``RolloutSample`` objects; see `rollout_sample_fields`."""
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample

    return [RolloutSample(**each) for each in fields]

"""Rows as the results of OpenRLHF's ``AgentExecutor.execute``.

Source: https://github.com/OpenRLHF/OpenRLHF/tree/3c3be62 (``utils/agent.py``,
``trainer/ppo_utils/samples_generator.py``).
"""

from typing import Any

import numpy as np

from trajkit.export._rows import (
    checked_rows,
    groups_in_order,
    limit,
    one_row_per_rollout,
    rewards_of,
)
from trajkit.tables.canonical import TableLike


def execution_fields(
    rows: TableLike,
    *,
    prompt: str = "",
    label: str = "",
    max_len: int | None = 2048,
    n_samples_per_prompt: int | None = None,
) -> list[dict[str, Any]]:
    """Rows as the dicts that ``execute`` returns, one per rollout.

    Parameters
    ----------
    rows : table
        With one row per rollout, the rollouts of a group one after another: OpenRLHF takes
        runs of ``n_samples_per_prompt`` samples for groups.
    prompt, label : str
        Written to every dict.
    max_len : int or None
        ``--data.max_len`` of the trainer, with its default. OpenRLHF truncates longer rows
        without a message, so they are refused here. None: no row is.
    n_samples_per_prompt : int, optional
        That of the trainer. None: the number of rows of the first group.

    Returns
    -------
    list of dict
        ``observation_tokens`` are the ids of the row, ``action_ranges`` its trained ranges
        as pairs (start, stop), ``rollout_log_probs`` cover the complete row.

    Raises
    ------
    ExportError
        A reward is null, a rollout has several rows, a row is longer than ``max_len``, or
        the rows of a group are no neighbours or not ``n_samples_per_prompt``.
    """
    checked = checked_rows(rows, "OpenRLHF", max_tokens=limit("data.max_len", max_len))
    one_row_per_rollout(checked, "OpenRLHF")
    groups_in_order(checked, "OpenRLHF", "n_samples_per_prompt", n_samples_per_prompt)
    found = []
    for row, reward in zip(checked, rewards_of(checked), strict=True):
        edges = np.flatnonzero(np.diff(row.loss_mask, prepend=False, append=False))
        found.append(
            {
                "prompt": prompt,
                "label": label,
                "images": None,
                "reward": reward,
                "scores": reward,
                "observation_tokens": row.input_ids.tolist(),
                "action_ranges": [
                    tuple(pair) for pair in edges.reshape(-1, 2).tolist()
                ],
                "rollout_log_probs": row.logprobs.tolist(),
                "extra_logs": {},
                "truncated": row.truncated,
            }
        )
    return found

"""Rows as the results of OpenRLHF's ``AgentExecutor.execute``.

Source: OpenRLHF at 3c3be62 (``utils/agent.py``,
``trainer/ppo_utils/samples_generator.py``); spec, training formats 10.
"""

from typing import Any

import numpy as np

from trajkit._arrow.canonical import TableLike
from trajkit.export._rows import checked_rows, one_row_per_rollout, rewards_of


def execution_fields(
    rows: TableLike, *, prompt: str = "", label: str = ""
) -> list[dict[str, Any]]:
    """Rows as the dicts that ``execute`` returns, one per rollout.

    Parameters
    ----------
    rows : table
        With one row per rollout.
    prompt, label : str
        Written to every dict.

    Returns
    -------
    list of dict
        ``observation_tokens`` are the ids of the row, ``action_ranges`` its trained ranges
        as pairs (start, stop), ``rollout_log_probs`` cover the complete row.

    Raises
    ------
    ExportError
        A reward is null, or a rollout has several rows.
    """
    checked = checked_rows(rows)
    one_row_per_rollout(checked, "OpenRLHF")
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

"""Rows as the results of OpenRLHF's ``AgentExecutor.execute``.

Source: https://github.com/OpenRLHF/OpenRLHF/tree/3c3be62 (``utils/agent.py``,
``trainer/ppo_utils/samples_generator.py``).
"""

from typing import Any

import numpy as np

from trajkit.export import _rows as shared

_RUNS = "n_samples_per_prompt"
_TARGET = shared.Target("OpenRLHF", "reward", cut="data.max_len", runs=_RUNS)


def execution_fields(
    rows: shared.TableLike,
    *,
    prompt: str = "",
    label: str = "",
    max_len: int | None = 2048,
    n_samples_per_prompt: int | None = None,
) -> list[dict[str, Any]]:
    """Rows as the dicts of lists that ``execute`` returns, one per rollout.

    Rollouts have one row each, and those of a group come one after another. ``prompt`` and
    ``label`` are written to every dict. The others are options of the trainer, which
    truncates rows longer than ``--data.max_len`` without a message. None: rows of any
    length; as many rows per group as the first has.
    """
    checked = shared.checked_rows(
        rows, _TARGET, cut=max_len, group_size=n_samples_per_prompt
    )
    return [
        {
            "prompt": prompt,
            "label": label,
            "images": None,
            "reward": row.reward,
            "scores": row.reward,
            "observation_tokens": row.input_ids.tolist(),
            "action_ranges": _ranges(row.loss_mask),
            "rollout_log_probs": row.logprobs.tolist(),
            "extra_logs": {},
            "truncated": row.truncated,
        }
        for row in checked
    ]


def _ranges(mask: shared.Array) -> list[Any]:
    edges = np.flatnonzero(np.diff(mask, prepend=False, append=False))
    return [*map(tuple, edges.reshape(-1, 2).tolist())]

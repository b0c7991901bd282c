"""Rows as the batches that ROLL's environment managers return.

Source: https://github.com/alibaba/ROLL/tree/8eb27cc
(``roll/pipeline/agentic/env_manager/traj_env_manager.py``, ``formulate_rollouts``).
"""

from typing import Any

import numpy as np

from trajkit._arguments import chosen_int
from trajkit.errors import ExportError
from trajkit.export._rows import checked_rows, one_row_per_rollout, rewards_of
from trajkit.tables.canonical import TableLike


def batch_fields(
    rows: TableLike, *, sequence_length: int, pad_token_id: int, tag: str = "trajkit"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows as ``batch`` and ``non_tensor_batch`` of a ``DataProto``.

    Parameters
    ----------
    rows : table
        With one row per rollout: ROLL's baselines count every row of a group.
    sequence_length : int
        That of the pipeline's configuration. A longer row is refused.
    pad_token_id : int
        Written after the last token of shorter rows.
    tag : str
        The name of the environment.

    Returns
    -------
    batch : dict of array
        ``input_ids``, ``attention_mask`` and ``position_ids``, int64; ``response_mask`` and
        ``prompt_mask``, bool; ``scores``, float32, the reward at the last token: all of
        shape (n_rows, sequence_length). ``infer_logprobs``, float32, without the first
        token: (n_rows, sequence_length - 1). Torch takes them without a copy.
    non_tensor_batch : dict of array
        Object arrays ``env_ids``, ``group_ids``, ``tags``, ``step_scores`` and
        ``episode_scores``.

    Raises
    ------
    ExportError
        A reward is null, a rollout has several rows, or a row is too long.
    """
    size = chosen_int("sequence_length", sequence_length, 2)
    checked = checked_rows(rows, "ROLL")
    one_row_per_rollout(checked, "ROLL")
    rewards = rewards_of(checked)
    shape = len(checked), size
    batch = {
        "input_ids": np.full(shape, pad_token_id, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
        "position_ids": np.zeros(shape, np.int64),
        "response_mask": np.zeros(shape, bool),
        "prompt_mask": np.zeros(shape, bool),
        "scores": np.zeros(shape, np.float32),
    }
    logprobs = np.zeros(shape, np.float32)
    for k, (row, reward) in enumerate(zip(checked, rewards, strict=True)):
        n = len(row.input_ids)
        if n > size:
            raise ExportError(
                f"{row.place}: {n} tokens, but sequence_length is {size}. Raise it, or "
                "linearize with max_row_tokens"
            )
        batch["input_ids"][k, :n] = row.input_ids
        batch["attention_mask"][k, :n] = 1
        batch["position_ids"][k, :n] = np.arange(n)
        batch["response_mask"][k, :n] = row.loss_mask
        batch["prompt_mask"][k, : np.argmax(row.loss_mask)] = True
        batch["scores"][k, n - 1] = reward
        logprobs[k, :n] = row.logprobs
    facts = {
        "env_ids": [row.rollout for row in checked],
        "group_ids": [row.uid for row in checked],
        "tags": [tag] * len(checked),
        "step_scores": [[reward] for reward in rewards],
        "episode_scores": rewards,
    }
    return batch | {"infer_logprobs": logprobs[:, 1:]}, {
        name: np.array(values, object) for name, values in facts.items()
    }

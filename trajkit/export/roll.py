"""Rows as the batches that ROLL's environment managers return.

Source: https://github.com/alibaba/ROLL/tree/8eb27cc
(``roll/pipeline/agentic/env_manager/traj_env_manager.py``, ``formulate_rollouts``).
"""

from typing import Any

import numpy as np

from trajkit._arguments import chosen_int
from trajkit.errors import ExportError
from trajkit.export._rows import checked_rows, one_row_per_rollout, padded, rewards_of
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
    for row in checked:
        if len(row.input_ids) > size:
            raise ExportError(
                f"{row.place}: {len(row.input_ids)} tokens, but sequence_length is "
                f"{size}. Raise it, or linearize with max_row_tokens"
            )
    lengths = [len(row.input_ids) for row in checked]
    masks = [row.loss_mask for row in checked]
    # the reward at the last token
    scores: list[Any] = [
        [0.0] * (n - 1) + [reward] for n, reward in zip(lengths, rewards, strict=True)
    ]
    batch = {
        "input_ids": padded(
            [row.input_ids for row in checked], size, pad_token_id, np.int64
        ),
        "attention_mask": padded([np.ones(n) for n in lengths], size, 0, np.int64),
        "position_ids": padded([np.arange(n) for n in lengths], size, 0, np.int64),
        "response_mask": padded(masks, size, False, bool),
        "prompt_mask": padded(
            [np.ones(np.argmax(mask)) for mask in masks], size, False, bool
        ),
        "scores": padded(scores, size, 0, np.float32),
    }
    logprobs = padded([row.logprobs for row in checked], size, 0, np.float32)
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

"""Rows as the batches that ROLL's environment managers return.

Source: https://github.com/alibaba/ROLL/tree/8eb27cc
(``roll/pipeline/agentic/env_manager/traj_env_manager.py``, ``formulate_rollouts``).
"""

from typing import Any

import numpy as np

from trajkit._arguments import chosen_int
from trajkit.export import _rows as shared

_TARGET = shared.Target("ROLL", "reward", cut="sequence_length", single=shared.ONE_ROW)


def batch_fields(
    rows: shared.TableLike, *, sequence_length: int, pad_token_id: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Rows as ``batch`` and ``non_tensor_batch`` of a ``DataProto``.

    Rollouts have one row each: ROLL's baselines count every row of a group. Rows longer
    than the pipeline's ``sequence_length`` are refused, shorter ones padded right. Arrays
    of ``batch`` are of shape (n_rows, sequence_length): ids and positions int64, masks
    bool, ``scores`` (the reward at the last token) and ``infer_logprobs`` float32, the
    latter without the first token. Those of ``non_tensor_batch`` are objects.
    """
    chosen_int("sequence_length", sequence_length, 2)
    checked = shared.checked_rows(rows, _TARGET, cut=sequence_length)
    shape = len(checked), sequence_length
    ids = np.full(shape, pad_token_id, np.int64)
    attention = np.zeros(shape, np.int64)
    mask, prompt = np.zeros((2, *shape), np.bool_)
    scores, logprobs = np.zeros((2, *shape), np.float32)
    for line, row in enumerate(checked):
        tokens = line, slice(len(row.input_ids))
        ids[tokens], attention[tokens] = row.input_ids, 1
        mask[tokens], logprobs[tokens] = row.loss_mask, row.logprobs
        prompt[line, : row.loss_mask.argmax()] = True
        scores[line, len(row.input_ids) - 1] = row.reward
    facts = {
        "env_ids": [row.rollout for row in checked],
        "group_ids": [row.uid for row in checked],
        "tags": ["trajkit"] * len(checked),
        "step_scores": [[row.reward] for row in checked],
        "episode_scores": [row.reward for row in checked],
    }
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": np.arange(sequence_length) * attention,
        "response_mask": mask,
        "prompt_mask": prompt,
        "scores": scores,
        "infer_logprobs": logprobs[:, 1:],
    }, {name: np.array(values, object) for name, values in facts.items()}

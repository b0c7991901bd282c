"""Rows as the fields of RLinf's ``RolloutResult``.

Source: https://github.com/RLinf/RLinf/tree/a3816b5
(``rlinf/data/schema/reasoning_results.py``). Its ``DynamicRolloutResult`` derives the mask
from lengths alone, so no row with a tool's tokens between replies fits into it.
"""

from typing import Any

from trajkit.export import _rows as shared

_TARGET = shared.Target("RLinf", "reward", response=True, runs="group_size")


def rollout_fields(rows: shared.TableLike, *, group_size: int) -> dict[str, Any]:
    """Rows as the keyword arguments of ``RolloutResult``, lists with an element per row.

    Rollouts have one row each, and those of a group come one after another, as many as
    ``group_size``, which is ``algorithm.group_size`` of RLinf.
    """
    checked = shared.checked_rows(rows, _TARGET, group_size=group_size)
    return {
        "num_sequence": len(checked),
        "group_size": group_size,
        "prompt_lengths": [row.prompt_length for row in checked],
        "prompt_ids": [row.prompt_ids for row in checked],
        "response_lengths": [len(row.response_ids) for row in checked],
        "response_ids": [row.response_ids for row in checked],
        "is_end": [not row.truncated for row in checked],
        "rewards": [row.reward for row in checked],
        "response_mask": [row.response_mask for row in checked],
        "rollout_logprobs": [row.response_logprobs for row in checked],
    }

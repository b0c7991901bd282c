"""Rows as RLinf's ``RolloutResult``.

Source: https://github.com/RLinf/RLinf/tree/a3816b5
(``rlinf/data/schema/reasoning_results.py``). Its ``DynamicRolloutResult`` derives the mask
from lengths alone, so no row with a tool's tokens between replies fits into it.
"""

from typing import Any

from trajkit.export._rows import (
    checked_rows,
    groups_in_order,
    objects_of,
    one_row_per_rollout,
    rewards_of,
)
from trajkit.tables.canonical import TableLike


def rollout_fields(rows: TableLike, *, group_size: int) -> dict[str, Any]:
    """Rows as the keyword arguments of ``RolloutResult``.

    Parameters
    ----------
    rows : table
        With one row per rollout, the rollouts of a group one after another.
    group_size : int
        ``algorithm.group_size`` of RLinf.

    Returns
    -------
    dict
        Lists with one element per row. ``response_mask`` has 0 and 1 per token of the
        response, ``is_end`` whether its last reply was complete.

    Raises
    ------
    ExportError
        A reward is null, a rollout has several rows, or groups are not consecutive rows,
        ``group_size`` each.
    """
    checked = checked_rows(rows, "RLinf", response=True)
    one_row_per_rollout(checked, "RLinf")
    groups_in_order(checked, "RLinf", "group_size", group_size)
    return {
        "num_sequence": len(checked),
        "group_size": group_size,
        "prompt_lengths": [row.prompt_length for row in checked],
        "prompt_ids": [row.prompt for row in checked],
        "response_lengths": [len(row.input_ids) - row.prompt_length for row in checked],
        "response_ids": [row.response(row.input_ids) for row in checked],
        "is_end": [not row.truncated for row in checked],
        "rewards": rewards_of(checked),
        "response_mask": [row.response(row.loss_mask) for row in checked],
        "rollout_logprobs": [row.response(row.logprobs) for row in checked],
    }


@objects_of(rollout_fields)
def rollout_result(fields: dict[str, Any]) -> Any:
    """Rows as a ``RolloutResult``; see `rollout_fields`."""
    from rlinf.data.schema.reasoning_results import RolloutResult

    return RolloutResult(**fields)

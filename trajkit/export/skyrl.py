"""Rows as SkyRL's ``GeneratorOutput``.

Source: SkyRL at a956457 (``skyrl/train/generators/base.py``,
``skyrl/train/utils/trainer_utils.py``); spec, training formats 6. For supervised training
see `trajkit.export.sft.mask_table`.
"""

from typing import Any

from trajkit._arrow.canonical import TableLike
from trajkit.export._rows import checked_rows, objects_of, rewards_of


def generator_fields(rows: TableLike) -> dict[str, Any]:
    """Rows as the fields of ``GeneratorOutput``, for ``step_wise_trajectories=true``.

    Returns
    -------
    dict
        Lists with one element per row. ``trajectory_ids`` are strings
        ``{group}_{repetition}``; `generator_output` makes ``TrajectoryID`` objects.
        ``is_last_step`` has Python bools, which SkyRL's validator requires. SkyRL computes
        the advantage of a rollout from its last row.

    Raises
    ------
    ExportError
        A reward is null.
    """
    checked = checked_rows(rows, response=True)
    return {
        "prompt_token_ids": [row.prompt for row in checked],
        "response_ids": [row.response(row.input_ids) for row in checked],
        "rewards": rewards_of(checked),
        "loss_masks": [row.response(row.loss_mask) for row in checked],
        "stop_reasons": [row.finish_reason for row in checked],
        "rollout_metrics": None,
        "rollout_logprobs": [row.response(row.logprobs) for row in checked],
        "trajectory_ids": [f"{row.uid}_{row.repetition}" for row in checked],
        "rollout_expert_indices": None,
        "is_last_step": [bool(row.is_last) for row in checked],
        "pixel_values": None,
        "image_grid_thw": None,
    }


def uids(rows: TableLike) -> list[str]:
    """The group of each row: its ``group_id``, or its session without one."""
    return [row.uid for row in checked_rows(rows, response=True)]


@objects_of(generator_fields)
def generator_output(fields: dict[str, Any]) -> dict[str, Any]:
    """`generator_fields` with SkyRL's ``TrajectoryID`` objects."""
    from skyrl.train.generators.base import TrajectoryID

    named = [name.rpartition("_") for name in fields["trajectory_ids"]]
    return fields | {
        "trajectory_ids": [
            TrajectoryID(instance_id=group, repetition_id=int(repetition))
            for group, _, repetition in named
        ]
    }

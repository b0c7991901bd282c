"""Rows as SkyRL's ``GeneratorOutput``.

Source: https://github.com/NovaSky-AI/SkyRL/tree/a956457
(``skyrl/train/generators/base.py``, ``skyrl/train/utils/trainer_utils.py``);
``rollout_sample_support`` came later. For supervised training see
`trajkit.export.sft.mask_table`.
"""

from typing import Any

import numpy as np

from trajkit.export._rows import (
    Array,
    ExportRow,
    checked_rows,
    objects_of,
    rewards_of,
    routed_experts,
    sampling_masks,
)
from trajkit.schema import PAYLOADS
from trajkit.tables.canonical import TableLike


def generator_fields(rows: TableLike) -> dict[str, Any]:
    """Rows as the fields of ``GeneratorOutput``, for ``step_wise_trajectories=true``.

    Returns
    -------
    dict
        Lists with one element per row. ``trajectory_ids`` are strings
        ``{group}_{repetition}``; `generator_output` makes ``TrajectoryID`` objects.
        ``is_last_step`` has Python bools, which SkyRL's validator requires. SkyRL computes
        the advantage of a rollout from its last row. The payloads ``routed_experts`` and
        ``sampling_mask`` become ``rollout_expert_indices``, without an entry for the last
        token, and ``rollout_sample_support``.

    Raises
    ------
    ExportError
        A reward is null.
    """
    checked = checked_rows(
        rows, "SkyRL", response=True, carried=("routed_experts", "sampling_mask")
    )
    experts, masks = routed_experts(rows, checked), sampling_masks(rows, checked)
    fields = {
        "prompt_token_ids": [row.prompt for row in checked],
        "response_ids": [row.response(row.input_ids) for row in checked],
        "rewards": rewards_of(checked),
        "loss_masks": [row.response(row.loss_mask) for row in checked],
        "stop_reasons": [row.finish_reason for row in checked],
        "rollout_metrics": None,
        "rollout_logprobs": [row.response(row.logprobs) for row in checked],
        "trajectory_ids": [f"{row.uid}_{row.repetition}" for row in checked],
        "rollout_expert_indices": None if experts is None else [*map(_small, experts)],
        "is_last_step": [bool(row.is_last) for row in checked],
        "pixel_values": None,
        "image_grid_thw": None,
    }
    if masks is not None:
        fields["rollout_sample_support"] = [
            _support(row, each) for row, each in zip(checked, masks, strict=True)
        ]
    return fields


def _small(experts: Array) -> Array:
    return experts.astype(np.min_scalar_type(int(experts.max())))


def _support(row: ExportRow, masks: list[list[int]]) -> Array:
    """The ids that each token of the response was sampled from, the token's own first."""
    n = row.prompt_length
    table = np.full((len(masks) - n, max(map(len, masks))), -1, np.int32)
    for line, (own, ids) in enumerate(zip(row.input_ids[n:], masks[n:], strict=True)):
        if ids:
            table[line, : len(ids)] = [own, *(k for k in ids if k != own)]
    return table


def uids(rows: TableLike) -> list[str]:
    """The group of each row: its ``group_id``, or a name of its session without one."""
    return [
        row.uid for row in checked_rows(rows, "SkyRL", response=True, carried=PAYLOADS)
    ]


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

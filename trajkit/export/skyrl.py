"""Rows as SkyRL's ``GeneratorOutput``.

Source: https://github.com/NovaSky-AI/SkyRL/tree/a956457
(``skyrl/train/generators/base.py``, ``skyrl/train/utils/trainer_utils.py``);
``rollout_sample_support`` came later. `trajkit.export.sft` has its supervised format.
"""

from typing import Any

import numpy as np

from trajkit.export import _rows as shared

_CARRIED = ("routed_experts", "sampling_mask")
_TARGET = shared.Target("SkyRL", "reward", _CARRIED, response=True)


def generator_fields(rows: shared.TableLike) -> dict[str, Any]:
    """Rows as the fields of ``GeneratorOutput``, for ``step_wise_trajectories=true``.

    The values are lists with one element per row. ``trajectory_ids`` are strings
    ``{group}_{repetition}``. SkyRL computes the advantage of a rollout from its last row.
    The payloads become ``rollout_expert_indices``, without an entry for the last token, and
    ``rollout_sample_support``.
    """
    checked = shared.checked_rows(rows, _TARGET)
    fields = {
        "prompt_token_ids": [row.prompt_ids for row in checked],
        "response_ids": [row.response_ids for row in checked],
        "rewards": [row.reward for row in checked],
        "loss_masks": [row.response_mask for row in checked],
        "stop_reasons": [row.finish_reason for row in checked],
        "rollout_metrics": None,
        "rollout_logprobs": [row.response_logprobs for row in checked],
        "trajectory_ids": [f"{row.uid}_{row.repetition}" for row in checked],
        "rollout_expert_indices": None,
        # SkyRL's validator takes Python's bools alone
        "is_last_step": [row.is_last for row in checked],
        "pixel_values": None,
        "image_grid_thw": None,
    }
    if any(row.routed_experts is not None for row in checked):
        fields["rollout_expert_indices"] = [
            row.routed_experts.astype(np.min_scalar_type(int(row.routed_experts.max())))
            for row in checked
        ]
    if any(row.sampling_mask is not None for row in checked):
        fields["rollout_sample_support"] = [*map(_support, checked)]
    return fields


def _support(row: shared.ExportRow) -> shared.Array:
    """The ids that each token of the response was sampled from, the token's own first."""
    masks = row.sampling_mask[row.prompt_length :]
    table = np.full((len(masks), max(map(len, masks))), -1, np.int32)
    for line, (own, ids) in enumerate(zip(row.response_ids, masks, strict=True)):
        if ids:
            table[line, : len(ids)] = [own, *(k for k in ids if k != own)]
    return table


def _with_ids(fields: dict[str, Any]) -> dict[str, Any]:
    """a dict with ``TrajectoryID`` objects."""
    from skyrl.train.generators.base import TrajectoryID

    named = [name.rpartition("_") for name in fields["trajectory_ids"]]
    ids = [TrajectoryID(instance_id=uid, repetition_id=int(k)) for uid, _, k in named]
    return fields | {"trajectory_ids": ids}


generator_output = shared.objects_of(generator_fields, _with_ids)

"""Rows as miles' ``Sample`` objects: slime's fields without sampling masks.

Source: https://github.com/radixark/miles/tree/31f1ca9 (``miles/utils/types.py``).
"""

from typing import Any

import numpy as np

from trajkit.export import _rows as shared
from trajkit.export import slime

_TARGET = shared.Target(
    *("miles", "reward", ("routed_experts", "teacher_logprobs")), response=True
)


def sample_fields(
    rows: shared.TableLike, *, first_index: int = 0, first_group_index: int = 0
) -> list[dict[str, Any]]:
    """Rows as the dicts that ``Sample.from_dict`` takes.

    Parameters and results are those of `trajkit.export.slime.sample_fields`, with
    ``rollout_routed_experts`` as int32 arrays of shape (n_tokens - 1, layers, experts).
    """
    checked = shared.checked_rows(rows, _TARGET)
    samples = slime.fields_of(checked, first_index, first_group_index)
    for sample in samples:
        if "rollout_routed_experts" in sample:
            experts = sample["rollout_routed_experts"]
            sample["rollout_routed_experts"] = np.array(experts, np.int32)
    return samples


samples = shared.objects_of(sample_fields, "miles.utils.types:Sample.from_dict")

"""Rows as the fields of miles' ``Sample``: those of slime without sampling masks.

Source: https://github.com/radixark/miles/tree/31f1ca9 (``miles/utils/types.py``).
"""

from typing import Any

from trajkit.export import _rows as shared
from trajkit.export import slime

_CARRIED = ("routed_experts", "teacher_logprobs")
_TARGET = shared.Target("miles", "reward", _CARRIED, response=True)


def sample_fields(
    rows: shared.TableLike, *, first_index: int = 0, first_group_index: int = 0
) -> list[dict[str, Any]]:
    """Rows as the dicts that ``Sample.from_dict`` takes.

    As `trajkit.export.slime.sample_fields`, with ``rollout_routed_experts`` as int32 arrays
    of shape (n_tokens - 1, layers, experts).
    """
    return slime.fields_of(rows, _TARGET, first_index, first_group_index)

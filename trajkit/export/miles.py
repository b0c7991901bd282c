"""Rows as miles' ``Sample`` objects: slime's fields without sampling masks.

Source: https://github.com/radixark/miles/tree/31f1ca9 (``miles/utils/types.py``).
"""

from typing import Any

import numpy as np

from trajkit.export import slime
from trajkit.export._rows import checked_rows, objects_of
from trajkit.tables.canonical import TableLike


def sample_fields(
    rows: TableLike, *, first_index: int = 0, first_group_index: int = 0
) -> list[dict[str, Any]]:
    """Rows as the dicts that ``Sample.from_dict`` takes.

    Parameters
    ----------
    rows : table
        The payloads ``routed_experts`` and ``teacher_logprobs`` are carried along.
    first_index, first_group_index : int
        As in `trajkit.export.slime.sample_fields`.

    Returns
    -------
    list of dict
        As of `trajkit.export.slime.sample_fields`, with ``rollout_routed_experts`` as
        int32 arrays of shape (n_tokens - 1, layers, experts).

    Raises
    ------
    ExportError
        A reward is null, or the rows have sampling masks.
    """
    carried = "routed_experts", "teacher_logprobs"
    checked = checked_rows(rows, "miles", response=True, carried=carried)
    samples = slime.fields_of(rows, checked, first_index, first_group_index)
    for sample in samples:
        experts = sample.get("rollout_routed_experts")
        if experts is not None:
            sample["rollout_routed_experts"] = np.array(experts, np.int32)
    return samples


@objects_of(sample_fields)
def samples(fields: list[dict[str, Any]]) -> list[Any]:
    """Rows as ``miles.utils.types.Sample`` objects; see `sample_fields`."""
    from miles.utils.types import Sample

    return [Sample.from_dict(each) for each in fields]

"""Rows for supervised fine-tuning with transformers, TRL or SkyRL.

Source: spec, training formats 4 and 6. Labels are aligned with the ids, since models shift
them. ``labels`` is the only column that TRL's SFTTrainer always applies: it ignores
``loss_mask``, and ``completion_mask`` unless ``completion_only_loss`` is set.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa

from trajkit._arrow.canonical import TableLike
from trajkit.export._rows import ExportRow, checked_rows

IGNORED = -100
"""The label of a token that is not trained."""


def labels_table(rows: TableLike) -> pa.Table:
    """Rows with ``input_ids`` and ``labels``, both ``list<int32>``.

    TRL packs only columns with lists of the same type.

    Parameters
    ----------
    rows : table
        Supervised training has no weights: filter rows by reward before.

    Returns
    -------
    Table
        One line per row. ``labels`` is -100 where ``loss_mask`` is false.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [{"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}]
    ... )
    >>> labels_table(tk.linearize(turns)).to_pylist()
    [{'input_ids': [1, 2, 3], 'labels': [-100, 2, 3]}]
    """
    return _table(rows, "labels", _labels, pa.int32())


def _labels(row: ExportRow) -> Any:
    return np.where(row.loss_mask, row.input_ids, IGNORED)


def _table(
    rows: TableLike, name: str, values: Callable[[ExportRow], Any], type_: pa.DataType
) -> pa.Table:
    """``input_ids`` of each row, and a column with a value per token."""
    checked = checked_rows(rows, logprobs=False)
    ids = [row.input_ids for row in checked]
    return pa.table(
        {
            "input_ids": pa.array(ids, pa.list_(pa.int32())),
            name: pa.array([values(row) for row in checked], pa.list_(type_)),
        }
    )


def dataset(rows: TableLike) -> Any:
    """`labels_table` as a ``datasets.Dataset``, without a copy."""
    import datasets

    return datasets.Dataset(labels_table(rows))


def dataset_dict(**splits: TableLike) -> Any:
    """A ``datasets.DatasetDict`` of tables of rows, such as ``train=`` and ``test=``."""
    import datasets

    return datasets.DatasetDict({name: dataset(rows) for name, rows in splits.items()})


def mask_table(rows: TableLike) -> pa.Table:
    """Rows with ``input_ids`` and ``loss_mask``, for SkyRL's ``load_from_pretokenized``.

    Write it with ``pyarrow.parquet.write_table``. The loader also takes trajkit's own
    Parquet files; this table has no other columns.
    """
    return _table(rows, "loss_mask", lambda row: row.loss_mask.view(np.int8), pa.int8())


def padded_labels(rows: TableLike, pad_token_id: int) -> dict[str, Any]:
    """``input_ids``, ``attention_mask`` and ``labels`` as int64 arrays, padded right.

    Returns
    -------
    dict of str to ndarray of int64, shape (n_rows, longest row)
    """
    checked = checked_rows(rows, logprobs=False)
    shape = len(checked), max((len(row.input_ids) for row in checked), default=0)
    batch = {
        "input_ids": np.full(shape, pad_token_id, np.int64),
        "attention_mask": np.zeros(shape, np.int64),
        "labels": np.full(shape, IGNORED, np.int64),
    }
    for k, row in enumerate(checked):
        tokens = k, slice(len(row.input_ids))
        batch["input_ids"][tokens] = row.input_ids
        batch["attention_mask"][tokens] = 1
        batch["labels"][tokens] = _labels(row)
    return batch

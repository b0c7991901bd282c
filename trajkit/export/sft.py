"""Rows for supervised fine-tuning with transformers, TRL, Axolotl, LLaMA-Factory or SkyRL.

Supervised training has no weights: filter rows by reward before. Payloads are left out.
Labels are aligned with the ids, since models shift them. ``labels`` is the only column that
TRL's SFTTrainer 1.16.0 always applies: it ignores ``loss_mask``, and ``completion_mask``
unless ``completion_only_loss`` is set. Axolotl 0.19.0 takes rows for tokenized only if they
have ``attention_mask`` too (``utils/data/wrappers.py``).
"""

import warnings
from typing import Any

import numpy as np
import pyarrow as pa

from trajkit.errors import LongRowsWarning
from trajkit.export import _rows as shared

IGNORED = -100  # the label of a token that is not trained
DEFAULT_MAX_LENGTH = 1024  # SFTConfig.max_length of TRL where it is not set
_TARGET = shared.Target("the supervised trainer", cut="max_length", logprobs=False)


def labels_table(rows: shared.TableLike, *, max_length: int | None = None) -> pa.Table:
    """Rows with ``input_ids``, ``attention_mask`` and ``labels``, all ``list<int32>``.

    ``labels`` is -100 where ``loss_mask`` is false. ``max_length`` is the length at which
    the trainer cuts rows, and drops those that train nothing then: in TRL that of
    ``SFTConfig``, in Axolotl ``sequence_len``. Longer rows are refused. None: rows beyond
    TRL's default give a `trajkit.errors.LongRowsWarning`.
    """
    checked = shared.checked_rows(rows, _TARGET, cut=max_length)
    longest = max((len(row.input_ids) for row in checked), default=0)
    if max_length is None and longest > DEFAULT_MAX_LENGTH:
        warnings.warn(
            f"the longest row has {longest} tokens, but SFTTrainer cuts rows at "
            f"SFTConfig.max_length, which is {DEFAULT_MAX_LENGTH} unless it is set, and "
            f"drops those that train nothing then. Set it to {longest} or None",
            LongRowsWarning,
            stacklevel=2,
        )
    return _table(
        input_ids=[row.input_ids for row in checked],
        attention_mask=[np.ones_like(row.input_ids) for row in checked],
        labels=[np.where(row.loss_mask, row.input_ids, IGNORED) for row in checked],
    )


def _table(**columns: list[Any]) -> pa.Table:
    type_ = pa.list_(pa.int32())
    return pa.table({name: pa.array(each, type_) for name, each in columns.items()})


def dataset(rows: shared.TableLike, *, max_length: int | None = None) -> Any:
    """`labels_table` as a ``datasets.Dataset``, without a copy.

    Saved with ``save_to_disk`` it is a ``tokenized_path`` of LLaMA-Factory.
    """
    import datasets

    return datasets.Dataset(labels_table(rows, max_length=max_length))


def mask_table(rows: shared.TableLike) -> pa.Table:
    """Rows with ``input_ids`` and ``loss_mask``, for SkyRL's ``load_from_pretokenized``.

    The loader also takes trajkit's own Parquet files; this table has no other columns.
    """
    checked = shared.checked_rows(rows, _TARGET)
    return _table(
        input_ids=[row.input_ids for row in checked],
        loss_mask=[row.loss_mask.astype(np.int32) for row in checked],
    )

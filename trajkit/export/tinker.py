"""Rows as Tinker's ``Datum``.

Source: tinker 0.38.0 (``tinker/types/datum.py``), tinker-cookbook 0.6.1
(``rl/data_processing.py``); spec, training formats 8.
"""

from typing import Any

import numpy as np

from trajkit._arrow.canonical import TableLike
from trajkit.export._rows import (
    Reduce,
    advantages_of,
    checked_rows,
    on_mask,
    weighted_advantages,
)


def datum_fields(
    rows: TableLike, *, weighted: bool = True, reduce: Reduce = "mean"
) -> list[dict[str, Any]]:
    """Rows as the fields of a ``Datum``, shifted by one.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS` or ``ROWS_SUFFIX`` with a column ``advantage``.
    weighted : bool
        Fold row weights into the advantages. Tinker sums the losses of tokens, so its loss
        is then `trajkit.training.reference_loss` of the same rows. False: every token has
        the plain advantage, as in the cookbook.
    reduce : {"mean", "sum"}
        How the row weights are meant; see `trajkit.training.reference_loss`.

    Returns
    -------
    list of dict
        ``model_input`` (ids without the last), ``target_tokens`` (int64), ``logprobs``,
        ``advantages`` and ``mask`` (float32), all of length n - 1. A token with advantage 0
        does not train; the cookbook removes ``mask`` before it sends a datum.

    Raises
    ------
    ExportError
        See `trajkit.export`; or an advantage is null or absent.
    """
    checked = checked_rows(rows)
    if weighted:
        gains = weighted_advantages(checked, "token_sum", reduce)
    else:
        gains = advantages_of(checked)
    return [
        {
            "model_input": row.input_ids[:-1].tolist(),
            "target_tokens": row.input_ids[1:].astype(np.int64),
            "logprobs": row.logprobs[1:],
            "advantages": np.array(on_mask(row, gain)[1:], np.float32),
            "mask": row.loss_mask[1:].astype(np.float32),
        }
        for row, gain in zip(checked, gains, strict=True)
    ]


def datums(
    rows: TableLike, *, weighted: bool = True, reduce: Reduce = "mean"
) -> list[Any]:
    """Rows as ``tinker.Datum`` objects for the RL losses; see `datum_fields`."""
    import tinker

    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(each["model_input"]),
            loss_fn_inputs={
                name: tinker.TensorData.from_numpy(each[name])
                for name in ("target_tokens", "logprobs", "advantages", "mask")
            },
        )
        for each in datum_fields(rows, weighted=weighted, reduce=reduce)
    ]

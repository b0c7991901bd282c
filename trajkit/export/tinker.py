"""Rows as Tinker's ``Datum``.

Source: tinker 0.38.0 (``tinker/types/datum.py``), tinker-cookbook 0.6.1
(``rl/data_processing.py``).
"""

from typing import Any

import numpy as np

from trajkit.export._rows import (
    ExportRow,
    Reduce,
    checked_rows,
    objects_of,
    token_advantages,
    token_scales,
)
from trajkit.tables.canonical import TableLike


def datum_fields(
    rows: TableLike,
    *,
    weighted: bool = True,
    reduce: Reduce = "mean",
) -> list[dict[str, Any]]:
    """Rows as the fields of a ``Datum``, shifted by one.

    Parameters
    ----------
    rows : table
        With a column ``advantage``, per row or per token.
    weighted : bool
        Fold row weights into the advantages. Tinker sums the losses of tokens, so its loss
        is then the ``rl_sum`` of `trajkit.learn.reference_loss`: a sum over rollouts,
        whether they are exported together or one by one. False: every token has the plain
        advantage, as in the cookbook.
    reduce : {"mean", "sum"}
        How the row weights are meant; see `trajkit.learn.reference_loss`.

    Returns
    -------
    list of dict
        ``model_input`` (ids without the last), ``target_tokens`` (int64), ``logprobs``,
        ``advantages`` and ``mask`` (float32), all of length n - 1. A token with advantage 0
        does not train; the cookbook removes ``mask`` before it sends a datum.

        ``session_id`` and ``row_index`` name the row. ``model_input_spans`` and
        ``loss_fn_input_spans`` say where each token of ``model_input`` and
        ``target_tokens`` comes from, as lists of dicts with ``kind`` ("sampled" or
        "prompt"), ``sequence_id`` (``{session_id}/{turn_index}``), ``offset`` and
        ``length``. Sampled tokens are those of trained spans and of the row's last turn.
        All others are of the prompt of the last turn, with which the row begins under
        every policy but ``polar``.

    Raises
    ------
    ExportError
        An advantage is null or absent; or with ``weighted``, a row weight is null.
    """
    checked = checked_rows(rows, "Tinker")
    gains = token_advantages(checked)
    scales = [1.0] * len(checked)
    if weighted:
        scales = token_scales(checked, reduce)
    found = []
    for row, gain, scale in zip(checked, gains, scales, strict=True):
        spans = _provenance(row)
        found.append(
            {
                "session_id": row.session_id,
                "row_index": row.row_index,
                "model_input": row.input_ids[:-1].tolist(),
                "target_tokens": row.input_ids[1:].astype(np.int64),
                "logprobs": row.logprobs[1:],
                "advantages": (gain * scale)[1:].astype(np.float32),
                "mask": row.loss_mask[1:].astype(np.float32),
                "model_input_spans": _cut(spans, 0, len(row.input_ids) - 1),
                "loss_fn_input_spans": _cut(spans, 1, len(row.input_ids)),
            }
        )
    return found


def _provenance(row: ExportRow) -> list[dict[str, Any]]:
    """Where each token of a row comes from, as runs from the first to the last."""
    held = [span for span in row.spans if span["stop"] > span["start"]]
    last = row.last_turn
    if last is None:
        last = max(held, key=lambda span: int(span["stop"]))["turn_index"]
    runs: list[dict[str, Any]] = []

    def add(kind: str, turn: int, offset: int, length: int) -> None:
        if length:
            name = f"{row.session_id}/{turn}"
            place = {"offset": offset, "length": length}
            runs.append({"kind": kind, "sequence_id": name, **place})

    at = 0
    for span in sorted(held, key=lambda span: int(span["start"])):
        if span["kind"] != "trained" and span["turn_index"] != last:
            continue
        start, stop = span["start"], span["stop"]
        add("prompt", last, at, start - at)
        add("sampled", span["turn_index"], span["output_start"], stop - start)
        at = stop
    add("prompt", last, at, len(row.input_ids) - at)
    return runs


def _cut(runs: list[dict[str, Any]], start: int, stop: int) -> list[dict[str, Any]]:
    found, at = [], 0
    for run in runs:
        first, end = max(at, start), min(at + run["length"], stop)
        if first < end:
            offset = run["offset"] + first - at
            found.append(run | {"offset": offset, "length": end - first})
        at += run["length"]
    return found


@objects_of(datum_fields)
def datums(fields: list[dict[str, Any]]) -> list[Any]:
    """Rows as ``tinker.Datum`` objects for the RL losses, with their provenance.

    See `datum_fields` for the parameters.
    """
    import tinker

    kinds = {
        "prompt": tinker.PromptProvenanceSpan,
        "sampled": tinker.SampledProvenanceSpan,
    }

    def spans(runs: list[dict[str, Any]]) -> list[Any]:
        names = ("sequence_id", "offset", "length")
        return [
            kinds[run["kind"]](**{name: run[name] for name in names}) for run in runs
        ]

    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(each["model_input"]),
            loss_fn_inputs={
                name: tinker.TensorData.from_numpy(each[name])
                for name in ("target_tokens", "logprobs", "advantages", "mask")
            },
        ).with_provenance(
            model_input=spans(each["model_input_spans"]),
            loss_fn_inputs=spans(each["loss_fn_input_spans"]),
        )
        for each in fields
    ]

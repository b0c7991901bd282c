"""Rows as Tinker's ``Datum``.

Source: tinker 0.38.0 (``tinker/types/datum.py``), tinker-cookbook 0.6.1
(``rl/data_processing.py``).
"""

from typing import Any

import numpy as np

from trajkit.export import _rows as shared

_TARGET = shared.Target("Tinker", "advantages")
_KINDS = ("prompt", "sampled")
INPUTS = ("target_tokens", "logprobs", "advantages", "mask")


def datum_fields(
    rows: shared.TableLike, *, weighted: bool = True, reduce: shared.Reduce = "mean"
) -> list[dict[str, Any]]:
    """Rows as the fields of a ``Datum``, shifted by one.

    Parameters
    ----------
    rows : table
        With advantages, per row or per token.
    weighted : bool
        Fold row weights into the advantages: Tinker's loss, a sum over tokens, is then the
        ``rl_sum`` of `trajkit.learn.reference_loss`, whether rollouts are exported together
        or one by one. False: the plain advantages, as in the cookbook.
    reduce : {"mean", "sum"}
        How the row weights are meant; see `trajkit.learn.reference_loss`.

    Returns
    -------
    list of dict
        ``model_input`` (ids without the last), ``target_tokens`` (int64), ``logprobs``,
        ``advantages`` and ``mask`` (float32), all of length n - 1, and the names of the
        row. ``model_input_spans`` and ``loss_fn_input_spans`` say where each token of
        ``model_input`` and ``target_tokens`` comes from, as dicts with ``kind``,
        ``sequence_id`` (``{session_id}/{turn_index}``), ``offset`` and ``length``. Tokens
        of trained spans and of the row's last turn are "sampled", others are of the
        "prompt" of the last turn, with which rows begin under every policy but ``polar``.
    """
    found = []
    for row in shared.checked_rows(rows, _TARGET, weighted=weighted, reduce=reduce):
        gains, sources = row.advantages * row.scale, _sources(row)
        found.append(
            {
                "session_id": row.session_id,
                "row_index": row.row_index,
                "model_input": row.input_ids[:-1].tolist(),
                "target_tokens": row.input_ids[1:].astype(np.int64),
                "logprobs": row.logprobs[1:],
                "advantages": gains[1:].astype(np.float32),
                "mask": row.loss_mask[1:].astype(np.float32),
                "model_input_spans": _runs(row, sources[:-1]),
                "loss_fn_input_spans": _runs(row, sources[1:]),
            }
        )
    return found


def _sources(row: shared.ExportRow) -> shared.Array:
    """The kind, turn and offset of each token, shape (n_tokens, 3)."""
    held = [span for span in row.spans if span["stop"] > span["start"]]
    last = row.last_turn
    if last is None:
        last = max(held, key=lambda span: int(span["stop"]))["turn_index"]
    n = len(row.input_ids)
    found = np.stack([np.zeros(n, int), np.full(n, last), np.arange(n)], axis=1)
    for span in held:
        start, stop, turn = span["start"], span["stop"], span["turn_index"]
        if span["kind"] == "trained" or turn == last:
            found[start:stop, :2] = 1, turn
            found[start:stop, 2] = span["output_start"] + np.arange(stop - start)
    return found


def _runs(row: shared.ExportRow, sources: shared.Array) -> list[dict[str, Any]]:
    breaks = 1 + np.flatnonzero((np.diff(sources, axis=0) != (0, 0, 1)).any(1))
    return [
        {
            "kind": _KINDS[kind],
            "sequence_id": f"{row.session_id}/{turn}",
            "offset": offset,
            "length": len(run),
        }
        for run in np.split(sources, breaks)
        for kind, turn, offset in [run[0].tolist()]
    ]


def _datum(fields: dict[str, Any]) -> Any:
    """``tinker.Datum`` objects with their provenance."""
    import tinker

    kinds = (tinker.PromptProvenanceSpan, tinker.SampledProvenanceSpan)
    given, targets = (
        [kinds[_KINDS.index(run.pop("kind"))](**run) for run in fields[name]]
        for name in ("model_input_spans", "loss_fn_input_spans")
    )
    inputs = {name: tinker.TensorData.from_numpy(fields[name]) for name in INPUTS}
    ids = tinker.ModelInput.from_ints(fields["model_input"])
    datum = tinker.Datum(model_input=ids, loss_fn_inputs=inputs)
    return datum.with_provenance(model_input=given, loss_fn_inputs=targets)


datums = shared.objects_of(datum_fields, _datum)

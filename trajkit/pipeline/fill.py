"""The per-token columns of planned rows, and with them the ``rows`` table."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow.buffers import pooled
from trajkit._arrow.categories import dictionary_for
from trajkit._arrow.export import Array, Column, record_batch
from trajkit._kernel_names import numbers
from trajkit._streams import limits
from trajkit.pipeline.payloads import PathRanges
from trajkit.pipeline.plan import Plan, choices_of, row_offsets
from trajkit.pipeline.row_items import row_items
from trajkit.pipeline.row_scalars import row_scalars
from trajkit.pipeline.weight_versions import row_versions
from trajkit.policies import Policy
from trajkit.schema import ROWS, ROWS_SUFFIX, SPAN, SPAN_KINDS
from trajkit.turns.calls import Calls, Longs, Records
from trajkit.turns.prefix_forest import Forest
from trajkit.turns.table import runs_of

numbers("SpanKind", SPAN_KINDS)
numbers("SpanLine", [field.name for field in SPAN][:-1])


def row_batches(
    calls: Calls,
    forest: Forest,
    links: Records,
    policy: Policy,
    max_tokens: int,
    plan: Plan,
    facts: pa.RecordBatch,
    ranges: Callable[[Records], PathRanges],
    *,
    suffix: bool = False,
) -> Iterator[tuple[Records, pa.RecordBatch]]:
    """`trajkit.schema.ROWS` of a plan, or ``ROWS_SUFFIX``, each batch when it is asked for.

    Yields (rows of the plan, batch). ``facts`` are of the same
    sessions; ``ranges`` gives the parts of rows that are parts of recorded paths.
    ``stored`` of the rows is set at once: where what is written of each starts.
    """
    rows = plan.rows
    rows["stored"] = np.minimum(rows["shared"], rows["stored"]) if suffix else 0
    offsets = row_offsets(rows)
    known = row_scalars(calls, links, policy, rows, facts)
    fill = partial(
        _core.fill_rows,
        forest.paths,
        links,
        choices_of(policy, max_tokens),
        plan.owners,
        calls.turn_index,
    )

    def batch(lo: int, hi: int) -> pa.RecordBatch:
        here = offsets[:, lo : hi + 1]
        if lo:
            here = here - here[:, :1]
        part, past_caches = rows[lo:hi], here[0, -1] >= limits.STREAMING_STORE_TOKENS
        columns = dict(known)
        if len(part) < len(rows):
            columns = {name: each.slice(lo, hi - lo) for name, each in known.items()}
        columns["mm_items"] = row_items(calls, hi - lo, partial(ranges, part))
        write = partial(fill, uncached=bool(past_caches))
        schema = ROWS_SUFFIX if suffix else ROWS
        return _row_batch(calls, links, policy, part, here, write, columns, schema)

    runs = [(0, len(rows))]
    if offsets[0, -1] > limits.BATCH_TOKENS:
        runs = list(runs_of(np.diff(offsets[0]), limits.BATCH_TOKENS))
    return ((rows[lo:hi], batch(lo, hi)) for lo, hi in runs)


def _row_batch(
    calls: Calls,
    links: Records,
    policy: Policy,
    rows: Records,
    offsets: Longs,
    fill: Callable[..., int],
    columns: dict[str, Column | pa.Array],
    schema: pa.Schema,
) -> pa.RecordBatch:
    """Fill the lists of some rows; ``columns`` are those that have no lists.

    ``fill`` takes ``rows`` and ``columns`` as `_core.fill_rows` does; ``offsets`` are those
    of `row_offsets`.
    """
    starts, span_starts, turn_starts = offsets
    n_rows, n_tokens, n_spans = len(rows), int(starts[-1]), int(span_starts[-1])
    n_bytes = (n_tokens + 7) // 8
    input_ids, logprobs = pooled(n_tokens, np.int32), pooled(n_tokens, np.float32)
    loss_mask, valid = pooled(n_bytes, np.uint8), pooled(n_bytes, np.uint8)
    spans = np.empty((len(SPAN) - 1, n_spans), np.int32)
    kinds = np.empty(n_spans, np.int8)
    target = _core.RowColumns(
        starts, span_starts, input_ids, loss_mask, logprobs, valid, spans, kinds
    )
    missing = fill(rows=rows, columns=target)
    if missing and policy.missing_logprobs == "null_row":
        _drop_partial(starts, loss_mask, logprobs, valid)

    def lists(offsets: Longs, *buffers: Array | None, nulls: int = 0) -> Column:
        child = Column(int(offsets[-1]), buffers, nulls)
        return Column(n_rows, (None, offsets), children=(child,))

    turns = np.empty(int(turn_starts[-1]), np.int32)
    _core.list_turns(rows, links, calls.turn_index, turn_starts, turns)
    names = Column(n_spans, (None, kinds), dictionary=dictionary_for(SPAN_KINDS))
    parts = *(Column(n_spans, (None, part)) for part in spans), names
    span = Column(n_spans, (None,), children=parts)
    # where the engine gave every logprob, what is valid is what is trained
    given = valid if missing else loss_mask
    per_token = {
        "ids": lists(starts, None, input_ids),
        "mask": lists(starts, None, loss_mask),
        "logprobs": lists(starts, given, logprobs, nulls=-1),
    }
    columns |= {
        "turns": lists(turn_starts, None, turns),
        "weight_versions": row_versions(calls, rows, span_starts, spans),
        "spans": Column(n_rows, (None, span_starts), children=(span,)),
        "input_ids": per_token["ids"],
        "loss_mask": per_token["mask"],
        "logprobs": per_token["logprobs"],
        **{f"suffix_{name}": column for name, column in per_token.items()},
    }
    return record_batch(schema, n_rows, [columns[name] for name in schema.names])


def _drop_partial(
    starts: Longs,
    loss_mask: npt.NDArray[np.uint8],
    logprobs: npt.NDArray[np.float32],
    valid: npt.NDArray[np.uint8],
) -> None:
    """Leave a row no logprob if ``valid`` lacks one that ``loss_mask`` trains."""
    lacking, given = (
        np.unpackbits(bits, count=len(logprobs), bitorder="little")
        for bits in (loss_mask & ~valid, valid)
    )
    n_lacking = np.append(0, np.cumsum(lacking))[starts]
    drops = np.repeat(np.diff(n_lacking) > 0, np.diff(starts))
    logprobs[drops] = 0.0
    given[drops] = 0
    valid[:] = np.packbits(given, bitorder="little")

"""The per-token columns of planned rows, and with them the ``rows`` table."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow.buffers import pooled
from trajkit._arrow.categories import dictionary_for
from trajkit._arrow.export import Array, Column, record_batch
from trajkit._streams import limits
from trajkit.pipeline.payloads import PathRanges
from trajkit.pipeline.plan import Plan, choices_of, row_offsets
from trajkit.pipeline.row_items import row_items
from trajkit.pipeline.row_scalars import row_scalars
from trajkit.pipeline.weight_versions import row_versions
from trajkit.policies import Policy
from trajkit.schema import ROWS, ROWS_SUFFIX, SPAN, SPAN_KINDS
from trajkit.turns.calls import Calls, Ints, Longs, Records
from trajkit.turns.prefix_forest import Forest
from trajkit.turns.table import runs_of


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

    With each batch come the rows of the plan that it has. ``facts`` are of the same
    sessions; ``ranges`` gives the parts of rows that are parts of recorded paths.
    ``stored`` of the rows is set at once: where what is written of each starts.
    """
    rows = plan.rows
    rows["stored"] = np.minimum(rows["shared"], rows["stored"]) if suffix else 0
    offsets = row_offsets(rows)
    known = row_scalars(calls, links, policy, rows, facts)
    trees, choices = forest.paths, choices_of(policy, max_tokens)

    def batch(lo: int, hi: int) -> pa.RecordBatch:
        here = offsets[:, lo : hi + 1]
        if lo:
            here = here - here[:, :1]
        past_caches = int(here[0, -1]) >= limits.STREAMING_STORE_TOKENS
        write = partial(
            _core.fill_rows,
            trees,
            links,
            choices,
            plan.owners,
            calls.turn_index,
            uncached=past_caches,
        )
        lists = RowLists.written(rows[lo:hi], here, write, policy)
        columns = {name: array.slice(lo, hi - lo) for name, array in known.items()}
        columns["mm_items"] = row_items(calls, hi - lo, partial(ranges, rows[lo:hi]))
        schema = ROWS_SUFFIX if suffix else ROWS
        return lists.batch(calls, links, rows[lo:hi], columns, schema)

    runs = [(0, len(rows))]
    if offsets[0, -1] > limits.BATCH_TOKENS:
        runs = list(runs_of(np.diff(offsets[0]), limits.BATCH_TOKENS))
    return ((rows[lo:hi], batch(lo, hi)) for lo, hi in runs)


@dataclass(frozen=True, slots=True)
class RowLists:
    """The columns of some rows that hold lists."""

    # shape (3, n_rows + 1): of tokens, spans and turns
    offsets: Longs
    # shape (n_tokens,)
    input_ids: Ints
    logprobs: npt.NDArray[np.float32]
    # bitmaps
    loss_mask: npt.NDArray[np.uint8]
    given: npt.NDArray[np.uint8]
    # shape (5, n_spans)
    spans: Ints
    # shape (n_spans,)
    kinds: npt.NDArray[np.int8]

    @classmethod
    def written(
        cls, rows: Records, offsets: Longs, write: Callable[..., int], policy: Policy
    ) -> Self:
        """What ``write`` makes of the rows.

        It takes ``rows`` and ``columns`` as `_core.fill_rows` does, and returns how
        many logprobs the engine did not give.
        """
        starts, span_starts, _ = offsets
        n_tokens, n_spans = int(starts[-1]), int(span_starts[-1])
        n_bytes = (n_tokens + 7) // 8
        input_ids, logprobs = pooled(n_tokens, np.int32), pooled(n_tokens, np.float32)
        loss_mask, valid = pooled(n_bytes, np.uint8), pooled(n_bytes, np.uint8)
        spans = np.empty((len(SPAN) - 1, n_spans), np.int32)
        kinds = np.empty(n_spans, np.int8)
        columns = _core.RowColumns(
            starts, span_starts, input_ids, loss_mask, logprobs, valid, spans, kinds
        )
        missing = write(rows=rows, columns=columns)
        if missing and policy.missing_logprobs == "null_row":
            _drop_partial(starts, loss_mask, logprobs, valid)
        # where the engine gave every logprob, what is valid is what is trained
        given = valid if missing else loss_mask
        return cls(offsets, input_ids, logprobs, loss_mask, given, spans, kinds)

    def batch(
        self,
        calls: Calls,
        links: Records,
        rows: Records,
        columns: Mapping[str, pa.Array],
        schema: pa.Schema,
    ) -> pa.RecordBatch:
        """The rows as one batch; ``columns`` are those that have no lists."""
        starts, span_starts, _ = self.offsets
        n_rows, n_spans = len(starts) - 1, len(self.kinds)

        def per_token(valid: Array | None, values: Array) -> Column:
            nulls = 0 if valid is None else -1
            child = Column(len(self.input_ids), (valid, values), nulls)
            return Column(n_rows, (None, starts), children=(child,))

        kinds = Column(
            n_spans, (None, self.kinds), dictionary=dictionary_for(SPAN_KINDS)
        )
        parts = *(Column(n_spans, (None, part)) for part in self.spans), kinds
        span = Column(n_spans, (None,), children=parts)
        ids = per_token(None, self.input_ids)
        masks = per_token(None, self.loss_mask)
        logprobs = per_token(self.given, self.logprobs)
        every = {
            **columns,
            "turns": _turn_lists(calls, links, rows, self.offsets[2]),
            "weight_versions": row_versions(calls, rows, span_starts, self.spans),
            **dict.fromkeys(("input_ids", "suffix_ids"), ids),
            **dict.fromkeys(("loss_mask", "suffix_mask"), masks),
            **dict.fromkeys(("logprobs", "suffix_logprobs"), logprobs),
            "spans": Column(n_rows, (None, span_starts), children=(span,)),
        }
        return record_batch(schema, n_rows, [every[name] for name in schema.names])


def _turn_lists(calls: Calls, links: Records, rows: Records, offsets: Longs) -> Column:
    """The column ``turns`` of rows; ``offsets`` is of `row_offsets`."""
    turns = np.empty(int(offsets[-1]), np.int32)
    _core.list_turns(rows, links, calls.turn_index, offsets, turns)
    child = Column(len(turns), (None, turns))
    return Column(len(rows), (None, offsets), children=(child,))


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

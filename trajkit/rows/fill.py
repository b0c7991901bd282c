"""The columns of planned rows, and with them the ``rows`` table."""

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import numbers
from trajkit.errors import SchemaError
from trajkit.learn.rewards import spread
from trajkit.policies import Policy
from trajkit.rows.payloads import PathRanges, row_items, row_versions
from trajkit.rows.plan import Plan, choices_of
from trajkit.schema import (
    ROW_VERSIONS,
    ROWS,
    SEGMENT_KINDS,
    SPAN,
    SPAN_KINDS,
)
from trajkit.tables import limits
from trajkit.tables.columns import dictionary_for
from trajkit.tables.export import Array, Column, pooled, record_batch
from trajkit.tables.ragged import Longs, Records, runs_of
from trajkit.turns.sessions import Sessions

numbers("SpanKind", SPAN_KINDS[:-1])  # the last is of trajkit.rows.splice
numbers("SpanLine", [field.name for field in SPAN][:-1])
# columns in the order in which the kernel fills them (_native/rows.pxi)
_INTS = tuple(_core.ENUMS["RowInt"])
_NULLABLE = ("parent_row", "row_weight", "segment_kind")
_FLAGS = ("truncated", "use_tool", "ill_formed")
numbers("RowBit", _NULLABLE + _FLAGS)


def row_batches(
    sessions: Sessions,
    links: Records,
    policy: Policy,
    max_tokens: int,
    plan: Plan,
    facts: pa.RecordBatch,
    ranges: Callable[[Records], PathRanges],
) -> Iterator[tuple[Records, pa.RecordBatch]]:
    """`trajkit.schema.ROWS` of a plan, each batch when it is asked for.

    Yields (rows of the plan, batch). ``facts`` are of the same sessions; ``ranges`` gives
    the parts of rows that are parts of recorded paths.
    """
    rows = plan.rows
    offsets = np.zeros((3, len(rows) + 1), np.int64)
    for line, name in zip(offsets, ("n_tokens", "n_spans", "n_calls"), strict=True):
        line[1:] = rows[name]
    offsets = offsets.cumsum(axis=1)
    scalars = _scalars(sessions, links, policy, rows, facts)
    fill = partial(
        _core.fill_rows,
        sessions.forest.paths,
        links,
        choices_of(policy, max_tokens),
        plan.owners,
        sessions.turn_index,
    )

    images = sessions.table.column("mm_items")
    has_images = images.null_count < len(images)

    def batch(lo: int, hi: int) -> pa.RecordBatch:
        here = offsets[:, lo : hi + 1]
        if lo:
            here = here - here[:, :1]
        part, past_caches = rows[lo:hi], here[0, -1] >= limits.STREAMING_STORE_TOKENS
        columns = dict(scalars)
        if len(part) < len(rows):
            columns = {name: each.slice(lo, hi - lo) for name, each in scalars.items()}
        columns["mm_items"] = pa.nulls(hi - lo, ROWS.field("mm_items").type)
        if has_images:
            columns["mm_items"] = row_items(sessions, hi - lo, ranges(part))
        write = partial(fill, uncached=bool(past_caches))
        return _row_batch(sessions, links, policy, part, here, write, columns)

    runs = [(0, len(rows))]
    if offsets[0, -1] > limits.BATCH_TOKENS:
        runs = list(runs_of(np.diff(offsets[0]), limits.BATCH_TOKENS))
    return ((rows[lo:hi], batch(lo, hi)) for lo, hi in runs)


def _row_batch(
    sessions: Sessions,
    links: Records,
    policy: Policy,
    rows: Records,
    offsets: Longs,
    fill: Callable[..., int],
    columns: dict[str, Column | pa.Array],
) -> pa.RecordBatch:
    """Fill the lists of some rows; ``columns`` are those that have no lists.

    ``fill`` takes ``rows`` and ``columns`` as `_core.fill_rows` does; ``offsets`` are those
    of the rows' tokens, spans and turns.
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
    _core.list_turns(rows, links, sessions.turn_index, turn_starts, turns)
    names = Column(n_spans, (None, kinds), dictionary=dictionary_for(SPAN_KINDS))
    parts = *(Column(n_spans, (None, part)) for part in spans), names
    span = Column(n_spans, (None,), children=parts)
    # where the engine gave every logprob, what is valid is what is trained
    given = valid if missing else loss_mask
    columns |= {
        "turns": lists(turn_starts, None, turns),
        "weight_versions": pa.nulls(n_rows, ROW_VERSIONS),
        "spans": Column(n_rows, (None, span_starts), children=(span,)),
        "input_ids": lists(starts, None, input_ids),
        "loss_mask": lists(starts, None, loss_mask),
        "logprobs": lists(starts, given, logprobs, nulls=-1),
    }
    named = sessions.table.column("weight_versions")
    if named.null_count < len(named):
        columns["weight_versions"] = row_versions(sessions, rows, span_starts, spans)
    return record_batch(ROWS, n_rows, [columns[name] for name in ROWS.names])


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


def _scalars(
    sessions: Sessions,
    links: Records,
    policy: Policy,
    rows: Records,
    facts: pa.RecordBatch,
) -> dict[str, Column | pa.Array]:
    """The columns with one value per row, by name, of all rows of the sessions."""
    n_rows, n_sessions = len(rows), len(sessions.ids)
    ints = np.empty((len(_INTS), n_rows), np.int32)
    mask_sums, weights = np.empty(n_rows, np.int64), np.empty(n_rows, np.float64)
    segments = np.empty(n_rows, np.int8)
    bits = np.zeros((len(_NULLABLE) + len(_FLAGS), (n_rows + 7) // 8), np.uint8)
    filled = ints, mask_sums, weights, segments, bits
    nulls = _core.fill_scalars(rows, links, sessions.turn_index, n_sessions, *filled)
    values = {
        **dict(zip(_INTS, ints, strict=True)),
        "rollout_mask_sum": mask_sums,
        "row_weight": weights,
        "segment_kind": segments,
        **dict(zip(_FLAGS, bits[len(_NULLABLE) :], strict=True)),
    }
    columns = {name: Column(n_rows, (None, column)) for name, column in values.items()}
    for name, valid, n in zip(_NULLABLE, bits, nulls, strict=False):
        if n:
            columns[name] = Column(n_rows, (valid, values[name]), n)
    kinds = dictionary_for(SEGMENT_KINDS)
    session, last = (_TakeRuns(rows[name]) for name in ("session", "last"))
    return {
        **columns,
        "segment_kind": columns["segment_kind"]._replace(dictionary=kinds),
        "session_id": session.of(facts.column("session_id")),
        "group_id": session.of(facts.column("group_id")),
        "reward": _rewards(session.of(facts.column("reward")), policy, rows, links),
        "finish_reason": last.of(_chunk(sessions, "finish_reason")),
        "step": _steps(sessions, last),
    }


class _TakeRuns:
    """Takes values at these indices: as a slice, which costs less, if they ascend by 1."""

    def __init__(self, indices: Records) -> None:
        n = len(indices)
        self._slice = None
        if n == 1 or (n and (np.diff(indices) == 1).all()):
            self._slice = int(indices[0]), n
        else:
            self._indices = pa.array(indices)

    def of(self, values: pa.Array) -> pa.Array:
        return values.slice(*self._slice) if self._slice else values.take(self._indices)


def _rewards(
    given: pa.Array, policy: Policy, rows: Records, links: Records
) -> pa.Array:
    """Each row's reward: the session's, spread by the policy's ``rewards``."""
    if policy.rewards == "copy" or not len(rows):
        return given
    whole, kinds = given.fill_null(0.0).to_numpy(), links["segment"][rows["last"]]
    shares = spread(whole, policy.rewards, rows["session"], rows["index"], kinds)
    return pa.array(shares, mask=given.is_null().to_numpy(zero_copy_only=False))


def _chunk(sessions: Sessions, name: str) -> pa.Array:
    column = sessions.table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


def _steps(sessions: Sessions, last: _TakeRuns) -> pa.Array:
    """The training step of each row's last turn."""
    type_ = ROWS.field("step").type
    if sessions.table.schema.get_field_index("step") < 0:
        return last.of(pa.nulls(len(sessions.calls), type_))
    column = _chunk(sessions, "step")
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise SchemaError(f"column 'step' of turns is {column.type}: expected integers")
    return last.of(column).cast(type_)

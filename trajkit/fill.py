"""The columns of planned rows: the ``rows`` table."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.calls import Calls, Ints, Longs, Records
from trajkit.forest import Forest
from trajkit.plan import Plan, Planned
from trajkit.policies import Policy
from trajkit.rewards import final_rows, spread
from trajkit.schema import ROWS, ROWS_SUFFIX, SEGMENT_KINDS, SPAN, SPAN_KINDS

_Item = TypeVar("_Item", bound=np.generic)

# Tokens of a batch of several rows. Arrow's pool keeps buffers of up to 16 MB when they are
# freed, so that the next batch goes to pages that are there; and memory is bounded by this
# where rows repeat their whole context.
BATCH_TOKENS = 1 << 22

# A batch of so many tokens is larger than the caches of a core: it is written past them.
UNCACHED_TOKENS = 1 << 20


@cache
def _span_kinds() -> pa.Array:
    # not at import: pyarrow would load pandas for it where that is installed
    return pa.array(SPAN_KINDS)


@cache
def _segment_kinds() -> pa.Array:
    return pa.array(SEGMENT_KINDS)


def row_batches(
    calls: Calls,
    forest: Forest,
    links: Records,
    policy: Policy,
    max_tokens: int,
    plan: Plan,
    facts: pa.RecordBatch,
    *,
    suffix: bool = False,
) -> Iterator[tuple[Records, pa.RecordBatch]]:
    """`trajkit.schema.ROWS` of a plan, or ``ROWS_SUFFIX``, each batch when it is asked for.

    With each batch come the rows of the plan that it has. ``facts`` are of the same
    sessions. ``stored`` of the rows is set at once: where what is written of each starts.
    """
    write = partial(
        _core.fill_rows,
        calls.calls,
        forest.nodes,
        forest.ends,
        links,
        plan.owners,
        calls.turn_index,
        np.empty(len(forest.nodes), np.int32),
        policy.keep_head,
        policy.own == "every",
        policy.missing_logprobs == "untrain",
        max_tokens,
    )
    rows = plan.rows
    rows["stored"] = np.minimum(rows["shared"], rows["stored"]) if suffix else 0
    sizes = rows["n_tokens"] - rows["stored"]
    mask_sums, rewards = _mask_sums(rows), _rewards(facts, policy, links, rows)

    def batch(lo: int, hi: int) -> pa.RecordBatch:
        sums, given = mask_sums[lo:hi], rewards[lo:hi]
        past_caches = partial(write, int(sizes[lo:hi].sum()) >= UNCACHED_TOKENS)
        return _batch_of(
            calls,
            links,
            policy,
            rows[lo:hi],
            facts,
            sums,
            given,
            past_caches,
            suffix=suffix,
        )

    return ((rows[lo:hi], batch(lo, hi)) for lo, hi in _cuts(sizes))


def _cuts(sizes: Longs) -> Iterator[tuple[int, int]]:
    """Runs of rows that hold `BATCH_TOKENS` tokens, or one row; one run at least."""
    ends, lo = np.append(0, np.cumsum(sizes)), 0
    while True:
        hi = int(np.searchsorted(ends, ends[lo] + BATCH_TOKENS, side="right")) - 1
        hi = min(max(hi, lo + 1), len(sizes))
        yield lo, hi
        if hi == len(sizes):
            return
        lo = hi


def batch_of(
    calls: Calls,
    links: Records,
    policy: Policy,
    plan: Planned,
    facts: pa.RecordBatch,
    write: Callable[..., int],
    written: Callable[[Longs, Ints], None],
) -> pa.RecordBatch:
    """`trajkit.schema.ROWS` of a plan whose rows share what is known once they are written.

    ``write`` takes the rows and their columns as the last nine arguments of
    ``_core.fill_rows``, fills them, and returns how many logprobs the engine did not
    give. ``written`` then gets the offsets of the rows and their tokens, and completes
    ``parent_row`` and ``shared`` of the rows.
    """
    rows = plan.rows
    rows["stored"] = 0
    mask_sums, rewards = _mask_sums(rows), _rewards(facts, policy, links, rows)
    return _batch_of(
        calls, links, policy, rows, facts, mask_sums, rewards, write, written
    )


def _batch_of(
    calls: Calls,
    links: Records,
    policy: Policy,
    rows: Records,
    facts: pa.RecordBatch,
    mask_sums: Longs,
    rewards: pa.Array,
    write: Callable[..., int],
    written: Callable[[Longs, Ints], None] | None = None,
    *,
    suffix: bool = False,
) -> pa.RecordBatch:
    """One batch of rows; ``mask_sums`` and ``rewards`` have an entry a row."""
    offsets = _offsets(rows["n_tokens"] - rows["stored"])
    span_offsets = _offsets(rows["n_spans"])
    n_tokens, n_spans = int(offsets[-1]), int(span_offsets[-1])
    n_bytes = (n_tokens + 7) // 8
    input_ids = _pooled(n_tokens, np.int32)
    logprobs = _pooled(n_tokens, np.float32)
    loss_mask, valid = _pooled(n_bytes, np.uint8), _pooled(n_bytes, np.uint8)
    for bits in (loss_mask, valid):
        bits.fill(0)
    spans = np.empty((len(SPAN) - 1, n_spans), np.int32)
    kinds = np.empty(n_spans, np.int8)
    missing = write(
        rows,
        offsets,
        span_offsets,
        input_ids,
        loss_mask,
        logprobs,
        valid,
        spans,
        kinds,
    )
    if written is not None:
        written(offsets, input_ids)
    if missing and policy.missing_logprobs == "null_row":
        _core.drop_partial_logprobs(offsets, loss_mask, logprobs, valid)
    mask = pa.py_buffer(loss_mask)
    # Where the engine gave every logprob, what is valid is what is trained.
    given = pa.py_buffer(valid) if missing else mask
    list_offsets = pa.array(offsets)

    def per_token(type_: pa.DataType, *buffers: pa.Buffer | None) -> pa.Array:
        values = pa.Array.from_buffers(type_, n_tokens, list(buffers))
        return pa.LargeListArray.from_arrays(list_offsets, values)

    span = pa.StructArray.from_arrays(
        [
            *(pa.array(column) for column in spans),
            pa.DictionaryArray.from_arrays(pa.array(kinds), _span_kinds(), safe=False),
        ],
        fields=list(SPAN),
    )
    of_session = _of_rows(facts, rows)
    parent_row = rows["parent_row"]
    segments = links["segment"][rows["last"]]
    return pa.RecordBatch.from_arrays(
        [
            of_session.column("session_id"),
            pa.array(rows["index"]),
            of_session.column("group_id"),
            *([pa.array(rows["stored"].astype(np.int32))] if suffix else []),
            per_token(pa.int32(), None, pa.py_buffer(input_ids)),
            pa.array(rows["prompt_len"].astype(np.int32)),
            per_token(pa.bool_(), None, mask),
            per_token(pa.float32(), given, pa.py_buffer(logprobs)),
            pa.LargeListArray.from_arrays(pa.array(span_offsets), span),
            pa.array(parent_row, mask=parent_row < 0),
            pa.array(rows["shared"].astype(np.int32)),
            rewards,
            pa.array(rows["n_trained"] / np.maximum(mask_sums, 1), mask=mask_sums == 0),
            pa.array(mask_sums),
            _finish_reasons(calls, rows["last"]),
            *(
                pa.array(rows[name].astype(np.bool_))
                for name in ("truncated", "use_tool", "ill_formed")
            ),
            pa.DictionaryArray.from_arrays(
                pa.array(segments.astype(np.int8) - 1, mask=segments == 0),
                _segment_kinds(),
            ),
            pa.array(calls.turn_index[rows["last"]]),
        ],
        schema=ROWS_SUFFIX if suffix else ROWS,
    )


def _of_rows(facts: pa.RecordBatch, rows: Records) -> pa.RecordBatch:
    """What is known of each row's session."""
    sessions = rows["session"]
    if len(sessions) and (np.diff(sessions) == 1).all():  # a row each
        return facts.slice(int(sessions[0]), len(sessions))
    return facts.take(pa.array(sessions))


def _mask_sums(rows: Records) -> Longs:
    """Trained tokens of all rows of each row's session, shape (n_rows,)."""
    sums = np.zeros(int(rows["session"].max(initial=-1)) + 1, np.int64)
    np.add.at(sums, rows["session"], rows["n_trained"])
    of_row: Longs = sums[rows["session"]]
    return of_row


def _rewards(
    facts: pa.RecordBatch, policy: Policy, links: Records, rows: Records
) -> pa.Array:
    """The rollout's reward in each row, spread as the policy says."""
    given = _of_rows(facts, rows).column("reward")
    if policy.rewards == "copy" or not len(rows):
        return given
    segments = links["segment"][rows["last"]]
    final = final_rows(
        rows["session"],
        rows["index"],
        segments > 0,
        segments == SEGMENT_KINDS.index("final") + 1,
    )
    whole = given.fill_null(0.0).to_numpy()
    shares = spread(whole, policy.rewards, rows["session"], final)
    return pa.array(shares, mask=given.is_null().to_numpy(zero_copy_only=False))


def _finish_reasons(calls: Calls, last: Records) -> pa.Array:
    column = calls.table.column("finish_reason")
    chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return chunk.take(pa.array(last))


def _pooled(size: int, dtype: type[_Item]) -> npt.NDArray[_Item]:
    """An array in Arrow's memory pool, undefined.

    The pool keeps what is freed, so the rows of the next part or batch go to pages that
    are there; pages from the system would be cleared and mapped one by one.
    """
    n_bytes = size * np.dtype(dtype).itemsize
    return np.frombuffer(pa.allocate_buffer(n_bytes), dtype)


def _offsets(sizes: Records) -> Longs:
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets

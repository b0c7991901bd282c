"""Calls to training rows, under a policy."""

import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.calls import Calls, Ints, Longs, Records, read_calls
from trajkit.drift import read_lcp
from trajkit.errors import PolicyError
from trajkit.forest import Forest, grow
from trajkit.layout import ROW
from trajkit.link import measure, policy_links, read_links
from trajkit.policies import ABSORBS, Policy
from trajkit.policies import policy as named_policy
from trajkit.schema import REPORT, ROWS, SESSIONS, SPAN, SPAN_KINDS
from trajkit.sessions import Reward, SessionFacts, errored, session_facts
from trajkit.stream import whole_sessions
from trajkit.tables import TableLike

REPORT_COUNTS = tuple(REPORT.names[REPORT.names.index("turns") :])
"""The columns of the report that the kernel counts, in its order."""

# Tokens that one part of a table may hold. Parts are small enough to share out evenly over
# the threads and to keep a part's rows far below 2^31 list elements, and large enough that
# the fixed cost of a part (about 0.3 ms) does not show.
_LEAST_PART, _LARGEST_PART = 1 << 22, 1 << 25
_PARTS_PER_THREAD = 4
_NO_CAP = np.iinfo(np.int64).max

_Item = TypeVar("_Item", bound=np.generic)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Rows of one part before their columns are written."""

    rows: Records
    kinds: npt.NDArray[np.uint8]
    owners: Ints
    report: Longs


@overload
def linearize(
    turns: Iterator[pa.RecordBatch] | pa.RecordBatchReader,
    policy: str | Policy = ...,
    *,
    reward: Reward = ...,
    sessions: TableLike | None = ...,
    max_row_tokens: int | None = ...,
    links: None = ...,
    drift: None = ...,
    report: Literal[False] = ...,
    threads: int | None = ...,
) -> Iterator[pa.RecordBatch]: ...
@overload
def linearize(
    turns: Iterator[pa.RecordBatch] | pa.RecordBatchReader,
    policy: str | Policy = ...,
    *,
    reward: Reward = ...,
    sessions: TableLike | None = ...,
    max_row_tokens: int | None = ...,
    links: None = ...,
    drift: None = ...,
    report: Literal[True],
    threads: int | None = ...,
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]: ...
@overload
def linearize(
    turns: TableLike,
    policy: str | Policy = ...,
    *,
    reward: Reward = ...,
    sessions: TableLike | None = ...,
    max_row_tokens: int | None = ...,
    links: TableLike | None = ...,
    drift: TableLike | None = ...,
    report: Literal[False] = ...,
    threads: int | None = ...,
) -> pa.Table: ...
@overload
def linearize(
    turns: TableLike,
    policy: str | Policy = ...,
    *,
    reward: Reward = ...,
    sessions: TableLike | None = ...,
    max_row_tokens: int | None = ...,
    links: TableLike | None = ...,
    drift: TableLike | None = ...,
    report: Literal[True],
    threads: int | None = ...,
) -> tuple[pa.Table, pa.Table]: ...
def linearize(
    turns: TableLike | Iterator[pa.RecordBatch],
    policy: str | Policy = "faithful",
    *,
    reward: Reward = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    links: TableLike | None = None,
    drift: TableLike | None = None,
    report: bool = False,
    threads: int | None = None,
) -> object:
    """The training rows that a policy makes of recorded calls.

    Parameters
    ----------
    turns : table, or iterator of record batches
        `trajkit.schema.TURNS` in full or delta form, each session in one piece. An
        iterator (or a RecordBatchReader) is read as the result is, and may hold a
        session in several batches that follow each other.
    policy : str or Policy
        A name (see `trajkit.policy`) or a policy.
    reward : float, mapping of session_id to float or None, or table, optional
        One reward for all, or one per session; None is unscorable. A table is taken for
        ``sessions``.
    sessions : table, optional
        `trajkit.schema.SESSIONS`: reward, group_id and error of each session.
    max_row_tokens : int, optional
        Rows are cut to this many tokens. A row that has no response token left is left
        out. None: no cap.
    links, drift : table, optional
        Of the same turns, as `trajkit.link` and `trajkit.classify_drift` give them (or
        changed: an lcp may be made smaller, never larger than what the two turns
        share); computed when not given. Not with an iterator.
    report : bool
        Return what became of each session as well.
    threads : int, optional
        Sessions are spread over this many threads, with the GIL released. None: one per
        core. The rows are the same for any number.

    Returns
    -------
    rows : Table
        `trajkit.schema.ROWS`; sessions in the order of ``turns``, the rows of a session
        in the policy's order.
    report : Table, if asked for
        `trajkit.schema.REPORT`, one row per session.

        For an iterator: an iterator of record batches of rows, or of pairs of them.

    Raises
    ------
    SchemaError
        A table lacks a column, or a column has a type that cannot be taken for its own.
    InvalidTurnsError
        A session comes in pieces, its turns out of order, its logprobs in another
        number than its output ids; ``links``, ``drift`` or ``sessions`` do not fit
        ``turns``.
    PolicyError
        The policy does not exist, or a choice is none.

    Notes
    -----
    Token ids and logprobs are taken as they are; `trajkit.validate` looks at them. The
    buffers of ``turns`` are read without the GIL: do not write to them during the call.

    References
    ----------
    slime's rule: spec, slime 2 and 3. strict: prime-rl's interleave_rollout.
    """
    chosen = named_policy(policy)
    if max_row_tokens is not None and max_row_tokens < 1:
        raise PolicyError(
            f"max_row_tokens={max_row_tokens}: expected 1 or more, or None"
        )
    if threads is not None and threads < 1:
        raise PolicyError(f"threads={threads}: expected 1 or more, or None")
    work = _Work(
        chosen,
        session_facts(reward, sessions),
        _NO_CAP if max_row_tokens is None else max_row_tokens,
    )
    n_threads = threads or os.cpu_count() or 1

    if isinstance(turns, (Iterator, pa.RecordBatchReader)):
        if links is not None or drift is not None:
            raise PolicyError(
                "links and drift belong to a table of turns, not to a stream"
            )
        pairs = _stream(turns, work, n_threads)
        return pairs if report else (rows for rows, _ in pairs)

    calls = read_calls(turns)
    given = None
    if links is not None or drift is not None:
        given = _given_links(calls, chosen, links, drift)
    results = list(_spread(work, _parts(calls, given, n_threads), n_threads))
    rows = pa.Table.from_batches([rows for rows, _ in results], ROWS)
    if not report:
        return rows
    return rows, pa.Table.from_batches([counts for _, counts in results], REPORT)


def _stream(
    turns: Iterable[pa.RecordBatch], work: "_Work", n_threads: int
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    for table in whole_sessions(turns):
        yield from _spread(work, _parts(read_calls(table), None, n_threads), n_threads)


def _given_links(
    calls: Calls, policy: Policy, links: TableLike | None, drift: TableLike | None
) -> Records:
    """Links that the caller gave, completed by what was not given."""
    forest = grow(calls)
    if links is None:
        records = policy_links(calls, forest, policy)
    else:
        records = read_links(calls, links)
    measure(calls, forest, records)
    if drift is not None:
        read_lcp(calls, records, drift)
    return records


def _parts(
    calls: Calls, links: Records | None, n_threads: int
) -> Iterator[tuple[Calls, Records | None]]:
    fair = int(calls.held.sum()) // (_PARTS_PER_THREAD * n_threads)
    lo = 0
    for part in calls.split(min(max(fair, _LEAST_PART), _LARGEST_PART)):
        hi = lo + len(part.calls)
        here = None
        if links is not None:
            here = links[lo:hi].copy()
            for name in ("parent", "demoted_by"):
                here[name][here[name] >= 0] -= lo
        yield part, here
        lo = hi


def _spread(
    work: "_Work", parts: Iterable[tuple[Calls, Records | None]], n_threads: int
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """What ``work`` makes of each part, in order, on so many threads."""
    parts = list(parts)
    if n_threads == 1 or len(parts) <= 1:
        yield from (work(*part) for part in parts)
        return
    with ThreadPoolExecutor(min(n_threads, len(parts))) as pool:
        yield from pool.map(lambda part: work(*part), parts)


@dataclass(frozen=True, slots=True)
class _Work:
    """Everything that is the same for every part."""

    policy: Policy
    facts: SessionFacts
    cap: int

    def __call__(
        self, calls: Calls, links: Records | None
    ) -> tuple[pa.RecordBatch, pa.RecordBatch]:
        """Rows and report of the calls of whole sessions."""
        facts = self.facts.of(calls.session_ids)
        failed = errored(facts)
        if failed.any():
            calls = calls.without_training(failed)
        forest = grow(calls)
        if links is None:
            links = policy_links(calls, forest, self.policy)
            measure(calls, forest, links)
        plan = self._plan(calls, forest, links)
        return self._rows(calls, forest, links, plan, facts), _report(facts, plan)

    def _plan(self, calls: Calls, forest: Forest, links: Records) -> _Plan:
        n_calls = len(calls.calls)
        plan = _Plan(
            np.empty(n_calls, ROW),
            np.empty(n_calls, np.uint8),
            np.empty(n_calls, np.int32),
            np.zeros((calls.n_sessions, len(REPORT_COUNTS)), np.int64),
        )
        n_rows = _core.plan_rows(
            calls.calls,
            calls.session_offsets,
            forest.nodes,
            forest.ends,
            links,
            ABSORBS.index(self.policy.absorb),
            self.policy.fork_threshold,
            self.policy.keep_head,
            not self.policy.keep_untrained,
            self.policy.flags == "chain",
            self.cap,
            plan.kinds,
            np.empty((3, n_calls), np.int32),
            plan.owners,
            np.empty(len(forest.nodes), np.int32),
            plan.rows,
            plan.report,
        )
        return replace(plan, rows=plan.rows[:n_rows])

    def _rows(
        self,
        calls: Calls,
        forest: Forest,
        links: Records,
        plan: _Plan,
        facts: pa.Table,
    ) -> pa.RecordBatch:
        rows = plan.rows
        offsets, span_offsets = _offsets(rows["n_tokens"]), _offsets(rows["n_spans"])
        n_tokens, n_spans = int(offsets[-1]), int(span_offsets[-1])
        n_bytes = (n_tokens + 7) // 8
        input_ids = _pooled(n_tokens, np.int32)
        loss_mask, valid = _pooled(n_bytes, np.uint8), _pooled(n_bytes, np.uint8)
        logprobs = _pooled(n_tokens, np.float32)
        loss_mask.fill(0)
        valid.fill(0)
        logprobs.fill(0)
        spans = np.empty((len(SPAN) - 1, n_spans), np.int32)
        kinds = np.empty(n_spans, np.int8)
        missing = _core.fill_rows(
            calls.calls,
            forest.nodes,
            forest.ends,
            links,
            plan.kinds,
            plan.owners,
            calls.turn_index,
            self.policy.keep_head,
            self.cap,
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
        mask = pa.py_buffer(loss_mask)
        # Where the engine gave every logprob, what is valid is what is trained.
        given = pa.py_buffer(valid) if missing else mask

        def per_token(type_: pa.DataType, *buffers: pa.Buffer | None) -> pa.Array:
            values = pa.Array.from_buffers(type_, n_tokens, list(buffers))
            return pa.LargeListArray.from_arrays(pa.array(offsets), values)

        span = pa.StructArray.from_arrays(
            [
                *(pa.array(column) for column in spans),
                pa.DictionaryArray.from_arrays(pa.array(kinds), pa.array(SPAN_KINDS)),
            ],
            fields=list(SPAN),
        )
        session = pa.array(rows["session"])
        last = rows["last"]
        mask_sums = plan.report[:, REPORT_COUNTS.index("tokens_trained")]
        mask_sum = mask_sums[rows["session"]]
        parent_row = rows["parent_row"]
        return pa.RecordBatch.from_arrays(
            [
                calls.session_ids.take(session),
                pa.array(rows["index"]),
                _column(facts, "group_id").take(session),
                per_token(pa.int32(), None, pa.py_buffer(input_ids)),
                pa.array(rows["prompt_len"].astype(np.int32)),
                per_token(pa.bool_(), None, mask),
                per_token(pa.float32(), given, pa.py_buffer(logprobs)),
                pa.LargeListArray.from_arrays(pa.array(span_offsets), span),
                pa.array(parent_row, mask=parent_row < 0),
                pa.array(rows["shared"].astype(np.int32)),
                _column(facts, "reward").take(session),
                pa.array(
                    rows["n_trained"] / np.maximum(mask_sum, 1), mask=mask_sum == 0
                ),
                pa.array(mask_sum),
                _column(calls.table, "finish_reason").take(pa.array(last)),
                *(
                    pa.array(rows[name].astype(np.bool_))
                    for name in ("truncated", "use_tool", "ill_formed")
                ),
            ],
            schema=ROWS,
        )


def _report(facts: pa.Table, plan: _Plan) -> pa.RecordBatch:
    counts = [
        pa.array(
            column.astype(
                np.int32 if REPORT.field(name).type == pa.int32() else np.int64
            )
        )
        for column, name in zip(plan.report.T, REPORT_COUNTS, strict=True)
    ]
    known = [_column(facts, name) for name in SESSIONS.names]
    return pa.RecordBatch.from_arrays([*known, *counts], schema=REPORT)


def _column(table: pa.Table, name: str) -> pa.Array:
    column = table.column(name)
    return column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()


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

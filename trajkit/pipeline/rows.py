"""`linearize`: turn recorded calls into training rows under a policy."""

from __future__ import annotations  # a signature shows the words below

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypedDict, Unpack, overload

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, check_flag, chosen_int
from trajkit._arrow.canonical import TableLike, as_table
from trajkit._arrow.ragged import Records
from trajkit._arrow.take import empty_batch
from trajkit._streams import limits
from trajkit._streams.lockstep import Stream, batches_of, is_stream
from trajkit._streams.session_batches import whole_sessions
from trajkit._streams.thread_pool import parallel_map
from trajkit.errors import ArgumentError
from trajkit.pipeline.fill import row_batches
from trajkit.pipeline.links import (
    BY_MESSAGES,
    find_links,
    n_by_tokens,
    read_lcp,
    read_links,
)
from trajkit.pipeline.payloads import (
    PathRanges,
    payload_names,
    rows_schema,
    with_payloads,
)
from trajkit.pipeline.plan import plan_rows, report_batch
from trajkit.pipeline.splice import splice
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.schema import REPORT, ROWS, ROWS_SUFFIX
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import Reward, SessionFacts, errored, session_facts
from trajkit.turns.sessions import Sessions
from trajkit.turns.structs import STOPS
from trajkit.turns.trainability import check_logprobs, without_aborted

Batches: TypeAlias = tuple[Iterable[pa.RecordBatch], pa.RecordBatch | None]
"""Rows of some sessions, and their report or None."""

Layout: TypeAlias = Literal["full", "suffix"]

_NO_CAP = np.iinfo(np.int64).max


class _Options(TypedDict, total=False):
    reward: Reward
    sessions: TableLike | None
    max_row_tokens: int | None
    payloads: Sequence[str]
    threads: int | None
    layout: Layout


class _TableOptions(_Options, total=False):
    links: TableLike | None
    drift: TableLike | None


@overload
def linearize(
    turns: Stream | pa.RecordBatchReader,
    policy: str | Policy = ...,
    *,
    report: Literal[False] = ...,
    **options: Unpack[_Options],
) -> Stream: ...
@overload
def linearize(
    turns: Stream | pa.RecordBatchReader,
    policy: str | Policy = ...,
    *,
    report: Literal[True],
    **options: Unpack[_Options],
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]: ...
@overload
def linearize(
    turns: TableLike,
    policy: str | Policy = ...,
    *,
    report: Literal[False] = ...,
    **options: Unpack[_TableOptions],
) -> pa.Table: ...
@overload
def linearize(
    turns: TableLike,
    policy: str | Policy = ...,
    *,
    report: Literal[True],
    **options: Unpack[_TableOptions],
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
    payloads: Sequence[str] = (),
    threads: int | None = None,
    layout: Layout = "full",
) -> object:
    """Turn recorded calls into training rows.

    Parameters
    ----------
    turns : table, or iterator of record batches
        `trajkit.schema.TURNS` in full or delta form. The turns of a session are
        contiguous. An iterator (or a RecordBatchReader) is read lazily; a session may
        span consecutive batches.
    policy : str or Policy
        The name of a preset (see `trajkit.policy`), or a policy.
    reward : float, mapping of session_id to float or None, or table, optional
        One reward for all sessions, or one per session; None means unscorable. A table
        is read as ``sessions``.
    sessions : table, optional
        `trajkit.schema.SESSIONS`: reward, group_id and error of each session. If
        ``turns`` has columns ``reward`` and ``group_id``, their one value per session
        must not differ from the value given here. Columns of nulls are ignored.
    max_row_tokens : int, optional
        Truncate rows to this many tokens. Rows without a response token after that are
        omitted.
    links, drift : table, optional
        Results of `trajkit.link` and `trajkit.classify_drift` for the same turns.
        Computed by default. An ``lcp`` may be lowered, but not raised above the prefix
        that the two turns share. Not allowed with an iterator.
    report : bool
        Also return the report.
    payloads : sequence of str
        Extra columns of ``turns`` to carry into the rows, such as routed experts or
        rewards per token. Each turn has null or a list, whose elements have any type
        and belong to

        - the output ids, or the prompt and output ids, if it is as long,
        - any range of the prompt and output ids, if the integer column ``<name>_start``
          gives the position of the first: 0 for the routed experts of all ids but the
          last, as engines return them. Elements before it come from the earlier turn
          that shares the longest prefix.

        A `pyarrow.FixedShapeTensorType` column is a list along its
        first axis. ``weight_version`` does not need a column: by default it names the
        weights that sampled each token, from ``weight_versions``.

        The rows have a list of the same name with one element per id. Sampled tokens
        take the element of the turn that sampled them. Other tokens, and sampled tokens
        whose element is null, take it from the row's last turn, or are null if that
        turn has none. If no turn has a payload, its list is null.
    threads : int, optional
        Number of threads, which release the GIL. Default: one per core. The rows do not
        depend on it.
    layout : {"full", "suffix"}
        "suffix" stores, per row, only the tokens after the prefix that it shares with
        its parent_row (or from its first trained token, if that is earlier), so shared
        tokens are written once. `trajkit.full_rows` is the inverse.

    Returns
    -------
    rows : Table
        `trajkit.schema.ROWS`, or ``ROWS_SUFFIX`` with ``layout="suffix"``. Sessions come
        in the order of ``turns``, the rows of a session in the policy's order.
    report : Table, only with ``report=True``
        `trajkit.schema.REPORT`, one row per session.

        For an iterator: an iterator of record batches of rows, or of pairs of them.

    Raises
    ------
    SchemaError
        A column is missing or cannot be cast to its type.
    LayoutError
        Offsets, lengths or other buffers of a table do not fit together.
    InvalidTurnsError
        The turns of a session are not contiguous or not in order, or a turn has another
        number of logprobs than output ids; ``links``, ``drift`` or ``sessions`` do not
        fit ``turns``; turns, ``reward`` and ``sessions`` contradict each other; a token
        has no logprob, and the policy's ``missing_logprobs`` is ``"raise"``.
    PolicyError, ArgumentError
        The policy, one of its choices or the layout does not exist; ``payloads`` with
        ``layout="suffix"``.

    Notes
    -----
    Token ids and logprobs are copied unchecked; `trajkit.validate` checks them. The
    buffers of ``turns`` are read without the GIL: do not write to them during the call.

    References
    ----------
    trajkit/policies.py links the source of each preset.
    """
    chosen = named_policy(policy)
    if layout != "full":
        check_choice("layout", layout, Layout)
    check_flag("report", report)
    if max_row_tokens is not None:
        max_row_tokens = chosen_int("max_row_tokens", max_row_tokens, 1)
    if threads is not None:
        threads = chosen_int("threads", threads, 1)
    work = _Work(
        chosen,
        session_facts(reward, sessions),
        _NO_CAP if max_row_tokens is None else max_row_tokens,
        report,
        payload_names(payloads) if payloads != () else (),
        layout == "suffix",
    )
    if work.payloads and work.suffix:
        raise ArgumentError("payloads need layout='full': layout is 'suffix'")
    n_threads = threads or os.cpu_count() or 1
    if is_stream(turns):
        if links is not None or drift is not None:
            raise ArgumentError(
                "links and drift were given for a stream of turns: pass a table"
            )
        parts = _stream(turns, work, n_threads)
        if report:
            return (pair for rows, counts in parts for pair in _pairs(rows, counts))
        return (batch for rows, _ in parts for batch in rows)

    if not isinstance(turns, Sessions):
        turns = Sessions.of(as_turns(turns, _unread(chosen)))
    given = None
    if links is not None or drift is not None:
        given = _given_links(turns, chosen, links, drift)
    made = _spread(work, turns, turns.cut(n_threads), given, n_threads)
    return _tables(made, work.schema(turns.table.schema), report)


def reads_turns(policy: Policy) -> bool:
    """Whether linearize needs columns besides ids, keys and flags.

    If not, rows depend on the records of calls and the keys of messages alone.
    """
    if policy.on_drift == "splice" or policy.missing_logprobs == "raise":
        return True
    by_body = policy.message_equality != "values" or policy.parent_by == "agents"
    return by_body and policy.parent_by in BY_MESSAGES


def _unread(policy: Policy) -> tuple[str, ...]:
    """The columns of turns with text that neither the policy nor a row reads."""
    return () if reads_turns(policy) else ("messages", "suffix_messages", "response")


def _tables(made: list[Batches], schema: pa.Schema, report: bool) -> object:
    batches = [batch for rows, _ in made for batch in rows]
    table = pa.Table.from_batches(batches, schema)
    if not report:
        return table
    return table, pa.Table.from_batches([counts for _, counts in made], REPORT)


def _pairs(
    batches: Iterable[pa.RecordBatch], report: pa.RecordBatch | None
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Yield (batch, report); only the last report has rows."""
    assert report is not None
    before: pa.RecordBatch | None = None
    for batch in batches:
        if before is not None:
            yield before, report.slice(0, 0)
        before = batch
    yield before, report


def _stream(turns: Stream, work: _Work, n_threads: int) -> Iterator[Batches]:
    for table in whole_sessions(batches_of(turns, _unread(work.policy))):
        sessions = Sessions.of(table)
        parts = sessions.cut(n_threads)
        yield from _spread(work, sessions, parts, None, n_threads)
        if not len(sessions):
            yield [empty_batch(work.schema(sessions.table.schema))], empty_batch(REPORT)


def _given_links(
    sessions: Sessions,
    policy: Policy,
    links: TableLike | None,
    drift: TableLike | None,
) -> Records:
    """The caller's links and drift, with the missing part computed."""
    if links is None:
        records = find_links(sessions, sessions.forest, policy)
    else:
        records = read_links(sessions, sessions.forest, as_table(links))
    if drift is not None:
        read_lcp(sessions, records, as_table(drift))
    return records


def _spread(
    work: _Work,
    sessions: Sessions,
    parts: list[tuple[int, int]],
    links: Records | None,
    n_threads: int,
) -> list[Batches]:
    """Apply ``work`` to the sessions, part by part, on ``n_threads`` threads."""

    def part(bounds: tuple[int, int]) -> Batches:
        here = None
        if links is not None:
            lo, hi = (int(sessions.offsets[s]) for s in bounds)
            here = links[lo:hi].copy()
            for name in ("parent", "rewritten_by"):
                here[name][here[name] >= 0] -= lo
        return work(sessions.part(*bounds), here)

    if len(parts) == 1:
        return [work(sessions, links)]
    return parallel_map(part, parts, n_threads)


@dataclass(frozen=True, slots=True)
class _Work:
    """The options that all parts share."""

    policy: Policy
    facts: SessionFacts
    cap: int
    report: bool
    payloads: tuple[str, ...]
    suffix: bool

    def schema(self, turns: pa.Schema) -> pa.Schema:
        """The schema of rows from turns with this schema."""
        if self.payloads:
            return rows_schema(turns, self.payloads)
        return ROWS_SUFFIX if self.suffix else ROWS

    def __call__(self, sessions: Sessions, links: Records | None) -> Batches:
        """The rows of complete sessions, and their report if requested."""
        facts = self.facts.of_sessions(sessions)
        if facts.column("error").null_count < len(sessions.ids):
            sessions = sessions.untrained(errored(facts)[sessions.session])
        aborted = np.zeros(len(sessions.ids), np.int64)
        if (
            not self.policy.train_aborted
            and (sessions.calls["stop"] == STOPS["abort"]).any()
        ):
            sessions, aborted = without_aborted(sessions)
        if self.policy.missing_logprobs == "raise":
            check_logprobs(sessions)
        if links is None:
            links = find_links(sessions, sessions.forest, self.policy)
        made, spliced = sessions, None
        ranges: Callable[[Records], PathRanges] = PathRanges.of_paths
        if self.policy.on_drift == "splice":
            spliced = splice(sessions, links, self.policy)
            made, links, ranges = spliced.sessions, spliced.links, spliced.ranges
        plan = plan_rows(made, links, self.policy, self.cap)
        if spliced is not None:
            spliced.finish(plan, self.policy)
        written = row_batches(
            made,
            links,
            self.policy,
            self.cap,
            plan,
            facts,
            ranges,
            suffix=self.suffix,
        )
        if spliced is not None and len(spliced.dropped):
            written = (
                (planned, spliced.with_dropped(batch, planned))
                for planned, batch in written
            )
        report = None
        if self.report:
            plan.counted("lost_untrainable")[:] -= aborted
            plan.counted("lost_aborted")[:] += aborted
            plan.counted("turns_by_tokens")[:] = n_by_tokens(sessions, self.policy)
            report = report_batch(facts, plan)
        batches: Iterable[pa.RecordBatch] = (batch for _, batch in written)
        if self.payloads:
            batches = (
                with_payloads(batch, sessions, planned, self.payloads, ranges)
                for planned, batch in written
            )
        huge = (
            int((plan.rows["n_tokens"] - plan.rows["stored"]).sum())
            > limits.HELD_ROW_TOKENS
        )
        return (batches if huge else list(batches)), report

"""`linearize` and `report`: recorded calls as training rows, and what became of them."""

from __future__ import annotations  # a signature shows the words below

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict, Unpack

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_int
from trajkit._kernel_names import STOPS
from trajkit.errors import ArgumentError
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.fill import row_batches
from trajkit.rows.links import (
    BY_MESSAGES,
    find_links,
    n_by_tokens,
    read_lcp,
    read_links,
)
from trajkit.rows.payloads import (
    PathRanges,
    payload_names,
    rows_schema,
    with_payloads,
)
from trajkit.rows.plan import plan_rows, report_batch
from trajkit.rows.splice import splice
from trajkit.schema import REPORT, ROWS
from trajkit.tables import limits
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.columns import empty_batch
from trajkit.tables.ragged import Records
from trajkit.tables.stages import Batches, Source, batches_of, whole_sessions
from trajkit.tables.threads import parallel_map
from trajkit.turns.flat_buffers import check_logprobs, without_aborted
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import Reward, SessionFacts, errored, session_facts
from trajkit.turns.sessions import Sessions

Made: TypeAlias = tuple[Iterable[pa.RecordBatch], pa.RecordBatch | None]
"""Rows of some sessions, and their report or None."""

_NO_CAP = np.iinfo(np.int64).max


class _Options(TypedDict, total=False):
    reward: Reward
    sessions: TableLike | None
    max_row_tokens: int | None
    payloads: Sequence[str]
    threads: int | None


def linearize(
    turns: TableLike,
    policy: str | Policy = "faithful",
    *,
    reward: Reward = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    links: TableLike | None = None,
    drift: TableLike | None = None,
    payloads: Sequence[str] = (),
    threads: int | None = None,
) -> pa.Table:
    """Turn recorded calls into training rows.

    `report` counts what becomes of the sampled tokens. `linearize_batches` does the same
    with an iterator of record batches.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form. The turns of a session are
        contiguous.
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
        that the two turns share.
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

    Returns
    -------
    Table
        `trajkit.schema.ROWS`. Sessions come in the order of ``turns``, the rows of a
        session in the policy's order.

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
        The policy or one of its choices does not exist.

    Notes
    -----
    Token ids and logprobs are copied unchecked; `trajkit.validate` checks them. The
    buffers of ``turns`` are read without the GIL: do not write to them during the call.

    References
    ----------
    trajkit/policies.py links the source of each preset.
    """
    work = _Work.of(
        policy,
        reward=reward,
        sessions=sessions,
        max_row_tokens=max_row_tokens,
        payloads=payloads,
        threads=threads,
    )
    return _rows(*work.made(turns, links, drift))


def report(
    turns: TableLike,
    policy: str | Policy = "faithful",
    *,
    reward: Reward = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    links: TableLike | None = None,
    drift: TableLike | None = None,
    threads: int | None = None,
) -> pa.Table:
    """Count what `linearize` does with the sampled tokens of each session.

    No row is built for it.

    Parameters
    ----------
    turns, policy, reward, sessions, max_row_tokens, links, drift, threads
        As for `linearize`.

    Returns
    -------
    Table
        `trajkit.schema.REPORT`, one row per session.
    """
    work = _Work.of(
        policy,
        reward=reward,
        sessions=sessions,
        max_row_tokens=max_row_tokens,
        threads=threads,
    )
    made, _ = replace(work, fills=False, reports=True).made(turns, links, drift)
    return pa.Table.from_batches([counts for _, counts in made], REPORT)


def rows_and_report(
    turns: TableLike, policy: str | Policy = "faithful", **options: Unpack[_Options]
) -> tuple[pa.Table, pa.Table]:
    """`linearize` and `report` in one go."""
    work = replace(_Work.of(policy, **options), reports=True)
    made, schema = work.made(turns)
    counts = pa.Table.from_batches([counts for _, counts in made], REPORT)
    return _rows(made, schema), counts


def linearize_batches(
    batches: Source,
    policy: str | Policy = "faithful",
    *,
    report: list[pa.RecordBatch] | None = None,
    **options: Unpack[_Options],
) -> Batches:
    """From record batches to an iterator of record batches; see `linearize`.

    The batches of a session are consecutive; a session may span several. The rows of a
    large session are built batch by batch, as they are read.

    Parameters
    ----------
    batches : iterator of record batches, RecordBatchReader or table
        The turns.
    report : list of RecordBatch, optional
        The batches of `report` are appended to it while the rows are read.
    policy, **options
        As for `linearize`, without ``links`` and ``drift``.

    Returns
    -------
    iterator of RecordBatch
        The rows: at least one batch, unless there is no batch of turns.
    """
    if not isinstance(report, list | None):
        raise ArgumentError(f"report={report!r}: expected a list")
    work = replace(_Work.of(policy, **options), reports=report is not None)

    unread = _unread(work.policy)
    tables: Iterable[pa.Table]
    if isinstance(batches, Iterator):
        tables = whole_sessions(batches_of(batches, unread))
    else:
        tables = [as_turns(batches, unread)]

    def made() -> Batches:
        for table in tables:
            parts, schema = work.made(Sessions.of(table))
            for rows, counts in parts:
                if report is not None:
                    report.append(counts)
                yield from rows
            if not table.num_rows:
                yield empty_batch(schema)
                if report is not None:
                    report.append(empty_batch(REPORT))

    return made()


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


def _rows(made: list[Made], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches([batch for rows, _ in made for batch in rows], schema)


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


@dataclass(frozen=True, slots=True)
class _Work:
    """The checked options that all parts share.

    ``fills``: rows are made; ``reports``: the report is made, too.
    """

    policy: Policy
    facts: SessionFacts
    cap: int
    payloads: tuple[str, ...]
    n_threads: int
    fills: bool = True
    reports: bool = False

    @classmethod
    def of(
        cls,
        policy: str | Policy,
        *,
        reward: Reward = None,
        sessions: TableLike | None = None,
        max_row_tokens: int | None = None,
        payloads: Sequence[str] = (),
        threads: int | None = None,
    ) -> _Work:
        """Check the options of `linearize`."""
        chosen = named_policy(policy)
        cap, n_threads = _NO_CAP, os.cpu_count() or 1
        if max_row_tokens is not None:
            cap = chosen_int("max_row_tokens", max_row_tokens, 1)
        if threads is not None:
            n_threads = chosen_int("threads", threads, 1)
        facts = session_facts(reward, sessions)
        names = payload_names(payloads) if payloads != () else ()
        return cls(chosen, facts, cap, names, n_threads)

    def made(
        self,
        turns: TableLike | Sessions,
        links: TableLike | None = None,
        drift: TableLike | None = None,
    ) -> tuple[list[Made], pa.Schema]:
        """The rows and reports of the parts of a table, and the schema of the rows."""
        if not isinstance(turns, Sessions):
            turns = Sessions.of(as_turns(turns, _unread(self.policy)))
        parts = turns.cut(self.n_threads)
        given = None
        if links is not None or drift is not None:
            given = _given_links(turns, self.policy, links, drift)
        return self._spread(turns, parts, given), self._schema(turns.table.schema)

    def _schema(self, turns: pa.Schema) -> pa.Schema:
        """The schema of rows from turns with this schema."""
        if self.payloads:
            return rows_schema(turns, self.payloads)
        return ROWS

    def _spread(
        self, sessions: Sessions, parts: list[tuple[int, int]], links: Records | None
    ) -> list[Made]:
        """Make the rows of each part, on several threads."""

        def part(bounds: tuple[int, int]) -> Made:
            here = None
            if links is not None:
                lo, hi = (int(sessions.offsets[s]) for s in bounds)
                here = links[lo:hi].copy()
                for name in ("parent", "rewritten_by"):
                    here[name][here[name] >= 0] -= lo
            return self(sessions.part(*bounds), here)

        if len(parts) == 1:
            return [self(sessions, links)]
        return parallel_map(part, parts, self.n_threads)

    def __call__(self, sessions: Sessions, links: Records | None) -> Made:
        """The rows of complete sessions, and their report if requested."""
        facts, policy = self.facts.of_sessions(sessions), self.policy
        if facts.column("error").null_count < len(sessions.ids):
            sessions = sessions.untrained(errored(facts)[sessions.session])
        aborted = np.zeros(len(sessions.ids), np.int64)
        may_abort = not policy.train_aborted
        if may_abort and (sessions.calls["stop"] == STOPS["abort"]).any():
            sessions, aborted = without_aborted(sessions)
        if policy.missing_logprobs == "raise":
            check_logprobs(sessions)
        if links is None:
            links = find_links(sessions, sessions.forest, policy)
        made, spliced = sessions, None
        ranges: Callable[[Records], PathRanges] = PathRanges.of_paths
        if policy.on_drift == "splice":
            spliced = splice(sessions, links, policy)
            made, links, ranges = spliced.sessions, spliced.links, spliced.ranges
        plan = plan_rows(made, links, policy, self.cap)
        if spliced is not None:
            spliced.finish(plan, policy)
        report = None
        if self.reports:
            plan.counted("lost_untrainable")[:] -= aborted
            plan.counted("lost_aborted")[:] += aborted
            plan.counted("turns_by_tokens")[:] = n_by_tokens(sessions, policy)
            report = report_batch(facts, plan)
        if not self.fills:
            return [], report
        written = row_batches(made, links, policy, self.cap, plan, facts, ranges)
        if spliced is not None and len(spliced.dropped):
            written = (
                (planned, spliced.with_dropped(batch, planned))
                for planned, batch in written
            )
        batches: Iterable[pa.RecordBatch] = (batch for _, batch in written)
        if self.payloads:
            batches = (
                with_payloads(batch, sessions, planned, self.payloads, ranges)
                for planned, batch in written
            )
        huge = int(plan.rows["n_tokens"].sum()) > limits.HELD_ROW_TOKENS
        return (batches if huge else list(batches)), report

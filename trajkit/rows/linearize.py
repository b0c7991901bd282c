"""`linearize` and `report`: recorded calls as training rows, and what became of them."""

from __future__ import annotations  # a signature shows the words below

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeAlias, TypedDict, Unpack

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import chosen_int
from trajkit._kernel_names import LINK, STOPS
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.policies import ParentBy, Policy
from trajkit.policies import policy as named_policy
from trajkit.rows import plan as planning
from trajkit.rows.agents import agent_edges
from trajkit.rows.routes import ROUTES, first_of_session
from trajkit.rows.splice import splice
from trajkit.schema import DRIFT, LINK_REASONS, LINKS, REPORT, ROWS, SEGMENT_KINDS
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits, stages
from trajkit.tables.canonical import TableLike, as_table, canonical
from trajkit.tables.columns import empty_batch
from trajkit.tables.ragged import Ints, Longs, Records
from trajkit.turns.flat_buffers import check_logprobs, without_aborted
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import Reward, SessionFacts, errored, session_facts
from trajkit.turns.sessions import Forest, Sessions
from trajkit.turns.validation import check_table

Made: TypeAlias = tuple[Iterable[pa.RecordBatch], pa.RecordBatch | None]
"""Rows of some sessions, and their report or None."""


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
        `trajkit.schema.SESSIONS`: reward, group_id and error of each session. Columns
        ``reward`` and ``group_id`` of ``turns`` count as well, unless they are null, and
        must not differ from it within a session.
    max_row_tokens : int, optional
        Truncate rows to this many tokens. Rows without a response token after that are
        omitted.
    links, drift : table, optional
        Results of `trajkit.link` and `trajkit.classify_drift` for the same turns. An
        ``lcp`` may be lowered, but not raised above the prefix that the two turns share.
    payloads : sequence of str
        Extra columns of ``turns`` to carry into the rows, such as routed experts. Each
        turn has null or a list, whose elements belong to the output ids or the prompt and
        output ids, whichever is as long (those of `trajkit.schema.PAYLOADS` as they say);
        or to any range of these, if the integer column ``<name>_start`` gives the position
        of the first. Elements before it come from the earlier turn that shares the longest
        prefix. ``weight_version`` does not need a column: by default it names
        the weights that sampled each token, from ``weight_versions``.

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
    SchemaError, LayoutError
        A column is missing or has another type; buffers do not fit together.
    InvalidTurnsError
        The turns of a session are not contiguous or not in order, or a turn has another
        number of logprobs than output ids; ``links``, ``drift`` or ``sessions`` do not
        fit ``turns``; turns, ``reward`` and ``sessions`` contradict each other; a token
        has no logprob, and the policy's ``missing_logprobs`` is ``"raise"``.
    PolicyError, ArgumentError
        The policy does not exist, or an option has a value that is not allowed.

    Notes
    -----
    Token ids and logprobs are copied unchecked; `trajkit.validate` checks them. The
    buffers of ``turns`` are read without the GIL: do not write to them during the call.
    """
    work = _Work.of(policy, reward, sessions, max_row_tokens, payloads, threads)
    return _rows(*work.made(turns, links, drift))


def report(
    turns: TableLike,
    policy: str | Policy = "faithful",
    *,
    links: TableLike | None = None,
    drift: TableLike | None = None,
    **options: Unpack[_Options],
) -> pa.Table:
    """Count what becomes of the sampled tokens of each session; see `linearize`.

    No row is built. Parameters are those of `linearize`; the result is
    `trajkit.schema.REPORT`, one row per session.
    """
    work = replace(_Work.of(policy, **options), fills=False, reports=True)
    return _report(work.made(turns, links, drift)[0])


def rows_and_report(
    turns: TableLike, policy: str | Policy = "faithful", **options: Unpack[_Options]
) -> tuple[pa.Table, pa.Table]:
    """`linearize` and `report` in one go."""
    made, schema = replace(_Work.of(policy, **options), reports=True).made(turns)
    return _rows(made, schema), _report(made)


def linearize_batches(
    batches: stages.Source,
    policy: str | Policy = "faithful",
    *,
    report: list[pa.RecordBatch] | None = None,
    **options: Unpack[_Options],
) -> stages.Batches:
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
    tables: Iterable[pa.Table] = (
        stages.whole_sessions(stages.batches_of(batches, unread))
        if isinstance(batches, Iterator)
        else [as_turns(batches, unread)]
    )

    def made() -> stages.Batches:
        for table in tables:
            parts, schema = work.made(Sessions.of(table))
            if not table.num_rows:
                parts = [([empty_batch(schema)], empty_batch(REPORT))]
            for rows, counts in parts:
                if report is not None:
                    report.append(counts)
                yield from rows

    return made()


def _unread(policy: Policy) -> tuple[str, ...]:
    """The columns of turns with text that neither the policy nor a row reads."""
    by_body = policy.message_equality != "values" or policy.parent_by == "agents"
    if policy.on_drift == "splice" or (by_body and policy.parent_by in BY_MESSAGES):
        return ()
    return ("messages", "suffix_messages", "response")


def _rows(made: list[Made], schema: pa.Schema) -> pa.Table:
    return pa.Table.from_batches([batch for rows, _ in made for batch in rows], schema)


def _report(made: list[Made]) -> pa.Table:
    return pa.Table.from_batches([counts for _, counts in made], REPORT)


@dataclass(frozen=True, slots=True)
class _Work:
    """The checked options that all parts share; rows are made and reports, if asked."""

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
        reward: Reward = None,
        sessions: TableLike | None = None,
        max_row_tokens: int | None = None,
        payloads: Sequence[str] = (),
        threads: int | None = None,
    ) -> _Work:
        """Check the options of `linearize`."""
        chosen = named_policy(policy)
        cap, n_threads = planning.NO_LIMIT, os.cpu_count() or 1
        if max_row_tokens is not None:
            cap = chosen_int("max_row_tokens", max_row_tokens, 1)
        if threads is not None:
            n_threads = chosen_int("threads", threads, 1)
        facts = session_facts(reward, sessions)
        names = planning.payload_names(payloads)
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
        whole, given, schema = turns, None, ROWS
        if self.payloads:
            schema = planning.rows_schema(whole.table.schema, self.payloads)
        if links is not None:
            given = read_links(whole, whole.forest, as_table(links))
        elif drift is not None:
            given = find_links(whole, whole.forest, self.policy)
        if drift is not None and given is not None:
            read_lcp(whole, given, as_table(drift))

        def part(bounds: tuple[int, int]) -> Made:
            here = None
            if given is not None:
                lo, hi = (int(whole.offsets[s]) for s in bounds)
                here = given[lo:hi].copy()
                for name in ("parent", "rewritten_by"):
                    here[name][here[name] >= 0] -= lo
            return self(whole.part(*bounds), here)

        parts = whole.cut(self.n_threads)
        if len(parts) == 1:
            return [self(whole, given)], schema
        if self.n_threads == 1:
            # what this thread frees, it uses again
            return [*map(part, parts)], schema
        with ThreadPoolExecutor(min(self.n_threads, len(parts)) or 1) as pool:
            return list(pool.map(part, parts)), schema

    def __call__(self, sessions: Sessions, links: Records | None) -> Made:
        """The rows of complete sessions, and their report if requested."""
        facts, policy = self.facts.of_sessions(sessions), self.policy
        if facts.column("error").null_count < facts.num_rows:
            sessions = sessions.untrained(errored(facts)[sessions.session])
        aborted = np.zeros(facts.num_rows, np.int64)
        may_abort = not policy.train_aborted
        if may_abort and (sessions.calls["stop"] == STOPS["abort"]).any():
            sessions, aborted = without_aborted(sessions)
        if policy.missing_logprobs == "raise":
            check_logprobs(sessions)
        if links is None:
            links = find_links(sessions, sessions.forest, policy)
        made, spliced = sessions, None
        ranges: Callable[[Records], planning.PathRanges] = planning.PathRanges.of_paths
        if policy.on_drift == "splice":
            spliced = splice(sessions, links, policy)
            made, links, ranges = spliced.sessions, spliced.links, spliced.ranges
        plan = planning.plan_rows(made, links, policy, self.cap)
        if spliced is not None:
            spliced.finish(plan, policy)
        report = None
        if self.reports:
            plan.counted("lost_untrainable")[:] -= aborted
            plan.counted("lost_aborted")[:] += aborted
            plan.counted("turns_by_tokens")[:] = n_by_tokens(sessions, policy)
            report = planning.report_batch(facts, plan)
        if not self.fills:
            return [], report

        def batches() -> stages.Batches:
            for planned, batch in planning.row_batches(
                made, links, policy, self.cap, plan, facts, ranges
            ):
                if spliced is not None and len(spliced.dropped):
                    batch = spliced.with_dropped(batch, planned)
                if self.payloads:
                    batch = planning.with_payloads(
                        batch, sessions, planned, self.payloads, ranges
                    )
                yield batch

        huge = int(plan.rows["n_tokens"].sum()) > limits.HELD_ROW_TOKENS
        return (batches() if huge else list(batches())), report


BY_MESSAGES: tuple[ParentBy, ...] = ("messages", "agents", "generations")


@stages.stage
def link(turns: TableLike, policy: str | Policy = "faithful") -> pa.Table:
    """The turn that each turn continues under a policy.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    policy : str or Policy
        As for `trajkit.linearize`. Links depend on ``parent_by``, ``dispatch_tools``,
        ``merge_rewrites``, ``message_equality``, ``compare_tools``, ``tie_break``,
        ``chain_order``, ``row_order`` and, for ``merge_rewrites`` and
        ``"generations"``, on ``fork_threshold``; see `Policy`.

        If turns have no list of messages, tokens decide for policies that compare
        messages: under ``"messages"`` and ``"generations"``, the parent is the turn
        whose prompt the turn's own longer prompt begins with, and whose prompt and
        output it repeats for longest. The same holds for an empty list if ``tie_break``
        is ``"tokens"``; otherwise such a turn is left out. Under ``"agents"``, a turn
        without a list, or after one without, continues the last call of the agent if
        its longer prompt begins with that call's prompt.

    Returns
    -------
    Table
        `trajkit.schema.LINKS`, one row per turn, in the order of ``turns``. Errors are
        those of `trajkit.linearize`.
    """
    chosen = named_policy(policy)

    def one(turns: pa.Table) -> pa.Table:
        calls = Sessions.of(turns)
        return links_table(calls, find_links(calls, calls.forest, chosen), chosen)

    return stages.apply(one, turns, table_of=as_turns)


link_batches = link.batches


def find_links(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """The link of every call under a policy, dtype LINK."""
    links = ROUTES[policy.parent_by](calls, forest, policy)
    if policy.chain_order == "recorded":
        placed = links["order"] >= 0
        before = np.concatenate([[0], np.cumsum(placed)])
        rank = before[:-1] - before[first_of_session(calls)]
        links["order"] = np.where(placed, rank, -1)
    _core.measure_links(forest.paths, links)
    return links


def n_by_tokens(calls: Sessions, policy: Policy) -> Longs:
    """Turns without messages that a route by messages routes by tokens, by session."""
    which = calls.requests["n_keys"] < 0
    if policy.parent_by == "messages" and policy.tie_break == "tokens":
        which |= calls.requests["n_keys"] + calls.requests["shared"] == 0
    which &= policy.parent_by in BY_MESSAGES
    return np.bincount(calls.session, which, len(calls)).astype(np.int64)


def links_table(calls: Sessions, links: Records, policy: Policy) -> pa.Table:
    """The ``links`` table of the calls' links under a policy."""

    def turns(index: Ints) -> pa.Array:
        return pa.array(calls.turn_index[index], mask=index < 0)

    def names(numbers: Ints, known: tuple[str, ...]) -> pa.Array:
        codes = pa.array(numbers.astype(np.int8), mask=numbers < 0)
        return pa.DictionaryArray.from_arrays(codes, pa.array(known))

    columns = [
        calls.table.column("session_id"),
        calls.table.column("turn_index"),
        turns(links["parent"]),
        names(links["link_reason"], LINK_REASONS),
        pa.array(links["order"], mask=links["order"] < 0),
        turns(links["rewritten_by"]),
        names(links["segment"] - 1, SEGMENT_KINDS),
        agent_edges(calls, links, policy),
    ]
    return pa.Table.from_arrays(columns, schema=LINKS)


def read_linked(turns: TableLike, links: TableLike) -> tuple[Sessions, Forest, Records]:
    """The calls of turns, their forest, and the records of their ``links`` table."""
    calls = Sessions.of(as_turns(turns))
    return calls, calls.forest, read_links(calls, calls.forest, as_table(links))


def read_links(calls: Sessions, forest: Forest, table: pa.Table) -> Records:
    """The records of a ``links`` table, one row per turn in the same order."""
    table = canonical(table, LINKS)
    _check_keys(table, calls.table, "links", "turns", "turn")
    check_table(table, "links")
    links = np.zeros(calls.n_calls, LINK)
    for name in ("parent", "rewritten_by"):
        turns = table.column(name).fill_null(-1).to_numpy()
        links[name] = calls.named(calls.session, turns)
    links["order"] = table.column("order").fill_null(-1).to_numpy()
    beyond = links["order"] >= np.diff(calls.offsets)[calls.session]
    for call in np.flatnonzero(beyond)[:1].tolist():
        raise InvalidTurnsError(
            f"{calls.place(call)}: order {links['order'][call]}: expected ranks from "
            "0, each once in a session"
        )
    for name, column, known, none in (
        ("link_reason", "link_reason", LINK_REASONS, 0),
        ("segment", "segment_kind", SEGMENT_KINDS, -1),
    ):
        words = table.column(column).cast(pa.string())
        links[name] = pc.index_in(words, pa.array(known)).fill_null(none).to_numpy()
    links["segment"] += 1
    _core.measure_links(forest.paths, links)
    return links


def _check_keys(
    given: pa.Table, turns: pa.Table, what: str, of: str, each: str
) -> None:
    """Raise unless a table has a row for each of these turns, in their order."""
    names = ("session_id", "turn_index")
    if not all(given.column(name).equals(turns.column(name)) for name in names):
        raise InvalidTurnsError(
            f"{what} has {given.num_rows} rows for {turns.num_rows} {of}, or in another "
            f"order: expected one row per {each}, in the order of turns"
        )


def read_lcp(calls: Sessions, links: Records, table: TableLike) -> None:
    """Replace the measured ``lcp`` of links by those of a ``drift`` table.

    Raises InvalidTurnsError unless it has one row per linked turn, in order, with the same
    parent and no larger lcp: else a row would train tokens that were never sampled.
    """
    table = canonical(table, DRIFT)
    rows = np.flatnonzero(links["parent"] >= 0)
    keys = calls.table.select(["session_id", "turn_index"]).take(rows)
    _check_keys(table, keys, "drift", "linked turns", "turn that has a parent")
    parents, most = links["parent"][rows], links["lcp"][rows]
    lcp = table.column("lcp").to_numpy()
    other = table.column("parent").to_numpy() != calls.turn_index[parents]
    for row in np.flatnonzero(other | (lcp < 0) | (lcp > most))[:1].tolist():
        raise InvalidTurnsError(
            f"{calls.place(rows[row])}: drift has parent {table.column('parent')[row]} "
            f"and lcp {lcp[row]}; its link has parent {calls.turn_index[parents[row]]}, "
            f"with which it shares {most[row]} tokens"
        )
    links["lcp"][rows] = lcp

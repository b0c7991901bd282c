"""Calls to training rows, under a policy."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, chosen_int
from trajkit._arrow.canonical import TableLike, as_table
from trajkit._arrow.take import no_rows
from trajkit._streams.lockstep import Stream, batches_of, is_stream
from trajkit._streams.session_batches import whole_sessions
from trajkit._streams.thread_pool import spread
from trajkit.errors import PolicyError
from trajkit.pipeline.fill import row_batches
from trajkit.pipeline.links import (
    BY_MESSAGES,
    measure,
    n_by_tokens,
    policy_links,
    read_lcp,
    read_links,
)
from trajkit.pipeline.payloads import payload_names, rows_schema, with_payloads
from trajkit.pipeline.plan import Planned, plan_rows, report_batch
from trajkit.pipeline.splice import plan_splices, splice_batch, splice_stretches
from trajkit.pipeline.suffix_layout import suffix_batch
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.schema import REPORT, ROWS_SUFFIX
from trajkit.turns.calls import Calls, Records, read_calls
from trajkit.turns.prefix_forest import grow
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import Reward, SessionFacts, errored, session_facts
from trajkit.turns.table import Turns, locate, runs_of
from trajkit.turns.trainability import check_logprobs, without_aborted

Batches: TypeAlias = tuple[Iterable[pa.RecordBatch], pa.RecordBatch | None]
"""Rows of some sessions, and their report if it was asked for."""

Layout: TypeAlias = Literal["full", "suffix"]

# Tokens that the calls of one part of a table may bring. The fixed cost of a part (about
# 0.7 ms, which threads take one after another) is not to show, so a thread gets one, unless
# the table is large. In delta form a token is more work: it is new, so it goes into a row.
_LEAST_PART, _LARGEST_PART = 1 << 22, 1 << 25
_DELTA_PART = 4  # times as small
_PARTS_PER_THREAD = 1
# Rows of a part that hold more tokens are written when they are asked for, batch by batch.
_AT_ONCE = 1 << 25
_NO_CAP = np.iinfo(np.int64).max


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
    payloads: Sequence[str] = ...,
    threads: int | None = ...,
    layout: Layout = ...,
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
    payloads: Sequence[str] = ...,
    threads: int | None = ...,
    layout: Layout = ...,
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
    payloads: Sequence[str] = ...,
    threads: int | None = ...,
    layout: Layout = ...,
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
    payloads: Sequence[str] = ...,
    threads: int | None = ...,
    layout: Layout = ...,
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

        Where ``turns`` have columns ``reward`` and ``group_id``, as imports give them,
        these are the session's: one value in all of its turns, or null. What is given
        here must not differ. A column of ``sessions`` that is null throughout states
        nothing.
    max_row_tokens : int, optional
        Rows are cut to this many tokens. A row that has no response token left is left
        out. None: no cap.
    links, drift : table, optional
        Of the same turns, as `trajkit.link` and `trajkit.classify_drift` give them (or
        changed: an lcp may be made smaller, never larger than what the two turns
        share); computed when not given. Not with an iterator.
    report : bool
        Return what became of each session as well.
    payloads : sequence of str
        Extra columns of ``turns`` to carry into the rows (routed experts, rewards per
        token). A turn's list, of elements of any type, is null (none is known) or has

        - one element per output id,
        - one per prompt and output id, or all of these but the last, as engines give
          routed experts,
        - in delta form: one per suffix and output id, or all of these but the last,
        - any number of them, if the integer column ``<name>_start`` gives the position
          of the first in prompt and output.

        In the last two cases, the earlier turn that shares most of the prompt has the
        elements that come before. A `pyarrow.FixedShapeTensorType` column is a list
        along its first axis. ``weight_version`` need not be a column: then it is the
        name of the weights that sampled each token, from ``weight_versions``.

        The rows have a list of the same name, as long as the ids. A sampled token has
        the element of its own turn, or, where that is null, of the row's last turn. Any
        other token has the element of the row's last turn, else null. The list of a payload
        that no turn has is null.
    threads : int, optional
        Sessions are spread over this many threads, with the GIL released. None: one per
        core. The rows are the same for any number.
    layout : {"full", "suffix"}
        "suffix": per token, a row holds only what lies beyond the tokens that it shares
        with its parent_row, from its first trained token on at the latest. So tokens
        that many rows share are written once; `trajkit.full_rows` is the inverse.

    Returns
    -------
    rows : Table
        `trajkit.schema.ROWS`, or ``ROWS_SUFFIX`` in layout "suffix"; sessions in the
        order of ``turns``, the rows of a session in the policy's order.
    report : Table, if asked for
        `trajkit.schema.REPORT`, one row per session.

        For an iterator: an iterator of record batches of rows, or of pairs of them.

    Raises
    ------
    SchemaError
        A table lacks a column, or a column has a type that cannot be taken for its own.
    LayoutError
        The buffers of a table do not fit together.
    InvalidTurnsError
        A session comes in pieces, its turns out of order, its logprobs in another
        number than its output ids; ``links``, ``drift`` or ``sessions`` do not fit
        ``turns``; the turns of a session differ in reward or group_id, or ``reward`` or
        ``sessions`` differ from them; a token has no logprob, and the policy's
        ``missing_logprobs`` is ``"raise"``.
    PolicyError
        The policy does not exist, or a choice or the layout is none; ``payloads`` in
        layout "suffix".

    Notes
    -----
    Token ids and logprobs are taken as they are; `trajkit.validate` looks at them. The
    buffers of ``turns`` are read without the GIL: do not write to them during the call.

    References
    ----------
    slime's rule: spec, slime 2 and 3. strict: prime-rl's interleave_rollout. Splices:
    spec, Polar 2.3.
    """
    chosen = named_policy(policy)
    check_choice("layout", layout, Layout)
    if max_row_tokens is not None:
        max_row_tokens = chosen_int("max_row_tokens", max_row_tokens, 1)
    if threads is not None:
        threads = chosen_int("threads", threads, 1)
    work = _Work(
        chosen,
        session_facts(reward, sessions),
        _NO_CAP if max_row_tokens is None else max_row_tokens,
        report,
        payload_names(payloads),
        layout == "suffix",
    )
    if work.payloads and work.suffix:
        raise PolicyError("payloads go with whole rows: layout is 'suffix'")
    if isinstance(turns, Calls):
        return _tables([work(turns, None)], work.schema(turns.table.schema), report)
    n_threads = threads or os.cpu_count() or 1
    if is_stream(turns):
        if links is not None or drift is not None:
            raise PolicyError(
                "links and drift belong to a table of turns, not to a stream"
            )
        parts = _stream(turns, work, n_threads)
        if report:
            return (pair for rows, counts in parts for pair in _pairs(rows, counts))
        return (batch for rows, _ in parts for batch in rows)

    located = turns if isinstance(turns, Turns) else locate(as_turns(turns))
    given = None
    if links is not None or drift is not None:
        given = _given_links(read_calls(located), chosen, links, drift)
    made = _spread(work, located, given, n_threads)
    return _tables(made, work.schema(located.table.schema), report)


def reads_turns(policy: Policy) -> bool:
    """Whether a policy reads the bodies of messages, or which tokens have a logprob.

    If not, rows depend on the records of calls and the keys of messages alone.
    """
    if policy.on_drift == "splice" or policy.missing_logprobs == "raise":
        return True
    by_body = policy.message_equality != "values" or policy.parent_by == "agents"
    return by_body and policy.parent_by in BY_MESSAGES


def _tables(made: list[Batches], schema: pa.Schema, report: bool) -> object:
    batches = [batch for rows, _ in made for batch in rows]
    table = pa.Table.from_batches(batches, schema)
    if not report:
        return table
    return table, pa.Table.from_batches([counts for _, counts in made], REPORT)


def _pairs(
    batches: Iterable[pa.RecordBatch], report: pa.RecordBatch | None
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """Each batch with a report: the last of them with that of all."""
    assert report is not None
    before: pa.RecordBatch | None = None
    for batch in batches:
        if before is not None:
            yield before, report.slice(0, 0)
        before = batch
    yield before, report


def _stream(turns: Stream, work: "_Work", n_threads: int) -> Iterator[Batches]:
    for table in whole_sessions(batches_of(turns)):
        located = locate(table)
        yield from _spread(work, located, None, n_threads)
        if not len(located.ids):
            yield [no_rows(work.schema(located.table.schema))], no_rows(REPORT)


def _given_links(
    calls: Calls, policy: Policy, links: TableLike | None, drift: TableLike | None
) -> Records:
    """Links that the caller gave, completed by what was not given."""
    forest = grow(calls)
    if links is None:
        records = policy_links(calls, forest, policy)
    else:
        records = read_links(calls, as_table(links))
    measure(calls, forest, records)
    if drift is not None:
        read_lcp(calls, records, as_table(drift))
    return records


def _spread(
    work: "_Work", turns: Turns, links: Records | None, n_threads: int
) -> list[Batches]:
    """What ``work`` makes of the turns, part by part, on so many threads."""
    brought, finer = turns.brought, _DELTA_PART if turns.is_delta else 1
    largest = _LARGEST_PART // finer
    if n_threads > 1:
        fair = int(brought.sum()) // (_PARTS_PER_THREAD * n_threads)
        largest = min(max(fair, _LEAST_PART // finer), largest)

    def part(bounds: tuple[int, int]) -> Batches:
        here = None
        if links is not None:
            lo, hi = (int(turns.offsets[s]) for s in bounds)
            here = links[lo:hi].copy()
            for name in ("parent", "rewritten_by"):
                here[name][here[name] >= 0] -= lo
        return work(read_calls(turns.sessions(*bounds)), here)

    return spread(part, list(runs_of(brought, largest)), n_threads)


@dataclass(frozen=True, slots=True)
class _Work:
    """Everything that is the same for every part."""

    policy: Policy
    facts: SessionFacts
    cap: int
    report: bool
    payloads: tuple[str, ...]
    suffix: bool

    def schema(self, turns: pa.Schema) -> pa.Schema:
        """Of the rows of such turns."""
        return ROWS_SUFFIX if self.suffix else rows_schema(turns, self.payloads)

    def __call__(self, calls: Calls, links: Records | None) -> Batches:
        """Rows and, if asked for, report of the calls of whole sessions."""
        facts = self.facts.of_calls(calls)
        if facts.column("error").null_count < calls.n_sessions:
            calls = calls.mask_sessions(errored(facts))
        calls, aborted = without_aborted(calls, self.policy)
        check_logprobs(calls, self.policy)
        forest = grow(calls)
        if links is None:
            links = policy_links(calls, forest, self.policy)
            measure(calls, forest, links)
        plan: Planned
        shown = None
        if self.policy.on_drift == "splice":
            plan = splice = plan_splices(calls, forest, links, self.policy, self.cap)
            rows = splice_batch(
                calls, forest, links, self.policy, self.cap, splice, facts
            )
            if self.suffix:  # what spliced rows share is known once they are written
                rows = suffix_batch(rows)
            if self.payloads:
                shown = splice_stretches(calls, links, splice)
            written = iter([(plan.rows, rows)])
        else:
            plan = runs = plan_rows(calls, forest, links, self.policy, self.cap)
            written = row_batches(
                calls,
                forest,
                links,
                self.policy,
                self.cap,
                runs,
                facts,
                suffix=self.suffix,
            )
        plan.counted("lost_untrainable")[:] -= aborted
        plan.counted("lost_aborted")[:] += aborted
        plan.counted("turns_by_tokens")[:] = n_by_tokens(calls, self.policy)
        report = report_batch(facts, plan) if self.report else None
        batches = (
            with_payloads(batch, calls, forest, planned, self.payloads, shown)
            for planned, batch in written
        )
        huge = int((plan.rows["n_tokens"] - plan.rows["stored"]).sum()) > _AT_ONCE
        return (batches if huge else list(batches)), report

"""Whether rows keep every promise: violations as a table, all of them."""

from collections.abc import Container, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import overload

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, chosen_int
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import Rows, TableLike, as_table, canonical_rows
from trajkit._arrow.take import picked
from trajkit._streams.lockstep import (
    Beside,
    Source,
    Stream,
    batches_in,
    batches_of,
    is_stream,
    one_batch,
)
from trajkit._streams.session_batches import whole_sessions
from trajkit.errors import SchemaError
from trajkit.pipeline.suffix_layout import full_rows
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.turns.calls import Calls, read_calls
from trajkit.turns.flat_buffers import flat_rows, flat_turns, pieces_of, sessions_of
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import Reward, SessionFacts, session_facts
from trajkit.verification import row_rules, span_rules, splice_rules
from trajkit.verification.context import Case, Violation, violations_table
from trajkit.verification.foreign_rows import foreign_rows, verify_located
from trajkit.verification.row_rules import WeighBy

# Tokens that the calls of one part hold: bounds what is held per token beside the rows.
_PART_TOKENS = 1 << 24


@overload
def verify(
    rows: Stream | pa.RecordBatchReader,
    turns: Source,
    policy: str | Policy | None = ...,
    *,
    reward: Reward = ...,
    sessions: TableLike | None = ...,
    max_row_tokens: int | None = ...,
    weigh_by: WeighBy = ...,
) -> Stream: ...
@overload
def verify(
    rows: TableLike,
    turns: Stream | pa.RecordBatchReader,
    policy: str | Policy | None = ...,
    *,
    reward: Reward = ...,
    sessions: TableLike | None = ...,
    max_row_tokens: int | None = ...,
    weigh_by: WeighBy = ...,
) -> Stream: ...
@overload
def verify(
    rows: TableLike,
    turns: TableLike,
    policy: str | Policy | None = ...,
    *,
    reward: Reward = ...,
    sessions: TableLike | None = ...,
    max_row_tokens: int | None = ...,
    weigh_by: WeighBy = ...,
) -> pa.Table: ...
def verify(
    rows: Source,
    turns: Source,
    policy: str | Policy | None = None,
    *,
    reward: Reward = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    weigh_by: WeighBy = "token",
) -> pa.Table | Stream:
    """Every violation of what rows promise about the turns that they were made of.

    Nothing that `trajkit.linearize` computed is used: rows are compared with the turns
    token by token.

    Parameters
    ----------
    rows : table, or iterator of record batches
        `trajkit.schema.ROWS`, or ``ROWS_SUFFIX``, which is laid out in full part by
        part. Or rows of another system, without ``spans``: input_ids,
        loss_mask (as long as the row, or of its response alone: then it stands at the
        row's end) and, where there are any, logprobs (as the mask), session_id,
        row_index and prompt_length. A turn is located in such a row where its prompt's
        end and its output stand.
    turns : table, or iterator of record batches
        `trajkit.schema.TURNS`, in full or delta form, of all sessions of the rows. An
        iterator (or a RecordBatchReader) is read as the result is, side by side with
        that of ``rows``: each session in one piece, perhaps in several batches, and the
        sessions of the rows in the order of the turns. Rows then need a session_id.
    policy : str or Policy, optional
        Whose promise is to hold. A policy that neither absorbs nor demotes, sets aside
        or leaves rows out trains every token that may be trained exactly once;
        ``slime``, ``trl``, ``segments`` and ``miles`` train no token twice, ``nemo``
        each token of a row's turns once in that row, and no more is asked of them;
        ``polar`` puts raw outputs between stretches of later prompts, whatever they
        were sampled after, and trains each once or says in a row that it cut or dropped
        it. None: exactly once, as ``faithful`` does.
    reward, sessions : optional
        As given to `trajkit.linearize`. Where neither they nor the turns tell, the
        rewards of a session's rows
        need only be alike, or shares of one as the policy spreads it: other rewards that
        differ from row to row are spread after this.
    max_row_tokens : int, optional
        As given to `trajkit.linearize`; what lies beyond need not be trained. None: no
        row was cut.
    weigh_by : {"token", "row", "rollout"}
        What ``row_weight`` is: the row's trained tokens over the rollout's N, as
        `trajkit.linearize` gives it; 1 over the rollout's rows that train something; or
        1 / N. A row that trains nothing weighs 0.

    Returns
    -------
    Table
        `trajkit.schema.VIOLATIONS`, by session and row; empty where all is well. Its
        rules are those of `trajkit.schema.RULES`. Sessions come in the order of
        ``turns``, those without turns behind. For iterators: an iterator of record
        batches, of which there is none where all is well.

    Raises
    ------
    SchemaError
        A table lacks a column, or a column has a type that cannot be taken for its own.
    InvalidTurnsError
        The turns are no sequence of sessions, or ``reward`` or ``sessions`` lack one.
        Of iterators: a session comes back, or the rows have theirs in another order
        than the turns.
    PolicyError
        The policy does not exist, ``max_row_tokens`` is no integer of 1 or more, or
        ``weigh_by`` is none of the three.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [{"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}]
    ... )
    >>> tk.verify(tk.linearize(turns), turns).num_rows
    0
    >>> rows = {"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 0]]}
    >>> found = tk.verify(pa.table(rows), turns)
    >>> found.select(["turn_index", "token", "rule"]).to_pylist()
    [{'turn_index': 0, 'token': 1, 'rule': 'not_trained'}]
    """
    judge = judge_of(policy, reward, sessions, max_row_tokens, weigh_by)
    if is_stream(rows) or is_stream(turns):
        return batches_in(_streamed(rows, turns, judge))
    return judge.found(any_rows(as_table(rows)), as_turns(turns))


def judge_of(
    policy: str | Policy | None,
    reward: Reward,
    sessions: TableLike | None,
    max_row_tokens: int | None,
    weigh_by: WeighBy,
) -> "Judge":
    """What the options of `verify` ask."""
    if max_row_tokens is not None:
        max_row_tokens = chosen_int("max_row_tokens", max_row_tokens, 1)
    check_choice("weigh_by", weigh_by, WeighBy)
    facts = session_facts(reward, sessions)
    known: tuple[str, ...] = ()
    if reward is not None or sessions is not None:
        known = ("reward",) if facts.table is None else ("reward", "group_id")
    chosen = None if policy is None else named_policy(policy)
    return Judge(chosen, max_row_tokens, facts, known, weigh_by)


def _streamed(rows: Source, turns: Source, judge: "Judge") -> Iterator[pa.Table]:
    beside = Beside("rows", numbered(batches_of(rows)), "turns")
    for table in whole_sessions(batches_of(turns)):
        yield judge.found(beside.take(table), table)
    for left in beside.rest():
        yield violations_table(list(session_faults(left.to_batches(), ())))


def any_rows(table: pa.Table, first: int = 0) -> pa.Table:
    """Rows of any system in the types in which they are looked at.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `verify`.
    """
    if "spans" in table.column_names:
        return canonical_rows(table)
    return foreign_rows(table, first)


def numbered(
    batches: Iterable[pa.RecordBatch],
) -> Generator[pa.RecordBatch, None, None]:
    """Batches of rows of any system as `any_rows` of all of them gives them.

    Raises
    ------
    SchemaError
        A row has no session_id, so that it may be of any turn; or some rows have a
        row_index and some have not.
    """
    first, counted = 0, None
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            yield batch  # which is refused where sessions are looked for
            continue
        table = pa.Table.from_batches([batch])
        names = table.column_names
        if "session_id" not in names or table.column("session_id").null_count:
            raise SchemaError(
                "session_id is absent or null in some rows: whose rows they are must be "
                "known of a stream; of a table, all turns are looked through"
            )
        none = "row_index" not in names or table.column("row_index").null_count > 0
        if counted not in (none, None) and table.num_rows:
            raise SchemaError("row_index is null in some rows: expected all or none")
        counted = none if table.num_rows else counted
        yield one_batch(any_rows(table, first))
        first += table.num_rows


def session_faults(
    rows: Iterable[pa.RecordBatch], known: Container[str | None]
) -> Iterator[Violation]:
    """Rows of sessions that are not ``known``, and sessions that do not follow one another.

    Parameters
    ----------
    rows : iterable of RecordBatch
        With session_id and row_index.
    known : container of str
        The sessions that have turns.
    """
    current: str | None = None
    began: set[str | None] = set()
    for batch in rows:
        names = batch.column("session_id").cast(pa.string())
        numbers = batch.column("row_index")
        changes = pc.indices_nonzero(pc.not_equal(names[1:], names[:-1])).to_pylist()
        edges = [0, *(1 + row for row in changes), len(names)] if len(names) else []
        for start, stop in pairwise(edges):
            name = names[start].as_py()
            detail = "the session has no turns"
            for row in range(start, start if name in known else stop):
                yield Violation(
                    name, numbers[row].as_py(), None, None, "session", detail
                )
            if name != current and name in began:
                detail = "the session comes back after another began"
                yield Violation(
                    name, numbers[start].as_py(), None, None, "session", detail
                )
            current = name
            began.add(name)


@dataclass(frozen=True, slots=True)
class Judge:
    """What is asked of rows; see `verify`."""

    policy: Policy | None
    cap: int | None
    facts: SessionFacts
    # what of the facts was given
    known: tuple[str, ...]
    weigh_by: WeighBy

    def found(self, rows: pa.Table, turns: pa.Table) -> pa.Table:
        """The violations in rows as `any_rows` gives them, of these turns."""
        own = "spans" in rows.column_names
        calls = read_calls(turns)
        found: list[Violation] = []
        session = sessions_of(rows, calls)
        names = calls.session_ids.to_pylist()
        if not own and rows.column("session_id").null_count:
            if rows.column("session_id").null_count < rows.num_rows:
                raise SchemaError(
                    "session_id is null in some rows: expected all or none"
                )
            parts = iter([(calls, np.arange(rows.num_rows))])
        else:
            found.extend(session_faults(rows.to_batches(), set(names)))
            parts = _parts(calls, session)
        for part, which in parts:
            here = picked(rows, pa.array(which))
            if own:
                here = full_rows(here)
            case = Case(
                flat_rows(here, align_right=not own),
                flat_turns(part),
                sessions_of(here, part),
                self.policy,
                self.cap,
                self.facts.of_calls(part),
                found,
            )
            if own:
                _verify_own(case, self.known, self.weigh_by)
            else:
                verify_located(case)
        return violations_table(found, names)


def _parts(calls: Calls, session: Rows) -> Iterator[tuple[Calls, Rows]]:
    """The calls in parts of whole sessions, and the rows of each."""
    order = np.argsort(session, kind="stable")
    start = 0
    for part in calls.split(_PART_TOKENS):
        stop = start + part.n_sessions
        lo, hi = np.searchsorted(session[order], [start, stop])
        yield part, order[lo:hi]
        start = stop


def _verify_own(case: Case, known: tuple[str, ...], weigh_by: WeighBy) -> None:
    """The rules of rows whose pieces say what they train."""
    pieces = pieces_of(case.rows.table, case.turns, case.session)
    pieces = span_rules.sound(case, pieces)
    trained = pieces.take(np.flatnonzero(pieces.kind == "trained"))
    row_rules.row_index(case)
    row_rules.lengths(case)
    span_rules.span_tokens(case, pieces)
    span_rules.untrainable(case, pieces)
    span_rules.masks(case, trained)
    span_rules.logprobs(case, trained)
    span_rules.claims(case, pieces)
    if case.splices:
        splice_rules.rows(case, pieces)
        splice_rules.told(case, pieces)
    else:
        span_rules.context(case, trained)
        row_rules.tokens(case, pieces)
    row_rules.prompt_length(case, pieces)
    row_rules.shared_prefixes(case)
    row_rules.sums(case, trained, weigh_by)
    row_rules.facts(case, known=known)
    row_rules.turns(case, pieces)
    row_rules.weight_versions(case, pieces)
    if case.policy is not None and case.policy.flag_scope == "row" and not case.splices:
        row_rules.flags(case, pieces)

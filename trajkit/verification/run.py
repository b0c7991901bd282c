"""`verify`: compare rows with the turns they came from and list every violation."""

from __future__ import annotations  # a signature shows the words below

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import check_choice, chosen_int
from trajkit.errors import SchemaError
from trajkit.files.tables import SessionStore
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import linearize
from trajkit.schema import ROWS, TURNS
from trajkit.schema.engine import Violation, shown
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits, stages
from trajkit.tables.canonical import TableLike, as_table, canonical_rows
from trajkit.tables.columns import empty_batch, take_rows, tuples
from trajkit.tables.ragged import Longs
from trajkit.turns.flat_buffers import FlatRows, flat_rows, flat_turns, sessions_of
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import Reward, SessionFacts, session_facts
from trajkit.turns.sessions import Sessions
from trajkit.verification import rules
from trajkit.verification.foreign_rows import check_located
from trajkit.verification.row_forms import plain_rows

WeighBy: TypeAlias = Literal["token", "row", "rollout", "constant"]


class _Options(TypedDict, total=False):
    reward: Reward
    sessions: TableLike | None
    max_row_tokens: int | None
    weigh_by: WeighBy


def verify(
    rows: TableLike,
    turns: TableLike,
    policy: str | Policy | None = None,
    *,
    reward: Reward = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    weigh_by: WeighBy = "token",
) -> pa.Table:
    """Compare rows with their turns and return every violation.

    Rows are compared token by token. Only the rule ``policy`` calls `trajkit.linearize`.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS`, or rows of another system without ``spans``. The latter
        have the columns that `trajkit.check_rows` takes, and optionally ``session_id`` and
        ``row_index``. Turns are then located by their prompts and outputs; tokens are
        counted without padding.
    turns : table
        `trajkit.schema.TURNS` of all sessions of the rows, in full or delta form.
    policy : str or Policy, optional
        The policy that made the rows: which tokens may train and how often, the kinds of
        spans, and what flags and rewards mean. Rows of sessions without a violation are
        then compared with those that `trajkit.linearize` makes under it (rule ``policy``).
        None: only what is true under every policy is checked. Trained tokens were
        sampled, follow what they were sampled after (or, in a spliced row, the end of
        their prompt) and have the engine's logprobs; which of them train, and how often,
        is not judged.
    reward, sessions : optional
        As given to `trajkit.linearize`. Without them and without rewards in the turns,
        the rewards of a session's rows must be equal, or the policy's shares of one
        reward.
    max_row_tokens : int, optional
        As given to `trajkit.linearize`: tokens beyond it need not be trained. None: no row
        was truncated.
    weigh_by : {"token", "row", "rollout", "constant"}
        What ``row_weight`` means, as for `trajkit.add_weights`: by default what
        `trajkit.linearize` writes. Under "constant", rows that train have one weight,
        whatever it is.

    Returns
    -------
    Table
        `trajkit.schema.VIOLATIONS`, sorted by session and row; empty if the rows are
        correct. Sessions come in the order of ``turns``, sessions without turns last.

    Raises
    ------
    SchemaError, InvalidTurnsError
        A column is missing or has another type. The turns of a session are not contiguous,
        or ``reward`` or ``sessions`` lacks a session.
    PolicyError, ArgumentError
        The policy does not exist, or ``max_row_tokens`` or ``weigh_by`` is not allowed.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [{"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}]
    ... )
    >>> tk.verify(tk.linearize(turns), turns).num_rows
    0
    >>> rows = pa.table({"input_ids": [[1, 2, 3]], "loss_mask": [[0, 1, 0]]})
    >>> found = tk.verify(rows, turns, "faithful")
    >>> found.select(["turn_index", "token", "rule"]).to_pylist()
    [{'turn_index': 0, 'token': 1, 'rule': 'not_trained'}]
    """
    judge = Judge.of(policy, reward, sessions, max_row_tokens, weigh_by)
    return judge.violations(any_rows(as_table(rows)), as_turns(turns))


def verify_batches(
    rows: stages.Source,
    turns: stages.Source,
    policy: str | Policy | None = None,
    **options: Unpack[_Options],
) -> stages.Batches:
    """From record batches to an iterator of record batches; see `verify`.

    The batches of a session of turns are consecutive. Rows need a ``session_id``; their
    sessions may come in any order, because they are first written to a temporary file.
    Violations of sessions without turns, and of those that are not contiguous, come last.
    """
    judge = Judge.of(policy, **options)

    def violations() -> Iterator[pa.Table]:
        found: list[Violation] = []
        nothing = TURNS.empty_table()
        with ExitStack() as stack:
            batches = _contiguous(_named(stages.batches_of(rows)), found)
            store = SessionStore(batches, str, None, stack)
            empty = store.empty if store.empty.column_names else ROWS.empty_table()
            for own in stages.whole_sessions(stages.batches_of(turns)):
                ids = own.column("session_id").cast(pa.string())
                names = pc.unique(ids).to_pylist()
                theirs = chain.from_iterable(map(store.tables, names))
                yield judge.violations(stages.concat([empty, *theirs]), own)
                for name in names:
                    store.starts.pop(name, None)
            for name in store.starts:
                for theirs in store.tables(name):
                    yield judge.violations(theirs, nothing)
        if found:
            yield rules.violations_table(found)

    return stages.batches_in(violations())


def any_rows(table: pa.Table, first: int = 0) -> pa.Table:
    """Rows of trajkit in canonical form, or rows of another system as `plain_rows`."""
    own = "spans" in table.column_names
    return canonical_rows(table) if own else plain_rows(table, first)


def _named(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Batches of rows as `any_rows`, which counts them; each row names its session."""
    first, form = 0, None
    for table in map(as_table, batches):
        names = table.column_names
        if "session_id" not in names or table.column("session_id").null_count:
            raise SchemaError(
                "session_id is absent or null in some rows: give it to every row of a "
                "stream. In a table without it, rows are searched in all turns"
            )
        unnumbered = "row_index" not in names or table.column("row_index").null_count
        now = "spans" in names, bool(unnumbered)
        if table.num_rows and form not in (None, now):
            raise SchemaError(
                "some rows have a row_index or spans, and some have not: verify rows of "
                "several forms one by one"
            )
        form = now if table.num_rows else form
        made = any_rows(table, first)
        yield from made.to_batches() or [empty_batch(made.schema)]
        first += table.num_rows


def _contiguous(
    rows: Iterable[pa.RecordBatch], found: list[Violation]
) -> Iterator[pa.RecordBatch]:
    """Pass rows on, and report those of a session that continues after another began."""
    current, began = None, set[str | None]()
    for batch in rows:
        for name, row in tuples(batch, "session_id", "row_index"):
            if name != current and name in began:
                detail = "the session continues after another session began"
                found.append(Violation("session", detail, name, row))
            current = name
            began.add(name)
        yield batch


@dataclass(frozen=True, slots=True)
class Judge:
    policy: Policy | None
    cap: int | None
    facts: SessionFacts
    # names of the metadata that the caller gave
    known: tuple[str, ...]
    weigh_by: WeighBy

    @classmethod
    def of(
        cls,
        policy: str | Policy | None,
        reward: Reward = None,
        sessions: TableLike | None = None,
        max_row_tokens: int | None = None,
        weigh_by: WeighBy = "token",
    ) -> Judge:
        if max_row_tokens is not None:
            max_row_tokens = chosen_int("max_row_tokens", max_row_tokens, 1)
        check_choice("weigh_by", weigh_by, WeighBy)
        facts = session_facts(reward, sessions)
        known: tuple[str, ...] = ()
        if reward is not None or sessions is not None:
            known = ("reward",) if facts.table is None else ("reward", "group_id")
        chosen = None if policy is None else named_policy(policy)
        return cls(chosen, max_row_tokens, facts, known, weigh_by)

    def violations(self, rows: pa.Table, turns: pa.Table) -> pa.Table:
        """Violations in rows that `any_rows` has cast, compared with these turns."""
        has_spans = "spans" in rows.column_names
        calls = Sessions.of(turns)
        names, n_null = calls.ids.to_pylist(), rows.column("session_id").null_count
        found: list[Violation] = []
        if has_spans or not n_null:
            deque(_contiguous(rows.to_batches(), found), 0)
            sessions = sessions_of(rows, calls)
            alone = take_rows(rows, pa.array(np.flatnonzero(sessions < 0)))
            for place in tuples(alone, "session_id", "row_index"):
                found.append(Violation("session", "the session has no turns", *place))
            parts = _parts(calls, sessions)
        elif n_null == rows.num_rows:
            parts = iter([(calls, np.arange(rows.num_rows))])
        else:
            raise SchemaError("session_id is null in some rows: expected all or none")
        for part, which in parts:
            here = take_rows(rows, pa.array(which))
            case = rules.Case(
                flat_rows(here),
                flat_turns(part),
                sessions_of(here, part),
                self.policy,
                self.cap,
                self.facts.of_sessions(part),
                has_spans,
                found,
            )
            if has_spans:
                rules.check_rows(case, self.known, self.weigh_by)
            else:
                check_located(case)
            _compare(case)
        return rules.violations_table(found, names)


def _parts(calls: Sessions, session: Longs) -> Iterator[tuple[Sessions, Longs]]:
    order = np.argsort(session, kind="stable")
    start = 0
    for part in calls.split(limits.VERIFY_TOKENS):
        stop = start + len(part.ids)
        lo, hi = np.searchsorted(session[order], [start, stop])
        yield part, order[lo:hi]
        start = stop


_UNKNOWN = ("last_turn", "turns", "step")
_OTHERS = (
    *("prompt_length", "finish_reason", "truncated", "use_tool", "ill_formed"),
    *("segment_kind", *_UNKNOWN),
)
"""Columns that are compared beside tokens, mask and spans; those of `_UNKNOWN` unless one
of the two is null.
"""
_SPAN = ("kind", "start", "stop", "turn_index", "output_start", "output_stop")

_Row: TypeAlias = dict[str, Any]
"""``ids`` and ``mask`` of a row as arrays, its columns, and its spans as tuples."""
_Pair: TypeAlias = tuple[_Row | None, _Row | None]


def _compare(case: rules.Case) -> None:
    if case.policy is None or (case.violations and not case.has_spans):
        return
    calls, word = case.turns.calls, f"policy {case.policy.name!r}"
    made = linearize(calls, case.policy, max_row_tokens=case.cap, sessions=case.facts)
    named = case.has_spans or not case.rows.table["session_id"].null_count
    here, due = (_rows(one, named=named) for one in (case.rows, flat_rows(made)))
    wrong = {one.session_id for one in case.violations}
    for name in [one for one in due | here if one not in wrong]:
        for row, other in _pairs(here[name], due[name], case.has_spans):
            line: _Row = row or other or {}
            place = line["session_id"], line["row_index"]
            for detail, *where in _differences(row, other, word, case.has_spans):
                case.violations.append(Violation("policy", detail, *place, *where))


def _rows(rows: FlatRows, *, named: bool) -> dict[str | None, list[_Row]]:
    """The rows of each session; all under None if they are not ``named``."""
    wanted = ("session_id", "row_index", "spans", *_OTHERS)
    names = [name for name in wanted if name in rows.table.column_names]
    found = defaultdict(list)
    for k, line in enumerate(rows.table.select(names).to_pylist()):
        line["ids"] = rows.ids[k]
        line["mask"] = rows.mask[rows.ids.offsets[k] : rows.ids.offsets[k + 1]]
        spans = line.get("spans") or ()
        line["spans"] = [tuple(span[name] for name in _SPAN) for span in spans]
        found[line["session_id"] if named else None].append(line)
    return found


def _pairs(here: list[_Row], due: list[_Row], has_spans: bool) -> list[_Pair]:
    """Rows and those of the policy, by row_index; those of other systems by equal tokens,
    else by the longest common prefix.
    """

    def key(row: _Row) -> object:
        of_tokens = row["ids"].tobytes(), row["mask"].tobytes()
        return row["row_index"] if has_spans else of_tokens

    waiting = defaultdict(list)
    for row in reversed(due):
        waiting[key(row)].append(row)
    pairs: list[_Pair] = []
    for row in here:
        equal = waiting[key(row)]
        pairs.append((row, equal.pop() if equal else None))
    rest = [row for rows in waiting.values() for row in rows]
    for k, row in enumerate([] if has_spans else here):
        if pairs[k][1] is None:
            shared = [_core.lcp(row["ids"], one["ids"]) for one in rest]
            if any(shared):
                pairs[k] = row, rest.pop(int(np.argmax(shared)))
    return [*pairs, *((None, row) for row in rest)]


def _differences(
    row: _Row | None, due: _Row | None, word: str, has_spans: bool
) -> Iterator[tuple[Any, ...]]:
    """What is wrong with a row whose policy, called ``word``, makes the row ``due``: the
    words, and the turn and the token, if there is one.
    """
    if due is None:
        yield (f"{word} makes no such row",)
        return
    n = len(due["ids"])
    if row is None:
        what = f"a row of {rules.count(n)}, {int(due['mask'].sum())} trained"
        yield (f"{word} makes {what}, which is not there",)
        return
    shared = _core.lcp(row["ids"], due["ids"])
    equal = shared == len(row["ids"]) == n
    if not equal:
        here, there = (
            f"id {ids[shared]}" if shared < len(ids) else "no token"
            for ids in (row["ids"], due["ids"])
        )
        other = "" if has_spans else f" of its row {due['row_index']}"
        sizes = f"({rules.count(len(row['ids']))}, expected {n})"
        yield f"{here}: {word} has {there} there{other} {sizes}", None, shared
    turns = _turns_of(due, shared)
    turns = np.where(turns < 0, _turns_of(row, shared), turns)
    trained = row["mask"][:shared]
    at = np.flatnonzero(trained != due["mask"][:shared])
    for first, length in rules.consecutive(at, trained[at], turns[at]):
        token = int(at[first])
        what = f"{word} does not train" if trained[token] else f"{word} trains"
        turn = int(turns[token]) if turns[token] >= 0 else None
        yield f"{rules.count(length)} that {what}", turn, token
    if not (has_spans and equal):
        return
    for column in _OTHERS:
        given, expected = row[column], due[column]
        unknown = column in _UNKNOWN and None in (given, expected)
        if given != expected and not unknown:
            yield (f"{column} is {shown(given)}: {word} has {shown(expected)}",)
    if len(at):
        return
    mine, theirs = (Counter[Any](one["spans"]) for one in (row, due))
    alone = [*(mine - theirs), *(theirs - mine)]
    for span in alone:
        kind, start, stop, turn, first, last = span
        owner = "the row has" if span in mine else f"{word} has"
        detail = f"{owner} {kind} {start}:{stop} (output {first}:{last}) alone"
        yield detail, turn, start
    if not alone and row["spans"] != due["spans"]:
        yield (f"{word} has the spans in another order",)


def _turns_of(row: _Row, n: int) -> Longs:
    found = np.full(n, -1, np.int64)
    for _, start, stop, turn, *_ in row["spans"]:
        found[start:stop] = turn
    return found

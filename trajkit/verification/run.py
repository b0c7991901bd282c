"""`verify`: compare rows with the turns they came from and list every violation."""

from __future__ import annotations  # a signature shows the words below

import os
from collections import Counter, defaultdict
from collections.abc import (
    Container,
    Generator,
    Iterable,
    Iterator,
    Mapping,
)
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict, Unpack

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import check_choice, chosen_int
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.files import run as file_run
from trajkit.files import sources
from trajkit.files import tables as file_tables
from trajkit.files.formats import paths_in
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import linearize
from trajkit.schema import ROWS
from trajkit.schema.engine import Violation, shown
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits, stages
from trajkit.tables.canonical import TableLike, as_table, canonical_rows
from trajkit.tables.columns import empty_batch, take_rows
from trajkit.tables.ragged import Longs
from trajkit.turns.flat_buffers import FlatRows, flat_rows, flat_turns, sessions_of
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import Reward, SessionFacts, session_facts
from trajkit.turns.sessions import Sessions
from trajkit.verification import rules
from trajkit.verification.foreign_rows import check_located, foreign_rows
from trajkit.verification.row_forms import is_rows, plain_rows

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
        need ``input_ids`` and ``loss_mask``, which covers the row or only its response;
        ``logprobs`` (as long as the mask), ``session_id``, ``row_index`` and
        ``prompt_length`` are optional. Turns are then located by their prompts and
        outputs.
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

    The batches of a session are consecutive, and the rows have a ``session_id`` and
    their sessions in the order of the turns; else it is an InvalidTurnsError.
    """
    judge = Judge.of(policy, **options)

    def violations() -> Iterator[pa.Table]:
        lead = stages.whole_sessions(stages.batches_of(turns))
        follows = numbered(stages.batches_of(rows))
        for own, theirs in stages.in_step(lead, follows):
            if own is not None:
                yield judge.violations(theirs, own)
            else:
                faults = [*session_faults(theirs.to_batches(), ())]
                yield rules.violations_table(faults)

    return stages.batches_in(violations())


def any_rows(table: pa.Table, first: int = 0) -> pa.Table:
    """Rows of any system, cast to the types that the checks expect."""
    if "spans" in table.column_names:
        return canonical_rows(table)
    names = table.column_names
    if is_rows(names) and not {"input_ids", "loss_mask"} <= {*names}:
        table = plain_rows(table)
    return foreign_rows(table, first)


def numbered(
    batches: Iterable[pa.RecordBatch],
) -> Generator[pa.RecordBatch, None, None]:
    """Cast batches of rows with `any_rows`, and number rows without a row_index."""
    first, counted = 0, None
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            yield batch  # `whole_sessions` raises SchemaError for it
            continue
        table = pa.Table.from_batches([batch])
        names = table.column_names
        if "session_id" not in names or table.column("session_id").null_count:
            raise SchemaError(
                "session_id is absent or null in some rows: a stream of rows needs it. "
                "Pass a table to search all turns"
            )
        none = "row_index" not in names or table.column("row_index").null_count > 0
        if counted not in (none, None) and table.num_rows:
            raise SchemaError("row_index is null in some rows: expected all or none")
        counted = none if table.num_rows else counted
        # those that `write_rows` stored with dedup wait for their session
        made = table if "suffix_mask" in names else any_rows(table, first)
        yield from made.to_batches() or [empty_batch(made.schema)]
        first += table.num_rows


def session_faults(
    rows: Iterable[pa.RecordBatch], known: Container[str | None]
) -> Iterator[Violation]:
    """Report rows whose session is not ``known``, and sessions that are not contiguous."""
    current, began = None, set[str | None]()
    for batch in rows:
        names = batch.column("session_id").to_pylist()
        for name, row in zip(names, batch.column("row_index").to_pylist(), strict=True):
            if name not in known:
                yield Violation("session", "the session has no turns", name, row)
            if name != current and name in began:
                detail = "the session continues after another session began"
                yield Violation("session", detail, name, row)
            current = name
            began.add(name)


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
            found.extend(session_faults(rows.to_batches(), set(names)))
            parts = _parts(calls, sessions_of(rows, calls))
        elif n_null == rows.num_rows:
            parts = iter([(calls, np.arange(rows.num_rows))])
        else:
            raise SchemaError("session_id is null in some rows: expected all or none")
        for part, which in parts:
            here = take_rows(rows, pa.array(which))
            case = rules.Case(
                flat_rows(here, align_right=not has_spans),
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


def verify_file(
    rows: str | os.PathLike[str],
    turns: sources.Paths,
    output: str | os.PathLike[str],
    policy: str | Policy | None = None,
    **options: Any,
) -> dict[str, int]:
    """Write the violations in files of rows, as `trajkit.verify` of the tables finds them.

    Parameters
    ----------
    rows : path
        A file or a directory of rows, of trajkit or another system. Without a session_id
        they are compared with all turns, so these, and all turns, are read into memory.
    turns : path
        As for `trajkit.read_turns`.
    output : path
        The file of the violations, or a directory of parts, as for `trajkit.run`.
        Violations of sessions as such (no turns, not contiguous) come first.
    policy, **options
        Of `trajkit.verify`; those of `trajkit.run` are about the turns. Rows of rejected
        sessions are skipped.

    Returns
    -------
    dict of str to int
        ``turns``, ``violations``, and ``rejected`` if requested.

    Raises
    ------
    FormatError, SchemaError, InvalidTurnsError, ArgumentError
        As for `trajkit.verify` and `trajkit.run`. Without a policy there are no rows;
        without a session_id they need a file as output, and no file of rejected sessions.
    """
    of_verify = {n: options.pop(n) for n in _Options.__annotations__ if n in options}
    judge = Judge.of(policy, **of_verify)
    path, inputs = Path(rows), [sources.Input(Path(rows))]
    index = file_tables.index_sessions(paths_in(path), None, None)
    if not index.turns and judge.policy is None:
        raise InvalidTurnsError(
            f"{path}: no rows, nothing to do. With a policy, its rows are missing there"
        )
    if None in index.turns:
        if len(index.turns) > 1:
            raise SchemaError(
                "session_id is null or no text in some rows: expected all or none"
            )
        if sources.is_parts(output) or options.get("rejected") is not None:
            raise ArgumentError(
                f"the rows of {path} have no session_id, so they are verified together: "
                "pass a file as output, and no file for rejected sessions"
            )
        given = [*sources.turns_inputs(sources.paths_of(turns) or []), *inputs]
        sources.check_outputs({"violations": (output, "violations")}, given)
        names = {"format", "nonfinite_logprobs", "session_prefix"} & {*options}
        table = file_tables.read_turns(turns, **{name: options[name] for name in names})
        own = file_tables.read_any_rows(path)
        try:
            own = any_rows(own)
        except SchemaError as error:
            raise SchemaError(f"{path}: {error}") from None
        found = judge.violations(own, table)
        file_tables.write_table(found, output)
        return {"turns": table.num_rows, "violations": found.num_rows}
    watch = options.get("watch") or file_run.Watch()

    def batches() -> Iterator[pa.RecordBatch]:
        n, plan = index.batch_rows, file_tables.rows_plan
        tables = file_tables.iter_tables(path, batch_rows=n, plan=plan)
        return numbered(batch for table in tables for batch in table.to_batches())

    with ExitStack() as stack:
        folder = file_run.folder_of(output)
        store = file_tables.SessionStore(batches(), str, folder, stack)
        empty = file_tables.full(store.empty if index.turns else ROWS.empty_table())
        faults: Iterator[pa.RecordBatch] = iter([])

        def begins(turns: file_tables.SessionIndex, done: int) -> None:
            nonlocal faults
            watch.begins(turns, done)
            alone = index.scattered or store.starts.keys() - turns.turns.keys()
            if alone and not done:  # a run that continues has written these
                faults = _violations(session_faults(batches(), turns.turns))

        def stage(turns: pa.Table) -> Mapping[str, file_run.Made]:
            names = pc.unique(turns.column("session_id")).to_pylist()
            sessions = ([*store.tables(name)] for name in names)
            own = (file_tables.full(stages.concat(one)) for one in sessions if one)
            found = judge.violations(stages.concat([empty, *own]), turns)
            return {"turns": turns, "violations": chain(faults, file_run.whole(found))}

        job = {
            "stage": "verify",
            "rows": file_run.fingerprint([path], paths_in(path)),
            "policy": None if judge.policy is None else asdict(judge.policy),
            "reward": file_run.facts_digest(judge.facts),
            "max_row_tokens": judge.cap,
            "weigh_by": judge.weigh_by,
        }
        options |= {"watch": file_run.Watch(begins, watch.advances), "inputs": inputs}
        return file_run.run(turns, stage, {"violations": output}, resume=job, **options)


def _violations(found: Iterator[Violation]) -> Iterator[pa.RecordBatch]:
    while some := [*islice(found, limits.VIOLATIONS)]:
        yield from rules.violations_table(some).to_batches()

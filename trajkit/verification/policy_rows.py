"""Compare rows with those that a policy makes of the same turns.

The other checks ask whether rows are right, and use nothing that `trajkit.linearize`
computed. This one asks whether they are the rows of this policy, where those checks find
nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, TypeAlias

import numpy as np

from trajkit import _core
from trajkit.rows.linearize import linearize
from trajkit.schema.engine import Violation, shown
from trajkit.tables.ragged import Ints, Longs
from trajkit.turns.flat_buffers import FlatRows, flat_rows
from trajkit.verification.context import Case, consecutive, count

_UNKNOWN = ("last_turn", "turns")
_OTHERS = (
    *("prompt_length", "finish_reason", "truncated", "use_tool", "ill_formed"),
    *("segment_kind", *_UNKNOWN),
)
"""Columns that are compared beside tokens, mask and spans; those of `_UNKNOWN` may be
null.
"""
_SPAN = ("kind", "start", "stop", "turn_index", "output_start", "output_stop")

_Row: TypeAlias = dict[str, Any]
"""``ids`` and ``mask`` of a row as arrays, its columns, and its spans as tuples."""


def compare(case: Case, *, own: bool) -> None:
    """Report where the rows of sessions without a violation are not those of the policy."""
    if case.policy is None or (case.found and not own):
        return
    calls, word = case.turns.calls, f"policy {case.policy.name!r}"
    made = linearize(calls, case.policy, max_row_tokens=case.cap, sessions=case.facts)
    named = own or not case.rows.table["session_id"].null_count
    here, due = (_rows(one, named=named) for one in (case.rows, flat_rows(made)))
    wrong = {one.session_id for one in case.found}
    for name in [one for one in due | here if one not in wrong]:
        for row, other in (_by_index if own else _by_tokens)(here[name], due[name]):
            line: _Row = row or other or {}
            place = line["session_id"], line["row_index"]
            for detail, *where in _differences(row, other, word, own=own):
                case.found.append(Violation("policy", detail, *place, *where))


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


_Pairs: TypeAlias = list[tuple[_Row | None, _Row | None]]


def _by_index(here: list[_Row], due: list[_Row]) -> _Pairs:
    of_index = {row["row_index"]: row for row in due}
    pairs: _Pairs = [(row, of_index.pop(row["row_index"], None)) for row in here]
    return [*pairs, *((None, row) for row in of_index.values())]


def _by_tokens(here: list[_Row], due: list[_Row]) -> _Pairs:
    """Rows and those of the policy, by equal tokens, else by the longest common prefix."""

    def key(row: _Row) -> tuple[bytes, bytes]:
        return row["ids"].tobytes(), row["mask"].tobytes()

    same = defaultdict(list)
    for row in reversed(due):
        same[key(row)].append(row)
    pairs: _Pairs = [
        (row, same[key(row)].pop() if same[key(row)] else None) for row in here
    ]
    rest = [row for rows in same.values() for row in rows]
    for k, (row, other) in enumerate(pairs):
        if row is not None and other is None and rest:
            shared = [_core.lcp(row["ids"], one["ids"]) for one in rest]
            if any(shared):
                pairs[k] = row, rest.pop(int(np.argmax(shared)))
    return [*pairs, *((None, row) for row in rest)]


def _differences(
    row: _Row | None, due: _Row | None, word: str, *, own: bool
) -> Iterator[tuple[Any, ...]]:
    """What is wrong with a row whose policy, called ``word``, makes the row ``due``: the
    words, and the turn and the token, if there is one.
    """
    if due is None:
        yield (f"{word} makes no such row",)
        return
    n = len(due["ids"])
    if row is None:
        what = f"a row of {n} tokens, {int(due['mask'].sum())} trained"
        yield (f"{word} makes {what}, which is not there",)
        return
    shared = _core.lcp(row["ids"], due["ids"])
    equal = shared == len(row["ids"]) == n
    if not equal:
        here, there = (_token(one["ids"], shared) for one in (row, due))
        other = "" if own else f" of its row {due['row_index']}"
        sizes = f"({len(row['ids'])} tokens, expected {n})"
        yield f"{here}: {word} has {there} there{other} {sizes}", None, shared
    turns = _turns_of(due, shared)
    turns = np.where(turns < 0, _turns_of(row, shared), turns)
    trained = row["mask"][:shared]
    at = np.flatnonzero(trained != due["mask"][:shared])
    for first, length in consecutive(at, trained[at], turns[at]):
        token = int(at[first])
        what = f"{word} does not train" if trained[token] else f"{word} trains"
        turn = int(turns[token]) if turns[token] >= 0 else None
        yield f"{count(length)} that {what}", turn, token
    if not (own and equal):
        return
    for column in _OTHERS:
        given, expected = row[column], due[column]
        if given != expected and not (given is None and column in _UNKNOWN):
            yield (f"{column} is {shown(given)}: {word} has {shown(expected)}",)
    if len(at):
        return
    mine, theirs = Counter(row["spans"]), Counter(due["spans"])
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


def _token(ids: Ints, at: int) -> str:
    return f"token {ids[at]}" if at < len(ids) else "no token"

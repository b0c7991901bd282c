"""Compare rows with those that a policy makes of the same turns.

The other checks ask whether rows are right, and use nothing that `trajkit.linearize`
computed. This one asks whether they are the rows of this policy, where those checks find
nothing.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.rows.linearize import linearize
from trajkit.schema.engine import Violation, shown
from trajkit.turns.flat_buffers import FlatRows, flat_rows
from trajkit.verification.context import Case, consecutive, count

Found = Iterator[Violation]

_UNKNOWN = ("last_turn", "turns")
_OTHERS = (
    *("prompt_length", "finish_reason", "truncated", "use_tool", "ill_formed"),
    *("segment_kind", *_UNKNOWN),
)
"""Columns that are compared beside tokens, mask and spans; those of `_UNKNOWN` may be
null.
"""


def compare(case: Case, *, own: bool) -> None:
    """Report where the rows of sessions without a violation are not those of the policy."""
    if case.policy is None:
        return
    calls = case.turns.calls
    wrong = {one.session_id for one in case.found}
    if not own and case.found:
        return
    made: pa.Table = linearize(
        calls, case.policy, max_row_tokens=case.cap, sessions=case.facts
    )
    due = flat_rows(made)
    names: list[str | None] = made["session_id"].to_pylist()
    if not own and case.rows.table["session_id"].null_count:
        names = [None] * len(names)
    rows_of: dict[str | None, list[int]] = defaultdict(list)
    due_of: dict[str | None, list[int]] = defaultdict(list)
    for row, name in enumerate(case.rows.table["session_id"].to_pylist()):
        rows_of[name].append(row)
    for row, name in enumerate(names):
        due_of[name].append(row)
    for name in due_of | rows_of:
        if name in wrong:
            continue
        pairs = _by_index if own else _by_tokens
        pair = pairs(case.rows, rows_of[name], due, due_of[name])
        case.found.extend(_differences(case, due, name, pair, own=own))


_Pairs = list[tuple[int | None, int | None]]


def _by_index(
    rows: FlatRows, here: list[int], due: FlatRows, wanted: list[int]
) -> _Pairs:
    """Rows and those of the policy, by ``row_index``."""
    numbers = due.table["row_index"].to_pylist()
    of_index = {numbers[k]: k for k in wanted}
    own = rows.table["row_index"].to_pylist()
    pairs: _Pairs = [(row, of_index.pop(own[row], None)) for row in here]
    return [*pairs, *((None, k) for k in of_index.values())]


def _by_tokens(
    rows: FlatRows, here: list[int], due: FlatRows, wanted: list[int]
) -> _Pairs:
    """Rows and those of the policy, by equal tokens, else by the longest common prefix."""
    keys: dict[bytes, list[int]] = defaultdict(list)
    for k in reversed(wanted):
        keys[due.ids[k].tobytes() + _mask(due, k).tobytes()].append(k)
    pairs: _Pairs = []
    others = []
    for row in here:
        same = keys[rows.ids[row].tobytes() + _mask(rows, row).tobytes()]
        if same:
            pairs.append((row, same.pop()))
        else:
            others.append(row)
    rest = [k for same in keys.values() for k in same]
    for row in others:
        shared = [_core.lcp(rows.ids[row], due.ids[k]) for k in rest]
        best = int(np.argmax(shared)) if shared else 0
        near = rest.pop(best) if shared and shared[best] else None
        pairs.append((row, near))
    return [*pairs, *((None, k) for k in sorted(rest))]


def _differences(
    case: Case, due: FlatRows, name: str | None, pairs: _Pairs, *, own: bool
) -> Found:
    """The violations of the rows of one session."""
    assert case.policy is not None
    word = f"policy {case.policy.name!r}"
    numbers = case.rows.table["row_index"].to_pylist()
    wanted = due.table["row_index"].to_pylist()
    for row, k in pairs:
        if row is None:
            assert k is not None
            detail = (
                f"{word} makes a row of {due.ids.lengths[k]} tokens, "
                f"{int(_mask(due, k).sum())} trained, which is not there"
            )
            session = due.table["session_id"][k].as_py()
            yield Violation("policy", detail, session, wanted[k])
            continue
        if k is None:
            detail = f"{word} makes no such row"
            yield Violation("policy", detail, name, numbers[row])
            continue
        ids, expected = case.rows.ids[row], due.ids[k]
        shared = _core.lcp(ids, expected)
        other = "" if own else f" of its row {wanted[k]}"
        if shared < max(len(ids), len(expected)):
            detail = (
                f"{_token(ids, shared)}: {word} has {_token(expected, shared)} there"
                f"{other} ({len(ids)} tokens, expected {len(expected)})"
            )
            yield Violation("policy", detail, name, numbers[row], None, shared)
        yield from _masks(case, due, name, row, k, shared, word)
        if own and shared == max(len(ids), len(expected)):
            for column in _OTHERS:
                tables = (case.rows.table, row), (due.table, k)
                here, there = (table[column][line].as_py() for table, line in tables)
                if here != there and not (here is None and column in _UNKNOWN):
                    detail = f"{column} is {shown(here)}: {word} has {shown(there)}"
                    yield Violation("policy", detail, name, numbers[row])
    if own:
        yield from _spans(case, due, name, pairs, word)


def _masks(
    case: Case,
    due: FlatRows,
    name: str | None,
    row: int,
    k: int,
    shared: int,
    word: str,
) -> Found:
    """Tokens of the common prefix that one of two rows trains."""
    here, there = _mask(case.rows, row)[:shared], _mask(due, k)[:shared]
    index = case.rows.table["row_index"][row].as_py()
    turns = _turns_of(due.table, k, shared)
    if "spans" in case.rows.table.column_names:
        turns = np.where(turns < 0, _turns_of(case.rows.table, row, shared), turns)
    at = np.flatnonzero(here != there)
    group = here[at].astype(np.int64) * (1 << 32) + turns[at]
    for first, n in consecutive(at, group):
        token = int(at[first])
        what = f"{word} does not train" if here[token] else f"{word} trains"
        turn = int(turns[token]) if turns[token] >= 0 else None
        yield Violation("policy", f"{count(n)} that {what}", name, index, turn, token)


def _spans(
    case: Case, due: FlatRows, name: str | None, pairs: _Pairs, word: str
) -> Found:
    """Kinds of spans of the same tokens that differ, where masks are equal."""
    for row, k in pairs:
        if row is None or k is None:
            continue
        if not np.array_equal(case.rows.ids[row], due.ids[k]):
            continue
        if not np.array_equal(_mask(case.rows, row), _mask(due, k)):
            continue
        index = case.rows.table["row_index"][row].as_py()
        here, there = (
            _span_keys(t, r) for t, r in ((case.rows.table, row), (due.table, k))
        )
        alone = [*(Counter(here) - Counter(there)), *(Counter(there) - Counter(here))]
        for key in alone:
            kind, start, stop, turn, first, last = key
            owner = "the row has" if key in here else f"{word} has"
            detail = f"{owner} {kind} {start}:{stop} (output {first}:{last}) alone"
            yield Violation("policy", detail, name, index, turn, start)
        if not alone and here != there:
            detail = f"{word} has the spans in another order"
            yield Violation("policy", detail, name, index)


def _span_keys(table: pa.Table, row: int) -> list[tuple[Any, ...]]:
    names = ("kind", "start", "stop", "turn_index", "output_start", "output_stop")
    spans = table["spans"][row].as_py() or []
    return [tuple(span[one] for one in names) for span in spans]


def _turns_of(table: pa.Table, row: int, n: int) -> npt.NDArray[np.int64]:
    """The turn of each token that a span names; -1 for the others."""
    found = np.full(n, -1, np.int64)
    for span in table["spans"][row].as_py() or []:
        found[span["start"] : span["stop"]] = span["turn_index"]
    return found


def _mask(rows: FlatRows, row: int) -> npt.NDArray[np.bool_]:
    return rows.mask[rows.ids.offsets[row] : rows.ids.offsets[row + 1]]


def _token(ids: npt.NDArray[np.int32], at: int) -> str:
    return f"token {ids[at]}" if at < len(ids) else "no token"

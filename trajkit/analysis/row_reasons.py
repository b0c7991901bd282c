"""`why`: explain why each row of a policy begins where it does."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit.analysis.drift import classify_drift
from trajkit.analysis.tokenizer import Tokenizer
from trajkit.errors import SchemaError
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import linearize
from trajkit.rows.links import link
from trajkit.schema import EMPTY_KINDS, ROW_REASONS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, canonical_rows
from trajkit.tables.ragged import Ragged
from trajkit.tables.take import tuples
from trajkit.turns.flat_buffers import flat_rows
from trajkit.turns.records import as_turns
from trajkit.verification.row_forms import is_rows, plain_rows
from trajkit.verification.rules import longest_shared

_NO_PARENT = {
    "history_replaced": "its request does not extend its agent's history",
    "root": "no earlier turn matches its request",
}
_CAUSES = {
    "diverged": "they do not agree again",
    "head_dropped": "the prompt drops tokens there",
    "middle_edited": "the tokens there changed",
    "tail_changed": "the last reply came back changed",
    "truncated": "the prompt ends there",
}
_LOSSES = {
    "absorbed": "lost to drift",
    "cut": "beyond max_row_tokens",
    "no_splice_point": "after the row's end",
}


def why(
    turns: TableLike,
    policy: str | Policy = "faithful",
    *,
    tokenizer: Tokenizer | None = None,
) -> pa.Table:
    """Explain each row of a policy: the turn that opens it, and the reason.

    A row may begin with turns of an earlier row. It is opened by its first turn that no
    earlier row of the session contains.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form. Or `trajkit.schema.ROWS`:
        then a row is compared with its ``parent_row``, ``parent`` is the turn in
        whose reply they part, and ``policy`` and ``tokenizer`` are not used. Rows of
        other systems, as `trajkit.check_rows` takes them, are compared with the earlier
        row (of their session, if they name it) that shares most.
    policy : str or Policy
        As for `trajkit.linearize`.
    tokenizer : Tokenizer, optional
        As for `trajkit.classify_drift`: causes are then found by comparing texts.

    Returns
    -------
    Table
        `trajkit.schema.ROW_REASONS`, one line per row, in the order of the rows.

    Raises
    ------
    SchemaError, InvalidTurnsError, PolicyError
        As `trajkit.linearize`; a row names no turn.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [
    ...         {"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]},
    ...         {"session_id": "a", "prompt_ids": [1, 2, 9], "output_ids": [4]},
    ...     ]
    ... )
    >>> for line in tk.analysis.why(turns, "strict")["sentence"].to_pylist():
    ...     print(line)
    row 0 opens at turn 0: it is the session's first turn. It trains 2 tokens.
    row 1 opens at turn 1: no earlier turn matches its request. It trains 1 token.
    """
    table = as_table(turns)
    names = table.column_names
    if is_rows(names):
        if "spans" not in names:
            return _of_foreign(plain_rows(table))
        rows = canonical_rows(table)
        return _lines(rows, _parting(rows))
    chosen = named_policy(policy)
    table = as_turns(table)
    links = link(table, chosen)
    rows = linearize(table, chosen)
    return _lines(rows, _departing(table, links, tokenizer))


def _of_foreign(rows: pa.Table) -> pa.Table:
    """Where each row leaves the earlier row that shares most, from tokens alone."""
    flat = flat_rows(rows, align_right=True)
    names = rows["session_id"].to_pylist()
    numbers = rows["row_index"].to_pylist()
    places = defaultdict(list)
    for k, name in enumerate(names):
        places[name].append(k)
    lines: list[dict[str, Any]] = [{}] * rows.num_rows
    for own in places.values():
        first, shared = longest_shared(flat.ids, np.array(own))
        for k, other, n in zip(own, first.tolist(), shared.tolist(), strict=True):
            mask = flat.mask[flat.ids.offsets[k] : flat.ids.offsets[k + 1]]
            trained = int(mask.sum())
            runs = int(np.diff(mask.astype(np.int8), prepend=0).clip(0).sum())
            words = f"it shares its first {_count(n)} with row {numbers[own[other]]}"
            words = words if n else "it shares no token with an earlier row"
            ranges = f" in {runs} ranges" if runs > 1 else ""
            lines[k] = {
                "session_id": names[k],
                "row_index": numbers[k],
                "opened_by": "branch" if n else "no_parent",
                "tokens_trained": trained,
                "tokens_lost": 0,
                "sentence": f"row {numbers[k]}: {words}. It trains {_count(trained)}"
                f"{ranges} of {len(mask)}.",
            }
    return pa.Table.from_pylist(lines, ROW_REASONS)


_Reason: TypeAlias = tuple[str, int | None, str]
"""One of `trajkit.schema.OPENED_BY`, the parent, and the reason in words."""


def _lines(rows: pa.Table, reasons: Callable[[int, str, int], _Reason]) -> pa.Table:
    """One line per row; ``reasons`` takes a row, its session and its first turn."""
    trained, losses = _tokens(rows)
    lines = []
    places = tuples(rows, "session_id", "row_index")
    firsts = zip(places, _first_turns(rows), strict=True)
    for k, ((name, index), turn) in enumerate(firsts):
        opened_by, parent, reason = reasons(k, name, turn)
        lost = {kind: n[k] for kind, n in losses.items()}
        lines.append(
            {
                "session_id": name,
                "row_index": index,
                "first_turn": turn,
                "parent": parent,
                "opened_by": opened_by,
                "tokens_trained": trained[k],
                "tokens_lost": sum(lost.values()),
                "sentence": f"row {index} opens at turn {turn}: {reason}. "
                + _outcome(trained[k], lost),
            }
        )
    return pa.Table.from_pylist(lines, ROW_REASONS)


def _first_turns(rows: pa.Table) -> list[int]:
    """The first turn of each row that no earlier row of its session has, or the last."""
    turns = Ragged.of(rows.column("turns"), -1)
    empty = np.flatnonzero(turns.lengths == 0)
    if len(empty):
        k = int(empty[0])
        raise SchemaError(
            f"session {rows['session_id'][k].as_py()!r}, row "
            f"{rows['row_index'][k].as_py()} has no list of turns, which is needed to "
            "explain it: pass the turns instead"
        )
    sessions = rows["session_id"].combine_chunks().dictionary_encode().indices
    keys = (sessions.to_numpy().astype(np.int64)[turns.owner] << 32) + turns.values
    new = np.sort(np.unique(keys, return_index=True)[1])
    at = np.append(new, len(keys))[np.searchsorted(new, turns.offsets[:-1])]
    at = np.where(at < turns.offsets[1:], at, turns.offsets[1:] - 1)
    found: list[int] = turns.values[at].tolist()
    return found


def _departing(
    turns: pa.Table, links: pa.Table, tokenizer: Tokenizer | None
) -> Callable[[int, str, int], _Reason]:
    """Why turns open rows, from the links and the drift of their prompts."""
    parents = dict(_by_turn(links, ("parent", "link_reason")))
    found = classify_drift(turns, links, tokenizer=tokenizer)
    drift = {key: _Drift(*values) for key, values in _by_turn(found, _Drift._fields)}
    lengths = dict(
        zip(parents, pc.list_value_length(turns["output_ids"]).to_pylist(), strict=True)
    )
    firsts: dict[str, int] = {}
    for name, turn in parents:
        firsts.setdefault(name, turn)

    def reason(_: int, name: str, turn: int) -> _Reason:
        parent, kind = parents[name, turn]
        if parent is None:
            if turn == firsts[name]:
                return "no_parent", None, "it is the session's first turn"
            return "no_parent", None, _NO_PARENT.get(kind, f"it has no parent ({kind})")
        if drift[name, turn].size:
            words = _drift_text(drift[name, turn], lengths[name, parent])
            return "drift", parent, words
        words = f"it branches off turn {parent}, which another row continues"
        return "branch", parent, words

    return reason


def _parting(rows: pa.Table) -> Callable[[int, str, int], _Reason]:
    """Why turns open rows, from where rows part from their parent rows."""
    spans = rows["spans"]
    named = enumerate(tuples(rows, "session_id", "row_index"))
    places = {place: k for k, place in named}

    def reason(k: int, name: str, _: int) -> _Reason:
        other, shared = rows["parent_row"][k].as_py(), rows["shared_length"][k].as_py()
        if other is None:
            return "no_parent", None, "it shares no token with an earlier row"
        for span in spans[places[name, other]].as_py():
            if span["start"] < shared < span["stop"]:
                turn = span["turn_index"]
                at = span["output_start"] + shared - span["start"]
                words = f"it leaves row {other} in turn {turn}'s reply, at token {at}"
                return "drift", turn, words
        return "branch", None, f"it shares its first {_count(shared)} with row {other}"

    return reason


class _Drift(NamedTuple):
    """Columns of `trajkit.schema.DRIFT`."""

    parent: int
    lcp: int
    size: int
    region: str
    tokens_after_drift: int
    cause: str


def _by_turn(
    table: pa.Table, names: Iterable[str]
) -> Iterator[tuple[tuple[str, int], tuple[Any, ...]]]:
    """Session and turn of each line, and its values in other columns."""
    keys = tuples(table, "session_id", "turn_index")
    return zip(keys, tuples(table, *names), strict=True)


def _drift_text(drift: _Drift, n_output: int) -> str:
    """Where the prompt leaves its parent's path."""
    if drift.region == "last_reply":
        at = n_output - drift.size
        where = f"turn {drift.parent}'s reply at token {at} of {n_output}"
    elif drift.region == "earlier_reply":
        where = (
            f"turn {drift.parent}'s path at token {drift.lcp}, inside an earlier reply"
        )
    else:
        where = f"turn {drift.parent}'s prompt at token {drift.lcp}, before any reply"
    cause = _CAUSES.get(drift.cause, drift.cause.replace("_", " "))
    return (
        f"its prompt differs from {where} ({cause}; "
        f"{_count(drift.tokens_after_drift)} sampled after that)"
    )


def _tokens(rows: pa.Table) -> tuple[list[int], dict[str, list[int]]]:
    """Trained tokens of each row, and the tokens that it lost, by kind."""
    spans = rows["spans"].combine_chunks()
    row = np.asarray(pc.list_parent_indices(spans))
    values = pc.list_flatten(spans)
    start, stop = (
        np.asarray(pc.struct_field(values, name))
        for name in ("output_start", "output_stop")
    )
    kinds = np.asarray(pc.struct_field(values, "kind").cast(pa.string()))
    counts = {}
    for kind in ("trained", *EMPTY_KINDS):
        sizes = np.where(kinds == kind, stop - start, 0)
        counted = np.bincount(row, sizes, rows.num_rows).astype(np.int64)
        counts[kind] = counted.tolist()
    return counts.pop("trained"), counts


def _outcome(trained: int, losses: dict[str, int]) -> str:
    lost = ", ".join(f"{_count(n)} {_LOSSES[kind]}" for kind, n in losses.items() if n)
    return f"It trains {_count(trained)}" + (f"; {lost}." if lost else ".")


def _count(n: int) -> str:
    return f"{n} token" if n == 1 else f"{n} tokens"

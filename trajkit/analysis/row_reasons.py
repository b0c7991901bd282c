"""`why` and `call_tree`: explain where the rows of a policy begin, and draw its calls."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit.analysis.branches import label_branches
from trajkit.analysis.drift import classify_drift
from trajkit.analysis.tokenizer import Tokenizer
from trajkit.analysis.words import CAUSE_PHRASES, count
from trajkit.errors import SchemaError
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import linearize
from trajkit.rows.links import link
from trajkit.schema import EMPTY_KINDS, ROW_REASONS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, canonical_rows
from trajkit.tables.take import take_session, tuples
from trajkit.turns.delta import expand
from trajkit.turns.flat_buffers import flat_rows
from trajkit.turns.records import as_turns
from trajkit.verification.row_forms import is_rows, plain_rows
from trajkit.verification.rules import longest_shared

_Reason: TypeAlias = tuple[str, int | None, str]
"""One of `trajkit.schema.OPENED_BY`, the parent, and the reason in words."""

_NO_PARENT = {
    "history_replaced": "its request does not extend its agent's history",
    "root": "no earlier turn matches its request",
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
        `trajkit.schema.TURNS` in full or delta form. Or `trajkit.schema.ROWS`: then a row
        is compared with its ``parent_row``, and ``parent`` is the turn in whose reply they
        part. Rows of other systems, as `trajkit.check_rows` takes them, are compared with
        the earlier row (of their session, if they name it) that shares most.
    policy : str or Policy
        As for `trajkit.linearize`; of turns.
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
    """
    table = as_table(turns)
    if "spans" in table.column_names:
        table = canonical_rows(table)
        lines = _lines(table, _parting(table))
    elif is_rows(table.column_names):
        lines = _foreign_lines(plain_rows(table))
    else:
        table, chosen = as_turns(table), named_policy(policy)
        reason = _departing(table, link(table, chosen), tokenizer)
        lines = _lines(linearize(table, chosen), reason)
    names = ROW_REASONS.names
    return pa.Table.from_pylist(
        [dict(zip(names, line, strict=True)) for line in lines], ROW_REASONS
    )


def _foreign_lines(rows: pa.Table) -> Iterator[tuple[Any, ...]]:
    """Where each row leaves the earlier row that shares most, from tokens alone."""
    flat, places = flat_rows(rows), [*tuples(rows, "session_id", "row_index")]
    by_session = defaultdict(list)
    for k, (name, _) in enumerate(places):
        by_session[name].append(k)
    other, shared = np.zeros((2, rows.num_rows), np.int64)
    for own in map(np.array, by_session.values()):
        first, shared[own] = longest_shared(flat.ids, own)
        other[own] = own[first]
    for k, (place, n) in enumerate(zip(places, shared.tolist(), strict=True)):
        mask = flat.mask[flat.ids.offsets[k] : flat.ids.offsets[k + 1]]
        runs = int(np.diff(mask.astype(np.int8), prepend=0).clip(0).sum())
        words, trained = "it shares no token with an earlier row", int(mask.sum())
        if n:
            words = f"it shares its first {count(n)} with row {places[other[k]][1]}"
        trains = count(trained) + (f" in {runs} ranges" if runs > 1 else "")
        sentence = f"row {place[1]}: {words}. It trains {trains} of {len(mask)}."
        opened_by = "branch" if n else "no_parent"
        yield *place, None, None, opened_by, trained, 0, sentence


def _lines(
    rows: pa.Table, reason_of: Callable[[int, str, int], _Reason]
) -> Iterator[tuple[Any, ...]]:
    """The lines of rows; ``reason_of`` takes a row, its session and its first turn."""
    seen: set[tuple[str, int]] = set()
    columns = tuples(rows, "session_id", "row_index", "turns", "spans")
    for k, (name, index, turns, spans) in enumerate(columns):
        if not turns:
            raise SchemaError(
                f"session {name!r}, row {index} has no list of turns, which is needed to "
                "explain it: pass the turns instead"
            )
        # the first turn that no earlier row of the session has, or the last
        turn = next((one for one in turns if (name, one) not in seen), turns[-1])
        seen.update((name, one) for one in turns)
        n = Counter[str]()
        for span in spans:
            n[span["kind"]] += span["output_stop"] - span["output_start"]
        lost = {kind: n[kind] for kind in EMPTY_KINDS if n[kind]}
        losses = ", ".join(f"{count(lost[kind])} {_LOSSES[kind]}" for kind in lost)
        opened_by, parent, reason = reason_of(k, name, turn)
        sentence = (
            f"row {index} opens at turn {turn}: {reason}. It trains "
            f"{count(n['trained'])}{'; ' if lost else ''}{losses}."
        )
        numbers = n["trained"], sum(lost.values())
        yield name, index, turn, parent, opened_by, *numbers, sentence


def _departing(
    turns: pa.Table, links: pa.Table, tokenizer: Tokenizer | None
) -> Callable[[int, str, int], _Reason]:
    """Why turns open rows, from the links and the drift of their prompts."""
    keys = [*tuples(turns, "session_id", "turn_index")]
    firsts = {name: turn for name, turn in reversed(keys)}
    known = dict(zip(keys, tuples(links, "parent", "link_reason"), strict=True))
    outputs = pc.list_value_length(turns["output_ids"]).to_pylist()
    n_outputs = dict(zip(keys, outputs, strict=True))
    found = classify_drift(turns, links, tokenizer=tokenizer).to_pylist()
    drift = {(line["session_id"], line["turn_index"]): line for line in found}

    def reason(_: int, name: str, turn: int) -> _Reason:
        parent, kind = known[name, turn]
        if parent is None:
            words = _NO_PARENT.get(kind, f"it has no parent ({kind})")
            if turn == firsts[name]:
                words = "it is the session's first turn"
            return "no_parent", None, words
        line = drift[name, turn]
        if line["size"]:
            return "drift", parent, _drift_text(line, n_outputs[name, parent])
        words = f"it branches off turn {parent}, which another row continues"
        return "branch", parent, words

    return reason


def _parting(rows: pa.Table) -> Callable[[int, str, int], _Reason]:
    """Why turns open rows, from where rows part from their parent rows."""
    names = "session_id", "row_index", "spans"
    spans_of = {(*place,): spans for *place, spans in tuples(rows, *names)}

    def reason(k: int, name: str, _: int) -> _Reason:
        other, shared = rows["parent_row"][k].as_py(), rows["shared_length"][k].as_py()
        if other is None:
            return "no_parent", None, "it shares no token with an earlier row"
        for span in spans_of[name, other]:
            if span["start"] < shared < span["stop"]:
                turn = span["turn_index"]
                at = span["output_start"] + shared - span["start"]
                words = f"it leaves row {other} in turn {turn}'s reply, at token {at}"
                return "drift", turn, words
        return "branch", None, f"it shares its first {count(shared)} with row {other}"

    return reason


def _drift_text(drift: dict[str, Any], n_output: int) -> str:
    """Where the prompt leaves its parent's path."""
    parent, lcp, cause = drift["parent"], drift["lcp"], drift["cause"]
    if drift["region"] == "last_reply":
        where = f"reply at token {n_output - drift['size']} of {n_output}"
    elif drift["region"] == "earlier_reply":
        where = f"path at token {lcp}, inside an earlier reply"
    else:
        where = f"prompt at token {lcp}, before any reply"
    cause = CAUSE_PHRASES.get(cause, cause.replace("_", " "))
    after = count(drift["tokens_after_drift"])
    return (
        f"its prompt differs from turn {parent}'s {where} ({cause}; {after} sampled after "
        "that)"
    )


def call_tree(
    turns: TableLike, session_id: str, policy: str | Policy = "faithful"
) -> list[str]:
    """Draw a session's calls with box characters, one line per call.

    A call that only continues its parent is on the next line; branches are indented. A
    line has the turn, its prompt and output tokens, its branch label, the turn that
    started it (if the turns have the gateway's ``started_by_turn``), and its drift.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    session_id : str
        The session to draw.
    policy : str or Policy
        The policy that defines parents; see `trajkit.link`.

    Raises
    ------
    UnknownSessionError
        ``turns`` has no such session. Otherwise as for `trajkit.link`.

    Examples
    --------
    >>> import trajkit as tk
    >>> call = {"session_id": "a", "prompt_ids": [1], "output_ids": [2]}
    >>> turns = tk.from_records(
    ...     [call, {**call, "prompt_ids": [1, 2, 3]}, {**call, "prompt_ids": [1, 2, 4]}]
    ... )
    >>> for line in call_tree(turns, "a"):
    ...     print(line)
    turn 0: prompt 1, output 1
    ├─ turn 1: prompt 3, output 1
    └─ turn 2: prompt 3, output 1, rewrite
    """
    table = expand(take_session(as_turns(as_table(turns)), session_id))
    links = link(table, policy)
    texts = _texts(table, links)
    children: dict[int | None, list[int]] = defaultdict(list)
    for turn, parent in tuples(links, "turn_index", "parent"):
        children[parent].append(turn)
    lines: list[str] = []
    # Turns to draw, with the text before them and before what continues them.
    waiting = [(turn, "", "") for turn in reversed(children[None])]
    while waiting:
        turn, lead, indent = waiting.pop()
        lines.append(lead + texts[turn])
        below = children[turn]
        corners = [("└─ ", "   "), *[("├─ ", "│  ")] * (len(below) - 1)]
        if len(below) == 1:
            corners = [("", "")]
        for child, (corner, line) in zip(reversed(below), corners, strict=False):
            waiting.append((child, indent + corner, indent + line))
    return lines


def _texts(table: pa.Table, links: pa.Table) -> dict[int, str]:
    """The text of each turn's line."""
    labels = dict(tuples(label_branches(table, links), "turn_index", "label"))
    found = classify_drift(table, links).to_pylist()
    drift = {line["turn_index"]: line for line in found if line["size"]}
    columns: list[Any] = [
        table["turn_index"].to_pylist(),
        pc.list_value_length(table["prompt_ids"]).to_pylist(),
        pc.list_value_length(table["output_ids"]).to_pylist(),
        repeat(None),
    ]
    if "started_by_turn" in table.column_names:
        columns[-1] = table["started_by_turn"].to_pylist()
    texts = {}
    for turn, n_prompt, n_output, starter in zip(*columns, strict=False):
        text = f"turn {turn}: prompt {n_prompt:,}, output {n_output:,}"
        if turn in labels:
            text += f", {labels[turn].replace('_', '-')}"
        if starter is not None:
            text += f", started by turn {starter}"
        if line := drift.get(turn):
            text += (
                f", drift at token {line['lcp']:,} ({line['cause'].replace('_', ' ')}, "
                f"{line['tokens_after_drift']:,} sampled tokens after it)"
            )
        texts[turn] = text
    return texts

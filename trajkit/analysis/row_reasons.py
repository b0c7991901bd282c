"""`why` and `call_tree`: explain where the rows of a policy begin, and draw its calls."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit.analysis import lazy_polars as pl
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
    if "spans" in table.column_names:
        rows = canonical_rows(table)
        return _lines(rows, _parting(rows))
    if is_rows(table.column_names):
        return _of_foreign(plain_rows(table))
    chosen = named_policy(policy)
    table = as_turns(table)
    links = link(table, chosen)
    rows = linearize(table, chosen)
    return _lines(rows, _departing(table, links, tokenizer))


def _of_foreign(rows: pa.Table) -> pa.Table:
    """Where each row leaves the earlier row that shares most, from tokens alone."""
    flat = flat_rows(rows, align_right=True)
    places = [*tuples(rows, "session_id", "row_index")]
    by_session = defaultdict(list)
    for k, (name, _) in enumerate(places):
        by_session[name].append(k)
    lines: list[dict[str, Any]] = [{}] * rows.num_rows
    for own in by_session.values():
        first, shared = longest_shared(flat.ids, np.array(own))
        for k, other, n in zip(own, first.tolist(), shared.tolist(), strict=True):
            name, index = places[k]
            mask = flat.mask[flat.ids.offsets[k] : flat.ids.offsets[k + 1]]
            trained = int(mask.sum())
            runs = int(np.diff(mask.astype(np.int8), prepend=0).clip(0).sum())
            row = places[own[other]][1]
            words = f"it shares its first {count(n)} with row {row}"
            words = words if n else "it shares no token with an earlier row"
            ranges = f" in {runs} ranges" if runs > 1 else ""
            lines[k] = {
                "session_id": name,
                "row_index": index,
                "opened_by": "branch" if n else "no_parent",
                "tokens_trained": trained,
                "tokens_lost": 0,
                "sentence": f"row {index}: {words}. It trains {count(trained)}"
                f"{ranges} of {len(mask)}.",
            }
    return pa.Table.from_pylist(lines, ROW_REASONS)


_Reason: TypeAlias = tuple[str, int | None, str]
"""One of `trajkit.schema.OPENED_BY`, the parent, and the reason in words."""


def _lines(rows: pa.Table, reason_of: Callable[[int, str, int], _Reason]) -> pa.Table:
    """One line per row; ``reason_of`` takes a row, its session and its first turn."""
    frame = pl.frame(rows, ["session_id", "row_index", "turns", "spans"])
    frame = frame.with_row_index("row")
    size = pl.col("output_stop") - pl.col("output_start")
    spans = frame.select("row", "spans").explode("spans").unnest("spans")
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for row, kind, n in spans.group_by("row", "kind").agg(size.sum()).iter_rows():
        counts[row][kind] = n
    turns = frame.explode("turns").with_columns(
        new=pl.struct("session_id", "turns").is_first_distinct()
    )
    # the first turn that no earlier row of the session has, or the last
    first = pl.col("turns").filter("new").first().fill_null(pl.col("turns").last())
    lines = []
    opened = turns.group_by("row", "session_id", "row_index", maintain_order=True)
    for k, name, index, turn in opened.agg(first).iter_rows():
        if turn is None:
            raise SchemaError(
                f"session {name!r}, row {index} has no list of turns, which is needed to "
                "explain it: pass the turns instead"
            )
        opened_by, parent, reason = reason_of(k, name, turn)
        trained = counts[k]["trained"]
        lost = [(counts[k][kind], kind) for kind in EMPTY_KINDS if counts[k][kind]]
        losses = ", ".join(f"{count(n)} {_LOSSES[kind]}" for n, kind in lost)
        lines.append(
            {
                "session_id": name,
                "row_index": index,
                "first_turn": turn,
                "parent": parent,
                "opened_by": opened_by,
                "tokens_trained": trained,
                "tokens_lost": sum(n for n, _ in lost),
                "sentence": f"row {index} opens at turn {turn}: {reason}. It trains "
                f"{count(trained)}" + (f"; {losses}." if lost else "."),
            }
        )
    return pa.Table.from_pylist(lines, ROW_REASONS)


def _departing(
    turns: pa.Table, links: pa.Table, tokenizer: Tokenizer | None
) -> Callable[[int, str, int], _Reason]:
    """Why turns open rows, from the links and the drift of their prompts."""
    drift = classify_drift(turns, links, tokenizer=tokenizer)
    keys = ["session_id", "turn_index"]
    known = {
        (line["session_id"], line["turn_index"]): line
        for line in pl.frame(links, [*keys, "parent", "link_reason"])
        .join(pl.frame(drift).drop("parent"), on=keys, how="left")
        .iter_rows(named=True)
    }
    lengths = pc.list_value_length(turns["output_ids"]).to_pylist()
    n_outputs = dict(zip(known, lengths, strict=True))
    firsts: dict[str, int] = {}
    for name, turn in known:
        firsts.setdefault(name, turn)

    def reason(_: int, name: str, turn: int) -> _Reason:
        line = known[name, turn]
        parent, kind = line["parent"], line["link_reason"]
        if parent is None:
            if turn == firsts[name]:
                return "no_parent", None, "it is the session's first turn"
            return "no_parent", None, _NO_PARENT.get(kind, f"it has no parent ({kind})")
        if line["size"]:
            return "drift", parent, _drift_text(line, n_outputs[name, parent])
        words = f"it branches off turn {parent}, which another row continues"
        return "branch", parent, words

    return reason


def _parting(rows: pa.Table) -> Callable[[int, str, int], _Reason]:
    """Why turns open rows, from where rows part from their parent rows."""
    named = enumerate(tuples(rows, "session_id", "row_index"))
    places = {place: k for k, place in named}

    def reason(k: int, name: str, _: int) -> _Reason:
        other, shared = rows["parent_row"][k].as_py(), rows["shared_length"][k].as_py()
        if other is None:
            return "no_parent", None, "it shares no token with an earlier row"
        for span in rows["spans"][places[name, other]].as_py():
            if span["start"] < shared < span["stop"]:
                turn = span["turn_index"]
                at = span["output_start"] + shared - span["start"]
                words = f"it leaves row {other} in turn {turn}'s reply, at token {at}"
                return "drift", turn, words
        words = f"it shares its first {count(shared)} with row {other}"
        return "branch", None, words

    return reason


def _drift_text(drift: dict[str, Any], n_output: int) -> str:
    """Where the prompt leaves its parent's path."""
    parent, lcp = drift["parent"], drift["lcp"]
    if drift["region"] == "last_reply":
        at = n_output - drift["size"]
        where = f"turn {parent}'s reply at token {at} of {n_output}"
    elif drift["region"] == "earlier_reply":
        where = f"turn {parent}'s path at token {lcp}, inside an earlier reply"
    else:
        where = f"turn {parent}'s prompt at token {lcp}, before any reply"
    cause = CAUSE_PHRASES.get(drift["cause"], drift["cause"].replace("_", " "))
    after = count(drift["tokens_after_drift"])
    return f"its prompt differs from {where} ({cause}; {after} sampled after that)"


def call_tree(
    turns: TableLike, session_id: str, policy: str | Policy = "faithful"
) -> list[str]:
    """Draw a session's calls with box characters, one line per call.

    A call that only continues its parent is on the next line. Branches are indented. Each
    line has the turn, its prompt and output tokens, its branch label and its drift; a
    sub-agent's first also the turn whose tool call started it, if the turns have the
    gateway's column ``started_by_turn``.

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
        next_turns = children[turn]
        if len(next_turns) == 1:
            waiting.append((next_turns[0], indent, indent))
            continue
        for k, child in reversed(list(enumerate(next_turns))):
            last = k == len(next_turns) - 1
            corner, line = ("└─ ", "   ") if last else ("├─ ", "│  ")
            waiting.append((child, indent + corner, indent + line))
    return lines


def _texts(table: pa.Table, links: pa.Table) -> dict[int, str]:
    """The text of each turn's line."""
    named = (*tuples(label_branches(table, links), "turn_index", "label"),)
    labels = {turn: label.replace("_", "-") for turn, label in named}
    found = classify_drift(table, links).to_pylist()
    drift = {line["turn_index"]: line for line in found if line["size"]}
    started_by: Iterable[int | None] = [None] * table.num_rows
    if "started_by_turn" in table.column_names:
        started_by = table["started_by_turn"].to_pylist()
    texts = {}
    for turn, n_prompt, n_output, starter in zip(
        table["turn_index"].to_pylist(),
        pc.list_value_length(table["prompt_ids"]).to_pylist(),
        pc.list_value_length(table["output_ids"]).to_pylist(),
        started_by,
        strict=True,
    ):
        texts[turn] = f"turn {turn}: prompt {n_prompt:,}, output {n_output:,}"
        if turn in labels:
            texts[turn] += f", {labels[turn]}"
        if starter is not None:
            texts[turn] += f", started by turn {starter}"
        if turn in drift:
            line = drift[turn]
            texts[turn] += (
                f", drift at token {line['lcp']:,} ({line['cause'].replace('_', ' ')}, "
                f"{line['tokens_after_drift']:,} sampled tokens after it)"
            )
    return texts

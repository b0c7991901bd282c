"""`why`: explain why each row of a policy begins where it does."""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike, as_table
from trajkit.analysis.drift import classify_drift
from trajkit.pipeline.links import link
from trajkit.pipeline.rows import linearize
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.schema import EMPTY_KINDS, ROW_REASONS
from trajkit.turns.records import as_turns

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


def why(turns: TableLike, policy: str | Policy = "faithful") -> pa.Table:
    """Explain each row of a policy: the turn that opens it, and the reason.

    A row may begin with turns of an earlier row. It is opened by its first turn that no
    earlier row of the session contains.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    policy : str or Policy
        As for `trajkit.linearize`.

    Returns
    -------
    Table
        `trajkit.schema.ROW_REASONS`, one line per row, in the order of the rows.

    Raises
    ------
    SchemaError, InvalidTurnsError, PolicyError
        As `trajkit.linearize`.

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
    chosen = named_policy(policy)
    table = as_turns(as_table(turns))
    links = link(table, chosen)
    rows = linearize(table, chosen).select(
        ["session_id", "row_index", "turns", "spans"]
    )
    parents = _by_turn(
        links.select(["session_id", "turn_index", "parent", "link_reason"])
    )
    drift = _by_turn(classify_drift(table, links))
    lengths = _lengths(table)
    # the session's first turn, and the turns of its rows so far
    firsts: dict[str, int] = {}
    seen: dict[str, set[int]] = {}
    for name, turn in parents:
        firsts.setdefault(name, turn)
    lines = []
    for row in rows.to_pylist():
        name = row["session_id"]
        earlier = seen.setdefault(name, set())
        turn = next((t for t in row["turns"] if t not in earlier), row["turns"][-1])
        earlier.update(row["turns"])
        parent = parents[name, turn]["parent"]
        if parent is None:
            kind = parents[name, turn]["link_reason"]
            reason = _NO_PARENT.get(kind, f"it has no parent ({kind})")
            if turn == firsts[name]:
                reason = "it is the session's first turn"
            kind = "no_parent"
        elif drift[name, turn]["size"]:
            kind = "drift"
            reason = _drift_text(drift[name, turn], lengths[name, parent])
        else:
            kind = "branch"
            reason = f"it branches off turn {parent}, which another row continues"
        trained, losses = _tokens(row["spans"])
        lines.append(
            {
                "session_id": name,
                "row_index": row["row_index"],
                "first_turn": turn,
                "parent": parent,
                "opened_by": kind,
                "tokens_trained": trained,
                "tokens_lost": sum(losses.values()),
                "sentence": f"row {row['row_index']} opens at turn {turn}: {reason}. "
                + _outcome(trained, losses),
            }
        )
    return pa.Table.from_pylist(lines, ROW_REASONS)


def _by_turn(table: pa.Table) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (line["session_id"], line["turn_index"]): line for line in table.to_pylist()
    }


def _lengths(table: pa.Table) -> dict[tuple[str, int], int]:
    """Output tokens of each turn."""
    return dict(
        zip(
            zip(
                table["session_id"].to_pylist(),
                table["turn_index"].to_pylist(),
                strict=True,
            ),
            pc.list_value_length(table["output_ids"]).to_pylist(),
            strict=True,
        )
    )


def _drift_text(drift: dict[str, Any], n_output: int) -> str:
    """Where the prompt leaves its parent's path."""
    parent, size = drift["parent"], drift["size"]
    if drift["region"] == "last_reply":
        at = n_output - size
        where = f"turn {parent}'s reply at token {at} of {n_output}"
    elif drift["region"] == "earlier_reply":
        where = f"turn {parent}'s path inside an earlier reply, at token {drift['lcp']}"
    else:
        where = f"turn {parent}'s path outside its replies, at token {drift['lcp']}"
    sampled = drift["tokens_after_drift"]
    return (
        f"its prompt leaves {where} ({_CAUSES[drift['cause']]}; {_count(sampled)} sampled "
        "after that)"
    )


def _tokens(spans: Iterable[dict[str, Any]]) -> tuple[int, dict[str, int]]:
    """Trained tokens of a row, and the tokens that it lost, by kind."""
    trained, losses = 0, dict.fromkeys(EMPTY_KINDS, 0)
    for span in spans:
        n = span["output_stop"] - span["output_start"]
        if span["kind"] == "trained":
            trained += n
        elif span["kind"] in losses:
            losses[span["kind"]] += n
    return trained, losses


def _outcome(trained: int, losses: dict[str, int]) -> str:
    lost = ", ".join(f"{_count(n)} {_LOSSES[kind]}" for kind, n in losses.items() if n)
    return f"It trains {_count(trained)}" + (f"; {lost}." if lost else ".")


def _count(n: int) -> str:
    return f"{n} token" if n == 1 else f"{n} tokens"

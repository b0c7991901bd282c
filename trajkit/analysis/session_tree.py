"""`call_tree`: the forest of a session's calls as lines of text."""

import pyarrow as pa

from trajkit.analysis.branches import label_branches
from trajkit.analysis.drift import classify_drift
from trajkit.policies import Policy
from trajkit.rows.links import link
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.take import take_session, tuples
from trajkit.turns.delta import expand
from trajkit.turns.records import as_turns


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
    children: dict[int | None, list[int]] = {}
    for turn, parent in tuples(links, "turn_index", "parent"):
        children.setdefault(parent, []).append(turn)
    lines: list[str] = []
    # Turns to draw, with the text before them and before what continues them.
    waiting = [(turn, "", "") for turn in reversed(children.get(None, []))]
    while waiting:
        turn, lead, indent = waiting.pop()
        lines.append(lead + texts[turn])
        next_turns = children.get(turn, [])
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
    labels = {
        line["turn_index"]: line["label"].replace("_", "-")
        for line in label_branches(table, links).to_pylist()
    }
    drift = {
        line["turn_index"]: line
        for line in classify_drift(table, links).to_pylist()
        if line["size"]
    }
    started_by: dict[int, int | None] = {}
    if "started_by_turn" in table.column_names:
        started_by = dict(tuples(table, "turn_index", "started_by_turn"))
    texts = {}
    for turn, n_prompt, n_output in zip(
        table["turn_index"].to_pylist(),
        pc.list_value_length(table["prompt_ids"]).to_pylist(),
        pc.list_value_length(table["output_ids"]).to_pylist(),
        strict=True,
    ):
        parts = [f"turn {turn}: prompt {n_prompt:,}, output {n_output:,}"]
        if turn in labels:
            parts.append(labels[turn])
        if started_by.get(turn) is not None:
            parts.append(f"started by turn {started_by[turn]}")
        if turn in drift:
            found = drift[turn]
            parts.append(
                f"drift at token {found['lcp']:,} ({found['cause'].replace('_', ' ')}, "
                f"{found['tokens_after_drift']:,} sampled tokens after it)"
            )
        texts[turn] = ", ".join(parts)
    return texts

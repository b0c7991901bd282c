"""Summary of a recorded run, and of the rows that each policy makes of it."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

import trajkit as tk
from trajkit.cli.text import share, text_table
from trajkit.policies import PRESETS
from trajkit.schema import LOSSES, SESSIONS
from trajkit_shim.demo.agents import End
from trajkit_shim.engines.embedded.vocabulary import shipped

SAME_TEXT = "same text, other tokens"

Line: TypeAlias = dict[str, Any]


def describe(summary: Line) -> str:
    """Return the summary as tables for people."""
    sessions, policies = summary["sessions"], summary["policies"]
    counts = [
        (
            *(line["policy"], line["rows"], line["tokens_trained"]),
            share(line["tokens_trained"], line["tokens_sampled"]),
            *(line["tokens_lost"], line["tokens_forward"]),
        )
        for line in policies
    ]
    head = "session", "task", "end", "turns", "drift", "forks", "retries", "sub-agents"
    kinds = "from", "in ids", "in text", "turns", "beyond", "at stake"
    costs = "policy", "rows", "trained", "of sampled", "lost", "forward"
    paths = [f"turns   {summary['turns']}"]
    paths += [f"rows    {line['path']}" for line in policies]
    parts = [
        f"{sum(line['turns'] for line in sessions)} model calls of "
        f"{len(sessions)} agents in {summary['seconds']:.0f} s",
        text_table(head, [[*line.values()] for line in sessions]),
        "Drift: how prompt and reply come back in the next prompt",
        text_table(kinds, [[*line.values()] for line in summary["drift"]]),
        summary["example"],
        "Rows: what each policy trains, loses and costs, in tokens",
        text_table(costs, counts),
        "\n".join([*paths, f"agents  {summary['agents']}"]),
    ]
    return "\n\n".join(filter(None, parts))


def summarise(out: Path, path: Path, ends: Sequence[End], started: float) -> Line:
    """Read a run's turns back, write the rows of each policy to ``out``, and count.

    ``started`` is `time.monotonic` at the start of the run. The lists ``sessions``,
    ``drift`` and ``policies`` have the lines of the tables that `describe` shows.
    """
    turns = tk.read_turns(path)
    links = tk.link(turns)
    drift = [
        pair for pair in tk.classify_drift(turns, links).to_pylist() if pair["size"] > 0
    ]
    records = [
        {
            "session_id": end.session_id,
            "reward": float(end.solved),
            "group_id": end.task,
            "error": end.error,
        }
        for end in ends
    ]
    sessions = pa.Table.from_pylist(records, SESSIONS)
    drifting = Counter(pair["session_id"] for pair in drift)
    lines, example = _drift_lines(turns, drift)
    return {
        "turns": str(path),
        "agents": str(out / "agents"),
        "sessions": [_session(end, turns, links, drifting) for end in ends],
        "drift": lines,
        "example": example,
        "policies": [_policy(out, turns, policy, sessions) for policy in PRESETS],
        "seconds": round(time.monotonic() - started, 1),
    }


def _session(
    end: End, turns: pa.Table, links: pa.Table, drifting: Counter[str]
) -> Line:
    """Forks: the parent has another child already. Retries: the prompt was sent before.

    Sub-agents: a conversation starts with another first message than the session's.
    """
    chosen = pc.equal(turns["session_id"], end.session_id)
    calls = turns.filter(chosen)
    parents = links.filter(chosen)["parent"].to_pylist()
    firsts = [messages[0]["key"] for messages in calls["messages"].to_pylist()]
    prompts = list(map(tuple, calls["prompt_ids"].to_pylist()))
    forks = retries = subagents = 0
    for i, parent in enumerate(parents):
        if prompts[i] in prompts[:i]:
            retries += 1
        elif parent is None:
            subagents += firsts[i] != firsts[0]
        else:
            forks += parent in parents[:i]
    return {
        "session_id": end.session_id,
        "task": end.task,
        "end": end.error or ("solved" if end.solved else "unsolved"),
        "turns": len(parents),
        "drifting": drifting[end.session_id],
        "forks": forks,
        "retries": retries,
        "subagents": subagents,
    }


def _drift_lines(turns: pa.Table, drift: list[Line]) -> tuple[list[Line], str | None]:
    """Drifting turns by kind, most affected tokens first, and one example."""
    names = zip(
        turns["session_id"].to_pylist(), turns["turn_index"].to_pylist(), strict=True
    )
    row_of = {name: i for i, name in enumerate(names)}
    lines: dict[tuple[str, str, str], Line] = {}
    example = None
    for pair in drift:
        parent = row_of[pair["session_id"], pair["parent"]]
        child = row_of[pair["session_id"], pair["turn_index"]]
        path = turns["prompt_ids"][parent].as_py() + turns["output_ids"][parent].as_py()
        prompt = turns["prompt_ids"][child].as_py()
        text = _in_text(path, prompt)
        kind = pair["region"], pair["cause"], text
        line = lines.setdefault(
            kind,
            {
                **dict(zip(("region", "cause", "text"), kind, strict=True)),
                **dict.fromkeys(("turns", "tokens_beyond", "tokens_after_drift"), 0),
            },
        )
        line["turns"] += 1
        line["tokens_beyond"] += pair["size"]
        line["tokens_after_drift"] += pair["tokens_after_drift"]
        if example is None and text == SAME_TEXT:
            start = max(pair["lcp"] - 1, 0)
            example = (
                f"For example {pair['session_id']}, turn {pair['turn_index']}:\n"
                f"  path    {_tokens(path[start:])} ...\n"
                f"  prompt  {_tokens(prompt[start:])} ..."
            )
    return sorted(lines.values(), key=lambda one: -one["tokens_after_drift"]), example


def _tokens(ids: list[int]) -> str:
    return " ".join(repr(shipped().decode([token])) for token in ids[:6])


def _in_text(path: list[int], prompt: list[int]) -> str:
    """How the text of the path changed: not at all, in white space, or more."""
    before, after = shipped().decode(path), shipped().decode(prompt)
    if after.startswith(before):
        return SAME_TEXT
    if "".join(after.split()).startswith("".join(before.split())):
        return "white space changed"
    return "text changed"


def _policy(out: Path, turns: pa.Table, policy: str, sessions: pa.Table) -> Line:
    rows, report = tk.linearize(turns, policy, sessions=sessions, report=True)
    path = out / f"rows-{policy}.parquet"
    tk.write_rows(rows, path)

    def total(*columns: str) -> int:
        return sum(pc.sum(report[column]).as_py() for column in columns)

    counted = ("rows", "tokens_sampled", "tokens_trained", "tokens_forward")
    return {
        "policy": policy,
        **{name: total(name) for name in counted},
        "tokens_lost": total(*(f"lost_{reason}" for reason in LOSSES)),
        "path": str(path),
    }

"""Summary of a recorded run, and of the rows that each policy makes of it."""

import json
import time
from collections import defaultdict
from dataclasses import asdict, astuple, dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

import trajkit as tk
from trajkit.cli.text import share, text_table
from trajkit.policies import PRESETS
from trajkit.schema import LOSSES, SESSIONS
from trajkit_shim.demo.run import Run
from trajkit_shim.engines.embedded.vocabulary import Vocabulary, shipped

SAME_TEXT = "same text, other tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionLine:
    """The calls of one session."""

    session_id: str
    task: str
    # solved, unsolved, or the agent's error
    end: str
    turns: int
    drifting: int
    # turns whose parent already has another child
    forks: int
    # turns whose prompt equals an earlier one
    retries: int
    # turns that start a conversation with another first message than the session's
    subagents: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftLine:
    """Turns whose prompts drift in the same way."""

    # where it starts, its cause in ids, and its effect on the text
    region: str
    cause: str
    text: str
    turns: int
    # path tokens after the drift
    tokens_beyond: int
    # sampled ones among them
    tokens_after_drift: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLine:
    """The rows of one policy."""

    policy: str
    rows: int
    tokens_sampled: int
    tokens_trained: int
    tokens_lost: int
    tokens_forward: int
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Everything that the demo prints."""

    turns: str
    agents: str
    seconds: float
    sessions: list[SessionLine]
    drift: list[DriftLine]
    example: str | None
    policies: list[PolicyLine]

    def as_json(self) -> str:
        """One JSON object."""
        return json.dumps(asdict(self), ensure_ascii=False)

    def describe(self) -> str:
        """Tables for people."""
        head = "session", "task", "end", "turns", "drift", "forks", "retries"
        parts = [
            f"{sum(line.turns for line in self.sessions)} model calls of "
            f"{len(self.sessions)} agents in {self.seconds:.0f} s",
            text_table(
                [*head, "sub-agents"], [astuple(line) for line in self.sessions]
            ),
            "Drift: how prompt and reply come back in the next prompt",
            text_table(
                ["from", "in ids", "in text", "turns", "beyond", "at stake"],
                [astuple(line) for line in self.drift],
            ),
        ]
        if self.example is not None:
            parts.append(self.example)
        counts = [
            (
                line.policy,
                line.rows,
                line.tokens_trained,
                share(line.tokens_trained, line.tokens_sampled),
                line.tokens_lost,
                line.tokens_forward,
            )
            for line in self.policies
        ]
        parts += [
            "Rows: what each policy trains, loses and costs, in tokens",
            text_table(
                ["policy", "rows", "trained", "of sampled", "lost", "forward"], counts
            ),
            "\n".join(
                [
                    f"turns   {self.turns}",
                    *(f"rows    {line.path}" for line in self.policies),
                    f"agents  {self.agents}",
                ]
            ),
        ]
        return "\n\n".join(parts)


def summarise(out: Path, run: Run, started: float) -> Summary:
    """Read a run back, write its rows, and count.

    Parameters
    ----------
    out : Path
        Directory for ``rows-<policy>.parquet``.
    run : Run
    started : float
        `time.monotonic` at its start.
    """
    turns = tk.read_turns(run.turns_path)
    # without merging: the calls as they happened, not as one policy reads them
    links = tk.link(turns, parent_by="messages", merge_threshold=0)
    drift = tk.classify_drift(turns, links)
    lines, example = _drift_lines(turns, drift)
    sessions = pa.Table.from_pylist(
        [
            {
                "session_id": end.session_id,
                "reward": float(end.solved),
                "group_id": end.task,
                "error": end.error,
            }
            for end in run.ends
        ],
        SESSIONS,
    )
    policies = [_policy_line(out, turns, policy, sessions) for policy in PRESETS]
    return Summary(
        turns=str(run.turns_path),
        agents=str(out / "agents"),
        sessions=_session_lines(run, turns, links, drift),
        drift=lines,
        example=example,
        policies=policies,
        seconds=round(time.monotonic() - started, 1),
    )


def _session_lines(
    run: Run, turns: pa.Table, links: pa.Table, drift: pa.Table
) -> list[SessionLine]:
    parents = links["parent"].to_pylist()
    calls = defaultdict(list)
    for i, session_id in enumerate(turns["session_id"].to_pylist()):
        first = turns["messages"][i][0]["key"].as_py()
        calls[session_id].append(
            (parents[i], first, tuple(turns["prompt_ids"][i].as_py()))
        )
    drifting = pc.value_counts(
        drift.filter(pc.greater(drift["size"], 0))["session_id"]
    ).to_pylist()
    drifts = {str(count["values"]): int(count["counts"]) for count in drifting}
    lines = []
    for end in run.ends:
        forks = retries = subagents = 0
        prompts = set()
        continued = set()
        for parent, first, prompt in calls[end.session_id]:
            if prompt in prompts:
                retries += 1
            elif parent in continued:
                forks += 1
            elif parent is None and first != calls[end.session_id][0][1]:
                subagents += 1
            prompts.add(prompt)
            if parent is not None:
                continued.add(parent)
        lines.append(
            SessionLine(
                session_id=end.session_id,
                task=end.task,
                end=end.error or ("solved" if end.solved else "unsolved"),
                turns=len(calls[end.session_id]),
                drifting=drifts.get(end.session_id, 0),
                forks=forks,
                retries=retries,
                subagents=subagents,
            )
        )
    return lines


def _drift_lines(
    turns: pa.Table, drift: pa.Table
) -> tuple[list[DriftLine], str | None]:
    """Drifting turns by kind, most affected tokens first, and one example."""
    vocabulary = shipped()
    row_of = {
        key: i
        for i, key in enumerate(
            zip(
                turns["session_id"].to_pylist(),
                turns["turn_index"].to_pylist(),
                strict=True,
            )
        )
    }
    groups: dict[tuple[str, str, str], list[int]] = {}
    example = None
    for pair in drift.to_pylist():
        if pair["size"] == 0:
            continue
        parent = row_of[pair["session_id"], pair["parent"]]
        prompt = turns["prompt_ids"][row_of[pair["session_id"], pair["turn_index"]]]
        path_ids = (
            turns["prompt_ids"][parent].as_py() + turns["output_ids"][parent].as_py()
        )
        text = _in_text(vocabulary, path_ids, prompt.as_py())
        group = groups.setdefault((pair["region"], pair["cause"], text), [0, 0, 0])
        for i, more in enumerate((1, pair["size"], pair["tokens_after_drift"])):
            group[i] += more
        if example is None and text == SAME_TEXT:
            example = _spelled_out(vocabulary, path_ids, prompt.as_py(), pair)
    lines = [
        DriftLine(
            region=region,
            cause=cause,
            text=text,
            turns=counts[0],
            tokens_beyond=counts[1],
            tokens_after_drift=counts[2],
        )
        for (region, cause, text), counts in groups.items()
    ]
    return sorted(lines, key=lambda line: -line.tokens_after_drift), example


def _in_text(vocabulary: Vocabulary, path_ids: list[int], prompt: list[int]) -> str:
    """How the text of the path changed: not at all, in white space, or more."""
    before, after = vocabulary.decode(path_ids), vocabulary.decode(prompt)
    if after.startswith(before):
        return SAME_TEXT
    if "".join(after.split()).startswith("".join(before.split())):
        return "white space changed"
    return "text changed"


def _spelled_out(
    vocabulary: Vocabulary, path_ids: list[int], prompt: list[int], pair: dict[str, int]
) -> str:
    """The tokens on both sides of a position where the ids drift but not the text."""
    start = max(pair["lcp"] - 1, 0)

    def shown(ids: list[int]) -> str:
        return " ".join(repr(vocabulary.decode([token])) for token in ids[start:][:6])

    return (
        f"For example {pair['session_id']}, turn {pair['turn_index']}:\n"
        f"  held    {shown(path_ids)} ...\n"
        f"  prompt  {shown(prompt)} ..."
    )


def _policy_line(
    out: Path, turns: pa.Table, policy: str, sessions: pa.Table
) -> PolicyLine:
    rows, report = tk.linearize(turns, policy, sessions=sessions, report=True)
    path = out / f"rows-{policy}.parquet"
    tk.write_rows(rows, path)

    def total(*columns: str) -> int:
        return sum(pc.sum(report[column]).as_py() for column in columns)

    return PolicyLine(
        policy=policy,
        rows=total("rows"),
        tokens_sampled=total("tokens_sampled"),
        tokens_trained=total("tokens_trained"),
        tokens_lost=total(*(f"lost_{reason}" for reason in LOSSES)),
        tokens_forward=total("tokens_forward"),
        path=str(path),
    )

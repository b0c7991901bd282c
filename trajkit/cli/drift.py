"""``trajkit drift``: where prompts differ from the paths that they continue."""

import argparse
import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypedDict

import pyarrow as pa

import trajkit as tk
from trajkit._arrow import lazy_compute as pc
from trajkit.cli.file_options import (
    add_job_options,
    rejected_count,
    rejected_note,
    run_stage,
)
from trajkit.cli.options import Commands, add_policy, add_source, chosen_policy, count
from trajkit.cli.progress import Progress
from trajkit.cli.text import text_table
from trajkit.cli.tokenizer import load_tokenizer
from trajkit.io.tables import write_tables
from trajkit.jobs.stages import Made, Target

# characters of an example
_MAX_TEXT = 120


def add_drift(commands: Commands) -> None:
    """Add ``drift`` to the command line."""
    parser = commands.add_parser(
        "drift",
        help="count drift by region and cause",
        description="Compare every prompt with the path of the call that it continues "
        "(its prompt and output), and count drift by region and cause. 'tokens at stake' "
        "are sampled tokens that the prompt changes or lacks. With a tokenizer, causes "
        "are found by comparing texts, and every finding is counted and shown.",
    )
    add_source(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the drift table, a line per turn"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        type=Path,
        help="the model's tokenizer.json, or its directory",
    )
    parser.add_argument(
        "--findings",
        metavar="FILE",
        help="with --tokenizer: write each finding, with spans and texts of both sides",
    )
    parser.add_argument(
        "--examples",
        metavar="N",
        type=count,
        default=1,
        help="with --tokenizer: findings to show of each cause (default: %(default)s)",
    )
    add_policy(parser)
    add_job_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the summary; the exit code is 0."""
    policy = chosen_policy(arguments)
    if arguments.findings is not None and arguments.tokenizer is None:
        raise tk.errors.ArgumentError("--findings needs --tokenizer")
    tokenizer = None
    if arguments.tokenizer is not None:
        tokenizer = load_tokenizer(arguments.tokenizer)
    summary, causes = DriftSummary(), dict[str, CauseGroup]()

    def stage(turns: pa.Table) -> Made:
        links = tk.link(turns, policy)
        drift = tk.classify_drift(turns, links, tokenizer=tokenizer)
        findings = None
        if tokenizer is not None:
            findings = tk.analysis.explain_drift(turns, links, tokenizer)
            add_causes(causes, findings, arguments.examples)
        # last, because a session that was refused would be counted twice
        summary.add(turns, links, drift)
        yield "drift", drift
        if findings is not None:
            yield "findings", findings

    targets = {
        name: Target(Path(path), write_tables)
        for name, path in (
            ("drift", arguments.output),
            ("findings", arguments.findings),
        )
        if path is not None
    }
    with Progress("drift", "turns") as bar:
        totals = run_stage(arguments, stage, targets, bar)
    groups = sorted(causes.values(), key=lambda g: (-g["findings"], g["cause"]))
    if arguments.json:
        facts = {"policy": asdict(policy), **summary.to_json()}
        if tokenizer is not None:
            facts["causes"] = groups
        text = json.dumps(facts | rejected_count(totals))
    else:
        text = rejected_note(arguments, totals) + summary.describe()
        if tokenizer is not None:
            text += "\n\n" + describe_causes(groups)
    sys.stdout.write(text + "\n")
    return 0


_EXAMPLE = ("session_id", "turn_index", "path_start", "path_text", "prompt_text")


class CauseGroup(TypedDict):
    """The findings of one cause, over all turns."""

    cause: str
    findings: int
    turns: int
    tokens_held: int
    tokens_shown: int
    examples: list[dict[str, Any]]


def add_causes(
    causes: dict[str, CauseGroup], findings: pa.Table, n_examples: int
) -> None:
    """Count the findings of more sessions by cause, and keep the first few of each."""
    turns = set()
    for found in findings.to_pylist():
        cause = found["cause"]
        group = causes.setdefault(
            cause,
            CauseGroup(
                cause=cause,
                findings=0,
                turns=0,
                tokens_held=0,
                tokens_shown=0,
                examples=[],
            ),
        )
        turn = cause, found["session_id"], found["turn_index"]
        group["findings"] += 1
        group["turns"] += turn not in turns
        turns.add(turn)
        group["tokens_held"] += found["path_stop"] - found["path_start"]
        group["tokens_shown"] += found["prompt_stop"] - found["prompt_start"]
        if len(group["examples"]) < n_examples:
            group["examples"].append({name: found[name] for name in _EXAMPLE})


def describe_causes(groups: list[CauseGroup]) -> str:
    """The causes as a table with examples, for people."""
    head = ("cause", "findings", "turns", "path tokens", "prompt tokens")
    lines = [
        (g["cause"], g["findings"], g["turns"], g["tokens_held"], g["tokens_shown"])
        for g in groups
    ]
    text = [text_table(head, lines)]
    for group in groups:
        for example in group["examples"]:
            text.append(
                f"\n{group['cause']}: session {example['session_id']!r}, turn "
                f"{example['turn_index']}, from token {example['path_start']}\n"
                f"  path    {_short(example['path_text'])}\n"
                f"  prompt  {_short(example['prompt_text'])}"
            )
    return "\n".join(text)


def _short(text: str) -> str:
    """A text on one line, without its middle if it is long."""
    if len(text) > _MAX_TEXT:
        half = _MAX_TEXT // 2
        return f"{text[:half]!r} ... {text[-half:]!r}"
    return repr(text)


@dataclass(slots=True)
class DriftSummary:
    """The sums of a drift table.

    Attributes
    ----------
    turns_compared : int
        Turns that continue another one.
    turns_by_tokens : int
        Turns whose parent was found by tokens.
    groups : dict
        By region and cause: turns, path tokens from the start of the drift, and how many
        of these were sampled.
    """

    sessions: int = 0
    turns: int = 0
    turns_compared: int = 0
    turns_by_tokens: int = 0
    tokens_sampled: int = 0
    groups: dict[tuple[str, str], tuple[int, int, int]] = field(default_factory=dict)

    def add(self, turns: pa.Table, links: pa.Table, drift: pa.Table) -> None:
        """Add the drift of more sessions."""
        by_tokens = pc.equal(links["link_reason"].cast(pa.string()), "tokens")
        self.sessions += pc.count_distinct(turns["session_id"]).as_py()
        self.turns += turns.num_rows
        self.turns_compared += drift.num_rows
        self.turns_by_tokens += pc.sum(by_tokens).as_py() or 0
        self.tokens_sampled += (
            pc.sum(pc.list_value_length(turns["output_ids"])).as_py() or 0
        )
        keys, sizes = ("region", "cause"), ("size", "tokens_after_drift")
        columns = [drift[name].cast(pa.string()) for name in keys]
        columns += [drift[name].cast(pa.int64()) for name in sizes]
        counted = (
            pa.table(columns, [*keys, *sizes])
            .group_by(keys)
            .aggregate([([], "count_all"), *((name, "sum") for name in sizes)])
        )
        for row in counted.to_pylist():
            key = row["region"], row["cause"]
            n, size, after = self.groups.get(key, (0, 0, 0))
            self.groups[key] = (
                n + row["count_all"],
                size + row["size_sum"],
                after + row["tokens_after_drift_sum"],
            )

    def lines(self) -> list[tuple[str, str, int, int, int]]:
        """Region, cause and counts; the groups with the most sampled tokens first."""
        lines = [(*key, *counts) for key, counts in self.groups.items()]
        return sorted(lines, key=lambda line: (-line[4], -line[2]))

    def to_json(self) -> dict[str, object]:
        """The attributes, with groups as a list of objects."""
        names = ("region", "cause", "turns", "tokens_beyond", "tokens_after_drift")
        groups = [dict(zip(names, line, strict=True)) for line in self.lines()]
        return {**asdict(self), "groups": groups}

    def describe(self) -> str:
        """The summary as a table for people."""
        head = ("region", "cause", "turns", "tokens beyond", "tokens at stake")
        return (
            f"sessions {self.sessions:,}, turns {self.turns:,}, of which "
            f"{self.turns_compared:,} continue another "
            f"({self.turns_by_tokens:,} by tokens); "
            f"tokens sampled {self.tokens_sampled:,}\n\n"
            f"{text_table(head, self.lines())}"
        )

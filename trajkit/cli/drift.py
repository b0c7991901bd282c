"""``trajkit drift``: where prompts differ from the paths that they continue."""

import argparse
import json
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import trajkit as tk
from trajkit._arrow import lazy_compute as pc
from trajkit.analysis.drift_findings import other_text_cause
from trajkit.analysis.tokenizer import Codec, Ids
from trajkit.cli.file_options import rejected_count, rejected_note, run_stage
from trajkit.cli.options import chosen_policy, command
from trajkit.cli.progress import Progress
from trajkit.cli.terminal import Screen, visible
from trajkit.cli.text import text_table
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.io.tables import write_tables
from trajkit.jobs.stages import Made, Target
from trajkit.observations.attribution import SessionCalls
from trajkit.turns.calls import read_calls
from trajkit.turns.table import locate

# tokens of an example: at both ends of the span, and around it
_MAX_TOKENS = 12
_AROUND = 3


@command(
    "drift",
    """
count drift by region and cause

Compare every prompt with the path of the call that it continues (its prompt and output),
and count drift by region and cause. 'tokens at stake' are sampled tokens that the prompt
changes or lacks. With a tokenizer, causes are found by comparing texts, and every finding
is counted and shown.

source, --json
-o --output FILE  write the drift table, a line per turn
--tokenizer
--findings FILE   with --tokenizer: write each finding, with spans and texts of both sides
--examples N 1    with --tokenizer: findings to show of each cause (default: %(default)s)
--policy, --set, --fork-threshold, --gather, --rejected
""",
)
def run(arguments: argparse.Namespace) -> None:
    """Print the summary."""
    policy = chosen_policy(arguments)
    if arguments.findings is not None and arguments.tokenizer is None:
        raise tk.errors.ArgumentError("--findings needs --tokenizer")
    tokenizer = chosen_tokenizer(arguments)
    if tokenizer is not None:
        codec = Codec(tokenizer)
    summary, causes = DriftSummary(), dict[str, CauseGroup]()

    def stage(turns: pa.Table) -> Made:
        links = tk.link(turns, policy)
        drift = tk.classify_drift(turns, links, tokenizer=tokenizer)
        findings = None
        if tokenizer is not None:
            findings = tk.analysis.explain_drift(turns, links, tokenizer)
            add_causes(causes, turns, findings, codec, arguments.examples)
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
    groups = sorted(causes.values(), key=lambda g: (-g.findings, g.cause))
    if arguments.json:
        facts = {"policy": asdict(policy), **summary.to_json()}
        if tokenizer is not None:
            facts["causes"] = [vars(group) for group in groups]
        text = json.dumps(facts | rejected_count(totals))
    else:
        text = rejected_note(arguments, totals) + summary.describe()
        if tokenizer is not None:
            text += "\n\n" + describe_causes(groups)
    Screen.of_stdout(colour=False).print(text)


_EXAMPLE = ("session_id", "turn_index", "path_start", "path_text", "prompt_text")

# What happened to the text, by cause, and who did it, by what messages show.
_HAPPENED = {
    "truncated": "text cut off",
    "same_text": "same text in other tokens",
    "special_tokens": "special tokens changed",
    "boolean": "booleans written differently",
    "tool_arguments": "tool arguments written differently",
    "white_space": "white space changed",
    "reasoning_dropped": "reasoning dropped",
    "template": "text changed",
    "rewritten": "text changed",
    "other_text": "text changed",
}
_BY = {"template": " by the template", "rewritten": " by the client", "other_text": ""}


@dataclass
class CauseGroup:
    """The findings of one cause, over all turns."""

    cause: str
    findings: int = 0
    turns: int = 0
    tokens_held: int = 0
    tokens_shown: int = 0
    # findings by who changed the text: see `other_text_cause`
    origins: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)


def add_causes(
    causes: dict[str, CauseGroup],
    turns: pa.Table,
    findings: pa.Table,
    codec: Codec,
    n_examples: int,
) -> None:
    """Count the findings of more sessions by cause, and keep the first few of each."""
    counted = set()
    sides = _Sides(turns, codec)
    for found in findings.to_pylist():
        cause = found["cause"]
        group = causes.setdefault(cause, CauseGroup(cause))
        turn = cause, found["session_id"], found["turn_index"]
        group.findings += 1
        group.turns += turn not in counted
        counted.add(turn)
        group.tokens_held += found["path_stop"] - found["path_start"]
        group.tokens_shown += found["prompt_stop"] - found["prompt_start"]
        group.origins[sides.origin(found)] += 1
        if len(group.examples) < n_examples:
            example = {name: found[name] for name in _EXAMPLE}
            group.examples.append(example | sides.tokens(found))


class _Sides:
    """The calls of findings, one session after another."""

    def __init__(self, turns: pa.Table, codec: Codec) -> None:
        self._turns = locate(turns)
        self._codec = codec
        self._names = {name: k for k, name in enumerate(self._turns.ids.to_pylist())}
        self._session: str | None = None

    def origin(self, found: dict[str, Any]) -> str:
        """Who changed the text: ``template``, ``rewritten`` or ``other_text``."""
        parent, call = self._open(found)
        return other_text_cause(self._shown, parent, call)

    def tokens(self, found: dict[str, Any]) -> dict[str, str]:
        """Both sides token by token, with the span in brackets."""
        parent, call = self._open(found)
        sides = {"path": self._shown.path(parent), "prompt": self._shown.prompt(call)}
        return {
            f"{side}_tokens": marked(
                self._codec, ids, found[f"{side}_start"], found[f"{side}_stop"]
            )
            for side, ids in sides.items()
        }

    def _open(self, found: dict[str, Any]) -> tuple[int, int]:
        """The finding's parent and call in the calls of its session."""
        name = found["session_id"]
        if name != self._session:
            at = self._names[name]
            self._calls = read_calls(self._turns.sessions(at, at + 1))
            self._shown = SessionCalls(self._calls)
            self._session = name
        turns = np.array([found["parent"], found["turn_index"]])
        parent, call = self._calls.named(np.zeros(2, np.int64), turns).tolist()
        return parent, call


def marked(codec: Codec, ids: Ids, start: int, stop: int) -> str:
    """Tokens ``start:stop`` in brackets, with some before and after.

    Tokens are separated by dots, and by bars in brackets. The middle of a long span is
    left out.
    """

    def texts(ids: Ids) -> list[str]:
        return [visible(codec.exact(ids[k : k + 1])) for k in range(len(ids))]

    inside = ids[start:stop]
    shown = texts(inside[:_MAX_TOKENS])
    if len(inside) > 2 * _MAX_TOKENS:
        shown.append(f"... {len(inside) - 2 * _MAX_TOKENS:,} tokens ...")
    shown += texts(inside[_MAX_TOKENS:][-_MAX_TOKENS:])
    before = texts(ids[max(start - _AROUND, 0) : start])
    after = texts(ids[stop : stop + _AROUND])
    return "·".join([*before, f"[{'|'.join(shown)}]", *after])


def describe_causes(groups: list[CauseGroup]) -> str:
    """The causes as a table with examples, for people."""
    head = ("cause", "findings", "turns", "path tokens", "prompt tokens")
    lines = [
        (g.cause, g.findings, g.turns, g.tokens_held, g.tokens_shown) for g in groups
    ]
    text = [text_table(head, lines), ""]
    total = sum(group.findings for group in groups)
    happened = Counter[str]()
    for group in groups:
        for origin, n in group.origins.items():
            happened[_HAPPENED[group.cause] + _BY[origin]] += n
    text += [f"{n:,} of {total:,}: {words}" for words, n in happened.most_common()]
    for group in groups:
        for example in group.examples:
            text.append(
                f"\n{group.cause}: session '{visible(example['session_id'])}', "
                f"turn {example['turn_index']}, from token {example['path_start']}\n"
                f"  path    {example['path_tokens']}\n"
                f"  prompt  {example['prompt_tokens']}"
            )
    return "\n".join(text)


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

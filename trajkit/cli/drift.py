"""``trajkit drift``: where prompts depart from what was held, and what it may cost."""

import argparse
import json
import sys
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any, Self

import pyarrow as pa

import trajkit as tk
from trajkit._arrow import lazy_compute as pc
from trajkit.cli.file_options import (
    add_through,
    aside_count,
    look_through,
    rejected_note,
)
from trajkit.cli.options import Commands, add_policy, add_source, chosen_policy, count
from trajkit.cli.progress import Progress
from trajkit.cli.text import text_table
from trajkit.cli.tokenizer import load_tokenizer
from trajkit.io.tables import write_tables
from trajkit.jobs.stages import Made, Target

_LONGEST_TEXT = 120


def add_drift(commands: Commands) -> None:
    """Add ``drift`` to the command line."""
    parser = commands.add_parser(
        "drift",
        help="count drift by region and cause",
        description="Compare every prompt with what was held before it (the prompt and "
        "output of the call that it continues), and count the departures by where they "
        "start and what they look like. 'at stake' are sampled tokens that the prompt "
        "shows otherwise or not at all. With a tokenizer, the causes are those that "
        "the texts tell, and every stretch that departs is counted and shown.",
    )
    add_source(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the drift table, a line per turn"
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        type=Path,
        help="of the model: its tokenizer.json, or a directory",
    )
    parser.add_argument(
        "--findings",
        metavar="FILE",
        help="with --tokenizer: write each stretch, with its span and text on both sides",
    )
    parser.add_argument(
        "--examples",
        metavar="N",
        type=count,
        default=1,
        help="with --tokenizer: stretches to show of each cause (default: %(default)s)",
    )
    add_policy(parser)
    add_through(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the summary; the exit code is 0."""
    policy = chosen_policy(arguments)
    if arguments.findings is not None and arguments.tokenizer is None:
        raise tk.errors.PolicyError("--findings needs --tokenizer")
    tokenizer = None
    if arguments.tokenizer is not None:
        tokenizer = load_tokenizer(arguments.tokenizer)
    summary, causes = DriftSummary.of_none(), dict[str, CauseGroup]()

    def stage(turns: pa.Table) -> Made:
        nonlocal summary
        links = tk.link(turns, policy)
        drift = tk.classify_drift(turns, links, tokenizer=tokenizer)
        findings = None
        if tokenizer is not None:
            findings = tk.analysis.explain_drift(turns, links, tokenizer)
            add_causes(causes, findings, arguments.examples)
        # nothing is refused from here on, so that no session is counted twice
        summary = summary.plus(DriftSummary.of(turns, links, drift))
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
        totals = look_through(arguments, stage, targets, bar)
    groups = sorted(causes.values(), key=lambda group: (-group.findings, group.cause))
    if arguments.json:
        said = {"policy": asdict(policy), **asdict(summary)}
        if tokenizer is not None:
            said["causes"] = [asdict(group) for group in groups]
        text = json.dumps(said | aside_count(totals))
    else:
        text = rejected_note(arguments, totals) + summary.describe()
        if tokenizer is not None:
            text += "\n\n" + describe_causes(groups)
    sys.stdout.write(text + "\n")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseExample:
    """One stretch where a prompt departs, as text."""

    session_id: str
    turn_index: int
    path_start: int
    path_text: str
    prompt_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CauseGroup:
    """The stretches of one cause, over all turns."""

    cause: str
    findings: int
    turns: int
    tokens_held: int
    tokens_shown: int
    examples: list[CauseExample]


def add_causes(
    causes: dict[str, CauseGroup], findings: pa.Table, n_examples: int
) -> None:
    """Count findings of further sessions by cause, and keep the first few of each."""
    names = [field.name for field in fields(CauseExample)]
    by_cause: dict[str, list[dict[str, Any]]] = {}
    for one in findings.to_pylist():
        by_cause.setdefault(one["cause"], []).append(one)
    for cause, ours in by_cause.items():
        known = causes.get(cause) or CauseGroup(
            cause=cause, findings=0, turns=0, tokens_held=0, tokens_shown=0, examples=[]
        )
        lacking = n_examples - len(known.examples)
        causes[cause] = CauseGroup(
            cause=cause,
            findings=known.findings + len(ours),
            turns=known.turns
            + len({(one["session_id"], one["turn_index"]) for one in ours}),
            tokens_held=known.tokens_held
            + sum(one["path_stop"] - one["path_start"] for one in ours),
            tokens_shown=known.tokens_shown
            + sum(one["prompt_stop"] - one["prompt_start"] for one in ours),
            examples=[
                *known.examples,
                *(
                    CauseExample(**{name: one[name] for name in names})
                    for one in ours[: max(lacking, 0)]
                ),
            ],
        )


def describe_causes(groups: list[CauseGroup]) -> str:
    """The causes as a table for people, and what they look like."""
    head = ("cause", "stretches", "turns", "tokens held", "tokens shown")
    lines = [astuple(group)[:5] for group in groups]
    said = [text_table(head, lines)]
    for group in groups:
        for one in group.examples:
            said.append(
                f"\n{group.cause}: session {one.session_id!r}, turn {one.turn_index}, "
                f"from token {one.path_start}\n"
                f"  held   {_short(one.path_text)}\n  shown  {_short(one.prompt_text)}"
            )
    return "\n".join(said)


def _short(text: str) -> str:
    """A text on one line, its middle left out where it is long."""
    if len(text) > _LONGEST_TEXT:
        half = _LONGEST_TEXT // 2
        return f"{text[:half]!r} ... {text[-half:]!r}"
    return repr(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftGroup:
    """The compared turns whose drift starts in one region and has one cause."""

    region: str
    cause: str
    turns: int
    # held tokens from where the drift starts
    tokens_beyond: int
    # those of them that were sampled
    tokens_after_drift: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftSummary:
    """What a drift table adds up to."""

    sessions: int
    turns: int
    # turns that continue another one
    turns_compared: int
    # those of them that were found by their tokens
    turns_by_tokens: int
    tokens_sampled: int
    groups: list[DriftGroup]

    @classmethod
    def of_none(cls) -> Self:
        """The summary of no turns."""
        return cls(
            sessions=0,
            turns=0,
            turns_compared=0,
            turns_by_tokens=0,
            tokens_sampled=0,
            groups=[],
        )

    @classmethod
    def of(cls, turns: pa.Table, links: pa.Table, drift: pa.Table) -> Self:
        """The summary of ``drift``."""
        names = ["region", "cause"]
        groups = (
            pa.table([drift[name].cast(pa.string()) for name in names], names)
            .append_column("size", drift["size"].cast(pa.int64()))
            .append_column(
                "tokens_after_drift", drift["tokens_after_drift"].cast(pa.int64())
            )
            .group_by(names)
            .aggregate(
                [([], "count_all"), ("size", "sum"), ("tokens_after_drift", "sum")]
            )
        )
        return cls(
            sessions=pc.count_distinct(turns["session_id"]).as_py(),
            turns=turns.num_rows,
            turns_compared=drift.num_rows,
            turns_by_tokens=pc.sum(
                pc.equal(links["link_reason"].cast(pa.string()), "tokens")
            ).as_py()
            or 0,
            tokens_sampled=pc.sum(pc.list_value_length(turns["output_ids"])).as_py()
            or 0,
            groups=[
                DriftGroup(
                    region=group["region"],
                    cause=group["cause"],
                    turns=group["count_all"],
                    tokens_beyond=group["size_sum"],
                    tokens_after_drift=group["tokens_after_drift_sum"],
                )
                for group in groups.to_pylist()
            ],
        )

    def plus(self, other: Self) -> Self:
        """Both, of other sessions each; the groups that hold most at stake first."""
        groups: dict[tuple[str, str], DriftGroup] = {}
        for one in (*self.groups, *other.groups):
            known = groups.get((one.region, one.cause))
            groups[one.region, one.cause] = DriftGroup(
                region=one.region,
                cause=one.cause,
                turns=one.turns + (known.turns if known else 0),
                tokens_beyond=one.tokens_beyond + (known.tokens_beyond if known else 0),
                tokens_after_drift=one.tokens_after_drift
                + (known.tokens_after_drift if known else 0),
            )
        return replace(
            self,
            sessions=self.sessions + other.sessions,
            turns=self.turns + other.turns,
            turns_compared=self.turns_compared + other.turns_compared,
            turns_by_tokens=self.turns_by_tokens + other.turns_by_tokens,
            tokens_sampled=self.tokens_sampled + other.tokens_sampled,
            groups=sorted(
                groups.values(), key=lambda one: (-one.tokens_after_drift, -one.turns)
            ),
        )

    def describe(self) -> str:
        """The summary as a table for people."""
        head = ("region", "cause", "turns", "tokens beyond", "tokens at stake")
        lines = [astuple(group) for group in self.groups]
        return (
            f"sessions {self.sessions:,}, turns {self.turns:,}, of which "
            f"{self.turns_compared:,} continue another "
            f"({self.turns_by_tokens:,} by tokens); "
            f"tokens sampled {self.tokens_sampled:,}\n\n" + text_table(head, lines)
        )

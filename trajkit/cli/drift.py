"""``trajkit drift``: where prompts depart from what was held, and what it may cost."""

import argparse
import json
import sys
from dataclasses import asdict, astuple, dataclass
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc

import trajkit as tk
from trajkit.cli.options import Commands, add_policy, add_source, chosen_policy
from trajkit.cli.show import text_table
from trajkit.io import write_table


def add_drift(commands: Commands) -> None:
    """Add ``drift`` to the command line."""
    parser = commands.add_parser(
        "drift",
        help="count drift by region and cause",
        description="Compare every prompt with what was held before it (the prompt and "
        "output of the call that it continues), and count the departures by where they "
        "start and what they look like. 'at stake' are sampled tokens that the prompt "
        "shows otherwise or not at all.",
    )
    add_source(parser)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write the drift table, a line per turn"
    )
    add_policy(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the summary; the exit code is 0."""
    policy = chosen_policy(arguments)
    turns = tk.read_turns(arguments.source)
    links = tk.link(
        turns,
        route=policy.route,
        merge_threshold=policy.merge_threshold,
        equals=policy.equals,
        equality=policy.equality,
        dispatch_tools=policy.dispatch_tools,
    )
    drift = tk.classify_drift(turns, links)
    if arguments.output is not None:
        write_table(drift, arguments.output)
    summary = DriftSummary.of(turns, drift)
    if arguments.json:
        text = json.dumps({"policy": asdict(policy), **asdict(summary)})
    else:
        text = summary.describe()
    sys.stdout.write(text + "\n")
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftGroup:
    """The compared turns whose drift starts in one region and has one cause."""

    region: str
    cause: str
    turns: int
    # held tokens from where the drift starts
    tokens_beyond: int
    # those of them that were sampled
    tokens_at_stake: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftSummary:
    """What a drift table adds up to."""

    sessions: int
    turns: int
    # turns that continue another one
    turns_compared: int
    tokens_sampled: int
    groups: list[DriftGroup]

    @classmethod
    def of(cls, turns: pa.Table, drift: pa.Table) -> Self:
        """The summary of ``drift``, with the groups that hold most at stake first."""
        names = ["region", "cause"]
        groups = (
            pa.table([drift[name].cast(pa.string()) for name in names], names)
            .append_column("size", drift["size"].cast(pa.int64()))
            .append_column("at_stake", drift["at_stake"].cast(pa.int64()))
            .group_by(names)
            .aggregate([([], "count_all"), ("size", "sum"), ("at_stake", "sum")])
            .sort_by([("at_stake_sum", "descending"), ("count_all", "descending")])
        )
        return cls(
            sessions=pc.count_distinct(turns["session_id"]).as_py(),
            turns=turns.num_rows,
            turns_compared=drift.num_rows,
            tokens_sampled=pc.sum(pc.list_value_length(turns["output_ids"])).as_py()
            or 0,
            groups=[
                DriftGroup(
                    region=group["region"],
                    cause=group["cause"],
                    turns=group["count_all"],
                    tokens_beyond=group["size_sum"],
                    tokens_at_stake=group["at_stake_sum"],
                )
                for group in groups.to_pylist()
            ],
        )

    def describe(self) -> str:
        """The summary as a table for people."""
        head = ("region", "cause", "turns", "tokens beyond", "tokens at stake")
        lines = [astuple(group) for group in self.groups]
        return (
            f"sessions {self.sessions:,}, turns {self.turns:,}, of which "
            f"{self.turns_compared:,} continue another; "
            f"tokens sampled {self.tokens_sampled:,}\n\n" + text_table(head, lines)
        )

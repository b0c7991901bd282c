"""``trajkit simulate``: what each policy would keep, lose and cost on a run."""

import argparse
import json
import sys

import pyarrow as pa

from trajkit.analysis.simulation import Simulation, cheapest_lossless
from trajkit.cli.file_options import (
    add_through,
    aside_count,
    look_through,
    rejected_note,
)
from trajkit.cli.options import (
    Commands,
    NamePolicy,
    SetChoice,
    add_facts,
    add_source,
    checked_policy,
    count,
    known_sessions,
)
from trajkit.cli.policy_args import setting
from trajkit.cli.progress import Progress
from trajkit.cli.text import share, text_table
from trajkit.jobs.stages import Made


def add_simulate(commands: Commands) -> None:
    """Add ``simulate`` to the command line."""
    parser = commands.add_parser(
        "simulate",
        help="compare what the policies keep, lose and cost",
        description="Make the rows of every policy, count what they train, lose and "
        "cost, and say which policy keeps everything at least cost. 'forward' are the "
        "tokens of all rows, 'shared once' the same with each shared prefix counted "
        "once.",
    )
    add_source(parser)
    parser.add_argument(
        "--policy",
        metavar="NAME",
        action=NamePolicy,
        help="a policy to look at; may be repeated (default: all of them)",
    )
    parser.add_argument(
        "--set",
        metavar="CHOICE=VALUE",
        action=SetChoice,
        dest="policy",
        type=setting,
        help="make a choice of the policy named before it otherwise; may be repeated",
    )
    add_facts(parser, reward=False)
    parser.add_argument(
        "--pad",
        metavar="N",
        type=count,
        help="count what pads each row to a multiple of N tokens",
    )
    parser.add_argument(
        "--pack",
        metavar="N",
        type=count,
        help="count the packs of N tokens that rows make as trees",
    )
    parser.add_argument(
        "--max-row-tokens", metavar="N", type=count, help="cut rows after N tokens"
    )
    add_through(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the cheapest policy; the exit code is 0."""
    policies = None
    if arguments.policy is not None:
        policies = [checked_policy(*one) for one in arguments.policy]
    counts = Simulation(
        policies,
        pad_to=arguments.pad,
        pack_tokens=arguments.pack,
        sessions=known_sessions(arguments),
        max_row_tokens=arguments.max_row_tokens,
    )

    def stage(turns: pa.Table) -> Made:
        counts.add(turns)
        yield "turns", turns

    with Progress("simulate", "turns") as bar:
        totals = look_through(arguments, stage, {}, bar)
    table = counts.table()
    cheapest = cheapest_lossless(table)
    if arguments.json:
        said = {"cheapest": cheapest, "policies": table.to_pylist()}
        text = json.dumps(said | aside_count(totals))
    else:
        text = rejected_note(arguments, totals) + describe(table, cheapest)
    sys.stdout.write(text + "\n")
    return 0


def describe(table: pa.Table, cheapest: str | None) -> str:
    """The table and what it says, for people."""
    policies = table.to_pylist()
    # a column for each reason that took something somewhere
    reasons = {
        name: name.removeprefix("lost_")
        for name in table.column_names
        if name.startswith("lost_") and any(line[name] for line in policies)
    }
    further = {**reasons, "tokens_duplicated": "duplicated"}
    if any(line["tokens_out_of_context"] for line in policies):
        further["tokens_out_of_context"] = "out of context"
    further |= {"tokens_forward": "forward", "tokens_forward_shared": "shared once"}
    if any(line["tokens_padding"] is not None for line in policies):
        further["tokens_padding"] = "padding"
    further["longest_row"] = "longest row"
    if any(line["packs"] is not None for line in policies):
        further |= {
            "packs": "packs",
            "tokens_packed": "packed",
            "pairs_packed": "attended pairs",
        }
    head = ["policy", "rows", "trained", "of sampled", *further.values()]
    lines = [
        [
            line["policy"],
            line["rows"],
            line["tokens_trained"],
            share(line["tokens_trained"], line["tokens_sampled"]),
            *(line[name] for name in further),
        ]
        for line in policies
    ]
    first = policies[0] if policies else {"turns": 0, "tokens_sampled": 0}
    said = "every policy here loses sampled tokens"
    if cheapest is not None:
        said = f"keeps everything at least cost: {cheapest}"
    return (
        f"turns {first['turns']:,}, tokens sampled {first['tokens_sampled']:,}\n\n"
        f"{text_table(head, lines)}\n\n{said}"
    )

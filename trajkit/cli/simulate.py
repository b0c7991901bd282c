"""``trajkit simulate``: what each policy would keep, lose and cost on a run."""

import argparse
from functools import partial

import pyarrow as pa

from trajkit.analysis.simulation import Simulation, cheapest_lossless
from trajkit.cli.file_options import print_result, run_stage
from trajkit.cli.options import (
    add_policies,
    chosen_policies,
    command,
    known_sessions,
)
from trajkit.cli.progress import Progress
from trajkit.cli.text import share, text_table
from trajkit.jobs.stages import Made


@command(
    "simulate",
    """
compare what the policies keep, lose and cost

Count what the rows of every policy train, lose and cost, and name the policy that keeps
everything at the lowest cost. 'forward' are the tokens of all rows; 'shared once' counts
each shared prefix once.

source, --json, --sessions
--pad N   count the padding of each row to a multiple of N tokens
--pack N  count the packs of N tokens that rows make as trees
--max-row-tokens, --gather, --rejected
""",
    extend=partial(
        add_policies, help="a policy to compare; may be repeated (default: all)"
    ),
)
def run(arguments: argparse.Namespace) -> None:
    """Print the table and the cheapest policy."""
    counts = Simulation(
        chosen_policies(arguments),
        pad_to=arguments.pad,
        pack_tokens=arguments.pack,
        sessions=known_sessions(arguments.sessions),
        max_row_tokens=arguments.max_row_tokens,
    )

    def stage(turns: pa.Table) -> Made:
        counts.add(turns)
        yield "turns", turns

    with Progress("simulate", "turns") as bar:
        totals = run_stage(arguments, stage, {}, bar)
    table = counts.table()
    cheapest = cheapest_lossless(table)
    facts = {"cheapest": cheapest, "policies": table.to_pylist()}
    print_result(arguments, totals, facts, describe(table, cheapest))


def describe(table: pa.Table, cheapest: str | None) -> str:
    """The table and its result, for people."""
    policies = table.to_pylist()
    # only reasons that occur
    reasons = {
        name: name.removeprefix("lost_")
        for name in table.column_names
        if name.startswith("lost_") and any(line[name] for line in policies)
    }
    extra = {**reasons, "tokens_duplicated": "duplicated"}
    if any(line["tokens_out_of_context"] for line in policies):
        extra["tokens_out_of_context"] = "out of context"
    extra |= {"tokens_forward": "forward", "tokens_forward_shared": "shared once"}
    if any(line["tokens_padding"] is not None for line in policies):
        extra["tokens_padding"] = "padding"
    extra["longest_row"] = "longest row"
    if any(line["packs"] is not None for line in policies):
        extra |= {
            "packs": "packs",
            "tokens_packed": "packed",
            "pairs_packed": "attended pairs",
        }
    head = ["policy", "rows", "trained", "of sampled", *extra.values()]
    lines = [
        [
            line["policy"],
            line["rows"],
            line["tokens_trained"],
            share(line["tokens_trained"], line["tokens_sampled"]),
            *(line[name] for name in extra),
        ]
        for line in policies
    ]
    first = policies[0] if policies else {"turns": 0, "tokens_sampled": 0}
    result = "every policy here loses sampled tokens"
    if cheapest is not None:
        result = f"keeps everything at the lowest cost: {cheapest}"
    return (
        f"turns {first['turns']:,}, tokens sampled {first['tokens_sampled']:,}\n\n"
        f"{text_table(head, lines)}\n\n{result}"
    )

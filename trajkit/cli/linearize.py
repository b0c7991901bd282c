"""``trajkit linearize``: a file of turns into a file of training rows."""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

import pyarrow as pa

import trajkit as tk
from trajkit import compute as pc
from trajkit.cli.options import (
    Commands,
    add_policy,
    add_source,
    chosen_policy,
    count,
)
from trajkit.cli.progress import Progress
from trajkit.cli.show import share, text_table
from trajkit.io import write_table
from trajkit.schema import LOSSES
from trajkit.stream import whole_sessions

# Turns that go through at a time: few, so that the bar moves; enough for all threads.
PIECE_TURNS = 4096


def add_linearize(commands: Commands) -> None:
    """Add ``linearize`` to the command line."""
    parser = commands.add_parser(
        "linearize",
        help="write the training rows of recorded turns",
        description="Write the training rows of recorded turns, and print what became "
        "of every sampled token.",
    )
    add_source(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        required=True,
        help="rows: Parquet, Arrow IPC or JSONL, by suffix",
    )
    add_policy(parser)
    parser.add_argument(
        "--max-row-tokens", metavar="N", type=count, help="cut rows after N tokens"
    )
    parser.add_argument(
        "--reward", metavar="X", type=float, help="the reward of every session"
    )
    parser.add_argument(
        "--threads", metavar="N", type=count, help="default: one per processor"
    )
    parser.add_argument(
        "--layout",
        choices=("full", "suffix"),
        default="full",
        help="suffix: write the tokens that rows share once (default: %(default)s)",
    )
    parser.add_argument(
        "--report", metavar="FILE", help="write the report, a line per session"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the rows and print the totals; the exit code is 0."""
    policy = chosen_policy(arguments)
    turns = tk.read_turns(arguments.source)
    rows, report = [], []
    with Progress("linearize", turns.num_rows) as bar:
        for piece in pieces(turns):
            piece_rows, piece_report = tk.linearize(
                piece,
                policy=policy,
                reward=arguments.reward,
                max_row_tokens=arguments.max_row_tokens,
                threads=arguments.threads,
                layout=arguments.layout,
                report=True,
            )
            rows.append(piece_rows)
            report.append(piece_report)
            bar.advance(piece.num_rows)
    tk.write_rows(pa.concat_tables(rows), arguments.output)
    sessions = pa.concat_tables(report)
    if arguments.report is not None:
        write_table(sessions, arguments.report)
    totals = add_up(sessions)
    if arguments.json:
        text = json.dumps(
            {"output": arguments.output, "policy": asdict(policy), **totals}
        )
    else:
        text = f"{describe(totals)}\n\nwritten to {arguments.output}"
    sys.stdout.write(text + "\n")
    return 0


def pieces(turns: pa.Table) -> Iterator[pa.Table]:
    """The turns in tables of whole sessions; a table without turns is one piece."""
    if turns.num_rows == 0:
        yield turns
    yield from whole_sessions(turns.to_batches(max_chunksize=PIECE_TURNS))


def add_up(report: pa.Table) -> dict[str, int]:
    """The sums of the report's counts over all sessions."""
    counts = [field.name for field in report.schema if pa.types.is_integer(field.type)]
    sums = {name: pc.sum(report[name]).as_py() or 0 for name in counts}
    return {"sessions": report.num_rows, **sums}


def describe(totals: dict[str, int]) -> str:
    """What became of the sampled tokens, for people."""
    sampled = totals["tokens_sampled"]
    lines = [("sampled", sampled, "")]
    for name in ("tokens_trained", *(f"lost_{reason}" for reason in LOSSES)):
        words = name.removeprefix("tokens_").replace("_", ", ")
        if totals[name] or name == "tokens_trained":
            lines.append((words, totals[name], share(totals[name], sampled)))
    lines.append(("in all rows", totals["tokens_forward"], ""))
    lines.append(("shared prefixes once", totals["tokens_forward_shared"], ""))
    head = f"sessions {totals['sessions']:,}, turns {totals['turns']:,}"
    left_out = sum(totals[f"rows_{why}"] for why in ("untrained", "cut", "unemitted"))
    return (
        f"{head}, rows {totals['rows']:,} and {left_out:,} left out\n\n"
        + text_table(("tokens", "count", "of sampled"), lines)
    )

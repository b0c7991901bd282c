"""``trajkit pack``: rows to micro-batches of trees."""

import argparse
import sys

import trajkit as tk
from trajkit.cli.options import Commands, count
from trajkit.io.tables import write_table


def add_pack(commands: Commands) -> None:
    """Add ``pack`` to the command line."""
    parser = commands.add_parser(
        "pack",
        help="pack rows into micro-batches that hold every shared prefix once",
        description="Pack rows into micro-batches of at most N tokens. Rows of a session "
        "share their prefixes as a tree, and every trained token has an edge, which says "
        "the token of the pack that predicts it.",
    )
    parser.add_argument("rows", metavar="ROWS", help="rows, in a file or a directory")
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        required=True,
        help="packs: Parquet, Arrow IPC or JSONL, by suffix",
    )
    parser.add_argument(
        "--max-tokens",
        metavar="N",
        type=count,
        required=True,
        help="tokens of a pack; 1.25 to 1.5 times the longest row leaves little to repeat",
    )
    parser.add_argument(
        "--layout",
        choices=("tree", "rows"),
        default="tree",
        help="rows: they share nothing (default: %(default)s)",
    )
    parser.add_argument(
        "--share",
        choices=("session", "group"),
        default="session",
        help="group: the sessions of a group share what their first rows begin with",
    )
    parser.add_argument(
        "--oversize",
        choices=("repeat", "carry", "error"),
        default="repeat",
        help="a tree of more tokens is cut and repeats prefixes, is carried over several "
        "packs, or is refused (default: %(default)s)",
    )
    parser.add_argument(
        "--align",
        metavar="N",
        type=count,
        default=1,
        help="pad packs to a multiple of N tokens",
    )
    parser.add_argument(
        "--column",
        metavar="NAME",
        action="append",
        default=[],
        help="give edges this column of the rows, as edge_NAME; may be repeated",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the packs and print what they hold; the exit code is 0."""
    rows = tk.read_rows(arguments.rows)
    packs = tk.pack(
        rows,
        arguments.max_tokens,
        layout=arguments.layout,
        share=arguments.share,
        oversize=arguments.oversize,
        align=arguments.align,
        columns=arguments.column,
    )
    write_table(packs, arguments.output)
    n_tokens = int(packs["n_tokens"].to_numpy().sum())
    n_edges = sum(map(len, packs["edge_source"].to_pylist()))
    room = max(packs.num_rows * arguments.max_tokens, 1)
    sys.stdout.write(
        f"{rows.num_rows:,} rows in {packs.num_rows:,} packs: {n_tokens:,} tokens, "
        f"{n_tokens / room:.1%} full, {n_edges:,} edges\n"
    )
    return 0

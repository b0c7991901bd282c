"""``trajkit pack``: rows to micro-batches of trees."""

import argparse
import sys

import trajkit as tk
from trajkit.cli.options import command, read_rows
from trajkit.io.tables import write_table


@command(
    "pack",
    """
pack rows into micro-batches that hold every shared prefix once

Pack rows into micro-batches of at most N tokens. Rows of a session share their prefixes as
a tree, and every trained token has an edge, which says the token of the pack that predicts
it.

rows ROWS         rows, in a file or a directory
-o --out OUT!  packs: Parquet, Arrow IPC or JSONL, by suffix
--max-tokens N!   tokens of a pack; 1.25 to 1.5 times the longest row leaves little to
                  repeat
--layout {tree,rows}  rows: they share nothing (default: %(default)s)
--share {session,group}  group: the sessions of a group share what their first rows begin
                  with
--oversize {repeat,carry,error}  a tree of more tokens is cut and repeats prefixes, is
                  carried over several packs, or is refused (default: %(default)s)
--align N 1       pad packs to a multiple of N tokens
--column NAME...  give edges this column of the rows, as edge_NAME; may be repeated
""",
    writes="packs",
)
def run(arguments: argparse.Namespace) -> None:
    """Write the packs and print what they hold."""
    rows = read_rows(arguments.rows)
    packs = tk.pack(
        rows,
        arguments.max_tokens,
        layout=arguments.layout,
        share=arguments.share,
        oversize=arguments.oversize,
        align=arguments.align,
        columns=arguments.column,
    )
    write_table(packs, arguments.out)
    n_tokens = int(packs["n_tokens"].to_numpy().sum())
    n_edges = sum(map(len, packs["edge_source"].to_pylist()))
    room = max(packs.num_rows * arguments.max_tokens, 1)
    sys.stdout.write(
        f"{rows.num_rows:,} rows in {packs.num_rows:,} packs: {n_tokens:,} tokens, "
        f"{n_tokens / room:.1%} full, {n_edges:,} edges\n"
    )

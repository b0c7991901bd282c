"""``trajkit compact`` and ``trajkit expand``: a log of turns from one form to the other."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

import trajkit as tk
from trajkit.cli.linearize import pieces
from trajkit.cli.options import Commands, add_source
from trajkit.cli.progress import Progress
from trajkit.io_formats import paths_in


def add_compact(commands: Commands) -> None:
    """Add ``compact`` to the command line."""
    parser = commands.add_parser(
        "compact",
        help="write recorded turns in delta form",
        description="Write recorded turns in delta form: each prompt as what it adds to "
        "an earlier turn. Every command reads that form, and expand is the inverse.",
    )
    _complete(parser, tk.compact, "Parquet or Arrow IPC, by suffix")


def add_expand(commands: Commands) -> None:
    """Add ``expand`` to the command line."""
    parser = commands.add_parser(
        "expand",
        help="write turns in delta form with their whole prompts",
        description="Write turns with their whole prompts and all of their messages: "
        "the inverse of compact.",
    )
    _complete(parser, tk.expand, "Parquet, Arrow IPC or JSONL, by suffix")


def _complete(
    parser: argparse.ArgumentParser,
    change: Callable[[pa.Table], pa.Table],
    formats: str,
) -> None:
    add_source(parser)
    parser.add_argument(
        "-o", "--output", metavar="OUT", required=True, help=f"turns: {formats}"
    )

    def run(arguments: argparse.Namespace) -> int:
        """Write the turns and print what they take; the exit code is 0."""
        turns = tk.read_turns(arguments.source)
        with Progress("turns", turns.num_rows) as bar:

            def changed() -> Iterator[pa.RecordBatch]:
                for piece in pieces(turns):
                    table = change(piece)
                    yield from table.to_batches() or [_nothing(table.schema)]
                    bar.advance(piece.num_rows)

            tk.write_turns(changed(), arguments.output)
        before = sum(path.stat().st_size for path in paths_in(Path(arguments.source)))
        after = Path(arguments.output).stat().st_size
        if arguments.json:
            said = {"output": arguments.output, "turns": turns.num_rows}
            text = json.dumps({**said, "bytes_before": before, "bytes_after": after})
        else:
            text = (
                f"turns {turns.num_rows:,}, bytes {before:,} before and {after:,} after\n\n"
                f"written to {arguments.output}"
            )
        sys.stdout.write(text + "\n")
        return 0

    parser.set_defaults(run=run)


def _nothing(schema: pa.Schema) -> pa.RecordBatch:
    """A batch without turns, so that the file still says of which form it is."""
    return pa.RecordBatch.from_pylist([], schema)

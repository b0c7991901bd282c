"""``trajkit compact`` and ``trajkit expand``: a log of turns from one form to the other."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from trajkit.cli.file_options import add_through, through, written
from trajkit.cli.options import Commands, add_source
from trajkit.cli.progress import Progress
from trajkit.io.formats import paths_in
from trajkit.io.tables import log_files
from trajkit.jobs.stages import compact_file, expand_file


def add_compact(commands: Commands) -> None:
    """Add ``compact`` to the command line."""
    parser = commands.add_parser(
        "compact",
        help="write recorded turns in delta form",
        description="Write recorded turns in delta form: each prompt as what it adds to "
        "an earlier turn. Every command reads that form, and expand is the inverse.",
    )
    parser.set_defaults(writes_delta=True)
    _complete(parser, compact_file, "Parquet or Arrow IPC, by suffix")


def add_expand(commands: Commands) -> None:
    """Add ``expand`` to the command line."""
    parser = commands.add_parser(
        "expand",
        help="write turns in delta form with their whole prompts",
        description="Write turns with their whole prompts and all of their messages: "
        "the inverse of compact.",
    )
    _complete(parser, expand_file, "Parquet, Arrow IPC or JSONL, by suffix")


def _complete(
    parser: argparse.ArgumentParser,
    change: Callable[..., dict[str, int]],
    formats: str,
) -> None:
    add_source(parser)
    parser.add_argument(
        "-o",
        "--output",
        metavar="OUT",
        required=True,
        help=f"turns: {formats}; or a directory, with a / behind, for parts in Parquet: "
        "a run that was stopped goes on there",
    )
    add_through(parser)

    def run(arguments: argparse.Namespace) -> int:
        """Write the turns and print what they take; the exit code is 0."""
        with Progress(parser.prog.split()[-1], "turns") as bar:
            totals = change(
                arguments.source, arguments.output, **through(arguments, bar)
            )
        before = taken(log_files(arguments.source)[0])
        after = taken(paths_in(Path(arguments.output)))
        if arguments.json:
            said = {"output": arguments.output, **totals}
            text = json.dumps({**said, "bytes_before": before, "bytes_after": after})
        else:
            text = (
                f"turns {totals['turns']:,}, bytes {before:,} before and {after:,} "
                f"after\n\n{written(arguments, totals)}"
            )
        sys.stdout.write(text + "\n")
        return 0

    parser.set_defaults(run=run)


def taken(files: Iterable[Path]) -> int:
    """Bytes of all files together."""
    return sum(file.stat().st_size for file in files)

"""``trajkit compact`` and ``trajkit expand``: turns in delta form, and back."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

from trajkit.cli.file_options import add_job_options, job_options, print_written
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
        description="Write recorded turns in delta form: of each prompt, only the part "
        "that an earlier turn does not have. Every command reads that form; expand is "
        "the inverse.",
    )
    parser.set_defaults(writes_delta=True)
    _complete(parser, compact_file, "Parquet or Arrow IPC, by suffix")


def add_expand(commands: Commands) -> None:
    """Add ``expand`` to the command line."""
    parser = commands.add_parser(
        "expand",
        help="write turns with complete prompts",
        description="Write turns with complete prompts and messages: the inverse of "
        "compact.",
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
        help=f"turns: {formats}; or DIRECTORY/ for parts in Parquet, where an "
        "interrupted run continues",
    )
    add_job_options(parser)

    def run(arguments: argparse.Namespace) -> int:
        """Write the turns and print their size; the exit code is 0."""
        with Progress(parser.prog.split()[-1], "turns") as bar:
            totals = change(
                arguments.source, arguments.output, **job_options(arguments, bar)
            )
        before = total_size(log_files(arguments.source)[0])
        after = total_size(paths_in(Path(arguments.output)))
        facts = {**totals, "bytes_before": before, "bytes_after": after}
        text = f"turns {totals['turns']:,}, bytes {before:,} before and {after:,} after"
        print_written(arguments, totals, facts, text)
        return 0

    parser.set_defaults(run=run)


def total_size(files: Iterable[Path]) -> int:
    """The bytes of all files."""
    return sum(file.stat().st_size for file in files)

"""``trajkit compact`` and ``trajkit expand``: turns in delta form, and back."""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path

import pyarrow as pa

import trajkit as tk
from trajkit.cli.file_options import job_options, print_written
from trajkit.cli.options import command
from trajkit.cli.progress import Progress
from trajkit.io.formats import paths_in
from trajkit.io.run import run
from trajkit.io.tables import log_files


def total_size(files: Iterable[Path]) -> int:
    """The bytes of all files."""
    return sum(file.stat().st_size for file in files)


def _change(
    arguments: argparse.Namespace, name: str, change: Callable[[pa.Table], pa.Table]
) -> None:
    """Write the turns and print their size."""
    with Progress(name, "turns") as bar:
        options = job_options(arguments, bar)
        totals = run(
            arguments.source, change, arguments.out, resume={"stage": name}, **options
        )
    before = total_size(log_files(arguments.source)[0])
    after = total_size(paths_in(Path(arguments.out)))
    facts = {**totals, "bytes_before": before, "bytes_after": after}
    text = f"turns {totals['turns']:,}, bytes {before:,} before and {after:,} after"
    print_written(arguments, totals, facts, text)


@command(
    "compact",
    """
write recorded turns in delta form

Write recorded turns in delta form: of each prompt, only the part that an earlier turn does
not have. Every command reads that form; expand is the inverse.

source, --json
-o --out OUT!  turns: Parquet or Arrow IPC, by suffix; or DIRECTORY/ for parts in
                   Parquet, where an interrupted run continues
--gather, --rejected
""",
    extend=lambda parser: parser.set_defaults(writes_delta=True),
    writes="turns",
)
def run_compact(arguments: argparse.Namespace) -> None:
    """Write the delta form; see `_change`."""
    _change(arguments, "compact", tk.compact)


@command(
    "expand",
    """
write turns with complete prompts

Write turns with complete prompts and messages: the inverse of compact.

source, --json
-o --out OUT!  turns: Parquet, Arrow IPC or JSONL, by suffix; or DIRECTORY/ for parts in
                  Parquet, where an interrupted run continues
--gather, --rejected
""",
    writes="turns",
)
def run_expand(arguments: argparse.Namespace) -> None:
    """Write the full form; see `_change`."""
    _change(arguments, "expand", tk.expand)

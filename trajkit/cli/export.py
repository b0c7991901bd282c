"""``trajkit export``: rows in the format of a trainer."""

import argparse
import sys

import trajkit as tk
from trajkit.cli.options import command, known_sessions
from trajkit.export import FILE_FORMATS


@command(
    "export",
    """
write rows in the format of a trainer

Check rows and write them in the format of a trainer: slime's debug rollout file, Parquet
for supervised training, or JSON Lines with the fields of the trainer's classes.
docs/export.md lists the formats.

source ROWS      rows: Parquet, Arrow IPC or JSONL by suffix, or a directory of them
--to             trainer
-o --output DIR!  a directory for the file; it is made if it does not exist
--sessions FILE  sessions with rewards and groups: adds advantages to the rows
--baseline {group_mean,none,leave_one_out}  baseline of the advantages (default: group_mean)
""",
    to={"required": True, "choices": FILE_FORMATS},
)
def run(arguments: argparse.Namespace) -> None:
    """Write the file."""
    from trajkit.export.files import TARGETS

    rows = tk.read_rows(arguments.source)
    sessions = known_sessions(arguments.sessions)
    if sessions is not None:
        gains = tk.training.advantages(sessions, arguments.baseline)
        rows = tk.add_advantages(rows, gains)
    arguments.output.mkdir(parents=True, exist_ok=True)
    path = TARGETS[arguments.to](rows, arguments.output)
    sys.stdout.write(f"{path}: {rows.num_rows} rows for {arguments.to}\n")

"""``trajkit export``: rows in the format of a trainer."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import trajkit as tk
from trajkit.cli.options import command, known_sessions, read_rows
from trajkit.cli.standard import inputs
from trajkit.export import FILE_FORMATS
from trajkit.io.guard import check_outputs


@command(
    "export",
    """
write rows in the format of a trainer

Check rows and write them in the format of a trainer: slime's debug rollout file, Parquet
for supervised training, or JSON Lines with the fields of the trainer's classes.
docs/export.md lists the formats.

rows ROWS        rows: Parquet, Arrow IPC or JSONL by suffix, or a directory of them
--to             trainer
-o --out DIR!  a directory for the file; it is made if it does not exist
--sessions FILE  sessions with rewards and groups: adds advantages to the rows
--baseline {group_mean,none,leave_one_out}  baseline of the advantages (default: group_mean)
""",
    to={"required": True, "choices": FILE_FORMATS},
    writes="export",
)
def run(arguments: argparse.Namespace) -> None:
    """Write the file."""
    from trajkit.export.files import TARGETS

    rows = read_rows(arguments.rows)
    sessions = known_sessions(arguments.sessions)
    if sessions is not None:
        gains = tk.training.advantages(sessions, arguments.baseline)
        rows = tk.add_advantages(rows, gains)
    folder: Path = arguments.out
    if folder.suffix and not folder.is_dir():
        raise tk.errors.ArgumentError(
            f"--out {folder}: expected a directory, in which the file gets its name"
        )
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".trajkit-export-", dir=folder) as drafts:
        draft = TARGETS[arguments.to](rows, Path(drafts))
        path = folder / draft.name
        check_outputs(
            {"the file": (path, "export")},
            inputs(arguments),
            clobber=not arguments.no_clobber,
        )
        os.replace(draft, path)
    sys.stdout.write(f"{path}: {rows.num_rows} rows for {arguments.to}\n")

"""``trajkit export``: rows in a file that a trainer loads by itself."""

import argparse
import sys
import warnings
from typing import Any

import trajkit as tk
from trajkit.cli.options import command, known_sessions, read_rows
from trajkit.cli.standard import inputs
from trajkit.errors import ArgumentError, ExportError, NoSignalWarning
from trajkit.export import FILE_FORMATS
from trajkit.io.guard import check_outputs

_ADVANTAGES: dict[str, dict[str, Any]] = {
    "group_mean": {"baseline": "group_mean"},
    "group_std": {"baseline": "group_mean", "scale": "group_std"},
    "leave_one_out": {"baseline": "leave_one_out"},
    "none": {"baseline": "none"},
}

_OPTIONS: dict[str, dict[str, str | None]] = {
    "max_length": {
        "sft": "max_length",
        "llama-factory": "max_length",
        "prime-rl": "seq_len",
    },
    "ranks": {"prime-rl": "ranks"},
    "temperature": {"prime-rl": "temperature"},
    "advantage": {"prime-rl": None, "tinker": None},
    "sessions": {"prime-rl": None, "tinker": None},
}
"""The targets of each option, and its name as an argument there."""


@command(
    "export",
    """
write rows in a file that a trainer loads

Check rows and write them in a file that a trainer loads by itself: slime's debug rollout
data, Parquet for supervised training in TRL and Axolotl (sft) or SkyRL (skyrl-sft), a
folder for LLaMA-Factory, the micro-batches of a step for prime-rl, or the arguments of
Tinker's Datum as JSON Lines. docs/trainers.md has the lines of Python for other trainers.

rows ROWS        rows: Parquet, Arrow IPC or JSONL by suffix, or a directory of them
--to             trainer
-o --out DIR!    a directory for the file; it is made if it does not exist
--advantage NAME  prime-rl, tinker: add advantages from rewards and groups, one of
                 group_mean, group_std, leave_one_out, none (default: group_mean with
                 --sessions, else those of the rows)
--sessions FILE  prime-rl, tinker: the rewards and groups, instead of those of the rows: a
                 file of sessions, or the report of linearize
--max-length N   the trainer's limit for a row: SFTConfig.max_length, prime-rl's seq_len
                 (default: 2048). Longer rows are refused
--ranks N        prime-rl: data-parallel ranks of the trainer (default: 1)
--temperature X  prime-rl: the temperature that sampled the rows (default: 1)
""",
    to={"required": True, "choices": FILE_FORMATS},
    writes="export",
    advantage={"choices": [*_ADVANTAGES]},
)
def run(arguments: argparse.Namespace) -> None:
    """Write the file."""
    from trajkit.export.files import path_of, write_export

    options: dict[str, object] = {"seq_len": 2048} if arguments.to == "prime-rl" else {}
    for name, targets in _OPTIONS.items():
        value = getattr(arguments, name)
        if value is None:
            continue
        if arguments.to not in targets:
            raise ArgumentError(
                f"--{name.replace('_', '-')} does nothing with --to {arguments.to}: it is "
                f"for {' and '.join(targets)}"
            )
        argument = targets[arguments.to]
        if argument is not None:
            options[argument] = value
    folder = arguments.out
    check_outputs(
        {"the file": (path_of(arguments.to, folder), "export")},
        inputs(arguments),
        clobber=not arguments.no_clobber,
    )
    rows = read_rows(arguments.rows)
    with warnings.catch_warnings():
        # A file of such rows would be of no use.
        warnings.simplefilter("error", NoSignalWarning)
        try:
            if arguments.advantage or arguments.sessions:
                sessions = known_sessions(arguments.sessions)
                if sessions is None:
                    sessions = tk.export.sessions_of(rows)
                chosen = _ADVANTAGES[arguments.advantage or "group_mean"]
                gains = tk.learn.advantages(sessions, **chosen)
                rows = tk.add_advantages(rows, gains)
            path = write_export(rows, arguments.to, folder, **options)
        except NoSignalWarning as warning:
            raise ExportError(str(warning)) from None
    sys.stdout.write(f"{path}: {rows.num_rows} rows for {arguments.to}\n")

"""``trajkit export``: rows in a file that a trainer loads by itself."""

import warnings
from pathlib import Path
from typing import Annotated, Any, Literal

import trajkit as tk
from trajkit.cli.files import Writes
from trajkit.cli.options import (
    OUT,
    Count,
    NoClobber,
    Rows,
    SessionsFile,
    known_sessions,
    print_text,
    read_rows,
)
from trajkit.cli.screen import working
from trajkit.errors import ArgumentError, ExportError, NoSignalWarning
from trajkit.export import FILE_FORMATS
from trajkit.files.guard import check_outputs, inputs_of, turns_inputs

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


def export(
    rows: Rows,
    /,
    *,
    to: Literal[tuple(FILE_FORMATS)],  # type: ignore[valid-type]
    out: Annotated[str, OUT, Writes("export")],
    advantage: Literal["group_mean", "group_std", "leave_one_out", "none"]
    | None = None,
    sessions: SessionsFile = None,
    max_length: Count | None = None,
    ranks: Count | None = None,
    temperature: float | None = None,
    no_clobber: NoClobber = False,
) -> None:
    """Write rows in a file that a trainer loads.

    Rows are checked, and written as slime's debug rollout data, Parquet for supervised
    training in TRL and Axolotl (sft) or SkyRL (skyrl-sft), a folder for LLaMA-Factory, the
    micro-batches of a step for prime-rl, or the arguments of Tinker's Datum as JSON Lines.
    docs/trainers.md has the lines of Python for other trainers.

    Parameters
    ----------
    to
        The trainer.
    out
        A directory for the file; it is made if it does not exist.
    advantage
        prime-rl, tinker: add advantages from rewards and groups (default: group_mean with
        --sessions, else those of the rows).
    max_length
        The trainer's limit for a row: SFTConfig.max_length, prime-rl's seq_len (default:
        2048). Longer rows are refused.
    ranks
        prime-rl: data-parallel ranks of the trainer (default: 1).
    temperature
        prime-rl: the temperature that sampled the rows (default: 1).
    """
    from trajkit.export.files import path_of, write_export

    values = {
        "max_length": max_length,
        "ranks": ranks,
        "temperature": temperature,
        "advantage": advantage,
        "sessions": sessions,
    }
    options: dict[str, object] = {"seq_len": 2048} if to == "prime-rl" else {}
    for name, targets in _OPTIONS.items():
        if values[name] is None:
            continue
        if to not in targets:
            raise ArgumentError(
                f"--{name.replace('_', '-')} does nothing with --to {to}: it is for "
                f"{' and '.join(targets)}"
            )
        argument = targets[to]
        if argument is not None:
            options[argument] = values[name]
    folder = Path(out)
    check_outputs(
        {"the file": (path_of(to, folder), "export")},
        [*inputs_of([rows]), *turns_inputs([sessions] if sessions else [])],
        clobber=not no_clobber,
    )
    table = read_rows(rows)
    with warnings.catch_warnings():
        # A file of such rows would be of no use.
        warnings.simplefilter("error", NoSignalWarning)
        try:
            if advantage or sessions:
                facts = known_sessions(sessions)
                if facts is None:
                    facts = tk.export.sessions_of(table)
                chosen = _ADVANTAGES[advantage or "group_mean"]
                table = tk.add_advantages(table, tk.learn.advantages(facts, **chosen))
            with working("writing"):
                path = write_export(table, to, folder, **options)
        except NoSignalWarning as warning:
            raise ExportError(str(warning)) from None
    print_text(f"{path}: {table.num_rows} rows for {to}")

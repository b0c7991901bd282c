"""``trajkit linearize``, ``compact``, ``expand``, ``pack``, ``export``: file to file."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import pyarrow as pa

import trajkit as tk
from trajkit.cli.files import Writes
from trajkit.cli.options import (
    OUT,
    Count,
    Job,
    Json,
    MaxRowTokens,
    NoClobber,
    Rows,
    SessionsFile,
    Turns,
    facts_of,
    known_sessions,
    print_json,
    print_text,
    read_rows,
)
from trajkit.cli.policies import PolicyOption, one_policy
from trajkit.cli.screen import share, text_table, working
from trajkit.errors import ArgumentError, ExportError, NoSignalWarning
from trajkit.export import FILE_FORMATS
from trajkit.files.formats import paths_in
from trajkit.files.guard import check_outputs, inputs_of, turns_inputs
from trajkit.files.run import facts_digest
from trajkit.files.tables import log_files, write_table
from trajkit.learn.weights import By
from trajkit.schema import LOSSES
from trajkit.turns.session_metadata import session_facts

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


def linearize(
    source: Turns,
    /,
    *,
    out: Annotated[str, OUT, Writes("rows")],
    policy: PolicyOption = None,
    sessions: SessionsFile = None,
    reward: float | None = None,
    weigh_by: By = "token",
    max_row_tokens: MaxRowTokens = None,
    dedup: bool = False,
    report: Annotated[str | None, Writes("report")] = None,
    threads: Count | None = None,
    job: Job | None = None,
    json: Json = False,
    no_clobber: NoClobber = False,
) -> None:
    """Write the training rows of recorded turns.

    Print how many sampled tokens are trained, and why others are lost.

    Parameters
    ----------
    out
        Rows: Parquet, Arrow IPC or JSONL, by suffix; or DIRECTORY/ for parts, where an
        interrupted run continues; - is standard output.
    reward
        The reward of every session, instead of --sessions.
    weigh_by
        What row_weight is: the row's trained tokens over the rollout's N; 1 over the
        rollout's rows that train; or 1 / N.
    dedup
        Store tokens that rows share only once.
    report
        Write the report to this file, a line per session.
    threads
        In addition to those that read and write (default: 1).
    """
    job = job or Job()
    chosen = one_policy(policy)
    rewards: dict[str, Any] = facts_of(sessions, reward)
    options: dict[str, Any] = {"max_row_tokens": max_row_tokens}

    def stage(turns: pa.Table) -> dict[str, Iterable[pa.RecordBatch]]:
        counts: list[pa.RecordBatch] = []
        rows = tk.linearize_batches(
            turns,
            chosen,
            report=counts,
            threads=threads or 1,
            **rewards,
            **options,
        )
        if weigh_by != "token":  # the weights that rows have
            rows = tk.add_weights_batches(rows, weigh_by)
        return {"rows": rows, "report": counts}

    resume = {
        "stage": "linearize",
        "policy": asdict(chosen),
        "reward": facts_digest(session_facts(**rewards)),
        "weigh_by": weigh_by,
        **options,
    }
    outputs = {"rows": out, **({} if report is None else {"report": report})}
    totals = job.run("linearize", source, stage, outputs, resume, dedup=dedup)
    facts = {"output": out, "policy": asdict(chosen), **totals}
    job.print(totals, facts, f"{describe(totals)}\n\nwritten to {out}", json)


def describe(totals: dict[str, int]) -> str:
    """The totals of rows as a table of tokens, for people."""
    sampled = totals["tokens_sampled"]
    lines = [("sampled", sampled, "")]
    for name in ("tokens_trained", *(f"lost_{reason}" for reason in LOSSES)):
        words = (
            name.removeprefix("tokens_").replace("lost_", "lost, ").replace("_", " ")
        )
        if totals[name] or name == "tokens_trained":
            lines.append((words, totals[name], share(totals[name], sampled)))
    lines.append(("in all rows", totals["tokens_forward"], ""))
    lines.append(("shared prefixes once", totals["tokens_forward_shared"], ""))
    left_out = ", ".join(
        f"{totals[name]:,} {words}"
        for name, words in _LEFT_OUT.items()
        if totals[name] or name == "rows_untrained"
    )
    return (
        f"sessions {totals['sessions']:,}, turns {totals['turns']:,}, "
        f"{totals['rows']:,} rows; left out: {left_out}\n\n"
        + text_table(("tokens", "count", "of sampled"), lines)
    )


_LEFT_OUT = {
    "rows_untrained": "without a trained token",
    "rows_cut": "without a response token after truncation",
    "rows_over_max_rows": "beyond max_rows",
}


def compact(
    source: Turns,
    /,
    *,
    out: Annotated[str, OUT, Writes("turns", piped="arrows")],
    job: Job | None = None,
    json: Json = False,
    no_clobber: NoClobber = False,
) -> None:
    """Write recorded turns in delta form.

    Of each prompt, that form has only what an earlier turn does not have. Every command
    reads it; expand is the inverse.

    Parameters
    ----------
    out
        Turns: Parquet or Arrow IPC, by suffix; or DIRECTORY/ for parts in Parquet, where an
        interrupted run continues; - is standard output.
    """
    _change(tk.compact, "compact", source, out, job or Job(), json)


def expand(
    source: Turns,
    /,
    *,
    out: Annotated[str, OUT, Writes("turns")],
    job: Job | None = None,
    json: Json = False,
    no_clobber: NoClobber = False,
) -> None:
    """Write turns with complete prompts.

    Messages are complete, too: the inverse of compact.

    Parameters
    ----------
    out
        Turns: Parquet, Arrow IPC or JSONL, by suffix; or DIRECTORY/ for parts in Parquet,
        where an interrupted run continues; - is standard output.
    """
    _change(tk.expand, "expand", source, out, job or Job(), json)


def _change(
    change: Callable[[pa.Table], pa.Table],
    name: str,
    source: list[str],
    out: str,
    job: Job,
    json: bool,
) -> None:
    """Write the turns and print their size."""
    totals = job.run(name, source, change, out, {"stage": name})
    before = total_size(log_files(source)[0])
    after = total_size(paths_in(Path(out)))
    sizes = {"bytes_before": before, "bytes_after": after}
    text = f"turns {totals['turns']:,}, bytes {before:,} before and {after:,} after"
    facts = {"output": out, **totals, **sizes}
    job.print(totals, facts, f"{text}\n\nwritten to {out}", json)


def total_size(files: Iterable[Path]) -> int:
    """The bytes of all files."""
    return sum(file.stat().st_size for file in files)


def pack(
    rows: Rows,
    /,
    *,
    out: Annotated[str, OUT, Writes("packs")],
    max_tokens: Count,
    layout: Literal["tree", "rows"] = "tree",
    share: Literal["session", "group"] = "session",
    oversize: Literal["repeat", "carry", "error"] = "repeat",
    align: Count = 1,
    column: list[str] | None = None,
    json: Json = False,
    no_clobber: NoClobber = False,
) -> None:
    """Pack rows into micro-batches that hold every shared prefix once.

    Rows of a session share their prefixes as a tree, and every trained token has an edge,
    which says the token of the pack that predicts it.

    Parameters
    ----------
    out
        Packs: Parquet, Arrow IPC or JSONL, by suffix; - is standard output.
    max_tokens
        Tokens of a pack, at most; 1.25 to 1.5 times the longest row leaves little to
        repeat.
    layout
        rows: they share nothing.
    share
        group: the sessions of a group share what their first rows begin with.
    oversize
        A tree of more tokens is cut and repeats prefixes, is carried over several packs, or
        is refused.
    align
        Pad packs to a multiple of this many tokens.
    column
        Give edges this column of the rows, as edge_COLUMN; may be repeated.
    """
    table = read_rows(rows)
    with working("packing"):
        packs = tk.pack(
            table,
            max_tokens,
            layout=layout,
            share=share,
            oversize=oversize,
            align=align,
            columns=column or [],
        )
        write_table(packs, out)
    counts = {
        "rows": table.num_rows,
        "packs": packs.num_rows,
        "tokens": int(packs["n_tokens"].to_numpy().sum()),
        "edges": sum(map(len, packs["edge_source"].to_pylist())),
    }
    if json:
        print_json({"output": out, **counts})
        return
    full = counts["tokens"] / max(packs.num_rows * max_tokens, 1)
    print_text(
        f"{counts['rows']:,} rows in {counts['packs']:,} packs: {counts['tokens']:,} "
        f"tokens, {full:.1%} full, {counts['edges']:,} edges"
    )


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
    json: Json = False,
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
    if json:
        print_json({"output": str(path), "rows": table.num_rows, "to": to})
    else:
        print_text(f"{path}: {table.num_rows} rows for {to}")

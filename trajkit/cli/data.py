"""Commands from file to file: import, linearize, compact, expand, pack and export."""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import polars as pl
import pyarrow as pa
from cyclopts import Parameter

import trajkit as tk
from trajkit.cli.files import Reads, Writes
from trajkit.cli.options import (
    JOB,
    OUT,
    Count,
    Job,
    Json,
    MaxRowTokens,
    NoClobber,
    Reward,
    Rows,
    SessionsFile,
    Turns,
    facts_of,
    known_sessions,
    print_result,
    read_rows,
)
from trajkit.cli.policies import PolicyOption, one_policy
from trajkit.cli.screen import Progress, share, text_table
from trajkit.errors import (
    ArgumentError,
    ExportError,
    InvalidTurnsError,
    NoSignalWarning,
)
from trajkit.export import FILE_FORMATS
from trajkit.files.formats import paths_in
from trajkit.files.guard import check_outputs, inputs_of, turns_inputs
from trajkit.files.run import Watch, facts_digest
from trajkit.files.tables import log_files, write_table
from trajkit.importers import FORMATS, TARGETS
from trajkit.learn.weights import By
from trajkit.schema import LOSSES
from trajkit.turns.mapping import merged_map
from trajkit.turns.session_metadata import session_facts

# details of a problem of an import; the report has all
_MOST_DETAILS = 4


def import_(
    source: Annotated[list[str], Reads("records")],
    /,
    *,
    out: Annotated[str, OUT, Writes("turns")],
    format: Annotated[
        Literal[("auto", *FORMATS)],  # type: ignore[valid-type]
        Parameter(name="--from"),
    ] = "auto",
    map: Annotated[
        list[str] | None,
        Parameter(
            help="where the records have a field, as FIELD=PATH,... such as "
            "session_id=trajectory_id,reward=metadata.score; or a TOML file; may be "
            f"repeated. Fields: {', '.join(TARGETS)}"
        ),
    ] = None,
    tokenizer: Annotated[str | None, Reads("tokenizer")] = None,
    chat_template: Annotated[str | None, Reads("tokenizer")] = None,
    contradicted: Literal["untrain", "train"] = "untrain",
    nonfinite_logprobs: Literal["raise", "null"] = "raise",
    report: Annotated[str | None, Writes("report")] = None,
    json: Json = False,
    no_clobber: NoClobber = False,
) -> None:
    """Write turns from the records of another system.

    Records are logs, dumps, captures, databases and transcripts. Missing facts are not
    guessed: they are counted and shown, and the report lists each of them.

    Parameters
    ----------
    source
        Files, patterns, directories, addresses (s3://...), or - for standard input.
    out
        Turns: Parquet, Arrow IPC or JSONL, by suffix; - is standard output.
    format
        The format of the records; auto: by the files.
    tokenizer
        For text: the model's directory, or its tokenizer.json.
    chat_template
        For text: a template to use instead of the tokenizer's own.
    contradicted
        A turn whose usage states other numbers of tokens than it has ids: context only, or
        trained.
    nonfinite_logprobs
        Invalid logprobs (NaN, -9999): leave their record out, or make them null.
    report
        Write the report to this file: a line per record and problem.
    """
    chat_tokenizer = None
    if tokenizer is not None:
        from trajkit.cli.tokenizer import load_chat_tokenizer

        template = None if chat_template is None else Path(chat_template)
        chat_tokenizer = load_chat_tokenizer(Path(tokenizer), template)
    elif chat_template is not None:
        raise ArgumentError("--chat-template needs --tokenizer")
    with Progress("import", "turns") as bar:
        totals, table = tk.importers.import_file(
            source,
            out,
            format,
            map=merged_map(map),
            tokenizer=chat_tokenizer,
            contradicted=contradicted,
            nonfinite_logprobs=nonfinite_logprobs,
            watch=Watch(lambda index, done: bar.begin(index.n_turns), bar.advance),
        )
    if report is not None:
        write_table(table, report)
    details = pl.col("detail").drop_nulls().unique(maintain_order=True)
    problems = (
        pl.DataFrame(table)
        .group_by("problem", "kept", maintain_order=True)
        .agg(
            pl.exclude("problem", "kept").first(),
            pl.len().alias("count"),
            details.head(_MOST_DETAILS).alias("details"),
        )
        .to_dicts()
    )
    text = f"sessions {totals['sessions']:,}, turns {totals['turns']:,}\n"
    if problems:
        kept = {True: "kept", False: "left out"}
        lines = [
            (x["problem"], kept[x["kept"]], x["count"], f"{x['file']}, {x['place']}")
            for x in problems
        ]
        text += f"\n{text_table(('problem', 'record', 'count', 'first'), lines)}\n"
    notes = [f"\n{x['problem']}: {words}" for x in problems for words in x["details"]]
    text += "".join(notes) + "\n" * bool(notes)
    text += f"\nwritten to {out}" * bool(totals["turns"])
    print_result({"output": out, **totals, "problems": problems}, text, json)
    if not totals["turns"]:
        left = [one for one in problems if not one["kept"]]
        names = ", ".join(one["problem"] for one in left) or "no records"
        first = "".join(
            f". {one['file']}, {one['place']}: {one['detail'] or one['problem']}"
            for one in left[:1]
        )
        raise InvalidTurnsError(f"0 turns, so no file was written ({names}){first}")


def linearize(
    source: Turns,
    /,
    *,
    out: Annotated[str, OUT, Writes("rows")],
    policy: PolicyOption = None,
    sessions: SessionsFile = None,
    reward: Reward = None,
    weigh_by: By = "token",
    max_row_tokens: MaxRowTokens = None,
    dedup: bool = False,
    report: Annotated[str | None, Writes("report")] = None,
    threads: Count | None = None,
    job: Job = JOB,
) -> None:
    """Write the training rows of recorded turns.

    Print how many sampled tokens are trained, and why others are lost.

    Parameters
    ----------
    out
        Rows: Parquet, Arrow IPC or JSONL, by suffix; or DIRECTORY/ for parts, where an
        interrupted run continues; - is standard output.
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
    chosen, facts = one_policy(policy), facts_of(sessions, reward)

    def stage(turns: pa.Table) -> dict[str, Iterable[pa.RecordBatch]]:
        counts: list[pa.RecordBatch] = []
        rows = tk.linearize_batches(
            turns,
            chosen,
            report=counts,
            threads=threads or 1,
            max_row_tokens=max_row_tokens,
            **facts,
        )
        if weigh_by != "token":  # the weights that rows have
            rows = tk.add_weights_batches(rows, weigh_by)
        return {"rows": rows, "report": counts}

    resume = {
        "stage": "linearize",
        "policy": asdict(chosen),
        "reward": facts_digest(session_facts(**facts)),
        "weigh_by": weigh_by,
        "max_row_tokens": max_row_tokens,
    }
    outputs = {"rows": out, **({} if report is None else {"report": report})}
    totals = job.run("linearize", source, stage, outputs, resume, dedup=dedup)
    text = f"{describe(totals)}\n\nwritten to {out}"
    job.print(totals, {"output": out, "policy": asdict(chosen), **totals}, text)


def describe(totals: dict[str, int]) -> str:
    """The totals of rows as a table of tokens, for people."""
    sampled = totals["tokens_sampled"]
    lost = {f"lost_{reason}": f"lost, {reason}".replace("_", " ") for reason in LOSSES}
    lines = [("sampled", sampled, "")]
    for name, words in {"tokens_trained": "trained", **lost}.items():
        if totals[name] or name not in lost:
            lines.append((words, totals[name], share(totals[name], sampled)))
    lines.append(("in all rows", totals["tokens_forward"], ""))
    lines.append(("shared prefixes once", totals["tokens_forward_shared"], ""))
    left_out = [f"{totals['rows_untrained']:,} without a trained token"]
    for name, words in _LEFT_OUT.items():
        left_out += [f"{totals[name]:,} {words}"] * bool(totals[name])
    return (
        f"sessions {totals['sessions']:,}, turns {totals['turns']:,}, "
        f"{totals['rows']:,} rows; left out: {', '.join(left_out)}\n\n"
        + text_table(("tokens", "count", "of sampled"), lines)
    )


_LEFT_OUT = {
    "rows_cut": "without a response token after truncation",
    "rows_over_max_rows": "beyond max_rows",
}


def compact(
    source: Turns,
    /,
    *,
    out: Annotated[str, OUT, Writes("turns", piped="arrows")],
    job: Job = JOB,
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
    _change(tk.compact, "compact", source, out, job)


def expand(
    source: Turns,
    /,
    *,
    out: Annotated[str, OUT, Writes("turns")],
    job: Job = JOB,
) -> None:
    """Write turns with complete prompts.

    Messages are complete, too: the inverse of compact.

    Parameters
    ----------
    out
        Turns, as for compact; or JSONL.
    """
    _change(tk.expand, "expand", source, out, job)


def _change(
    change: Callable[[pa.Table], pa.Table],
    name: str,
    source: list[str],
    out: str,
    job: Job,
) -> None:
    """Write the turns and print their size."""
    totals = job.run(name, source, change, out, {"stage": name})
    before, after = (
        sum(file.stat().st_size for file in files)
        for files in (log_files(source)[0], paths_in(Path(out)))
    )
    text = f"turns {totals['turns']:,}, bytes {before:,} before and {after:,} after"
    facts = {"output": out, **totals, "bytes_before": before, "bytes_after": after}
    job.print(totals, facts, f"{text}\n\nwritten to {out}")


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
    """Pack rows so that every shared prefix is there once.

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
    with Progress("packing"):
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
    n_rows, n_packs = table.num_rows, packs.num_rows
    tokens = int(packs["n_tokens"].to_numpy().sum())
    edges = sum(map(len, packs["edge_source"]))
    full = tokens / max(n_packs * max_tokens, 1)
    facts = {"rows": n_rows, "packs": n_packs, "tokens": tokens, "edges": edges}
    text = (
        f"{n_rows:,} rows in {n_packs:,} packs: {tokens:,} tokens, {full:.1%} full, "
        f"{edges:,} edges"
    )
    print_result({"output": out, **facts}, text, json)


# by target: options that have an effect
_TAKES = {
    "sft": {"max_length"},
    "llama-factory": {"max_length"},
    "prime-rl": {"max_length", "ranks", "temperature", "advantage", "sessions"},
    "tinker": {"advantage", "sessions"},
}


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

    own = {"max_length": max_length, "ranks": ranks, "temperature": temperature}
    options: dict[str, Any] = {k: v for k, v in own.items() if v is not None}
    learned = {"advantage": advantage, "sessions": sessions}
    given = {*options, *(name for name, value in learned.items() if value)}
    for name in sorted(given - _TAKES.get(to, set())):
        targets = " and ".join(one for one, takes in _TAKES.items() if name in takes)
        raise ArgumentError(
            f"--{name.replace('_', '-')} does nothing with --to {to}: it is for {targets}"
        )
    if to == "prime-rl":
        options["seq_len"] = options.pop("max_length", 2048)
    check_outputs(
        {"the file": (path_of(to, Path(out)), "export")},
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
                facts = tk.export.sessions_of(table) if facts is None else facts
                chosen: dict[str, Any] = {"baseline": advantage or "group_mean"}
                if advantage == "group_std":
                    chosen = {"baseline": "group_mean", "scale": "group_std"}
                gains = tk.learn.advantages(facts, **chosen)
                table = tk.add_advantages(table, gains)
            with Progress("writing"):
                path = write_export(table, to, Path(out), **options)
        except NoSignalWarning as warning:
            raise ExportError(str(warning)) from None
    facts = {"output": str(path), "rows": table.num_rows, "to": to}
    print_result(facts, f"{path}: {table.num_rows} rows for {to}", json)

"""Commands from file to file: import, linearize, compact, expand, pack and export."""

import warnings
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import polars as pl
import pyarrow as pa
from cyclopts import Parameter

import trajkit as tk
from trajkit import errors
from trajkit.cli import options as opt
from trajkit.cli.policies import PolicyOption, one_policy
from trajkit.cli.screen import Progress, share, text_table
from trajkit.export import FILE_FORMATS
from trajkit.files.formats import paths_in
from trajkit.files.run import Watch, facts_digest
from trajkit.files.tables import log_files, write_table
from trajkit.importers import FORMATS, TARGETS
from trajkit.importers.containers import SUFFIXES
from trajkit.schema import LOSSES
from trajkit.turns.mapping import merged_map
from trajkit.turns.session_metadata import session_facts


def import_(
    source: Annotated[list[str], opt.Reads("records", SUFFIXES)],
    /,
    *,
    out: Annotated[str, opt.FILE, opt.Writes("turns")],
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
    tokenizer: Annotated[str | None, opt.TOKENIZER] = None,
    chat_template: Annotated[str | None, opt.TOKENIZER] = None,
    contradicted: Literal["untrain", "train"] = "untrain",
    nonfinite_logprobs: Literal["raise", "null"] = "raise",
    report: Annotated[str | None, opt.Writes("report")] = None,
    json: opt.Json = False,
    no_clobber: opt.NoClobber = False,
) -> None:
    """Write turns from the records of another system.

    Records are logs, dumps, captures, databases and transcripts. Missing facts are not
    guessed: they are counted and shown, and the report lists each of them.

    Parameters
    ----------
    source
        Files, patterns, directories, addresses (s3://...), or - for standard input.
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
    chat = None
    if tokenizer is not None:
        chat = opt.load_chat_tokenizer(Path(tokenizer), chat_template)
    elif chat_template is not None:
        raise errors.ArgumentError("--chat-template needs --tokenizer")
    with Progress("import", "turns") as bar:
        totals, table = tk.importers.import_file(
            source,
            out,
            format,
            map=merged_map(map),
            tokenizer=chat,
            contradicted=contradicted,
            nonfinite_logprobs=nonfinite_logprobs,
            watch=Watch(lambda index, done: bar.begin(index.n_turns), bar.advance),
        )
    if report is not None:
        write_table(table, report)
    kinds = pl.DataFrame(table).group_by("problem", "kept", maintain_order=True)
    found = kinds.agg(
        pl.len().alias("count"),
        pl.format("{}, {}", "file", "place").first().alias("first"),
        # a sentence, of the first record that has one
        pl.col("detail").drop_nulls().first().fill_null(""),
    )
    text = f"sessions {totals['sessions']:,}, turns {totals['turns']:,}"
    if len(found):
        record = pl.when("kept").then(pl.lit("kept")).otherwise(pl.lit("left out"))
        lines = found.with_columns(record.alias("kept")).rows()
        head = ("problem", "record", "count", "first", "detail")
        text += f"\n\n{text_table(head, lines)}"
    if totals["turns"]:
        text += f"\n\nwritten to {out}"
    facts = {"output": out, **totals, "problems": found.to_dicts()}
    opt.print_result(facts, text, json)
    if not totals["turns"]:
        left = found.filter(~pl.col("kept")).to_dicts()
        names = ", ".join(one["problem"] for one in left) or "no records"
        why = f"0 turns, so no file was written ({names})"
        for one in left[:1]:
            why += f". {one['first']}: {one['detail'] or one['problem']}"
        raise errors.InvalidTurnsError(why)


def linearize(
    source: opt.Source,
    /,
    *,
    out: Annotated[str, opt.PARTS, opt.Writes("rows")],
    policy: PolicyOption = None,
    sessions: opt.SessionsFile = None,
    reward: opt.Reward = None,
    weigh_by: opt.WeighBy = "token",
    max_row_tokens: opt.MaxRowTokens = None,
    dedup: bool = False,
    report: Annotated[str | None, opt.Writes("report")] = None,
    job: opt.Job = opt.JOB,
) -> None:
    """Write the training rows of recorded turns.

    Print how many sampled tokens are trained, and why others are lost.

    Parameters
    ----------
    dedup
        Store tokens that rows share only once.
    report
        Write the report to this file, a line per session.
    """
    chosen, facts = one_policy(policy), opt.facts_of(sessions, reward)
    limit = {"max_row_tokens": max_row_tokens}

    def stage(turns: pa.Table) -> dict[str, Iterable[pa.RecordBatch]]:
        counts: list[pa.RecordBatch] = []
        how: dict[str, Any] = {"report": counts, "threads": 1, **facts, **limit}
        rows = tk.linearize_batches(turns, chosen, **how)
        if weigh_by != "token":  # the weights that rows have
            rows = tk.add_weights_batches(rows, weigh_by)
        return {"rows": rows, "report": counts}

    digest = facts_digest(session_facts(**facts))
    resume = {"stage": "linearize", "policy": asdict(chosen), "reward": digest, **limit}
    resume["weigh_by"] = weigh_by
    outputs = {"rows": out, **({} if report is None else {"report": report})}
    totals = job.run("linearize", source, stage, outputs, resume=resume, dedup=dedup)
    text = f"{describe(totals)}\n\nwritten to {out}"
    job.print(totals, {"output": out, "policy": asdict(chosen), **totals}, text)


def describe(totals: dict[str, int]) -> str:
    """The totals of rows as a table of tokens, for people."""
    sampled, always = totals["tokens_sampled"], ("tokens_sampled", "tokens_trained")
    lost = [f"lost_{name}" for name in LOSSES]
    lines = [
        (name.removeprefix("tokens_").replace("_", " "), n, share(n, sampled))
        for name in (*always, *lost, "tokens_forward", "tokens_forward_shared")
        if (n := totals[name]) or name in always
    ]
    left_out = ", ".join(
        f"{totals[f'rows_{name}']:,} {name.replace('_', ' ')}"
        for name in ("untrained", "cut", "over_max_rows")
        if totals[f"rows_{name}"] or name == "untrained"
    )
    table = text_table(("tokens", "count", "of sampled"), lines)
    counts = f"turns {totals['turns']:,}, {totals['rows']:,} rows"
    return f"sessions {totals['sessions']:,}, {counts}; left out: {left_out}\n\n{table}"


def compact(
    source: opt.Source,
    /,
    *,
    out: Annotated[str, opt.PARTS, opt.Writes("turns", piped="arrows")],
    job: opt.Job = opt.JOB,
) -> None:
    """Write recorded turns in delta form.

    Of each prompt, that form has only what an earlier turn does not have. Every command
    reads it; expand is the inverse. JSONL cannot store it.
    """
    _change(tk.compact, source, out, job)


def expand(
    source: opt.Source,
    /,
    *,
    out: Annotated[str, opt.PARTS, opt.Writes("turns")],
    job: opt.Job = opt.JOB,
) -> None:
    """Write turns with complete prompts.

    Messages are complete, too: the inverse of compact.
    """
    _change(tk.expand, source, out, job)


def _change(stage: Any, source: list[str], out: str, job: opt.Job) -> None:
    name = stage.__name__
    totals = job.run(name, source, stage, out, resume={"stage": name})
    files = log_files(source)[0], paths_in(Path(out))
    before, after = (sum(file.stat().st_size for file in one) for one in files)
    text = f"turns {totals['turns']:,}, bytes {before:,} before and {after:,} after"
    facts = {"output": out, **totals, "bytes_before": before, "bytes_after": after}
    job.print(totals, facts, f"{text}\n\nwritten to {out}")


def pack(
    rows: opt.Rows,
    /,
    *,
    out: Annotated[str, opt.FILE, opt.Writes("packs")],
    max_tokens: opt.Count,
    json: opt.Json = False,
    no_clobber: opt.NoClobber = False,
) -> None:
    """Pack rows so that every shared prefix is there once.

    Rows of a session share their prefixes as a tree, and every trained token has an edge,
    which says the token of the pack that predicts it. `trajkit.pack` has more choices.

    Parameters
    ----------
    max_tokens
        Tokens of a pack, at most; 1.25 to 1.5 times the longest row leaves little to
        repeat.
    """
    table = opt.read_rows(rows)
    with Progress("packing"):
        packs = tk.pack(table, max_tokens)
        write_table(packs, out)
    n_rows, n_packs, edges = len(table), len(packs), sum(map(len, packs["edge_source"]))
    tokens = sum(packs["n_tokens"].to_pylist())
    full = share(tokens, n_packs * max_tokens)
    text = f"{n_rows:,} rows in {n_packs:,} packs: {tokens:,} tokens, {full} full"
    facts = {"rows": n_rows, "packs": n_packs, "tokens": tokens, "edges": edges}
    opt.print_result({"output": out, **facts}, f"{text}, {edges:,} edges", json)


def export(
    rows: opt.Rows,
    /,
    *,
    to: Literal[tuple(FILE_FORMATS)],  # type: ignore[valid-type]
    out: Annotated[str, opt.OUT, opt.Writes("export")],
    advantage: Literal["group_mean", "group_std", "leave_one_out", "none"]
    | None = None,
    sessions: opt.SessionsFile = None,
    max_length: opt.Count | None = None,
    json: opt.Json = False,
    no_clobber: opt.NoClobber = False,
) -> None:
    """Write rows in a file that a trainer loads.

    Rows are checked, and written as slime's debug rollout data, Parquet for supervised
    training in TRL and Axolotl (sft) or SkyRL (skyrl-sft), a folder for LLaMA-Factory, the
    micro-batches of a step for prime-rl, or the arguments of Tinker's Datum as JSON Lines.
    docs/trainers.md has the lines of Python for other trainers and choices.

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
    """
    from trajkit.export.files import write_export

    of_length, of_gains = ("sft", "llama-factory", "prime-rl"), ("tinker", "prime-rl")
    for name, given, targets in (
        ("max-length", max_length, of_length),
        ("advantage", advantage, of_gains),
        ("sessions", sessions, of_gains),
    ):
        if given is not None and to not in targets:
            words = f"it is for {' and '.join(targets)}"
            raise errors.ArgumentError(f"--{name} does nothing with --to {to}: {words}")
    options = {} if max_length is None else {"max_length": max_length}
    if to == "prime-rl":
        options = {"seq_len": max_length or 2048}
    table = opt.read_rows(rows)
    with warnings.catch_warnings(), Progress("writing"):
        # A file of such rows would be of no use.
        warnings.simplefilter("error", errors.NoSignalWarning)
        try:
            if advantage or sessions:
                facts = opt.known_sessions(sessions)
                facts = tk.export.sessions_of(table) if facts is None else facts
                how: dict[str, Any] = {"baseline": advantage or "group_mean"}
                if advantage == "group_std":
                    how = {"baseline": "group_mean", "scale": "group_std"}
                gains = tk.learn.advantages(facts, **how)
                table = tk.add_advantages(table, gains)
            path = write_export(table, to, Path(out), **options)
        except errors.NoSignalWarning as warning:
            raise errors.ExportError(str(warning)) from None
    written = {"output": str(path), "rows": len(table), "to": to}
    opt.print_result(written, f"{path}: {len(table)} rows for {to}", json)

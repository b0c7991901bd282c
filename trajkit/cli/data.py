"""Commands from file to file, and those that compare rows, logs and policies."""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import chain, islice
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
import polars.selectors as cs
import pyarrow as pa
from cyclopts import Parameter

import trajkit as tk
from trajkit import errors
from trajkit.analysis.branches import SENT_AGAIN, named_drift
from trajkit.analysis.simulation import ASKED, Simulation, cheapest_lossless, label
from trajkit.analysis.tokenizer import Codec
from trajkit.analysis.words import COUNT_WORDS, LOSS_GROUPS, LOSS_WORDS, count
from trajkit.cli import BAD_DATA, DONE, visible
from trajkit.cli import options as opt
from trajkit.cli.screen import Progress, share, text_table
from trajkit.cli.view import marked, rows_of_trainer
from trajkit.errors import SchemaError
from trajkit.export import FILE_FORMATS
from trajkit.files.formats import paths_in
from trajkit.files.jsonl import row_placed
from trajkit.files.run import Watch, facts_digest
from trajkit.files.sources import SessionPrefix
from trajkit.files.tables import log_files, scan_any_rows, write_table
from trajkit.importers import FORMATS, TARGETS
from trajkit.importers.containers import SUFFIXES
from trajkit.importers.reader import UNTRAINED
from trajkit.policies import ALIASES
from trajkit.schema import FINDINGS, LOSSES
from trajkit.tables import lazy_compute as pc
from trajkit.tables.stages import batches_in, concat
from trajkit.turns.mapping import merged_map
from trajkit.turns.session_metadata import session_facts
from trajkit.verification.run import any_rows


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
    session_prefix: SessionPrefix | None = None,
    report: Annotated[str | None, opt.Writes("report")] = None,
    json: opt.Json = False,
    no_clobber: opt.NoClobber = False,
) -> None:
    """Write turns from the records of another system.

    Records are logs, dumps, captures and transcripts. Missing facts are not guessed: they
    are counted and shown, and the report lists each of them.

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
        Whether a turn trains that its record contradicts: usage_contradicts, aborted,
        prompt_in_output and repeated_call of the report.
    nonfinite_logprobs
        Invalid logprobs (NaN, -9999): leave their record out, or make them null.
    session_prefix
        As for other commands: what to put before each session id.
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
            session_prefix=session_prefix,
            watch=Watch(lambda index, done: bar.begin(index.n_turns), bar.count),
        )
    if report is not None:
        write_table(table, report)
    # of keys that no field reads, a line each
    key = pl.col("detail").str.extract(r"^(.*) of \d+ records? was not").alias("key")
    found = (
        pl.DataFrame(table)
        .group_by("problem", "kept", key, maintain_order=True)
        .agg(
            pl.len().alias("count"),
            pl.format("{}, {}", "file", "place").first().alias("first"),
            # a sentence, of the first record that has one
            pl.col("detail").drop_nulls().first().fill_null(""),
        )
    )
    text = f"sessions {totals['sessions']:,}, turns {totals['turns']:,}"
    if len(found):
        context = ["mask_unread"] if contradicted == "train" else [*UNTRAINED]
        record = pl.when("kept").then(pl.lit("kept")).otherwise(pl.lit("left out"))
        is_context = pl.col("kept") & pl.col("problem").is_in(context)
        record = pl.when(is_context).then(pl.lit("context only")).otherwise(record)
        head = ("problem", "record", "count", "first", "detail")
        key = pl.col("key")
        shown = found.filter(key.is_null() | (key.cum_count() <= _MOST_KEYS))
        lines = shown.with_columns(record=record).select(head).rows()
        text += f"\n\n{text_table(head, lines)}"
        if n_more := len(found) - len(shown):
            text += f"\nand {n_more} more keys that were not read: see --report FILE"
    if totals["turns"]:
        text += f"\n\nwritten to {out}"
    facts = {"output": out, **totals, "problems": found.to_dicts()}
    opt.print_result(facts, text, json)
    if not totals["turns"]:
        left = found.filter(~pl.col("kept") & pl.col("key").is_null()).to_dicts()
        why = ", ".join(one["problem"] for one in left) or "no records"
        for one in left[:1]:
            why += f". {one['first']}: {one['detail'] or one['problem']}"
        raise errors.InvalidTurnsError(f"0 turns, so no file was written: {why}")


def linearize(
    source: opt.Source,
    /,
    *,
    out: Annotated[str, opt.PARTS, opt.Writes("rows")],
    policy: opt.PolicyOption = None,
    sessions: opt.SessionsFile = None,
    reward: opt.Reward = None,
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
    chosen, facts = opt.one_policy(policy), opt.facts_of(sessions, reward)
    limit = {"max_row_tokens": max_row_tokens}

    def stage(turns: pa.Table) -> dict[str, Iterable[pa.RecordBatch]]:
        counts: list[pa.RecordBatch] = []
        how: dict[str, Any] = {"report": counts, "threads": 1, **facts, **limit}
        return {"rows": tk.linearize_batches(turns, chosen, **how), "report": counts}

    digest = facts_digest(session_facts(**facts))
    resume = {"stage": "linearize", "policy": asdict(chosen), "reward": digest, **limit}
    outputs = {"rows": out, **({} if report is None else {"report": report})}
    totals = job.run("linearize", source, stage, outputs, resume=resume, dedup=dedup)
    text = f"{totals_text(totals)}\n\nwritten to {out}"
    job.print(totals, {"output": out, "policy": asdict(chosen), **totals}, text)


def totals_text(totals: dict[str, int]) -> str:
    """The totals of rows as a table of tokens, for people."""
    sampled, always = totals["tokens_sampled"], ("tokens_sampled", "tokens_trained")
    lost = [f"lost_{name}" for name in LOSSES]
    lines = [
        (name.removeprefix("tokens_").replace("_", " "), n, share(n, sampled))
        for name in (*always, *lost, "tokens_forward", "tokens_forward_shared")
        if (n := totals[name]) or name in always
    ]
    kinds = {x: totals[f"rows_{x}"] for x in ("untrained", "cut", "over_max_rows")}
    left_out = [f"{n:,} {name.replace('_', ' ')}" for name, n in kinds.items() if n]
    head = ", ".join(f"{x} {totals[x]:,}" for x in ("sessions", "turns", "rows"))
    head += f"; rows left out: {', '.join(left_out)}" * bool(left_out)
    return f"{head}\n\n{text_table(('tokens', 'count', 'of sampled'), lines)}"


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
    text = f"{count(n_rows, 'row')} in {count(n_packs, 'pack')}: {count(tokens)}"
    facts = {"rows": n_rows, "packs": n_packs, "tokens": tokens, "edges": edges}
    opt.print_result(
        {"output": out, **facts}, f"{text}, {full} full, {edges:,} edges", json
    )


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

    Parameters
    ----------
    to
        The trainer; docs/trainers.md has lines of Python for others.
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
    name = "seq_len" if to == "prime-rl" else "max_length"
    options = {} if max_length is None else {name: max_length}
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
    opt.print_result(written, f"{path}: {count(len(table), 'row')} for {to}", json)


_TURN = ("session_id", "turn_index")

# columns of a table, and lines about keys that no field reads
_WIDTH, _MOST_KEYS = 100, 10


def simulate(
    source: opt.Source,
    /,
    *,
    policy: opt.PoliciesOption = None,
    sessions: opt.SessionsFile = None,
    max_row_tokens: opt.MaxRowTokens = None,
    pad: opt.Count | None = None,
    pack: opt.Count | None = None,
    wide: bool = False,
    job: opt.Job = opt.JOB,
) -> None:
    """Compare what the policies keep, lose and cost.

    Count what the rows of every policy train, lose and cost, name the policy that keeps
    everything at the lowest cost, and say in words what each policy loses, and why.
    'forward' are the tokens of all rows; 'shared once' counts each shared prefix once.

    Parameters
    ----------
    pad
        Count the padding of each row to a multiple of this many tokens.
    pack
        Count the packs of this many tokens that rows make as trees.
    wide
        All counts, in a table that may be wider than 100 columns.
    """
    counts = Simulation(
        # by default those that the messages of the log allow
        policy and map(opt.policy_of, policy),
        pad_to=pad,
        pack_tokens=pack,
        sessions=opt.known_sessions(sessions),
        max_row_tokens=max_row_tokens,
    )

    def stage(turns: pa.Table) -> pa.Table:
        counts.add(turns)
        return turns

    totals = job.run("simulate", source, stage, {})
    table = counts.table()
    if policy:
        # a system's rule has the name that was given, not that of an equal preset
        pairs = zip(policy, table["policy"].to_pylist(), strict=True)
        names = [text if text in ALIASES else name for text, name in pairs]
        table = table.set_column(0, table.schema.field("policy"), pa.array(names))
    cheapest = cheapest_lossless(table)
    facts = {"cheapest": cheapest, "policies": table.to_pylist()}
    job.print(totals, facts, describe(table, cheapest, wide=wide))


def describe(table: pa.Table, cheapest: str | None, *, wide: bool = False) -> str:
    """The table, what the policies lose, and the result, for people."""
    policies = table.to_pylist()
    for line in policies:
        line["share"] = share(line["tokens_trained"], line["tokens_sampled"])
    columns = {"policy": "policy"}
    for name, head in COUNT_WORDS.items():
        if wide and name == "tokens_lost":
            columns |= {f"lost_{x}": x for x in LOSS_WORDS}
        elif wide or name not in ("tokens_duplicated", "pairs_packed"):
            columns[name] = head
    # a table that is too wide loses the last ones
    for name in list(columns):
        counts = {line[name] for line in policies}
        optional = name.startswith("lost_") or name == "tokens_out_of_context"
        if counts == {None} or (optional and counts == {0}):
            del columns[name]
    while True:
        lines = [[line[name] for name in columns] for line in policies]
        shown = text_table([*columns.values()], lines)
        # the first line is that of the heads, and is as wide as the table
        if wide or len(columns) < 6 or shown.index("\n") <= _WIDTH:
            break
        columns.popitem()
    words = [fill(one, _WIDTH, subsequent_indent="  ") for one in _losses(policies)]
    result = "every policy here loses sampled tokens"
    if cheapest is not None:
        result = f"keeps everything at the lowest cost: {cheapest}"
    first = policies[0]
    head = f"turns {first['turns']:,}, tokens sampled {first['tokens_sampled']:,}"
    return "\n".join([head, "", shown, "", *words, *[""] * bool(words), result])


def _losses(policies: list[dict[str, Any]]) -> Iterator[str]:
    """What each policy loses and why, in sentences."""
    keeps, same = [], []
    for line in policies:
        name, apart = line["policy"], line["tokens_out_of_context"]
        lost = [x for x in LOSS_WORDS if x not in ASKED and line[f"lost_{x}"]]
        for x in lost:
            tokens = count(line[f"lost_{x}"])
            group, why = LOSS_WORDS[x]
            words = f"{LOSS_GROUPS[group]} ({x.replace('_', ' ')})"
            yield f"{name} loses {tokens}, {words}. {why}"
        if apart:
            words = "after other tokens than they were sampled after."
            yield f"{name} trains {count(apart)} {words}"
        keeps += [name] * (not lost and not apart)
        systems = [x for x, one in ALIASES.items() if label(one) == name != x]
        same += [f"{' and '.join(systems)} as {name}"] * bool(systems)
    if keeps:
        yield f"lose nothing: {', '.join(keeps)}"
    for x in ASKED:
        n = max((line[f"lost_{x}"] for line in policies), default=0)
        if n:
            yield f"Up to {count(n)} may not be trained. {LOSS_WORDS[x][1]}"
    if same:
        yield f"same rule: {'; '.join(same)}"
    shown = [line["policy"] for line in policies]
    for x in ALIASES:
        if x not in shown and label(ALIASES[x]) == x and ALIASES[x].name in shown:
            yield f"--policy {x} has a rule of its own, a choice of {ALIASES[x].name}'s"


def drift(
    source: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.FILE, opt.Writes("drift")] = None,
    policy: opt.PolicyOption = None,
    tokenizer: opt.TokenizerPath = None,
    job: opt.Job = opt.JOB,
) -> None:
    """Count drift by region and cause.

    Compare every prompt with the path of the call that it continues (its prompt and
    output). 'tokens at stake' are sampled tokens that the prompt changes or lacks. With a
    tokenizer, causes are found by comparing texts, every finding is counted, and one of
    each cause is shown. --out gets a line per turn.
    """
    chosen, loaded = opt.one_policy(policy), opt.chosen_tokenizer(tokenizer, source)
    sums, groups, causes = Counter[str](), list[pl.DataFrame](), list[pl.DataFrame]()

    def stage(turns: pa.Table) -> dict[str, pa.Table]:
        links = tk.link(turns, chosen)
        table = named_drift(turns, links, loaded)
        lines = _summable(table)
        if loaded is not None:
            found = _summable(tk.analysis.explain_drift(turns, links, loaded))
            drifts = lines.filter(~pl.col("cause").is_in(SENT_AGAIN))
            found = found.join(drifts, _TURN, "semi")
            # counts of findings, and the first one, by cause
            counted = found.group_by("cause", maintain_order=True).agg(
                findings=pl.len(),
                turns=pl.struct(_TURN).n_unique(),
                path_tokens=(pl.col("path_stop") - pl.col("path_start")).sum(),
                prompt_tokens=(pl.col("prompt_stop") - pl.col("prompt_start")).sum(),
                example=pl.struct(*FINDINGS.names).first(),
            )
            causes.append(counted)
        counts = lines.group_by("region", "cause").agg(
            turns=pl.len(),
            tokens_beyond=pl.col("size").sum(),
            tokens_after_drift=pl.col("tokens_after_drift").sum(),
        )
        # last, because a session that was refused would be counted twice
        groups.append(counts)
        sums.update(
            sessions=len(turns["session_id"].unique()),
            turns=turns.num_rows,
            turns_compared=table.num_rows,
            turns_by_tokens=links["link_reason"].to_pylist().count("tokens"),
            tokens_sampled=sum(map(len, turns["output_ids"])),
        )
        return {"drift": table}

    totals = job.run("drift", source, stage, {"drift": out} if out else {})
    keys = ["region", "cause"]
    by = pl.concat(groups).group_by(keys).sum()
    order = ["tokens_after_drift", "turns", *keys]
    by = by.sort(order, descending=[True, True, False, False])
    head = ("region", "cause", "turns", "tokens beyond", "tokens at stake")
    text = (
        f"sessions {sums['sessions']:,}; {sums['turns_compared']:,} of {sums['turns']:,} "
        f"turns continue an earlier one ({sums['turns_by_tokens']:,} found by tokens "
        f"alone); tokens sampled {sums['tokens_sampled']:,}\n\n"
        f"{text_table(head, by.rows())}"
    )
    facts = {"policy": asdict(chosen), **sums, "groups": by.to_dicts()}
    if loaded is not None:
        several = pl.concat(causes).group_by("cause", maintain_order=True)
        found = several.agg(cs.integer().sum(), pl.col("example").first())
        examples = dict(found.select("cause", "example").rows())
        found = found.drop("example")
        found = found.sort("findings", "cause", descending=[True, False])
        facts |= {"causes": found.to_dicts(), "examples": examples}
        names = [name.replace("_", " ") for name in found.columns]
        text += f"\n\n{text_table(names, found.rows())}"
        for cause, one in examples.items():
            session, turn = visible(one["session_id"]), one["turn_index"]
            text += f"\n\n{cause}: session '{session}', turn {turn}, from token "
            text += f"{one['path_start']}\n  path    {one['path_text']!r}\n"
            text += f"  prompt  {one['prompt_text']!r}"
    job.print(totals, facts, text)


def _summable(table: pa.Table) -> pl.DataFrame:
    """A table without categories, whose integers are wide enough for sums."""
    kinds: Any = {cs.integer(): pl.Int64, cs.categorical(): pl.String}
    return pl.DataFrame(table).cast(kinds)


_NOTES = ("unread_mask", "unknown_session", "session_without_rows")
RIGHT = ("trains", *_NOTES)
"""Lines that are no finding."""

# of the first wrong rows, and of each of them, the lines that are shown
_MOST_ROWS, _MOST_LINES, _MOST_VIOLATIONS = 3, 3, 20


def check(
    rows: opt.Rows,
    turns: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.FILE, opt.Writes("row_checks")] = None,
    policy: opt.MaybePolicyOption = None,
    tokenizer: opt.TokenizerPath = None,
    reading: opt.Reading = opt.READING,
    json: opt.Json = False,
    no_clobber: opt.NoClobber = False,
) -> int:
    """Say whether a trainer's mask trains what was sampled.

    Find rows of any trainer (also .pt) in the log by their tokens, and say which
    turn each row trains, which trained tokens nobody sampled, which sampled tokens no row
    trains, and whether mask or logprobs are shifted. The exit code is 1 if anything is
    wrong. --out gets all findings. docs/check.md lists the columns that are understood.
    With --policy, tokens that the policy does not train are not missing; without it, every
    sampled token that may be trained is expected in a row.
    """
    chosen = opt.one_policy(policy) if policy else None
    loaded = opt.chosen_tokenizer(tokenizer, turns)
    table = rows_of_trainer(rows)
    if not table.num_rows:
        raise opt.nothing(rows, "rows")
    calls = reading.turns(turns)
    with Progress("comparing rows with the log"):
        found = tk.check_rows(table, calls, chosen)
    if out is not None:
        write_table(found, out)
    lines = found.to_pylist()
    wrong = any(line["kind"] not in RIGHT for line in lines)
    trained = pc.sum(pc.list_flatten(table["loss_mask"])).as_py() or 0
    sampled = sum(map(len, calls["output_ids"]))
    masks = table["mask_of"].unique().to_pylist()
    text = (
        f"rows {table.num_rows:,}, tokens trained {trained:,} ({', '.join(masks)}); "
        f"turns {calls.num_rows:,}, tokens sampled {sampled:,}\n\n"
        + _findings(table, lines, None if loaded is None else Codec(loaded))
    )
    opt.print_result({"wrong": wrong, "masks": masks, "lines": lines}, text, json)
    return BAD_DATA if wrong else DONE


def _findings(rows: pa.Table, lines: list[dict[str, Any]], codec: Codec | None) -> str:
    """The findings of the first wrong rows, then the number of each kind."""
    wrong = [line for line in lines if line["kind"] not in RIGHT]
    of_rows = [line for line in lines if line["kind"] not in _NOTES]
    shown, places = [], [*dict.fromkeys(one["row"] for one in wrong or of_rows)]
    for row in places[:_MOST_ROWS]:
        own = [one for one in of_rows if one["row"] == row]
        own.sort(key=lambda one: one["kind"] in RIGHT)
        for one in own[:_MOST_LINES]:
            words, token = one["detail"], one["token"]
            if codec is not None and token is not None:
                ids = np.asarray(rows["input_ids"][row].values)
                start = token - rows["padding"][row].as_py()
                stop = start + min(one["tokens"], 8)
                words += f"  {marked(codec, ids, start, stop)}"
            cells = (one[name] for name in ("row", "session_id", "token"))
            texts = ["" if cell is None else str(cell) for cell in cells]
            shown.append([*texts, words])
        if (n_more := len(own) - _MOST_LINES) > 0:
            shown.append(["", "", "", f"and {n_more} more, in the table of --out"])
    # what no row has is in the last place, of None
    if (n_more := sum(row is not None for row in places[_MOST_ROWS:])) > 0:
        words = f"and {count(n_more, 'more row')}, in the table of --out"
        shown.append(["", "", "", words])
    shown += [["", "", "", one["detail"]] for one in lines if one["kind"] in _NOTES]
    found = text_table(("row", "session", "token", "finding"), shown)
    if not wrong:
        return f"{found}\n\nright: every trained token was sampled, and trains once"
    counts = (
        pl.DataFrame(wrong, infer_schema_length=None)
        .group_by(pl.col("kind").str.replace_all("_", " "), maintain_order=True)
        .agg(pl.col("row").drop_nulls().n_unique(), pl.col("tokens").sum())
    )
    return f"{found}\n\n{text_table(('wrong', 'rows', 'tokens'), counts.rows())}"


def verify(
    rows: opt.Rows,
    turns: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.FILE, opt.Writes("violations")] = None,
    policy: opt.MaybePolicyOption = None,
    sessions: opt.SessionsFile = None,
    reward: opt.Reward = None,
    max_row_tokens: opt.MaxRowTokens = None,
    reading: opt.Reading = opt.READING,
    json: opt.Json = False,
    no_clobber: opt.NoClobber = False,
) -> int:
    """Check rows against the turns that they come from.

    Print the violations, or write them to --out; the exit code is 1 if there are any. Rows
    of other systems may have any columns that `check` reads. With --policy, the rows are
    compared with those of the policy; without it, what is true under every policy is
    checked. Sessions that break a rule are left out, with their rows; the exit code is
    then 1, too. One that the policy or --sessions refuses is an error.
    """
    chosen = opt.one_policy(policy) if policy else None
    options: Any = {**opt.facts_of(sessions, reward), "max_row_tokens": max_row_tokens}
    batches = filter(len, _cast_rows(rows))
    first = [*islice(batches, 1)]
    if not first and chosen is None:
        raise opt.nothing(rows, "rows")
    left_out: list[str] = []
    pieces = reading.pieces(turns, left_out, bodies=False)
    if first and first[0].column("session_id").null_count:
        own = concat(pa.Table.from_batches([one]) for one in chain(first, batches))
        violations = tk.verify(own, concat(pieces), chosen, **options)
    else:
        calls = batches_in(pieces)
        made = tk.verify_batches(chain(first, batches), calls, chosen, **options)
        violations = pa.Table.from_batches(made)
        without = pa.array(left_out, pa.string())
        passed_over = pc.is_in(violations["session_id"], value_set=without)
        violations = violations.filter(pc.invert(passed_over))
    if out is not None:
        write_table(violations, out)
    found, text = pl.DataFrame(violations), "no violations"
    more = len(found) - _MOST_VIOLATIONS
    if len(found):
        names = "session_id row_index turn_index token rule detail".split()
        some = found.head(_MOST_VIOLATIONS).select(pl.col(names).cast(pl.String))
        head = [name.removesuffix("_id").removesuffix("_index") for name in names]
        counts = found.group_by(pl.col("rule").cast(pl.String), maintain_order=True)
        text = text_table(head, some.fill_null("").rows())
        text += f"\n{f'and {more:,} more' * (more > 0)}\n"
        text += text_table(("rule", "violations"), counts.len().rows())
    if left_out:
        text += f"\nnot checked: sessions that break a rule: {len(left_out)}"
    if chosen is None:
        text += "\nwithout --policy, only what is true under every policy is checked"
    shown = {"violations": found.to_dicts(), "left_out": left_out}
    opt.print_result(shown, text, json)
    return BAD_DATA if len(found) or left_out else DONE


def _cast_rows(path: str) -> Iterator[pa.RecordBatch]:
    """Rows of any system in the columns of `verify`; errors name the file, and the line."""
    first = 0
    try:
        for batch in scan_any_rows(path):
            yield from any_rows(pa.Table.from_batches([batch]), first).to_batches()
            first += batch.num_rows
    except SchemaError as error:
        raise SchemaError(row_placed(path, str(error))) from None

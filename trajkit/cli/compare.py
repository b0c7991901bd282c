"""Rows with the log: check and verify; policies with one another: simulate and drift."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa

import trajkit as tk
from trajkit.analysis.simulation import ASKED, Simulation, cheapest_lossless, label
from trajkit.analysis.tokenizer import Codec
from trajkit.analysis.words import LOSS_WORDS, count
from trajkit.cli import BAD_DATA, DONE
from trajkit.cli import options as opt
from trajkit.cli import policies as pol
from trajkit.cli.screen import Progress, share, text_table, visible
from trajkit.cli.show import marked
from trajkit.errors import ArgumentError
from trajkit.files.tables import iter_tables, read_any_rows, write_table
from trajkit.policies import ALIASES
from trajkit.tables.columns import take_session
from trajkit.turns.sessions import Sessions
from trajkit.verification.files import verify_file
from trajkit.verification.row_forms import plain_rows

_WIDTH = 100


def simulate(
    source: opt.Source,
    /,
    *,
    policy: pol.PoliciesOption = None,
    sessions: opt.SessionsFile = None,
    max_row_tokens: opt.MaxRowTokens = None,
    pad: opt.Count | None = None,
    pack: opt.Count | None = None,
    wide: bool = False,
    job: opt.Job = opt.JOB,
) -> None:
    """Compare what the policies keep, lose and cost.

    Count what the rows of every policy train, lose and cost, and name the policy that keeps
    everything at the lowest cost. Then say in words what each policy loses, and why.
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
        policy and map(pol.policy_of, pol.many_policies(policy)),
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
    cheapest = cheapest_lossless(table)
    facts = {"cheapest": cheapest, "policies": table.to_pylist()}
    job.print(totals, facts, describe(table, cheapest, wide=wide))


_COSTS = {
    "tokens_out_of_context": "out of context",
    "tokens_forward": "forward",
    "tokens_padding": "padding",
    "packs": "packs",
    "tokens_packed": "packed",
    "tokens_forward_shared": "shared once",
    "longest_row": "longest row",
}
"""Columns and their heads. A table that is too wide loses the last ones."""


def describe(table: pa.Table, cheapest: str | None, *, wide: bool = False) -> str:
    """The table, what the policies lose, and the result, for people."""
    policies = table.to_pylist()
    for line in policies:
        line["share"] = share(line["tokens_trained"], line["tokens_sampled"])
    columns = {"policy": "policy", "rows": "rows", "tokens_trained": "trained"}
    columns |= {"share": "of sampled"}
    if wide:
        columns |= {f"lost_{x}": x for x in LOSS_WORDS}
        columns |= {"tokens_duplicated": "duplicated", **_COSTS}
        columns |= {"pairs_packed": "attended pairs"}
    else:
        columns |= {"tokens_lost": "lost", **_COSTS}
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
            yield f"{name} loses {tokens} ({x.replace('_', ' ')}). {LOSS_WORDS[x][1]}"
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


def drift(
    source: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.FILE, opt.Writes("drift")] = None,
    policy: pol.PolicyOption = None,
    tokenizer: opt.TokenizerPath = None,
    findings: Annotated[str | None, opt.Writes("findings")] = None,
    job: opt.Job = opt.JOB,
) -> None:
    """Count drift by region and cause.

    Compare every prompt with the path of the call that it continues (its prompt and
    output), and count drift by region and cause. 'tokens at stake' are sampled tokens that
    the prompt changes or lacks. With a tokenizer, causes are found by comparing texts,
    every finding is counted, and one of each cause is shown. --out gets a line per turn.

    Parameters
    ----------
    findings
        With --tokenizer: write each finding, with spans and texts of both sides.
    """
    chosen, loaded = pol.one_policy(policy), opt.chosen_tokenizer(tokenizer, source)
    if findings is not None and loaded is None:
        raise ArgumentError("--findings needs --tokenizer")
    sums: Counter[str] = Counter()
    groups, causes = list[pl.DataFrame](), list[pl.DataFrame]()
    examples: dict[str, dict[str, Any]] = {}

    def stage(turns: pa.Table) -> dict[str, pa.Table]:
        links = tk.link(turns, chosen)
        table = tk.classify_drift(turns, links, tokenizer=loaded)
        made = {"drift": table}
        if loaded is not None:
            found = tk.analysis.explain_drift(turns, links, loaded)
            made["findings"] = found
            causes.append(_by_cause(found))
            for one in found.to_pylist():
                if one["cause"] not in examples:
                    examples[one["cause"]] = _example(turns, one, Codec(loaded))
        lines = pl.DataFrame(table).select(
            pl.col("region", "cause").cast(pl.String),
            turns=pl.lit(1),
            tokens_beyond=pl.col("size").cast(pl.Int64),
            tokens_after_drift=pl.col("tokens_after_drift").cast(pl.Int64),
        )
        # last, because a session that was refused would be counted twice
        groups.append(_summed([lines], "region", "cause"))
        sums.update(
            sessions=len(turns["session_id"].unique()),
            turns=turns.num_rows,
            turns_compared=table.num_rows,
            turns_by_tokens=links["link_reason"].to_pylist().count("tokens"),
            tokens_sampled=sum(map(len, turns["output_ids"])),
        )
        return made

    paths = {"drift": out, "findings": findings}
    outputs = {name: path for name, path in paths.items() if path}
    totals = job.run("drift", source, stage, outputs)
    by = _summed(groups, "region", "cause").sort(
        "tokens_after_drift", "turns", descending=True, maintain_order=True
    )
    head = ("region", "cause", "turns", "tokens beyond", "tokens at stake")
    text = (
        f"sessions {sums['sessions']:,}; {sums['turns_compared']:,} of {sums['turns']:,} "
        f"turns continue an earlier one ({sums['turns_by_tokens']:,} found by tokens "
        f"alone); tokens sampled {sums['tokens_sampled']:,}\n\n"
        f"{text_table(head, by.rows())}"
    )
    facts = {"policy": asdict(chosen), **sums, "groups": by.to_dicts()}
    if loaded is not None:
        found = _summed(causes, "cause").sort(
            "findings", "cause", descending=[True, False]
        )
        facts |= {"causes": found.to_dicts(), "examples": examples}
        names = [name.replace("_", " ") for name in found.columns]
        text += f"\n\n{text_table(names, found.rows())}"
        for cause, one in examples.items():
            text += (
                f"\n\n{cause}: session '{visible(one['session_id'])}', turn "
                f"{one['turn_index']}, from token {one['path_start']}\n"
                f"  path    {one['path_tokens']}\n  prompt  {one['prompt_tokens']}"
            )
    job.print(totals, facts, text)


def _summed(parts: list[pl.DataFrame], *keys: str) -> pl.DataFrame:
    return pl.concat(parts).group_by(keys, maintain_order=True).sum()


def _by_cause(findings: pa.Table) -> pl.DataFrame:
    turn = pl.struct("session_id", "turn_index")
    tokens = {
        f"{side}_tokens": (pl.col(f"{side}_stop") - pl.col(f"{side}_start")).sum()
        for side in ("path", "prompt")
    }
    by = pl.DataFrame(findings).group_by(pl.col("cause").cast(pl.String))
    counts = by.agg(findings=pl.len(), turns=turn.n_unique(), **tokens)
    return counts.with_columns(pl.exclude("cause").cast(pl.Int64))


def _example(turns: pa.Table, found: dict[str, Any], codec: Codec) -> dict[str, Any]:
    """A finding, and the tokens of both sides."""
    calls = Sessions.of(take_session(turns, found["session_id"]))
    places = np.array([found["parent"], found["turn_index"]])
    parent, call = calls.named(np.zeros(2, np.int64), places).tolist()
    sides = {"path": calls.path(parent), "prompt": calls.prompt(call)}
    for side, ids in sides.items():
        bounds = found[f"{side}_start"], found[f"{side}_stop"]
        found[f"{side}_tokens"] = marked(codec, ids, *bounds)
    return found


RIGHT = ("trains", "session_without_rows")
"""Lines that are no finding."""

# of the first wrong rows, and of each of them, the lines that are shown
_MOST_ROWS, _MOST_LINES, _MOST_VIOLATIONS = 3, 3, 20


def check(
    rows: opt.Rows,
    turns: opt.Source,
    /,
    *,
    out: Annotated[str | None, opt.FILE, opt.Writes("row_checks")] = None,
    policy: pol.PolicyOption = None,
    tokenizer: opt.TokenizerPath = None,
    reading: opt.Reading = opt.READING,
    json: opt.Json = False,
    no_clobber: opt.NoClobber = False,
) -> int:
    """Say whether a trainer's mask trains what was sampled.

    Find rows of any trainer (also .npz and .pt) in the log by their tokens, and say which
    turn each row trains, which trained tokens nobody sampled, which sampled tokens no row
    trains, and whether mask or logprobs are shifted. The exit code is 1 if anything is
    wrong. --out gets all findings. docs/check.md lists the columns that are understood.
    With --policy, tokens that the policy does not train are not missing; without it, every
    sampled token that may be trained is expected in a row.
    """
    chosen = pol.maybe_policy(policy)
    loaded = opt.chosen_tokenizer(tokenizer, turns)
    table = plain_rows(any_rows(rows))
    if not table.num_rows:
        raise opt.nothing(rows, "rows")
    calls = reading.turns(turns)
    with Progress("comparing rows with the log"):
        found = tk.check_rows(table, calls, chosen)
    if out is not None:
        write_table(found, out)
    lines = found.to_pylist()
    wrong = any(line["kind"] not in RIGHT for line in lines)
    trained = sum(map(sum, table["loss_mask"].to_pylist()))
    sampled = sum(map(len, calls["output_ids"]))
    text = (
        f"rows {table.num_rows:,}, tokens trained {trained:,}; "
        f"turns {calls.num_rows:,}, tokens sampled {sampled:,}\n\n"
        + _findings(table, lines, None if loaded is None else Codec(loaded))
    )
    opt.print_result({"wrong": wrong, "lines": lines}, text, json)
    return BAD_DATA if wrong else DONE


def any_rows(path: str) -> object:
    """The rows of a file, as its format has them."""
    name = path.lower()
    if name.endswith(".npz"):
        with np.load(path) as arrays:
            return dict(arrays)
    if name.endswith((".pt", ".pkl", ".pickle")):
        from trajkit.importers.containers import load

        value: Any = load(Path(path))
        return value.get("samples", value) if isinstance(value, dict) else value
    return read_any_rows(path)


def _findings(rows: pa.Table, lines: list[dict[str, Any]], codec: Codec | None) -> str:
    """The findings of the first wrong rows, then the number of each kind."""
    wrong = [line for line in lines if line["kind"] not in RIGHT]
    of_rows = [line for line in lines if line["kind"] != RIGHT[1]]
    shown = []
    for row in [*dict.fromkeys(one["row"] for one in wrong or lines)][:_MOST_ROWS]:
        own = [one for one in of_rows if one["row"] == row]
        own.sort(key=lambda one: one["kind"] in RIGHT)
        for one in own[:_MOST_LINES]:
            words, token = one["detail"], one["token"]
            if codec is not None and token is not None:
                ids = np.asarray(rows["input_ids"][row].values)
                start = token - rows["padding"][row].as_py()
                stop = start + min(one["tokens"], 8)
                words += f"  {marked(codec, ids, start, stop)}"
            places = (one[name] for name in ("row", "session_id", "token"))
            texts = ["" if place is None else visible(str(place)) for place in places]
            shown.append([*texts, words])
        if (n_more := len(own) - _MOST_LINES) > 0:
            shown.append(["", "", "", f"and {n_more} more, in the table of --out"])
    shown += [["", "", "", one["detail"]] for one in lines if one["kind"] == RIGHT[1]]
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
    out: Annotated[str | None, opt.PARTS, opt.Writes("violations")] = None,
    policy: pol.PolicyOption = None,
    sessions: opt.SessionsFile = None,
    reward: opt.Reward = None,
    weigh_by: opt.WeighBy = "token",
    max_row_tokens: opt.MaxRowTokens = None,
    job: opt.Job = opt.JOB,
) -> int:
    """Check rows against the turns that they come from.

    Print the violations, or write them to --out; the exit code is 1 if there are any. Rows
    of other systems need input_ids and loss_mask. With --policy, the rows are compared with
    those of the policy; without it, what is true under every policy is checked.
    """
    chosen = pol.maybe_policy(policy)
    with tempfile.TemporaryDirectory(prefix="trajkit-verify-") as folder:
        output = out or str(Path(folder, "violations.arrows"))
        totals = job.run(
            "verify",
            turns,
            output,
            chosen,
            function=partial(verify_file, rows),
            **opt.facts_of(sessions, reward),
            max_row_tokens=max_row_tokens,
            weigh_by=weigh_by,
        )
        found = pl.concat(map(pl.DataFrame, iter_tables(output)))
    text, more = "no violations", len(found) - _MOST_VIOLATIONS
    if len(found):
        names = "session_id row_index turn_index token rule detail".split()
        first = found.head(_MOST_VIOLATIONS).select(pl.col(names).cast(pl.String))
        head = [name.removesuffix("_id").removesuffix("_index") for name in names]
        counts = found.group_by(pl.col("rule").cast(pl.String), maintain_order=True)
        text = text_table(head, first.fill_null("").rows())
        text += f"\n{f'and {more:,} more' * (more > 0)}\n"
        text += text_table(("rule", "violations"), counts.len().rows())
    if chosen is None:
        text += "\nwithout --policy, only what is true under every policy is checked"
    job.print(totals, {"violations": found.to_dicts()}, text)
    return BAD_DATA if len(found) else DONE

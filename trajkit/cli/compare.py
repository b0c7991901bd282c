"""``trajkit simulate``: what policies keep, lose and cost; ``trajkit drift``: why."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from textwrap import fill
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa

import trajkit as tk
from trajkit.analysis.drift import other_text_cause
from trajkit.analysis.simulation import ASKED, Simulation, cheapest_lossless, label
from trajkit.analysis.tokenizer import Codec
from trajkit.analysis.words import LOSS_WORDS, TEXT_PHRASES, count
from trajkit.cli.files import Writes
from trajkit.cli.options import (
    JOB,
    OUT,
    Count,
    Job,
    MaxRowTokens,
    SessionsFile,
    TokenizerPath,
    Turns,
    known_sessions,
)
from trajkit.cli.policies import (
    PoliciesOption,
    PolicyOption,
    many_policies,
    one_policy,
    policy_of,
)
from trajkit.cli.screen import share, text_table, visible
from trajkit.cli.show import marked
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.errors import ArgumentError
from trajkit.policies import ALIASES
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.sessions import Sessions

WIDTH = 100
"""Columns of the table of policies, unless it is to be wide."""


def simulate(
    source: Turns,
    /,
    *,
    policy: PoliciesOption = None,
    sessions: SessionsFile = None,
    max_row_tokens: MaxRowTokens = None,
    pad: Count | None = None,
    pack: Count | None = None,
    wide: bool = False,
    job: Job = JOB,
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
        # by default all that the log has messages for
        policy and [policy_of(one) for one in many_policies(policy)],
        pad_to=pad,
        pack_tokens=pack,
        sessions=known_sessions(sessions),
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


def describe(table: pa.Table, cheapest: str | None, *, wide: bool = False) -> str:
    """The table, what the policies lose, and the result, for people."""
    policies = table.to_pylist()
    first = policies[0] if policies else {"turns": 0, "tokens_sampled": 0}
    result = "every policy here loses sampled tokens"
    if cheapest is not None:
        result = f"keeps everything at the lowest cost: {cheapest}"
    columns = _columns(policies, wide)
    shown = _table(policies, columns)
    while not wide and len(columns) > 1 and max(map(len, shown.splitlines())) > WIDTH:
        columns.popitem()
        shown = _table(policies, columns)
    words = [fill(one, WIDTH, subsequent_indent="  ") for one in _losses(policies)]
    return "\n".join(
        [
            f"turns {first['turns']:,}, tokens sampled {first['tokens_sampled']:,}\n",
            f"{shown}\n",
            *words,
            *[""] * bool(policies),
            result,
        ]
    )


# the least important are last
_COSTS = {
    "tokens_forward": "forward",
    "tokens_padding": "padding",
    "packs": "packs",
    "tokens_packed": "packed",
    "tokens_forward_shared": "shared once",
    "longest_row": "longest row",
}


def _columns(policies: list[dict[str, Any]], wide: bool) -> dict[str, str]:
    """The counts to show, and their heads."""
    some = {name for line in policies for name, n in line.items() if n}
    counted = {name for line in policies for name, n in line.items() if n is not None}
    columns = {"tokens_lost": "lost"}
    if wide:
        columns = {f"lost_{x}": x for x in LOSS_WORDS if f"lost_{x}" in some}
        columns["tokens_duplicated"] = "duplicated"
    if "tokens_out_of_context" in some:
        columns["tokens_out_of_context"] = "out of context"
    columns |= _COSTS | ({"pairs_packed": "attended pairs"} if wide else {})
    return {name: head for name, head in columns.items() if name in counted}


def _table(policies: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """A line per policy."""
    names = ("policy", "rows", "tokens_trained")
    lines = [
        [
            *(line[name] for name in names),
            share(line["tokens_trained"], line["tokens_sampled"]),
            *(line[name] for name in columns),
        ]
        for line in policies
    ]
    head = ["policy", "rows", "trained", "of sampled", *columns.values()]
    return text_table(head, lines)


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
            yield (
                f"{name} trains {count(apart)} after other tokens than they were sampled "
                "after."
            )
        keeps += [name] * (not lost and not apart)
        systems = [x for x, one in ALIASES.items() if label(one) == name != x]
        same += [f"{' and '.join(systems)} as {name}"] * bool(systems)
    if keeps:
        yield f"lose nothing: {', '.join(keeps)}"
    for reason in ASKED:
        n = max((line[f"lost_{reason}"] for line in policies), default=0)
        if n:
            yield f"Up to {count(n)} may not be trained. {LOSS_WORDS[reason][1]}"
    if same:
        yield f"same rule: {'; '.join(same)}"


def drift(
    source: Turns,
    /,
    *,
    out: Annotated[str | None, OUT, Writes("drift")] = None,
    policy: PolicyOption = None,
    tokenizer: TokenizerPath = None,
    findings: Annotated[str | None, Writes("findings")] = None,
    examples: Count = 1,
    job: Job = JOB,
) -> None:
    """Count drift by region and cause.

    Compare every prompt with the path of the call that it continues (its prompt and
    output), and count drift by region and cause. 'tokens at stake' are sampled tokens that
    the prompt changes or lacks. With a tokenizer, causes are found by comparing texts, and
    every finding is counted and shown.

    Parameters
    ----------
    out
        Write the drift table, a line per turn.
    findings
        With --tokenizer: write each finding, with spans and texts of both sides.
    examples
        With --tokenizer: findings to show of each cause.
    """
    chosen, loaded = one_policy(policy), chosen_tokenizer(tokenizer, source)
    codec = None if loaded is None else Codec(loaded)
    if findings is not None and codec is None:
        raise ArgumentError("--findings needs --tokenizer")
    sums: Counter[str] = Counter()
    parts, found = list[pl.DataFrame](), list[pl.DataFrame]()
    shown: dict[str, list[dict[str, Any]]] = {}

    def stage(turns: pa.Table) -> dict[str, pa.Table]:
        links = tk.link(turns, chosen)
        table = tk.classify_drift(turns, links, tokenizer=loaded)
        made = {"drift": table}
        if codec is not None and loaded is not None:
            made["findings"] = tk.analysis.explain_drift(turns, links, loaded)
            found.append(_causes(turns, made["findings"], codec, shown, examples))
        # last, because a session that was refused would be counted twice
        parts.append(_groups(table))
        sums.update(_sums(turns, links, table))
        return made

    paths = {"drift": out, "findings": findings}
    outputs = {name: path for name, path in paths.items() if path}
    totals = job.run("drift", source, stage, outputs)
    most = ("tokens_after_drift", "turns")
    groups = pl.concat(parts).group_by("region", "cause", maintain_order=True).sum()
    groups = groups.sort(most, descending=True, maintain_order=True)
    head = ("region", "cause", "turns", "tokens beyond", "tokens at stake")
    text = (
        f"sessions {sums['sessions']:,}; {sums['turns_compared']:,} of {sums['turns']:,} "
        f"turns continue an earlier one ({sums['turns_by_tokens']:,} found by tokens "
        f"alone); tokens sampled {sums['tokens_sampled']:,}\n\n"
        f"{text_table(head, groups.rows())}"
    )
    facts = {"policy": asdict(chosen), **sums, "groups": groups.to_dicts()}
    if codec is not None:
        counts = pl.concat(found).group_by("cause", "origin", maintain_order=True).sum()
        causes = list(_by_cause(counts, shown))
        facts["causes"] = causes
        text += f"\n\n{_describe_causes(causes)}"
    job.print(totals, facts, text)


def _sums(turns: pa.Table, links: pa.Table, drift: pa.Table) -> dict[str, int]:
    """What drift is counted of, and the turns whose parent was found by tokens."""
    calls = pl.DataFrame(turns.select(["session_id", "output_ids"]))
    reasons = pl.DataFrame(links.select(["link_reason"]))["link_reason"]
    return {
        "sessions": calls["session_id"].n_unique(),
        "turns": turns.num_rows,
        "turns_compared": drift.num_rows,
        "turns_by_tokens": int((reasons.cast(pl.String) == "tokens").sum()),
        "tokens_sampled": int(calls["output_ids"].list.len().sum()),
    }


def _groups(drift: pa.Table) -> pl.DataFrame:
    """By region and cause: turns, path tokens after the drift, and sampled ones of them."""
    keys = pl.col("region", "cause").cast(pl.String)
    return (
        pl.DataFrame(drift)
        .group_by(keys, maintain_order=True)
        .agg(
            turns=pl.len(),
            tokens_beyond=pl.col("size").sum().cast(pl.Int64),
            tokens_after_drift=pl.col("tokens_after_drift").sum().cast(pl.Int64),
        )
    )


_EXAMPLE = ("session_id", "turn_index", "path_start", "path_text", "prompt_text")

# who changed a text, by what messages show
_BY = {"template": " by the template", "rewritten": " by the client", "other_text": ""}


def _causes(
    turns: pa.Table,
    findings: pa.Table,
    codec: Codec,
    examples: dict[str, list[dict[str, Any]]],
    most: int,
) -> pl.DataFrame:
    """Findings by cause and by who changed the text; a few are added to the examples."""
    located = Sessions.of(turns)
    numbers = {name: k for k, name in enumerate(located.ids.to_pylist())}
    origins = []
    for session, own in groupby(findings.to_pylist(), itemgetter("session_id")):
        part = located.part(numbers[session], numbers[session] + 1)
        calls = SessionCalls(part)
        for found in own:
            places = np.array([found["parent"], found["turn_index"]])
            parent, call = part.named(np.zeros(2, np.int64), places).tolist()
            origins.append(other_text_cause(calls, parent, call))
            kept = examples.setdefault(found["cause"], [])
            if len(kept) < most:
                example = {name: found[name] for name in _EXAMPLE}
                sides = {"path": calls.path(parent), "prompt": calls.prompt(call)}
                for side, ids in sides.items():
                    bounds = found[f"{side}_start"], found[f"{side}_stop"]
                    example[f"{side}_tokens"] = marked(codec, ids, *bounds)
                kept.append(example)
    return (
        pl.DataFrame(findings)
        .with_columns(origin=pl.Series(origins, dtype=pl.String))
        .group_by(pl.col("cause").cast(pl.String), "origin", maintain_order=True)
        .agg(
            findings=pl.len(),
            turns=pl.struct("session_id", "turn_index").n_unique(),
            tokens_held=(pl.col("path_stop") - pl.col("path_start")).sum(),
            tokens_shown=(pl.col("prompt_stop") - pl.col("prompt_start")).sum(),
        )
    )


def _by_cause(
    counts: pl.DataFrame, examples: dict[str, list[dict[str, Any]]]
) -> Iterator[dict[str, Any]]:
    """The sums of each cause, with its origins and examples; the most frequent first."""
    # the findings of a turn have one origin
    causes = counts.drop("origin").group_by("cause", maintain_order=True).sum()
    for group in causes.sort("findings", "cause", descending=[True, False]).to_dicts():
        own = counts.filter(pl.col("cause") == group["cause"])
        origins = dict(own.select("origin", "findings").iter_rows())
        yield {**group, "origins": origins, "examples": examples[group["cause"]]}


def _describe_causes(groups: list[dict[str, Any]]) -> str:
    """The causes as a table with examples, for people."""
    head = ("cause", "findings", "turns", "path tokens", "prompt tokens")
    names = ("cause", "findings", "turns", "tokens_held", "tokens_shown")
    text = [text_table(head, [[group[name] for name in names] for group in groups]), ""]
    total = sum(group["findings"] for group in groups)
    happened: Counter[str] = Counter()
    for group in groups:
        for origin, n in group["origins"].items():
            happened[TEXT_PHRASES[group["cause"]] + _BY[origin]] += n
    text += [f"{n:,} of {total:,}: {words}" for words, n in happened.most_common()]
    for group in groups:
        for example in group["examples"]:
            text.append(
                f"\n{group['cause']}: session '{visible(example['session_id'])}', "
                f"turn {example['turn_index']}, from token {example['path_start']}\n"
                f"  path    {example['path_tokens']}\n"
                f"  prompt  {example['prompt_tokens']}"
            )
    return "\n".join(text)

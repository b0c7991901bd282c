"""``trajkit simulate``: what each policy would keep, lose and cost on a run."""

from collections.abc import Iterator
from textwrap import fill
from typing import Any

import pyarrow as pa

from trajkit.analysis.simulation import ASKED, Simulation, cheapest_lossless, label
from trajkit.analysis.words import LOSS_WORDS, count
from trajkit.cli.options import (
    Count,
    Job,
    Json,
    MaxRowTokens,
    SessionsFile,
    Turns,
    known_sessions,
)
from trajkit.cli.policies import PoliciesOption, many_policies
from trajkit.cli.screen import share, text_table
from trajkit.policies import ALIASES

WIDTH = 100
"""Columns of the table, unless it is to be wide."""


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
    job: Job | None = None,
    json: Json = False,
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
    job = job or Job()
    counts = Simulation(
        many_policies(policy),
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
    job.print(totals, facts, describe(table, cheapest, wide=wide), json)


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
    losses = "\n".join(_losses(policies))
    return (
        f"turns {first['turns']:,}, tokens sampled {first['tokens_sampled']:,}\n\n"
        f"{shown}\n\n{losses}{result}"
    )


def _columns(policies: list[dict[str, Any]], wide: bool) -> dict[str, str]:
    """The counts to show, and their heads; the least important are last."""
    some = {name for line in policies for name, n in line.items() if n}
    counted = {name for line in policies for name, n in line.items() if n is not None}
    reasons = {f"lost_{one}": one for one in LOSS_WORDS if f"lost_{one}" in some}
    duplicated = {"tokens_duplicated": "duplicated"}
    apart = {"tokens_out_of_context": "out of context"}
    apart = apart if "tokens_out_of_context" in some else {}
    forward, once = (
        {"tokens_forward": "forward"},
        {"tokens_forward_shared": "shared once"},
    )
    padding = {"tokens_padding": "padding"} if "tokens_padding" in counted else {}
    packs = {"packs": "packs", "tokens_packed": "packed"} if "packs" in counted else {}
    longest = {"longest_row": "longest row"}
    if not wide:
        lost = {"tokens_lost": "lost"}
        return {**lost, **apart, **forward, **padding, **packs, **once, **longest}
    pairs = {"pairs_packed": "attended pairs"} if packs else {}
    rest = {**padding, **longest, **packs, **pairs}
    return {**reasons, **duplicated, **apart, **forward, **once, **rest}


def _losses(policies: list[dict[str, Any]]) -> Iterator[str]:
    """What each policy loses and why, in sentences."""
    keeps = []
    for line in policies:
        sentences = [
            f"{line['policy']} loses {count(line[f'lost_{reason}'])} "
            f"({reason.replace('_', ' ')}). {words}"
            for reason, (_, words) in LOSS_WORDS.items()
            if reason not in ASKED and line[f"lost_{reason}"]
        ]
        if line["tokens_out_of_context"]:
            sentences.append(
                f"{line['policy']} trains {count(line['tokens_out_of_context'])} after "
                "other tokens than they were sampled after."
            )
        if not sentences:
            keeps.append(line["policy"])
        yield from (fill(one, WIDTH, subsequent_indent="  ") for one in sentences)
    if keeps:
        yield fill(f"lose nothing: {', '.join(keeps)}", WIDTH, subsequent_indent="  ")
    for reason in ASKED:
        n = max((line[f"lost_{reason}"] for line in policies), default=0)
        if n:
            words = f"Up to {count(n)} may not be trained. {LOSS_WORDS[reason][1]}"
            yield fill(words, WIDTH, subsequent_indent="  ")
    systems = [*_same_rules(policies)]
    if systems:
        yield fill(f"same rule: {'; '.join(systems)}", WIDTH, subsequent_indent="  ")
    if policies:
        yield "\n"


def _same_rules(policies: list[dict[str, Any]]) -> Iterator[str]:
    """The systems whose rule is that of a policy in the table."""
    for line in policies:
        names = [
            name
            for name, one in ALIASES.items()
            if label(one) == line["policy"] != name
        ]
        if names:
            yield f"{' and '.join(names)} as {line['policy']}"


def _table(policies: list[dict[str, Any]], columns: dict[str, str]) -> str:
    """A line per policy."""
    head = ["policy", "rows", "trained", "of sampled", *columns.values()]
    lines = [
        [
            line["policy"],
            line["rows"],
            line["tokens_trained"],
            share(line["tokens_trained"], line["tokens_sampled"]),
            *(line[name] for name in columns),
        ]
        for line in policies
    ]
    return text_table(head, lines)

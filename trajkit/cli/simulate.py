"""``trajkit simulate``: what each policy would keep, lose and cost on a run."""

from collections.abc import Iterator
from textwrap import fill
from typing import Any

import pyarrow as pa

from trajkit.analysis.simulation import ASKED, Simulation, cheapest_lossless, label
from trajkit.analysis.words import LOSS_WORDS
from trajkit.cli.options import (
    Count,
    Job,
    Json,
    MaxRowTokens,
    PoliciesOption,
    SessionsFile,
    Turns,
    known_sessions,
    many_policies,
)
from trajkit.cli.screen import count, share, text_table
from trajkit.jobs.stages import Made
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

    def stage(turns: pa.Table) -> Made:
        counts.add(turns)
        yield "turns", turns

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
    shown = _wide(table) if wide else _narrow(table)
    losses = "\n".join(_losses(policies))
    return (
        f"turns {first['turns']:,}, tokens sampled {first['tokens_sampled']:,}\n\n"
        f"{shown}\n\n{losses}{result}"
    )


def _narrow(table: pa.Table) -> str:
    """The most important counts, in as many columns as fit."""
    policies = table.to_pylist()
    columns = {"tokens_lost": "lost"}
    if any(line["tokens_out_of_context"] for line in policies):
        columns["tokens_out_of_context"] = "out of context"
    columns["tokens_forward"] = "forward"
    if any(line["tokens_padding"] is not None for line in policies):
        columns["tokens_padding"] = "padding"
    if any(line["packs"] is not None for line in policies):
        columns |= {"packs": "packs", "tokens_packed": "packed"}
    columns |= {"tokens_forward_shared": "shared once", "longest_row": "longest row"}
    while True:
        text = _table(policies, columns)
        if len(columns) == 1 or max(map(len, text.splitlines())) <= WIDTH:
            return text
        columns.popitem()


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
        names = [name for name, one in ALIASES.items() if label(one) == line["policy"]]
        if names:
            yield f"{' and '.join(names)} as {line['policy']}"


def _wide(table: pa.Table) -> str:
    """All counts."""
    policies = table.to_pylist()
    # only reasons that occur
    reasons = {
        name: name.removeprefix("lost_")
        for name in table.column_names
        if name.startswith("lost_") and any(line[name] for line in policies)
    }
    extra = {**reasons, "tokens_duplicated": "duplicated"}
    if any(line["tokens_out_of_context"] for line in policies):
        extra["tokens_out_of_context"] = "out of context"
    extra |= {"tokens_forward": "forward", "tokens_forward_shared": "shared once"}
    if any(line["tokens_padding"] is not None for line in policies):
        extra["tokens_padding"] = "padding"
    extra["longest_row"] = "longest row"
    if any(line["packs"] is not None for line in policies):
        extra |= {
            "packs": "packs",
            "tokens_packed": "packed",
            "pairs_packed": "attended pairs",
        }
    return _table(policies, extra)


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

"""``trajkit drift``: where prompts differ from the paths that they continue."""

from collections import Counter
from dataclasses import asdict, dataclass, field, fields
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any

import numpy as np
import polars as pl
import pyarrow as pa

import trajkit as tk
from trajkit.analysis.drift import other_text_cause
from trajkit.analysis.tokenizer import Codec, Ids
from trajkit.analysis.words import TEXT_PHRASES
from trajkit.cli.files import Writes
from trajkit.cli.options import (
    OUT,
    Count,
    Job,
    Json,
    NoClobber,
    TokenizerPath,
    Turns,
)
from trajkit.cli.policies import PolicyOption, one_policy
from trajkit.cli.screen import text_table, visible
from trajkit.cli.tokenizer import chosen_tokenizer
from trajkit.tables import lazy_compute as pc
from trajkit.turns.attribution import SessionCalls
from trajkit.turns.sessions import Sessions

# tokens of an example: at both ends of the span, and around it
_MAX_TOKENS = 12
_AROUND = 3


def drift(
    source: Turns,
    /,
    *,
    out: Annotated[str | None, OUT, Writes("drift")] = None,
    policy: PolicyOption = None,
    tokenizer: TokenizerPath = None,
    findings: Annotated[str | None, Writes("findings")] = None,
    examples: Count = 1,
    job: Job | None = None,
    json: Json = False,
    no_clobber: NoClobber = False,
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
    chosen, job = one_policy(policy), job or Job()
    loaded = chosen_tokenizer(tokenizer, source)
    codec = None if loaded is None else Codec(loaded)
    if findings is not None and codec is None:
        raise tk.errors.ArgumentError("--findings needs --tokenizer")
    summary, causes = DriftSummary(), dict[str, CauseGroup]()

    def stage(turns: pa.Table) -> dict[str, pa.Table]:
        links = tk.link(turns, chosen)
        table = tk.classify_drift(turns, links, tokenizer=loaded)
        made = {"drift": table}
        if codec is not None and loaded is not None:
            details = tk.analysis.explain_drift(turns, links, loaded)
            add_causes(causes, turns, details, codec, examples)
            made["findings"] = details
        # last, because a session that was refused would be counted twice
        summary.add(turns, links, table)
        return made

    paths = {"drift": out, "findings": findings}
    outputs = {name: path for name, path in paths.items() if path}
    totals = job.run("drift", source, stage, outputs)
    groups = sorted(causes.values(), key=lambda g: (-g.findings, g.cause))
    facts = {"policy": asdict(chosen), **summary.to_json()}
    text = summary.describe()
    if codec is not None:
        facts["causes"] = [vars(group) for group in groups]
        text += "\n\n" + describe_causes(groups)
    job.print(totals, facts, text, json)


_EXAMPLE = ("session_id", "turn_index", "path_start", "path_text", "prompt_text")

# who changed a text, by what messages show
_BY = {"template": " by the template", "rewritten": " by the client", "other_text": ""}


@dataclass
class CauseGroup:
    """The findings of one cause, over all turns."""

    cause: str
    findings: int = 0
    turns: int = 0
    tokens_held: int = 0
    tokens_shown: int = 0
    # findings by who changed the text: see `other_text_cause`
    origins: Counter[str] = field(default_factory=Counter)
    examples: list[dict[str, Any]] = field(default_factory=list)


def add_causes(
    causes: dict[str, CauseGroup],
    turns: pa.Table,
    findings: pa.Table,
    codec: Codec,
    n_examples: int,
) -> None:
    """Count the findings of more sessions by cause, and keep the first few of each."""
    located = Sessions.of(turns)
    numbers = {name: k for k, name in enumerate(located.ids.to_pylist())}
    for session, own in groupby(findings.to_pylist(), itemgetter("session_id")):
        calls = located.part(numbers[session], numbers[session] + 1)
        shown = SessionCalls(calls)
        counted = set()
        for found in own:
            turn = found["turn_index"]
            places = np.array([found["parent"], turn])
            parent, call = calls.named(np.zeros(2, np.int64), places).tolist()
            group = causes.setdefault(found["cause"], CauseGroup(found["cause"]))
            group.findings += 1
            group.turns += (found["cause"], turn) not in counted
            counted.add((found["cause"], turn))
            group.tokens_held += found["path_stop"] - found["path_start"]
            group.tokens_shown += found["prompt_stop"] - found["prompt_start"]
            group.origins[other_text_cause(shown, parent, call)] += 1
            if len(group.examples) < n_examples:
                sides = {"path": shown.path(parent), "prompt": shown.prompt(call)}
                example = {name: found[name] for name in _EXAMPLE}
                for side, ids in sides.items():
                    bounds = found[f"{side}_start"], found[f"{side}_stop"]
                    example[f"{side}_tokens"] = marked(codec, ids, *bounds)
                group.examples.append(example)


def marked(codec: Codec, ids: Ids, start: int, stop: int) -> str:
    """Tokens ``start:stop`` in brackets, with some before and after, one by one."""

    def texts(ids: Ids) -> list[str]:
        return [visible(codec.exact(ids[k : k + 1])) for k in range(len(ids))]

    inside = ids[start:stop]
    shown = texts(inside[:_MAX_TOKENS])
    if len(inside) > 2 * _MAX_TOKENS:
        shown.append(f"... {len(inside) - 2 * _MAX_TOKENS:,} tokens ...")
    shown += texts(inside[_MAX_TOKENS:][-_MAX_TOKENS:])
    before = texts(ids[max(start - _AROUND, 0) : start])
    after = texts(ids[stop : stop + _AROUND])
    return "·".join([*before, f"[{'|'.join(shown)}]", *after])


def describe_causes(groups: list[CauseGroup]) -> str:
    """The causes as a table with examples, for people."""
    head = ("cause", "findings", "turns", "path tokens", "prompt tokens")
    lines = [
        (g.cause, g.findings, g.turns, g.tokens_held, g.tokens_shown) for g in groups
    ]
    text = [text_table(head, lines), ""]
    total = sum(group.findings for group in groups)
    happened = Counter[str]()
    for group in groups:
        for origin, n in group.origins.items():
            happened[TEXT_PHRASES[group.cause] + _BY[origin]] += n
    text += [f"{n:,} of {total:,}: {words}" for words, n in happened.most_common()]
    for group in groups:
        for example in group.examples:
            text.append(
                f"\n{group.cause}: session '{visible(example['session_id'])}', "
                f"turn {example['turn_index']}, from token {example['path_start']}\n"
                f"  path    {example['path_tokens']}\n"
                f"  prompt  {example['prompt_tokens']}"
            )
    return "\n".join(text)


@dataclass(slots=True)
class DriftSummary:
    """The sums of a drift table."""

    sessions: int = 0
    turns: int = 0
    # turns that continue another one, and those whose parent was found by tokens
    turns_compared: int = 0
    turns_by_tokens: int = 0
    tokens_sampled: int = 0
    # by region and cause: turns, path tokens from the start of the drift, and how many of
    # these were sampled
    parts: list[pl.DataFrame] = field(default_factory=list)

    def add(self, turns: pa.Table, links: pa.Table, drift: pa.Table) -> None:
        """Add the drift of more sessions."""
        by_tokens = pc.equal(links["link_reason"].cast(pa.string()), "tokens")
        n_output = pc.list_value_length(turns["output_ids"])
        self.sessions += pc.count_distinct(turns["session_id"]).as_py()
        self.turns += turns.num_rows
        self.turns_compared += drift.num_rows
        self.turns_by_tokens += pc.sum(by_tokens).as_py() or 0
        self.tokens_sampled += pc.sum(n_output).as_py() or 0
        counted = pl.DataFrame(drift).group_by(
            pl.col("region", "cause").cast(pl.String), maintain_order=True
        )
        sums = {"tokens_beyond": "size", "tokens_after_drift": "tokens_after_drift"}
        sizes = {name: pl.col(of).sum().cast(pl.Int64) for name, of in sums.items()}
        self.parts.append(counted.agg(turns=pl.len(), **sizes))

    def groups(self) -> pl.DataFrame:
        """The sums by region and cause; those with the most sampled tokens first."""
        counts = pl.concat(self.parts).group_by("region", "cause", maintain_order=True)
        most = ("tokens_after_drift", "turns")
        return counts.sum().sort(most, descending=True, maintain_order=True)

    def to_json(self) -> dict[str, object]:
        """The attributes, with groups as a list of objects."""
        names = (one.name for one in fields(self) if one.name != "parts")
        facts = {name: getattr(self, name) for name in names}
        return {**facts, "groups": self.groups().to_dicts()}

    def describe(self) -> str:
        """The summary as a table for people."""
        head = ("region", "cause", "turns", "tokens beyond", "tokens at stake")
        return (
            f"sessions {self.sessions:,}; {self.turns_compared:,} of {self.turns:,} turns "
            f"continue an earlier one ({self.turns_by_tokens:,} found by tokens alone); "
            f"tokens sampled {self.tokens_sampled:,}\n\n"
            f"{text_table(head, self.groups().rows())}"
        )

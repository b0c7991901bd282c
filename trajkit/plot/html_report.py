"""`report`: a run as one static HTML page."""

import base64
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike, as_table
from trajkit._arrow.take import tuples
from trajkit.analysis.colors import COLORS, MUTED, OUTPUTS, TEXT
from trajkit.analysis.drift import classify_drift
from trajkit.analysis.drift_findings import explain_drift
from trajkit.analysis.run_metrics import (
    group_rewards,
    metrics,
    metrics_by_step,
    version_counts,
)
from trajkit.analysis.sampled_tokens import output_spans
from trajkit.analysis.simulation import cheapest_lossless, label, simulate
from trajkit.analysis.tokenizer import Tokenizer
from trajkit.analysis.words import LOSS_WORDS, MENDS
from trajkit.errors import SchemaError
from trajkit.pipeline.links import link
from trajkit.pipeline.rows import linearize
from trajkit.plot.markup import escaped, words
from trajkit.plot.run_values import Values, run_values, tokens_by_fate
from trajkit.plot.session_svg import forest
from trajkit.plot.timeline import slices_of
from trajkit.policies import PRESETS, Policy
from trajkit.policies import policy as named_policy
from trajkit.turns.records import as_turns
from trajkit.verification.run import verify

# lines of a table, and characters of an example
_SHOWN, _MAX_TEXT = 20, 160
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = f"""
:root {{ color-scheme: light dark }}
body {{ font: 15px/1.5 system-ui, sans-serif; color: {TEXT}; background: #fff;
  max-width: 62rem; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.5rem }} h2 {{ font-size: 1.15rem; margin-top: 2.2rem }}
.scroll {{ overflow-x: auto }}
table {{ border-collapse: collapse; font-size: .9rem }}
th, td {{ padding: .2rem .7rem .2rem 0; text-align: left; vertical-align: top }}
th {{ color: {MUTED}; font-weight: 600; border-bottom: 1px solid #8886 }}
td.n, th.n {{ text-align: right; font-variant-numeric: tabular-nums }}
code {{ overflow-wrap: anywhere }} img {{ max-width: 100%; background: #fff }}
.key {{ display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 .9em }}
.small {{ color: {MUTED}; font-size: .85rem }}
.plots {{ display: flex; flex-wrap: wrap; gap: 1.2rem }} figure {{ margin: 0 }}
summary {{ cursor: pointer }} details {{ margin: .3rem 0 }}
@media (prefers-color-scheme: dark) {{ body {{ color: #d7dde4; background: #16191d }}
  .small, th {{ color: #9aa4af }} }}
"""


class _Html(str):
    """Text that is markup already; all other text is escaped."""

    __slots__ = ()


class _Run(NamedTuple):
    """The tables that the sections show."""

    turns: pa.Table
    sessions: TableLike | None
    report: pa.Table
    policy: Policy
    drift: pa.Table
    # None: no tokenizer
    findings: pa.Table | None
    simulation: pa.Table
    violations: pa.Table
    numbers: dict[str, float]


def report(
    turns: TableLike,
    policy: str | Policy = "faithful",
    *,
    sessions: TableLike | None = None,
    rows: TableLike | None = None,
    tokenizer: Tokenizer | None = None,
) -> str:
    """Describe a run on one HTML page: a static file, without scripts or other files.

    Sections: what was recorded; what each policy keeps, loses and costs; drift by cause,
    with what to change; rewards and groups; lengths; weight versions; averages per
    training step; violations of the rows.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    policy : str or Policy
        Its rows are verified, and it decides what each turn continues.
    sessions : table, optional
        `trajkit.schema.SESSIONS`: rewards, groups and errors.
    rows : table, optional
        The rows to verify, as ``policy`` or another system made them (see
        `trajkit.verify`). Default: made here by ``policy``.
    tokenizer : Tokenizer, optional
        The engine's tokenizer. Causes of drift then come from the texts, and have
        examples.
    """
    table, chosen = as_turns(as_table(turns)), named_policy(policy)
    links = link(table, chosen)
    own, counts = linearize(table, chosen, sessions=sessions, report=True)
    findings = None if tokenizer is None else explain_drift(table, links, tokenizer)
    run = _Run(
        table,
        sessions,
        counts,
        chosen,
        classify_drift(table, links, tokenizer=tokenizer),
        findings,
        simulate(table, _policies(chosen), sessions=sessions),
        verify(own if rows is None else rows, table, chosen, sessions=sessions),
        metrics(table, counts, chosen),
    )
    body = [
        _summary(run),
        _section("What was recorded", _recorded(run)),
        _section("What each policy keeps and costs", _kept(run)),
        _section("Drift, by cause", _drift(run)),
        _section("Rewards and groups", _groups(run)),
        _section("Distributions", _distributions(run)),
        _section("Weight versions", _versions(run)),
        _section("Averages per training step", _steps(run)),
        _section("Violations in the rows", _violations(run, rows is None)),
    ]
    return "\n".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">',
            '<meta name="viewport" content="width=device-width">',
            f"<title>Run report</title>\n<style>{_STYLE}</style>\n</head>\n<body>",
            *body,
            f'<p class="small">trajkit {escaped(version("trajkit"))}</p>',
            "</body>\n</html>\n",
        ]
    )


def _policies(chosen: Policy) -> list[str | Policy]:
    """All presets, with the chosen policy in place of its preset."""
    return [chosen if name == chosen.name else name for name in PRESETS]


def _summary(run: _Run) -> str:
    numbers = run.numbers
    lines = [
        f"{_count(numbers['run/turns'], 'turn')} of "
        f"{_count(numbers['run/sessions'], 'session')} sampled "
        f"{_count(numbers['tokens/sampled'], 'token')}."
    ]
    causes = Counter(line["cause"] for line in _drifted(run))
    for cause, n in causes.most_common(1):
        lines.append(
            f"{numbers['drift/turns']:,.0f} of {run.drift.num_rows:,} turns that continue "
            f"another drift; {_count(numbers['drift/tokens_at_stake'], 'sampled token')} "
            f"at stake. Most frequent cause: {words(cause)} ({_count(n, 'turn')})."
        )
    if not causes:
        lines.append("No prompt drifts.")
    best = cheapest_lossless(run.simulation)
    if best is not None:
        lines.append(
            f"{best} keeps every token that may be trained, at the lowest cost."
        )
    losing = [
        f"{line['policy']} trains {_share(line['tokens_trained'], line['tokens_sampled'])}"
        for line in run.simulation.to_pylist()
        if line["tokens_lost"]
    ]
    if losing:
        lines.append(f"Policies that lose sampled tokens: {', '.join(losing)}.")
    if numbers["groups/count"]:
        constant, of = numbers["groups/constant"], numbers["groups/count"]
        lines.append(
            f"{constant:,.0f} of {_count(of, 'group')} have no variance in reward."
        )
    n_found = run.violations.num_rows
    broken = f"{_count(n_found, 'violation')} in the rows."
    lines.append(broken if n_found else "The rows break no rule.")
    items = "".join(f"<li>{escaped(line)}</li>" for line in lines)
    return f"<h1>Run report</h1>\n<ul>{items}</ul>"


def _recorded(run: _Run) -> Iterable[str]:
    numbers = run.numbers
    facts: list[tuple[str, object]] = [
        ("sessions", int(numbers["run/sessions"])),
        ("sessions with an error", int(numbers["run/errors"])),
        ("turns", int(numbers["run/turns"])),
        ("sampled tokens", int(numbers["tokens/sampled"])),
    ]
    for name in ("model", "harness", "protocol", "finish_reason", "call_kind"):
        if name in run.turns.column_names:
            values = Counter(
                "unknown" if value is None else str(value)
                for value in run.turns[name].to_pylist()
            )
            shown = ", ".join(f"{value} ({n:,})" for value, n in values.most_common(5))
            facts.append((words(name), shown))
    try:
        slices = slices_of(run.turns, run.sessions)
    except SchemaError:
        facts.append(("times", "the turns have none"))
    else:
        for kind in ("generation", "tool", "queue"):
            own = sum(one.stop - one.start for one in slices if one.kind == kind)
            facts.append((f"{kind}, over all sessions", f"{own:,.1f} s"))
        last = max(one.stop for one in slices)
        facts.append(("from the first turn to the last", f"{last:,.1f} s"))
    yield _table("|", facts)


def _kept(run: _Run) -> Iterable[str]:
    lines = run.simulation.to_pylist()
    fates = [tokens_by_fate(line) for line in lines]
    yield _table(
        "policy|sampled tokens|trained|of sampled|rows|forward|shared once",
        [
            [
                line["policy"],
                _Html(_bar(fate)),
                line["tokens_trained"],
                _share(line["tokens_trained"], line["tokens_sampled"]),
                line["rows"],
                line["tokens_forward"],
                line["tokens_forward_shared"],
            ]
            for line, fate in zip(lines, fates, strict=True)
        ],
    )
    yield _legend(kind for kind in OUTPUTS if any(fate[kind] for fate in fates))
    yield (
        '<p class="small">forward: tokens of all rows. shared once: the same, with each '
        "prefix that rows share counted once.</p>"
    )
    for line, policy in zip(lines, _policies(run.policy), strict=True):
        if line["tokens_lost"]:
            yield from _lost(run, line, policy)


def _lost(run: _Run, line: dict[str, Any], policy: str | Policy) -> Iterable[str]:
    """The tokens that a policy does not train, by reason and by turn."""
    yield (
        f"<details><summary>{escaped(line['policy'])} does not train "
        f"{line['tokens_lost']:,} sampled tokens: why, and which</summary>"
    )
    reasons = [kind for kind in LOSS_WORDS if line[f"lost_{kind}"]]
    yield _table(
        "reason|tokens|what happens",
        [[words(r), line[f"lost_{r}"], LOSS_WORDS[r][1]] for r in reasons],
    )
    turns: Counter[tuple[str, int, str, int | None]] = Counter()
    names = ("session_id", "turn_index", "kind", "drift_turn")
    spans = output_spans(run.turns, policy, sessions=run.sessions)
    for start, stop, *key in tuples(spans, "output_start", "output_stop", *names):
        if key[2] != "trained":
            turns[*key,] += stop - start
    lost = [
        [session, turn, n, words(kind), "" if by is None else f"turn {by}"]
        for (session, turn, kind, by), n in turns.most_common()
    ]
    yield _table("session|turn|tokens|reason|because of the prompt of", lost)
    yield "</details>"


def _drift(run: _Run) -> Iterable[str]:
    drifted = _drifted(run)
    yield (
        f"<p>{len(drifted):,} of {run.drift.num_rows:,} turns that continue another "
        "do not begin with the tokens that were consumed and sampled before.</p>"
    )
    if not drifted:
        return
    examples: dict[str, dict[str, Any]] = {}
    if run.findings is not None:
        for found in run.findings.to_pylist():
            examples.setdefault(found["cause"], found)
    by_cause: dict[str, list[dict[str, Any]]] = {}
    for line in drifted:
        by_cause.setdefault(line["cause"], []).append(line)
    yield _table(
        "cause|turns|tokens at stake|what happens|what to change|example",
        [
            [
                words(cause),
                len(own),
                sum(line["tokens_after_drift"] for line in own),
                MENDS[cause][0],
                _Html(re.sub("`(.+?)`", r"<code>\1</code>", escaped(MENDS[cause][1]))),
                _example(own[0], examples.get(cause)),
            ]
            for cause, own in sorted(by_cause.items(), key=lambda item: -len(item[1]))
        ],
    )
    if run.findings is None:
        yield '<p class="small">Causes come from token ids. A tokenizer names more.</p>'
    at_stake: Counter[str] = Counter()
    for line in drifted:
        at_stake[line["session_id"]] += line["tokens_after_drift"]
    worst = at_stake.most_common(1)[0][0]
    picture = base64.b64encode(forest(run.turns, worst).encode()).decode()
    yield (
        "<p>The session with the most sampled tokens at stake:</p>\n"
        f'<img alt="Calls of session {escaped(worst)}, their drift, and what each policy '
        f'trains" src="data:image/svg+xml;base64,{picture}">'
    )


def _example(line: dict[str, Any], finding: dict[str, Any] | None) -> _Html:
    at = finding or line
    place = f"session {at['session_id']}, turn {at['turn_index']}"
    if finding is None:
        return _Html(f"{escaped(place)}, token {line['lcp']:,}")
    path, prompt = (
        f"<code>{escaped(_short(finding[f'{side}_text']))}</code> "
        f"({_count(finding[f'{side}_stop'] - finding[f'{side}_start'], 'token')})"
        for side in ("path", "prompt")
    )
    return _Html(f"{escaped(place)}: {path} came back as {prompt}")


def _groups(run: _Run) -> Iterable[str]:
    numbers = run.numbers
    if "reward/mean" not in numbers:
        yield "<p>No session has a reward.</p>"
        return
    shown = [
        f"{name} {numbers[f'reward/{name}']:,.4g}"
        for name in ("mean", "std", "min", "max")
    ]
    missing = _count(numbers["reward/missing"], "session")
    yield f"<p>Reward: {', '.join(shown)}; {missing} without one.</p>"
    groups = group_rewards(run.report)
    if not groups:
        yield "<p>No session has a group_id.</p>"
        return
    lines: list[list[object]] = []
    for name, rewards in groups.items():
        known = [reward for reward in rewards if reward is not None]
        constant = len(known) > 1 and len({*known}) == 1
        stats: list[object] = ["", "", ""]
        if known:
            stats = [sum(known) / len(known), min(known), max(known)]
        note = "no variance: advantages are 0" if constant else ""
        lines.append([name, len(rewards), len(known), *stats, note])
    # groups without variance first
    lines.sort(key=lambda line: line[-1] == "")
    yield (
        f"<p>{numbers['groups/constant']:,.0f} of {numbers['groups/count']:,.0f} groups of "
        "two scored rollouts or more have no variance.</p>"
    )
    yield _table("group|rollouts|scored|mean|min|max|", lines)


def _distributions(run: _Run) -> Iterable[str]:
    values = run_values(run.turns, run.report)
    yield "\n".join(['<div class="plots">', *map(_histogram, values), "</div>"])


def _versions(run: _Run) -> Iterable[str]:
    versions = version_counts(run.turns)
    if not versions:
        yield "<p>The turns have no weight versions.</p>"
        return
    numbers = run.numbers
    yield (
        f"<p>{_count(numbers['staleness/mixed_sessions'], 'session')} sampled by several "
        f"versions; {_count(numbers['staleness/unknown_tokens'], 'token')} without a "
        "version.</p>"
    )
    lines = [[name, n, len(own)] for name, (n, own) in versions.items()]
    yield _table("version, in order of appearance|tokens|sessions", lines)


def _steps(run: _Run) -> Iterable[str]:
    steps = metrics_by_step(run.turns, run.report, run.policy)
    if not steps:
        yield "<p>The turns have no column <code>step</code>.</p>"
        return
    names = ["run/sessions", "reward/mean", "tokens/sampled", "tokens/trained_share"]
    names += ["drift/turn_share", "length/turns", "length/output", "logprob/mean"]
    lines = [
        [step, *(numbers.get(name, "") for name in names)]
        for step, numbers in steps.items()
    ]
    yield _table("|".join(["step", *names]), lines[-_SHOWN:])


def _violations(run: _Run, own: bool) -> Iterable[str]:
    rows = f"the rows that {label(run.policy)} makes here" if own else "the given rows"
    found = run.violations.to_pylist()
    if not found:
        yield f"<p>No violations in {escaped(rows)}.</p>"
        return
    yield f"<p>{_count(len(found), 'violation')} in {escaped(rows)}.</p>"
    rules = Counter(line["rule"] for line in found)
    yield _table("rule|violations", [list(one) for one in rules.most_common()])
    names = ["session_id", "row_index", "turn_index", "token", "rule", "detail"]
    empty = [["" if line[n] is None else line[n] for n in names] for line in found]
    yield _table("session|row|turn|token|rule|detail", empty)


def _section(title: str, parts: Iterable[str]) -> str:
    return "\n".join([f"<section>\n<h2>{escaped(title)}</h2>", *parts, "</section>"])


def _table(head: str, lines: Sequence[Sequence[object]]) -> str:
    """At most `_SHOWN` lines; ``head`` has bars between its names. All text is escaped."""
    names = head.split("|")
    numeric = [
        bool(lines) and all(isinstance(line[k], int | float) for line in lines)
        for k in range(len(names))
    ]

    def cells(tag: str, values: Sequence[object]) -> str:
        return "".join(
            f"<{tag}{' class=n' * right}>{_cell(value)}</{tag}>"
            for value, right in zip(values, numeric, strict=True)
        )

    rows = [f"<tr>{cells('td', line)}</tr>" for line in lines[:_SHOWN]]
    top = f"<thead><tr>{cells('th', names)}</tr></thead>" if any(names) else ""
    more = len(lines) - len(rows)
    return (
        f'<div class="scroll"><table>{top}<tbody>{"".join(rows)}</tbody></table></div>'
        + (f'<p class="small">and {more:,} more</p>' if more else "")
    )


def _cell(value: object) -> str:
    if isinstance(value, _Html):
        return value
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.4g}" if isinstance(value, float) else escaped(value)


def _bar(counts: dict[str, int]) -> str:
    """A stacked bar of shares."""
    total = max(sum(counts.values()), 1)
    parts, left = [], 0
    for kind, n in counts.items():
        if n:
            place = f'x="{100 * left / total:.2f}%" width="{100 * n / total:.2f}%"'
            title = f"<title>{words(kind)}: {n:,} tokens</title>"
            parts.append(
                f'<rect {place} height="14" fill="{COLORS[kind]}">{title}</rect>'
            )
            left += n
    return f'<svg width="240" height="14" role="img">{"".join(parts)}</svg>'


def _legend(kinds: Iterable[str]) -> str:
    keys = (
        f'<span class="key" style="background:{COLORS[kind]}"></span>{words(kind)}'
        for kind in kinds
    )
    return f"<p>{''.join(keys)}</p>"


def _histogram(values: Values) -> str:
    title = f"<figcaption>{escaped(values.title)}</figcaption>"
    if not len(values.numbers):
        return f'<figure>{title}<p class="small">unknown</p></figure>'
    counts, edges = values.histogram()
    width, highest = 240 / len(counts), counts.max()
    bars = "".join(
        f'<rect x="{k * width:.1f}" y="{60 - 56 * n / highest:.1f}" '
        f'width="{max(width - 1, 1):.1f}" height="{56 * n / highest:.1f}" '
        f'fill="{COLORS["trained"]}"><title>{edges[k]:,.4g} to {edges[k + 1]:,.4g}: '
        f"{n:,} {values.of}</title></rect>"
        for k, n in enumerate(counts.tolist())
    )
    numbers = values.numbers
    return (
        f'<figure>{title}<svg width="240" height="60" role="img">{bars}</svg>'
        f'<div class="small">{numbers.min():,.4g} to {numbers.max():,.4g}, mean '
        f"{numbers.mean():,.4g}</div></figure>"
    )


def _drifted(run: _Run) -> list[dict[str, Any]]:
    drifted: pa.Table = run.drift.filter(pc.greater(run.drift["size"], 0))
    return list(drifted.to_pylist())


def _share(part: int, total: int) -> str:
    return f"{100 * part / total:.1f} %" if total else ""


def _short(text: str) -> str:
    """A text as a Python string, without its middle if it is long."""
    if len(text) > _MAX_TEXT:
        half = _MAX_TEXT // 2
        return f"{text[:half]!r} ... {text[-half:]!r}"
    return repr(text)


def _count(n: float, noun: str) -> str:
    return f"{n:,.0f} {noun}" + ("" if n == 1 else "s")

"""`simulate`: what policies keep, lose and cost on the same calls. `metrics`: a run as
numbers.
"""

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import fields
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_int
from trajkit.analysis.branches import drifted
from trajkit.errors import ArgumentError, LeftOutWarning, MissingBodyError, SchemaError
from trajkit.packs.balancing import pack_pairs
from trajkit.packs.packing import pack
from trajkit.policies import ALIASES, PRESETS, Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.linearize import link, rows_and_report
from trajkit.rows.plan import COUNTS
from trajkit.schema import CAUSES, LOSSES, REPORT, SIMULATION
from trajkit.schema.engine import field_of
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import TableLike, as_table, canonical
from trajkit.tables.ragged import Ragged
from trajkit.tables.stages import Batches, batches_of, whole_sessions
from trajkit.turns.flat_buffers import TurnTokens, flat_turns, sessions_of, spans_of
from trajkit.turns.records import as_turns
from trajkit.turns.session_metadata import session_facts
from trajkit.turns.sessions import Sessions

ASKED = ("untrainable", "aborted", "masked", "no_logprob")
"""Losses that the caller asked for."""

Policies: TypeAlias = str | Policy | Iterable[str | Policy] | None


def simulate(
    turns: TableLike | Batches,
    policies: Policies = None,
    *,
    pad_to: int | None = None,
    pack_tokens: int | None = None,
    sessions: TableLike | None = None,
    max_row_tokens: int | None = None,
    threads: int | None = None,
) -> pa.Table:
    """Count what policies keep, lose and cost on recorded calls, one row per policy.

    Parameters
    ----------
    turns : table, or iterator of record batches
        As for `trajkit.linearize`. One part of a run's rows is in memory at a time.
    policies : str, Policy, or iterable of them, optional
        Default: every preset. Without message bodies in the table, presets that compare
        them are omitted with a `LeftOutWarning`.
    pad_to : int, optional
        Count the padding of rows to a multiple of this many tokens.
    pack_tokens : int, optional
        Count the packs of at most this many tokens that the rows make as trees.
    sessions, max_row_tokens, threads
        As for `trajkit.linearize`; a session with an error trains nothing.

    Returns
    -------
    Table
        `trajkit.schema.SIMULATION`, in the order of ``policies``: counts of what
        `trajkit.linearize` returns for the same arguments.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As for `trajkit.linearize`, and with ``pack_tokens`` as for `trajkit.pack`.
    PolicyError, ArgumentError
        A policy does not exist, or ``pad_to`` or ``pack_tokens`` is no integer from 1 on.
    """
    counts = Simulation(
        policies,
        pad_to,
        pack_tokens,
        sessions=sessions,
        max_row_tokens=max_row_tokens,
        threads=threads,
    )
    stream = isinstance(turns, Iterator)
    for table in whole_sessions(batches_of(turns)) if stream else [as_turns(turns)]:
        counts.add(table)
    return counts.table()


class Simulation:
    """Incremental `simulate`, with its arguments: add sessions part by part."""

    def __init__(
        self,
        policies: Policies = None,
        pad_to: int | None = None,
        pack_tokens: int | None = None,
        **options: Any,
    ) -> None:
        for name, value in (("pad_to", pad_to), ("pack_tokens", pack_tokens)):
            if value is not None:
                chosen_int(name, value, 1)
        self._optional, self._pad_to, self._pack = policies is None, pad_to, pack_tokens
        facts = session_facts(None, options.get("sessions")).table
        self._options: Any = {**options, "sessions": facts}
        self._totals = [(one, Counter[str]()) for one in chosen_policies(policies)]

    def add(self, turns: pa.Table) -> None:
        """Count complete sessions. If they are rejected, the counts stay unchanged."""
        totals = deepcopy(self._totals)
        for part in Sessions.of(turns).split(limits.PART_TOKENS):
            sampled = flat_turns(part)
            for total in tuple(totals):
                policy, counts = total
                try:
                    found = self._counted(sampled, policy)
                except MissingBodyError as error:
                    if not self._optional:
                        raise
                    left_out = f"{policy.name} is left out: {error}"
                    warnings.warn(left_out, LeftOutWarning, stacklevel=3)
                    totals.remove(total)
                    continue
                longest = max(counts["longest_row"], found["longest_row"])
                counts.update({**found, "longest_row": 0})
                counts["longest_row"] = longest
        self._totals = totals

    def table(self) -> pa.Table:
        lost = [f"lost_{reason}" for reason in LOSSES]
        asked = {"tokens_padding": self._pad_to}
        asked |= dict.fromkeys(("packs", "tokens_packed", "pairs_packed"), self._pack)
        lines = []
        for policy, counts in self._totals:
            line: dict[str, Any] = {name: counts[name] for name in SIMULATION.names}
            line |= {name: None for name in asked if asked[name] is None}
            total = sum(counts[name] for name in lost)
            lines.append({**line, "policy": label(policy), "tokens_lost": total})
        return pa.Table.from_pylist(lines, SIMULATION)

    def _counted(self, sampled: TurnTokens, policy: Policy) -> dict[str, int]:
        rows, report = rows_and_report(sampled.calls, policy, **self._options)
        found = {name: report[name].to_numpy().sum() for name in COUNTS}
        ids = Ragged.of(rows["input_ids"], -1)
        spans = spans_of(rows, sampled, sessions_of(rows, sampled.calls))
        trained = spans.take(np.flatnonzero(spans.kind == "trained"))
        beyond = trained.stop - trained.start - trained.in_context(ids, sampled)
        found["tokens_out_of_context"] = beyond.sum()
        found["longest_row"] = ids.lengths.max(initial=0)
        if self._pad_to is not None:
            found["tokens_padding"] = (-ids.lengths % self._pad_to).sum()
        if self._pack is not None:
            packs = pack(rows, self._pack, oversize="carry")
            found["packs"], found["pairs_packed"] = len(packs), pack_pairs(packs).sum()
            found["tokens_packed"] = packs["n_tokens"].to_numpy().sum()
        return {name: int(n) for name, n in found.items()}


def chosen_policies(policies: Policies) -> list[Policy]:
    chosen: Any = PRESETS if policies is None else policies
    chosen = [chosen] if isinstance(chosen, str | Policy) else chosen
    if not isinstance(chosen, Iterable):
        text = "expected policies, or names of policies"
        raise ArgumentError(f"policies={chosen!r}: {text}")
    return [*map(named_policy, chosen)]


def label(policy: Policy) -> str:
    """The policy's name and the choices that differ from its preset's, such as
    ``slime(fork_threshold=0)``; of a system's rule without a preset, the system's name.
    """
    preset = PRESETS[policy.name]
    for system, rule in ALIASES.items():
        if policy == rule != preset:
            return system
    values = ((one.name, getattr(policy, one.name)) for one in fields(policy))
    changed = [f"{k}={value}" for k, value in values if value != getattr(preset, k)]
    return f"{policy.name}({', '.join(changed)})".removesuffix("()")


def cheapest_lossless(table: pa.Table) -> str | None:
    """The lossless policy of a `simulate` table with the least cost, or None.

    It has the fewest forward tokens (on ties, with shared prefixes counted once), loses
    no token that may be trained, and trains none out of context.
    """
    costs = [
        (line["tokens_forward"], line["tokens_forward_shared"], k, line["policy"])
        for k, line in enumerate(table.to_pylist())
        if line["tokens_lost"] == sum(line[f"lost_{reason}"] for reason in ASKED)
        and not line["tokens_out_of_context"]
    ]
    return min(costs)[-1] if costs else None


def metrics(
    turns: TableLike, report: TableLike, policy: str | Policy = "faithful"
) -> dict[str, float]:
    """Count a run as numbers with names such as ``tokens/trained``, for trackers.

    Parameters
    ----------
    turns, policy
        As for `trajkit.report`.
    report : table
        `trajkit.schema.REPORT` of these turns under this policy.

    Returns
    -------
    dict of str to float
        The same names for every run (docs/pictures.md); a mean of nothing has no entry.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `trajkit.linearize`; the report lacks a column, or is not of these turns.
    """
    calls = Sessions.of(as_turns(turns))
    table, counted = calls.table, as_table(report)
    if missing := {*REPORT.names} - {*counted.column_names}:
        raise SchemaError(
            f"the report has no column {min(missing)!r}: pass the one that "
            "trajkit.report(turns, policy) returns"
        )
    counted = canonical(counted, REPORT)
    n = {name: pc.sum(counted[name]).as_py() or 0 for name in COUNTS}
    n_sessions = counted.num_rows
    if n["turns"] != table.num_rows:
        raise SchemaError(
            f"the report counts {n['turns']:,} turns, and the table has "
            f"{table.num_rows:,}: pass the report of these turns"
        )
    links = link(table, policy)
    drifts, n_linked = drifted(table, links), len(links) - links["parent"].null_count
    causes = Counter(drifts["cause"].to_pylist())
    rewards, outputs = counted["reward"], pa.array(calls.calls["out_len"])
    several = counted.select(["group_id", "reward"]).drop_null().group_by("group_id")
    groups = several.aggregate([("reward", x) for x in ("count", "min", "max")])
    groups = groups.filter(pc.greater(groups["reward_count"], 1))
    bottom, top = (groups[f"reward_{x}"].to_numpy() for x in ("min", "max"))
    pieces = Ragged.of(table["weight_versions"])
    versions = field_of(pieces.values, "version")
    own = pa.table([calls.session[pieces.owner], versions], ["session", "version"])
    own = own.group_by("session").aggregate([("version", "count_distinct")])
    found = {
        "run/sessions": n_sessions,
        "run/turns": n["turns"],
        "run/errors": n_sessions - counted["error"].null_count,
        **{f"tokens/{k}": n[f"tokens_{k}"] for k in ("sampled", "trained", "forward")},
        "tokens/forward_shared": n["tokens_forward_shared"],
        "tokens/trained_share": _ratio(n["tokens_trained"], n["tokens_sampled"]),
        "tokens/lost": sum(n[f"lost_{reason}"] for reason in LOSSES),
        **{f"tokens/lost_{reason}": n[f"lost_{reason}"] for reason in LOSSES},
        "rows/count": n["rows"],
        "rows/per_session": _ratio(n["rows"], n_sessions),
        "drift/turns": drifts.num_rows,
        "drift/turn_share": _ratio(drifts.num_rows, n_linked),
        "drift/tokens_at_stake": pc.sum(drifts["tokens_after_drift"]).as_py() or 0,
        **{f"drift/{cause}_turns": causes[cause] for cause in CAUSES[1:]},
        "reward/mean": pc.mean(rewards).as_py(),
        "reward/std": pc.stddev(rewards).as_py(),
        "reward/min": pc.min(rewards).as_py(),
        "reward/max": pc.max(rewards).as_py(),
        "reward/missing": rewards.null_count,
        "groups/count": groups.num_rows,
        "groups/constant": np.isclose(top, bottom, 1e-9, 1e-9).sum(),
        "length/turns": _ratio(n["turns"], n_sessions),
        "length/output": pc.mean(outputs).as_py(),
        "length/output_max": pc.max(outputs).as_py(),
        "length/context_max": pc.max(pa.array(calls.path_len)).as_py(),
        "logprob/mean": pc.mean(pc.list_flatten(table["output_logprobs"])).as_py(),
        "staleness/versions": len(pc.unique(versions.drop_null())),
        "staleness/mixed_sessions": sum(
            k > 1 for k in own["version_count_distinct"].to_pylist()
        ),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _ratio(part: int, total: int) -> float | None:
    return part / total if total else None

"""`metrics`: a run as named numbers, as experiment trackers take them."""

from typing import Any

import pyarrow as pa

from trajkit.analysis import lazy_polars as pl
from trajkit.analysis.drift import classify_drift
from trajkit.errors import SchemaError
from trajkit.policies import Policy
from trajkit.rows.links import link
from trajkit.schema import CAUSES, LOSSES, REPORT
from trajkit.tables.canonical import TableLike, as_table
from trajkit.turns.records import as_turns

_SUMMED = [
    name
    for name in REPORT.names
    if name in ("turns", "rows") or name.startswith(("tokens_", "lost_"))
]


def metrics(
    turns: TableLike, report: TableLike, policy: str | Policy = "faithful"
) -> dict[str, float]:
    """Count a run as numbers with names such as ``tokens/trained``.

    Parameters
    ----------
    turns, policy
        As for `trajkit.report`.
    report : table
        `trajkit.schema.REPORT` of these turns under this policy.

    Returns
    -------
    dict of str to float
        The same names for every run; a mean of nothing has no entry. ``run/*`` count
        sessions, turns and errors, ``tokens/*`` and ``rows/*`` are as in the report
        (``trained_share`` is of sampled tokens). ``drift/*`` are of turns that drift:
        their share of turns with a parent, sampled tokens from the start of the drift
        (``tokens_at_stake``), turns by cause (`trajkit.schema.CAUSES`). ``reward/*`` are
        over sessions with a reward (``std`` of the population), ``groups/*`` over groups
        with two or more: all, and those whose rewards are equal. ``length/*`` are mean
        turns per session, mean and longest output, longest path; ``logprob/mean`` is over
        tokens that have one. ``staleness/*`` count weight versions, sessions sampled by
        several, and tokens without a version.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `trajkit.linearize`; the report lacks a column, or is not of these turns.
    """
    table, counted = as_turns(as_table(turns)), as_table(report)
    _check_report(table, counted)
    sessions = pl.frame(counted, [*_SUMMED, "error", "reward", "group_id"])
    sums = sessions.select(_SUMMED).sum().row(0, named=True)
    lost = {reason: sums[f"lost_{reason}"] for reason in LOSSES}
    drift = pl.frame(classify_drift(table, link(table, policy)))
    n_linked, drift = drift.height, drift.filter(pl.col("size") > 0)
    causes = drift["cause"].cast(pl.String)
    rewards = sessions["reward"].drop_nulls()
    groups = sessions.drop_nulls(["group_id", "reward"]).group_by("group_id")
    groups = groups.agg(n=pl.len(), distinct=pl.col("reward").n_unique())
    groups = groups.filter(pl.col("n") > 1)
    output, context = _lengths(table)
    versions = pl.frame(table, ["session_id", "weight_versions"])
    versions = (
        versions.explode("weight_versions").drop_nulls().unnest("weight_versions")
    )
    versions = versions.with_columns(n=pl.col("stop") - pl.col("start"))
    mixed = versions.group_by("session_id").agg(pl.col("version").n_unique())
    found = {
        "run/sessions": sessions.height,
        "run/turns": sums["turns"],
        "run/errors": sessions["error"].count(),
        "tokens/sampled": sums["tokens_sampled"],
        "tokens/trained": sums["tokens_trained"],
        "tokens/forward": sums["tokens_forward"],
        "tokens/forward_shared": sums["tokens_forward_shared"],
        "tokens/trained_share": _ratio(sums["tokens_trained"], sums["tokens_sampled"]),
        "tokens/lost": sum(lost.values()),
        **{f"tokens/lost_{reason}": n for reason, n in lost.items()},
        "rows/count": sums["rows"],
        "rows/per_session": _ratio(sums["rows"], sessions.height),
        "drift/turns": drift.height,
        "drift/turn_share": _ratio(drift.height, n_linked),
        "drift/tokens_at_stake": drift["tokens_after_drift"].sum(),
        **{f"drift/{cause}_turns": (causes == cause).sum() for cause in CAUSES[1:]},
        "reward/missing": sessions.height - len(rewards),
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(ddof=0),
        "reward/min": rewards.min(),
        "reward/max": rewards.max(),
        "groups/count": groups.height,
        "groups/constant": (groups["distinct"] == 1).sum(),
        "length/turns": _ratio(table.num_rows, sessions.height),
        "length/output": output.mean(),
        "length/output_max": output.max(),
        "length/context_max": context.max(),
        "logprob/mean": pl.frame(table, ["output_logprobs"])["output_logprobs"]
        .explode()
        .cast(float)
        .mean(),
        "staleness/versions": versions["version"].n_unique(),
        "staleness/mixed_sessions": (mixed["version"] > 1).sum(),
        "staleness/unknown_tokens": output.sum() - versions["n"].sum(),
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _check_report(turns: pa.Table, report: pa.Table) -> None:
    missing = {*REPORT.names} - {*report.column_names}
    if missing:
        raise SchemaError(
            f"the report has no column {min(missing)!r}: pass the one that "
            "trajkit.report(turns, policy) returns"
        )
    n_turns = sum(report["turns"].to_pylist())
    if n_turns != turns.num_rows:
        raise SchemaError(
            f"the report counts {n_turns:,} turns, and the table has {turns.num_rows:,}: "
            "pass the report of these turns"
        )


def _ratio(part: int, total: int) -> float | None:
    return part / total if total else None


def _lengths(turns: pa.Table) -> tuple[Any, Any]:
    """The lengths of outputs and of paths, in full or delta form."""
    names, prompt = ["prompt_ids"], pl.col("prompt_ids").list.len()
    if "suffix_ids" in turns.column_names:
        names = ["suffix_ids", "shared_length"]
        prompt = pl.col("suffix_ids").list.len() + pl.col("shared_length")
    output = pl.col("output_ids").list.len()
    frame = pl.frame(turns, [*names, "output_ids"])
    lengths = frame.select(output=output, context=prompt + output)
    return lengths["output"], lengths["context"]

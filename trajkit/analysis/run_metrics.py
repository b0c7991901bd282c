"""`metrics`: a run as named numbers, as experiment trackers take them."""

from typing import Any, cast

import numpy as np
import pyarrow as pa

from trajkit.analysis import lazy_polars as pl
from trajkit.analysis.drift import classify_drift
from trajkit.errors import SchemaError
from trajkit.policies import Policy
from trajkit.policies import policy as named_policy
from trajkit.rows.links import link
from trajkit.schema import CAUSES, LOSSES, REPORT
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table
from trajkit.turns.records import as_turns


def metrics(
    turns: TableLike, report: TableLike, policy: str | Policy = "faithful"
) -> dict[str, float]:
    """Count a run as numbers with names such as ``tokens/trained``.

    Parameters
    ----------
    turns : table
        `trajkit.schema.TURNS` in full or delta form.
    report : table
        `trajkit.schema.REPORT` of these turns, from `trajkit.linearize`.
    policy : str or Policy
        The policy of the report, which decides what each turn continues.

    Returns
    -------
    dict of str to float
        The same names for every run; a mean of nothing has no entry:

        run/sessions, run/turns, run/errors
            Sessions, turns, and sessions that ended in an error.
        tokens/sampled, tokens/trained, tokens/trained_share, tokens/lost, ``tokens/lost_*``
            As in the report; the share is of sampled tokens.
        tokens/forward, tokens/forward_shared
            Tokens of all rows, and with each shared prefix counted once.
        rows/count, rows/per_session
            Rows, and their mean per session.
        drift/turns, drift/turn_share, drift/tokens_at_stake, ``drift/*_turns``
            Turns that drift, their share of turns with a parent, sampled tokens from
            the start of the drift, and turns by cause (`trajkit.schema.CAUSES`).
        reward/mean, reward/std, reward/min, reward/max, reward/missing
            Over sessions with a reward (std: of the population), and sessions without.
        groups/count, groups/constant
            Groups with two rewards or more, and those whose rewards are all equal.
        length/turns, length/output, length/output_max, length/context_max
            Mean turns per session, mean and longest output, longest path.
        logprob/mean
            Of all sampled tokens that have one.
        staleness/versions, staleness/mixed_sessions, staleness/unknown_tokens
            Weight versions, sessions sampled by several, and tokens without a version.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `trajkit.linearize`; the report lacks a column, or is not of these turns.

    Examples
    --------
    >>> import trajkit as tk
    >>> call = {"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}
    >>> turns = tk.from_records([call])
    >>> rows, report = tk.linearize(turns), tk.report(turns, reward=1.0)
    >>> numbers = tk.analysis.metrics(turns, report)
    >>> numbers["tokens/trained"], numbers["reward/mean"], "logprob/mean" in numbers
    (2.0, 1.0, False)
    """
    table, counts = as_turns(as_table(turns)), as_table(report)
    _check_report(table, counts)
    drift = classify_drift(table, link(table, policy))
    sums = pl.frame(counts, _SUMMED).sum().row(0, named=True)
    found: dict[str, float | None] = {
        "run/sessions": counts.num_rows,
        "run/turns": sums["turns"],
        "run/errors": counts["error"].length() - counts["error"].null_count,
    }
    for name in ("sampled", "trained", "forward", "forward_shared"):
        found[f"tokens/{name}"] = sums[f"tokens_{name}"]
    found["tokens/trained_share"] = _ratio(
        sums["tokens_trained"], sums["tokens_sampled"]
    )
    found["tokens/lost"] = sum(sums[f"lost_{reason}"] for reason in LOSSES)
    found |= {f"tokens/lost_{reason}": sums[f"lost_{reason}"] for reason in LOSSES}
    found["rows/count"] = sums["rows"]
    found["rows/per_session"] = _ratio(sums["rows"], counts.num_rows)
    drifted = pl.frame(drift, ["size", "cause", "tokens_after_drift"]).filter(
        pl.col("size") > 0
    )
    found["drift/turns"] = drifted.height
    found["drift/turn_share"] = _ratio(drifted.height, drift.num_rows)
    found["drift/tokens_at_stake"] = int(drifted["tokens_after_drift"].sum())
    causes = dict(drifted["cause"].cast(pl.String).value_counts().iter_rows())
    found |= {f"drift/{cause}_turns": causes.get(cause, 0) for cause in CAUSES[1:]}
    found |= _rewards(counts) | _lengths(table, counts.num_rows) | _versions(table)
    return {name: float(value) for name, value in found.items() if value is not None}


def metrics_by_step(
    turns: TableLike, report: TableLike, policy: str | Policy = "faithful"
) -> dict[int, dict[str, float]]:
    """`metrics` of the sessions of each training step, in the order of the steps.

    Parameters
    ----------
    turns : table
        With the column ``step`` (integers). The last turn of a session decides its step.
    report, policy
        As for `metrics`.

    Returns
    -------
    dict of int to dict
        Empty if the turns have no column ``step``, or only nulls. Sessions of an unknown
        step are left out.
    """
    chosen = named_policy(policy)
    table, counts = as_turns(as_table(turns)), as_table(report)
    if "step" not in table.column_names:
        return {}
    steps = pl.frame(table, ["session_id", "step"]).group_by("session_id").last()
    found = {}
    for (step,), sessions in (
        steps.drop_nulls().sort("step").group_by("step", maintain_order=True)
    ):
        own = pa.array(sessions["session_id"].to_list())
        turns, report = (
            part.filter(pc.is_in(part["session_id"], own)) for part in (table, counts)
        )
        found[cast("int", step)] = metrics(turns, report, chosen)
    return found


_SUMMED = [
    name
    for name in REPORT.names
    if name in ("turns", "rows") or name.startswith(("tokens_", "lost_"))
]


def _check_report(turns: pa.Table, report: pa.Table) -> None:
    missing = {*REPORT.names} - {*report.column_names}
    if missing:
        raise SchemaError(
            f"the report has no column {min(missing)!r}: pass the one that "
            "trajkit.report(turns, policy) returns"
        )
    n_turns = pc.sum(report["turns"]).as_py() or 0
    if n_turns != turns.num_rows:
        raise SchemaError(
            f"the report counts {n_turns:,} turns, and the table has {turns.num_rows:,}: "
            "pass the report of these turns"
        )


def _ratio(part: int, total: int) -> float | None:
    return part / total if total else None


def _rewards(report: pa.Table) -> dict[str, float | None]:
    rewards = report["reward"].drop_null().to_numpy()
    groups = pl.frame(report, ["group_id", "reward"]).drop_nulls().group_by("group_id")
    counted = groups.agg(n=pl.len(), distinct=pl.col("reward").n_unique())
    compared = counted.filter(pl.col("n") > 1)
    found: dict[str, float | None] = {
        "reward/missing": report.num_rows - len(rewards),
        "groups/count": compared.height,
        "groups/constant": compared.filter(pl.col("distinct") == 1).height,
    }
    if len(rewards):
        for name in ("mean", "std", "min", "max"):
            found[f"reward/{name}"] = getattr(np, name)(rewards)
    return found


def _lengths(turns: pa.Table, n_sessions: int) -> dict[str, float | None]:
    outputs = pc.list_value_length(turns["output_ids"]).to_numpy()
    prompts = _prompt_lengths(turns)
    found: dict[str, float | None] = {
        "length/turns": _ratio(turns.num_rows, n_sessions),
        "logprob/mean": pc.mean(pc.list_flatten(turns["output_logprobs"])).as_py(),
    }
    if len(outputs):
        found["length/output"] = outputs.mean()
        found["length/output_max"] = outputs.max()
        found["length/context_max"] = (prompts + outputs).max()
    return found


def _prompt_lengths(turns: pa.Table) -> np.ndarray[Any, Any]:
    """The length of each prompt in full or delta form, shape (n_turns,)."""
    if "prompt_ids" in turns.column_names:
        return np.asarray(pc.list_value_length(turns["prompt_ids"]))
    suffixes = pc.list_value_length(turns["suffix_ids"])
    return np.asarray(pc.add(suffixes, turns["shared_length"]))


def _versions(turns: pa.Table) -> dict[str, float | None]:
    pieces = pl.frame(turns, ["session_id", "weight_versions"]).explode(
        "weight_versions"
    )
    known = pieces.drop_nulls("weight_versions").unnest("weight_versions")
    versions = known.group_by("session_id").agg(n=pl.col("version").n_unique())
    lengths = known["stop"] - known["start"]
    sampled = pc.sum(pc.list_value_length(turns["output_ids"])).as_py() or 0
    return {
        "staleness/versions": known["version"].n_unique(),
        "staleness/mixed_sessions": versions.filter(pl.col("n") > 1).height,
        "staleness/unknown_tokens": sampled - int(lengths.sum()),
    }

"""`metrics`: a run as named numbers, as experiment trackers take them."""

from collections import Counter, defaultdict
from typing import Any

import numpy as np

from trajkit.analysis.drift import classify_drift
from trajkit.errors import SchemaError
from trajkit.policies import Policy
from trajkit.rows.links import link
from trajkit.schema import CAUSES, LOSSES, REPORT
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table
from trajkit.tables.columns import tuples
from trajkit.turns.records import as_turns
from trajkit.turns.sessions import Sessions


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
        The same names for every run (docs/pictures.md); a mean of nothing has no entry.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `trajkit.linearize`; the report lacks a column, or is not of these turns.
    """
    table, counted = as_turns(as_table(turns)), as_table(report)
    if missing := {*REPORT.names} - {*counted.column_names}:
        raise SchemaError(
            f"the report has no column {min(missing)!r}: pass the one that "
            "trajkit.report(turns, policy) returns"
        )
    n = {
        name: sum(counted[name].to_pylist())
        for name in REPORT.names
        if name in ("turns", "rows") or name.startswith(("tokens_", "lost_"))
    }
    if n["turns"] != table.num_rows:
        raise SchemaError(
            f"the report counts {n['turns']:,} turns, and the table has "
            f"{table.num_rows:,}: pass the report of these turns"
        )
    n_sessions, calls = counted.num_rows, Sessions.of(table)
    drift = classify_drift(table, link(table, policy))
    drifts = drift.filter(pc.greater(drift["size"], 0))
    causes = Counter(drifts["cause"].to_pylist())
    rewards = counted["reward"].drop_null().to_numpy()
    groups = defaultdict(list)
    for group, reward in tuples(counted, "group_id", "reward"):
        if group is not None and reward is not None:
            groups[group].append(reward)
    several = [{*group} for group in groups.values() if len(group) > 1]
    logprobs = table["output_logprobs"].combine_chunks().flatten().drop_null()
    outputs = calls.calls["out_len"].astype(np.int64)
    # versions by session, and the tokens that have one
    versions, n_known = defaultdict(set), 0
    for name, pieces in tuples(table, "session_id", "weight_versions"):
        for piece in pieces or ():
            versions[name].add(piece["version"])
            n_known += piece["stop"] - piece["start"]
    found = {
        "run/sessions": n_sessions,
        "run/turns": n["turns"],
        "run/errors": n_sessions - counted["error"].null_count,
        "tokens/sampled": n["tokens_sampled"],
        "tokens/trained": n["tokens_trained"],
        "tokens/forward": n["tokens_forward"],
        "tokens/forward_shared": n["tokens_forward_shared"],
        "tokens/trained_share": _ratio(n["tokens_trained"], n["tokens_sampled"]),
        "tokens/lost": sum(n[f"lost_{reason}"] for reason in LOSSES),
        **{f"tokens/lost_{reason}": n[f"lost_{reason}"] for reason in LOSSES},
        "rows/count": n["rows"],
        "rows/per_session": _ratio(n["rows"], n_sessions),
        "drift/turns": drifts.num_rows,
        "drift/turn_share": _ratio(drifts.num_rows, drift.num_rows),
        "drift/tokens_at_stake": sum(drifts["tokens_after_drift"].to_pylist()),
        **{f"drift/{cause}_turns": causes[cause] for cause in CAUSES[1:]},
        "reward/missing": n_sessions - len(rewards),
        "groups/count": len(several),
        "groups/constant": sum(len(group) == 1 for group in several),
        "length/turns": _ratio(n["turns"], n_sessions),
        **_of("length/output", outputs, mean="", max="_max"),
        **_of("length/context", calls.path_len, max="_max"),
        **_of("reward", rewards, mean="/mean", std="/std", min="/min", max="/max"),
        **_of("logprob", logprobs.to_numpy().astype(np.float64), mean="/mean"),
        "staleness/versions": len(set[Any]().union(*versions.values())),
        "staleness/mixed_sessions": sum(len(own) > 1 for own in versions.values()),
        "staleness/unknown_tokens": n["tokens_sampled"] - n_known,
    }
    return {name: float(value) for name, value in found.items() if value is not None}


def _ratio(part: int, total: int) -> float | None:
    return part / total if total else None


def _of(name: str, values: Any, **suffixes: str) -> dict[str, float]:
    """Means and the like of an array, by method of numpy; none of an empty one."""
    found = suffixes.items() if len(values) else ()
    return {name + suffix: getattr(values, method)() for method, suffix in found}

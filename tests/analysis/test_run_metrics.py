"""`metrics` counts what the other tables count."""

from collections import Counter

import pyarrow as pa
import pytest

import trajkit as tk
from tests.generated import generated_runs
from tests.made_tables import linearized, turns_table
from trajkit.analysis import metrics
from trajkit.schema import LOSSES

RUN = turns_table(generated_runs(12, 5))
CALL = {"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 4]}


@pytest.mark.parametrize("policy", ["faithful", "slime", "nemo", "polar"])
def test_counts_are_those_of_simulate_and_drift(policy):
    _, report = linearized(RUN, policy)
    found = metrics(RUN, report, policy)
    (line,) = tk.simulate(RUN, policy).to_pylist()
    drift = tk.classify_drift(RUN, tk.link(RUN, policy)).to_pylist()
    drifted = [line for line in drift if line["size"]]
    causes = Counter(line["cause"] for line in drifted)
    names = ("sampled", "trained", "lost", "forward", "forward_shared")
    names = [*names, *(f"lost_{reason}" for reason in LOSSES)]
    expected = {
        "run/turns": RUN.num_rows,
        "rows/count": line["rows"],
        **{
            f"tokens/{name}": line.get(f"tokens_{name}", line.get(name))
            for name in names
        },
        "tokens/trained_share": line["tokens_trained"] / line["tokens_sampled"],
        "drift/turns": len(drifted),
        "drift/turn_share": len(drifted) / len(drift),
        **{f"drift/{cause}_turns": n for cause, n in causes.items()},
        "drift/tokens_at_stake": sum(one["tokens_after_drift"] for one in drifted),
    }
    assert {name: found[name] for name in expected} == expected
    assert metrics(tk.compact(RUN), report, policy) == found


def test_rewards_and_groups():
    turns = tk.from_records([{**CALL, "session_id": name} for name in "abcdefghi"])
    facts = {
        "session_id": list("abcdefghi"),
        "reward": [1.0, 1.0, 0.0, 3.0, None, 5.0, 2.0, 2.0, 2.0],
        "group_id": ["g", "g", "h", "h", "h", None, None, None, "one"],
        "error": [None] * 4 + ["it broke"] + [None] * 4,
    }
    _, report = linearized(turns, sessions=pa.table(facts))
    found = metrics(turns, report)
    expected = {
        "run/errors": 1,
        "reward/mean": 2,
        "reward/std": pytest.approx(2**0.5),
        "reward/min": 0,
        "reward/max": 5,
        "reward/missing": 1,
        "groups/count": 2,
        "groups/constant": 1,
    }
    assert {name: found[name] for name in expected} == expected


def test_lengths_logprobs_and_versions():
    def version(*pieces):
        return [{"version": v, "start": a, "stop": b} for v, a, b in pieces]

    one, two = version(("1", 0, 2)), version(("2", 0, 2))
    turns = tk.from_records(
        [
            {**CALL, "output_logprobs": [-1.0, -2.0], "weight_versions": one},
            {**CALL, "prompt_ids": [1, 2, 3, 4, 5], "weight_versions": two},
            {**CALL, "session_id": "b", "output_logprobs": [-3.0, None]},
            {
                **CALL,
                "session_id": "c",
                "weight_versions": version(*[("2", 0, 1), ("2", 1, 2)]),
            },
        ]
    )
    found = metrics(turns, tk.report(turns))
    expected = {
        "length/turns": pytest.approx(4 / 3),
        "length/output": 2,
        "length/output_max": 2,
        "length/context_max": 7,
        "logprob/mean": -2,
        "staleness/versions": 2,
        "staleness/mixed_sessions": 1,
    }
    assert {name: found[name] for name in expected} == expected


def test_means_of_nothing_are_absent():
    empty = RUN.slice(0, 0)
    found = metrics(empty, tk.report(empty))
    assert found["tokens/sampled"] == found["run/sessions"] == found["drift/turns"] == 0
    means = {"tokens/trained_share", "reward/mean", "length/output", "logprob/mean"}
    assert means.isdisjoint(found)
    assert all(type(value) is float for value in found.values())


TURNS = tk.from_records([CALL, {**CALL, "session_id": "b"}])


@pytest.mark.parametrize(
    ("turns", "report", "message"),
    [
        (TURNS.slice(1), tk.report(TURNS), "counts 2 turns, and the table has 1"),
        (TURNS, TURNS, "no column 'error'"),
    ],
)
def test_the_report_is_of_the_turns(turns, report, message):
    with pytest.raises(tk.errors.SchemaError, match=message):
        metrics(turns, report)

"""`metrics` counts what the other tables count."""

import sys
from collections import Counter

import pyarrow as pa
import pytest

import trajkit as tk
from tests.generated import generated_runs
from tests.made_tables import linearized, turns_table
from trajkit.analysis import metrics
from trajkit.schema import LOSSES

RUN = turns_table(generated_runs(12, 5))


@pytest.mark.parametrize("policy", ["faithful", "slime", "nemo", "polar"])
def test_counts_are_those_of_simulate_and_drift(policy):
    _, report = linearized(RUN, policy)
    found = metrics(RUN, report, policy)
    (line,) = tk.simulate(RUN, policy).to_pylist()
    assert found["run/turns"] == line["turns"] == RUN.num_rows
    assert found["rows/count"] == line["rows"]
    for name in ("sampled", "trained", "lost", "forward", "forward_shared"):
        assert found[f"tokens/{name}"] == line[f"tokens_{name}"]
    assert {reason: found[f"tokens/lost_{reason}"] for reason in LOSSES} == {
        reason: line[f"lost_{reason}"] for reason in LOSSES
    }
    assert (
        found["tokens/trained_share"] == line["tokens_trained"] / line["tokens_sampled"]
    )
    drift = tk.classify_drift(RUN, tk.link(RUN, policy)).to_pylist()
    causes = Counter(line["cause"] for line in drift if line["size"])
    assert found["drift/turns"] == causes.total()
    assert found["drift/turn_share"] == causes.total() / len(drift)
    for cause, n in causes.items():
        assert found[f"drift/{cause}_turns"] == n
    assert found["drift/tokens_at_stake"] == sum(
        line["tokens_after_drift"] for line in drift if line["size"]
    )
    delta = tk.compact(RUN)
    assert metrics(delta, report, policy) == found


def call(session_id, **more):
    return {
        "session_id": session_id,
        "prompt_ids": [1, 2],
        "output_ids": [3, 4],
        **more,
    }


def reported(calls, **facts):
    turns = tk.from_records(calls)
    sessions = None
    if facts:
        names = turns["session_id"].unique().to_pylist()
        lines = [
            dict(zip(facts, of, strict=True))
            for of in zip(*facts.values(), strict=True)
        ]
        sessions = pa.table(
            {
                "session_id": names,
                **{
                    name: [line.get(name) for line in lines]
                    for name in ("reward", "group_id", "error")
                },
            }
        )
        if "error" not in facts:
            sessions = sessions.drop_columns(["error"])
    _, report = linearized(turns, sessions=sessions)
    return turns, report


def test_rewards_and_groups():
    turns, report = reported(
        [call(name) for name in "abcdefghi"],
        reward=[1.0, 1.0, 0.0, 3.0, None, 5.0, 2.0, 2.0, 2.0],
        group_id=["g", "g", "h", "h", "h", None, None, None, "one"],
        error=[None, None, None, None, "it broke", None, None, None, None],
    )
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

    turns, report = reported(
        [
            call(
                "a", output_logprobs=[-1.0, -2.0], weight_versions=version(("1", 0, 2))
            ),
            call("a", prompt_ids=[1, 2, 3, 4, 5], weight_versions=version(("2", 0, 2))),
            call("b", output_logprobs=[-3.0, None]),
            call("c", weight_versions=version(("2", 0, 1), ("2", 1, 2))),
        ]
    )
    found = metrics(turns, report)
    expected = {
        "length/turns": pytest.approx(4 / 3),
        "length/output": 2,
        "length/output_max": 2,
        "length/context_max": 7,
        "logprob/mean": -2,
        "staleness/versions": 2,
        "staleness/mixed_sessions": 1,
        "staleness/unknown_tokens": 2,
    }
    assert {name: found[name] for name in expected} == expected


def test_means_of_nothing_are_absent():
    empty = RUN.slice(0, 0)
    _, report = linearized(empty)
    found = metrics(empty, report)
    assert found["tokens/sampled"] == found["run/sessions"] == found["drift/turns"] == 0
    means = {"tokens/trained_share", "reward/mean", "length/output", "logprob/mean"}
    assert means.isdisjoint(found)
    assert all(type(value) is float for value in found.values())


def test_the_report_is_of_the_turns():
    turns, report = reported([call("a"), call("b")])
    with pytest.raises(
        tk.errors.SchemaError, match="counts 2 turns, and the table has 1"
    ):
        metrics(turns.slice(1), report)
    with pytest.raises(tk.errors.SchemaError, match="no column 'error'"):
        metrics(turns, turns)


@pytest.mark.parametrize("ask", [metrics, tk.analysis.output_spans])
def test_without_polars_an_error_names_the_extra(monkeypatch, ask):
    turns, report = reported([call("a")])
    monkeypatch.setitem(sys.modules, "polars", None)
    more = [report] if ask is metrics else []
    with pytest.raises(tk.errors.ArgumentError, match=r"install 'trajkit\[look\]'"):
        ask(turns, *more)

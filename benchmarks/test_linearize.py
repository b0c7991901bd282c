"""From a table of turns to rows, for rollouts of every shape."""

import pytest

import trajkit as tk
from benchmarks.data import LONG, SHAPES, SMALL, as_parsed, rollout
from tests.oracles import peers_slime as peers


def trained(rows):
    return [sum(mask) for mask in rows["loss_mask"].to_pylist()]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("policy", ["slime", "strict", "per_call"])
def test_linearize(benchmark, policy, shape):
    turns = tk.from_records(rollout("s", LONG, shape))
    rows = benchmark(tk.linearize, turns, policy, threads=1)
    if policy == "slime":
        expected = peers.linearize(as_parsed(rollout("s", LONG, shape)))
        assert trained(rows) == [sum(row["loss_mask"]) for row in expected]
    else:
        sampled = sum(len(turn["output_ids"]) for turn in rollout("s", LONG, shape))
        assert sum(trained(rows)) == sampled


@pytest.mark.parametrize("kind", ["arrays", "lists"])
def test_from_records(benchmark, kind):
    records = list(rollout("s", SMALL))
    if kind == "lists":
        records = as_parsed(iter(records))
    turns = benchmark(tk.from_records, records)
    assert turns.num_rows == SMALL.n_turns


def test_links_and_drift(benchmark):
    turns = tk.from_records(rollout("s", LONG, "tail_changed"))
    drift = benchmark(lambda: tk.classify_drift(turns, tk.link(turns)))
    assert drift["size"].to_pylist() == [2] * (LONG.n_turns - 1)

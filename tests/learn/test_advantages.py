"""Advantages follow their published formulas, over rollouts and never over rows."""

import statistics

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from trajkit.errors import ArgumentError, NoSignalWarning

REWARDS = st.none() | st.sampled_from([0.0, 1.0, 0.5, -2.0, 0.1, 1e6])


def sessions_table(lines):
    rewards, groups = zip(*lines, strict=True) if lines else ((), ())
    return pa.table(
        {
            "session_id": [f"s{k}" for k in range(len(lines))],
            "reward": pa.array(rewards, pa.float64()),
            "group_id": pa.array(groups, pa.string()),
        }
    )


def expected(lines, baseline, scale, epsilon, drop_constant):
    """Each advantage by the formulas of the docstring, one rollout at a time."""
    gains = []
    for k, (reward, group) in enumerate(lines):
        others = [
            r
            for j, (r, g) in enumerate(lines)
            if j != k and r is not None and g == group and g is not None
        ]
        everyone = [*others, reward]
        if reward is None or (baseline == "leave_one_out" and not others):
            gains.append(None)
            continue
        base = {
            "none": 0.0,
            "group_mean": sum(everyone) / len(everyone),
            "leave_one_out": sum(others) / max(len(others), 1),
        }[baseline]
        same = bool(others) and len(set(everyone)) == 1
        if same and baseline != "none":
            base = reward
        gain = reward - base
        if (same and drop_constant) or (scale == "group_std" and not others):
            gain = None
        elif scale == "group_std":
            std = statistics.stdev(everyone) + epsilon
            gain = gain / std if std else 0.0
        gains.append(gain)
    return gains


@pytest.mark.filterwarnings("ignore::trajkit.errors.NoSignalWarning")
@pytest.mark.parametrize("scale", ["none", "group_std"])
@pytest.mark.parametrize("baseline", ["none", "group_mean", "leave_one_out"])
@given(
    st.lists(st.tuples(REWARDS, st.sampled_from(["g", "h", None])), max_size=9),
    st.sampled_from([1e-6, 1e-4, 0.5]),
    st.booleans(),
)
def test_advantages_are_those_of_the_formulas(
    baseline, scale, lines, epsilon, drop_constant
):
    table = tk.learn.advantages(
        sessions_table(lines),
        baseline,
        scale=scale,
        epsilon=epsilon,
        drop_constant=drop_constant,
    )
    due = expected(lines, baseline, scale, epsilon, drop_constant)
    for gain, wanted in zip(table["advantage"].to_pylist(), due, strict=True):
        assert (gain is None) == (wanted is None)
        assert wanted is None or gain == pytest.approx(wanted, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("by", "constant"),
    [("constant", None), ("token", 3.0), ("constant", 0.0), ("constant", float("inf"))],
)
def test_constant_weights_need_a_finite_constant(by, constant):
    rows = tk.linearize(
        tk.from_records([{"session_id": "a", "prompt_ids": [1], "output_ids": [2]}])
    )
    with pytest.raises(ArgumentError, match="constant="):
        tk.add_weights(rows, by, constant=constant)


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()])
@pytest.mark.parametrize("rewards", [(0.1 + 0.2, 0.3), (0.0, 0.1 + 0.2 - 0.3)])
def test_rewards_that_are_equal_but_for_rounding_are_constant(rewards, kind):
    if kind == pa.float32():
        rewards = [
            np.float32(value) * np.float32(1 + 2e-7) ** k
            for k, value in enumerate(rewards)
        ]
    given = pa.table(
        {
            "session_id": ["a", "b"],
            "reward": pa.array(rewards, kind),
            "group_id": ["g", "g"],
        }
    )
    dropped = tk.learn.advantages(given, drop_constant=True)
    assert dropped["advantage"].to_pylist() == [None, None]
    with pytest.warns(NoSignalWarning, match="all 2 advantages are 0"):
        found = tk.learn.advantages(given, scale="group_std", epsilon=0.0)
    assert found["advantage"].to_pylist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("rewards", "groups", "why"),
    [
        ([1.0, 0.0], ["g", "h"], "every group has one rollout"),
        ([1.0, 1.0], ["g", "g"], "in every group all rewards are equal"),
        ([0.0, 0.0], ["g", "g"], "every reward is 0"),
    ],
)
def test_advantages_that_are_all_0_are_told_with_the_reason(rewards, groups, why):
    given = sessions_table([*zip(rewards, groups, strict=True)])
    with pytest.warns(NoSignalWarning, match=why):
        tk.learn.advantages(given)

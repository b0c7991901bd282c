"""trajkit gives what the peers' own code gives."""

import numpy as np
import pytest

import trajkit as tk
from tests.golden_sessions import (
    cap,
    comparable,
    expected_interleave,
    expected_slime,
    golden_name,
    interleave_sessions,
    slime_sessions,
)


def as_float32(rows):
    return [
        {**row, "logprobs": np.array(row["logprobs"], np.float32).tolist()}
        for row in rows
    ]


def recorded(session):
    return tk.from_records({"session_id": "s", **turn} for turn in session["turns"])


@pytest.mark.parametrize("session", slime_sessions(), ids=golden_name)
def test_slime(session):
    rows, report = tk.linearize(
        recorded(session),
        policy=tk.policy("slime", fork_threshold=session["knobs"]["fork_threshold"]),
        max_row_tokens=cap(session),
        reward=session["knobs"]["reward"],
        report=True,
    )
    expected, left_out = expected_slime(session)
    expected = as_float32(expected)
    assert comparable(rows.to_pylist(), expected) == expected
    assert rows.num_rows == len(expected)
    assert rows["reward"].to_pylist() == [session["knobs"]["reward"]] * len(expected)
    assert report["rows_cut"].to_pylist() == [left_out]


@pytest.mark.parametrize("session", interleave_sessions(), ids=golden_name)
def test_strict(session):
    rows = tk.linearize(recorded(session), policy="interleave")
    expected = as_float32(expected_interleave(session))
    assert comparable(rows.to_pylist(), expected) == expected
    assert rows.num_rows == len(expected)

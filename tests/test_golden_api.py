"""trajkit gives what the peers' own code gives."""

import numpy as np
import pytest

import trajkit as tk
from tests.golden_sessions import (
    cap,
    comparable,
    delivered,
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


def zeros_for_nulls(logprobs):
    return [0.0 if value is None else value for value in logprobs]


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


@pytest.mark.parametrize("session", delivered("trl"), ids=golden_name)
def test_trl(session):
    """TRL's masks and logprobs are as long as its rows."""
    threshold = session["knobs"]["fork_threshold_tokens"]
    policy = tk.policy("trl", fork_threshold=threshold)
    rows = tk.linearize(recorded(session), policy=policy).to_pylist()
    assert [(row["input_ids"], row["loss_mask"]) for row in rows] == [
        (row["tokens"], [bool(bit) for bit in row["loss_mask"]])
        for row in session["expected"]["rows"]
    ]
    expected = as_float32(session["expected"]["rows"])
    assert [zeros_for_nulls(row["logprobs"]) for row in rows] == [
        row["logprobs"] for row in expected
    ]


@pytest.mark.parametrize("session", delivered("skyrl"), ids=golden_name)
def test_skyrl(session):
    """Its tokens, masks and logprobs; its rewards are not of the turns."""
    rows = tk.linearize(recorded(session), policy="skyrl").to_pylist()
    expected = session["expected"]["rows"]
    assert [
        (
            row["input_ids"],
            row["prompt_length"],
            row["loss_mask"][row["prompt_length"] :],
        )
        for row in rows
    ] == [
        (row["tokens"], row["prompt_length"], [bool(bit) for bit in row["loss_mask"]])
        for row in expected
    ]
    for row, peer in zip(rows, expected, strict=True):
        if peer["logprobs"] is not None:
            given = zeros_for_nulls(row["logprobs"][row["prompt_length"] :])
            assert given == np.array(peer["logprobs"], np.float32).tolist()

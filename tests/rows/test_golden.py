"""trajkit, and the twins, give what the peers' own code gives."""

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.golden_sessions import (
    cap,
    comparable,
    delivered,
    errored_interleave_sessions,
    expected_interleave,
    expected_slime,
    for_each,
    golden,
    interleave_sessions,
    slime_sessions,
)
from tests.made_tables import linearized
from tests.oracles.policies import twins_of
from trajkit.errors import InvalidTurnsError


def as_float32(rows):
    return [
        {**row, "logprobs": np.array(row["logprobs"], np.float32).tolist()}
        for row in rows
    ]


def zeros_for_nulls(logprobs):
    return [0.0 if value is None else value for value in logprobs]


def recorded(session):
    return tk.from_records({"session_id": "s", **turn} for turn in session["turns"])


@for_each(slime_sessions)
def test_slime(session):
    rows, report = linearized(
        recorded(session),
        policy=tk.policy("slime", fork_threshold=session["knobs"]["fork_threshold"]),
        max_row_tokens=cap(session),
        reward=session["knobs"]["reward"],
    )
    expected, left_out = expected_slime(session)
    expected = as_float32(expected)
    assert comparable(rows.to_pylist(), expected) == expected
    assert rows.num_rows == len(expected)
    assert rows["reward"].to_pylist() == [session["knobs"]["reward"]] * len(expected)
    assert report["rows_cut"].to_pylist() == [left_out]


@for_each(interleave_sessions)
def test_strict(session):
    rows = tk.linearize(recorded(session), policy="interleave")
    expected = as_float32(expected_interleave(session))
    assert comparable(rows.to_pylist(), expected) == expected
    assert rows.num_rows == len(expected)


@for_each(delivered, "trl")
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


def skyrl_turns(session):
    """The turns, with the rewards per token that the peer was given."""
    turns = recorded(session)
    rewards = [
        [0.0] * (len(turn["output_ids"]) - 1) + [reward] if turn["output_ids"] else []
        for turn, reward in zip(
            session["turns"], session["knobs"]["turn_rewards"], strict=True
        )
    ]
    lists = pa.array(rewards, pa.list_(pa.float64()))
    return turns.append_column("token_rewards", lists)


def skyrl_policy(session):
    """Under ``as_is`` the peer wants logprobs of all turns or of none."""
    given = [bool(turn["output_logprobs"]) for turn in session["turns"]]
    as_is = session["knobs"]["missing_logprobs"] == "as_is"
    missing = "raise" if as_is and any(given) else "keep"
    return tk.policy("skyrl", missing_logprobs=missing)


@for_each(golden, "skyrl")
def test_skyrl(session):
    """Every field, whatever the knobs, and an error where the peer has one."""
    turns, policy = skyrl_turns(session), skyrl_policy(session)
    if "error" in session["expected"]:
        with pytest.raises(InvalidTurnsError, match="sampled tokens have no logprob"):
            tk.linearize(turns, policy)
        return
    rows = tk.linearize(turns, policy, payloads=["token_rewards"])
    expected = session["expected"]["rows"]
    if session["knobs"]["rewards"] == "scalar":
        given = turns.select(["session_id", "turn_index"]).append_column(
            "reward", pa.array(session["knobs"]["turn_rewards"])
        )
        rows = tk.learn.spread_rewards(rows, "last_turn", turn_rewards=given)
    last = turns["turn_index"][-1].as_py()
    for row, peer in zip(rows.to_pylist(), expected, strict=True):
        response = slice(row["prompt_length"], None)
        reward = row["reward"]
        if reward is None:
            reward = zeros_for_nulls(row["token_rewards"][response])
        assert {
            "tokens": row["input_ids"],
            "prompt_length": row["prompt_length"],
            "loss_mask": [int(bit) for bit in row["loss_mask"][response]],
            "reward": reward,
            "stop_reason": row["finish_reason"],
            "is_last_step": row["last_turn"] == last,
        } == {name: value for name, value in peer.items() if name != "logprobs"}
        if peer["logprobs"] is None:
            assert set(row["logprobs"]) == {None}
        else:
            here = zeros_for_nulls(row["logprobs"][response])
            assert here == np.array(peer["logprobs"], np.float32).tolist()


@for_each(errored_interleave_sessions)
def test_strict_on_rollouts_that_failed(session):
    """The peer clears its masks, and keeps logprobs that trajkit has no place for."""
    facts = pa.table({"session_id": ["s"], "error": [session["knobs"]["error"]]})
    rows, report = linearized(recorded(session), "interleave", sessions=facts)
    names = ["input_ids", "prompt_length", "loss_mask"]
    expected = [
        {name: row[name] for name in names} for row in expected_interleave(session)
    ]
    assert rows.select(names).to_pylist() == expected
    assert not any(bit for row in expected for bit in row["loss_mask"])
    assert report["error"].to_pylist() == [session["knobs"]["error"]]


# --- the twins


def test_every_session_is_there():
    assert len(golden("slime")) == 150
    assert len(golden("slime-order")) == 20
    assert len(golden("interleave")) == 150
    # 11 rollouts carry an error of their own, and on one of them the peer raises too
    assert len(interleave_sessions()) == 139


@for_each(slime_sessions)
def test_slime_in_closed_form(session):
    policy = tk.policy("slime", fork_threshold=session["knobs"]["fork_threshold"])
    twins = twins_of(session["turns"], policy, cap(session))
    rows, (report,) = twins["rows"], twins["report"]
    expected, left_out = expected_slime(session)
    assert comparable(rows, expected) == expected
    assert len(rows) == len(expected)
    assert report["rows_cut"] == left_out


@for_each(interleave_sessions)
def test_strict_by_twin(session):
    rows = twins_of(session["turns"], tk.policy("strict"))["rows"]
    expected = expected_interleave(session)
    assert comparable(rows, expected) == expected

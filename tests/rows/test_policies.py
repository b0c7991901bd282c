"""What a policy may choose beyond its preset: who trains, what may be trained."""

import re

import numpy as np
import pyarrow as pa
import pytest

import trajkit as tk
from tests.fuzz.sessions import generated_runs
from tests.made_tables import linearized, turns_table
from trajkit.errors import InvalidTurnsError, PolicyError
from trajkit.policies import PRESETS

NO_ROUTE = {"on_drift": "splice", "train_in": "first", "parent_by": "none"}


@pytest.mark.parametrize(
    ("name", "choices", "match"),
    [
        *(
            ("faithful", {name: "last"}, f"{name}='last': expected one of '")
            for name in ("train_in", "missing_logprobs", "on_drift", "row_selection")
        ),
        ("nemo", {"row_order": "size"}, "='size': expected one of 'turn', 'prompt'"),
        *(
            ("slime", {"fork_threshold": value}, f"fork_threshold={value!r}")
            for value in (2**63, -(2**70), 1.5, True, "1")
        ),
        *(
            ("segments", choice, f"{next(iter(choice))}=")
            for choice in (
                {"dispatch_tools": "Task"},
                {"dispatch_tools": ["Task", 1]},
                {"max_rows": 0},
                {"max_rows": True},
                {"rewards": "per_turn"},
                {"keep_empty": 1},
            )
        ),
        ("polar", {"end_of_turn_token_id": -1}, "end_of_turn_token_id=-1: expected an"),
        ("polar", {"end_of_turn_token_id": 2**31}, "ids are below 2**31"),
        ("polar", {"end_of_turn_token_id": True}, "end_of_turn_token_id=True"),
        ("polar", {"end_of_turn_token_id": "13"}, "end_of_turn_token_id='13'"),
        ("segments", {"message_equality": "hash"}, "equality='hash'"),
        # choices that do not go together
        # else which of two equal replies sends out a sub-agent is that of another one
        *(
            (
                "segments",
                {"message_equality": equality},
                f"equality='{equality}' does not go with parent_by='agents'",
            )
            for equality in ("content", "strict", "role_content_only")
        ),
        (
            "nemo",
            {"train_in": "every", "on_drift": "absorb_short_reply"},
            "train_in='every' with on_drift=",
        ),
        ("nemo", {"max_rows": 1}, "='every' with on_drift='fork' and max_rows=1"),
        (
            "nemo",
            {"chain_order": "recorded"},
            "chain_order='recorded' does not go with parent_by='prefix'",
        ),
        (
            "nemo",
            {"on_drift": "splice", "train_in": "first"},
            "parent_by='prefix' does not go with on_drift",
        ),
        (
            "nemo",
            {**NO_ROUTE, "row_selection": "main"},
            "row_selection='main' does not go with on_drift",
        ),
        (
            "nemo",
            {**NO_ROUTE, "truncate_at": "calls"},
            "truncate_at='calls' does not go with on_drift",
        ),
    ],
)
def test_choices_that_are_none_are_refused(name, choices, match):
    with pytest.raises(PolicyError, match=re.escape(match)):
        tk.policy(name, **choices)


# --- what may be trained


def turn(prompt, output, **more):
    return {"prompt_ids": prompt, "output_ids": output, **more}


def test_choices_are_kept_as_python_s_own_types():
    given = {"fork_threshold": np.int64(3), "end_of_turn_token_id": 2**31 - 1}
    policy = tk.Policy(name="x", parent_by="none", dispatch_tools=["Task"], **given)
    assert hash(policy) == hash(tk.policy(policy, dispatch_tools=("Task",)))
    assert type(policy.fork_threshold) is int


def one_lost(report):
    """The reasons for which tokens were lost, and how many."""
    line = report.to_pylist()[0]
    return {
        name.removeprefix("lost_"): n
        for name, n in line.items()
        if name.startswith("lost_") and n
    }


def pieces(rows):
    return [
        [
            (s["start"], s["stop"], s["turn_index"], s["output_start"], s["kind"])
            for s in row["spans"]
        ]
        for row in rows.to_pylist()
    ]


MASKED = [
    turn([1], [2, 3, 4], output_mask=[True, False, True]),
    turn([1, 2, 3, 4, 5], [6, 7], output_mask=np.array([0, 0])),
    turn([1, 2, 3, 4, 5, 6, 7], [8], output_mask=None),
]


def test_masked_tokens_are_context(tmp_path):
    """Of a file, too; verify sees them trained, and the rest of them not trained."""
    table = tk.from_records({"session_id": "s", **one} for one in MASKED)
    tk.write_turns(table, tmp_path / "turns.jsonl")
    table = tk.read_turns(tmp_path / "turns.jsonl")
    rows, report = linearized(table)
    assert pieces(rows) == [
        [
            (1, 2, 0, 0, "trained"),
            (2, 3, 0, 1, "untrainable"),
            (3, 4, 0, 2, "trained"),
            (5, 7, 1, 0, "untrainable"),
            (7, 8, 2, 0, "trained"),
        ]
    ]
    assert one_lost(report) == {"masked": 3}
    assert tk.verify(rows, table).num_rows == 0
    assert tk.simulate(table, "faithful")["lost_masked"].to_pylist() == [3]
    unmasked = table.drop_columns("output_mask")
    for made, turns in ((rows, unmasked), (tk.linearize(unmasked), table)):
        found = tk.verify(made, turns, "faithful")
        assert "untrainable" in found["rule"].to_pylist()


def test_a_missing_logprob_may_be_an_error():
    policy = tk.policy("faithful", missing_logprobs="raise")
    turns = [
        turn([1], [2], output_logprobs=[-1.0], turn_index=0),
        turn([1, 2], [3, 4], output_logprobs=[None, -1.0], turn_index=4),
        turn([1, 2], [3], turn_index=6),
    ]
    match = (
        "session 's', turn 4: 1 of 2 sampled tokens have no logprob (and 1 more turns)"
    )
    with pytest.raises(InvalidTurnsError, match=re.escape(match)):
        tk.linearize(turns_table(turns), policy)
    # what is not trained needs none
    turns[1]["trainable"], turns[2]["finish_reason"] = False, "abort"
    rows = tk.linearize(turns_table(turns), policy)
    assert [sum(mask) for mask in rows["loss_mask"].to_pylist()] == [1]
    turns[2]["finish_reason"] = "stop"
    failed = pa.table({"session_id": ["s"], "error": ["x"]})
    tk.linearize(turns_table(turns), policy, sessions=failed)


def test_verify_sees_trained_tokens_of_aborted_turns():
    table = turns_table([turn([1], [2, 7], finish_reason="abort")])
    for name in PRESETS:
        rows = tk.linearize(table, tk.policy(name, train_aborted=True))
        assert rows["loss_mask"].to_pylist() == [[False, True, True]]
        found = tk.verify(rows, table, tk.policy(name, train_aborted=False))
        assert set(found["rule"].to_pylist()) == {"untrainable"}


RUN = generated_runs(30)


@pytest.mark.parametrize("name", PRESETS)
def test_an_errored_session_trains_nothing_and_says_so(name):
    table = turns_table(RUN)
    names = table["session_id"].unique()
    facts = pa.table({"session_id": names, "error": ["boom"] * len(names)})
    rows, report = linearized(table, name, sessions=facts)
    assert (
        report["lost_untrainable"].to_pylist() == report["tokens_sampled"].to_pylist()
    )
    assert set(report["error"].to_pylist()) == {"boom"}
    assert not any(map(any, rows["loss_mask"].to_pylist()))
    assert tk.verify(rows, table, name, sessions=facts).num_rows == 0
    found = tk.verify(tk.linearize(table, name), table, name, sessions=facts)
    assert "untrainable" in found["rule"].to_pylist()

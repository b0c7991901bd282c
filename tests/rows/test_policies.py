"""What a policy may choose beyond its preset: who trains, what may be trained."""

import re

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

import trajkit as tk
from tests.made_tables import linearized, turns_table
from tests.rows.test_twins import SHARED
from tests.strategies import (
    fewer_examples,
    runs,
    sessions,
)
from trajkit.errors import InvalidTurnsError, PolicyError
from trajkit.policies import PRESETS
from trajkit.recorder.recorder import Recorder


def said(role, content):
    return {"role": role, "content": content}


def trained_turns(rows):
    return [
        [s["turn_index"] for s in row["spans"] if s["kind"] == "trained"]
        for row in rows.to_pylist()
    ]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("first", [[0, 1], [2], [3]]),
        ("earliest", [[0, 1], [2], [3]]),
        ("every", [[0, 1], [0, 2], [3]]),
    ],
)
def test_who_trains_an_output_of_several_rows(own, expected):
    table = turns_table(SHARED)
    policy = tk.policy("faithful", train_in=own)
    rows = tk.linearize(table, policy)
    assert trained_turns(rows) == expected
    assert not tk.verify(rows, table, policy).num_rows


def test_duplicates_of_rows_over_max_rows_are_not_counted():
    """The row of turn 2, which repeats the reply of turn 0, is removed."""
    table = turns_table(SHARED)
    for most, duplicated in ((3, 2), (2, 0), (1, 0)):
        policy = tk.policy("faithful", max_rows=most)
        rows, report = linearized(table, policy)
        kinds = [s["kind"] for row in rows.to_pylist() for s in row["spans"]]
        assert kinds.count("duplicate") == (duplicated > 0)
        assert report["tokens_duplicated"].to_pylist() == [duplicated]


@pytest.mark.parametrize(("threshold", "n_rows"), [(1, 2), (2, 1)])
def test_drift_is_absorbed_below_the_threshold_and_not_at_it(threshold, n_rows):
    drifted = {**SHARED[3], "prompt_ids": [1, 2, 9, 4]}
    policy = tk.policy("trl", fork_threshold=threshold)
    rows = tk.linearize(turns_table([SHARED[0], drifted]), policy)
    assert rows.num_rows == n_rows


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
        # choices that do not go together
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


@pytest.mark.parametrize("form", ["table", "delta", "recorder", "file"])
def test_masked_tokens_are_context(form, tmp_path):
    table = tk.from_records({"session_id": "s", **one} for one in MASKED)
    if form == "delta":
        table = tk.compact(table)
    elif form == "recorder":
        recorder = Recorder()
        for one in MASKED:
            recorder.record("s", **one)
        assert recorder.turns("s") == tk.compact(table)
        table = recorder.turns("s")
    elif form == "file":
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
    assert rows["loss_mask"].to_pylist() == [
        [False, True, False, True, False, False, False, True]
    ]
    assert one_lost(report) == {"masked": 3}
    assert rows["rollout_mask_sum"].to_pylist() == [3]
    assert tk.verify(rows, table).num_rows == 0
    assert tk.simulate(table, "faithful")["lost_masked"].to_pylist() == [3]


@pytest.mark.parametrize("name", ["nemo", "miles", "segments", "graph", "trl"])
def test_every_policy_knows_masked_tokens(name):
    """Verify sees them trained, and the rest of them not trained."""
    table = tk.from_records({"session_id": "s", **one} for one in MASKED)
    rows, report = linearized(table, name)
    assert one_lost(report) == {"masked": 3}
    assert report["tokens_trained"].to_pylist() == [3]
    assert tk.verify(rows, table, name).num_rows == 0
    unmasked = table.drop_columns("output_mask")
    assert set(tk.verify(rows, unmasked, name)["rule"].to_pylist()) >= {"untrainable"}
    all_trained = tk.linearize(unmasked, name)
    assert set(tk.verify(all_trained, table, name)["rule"].to_pylist()) >= {
        "untrainable"
    }


def test_spliced_rows_know_masked_tokens():
    """In pieces that a row holds, cut or dropped."""
    records = [{"session_id": "s", **one} for one in MASKED]
    table = tk.from_records(records)
    policy = tk.policy("polar", end_of_turn_token_id=4)
    for limit, lost in [
        (None, {"masked": 3, "no_splice_point": 1}),
        (2, {"masked": 3, "no_splice_point": 1, "cut": 1}),
    ]:
        options = {"max_row_tokens": limit}
        rows, report = linearized(table, policy, **options)
        assert one_lost(report) == lost
        assert tk.verify(rows, table, policy, **options).num_rows == 0


def test_a_masked_token_needs_no_logprob():
    """Nor does one count twice: what is masked is not lost for its logprob."""
    table = tk.from_records(
        [
            {
                "session_id": "s",
                **turn([1], [2, 3], output_logprobs=[-1.0, None]),
                "output_mask": [True, False],
            }
        ]
    )
    tk.linearize(table, tk.policy("strict", missing_logprobs="raise"))
    untrain = tk.policy("strict", missing_logprobs="untrain")
    assert one_lost(linearized(table, untrain)[1]) == {"masked": 1}
    bare = table.drop_columns("output_mask")
    with pytest.raises(InvalidTurnsError, match="1 of 2 sampled tokens have no"):
        tk.linearize(bare, tk.policy("strict", missing_logprobs="raise"))


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([True], "session 's', turn 0: 1 elements of output_mask for 2 output"),
        ([], "session 's', turn 0: 0 elements of output_mask for 2 output"),
        ([True, None], r"output_mask is \[True, None\]: expected a list of bools"),
        ([1, 2], r"output_mask\[1\] is 2: expected a bool, or 0 or 1"),
        ([0.5, 1.0], "expected a list of bools"),
        ("tt", "output_mask is 'tt': expected a list of bools"),
    ],
)
def test_a_mask_that_is_none_is_refused(mask, said):
    one = {"session_id": "s", **turn([1], [2, 3]), "output_mask": mask}
    with pytest.raises(InvalidTurnsError, match=said):
        tk.from_records([one])
    recorder = Recorder()
    with pytest.raises(InvalidTurnsError, match=said):
        recorder.record(**one)
    assert recorder.sessions == []


@pytest.mark.parametrize(
    ("lists", "said"),
    [
        (
            [[True], [True]],
            "session 's', turn 1: 1 elements of output_mask for 2 output",
        ),
        ([[True], [True, None]], "session 's', turn 1: output_mask"),
    ],
)
def test_a_column_of_masks_that_do_not_fit_is_refused(lists, said):
    table = tk.from_records(
        {"session_id": "s", **turn([1], output)} for output in ([2], [3, 4])
    )
    at = table.column_names.index("output_mask")
    field = table.field(at)
    table = table.set_column(at, field, pa.array(lists, field.type))
    for stage in (tk.linearize, tk.validate):
        with pytest.raises(InvalidTurnsError, match=said):
            stage(table)


def test_tokens_without_a_logprob_are_context_where_a_policy_wants_it_so():
    table = turns_table(
        [
            turn([1], [2, 3, 4, 5], output_logprobs=[-1.0, None, None, -2.0]),
            turn([1, 2, 3, 4, 5, 6], [7, 8], output_logprobs=None),
            turn([1, 2, 3, 4, 5, 6, 7, 8], [9], output_logprobs=[-3.0]),
        ]
    )
    kept, report = linearized(table, "strict")
    assert kept["loss_mask"].to_pylist() == [
        [False] + [True] * 4 + [False] + [True] * 3
    ]
    assert one_lost(report) == {}

    policy = tk.policy("strict", missing_logprobs="untrain")
    rows, report = linearized(table, policy)
    assert pieces(rows) == [
        [
            (1, 2, 0, 0, "trained"),
            (2, 4, 0, 1, "untrainable"),
            (4, 5, 0, 3, "trained"),
            (6, 8, 1, 0, "untrainable"),
            (8, 9, 2, 0, "trained"),
        ]
    ]
    assert rows["logprobs"].to_pylist() == kept["logprobs"].to_pylist()
    mask = [p is not None for p in rows["logprobs"][0].as_py()]
    assert rows["loss_mask"].to_pylist() == [mask]
    assert one_lost(report) == {"no_logprob": 4}
    assert tk.verify(rows, table, policy).num_rows == 0
    # a row that trains a token without a logprob breaks this policy's promise
    assert set(tk.verify(kept, table, policy)["rule"].to_pylist()) == {"untrainable"}


def test_what_was_lost_has_a_piece_for_each_part_that_might_have_been_trained():
    turns = [
        turn([1], [2, 3, 4], output_logprobs=[-1.0, None, -2.0]),
        turn([1, 9], [5], output_logprobs=[-1.0]),
    ]
    policy = tk.policy("trl", missing_logprobs="untrain")
    rows, report = linearized(turns_table(turns), policy)
    assert pieces(rows) == [
        [(1, 1, 0, 0, "absorbed"), (1, 1, 0, 2, "absorbed"), (2, 3, 1, 0, "trained")]
    ]
    assert one_lost(report) == {"absorbed": 2, "no_logprob": 1}
    assert tk.verify(rows, turns_table(turns), policy).num_rows == 0


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
    assert trained_turns(rows) == [[0]]
    errors = {"session_id": ["s"], "reward": [None], "group_id": [None], "error": ["x"]}
    turns[2]["finish_reason"] = "stop"
    assert (
        tk.linearize(turns_table(turns), policy, sessions=pa.table(errors)) is not None
    )


def test_aborted_turns_are_context_or_trained():
    turns = [
        turn([1], [2, 7], finish_reason="abort"),
        turn([1, 2, 7], [7], finish_reason="abort", trainable=False),
        turn([1, 2, 7, 7], [5, 6, 7], finish_reason="stop"),
    ]
    table = turns_table(turns)
    assert not PRESETS["faithful"].train_aborted
    assert not PRESETS["per_call"].train_aborted
    for name in PRESETS:
        for aborted in (False, True):
            policy = tk.policy(name, train_aborted=aborted)
            rows, report = linearized(table, policy)
            lost = {"untrainable": 1}
            if not aborted:
                lost["aborted"] = 2
            assert one_lost(report) == lost
            assert sum(map(sum, rows["loss_mask"].to_pylist())) == 6 - sum(
                lost.values()
            )
            assert tk.verify(rows, table, policy).num_rows == 0
            if aborted:
                found = tk.verify(rows, table, tk.policy(name, train_aborted=False))
                assert set(found["rule"].to_pylist()) == {"untrainable"}


def test_trainable_is_honoured_by_every_policy():
    ended = turn([1, 2, 3, 4], [5, 4], finish_reason="stop")
    turns = [turn([1], [2, 3], trainable=False), ended]
    for name in PRESETS:
        rows, report = linearized(turns_table(turns), name)
        assert one_lost(report) == {"untrainable": 2}
        assert {t for turns in trained_turns(rows) for t in turns} == {1}


def test_what_follows_a_truncated_turn_is_kept():
    """In one row where the prompt goes on from the cut, in a row of its own where not."""
    cut = turn([1], [2, 3], finish_reason="length")
    goes_on = [cut, turn([1, 2, 3, 4], [5, 4], finish_reason="stop")]
    closed = [cut, turn([1, 2, 9, 4], [5, 6])]  # a template closes it in its own way
    for name in PRESETS:
        rows, report = linearized(turns_table(goes_on), name)
        refuses = name == "miles"  # to continue a cut reply
        assert one_lost(report) == ({"refused": 2} if refuses else {})
        trained = [t for turns in trained_turns(rows) for t in turns]
        assert trained == ([0] if refuses else [0, 1])
    for name in ("faithful", "strict", "skyrl", "per_call"):
        rows, report = linearized(turns_table(closed), name)
        assert one_lost(report) == {}
        assert trained_turns(rows) == [[0], [1]]
        assert rows["truncated"].to_pylist() == [True, False]


@fewer_examples
@given(sessions())
def test_an_errored_session_trains_nothing_and_says_so(turns):
    facts = pa.table(
        {"session_id": ["s"], "reward": [None], "group_id": ["g"], "error": ["boom"]}
    )
    table = turns_table(turns)
    for name in PRESETS:
        rows, report = linearized(table, name, sessions=facts)
        sampled = sum(len(one["output_ids"]) for one in turns)
        assert one_lost(report) == ({"untrainable": sampled} if sampled else {})
        assert report["error"].to_pylist() == ["boom"]
        assert report["reward"].to_pylist() == [None]
        assert not any(map(any, rows["loss_mask"].to_pylist()))
        assert set(rows["group_id"].to_pylist()) <= {"g"}
        assert set(rows["reward"].to_pylist()) <= {None}
        found = tk.verify(rows, table, name, sessions=facts)
        assert found.to_pylist() == []


def test_an_empty_list_of_messages_goes_by_tokens_where_tokens_decide():
    turns = [
        {"prompt_ids": [1], "output_ids": [2], "prompt_messages": []},
        {"prompt_ids": [1, 2, 3], "output_ids": [4], "prompt_messages": []},
        {"prompt_ids": [1, 9], "output_ids": [5], "prompt_messages": []},
    ]
    table = turns_table([{"session_id": "s", **turn} for turn in turns])
    rows, report = linearized(table, "faithful")
    assert rows["input_ids"].to_pylist() == [[1, 2, 3, 4], [1, 9, 5]]
    assert report["lost_unrouted"].to_pylist() == [0]
    assert report["tokens_trained"].to_pylist() == [3]
    assert tk.link(table)["link_reason"].to_pylist() == ["root", "tokens", "tokens"]
    assert tk.link(table, "slime")["link_reason"].to_pylist() == ["unrouted"] * 3


@given(runs())
def test_faithful_loses_nothing_that_it_was_not_asked_to(turns):
    report = linearized(turns_table(turns), "faithful")[1]
    for line in report.to_pylist():
        asked = line["lost_untrainable"] + line["lost_aborted"]
        assert line["tokens_sampled"] == line["tokens_trained"] + asked


def test_a_reply_that_a_cut_call_replaced_wholly_is_not_trained():
    """The call whose prompt took its place does not fit into the row, and still counts."""
    turns = turns_table(
        [
            {"prompt_ids": [1, 2], "output_ids": [3, 4]},
            {"prompt_ids": [1, 2, 9, 9, 9, 9], "output_ids": [5]},
        ]
    )
    policy = tk.policy("miles", fork_threshold=10)
    rows, report = linearized(turns, policy, max_row_tokens=6)
    (row,), (line,) = rows.to_pylist(), report.to_pylist()
    assert (row["input_ids"], row["loss_mask"]) == ([1, 2], [False, False])
    assert (line["tokens_trained"], line["tokens_sampled"]) == (0, 3)
    assert (line["lost_absorbed"], line["lost_cut"]) == (2, 1)
    # one token of the reply is left
    turns = turns_table(
        [
            {"prompt_ids": [1, 2], "output_ids": [3, 4]},
            {"prompt_ids": [1, 2, 3, 9, 9, 9], "output_ids": [5]},
        ]
    )
    (row,) = tk.linearize(turns, policy, max_row_tokens=6).to_pylist()
    assert (row["input_ids"], row["loss_mask"]) == ([1, 2, 3], [False, False, True])


def test_no_number_is_left_under_a_null_of_a_row_without_logprobs():
    turns = turns_table(
        [{"prompt_ids": [1], "output_ids": [2, 3], "output_logprobs": [-0.5, None]}]
    )
    policy = tk.policy("faithful", missing_logprobs="null_row")
    (chunk,) = tk.linearize(turns, policy)["logprobs"].chunks
    assert chunk.to_pylist() == [[None] * 3]
    assert not np.frombuffer(chunk.values.buffers()[1], np.float32, 3).any()

"""What a policy may choose beyond its preset: who trains, what may be trained."""

import pytest
from hypothesis import example, given

import trajkit as tk
from tests import reference_choices
from tests.strategies import chosen_policies, row_limits, runs, sessions
from tests.tables import dicts, turns_table
from trajkit.errors import PolicyError

OWNS = ["first", "longest", "most_trained"]


def by_twin(turns, policy, limit=None):
    table = turns_table(turns)
    links = tk.link(
        table,
        policy.route,
        merge_threshold=policy.merge_threshold,
        equals=policy.equals,
    )
    return reference_choices.linearize(turns, links.to_pylist(), policy, limit)


def said(role, content):
    return {"role": role, "content": content}


# The answer of turn 0 goes on in turn 1 and, with its last token changed, in turn 3; turn
# 2 goes on from turn 0 as well, and for longer.
SHARED = [
    {
        "prompt_messages": [said("user", "u"), *more],
        "response_message": said("assistant", reply),
        "prompt_ids": prompt,
        "output_ids": output,
        "output_logprobs": [-1.0] * len(output),
        "finish_reason": "stop",
    }
    for more, reply, prompt, output in [
        ([], "a", [1], [2, 3]),
        ([said("assistant", "a"), said("user", "v")], "b", [1, 2, 3, 4], [5, 5, 5]),
        ([said("assistant", "a"), said("user", "w")], "c", [1, 2, 3, *[6] * 5], [7]),
        ([said("assistant", "a"), said("user", "x")], "d", [1, 2, 9, 4], [5]),
    ]
]


def trained_turns(rows):
    return [
        [s["turn_index"] for s in row["spans"] if s["kind"] == "trained"]
        for row in rows.to_pylist()
    ]


@pytest.mark.parametrize(
    ("own", "limit", "expected"),
    [
        ("first", None, [[0, 1], [2], [3]]),
        ("longest", None, [[1], [0, 2], [3]]),
        ("most_trained", None, [[0, 1], [2], [3]]),
        # cut to 7 tokens the two rows are as long as each other: the first has it
        ("longest", 7, [[0, 1], [3]]),
        # cut to 5 tokens they would train three and two
        ("most_trained", 5, [[0, 1], [3]]),
    ],
)
def test_who_trains_what_several_rows_hold(own, limit, expected):
    table = turns_table(SHARED)
    policy = tk.policy("faithful", own=own)
    rows = tk.linearize(table, policy, max_row_tokens=limit)
    kinds = [{s["kind"] for s in row["spans"]} for row in rows.to_pylist()]
    trained = [turns for turns in trained_turns(rows) if turns]
    assert trained == expected, kinds
    assert not tk.verify(rows, table, policy, max_row_tokens=limit).num_rows


def test_an_equal_reply_goes_to_the_first_row_in_the_policy_s_order():
    turns = [SHARED[0], SHARED[1], {**SHARED[2], "prompt_ids": [1, 2, 3, 6]}]
    turns[2]["output_ids"], turns[2]["output_logprobs"] = [7] * 3, [-1.0] * 3
    for own in OWNS:
        rows = tk.linearize(turns_table(turns), tk.policy("faithful", own=own))
        assert trained_turns(rows) == [[0, 1], [2]]


def test_a_row_that_others_train_is_left_out():
    """Turn 1 goes on from turn 0 with drift, turn 2 without: one row for each."""
    turns = [SHARED[0], SHARED[3], SHARED[2]]
    first = tk.linearize(turns_table(turns), "faithful", report=True)
    assert trained_turns(first[0]) == [[0], [1], [2]]
    longest = tk.policy("faithful", own="longest")
    rows, report = tk.linearize(turns_table(turns), longest, report=True)
    assert trained_turns(rows) == [[1], [0, 2]]
    assert report["rows_untrained"].to_pylist() == [1]
    assert report["tokens_duplicated"].to_pylist() == [0]


# Turn 1 takes turn 0's reply out of its row, turn 2 keeps it in a shorter one.
ABSORBED = [SHARED[0], {**SHARED[3], "prompt_ids": [1, 2, 9, 4, 4, 4]}, SHARED[1]]
TRL_FOREST = ("trl", {"own": "longest", "route": "messages", "fork_threshold": 9})


def test_a_claim_goes_where_it_is_kept():
    policy = tk.policy("trl", **TRL_FOREST[1])
    for own, expected in [("first", [[0, 1], [2]]), ("longest", [[1], [0, 2]])]:
        chosen = tk.policy(policy, own=own, keep_head=own == "first")
        rows = tk.linearize(turns_table(ABSORBED), chosen)
        assert trained_turns(rows) == expected


@given(sessions(), chosen_policies(), row_limits)
@example(ABSORBED, TRL_FOREST, None)
@example(SHARED, ("faithful", {"own": "longest"}), None)
@example(SHARED, ("faithful", {"own": "most_trained"}), 6)
def test_rows_and_report_are_the_twin_s(turns, chosen, limit):
    name, choices = chosen
    policy = tk.policy(name, **choices)
    rows, report = tk.linearize(
        turns_table(turns), policy, max_row_tokens=limit, report=True
    )
    expected, expected_report = by_twin(turns, policy, limit)
    assert dicts(rows, expected) == expected
    assert rows.num_rows == len(expected)
    assert dicts(report, [expected_report]) == [expected_report]


@given(runs(), chosen_policies(), row_limits)
def test_verify_finds_nothing(turns, chosen, limit):
    name, choices = chosen
    policy = tk.policy(name, **choices)
    table = turns_table(turns)
    rows, report = tk.linearize(table, policy, max_row_tokens=limit, report=True)
    found = tk.verify(rows, table, policy, max_row_tokens=limit)
    assert found.to_pylist() == []
    for line in report.to_pylist():
        lost = sum(n for reason, n in line.items() if reason.startswith("lost_"))
        assert line["tokens_sampled"] == line["tokens_trained"] + lost


def test_a_choice_that_is_none_is_refused():
    with pytest.raises(PolicyError, match="own='last': expected one of 'first'"):
        tk.policy("faithful", own="last")

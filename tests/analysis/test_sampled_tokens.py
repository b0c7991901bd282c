"""Every sampled token has a line, and lines of a kind add up to the report's counts."""

from collections import Counter

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.generated import generated_runs
from tests.made_tables import linearized, turns_table
from tests.strategies import (
    chosen_policies,
    delegating_sessions,
    few,
    forest_policies,
    many_calls,
    row_limits,
    runs,
    sessions,
)
from trajkit.policies import PRESETS
from trajkit.schema import LOSSES, OUTPUT_SPANS
from trajkit.tables import limits


def check(turns, policy, limit=None, sessions=None):
    """Compare the lines with turns, rows and report, token by token."""
    options = {"max_row_tokens": limit, "sessions": sessions}
    rows, report = linearized(turns, policy, **options)
    table = tk.analysis.output_spans(turns, policy, **options)
    assert table.schema.equals(OUTPUT_SPANS, check_metadata=True)
    lines = table.to_pylist()
    places, counts, lengths = {}, Counter(), {}
    for turn in turns.select(["session_id", "turn_index", "output_ids"]).to_pylist():
        place = turn["session_id"], turn["turn_index"]
        places[place] = len(places)
        lengths[place] = len(turn["output_ids"])
    seen, order = {}, []
    for line in lines:
        place = line["session_id"], line["turn_index"]
        start, stop = line["output_start"], line["output_stop"]
        assert 0 <= start < stop <= lengths[place]
        order.append(
            (places[place], start, -1 if (n := line["row_index"]) is None else n)
        )
        for k in range(start, stop):
            kinds = seen.setdefault((*place, k), [])
            counts[place[0], line["kind"]] += not kinds
            kinds.append(line["kind"])
    assert order == sorted(order)
    assert len(seen) == sum(lengths.values())
    assert all(len(kinds) == 1 or set(kinds) == {"trained"} for kinds in seen.values())
    for line in report.to_pylist():
        name = line["session_id"]
        assert counts[name, "trained"] == line["tokens_trained"]
        for loss in LOSSES:
            assert counts[name, loss] == line[f"lost_{loss}"], loss
    check_rows(rows, lines)


def check_rows(rows, lines):
    """The lines of a row are its spans, and a row that has a token is named."""
    theirs, ours = set(), set()
    for row in rows.to_pylist():
        for span in row["spans"]:
            for k in range(span["output_start"], span["output_stop"]):
                token = row["session_id"], span["turn_index"], k
                theirs.add((*token, row["row_index"], span["kind"]))
    for line in lines:
        for k in range(line["output_start"], line["output_stop"]):
            kind = line["kind"]
            if kind in ("aborted", "masked", "no_logprob"):
                kind = "untrainable"
            if line["row_index"] is not None:
                token = line["session_id"], line["turn_index"], k
                ours.add((*token, line["row_index"], kind))
    assert ours <= theirs
    kinds = ("trained", "absorbed", "no_splice_point")
    assert {one for one in theirs if one[-1] in kinds} <= ours


@given(runs(), st.sampled_from([*PRESETS]), row_limits)
def test_lines_add_up_to_the_report(turns, name, limit):
    check(turns_table(turns), name, limit)


@given(sessions() | delegating_sessions(), st.sampled_from([*PRESETS]), row_limits)
def test_agents_and_their_sub_agents(turns, name, limit):
    check(turns_table(turns), name, limit)


@given(runs(), chosen_policies(), row_limits)
def test_changed_choices(turns, chosen, limit):
    name, choices = chosen
    check(turns_table(turns), tk.policy(name, **choices), limit)


@given(sessions(), forest_policies(), row_limits)
def test_choices_of_every_kind(turns, choices, limit):
    check(turns_table(turns), tk.Policy(name="some", **choices), limit)


@given(
    sessions() | delegating_sessions(),
    st.fixed_dictionaries(
        {
            "parent_by": st.sampled_from(["agents", "messages", "previous"]),
            "keep_prefix": st.booleans(),
            "row_selection": st.sampled_from(["all", "main"]),
            "max_rows": st.none() | st.integers(1, 2),
            "keep_untrained": st.booleans(),
        }
    ),
    row_limits,
)
def test_rows_that_restart(turns, choices, limit):
    check(turns_table(turns), tk.policy("segments", **choices), limit)


@few
@given(many_calls, st.sampled_from([*PRESETS]))
def test_long_sessions(turns, name):
    check(turns_table(turns), name)


@given(st.integers(0, 999), st.data())
def test_neither_form_nor_parts_matter(seed, data):
    full = turns_table(generated_runs(4, seed, max_turns=5))
    name = data.draw(st.sampled_from([*PRESETS]))
    found = tk.analysis.output_spans(full, name)
    assert tk.analysis.output_spans(tk.compact(full), name).equals(found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "PART_TOKENS", 1)
        assert tk.analysis.output_spans(full, name).equals(found)


def test_sessions_with_an_error_are_untrainable():
    turns = tk.from_records([{"session_id": "a", "prompt_ids": [1], "output_ids": [2]}])
    sessions = pa.table({"session_id": ["a", "b"], "error": ["killed", None]})
    check(turns, "faithful", sessions=sessions)
    lines = tk.analysis.output_spans(turns, sessions=sessions).to_pylist()
    assert [line["kind"] for line in lines] == ["untrainable"]


def kinds(records, policy, **choices):
    """Turn, range, kind, row and drift of each line of one session."""
    turns = tk.from_records({"session_id": "a", **one} for one in records)
    limit = choices.pop("max_row_tokens", None)
    policy = tk.policy(policy, **choices)
    check(turns, policy, limit)
    lines = tk.analysis.output_spans(turns, policy, max_row_tokens=limit).to_pylist()
    return [tuple(line.values())[1:] for line in lines]


DRIFTING = [
    {"prompt_ids": [1, 2], "output_ids": [3, 4, 5]},
    {"prompt_ids": [1, 2, 3, 4, 5, 6], "output_ids": [7, 8, 9, 10]},
    {"prompt_ids": [1, 2, 3, 4, 5, 6, 7, 11], "output_ids": [12]},
    {"prompt_ids": [1, 13], "output_ids": [14]},
]


def test_a_loss_names_the_turn_that_drifted():
    found = kinds(DRIFTING, "trl")
    assert found == [
        (0, 0, 3, "trained", 0, None),
        (1, 0, 1, "trained", 0, None),
        (1, 1, 4, "absorbed", 0, 2),
        (2, 0, 1, "trained", 0, None),
        (3, 0, 1, "trained", 1, None),
    ]


def test_a_row_that_restarted_is_lost_to_the_turn_that_restarted_it():
    found = kinds(DRIFTING, "segments", parent_by="previous")
    assert found == [
        (0, 0, 3, "restarted", None, 3),
        (1, 0, 4, "absorbed", None, 2),
        (2, 0, 1, "restarted", None, 3),
        (3, 0, 1, "trained", 0, None),
    ]


def test_a_refused_turn_names_itself():
    found = kinds(DRIFTING[:3], "miles")
    assert found[2] == (2, 0, 1, "refused", None, 2)


def test_every_row_that_trains_a_token_has_a_line():
    calls = [
        {"prompt_ids": [1], "output_ids": [2, 3]},
        {"prompt_ids": [1, 2, 3, 4], "output_ids": [5]},
        {"prompt_ids": [1, 2, 3, 6], "output_ids": [7]},
    ]
    calls = [{"prompt_ids": [9], "output_ids": [8]}, *calls]
    found = kinds(calls, "nemo")
    assert found[1:3] == [(1, 0, 2, "trained", 1, None), (1, 0, 2, "trained", 2, None)]
    assert len(found) == 5
    assert len(kinds(calls, "faithful")) == 4
    calls[1]["trainable"] = False
    assert kinds(calls, "nemo")[1] == (1, 0, 2, "untrainable", 1, None)


def test_a_long_row_is_cut_and_rows_over_the_limit_are_named():
    calls = [{"prompt_ids": [k], "output_ids": [2, 3]} for k in (1, 5, 6)]
    assert kinds(calls, "per_call", max_rows=1) == [
        (0, 0, 2, "over_max_rows", None, None),
        (1, 0, 2, "over_max_rows", None, None),
        (2, 0, 2, "trained", 0, None),
    ]
    assert kinds(calls[:1], "per_call", max_row_tokens=2) == [
        (0, 0, 1, "trained", 0, None),
        (0, 1, 2, "cut", 0, None),
    ]


def test_tokens_that_may_not_be_trained_name_the_row_that_has_them():
    call = {"prompt_ids": [1], "output_ids": [2, 3], "output_mask": [True, False]}
    assert kinds([call], "faithful") == [
        (0, 0, 1, "trained", 0, None),
        (0, 1, 2, "masked", 0, None),
    ]
    aborted = {"prompt_ids": [1], "output_ids": [2], "finish_reason": "abort"}
    more = {"prompt_ids": [1, 2, 3], "output_ids": [4]}
    assert kinds([aborted, more], "faithful")[0] == (0, 0, 1, "aborted", 0, None)


def test_a_loss_names_the_first_turn_that_departs_before_the_end_of_the_output():
    calls = [
        {"prompt_ids": [1, 2], "output_ids": [3, 4, 5]},
        {"prompt_ids": [1, 2, 3, 4, 5, 6], "output_ids": [7]},
        {"prompt_ids": [1, 2, 3, 9], "output_ids": [10]},
    ]
    assert kinds(calls, "segments", parent_by="previous")[:2] == [
        (0, 0, 3, "absorbed", 0, 2),
        (1, 0, 1, "absorbed", 0, 2),
    ]


def test_a_restarted_row_lost_some_tokens_before():
    calls = [
        {"prompt_ids": [1, 2], "output_ids": [3, 4, 5]},
        {"prompt_ids": [1, 2, 3, 9], "output_ids": [7]},
        {"prompt_ids": [1, 8], "output_ids": [9]},
    ]
    found = kinds(calls, "segments", parent_by="previous", keep_prefix=True)
    assert found[:3] == [
        (0, 0, 1, "restarted", None, 2),
        (0, 1, 3, "absorbed", None, 1),
        (1, 0, 1, "restarted", None, 2),
    ]
    # drift right after the prompt that opened the row does not restart it
    calls[1]["prompt_ids"] = [1, 2, 9]
    assert kinds(calls, "segments", parent_by="previous")[:2] == [
        (0, 0, 3, "absorbed", None, 1),
        (1, 0, 1, "restarted", None, 2),
    ]


def test_a_reply_that_was_rewritten_names_the_turn_that_shows_another():
    question, answer = (
        {"role": role, "content": "a"} for role in ("user", "assistant")
    )
    calls = [
        {"prompt_messages": [question], "response_message": answer},
        {
            "prompt_messages": [question, {**answer, "content": "b"}, question],
            "response_message": answer,
        },
    ]
    calls[0] |= {"prompt_ids": [1], "output_ids": [2]}
    calls[1] |= {"prompt_ids": [1, 3, 1], "output_ids": [4]}
    assert kinds(calls, "slime")[0] == (0, 0, 1, "rewritten", None, 1)


def test_retries_that_nothing_continues_are_quarantined():
    calls = [
        {"prompt_ids": prompt, "output_ids": output}
        for prompt, output in [([1], [2]), ([1], [3]), ([1, 2, 4], [5])]
    ]
    found = kinds(calls, "nemo")
    assert found[1] == (1, 0, 1, "quarantined", None, None)


def test_a_row_that_trains_nothing_is_no_row():
    calls = [
        {"prompt_ids": [1], "output_ids": [2, 3]},
        {"prompt_ids": [1, 2, 9], "output_ids": [4], "trainable": False},
    ]
    assert kinds(calls, "slime") == [
        (0, 0, 2, "absorbed", None, 1),
        (1, 0, 1, "untrainable", None, None),
    ]
    assert kinds(calls, "slime", keep_untrained=True) == [
        (0, 0, 2, "absorbed", 0, 1),
        (1, 0, 1, "untrainable", 0, None),
    ]
    calls = [
        {"prompt_ids": [1], "output_ids": [2], "trainable": False},
        {"prompt_ids": [1, 5], "output_ids": [6]},
    ]
    assert kinds(calls, "polar", keep_untrained=False) == [
        (0, 0, 1, "untrainable", None, None),
        (1, 0, 1, "no_splice_point", None, None),
    ]

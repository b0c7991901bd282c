"""Rewards and groups that the turns themselves state."""

import pyarrow as pa
import pytest

import trajkit as tk
from tests.made_tables import linearized, streamed
from trajkit.errors import InvalidTurnsError, SchemaError


def turns_with(**columns):
    """Two turns of session a and one of b, with values of further columns in order."""
    table = tk.from_records(
        {"session_id": name, "prompt_ids": [1], "output_ids": [k]}
        for k, name in enumerate("aab")
    )
    for name, values in columns.items():
        table = table.append_column(name, pa.array(values))
    return table


STATED = {"reward": [0.5, 0.5, None], "group_id": ["g", None, "h"]}


@pytest.mark.parametrize("form", ["table", "delta", "stream", "recorder"])
def test_rows_and_report_have_what_the_turns_state(form):
    turns = turns_with(**STATED)
    if form == "recorder":
        recorder = tk.Recorder()
        for turn in turns.to_pylist():
            recorder.record(
                turn["session_id"],
                prompt_ids=turn["prompt_ids"],
                output_ids=turn["output_ids"],
                payloads={name: turn[name] for name in STATED},
            )
        tables = [tk.linearize(recorder.pop(name), "per_call") for name in "ab"]
        rows, reports = pa.concat_tables(tables), None
    elif form == "stream":
        made = streamed(iter(turns.to_batches(1)), "per_call")
        rows, reports = map(pa.Table.from_batches, made)
    else:
        turns = tk.compact(turns) if form == "delta" else turns
        rows, reports = linearized(turns, "per_call")
    assert rows["reward"].to_pylist() == [0.5, 0.5, None]
    assert rows["group_id"].to_pylist() == ["g", "g", "h"]
    if reports is not None:
        assert reports["reward"].to_pylist() == [0.5, None]
        assert reports["group_id"].to_pylist() == ["g", "h"]
    assert tk.verify(rows, turns, "per_call").num_rows == 0
    wrong = rows.set_column(
        rows.column_names.index("reward"), "reward", pa.array([1.0, 1.0, 1.0])
    )
    found = tk.verify(wrong, turns, "per_call")
    assert found["rule"].to_pylist() == ["reward", "reward"]


@pytest.mark.parametrize(
    ("given", "rewards", "groups"),
    [
        ({"reward": {"a": 0.5, "b": 2.0}}, [0.5, 0.5, 2.0], ["g", "g", "h"]),
        (
            {"sessions": {"session_id": ["b", "a"], "error": [None, None]}},
            [0.5, 0.5, None],
            ["g", "g", "h"],
        ),
        (
            {"sessions": {"session_id": ["b", "a"], "reward": [3.0, 0.5]}},
            [0.5, 0.5, 3.0],
            ["g", "g", "h"],
        ),
        (
            # canonical sessions have every column, and these state nothing
            {"sessions": {"session_id": ["b", "a"], "group_id": [None, None]}},
            [0.5, 0.5, None],
            ["g", "g", "h"],
        ),
    ],
)
def test_arguments_that_agree_complete_what_turns_state(given, rewards, groups):
    if "sessions" in given:
        given = {"sessions": pa.table(given["sessions"])}
    turns = turns_with(**STATED)
    rows = tk.linearize(turns, "per_call", **given)
    assert rows["reward"].to_pylist() == rewards
    assert rows["group_id"].to_pylist() == groups
    assert tk.verify(rows, turns, "per_call", **given).num_rows == 0


@pytest.mark.parametrize(
    ("columns", "given", "error", "said"),
    [
        (
            {"reward": [0.5, 1.0, None]},
            {},
            InvalidTurnsError,
            "session 'a', turn 1: reward is 1.0, and 0.5 in turn 0: .*spread_rewards",
        ),
        (
            {"group_id": ["g", "h", None]},
            {},
            InvalidTurnsError,
            "group_id is h, and g in turn 0: a session has one group_id. Tasks .*--map",
        ),
        (
            {"reward": [0.5, None, 1.0]},
            {"reward": 0.5},
            InvalidTurnsError,
            r"session 'b': reward 0.5 was given, and its turns have reward 1.0",
        ),
        (
            {"reward": [0.5, None, 1.0]},
            {"reward": {"a": None, "b": 1.0}},
            InvalidTurnsError,
            "session 'a': reward null was given, and its turns have reward 0.5",
        ),
        (
            {"group_id": ["g", "g", "h"]},
            {"sessions": {"session_id": ["a", "b"], "group_id": ["g", "x"]}},
            InvalidTurnsError,
            "session 'b': group_id x was given, and its turns have group_id h",
        ),
        (
            {"reward": [float("nan"), None, 1.0]},
            {},
            InvalidTurnsError,
            "session 'a', turn 0: reward is nan: expected a finite number or null",
        ),
        ({}, {"reward": {"a": 1.0}}, InvalidTurnsError, "'b' has turns, but no line"),
        ({"reward": ["1", "1", "1"]}, {}, SchemaError, "column 'reward' is string"),
        ({"reward": [True, True, True]}, {}, SchemaError, "column 'reward' is bool"),
        ({"step": [0.5, 0.5, 0.5]}, {}, SchemaError, "'step' of turns is double"),
    ],
)
def test_contradictions_are_refused(columns, given, error, said):
    if "sessions" in given:
        given = {"sessions": pa.table(given["sessions"])}
    with pytest.raises(error, match=said):
        tk.linearize(turns_with(**columns), **given)


@pytest.mark.parametrize("argument", ["sessions", "reward"])
def test_turns_given_as_sessions_are_refused(argument):
    turns = turns_with(**STATED)
    with pytest.raises(SchemaError, match="sessions is a table of turns"):
        tk.linearize(turns, **{argument: turns})

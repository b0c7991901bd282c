"""Times of turns become slices."""

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest

import trajkit as tk
from trajkit.plot.figures import slices_of

BEGAN = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def at(seconds):
    return None if seconds is None else BEGAN + timedelta(seconds=seconds)


def timed(*calls):
    """Turns of (session, started, ended)."""
    return tk.from_records(
        [
            {
                "session_id": name,
                "prompt_ids": [1],
                "output_ids": [2],
                "started_at": at(start),
                "ended_at": at(stop),
            }
            for name, start, stop in calls
        ]
    )


def test_time_without_a_call_is_queue_before_the_session_and_tool_in_it():
    turns = timed(("a", 1, 2), ("a", 2.5, 4), ("b", 3, 5))
    assert slices_of(turns) == [
        ("a", "generation", 0, 1, 0, 0),
        ("a", "tool", 1, 1.5, None, 0),
        ("a", "generation", 1.5, 3, 1, 0),
        ("b", "queue", 0, 2, None, 0),
        ("b", "generation", 2, 4, 0, 0),
    ]


def test_calls_that_overlap_have_lanes():
    turns = timed(("a", 0, 10), ("a", 1, 3), ("a", 2, 4), ("a", 3, 5))
    assert [line[-2:] for line in slices_of(turns)] == [(0, 0), (1, 1), (2, 2), (3, 1)]


def test_rollouts_say_when_sessions_began_and_ended():
    turns = timed(("a", 5, 6), ("b", 7, 8), ("c", 7, 8))
    sessions = pa.table(
        {
            "session_id": ["a", "b", "c"],
            "started_at": [at(4), at(2), None],
            "seconds": [4.0, 6.0, 9.0],
        }
    )
    assert slices_of(turns, sessions) == [
        ("a", "queue", 0, 2, None, 0),
        ("a", "tool", 2, 3, None, 0),
        ("a", "generation", 3, 4, 0, 0),
        ("a", "tool", 4, 6, None, 0),
        ("b", "tool", 0, 5, None, 0),
        ("b", "generation", 5, 6, 0, 0),
        ("c", "queue", 0, 5, None, 0),
        ("c", "generation", 5, 6, 0, 0),
    ]


def test_turns_without_times_are_left_out():
    turns = timed(("a", 1, 2), ("a", None, 3), ("a", 3, None), ("b", None, None))
    assert slices_of(turns) == [("a", "generation", 0, 1, 0, 0)]


CALL = {"session_id": "a", "prompt_ids": [1], "output_ids": [2]}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (tk.from_records([CALL]), "no column 'started_at'.*'?trajkit serve"),
        (tk.from_records([{**CALL, "started_at": at(0)}]), "no column 'ended_at'"),
        (timed(("a", None, 1)), "are null in all 1 turns"),
        (
            tk.from_records([{**CALL, "started_at": 1.5, "ended_at": 2.5}]),
            "column 'started_at': expected timestamps, found double",
        ),
    ],
)
def test_missing_times_are_named(turns, message):
    with pytest.raises(tk.errors.SchemaError, match=message):
        tk.plot.swimlanes(turns)


def test_a_turn_that_ends_before_it_starts_is_refused():
    with pytest.raises(
        tk.errors.InvalidTurnsError, match=r"'a', turn 0.*1,000,000 mic"
    ):
        slices_of(timed(("a", 2, 1)))

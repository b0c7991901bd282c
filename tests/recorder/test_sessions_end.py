"""Rows, reports and metadata of recorded sessions, and sessions that end."""

from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import linearized, turns_table
from tests.recorder.test_recorder import call, record, recordable
from tests.strategies import chosen_policies, sessions
from trajkit.errors import (
    ArgumentError,
    InvalidTurnsError,
    PolicyError,
    UnknownSessionError,
)
from trajkit.importers.reader import EXTRAS
from trajkit.schema import ROWS

NOON = datetime(2026, 1, 2, 12, tzinfo=UTC)


def recorded(turns):
    recorder = tk.Recorder()
    for turn in turns:
        record(recorder, turn)
    return recorder


@given(
    sessions(),
    chosen_policies(),
    st.none() | st.floats(-1, 1),
    st.sampled_from([None, "g"]),
    st.sampled_from([None, "timeout"]),
)
def test_pop_returns_rows_and_report_of_the_table(
    turns, policy, reward, group_id, error
):
    turns, policy = recordable(turns), tk.policy(policy[0], **policy[1])
    recorder = recorded(turns)
    facts = pa.Table.from_pylist(
        [{"session_id": "s", "reward": reward, "group_id": group_id, "error": error}],
        tk.schema.SESSIONS,
    )
    rows, report = map(
        tk.validate, linearized(turns_table(turns), policy, sessions=facts)
    )
    options = {"reward": reward, "group_id": group_id, "error": error}
    assert recorder.n_turns("s") == len(turns)
    assert recorder.rows("s", policy, **options) == rows
    assert recorder.rows("s", policy, sessions=facts) == rows
    assert recorder.rows_and_report("s", policy, **options) == (rows, report)
    assert recorder.has_session("s")
    assert recorder.pop("s", policy, **options) == (rows, report)
    assert not recorder.has_session("s")
    assert recorder.n_turns("s") == 0
    with pytest.raises(UnknownSessionError, match="'s'"):
        recorder.pop("s", policy)


@pytest.mark.parametrize(
    ("policy", "options", "error"),
    [
        ("no such", {}, PolicyError),
        ("strict", {"reward": float("nan")}, ArgumentError),
        ("strict", {"reward": {"b": 1.0}}, InvalidTurnsError),
        ("strict", {"unknown": 1}, TypeError),
    ],
)
def test_a_pop_without_rows_keeps_the_session(policy, options, error):
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2]))
    with pytest.raises(error):
        recorder.pop("a", policy, **options)
    assert recorder.n_turns("a") == 1
    assert recorder.pop("a", "strict").rows["input_ids"].to_pylist() == [[1, 2]]


METADATA = {
    "request_id": "r",
    "model": "m",
    "agent_id": "main",
    "call_kind": "title",
    "started_at": NOON,
    "ended_at": NOON.astimezone(timezone(timedelta(hours=2))),
    "step": np.int64(7),
}


def test_metadata_become_columns():
    recorder = tk.Recorder()
    recorder.record("a", **call([1], [2]))
    payloads = {"x": [1], "reward": 0.5, "group_id": "g"}
    recorder.record("a", **call([1, 2, 3], [4], payloads=payloads, **METADATA))
    table = recorder.turns("a")
    for name, value in METADATA.items():
        assert table[name].to_pylist() == [None, value]
    assert table.schema.field("step").type == ROWS.field("step").type
    for name in METADATA.keys() - {"step"}:  # as imported turns have them
        assert table.schema.field(name).type == EXTRAS.field(name).type
    assert table["x"].to_pylist() == [None, [1]]
    rows = recorder.rows("a", "strict")
    for name, value in {"step": 7, "reward": 0.5, "group_id": "g"}.items():
        assert rows[name].to_pylist() == [value]
    tk.validate(table)

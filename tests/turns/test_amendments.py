"""What became known of turns after they were recorded, and sessions beside them."""

import pyarrow as pa
import pytest
from hypothesis import given

import trajkit as tk
from tests.made_tables import linearized
from tests.strategies import amendment_lists
from trajkit import schema
from trajkit.errors import FormatError, SchemaError
from trajkit.files.tables import write_table
from trajkit.turns.amendments import Amendments


def turns_of(*named, **fields):
    return tk.from_records(
        {
            "session_id": session,
            "turn_index": index,
            "prompt_ids": [1, index],
            "output_ids": [3],
            "output_logprobs": [-0.5],
            **fields,
        }
        for session, index in named
    )


def amendments_of(*lines):
    names = schema.AMENDMENTS.names
    rows = [dict(zip(names, line, strict=True)) for line in lines]
    return pa.Table.from_pylist(rows, schema.AMENDMENTS)


def run_of(directory, turns, *amended):
    tk.write_turns(turns, directory / "turns-00000.arrows")
    for k, table in enumerate(amended):
        write_table(table, directory / f"amendments-{k:05d}.arrows")
    return directory


TURNS = turns_of(("a", 0), ("a", 1), ("b", 0))
LOST = ("a", 1, "undelivered", False)
FOUND = ("a", 1, "delivered", None)


def test_a_directory_is_read_with_its_amendments(tmp_path):
    run = run_of(tmp_path, TURNS, amendments_of(LOST))
    table = tk.read_turns(run)
    assert table["trainable"].to_pylist() == [None, False, None]
    assert table["amended"].to_pylist() == [None, "undelivered", None]
    # a plain file is what it is
    plain = tk.read_turns(run / "turns-00000.arrows")
    assert plain["trainable"].to_pylist() == [None] * 3
    assert "amended" not in plain.column_names
    assert len(tk.validate(table)) == 3
    _, report = linearized(table, reward=1.0)
    assert report["lost_untrainable"].to_pylist() == [1, 0]


def test_the_last_amendment_of_a_turn_counts_whatever_file_it_is_in(tmp_path):
    run = run_of(tmp_path, TURNS, amendments_of(LOST, LOST), amendments_of(FOUND))
    assert tk.read_turns(run)["trainable"].to_pylist() == [None] * 3
    assert tk.read_turns(run)["amended"].to_pylist() == [None, "delivered", None]
    batches = pa.Table.from_batches(tk.scan_turns(run))
    assert batches["amended"].to_pylist() == [None, "delivered", None]


def test_turns_in_delta_form_are_amended_too(tmp_path):
    run = run_of(tmp_path, tk.compact(TURNS), amendments_of(LOST))
    turns = tk.read_turns(run)
    assert "suffix_ids" in turns.column_names
    assert turns["trainable"].to_pylist() == [None, False, None]
    _, report = linearized(turns, reward=1.0)
    assert report["lost_untrainable"].to_pylist() == [1, 0]


def test_lines_of_json_are_amended_too(tmp_path):
    tk.write_turns(TURNS, tmp_path / "turns.jsonl")
    write_table(amendments_of(LOST), tmp_path / "amendments.parquet")
    assert tk.read_turns(tmp_path)["trainable"].to_pylist() == [None, False, None]
    batches = pa.Table.from_batches(tk.scan_turns(tmp_path))
    assert batches["trainable"].to_pylist() == [None, False, None]


def test_a_turn_that_says_itself_that_it_is_context_stays_so(tmp_path):
    turns = turns_of(("a", 0), ("a", 1), trainable=False)
    run = run_of(tmp_path, turns, amendments_of(("a", 0, "delivered", None)))
    assert tk.read_turns(run)["trainable"].to_pylist() == [False, False]


def test_amendments_are_no_turns(tmp_path):
    run = run_of(tmp_path, TURNS, amendments_of(LOST))
    with pytest.raises(SchemaError, match=r"a table of amendments .*: expected turns"):
        tk.read_turns(run / "amendments-00000.arrows")


@given(amendment_lists)
def test_folding_agrees_with_looking_each_turn_up(lines):
    named = [(session, k) for session in ("s0", "s2", "s1") for k in range(0, 9, 2)]
    turns = turns_of(*named)
    last = {(line["session_id"], line["turn_index"]): line for line in lines}
    found = [last.get(name) for name in named]
    table = pa.Table.from_pylist(lines, schema.AMENDMENTS)
    folded = Amendments(table).fold_into(turns)
    assert folded["amended"].to_pylist() == [line and line["reason"] for line in found]
    assert folded["trainable"].to_pylist() == [
        False if line and line["trainable"] is False else None for line in found
    ]


def test_sessions_are_read_beside_turns_and_feed_linearize(tmp_path):
    run = run_of(tmp_path, TURNS)
    fields = [*schema.SESSIONS, pa.field("ended_by", pa.string())]
    lines = [
        {"session_id": "a", "ended_by": None},
        {"session_id": "b", "reward": 2.0},
        {"session_id": "a", "reward": 1.0, "group_id": "g", "ended_by": "finish"},
    ]
    table = pa.Table.from_pylist(
        lines, pa.schema(fields, metadata=schema.SESSIONS.metadata)
    )
    write_table(table, run / "sessions-00000.arrows")
    sessions = tk.read_sessions(run)
    assert sessions["session_id"].to_pylist() == ["a", "b"]
    assert sessions["reward"].to_pylist() == [1.0, 2.0]
    assert sessions["ended_by"].to_pylist() == ["finish", None]
    assert tk.read_sessions(run / "sessions-00000.arrows") == sessions
    turns = tk.read_turns(run)
    assert len(turns) == 3
    rows = tk.linearize(turns, sessions=sessions)
    assert rows["reward"].to_pylist() == [1.0, 1.0, 2.0]
    assert rows["group_id"].to_pylist() == ["g", "g", None]


def test_a_directory_without_sessions_says_so(tmp_path):
    with pytest.raises(FormatError, match="no file of sessions"):
        tk.read_sessions(run_of(tmp_path, TURNS))


def test_an_amendment_of_no_turn_amends_none():
    lines = pa.table(
        {
            "session_id": ["a"],
            "turn_index": pa.array([-1], pa.int32()),
            "reason": ["x"],
            "trainable": [False],
        }
    )
    turns = tk.from_records([{"session_id": "b", "prompt_ids": [1], "output_ids": [2]}])
    amended = Amendments(lines).fold_into(turns)
    assert amended["amended"].to_pylist() == [None]
    assert amended["trainable"].to_pylist() == turns["trainable"].to_pylist()


def test_no_amendment_but_false_makes_a_turn_context(tmp_path):
    for number, said in enumerate((True, None)):
        run = tmp_path / str(number)
        run.mkdir()
        run_of(run, TURNS, amendments_of(LOST, ("a", 1, "delivered", said)))
        table = tk.read_turns(run)
        assert table["trainable"].to_pylist() == [None] * 3
        assert table["amended"].to_pylist() == [None, "delivered", None]

"""What became known of turns after they were recorded, and sessions beside them."""

import pyarrow as pa
import pytest
from hypothesis import example, given

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


def amendments_of(lines):
    names = schema.AMENDMENTS.names
    rows = [dict(zip(names, line, strict=True)) for line in lines]
    return pa.Table.from_pylist(rows, schema.AMENDMENTS)


def run_of(directory, turns, *amended, format="arrows"):
    tk.write_turns(turns, directory / f"turns-00000.{format}")
    for k, table in enumerate(amended):
        write_table(table, directory / f"amendments-{k:05d}.arrows")
    return directory


NAMED = ("a", 0), ("a", 1), ("b", 0)
TURNS = turns_of(*NAMED)
LOST = ("a", 1, "undelivered", False)
FOUND = ("a", 1, "delivered", None)


@pytest.mark.parametrize(
    ("form", "format"),
    [
        (tk.expand, "arrows"),
        (tk.expand, "jsonl"),
        (tk.compact, "arrows"),
        (tk.compact, "parquet"),
    ],
)
@pytest.mark.parametrize(
    ("own", "amended", "trainable", "reason"),
    [
        (None, [[LOST]], False, "undelivered"),
        # the last one counts, whatever file it is in
        (None, [[LOST, LOST], [FOUND]], None, "delivered"),
        (None, [[FOUND, LOST]], False, "undelivered"),
        (None, [[LOST, ("a", 1, "delivered", True)]], None, "delivered"),
        # a turn that says itself that it is context stays so
        (False, [[FOUND]], False, "delivered"),
    ],
)
def test_a_directory_is_read_with_its_amendments(
    tmp_path, form, format, own, amended, trainable, reason
):
    turns = form(turns_of(*NAMED, trainable=own))
    run = run_of(tmp_path, turns, *map(amendments_of, amended), format=format)
    table = tk.read_turns(run)
    assert ("suffix_ids" in table.column_names) == (form is tk.compact)
    for read in (table, pa.Table.from_batches(tk.scan_turns(run))):
        assert read["trainable"].to_pylist() == [own, trainable, own]
        assert read["amended"].to_pylist() == [None, reason, None]
    # a plain file is what it is
    plain = tk.read_turns(run / f"turns-00000.{format}")
    assert plain["trainable"].to_pylist() == [own] * 3
    assert "amended" not in plain.column_names
    assert len(tk.validate(table)) == 3
    lost = linearized(table, reward=1.0)[1]["lost_untrainable"].to_pylist()
    assert lost == [2 if own is False else int(trainable is False), int(own is False)]


def test_amendments_are_no_turns(tmp_path):
    run = run_of(tmp_path, TURNS, amendments_of([LOST]))
    with pytest.raises(SchemaError, match=r"a table of amendments .*: expected turns"):
        tk.read_turns(run / "amendments-00000.arrows")


@given(amendment_lists)
@example([dict(zip(schema.AMENDMENTS.names, ("s1", -1, "x", False), strict=True))])
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


def test_sessions_are_read_beside_turns(tmp_path):
    run = run_of(tmp_path, TURNS)
    with pytest.raises(FormatError, match="no file of sessions"):
        tk.read_sessions(run)
    sessions = pa.table({"session_id": ["a", "b"], "reward": [1.0, 2.0]})
    tk.write_sessions(sessions, run / "sessions-00000.arrows")
    rows = tk.linearize(tk.read_turns(run), sessions=tk.read_sessions(run))
    assert rows["reward"].to_pylist() == [1.0, 1.0, 2.0]

"""Misspelled names, wrong kinds of table, and the tables and arrays of other libraries."""

import json
import re

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

import trajkit as tk
from tests.file_stages import linearize_file
from trajkit.analysis import call_tree, metrics
from trajkit.errors import (
    ArgumentError,
    FormatError,
    InvalidTurnsError,
    PolicyError,
    SchemaError,
)
from trajkit.files.tables import scan_any_rows

CALL = {
    "session_id": "a",
    "prompt_ids": [1, 2],
    "output_ids": [3, 4],
    "output_logprobs": [-0.5, -0.25],
}
TURNS = tk.from_records([CALL, {**CALL, "prompt_ids": [1, 2, 3, 4, 5]}])
ROWS = tk.linearize(TURNS)


class Batch(dict):
    """A BatchEncoding: a mapping with a row for each text."""


# Records


@pytest.mark.parametrize(
    ("record", "said"),
    [
        ("x", "record 0 is a str: expected a dict with the keys session_id"),
        ({"id": 1}, "record 0: no session_id, only id"),
        (
            {"session_id": "a", "prompt": []},
            "the keys session_id, prompt: expected prompt",
        ),
        (
            CALL | {"prompt_mesages": []},
            "'prompt_mesages' and no 'prompt_messages': did you",
        ),
        (
            CALL | {"trainabel": True},
            "record 0 has the key .* did you mean 'trainable'",
        ),
        (CALL | {"output_logprobs": [{3: 1}, {4: 1}]}, "logprobs are numbers"),
        (CALL | {"output_logprobs": [(-1, 3, None)] * 2}, "logprobs are numbers"),
        (CALL | {"output_logprobs": {"content": []}}, "a list or an array of numbers"),
        (CALL | {"prompt_ids": Batch(input_ids=[[1], [2]])}, "turn 0: prompt_ids"),
    ],
)
def test_a_record_with_a_wrong_value_or_key_is_refused(record, said):
    with pytest.raises(InvalidTurnsError, match=said):
        tk.from_records([record])


@pytest.mark.parametrize("ids", [[1, 2], [[1, 2]], np.array([[1, 2]])], ids=repr)
def test_the_ids_of_a_batch_encoding_are_taken(ids):
    call = {**CALL, "prompt_ids": Batch(input_ids=ids, attention_mask=[[1, 1]])}
    assert tk.from_records([call]) == tk.from_records([CALL])


# Near misses


def test_a_key_like_one_that_is_there_is_a_column():
    turns = tk.from_records([{**CALL, "trainable": None, "trainabel": 1}])
    assert turns["trainabel"].to_pylist() == [1]


@pytest.mark.parametrize("name", ["rewards", "score", "reward_", "group"])
def test_a_column_of_sessions_like_a_missing_one_is_refused(name, tmp_path):
    known = pa.table({"session_id": ["a"], name: [1.0]})
    meant = "group_id" if name == "group" else "reward"
    said = f"column '{name}' of sessions, .*: did you mean '{meant}'"
    with pytest.raises(SchemaError, match=said):
        tk.linearize(TURNS, sessions=known)
    (tmp_path / "known.jsonl").write_text(json.dumps({"session_id": "a", name: 1}))
    with pytest.raises(SchemaError, match=f"known.jsonl: {said}"):
        tk.read_sessions(tmp_path / "known.jsonl")
    if name == "group":
        return
    both = known.append_column("reward", pa.array([2.0]))
    assert tk.linearize(TURNS, sessions=both)["reward"].to_pylist() == [2.0]


def test_a_misspelled_required_column_is_named():
    said = "no column 'output_ids' of turns among .*did you mean 'outputs_ids'"
    with pytest.raises(SchemaError, match=said):
        tk.linearize(TURNS.rename_columns({"output_ids": "outputs_ids"}))


@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (lambda: tk.policy("slim"), PolicyError, "did you mean 'slime'"),
        (
            lambda: tk.policy("slime", fork_treshold=1),
            PolicyError,
            "did you mean 'fork_threshold'",
        ),
        (
            lambda: tk.policy("slime", train_in="frist"),
            PolicyError,
            "train_in='frist' .did you mean 'first'",
        ),
        (lambda: tk.link(TURNS, "faithfull"), PolicyError, "did you mean 'faithful'"),
        (
            lambda: tk.verify(ROWS, TURNS, weigh_by="tokens"),
            ArgumentError,
            "did you mean 'token'",
        ),
    ],
)
def test_a_choice_like_a_known_one_is_named(make, kind, said):
    with pytest.raises(kind, match=said) as caught:
        make()
    assert type(caught.value) is kind


# The wrong kind of table


@pytest.mark.parametrize("suffix", ["jsonl", "parquet", "arrow", "arrows"])
def test_the_wrong_kind_of_file_is_named(tmp_path, suffix):
    turns, rows, facts = (
        tmp_path / f"{name}.{suffix}" for name in ("calls", "mine", "known")
    )
    known = pa.table({"session_id": ["a"], "reward": [1.0]})
    tk.write_turns(TURNS.replace_schema_metadata(None), turns)
    tk.write_rows(ROWS.replace_schema_metadata(None), rows)
    tk.write_sessions(known, facts)
    out = tmp_path / "out.parquet"
    of_rows = r"mine\..* a table of rows \(columns session_id, row_index.*Pass recorded"
    of_facts = r"known\..* sessions .*expected turns"
    for read, path, said in [
        (tk.read_turns, rows, of_rows),
        (lambda path: linearize_file(path, out), rows, of_rows),
        (tk.read_turns, facts, of_facts),
        (lambda path: linearize_file(path, out), facts, of_facts),
        (tk.read_sessions, turns, r"calls\..* of turns .*expected sessions"),
        (tk.read_rows, turns, r"calls\..* of turns .*expected rows"),
        (lambda path: [*scan_any_rows(path)], turns, "of turns .*expected rows"),
    ]:
        with pytest.raises(SchemaError, match=said):
            read(path)


def test_columns_of_any_layout_are_looked_at_in_files(tmp_path):
    # pyarrow cannot make an empty table of such a column
    kinds = pa.DictionaryArray.from_arrays(
        pa.array([0, 0], pa.uint32()), pa.array(["a"], pa.string_view())
    )
    column = pa.StructArray.from_arrays([kinds], ["kind"])
    table = TURNS.append_column("tag", column)
    with pa.ipc.new_file(tmp_path / "turns.arrow", table.schema) as writer:
        writer.write_table(table)
    tags = tk.read_turns(tmp_path / "turns.arrow")["tag"]
    assert tags.to_pylist() == [{"kind": "a"}] * 2


# Tables of other libraries


def hugging_face(table):
    datasets = pytest.importorskip("datasets")
    doubled = datasets.Dataset(pa.concat_tables([table, table]))
    return doubled.select(range(len(table)))


TABLES = {
    "polars": pl.from_arrow,
    "polars LazyFrame": lambda table: pl.from_arrow(table).lazy(),
    "pandas": lambda table: table.to_pandas(),
    "pandas, with an index": lambda table: table.to_pandas().set_index(
        pd.Index(["x", "y"][: len(table)])
    ),
    "datasets": hugging_face,
    "list of dicts": pa.Table.to_pylist,
    "dict of columns": pa.Table.to_pydict,
}


@pytest.mark.parametrize("make", TABLES.values(), ids=TABLES)
def test_tables_of_other_libraries_are_taken(make, tmp_path):
    assert tk.linearize(make(TURNS)) == ROWS
    assert tk.read_turns(make(TURNS)) == TURNS
    assert tk.expand(tk.compact(make(TURNS))).equals(TURNS)
    assert tk.verify(make(ROWS.drop_columns("spans")), TURNS).num_rows == 0
    assert tk.check_rows(make(ROWS), make(TURNS)) == tk.check_rows(ROWS, TURNS)
    report = tk.report(TURNS)
    assert metrics(make(TURNS), make(report)) == metrics(TURNS, report)
    assert call_tree(make(TURNS), "a") == call_tree(TURNS, "a")
    tk.write_turns(make(TURNS), tmp_path / "turns.parquet")
    assert tk.read_turns(tmp_path / "turns.parquet") == TURNS
    facts = pa.table({"session_id": ["a"], "reward": [2.0]})
    if make is not pa.Table.to_pydict:
        assert tk.linearize(TURNS, reward=make(facts))["reward"].to_pylist() == [2.0]
    assert tk.linearize(TURNS, sessions=make(facts))["reward"].to_pylist() == [2.0]


@pytest.mark.parametrize(
    "make", [pd.Series, pl.Series, lambda x: pa.chunked_array([x])]
)
def test_a_column_is_no_table(make):
    for value in (make(["a"]), make([1.0])):
        with pytest.raises(SchemaError, match="is not a table"):
            tk.linearize(value)
        with pytest.raises(
            ArgumentError, match=r"reward is of type .*: expected a num"
        ):
            tk.linearize(TURNS, reward=value)


def test_records_are_taken_where_turns_are():
    said = {"role": "user", "content": "x"}
    records = [{**CALL, "prompt_messages": [said]}]
    assert tk.linearize(records) == tk.linearize(tk.from_records(records))
    assert tk.compact(records) == tk.compact(tk.from_records(records))
    assert call_tree(records, "a") == call_tree(tk.from_records(records), "a")
    for make in (pa.Table.from_pylist, pl.DataFrame, pd.DataFrame):
        assert tk.from_records(make(records)) == tk.from_records(records)
        with pytest.raises(SchemaError, match=r"no column 'turn_index'.*from_records"):
            tk.linearize(make([CALL]))
    with pytest.raises(
        SchemaError, match=r"'prompt_messages' .* trajkit\.from_records"
    ):
        tk.linearize(pa.Table.from_pylist(records).append_column("turn_index", [[0]]))


def test_whole_floats_of_pandas_are_integers():
    frame = TURNS.to_pandas()
    frame["turn_index"] = frame["turn_index"].astype("float64")
    assert tk.linearize(frame) == ROWS
    records = [{**CALL, "turn_index": 0.0}, {**CALL, "turn_index": float("nan")}]
    assert tk.from_records(records)["turn_index"].to_pylist() == [0, 1]


@pytest.mark.parametrize("index", [0.5, 2.0**31, float("nan"), float("inf")])
def test_other_floats_are_no_integers(index):
    column = pa.array([0.0, index])
    turns = TURNS.set_column(1, "turn_index", column)
    with pytest.raises(InvalidTurnsError, match="turn_index: Float value"):
        tk.linearize(turns)


# Names that nobody chose


@pytest.mark.parametrize("scattered", [False, True])
@pytest.mark.parametrize(
    "place", ["rows.xlsx", "absent/rows.parquet", "shut/r.parquet"]
)
def test_errors_name_the_files_that_the_caller_named(tmp_path, place, scattered):
    calls = [{**CALL, "session_id": name} for name in ("a", "b", "a")]
    log = tmp_path / "turns.jsonl"
    log.write_text("".join(json.dumps(c) + "\n" for c in calls[: 2 + scattered]))
    (tmp_path / "shut").write_text("")
    with pytest.raises((ArgumentError, FormatError, OSError)) as refused:
        linearize_file(log, tmp_path / place)
    said = str(refused.value)
    assert str((tmp_path / place).parent) in said
    assert not re.search(r"/\.|\d{3,}-|tmp\b.*\.tmp", said.replace(str(tmp_path), ""))


@pytest.mark.parametrize("given", [None, 5])
@pytest.mark.parametrize("write", [tk.write_turns, tk.write_rows])
def test_what_is_written_is_a_table_or_its_batches(given, write, tmp_path):
    with pytest.raises(ArgumentError, match="expected a table, or its record batches"):
        write(given, tmp_path / "x.parquet")
    assert not [*tmp_path.iterdir()]


def test_names_in_an_array_are_refused_by_name():
    with pytest.raises(ArgumentError, match=r"payloads=.*expected a sequence of names"):
        tk.linearize(TURNS, payloads=np.zeros(3))
    for roles in (np.zeros(3), ["tool"], {}):
        with pytest.raises(ArgumentError, match=r"roles=.*expected a weight for"):
            tk.learn.observation_weights(tk.linearize(TURNS), TURNS, roles=roles)

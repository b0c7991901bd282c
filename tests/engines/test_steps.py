"""The step as engines call it, and in those that run within this process."""

import pickle

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

import trajkit as tk
from tests.engines.runs import in_order, turns_of, write_files, write_scattered
from trajkit.engines import LinearizeStep
from trajkit.tables import limits


def plain(type_):
    return not any(
        test(type_) for test in (pa.types.is_large_list, pa.types.is_dictionary)
    )


def test_batches_in_and_batches_out_as_spark_calls_it(monkeypatch):
    monkeypatch.setattr(limits, "PART_TOKENS", 10)
    turns = turns_of()
    step = pickle.loads(pickle.dumps(LinearizeStep(policy="per_call", reward=1.5)))
    batches = list(step(iter(turns.to_batches(max_chunksize=3))))
    assert all(batch.schema.equals(step.schema) for batch in batches)
    assert all(plain(field.type) for field in step.schema)
    assert len(batches) > 24
    rows = pa.Table.from_batches(batches, step.schema)
    expected = tk.linearize(turns, "per_call", reward=1.5)
    assert in_order(rows) == in_order(expected)


def test_a_session_may_come_in_any_order():
    turns, step = turns_of(5), LinearizeStep(policy="slime")
    session = turns.filter(pc.equal(turns["session_id"], "s04"))
    rows = step.of_session(session.take([3, 0, 4, 2, 1]))
    assert rows.schema == step.schema
    assert in_order(rows) == in_order(tk.linearize(session, "slime"))


def test_no_turns_give_no_rows():
    assert list(LinearizeStep()(iter([]))) == []


def test_in_duckdb(tmp_path):
    turns = turns_of()
    write_scattered(turns, tmp_path / "turns")
    step = LinearizeStep()
    with duckdb.connect() as engine:
        # a connection has one result at a time
        source = (
            engine.cursor()
            .sql(f"from '{tmp_path}/turns/*.parquet' order by session_id, turn_index")
            .to_arrow_reader(10)
        )
        rows = pa.RecordBatchReader.from_batches(step.schema, step(iter(source)))
        engine.register("rows", rows)
        engine.sql(f"copy rows to '{tmp_path}/rows.parquet'")
    got = tk.read_rows(tmp_path / "rows.parquet")
    assert in_order(got) == in_order(tk.linearize(turns))


def test_in_polars(tmp_path):
    turns = turns_of()
    write_files(turns, tmp_path / "turns")
    step = LinearizeStep(policy="strict")
    schema = pl.from_arrow(step.schema.empty_table()).schema

    def rows_of(frame):
        batches = frame.to_arrow().to_batches()
        rows = pa.Table.from_batches(step(iter(batches)), step.schema)
        return pl.from_arrow(rows)

    query = pl.scan_parquet(tmp_path / "turns/*.parquet").map_batches(
        rows_of, schema=schema
    )
    assert in_order(query.collect()) == in_order(tk.linearize(turns, "strict"))

"""Parquet files of rows: polars and Arrow write the same tables."""

import os
import signal
import subprocess
import sys
import warnings
from importlib.metadata import PackageNotFoundError
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, event, given, settings

import trajkit as tk
from tests.strategies import plain_tables, runs
from trajkit._streams import limits
from trajkit.errors import SchemaError
from trajkit.io import parquet_polars
from trajkit.io.tables import write_rows, write_table

per_example = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def eager(monkeypatch):
    """Any file that polars can write is written by it, in row groups of a few rows."""
    monkeypatch.setattr(limits, "POLARS_FILE_BYTES", 1)
    monkeypatch.setattr(limits, "POLARS_GROUP_BYTES", 100)
    monkeypatch.setattr(parquet_polars, "_polars_works", lambda: True)


def writer(path):
    """Which library wrote a Parquet file, and how many row groups it has."""
    with pq.ParquetFile(path) as file:
        said = file.metadata.created_by
        return "polars" if "Polars" in said else "arrow", file.num_row_groups


def rows_of(*lengths):
    """A table of rows, as long as is said."""
    calls = [
        {
            "session_id": f"s{k}",
            "prompt_ids": [1] * (n // 2),
            "output_ids": [2] * (n - n // 2),
            "output_logprobs": [-0.5] * (n - n // 2),
        }
        for k, n in enumerate(lengths)
    ]
    return tk.linearize(tk.from_records(calls))


def bits(table, schema):
    """What a table holds in each place, a NaN as its bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as out:
        out.write_table(pa.Table.from_pylist(table.to_pylist(), schema))
    return sink.getvalue().to_pybytes()


@per_example
@given(table=plain_tables())
def test_both_write_the_same_table(tmp_path, eager, table):
    theirs, ours = tmp_path / "polars.parquet", tmp_path / "arrow.parquet"
    write_table(table, theirs)
    parquet_polars._by_arrow(iter([table]), table.schema, ours)
    event(f"written by {writer(theirs)[0]}")
    got, expected = pq.read_table(theirs), pq.read_table(ours)
    assert got.schema.equals(expected.schema, check_metadata=True)
    plain = parquet_polars._plain(got.schema)
    assert bits(got, plain) == bits(expected, plain) == bits(table, plain)
    said = [pq.read_metadata(path).metadata for path in (theirs, ours)]
    assert said[0].keys() == said[1].keys()


@per_example
@given(records=runs())
@pytest.mark.parametrize("layout", ["full", "suffix"])
def test_rows_come_back(tmp_path, eager, records, layout):
    rows = tk.linearize(tk.from_records(records), "trl", layout=layout)
    path = tmp_path / "rows.parquet"
    # no batches are none of any layout
    write_rows(rows.to_batches(max_chunksize=2) or rows, path)
    assert not len(rows) or writer(path)[0] == "polars"
    got = tk.read_rows(path)
    assert got.equals(rows)
    assert got.schema.equals(rows.schema, check_metadata=True)


def test_the_bytes_of_numbers_are_kept(tmp_path, eager):
    bits = np.array([0x7FC00001, 0xFFC00002, 0x80000000, 1], np.uint32)
    numbers = pa.array(bits.view(np.float32))
    table = pa.table({"x": pa.LargeListArray.from_arrays([0, 4], numbers)})
    path = tmp_path / "x.parquet"
    write_table(table, path)
    assert writer(path)[0] == "polars"
    got = pq.read_table(path)["x"].combine_chunks().values.to_numpy()
    assert got.view(np.uint32).tolist() == bits.tolist()


def test_row_groups_have_about_so_many_bytes(tmp_path, eager, monkeypatch):
    rows = rows_of(*[100] * 64)
    monkeypatch.setattr(limits, "POLARS_GROUP_BYTES", rows.nbytes // 4)
    path = tmp_path / "rows.parquet"
    write_rows(rows.to_batches(max_chunksize=5), path)
    assert writer(path)[0] == "polars"
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(k) for k in range(file.num_row_groups)]
    assert len(groups) >= 4
    assert all(12 <= group.num_rows <= 16 for group in groups[:-1])
    assert tk.read_rows(path).equals(rows)


def test_where_rows_grow_arrow_writes_on(tmp_path, eager, monkeypatch):
    rows = rows_of(*[4] * 40, *[4000] * 8, *[4] * 3)
    first = rows.slice(0, 10)
    monkeypatch.setattr(limits, "POLARS_FILE_BYTES", first.nbytes)
    monkeypatch.setattr(limits, "POLARS_GROUP_BYTES", first.nbytes)
    monkeypatch.setattr(limits, "MAX_POLARS_GROUP_BYTES", 8 * first.nbytes)
    path = tmp_path / "rows.parquet"
    for most, expected in ((40, "arrow"), (1000, "polars")):
        monkeypatch.setattr(limits, "MAX_POLARS_GROUP_BYTES", most * first.nbytes)
        write_rows(rows.to_batches(max_chunksize=1), path)
        assert writer(path)[0] == expected
        assert tk.read_rows(path).equals(rows)
        assert os.listdir(tmp_path) == ["rows.parquet"]


@pytest.mark.parametrize("at", [0, 1, 3])
def test_what_the_caller_raises_comes_back(tmp_path, eager, at):
    class OddError(Exception):
        pass

    def batches():
        for k, batch in enumerate(rows_of(*[5] * 6).to_batches(max_chunksize=1)):
            if k == at:
                raise OddError("as it was")
            yield batch

    path = tmp_path / "rows.parquet"
    path.write_text("as it was")
    with pytest.raises(OddError, match="as it was"):
        write_rows(batches(), path)
    assert path.read_text() == "as it was"
    assert os.listdir(tmp_path) == ["rows.parquet"]


def test_tables_of_two_schemas_are_refused(tmp_path, eager):
    one = rows_of(5)
    more = one.append_column("note", pa.array(["x"]))
    batches = chain(one.to_batches(), more.to_batches())
    with pytest.raises(SchemaError, match="the batches do not make one table"):
        write_rows(batches, tmp_path / "rows.parquet")
    assert not os.listdir(tmp_path)


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(pa.array([[b"ab"]], pa.list_(pa.binary(2))), id="fixed width"),
        pytest.param(pa.array([[(1, 2)]], pa.map_("i4", "i4")), id="map"),
        pytest.param(pa.array([[1]], pa.list_(pa.timestamp("s"))), id="time"),
        pytest.param(pa.array([[1]], pa.list_(pa.int32(), 1)), id="fixed size"),
        pytest.param(pa.array([[1.5]], pa.list_(pa.float16())), id="half"),
        pytest.param(
            pa.array([{"x": 1}], pa.struct([pa.field("x", "i4", nullable=False)])),
            id="a field without nulls",
        ),
        pytest.param(pa.array([1]), id="no list"),
    ],
)
def test_what_polars_would_change_or_not_speed_up_is_arrows(tmp_path, eager, column):
    assert not parquet_polars._suits_polars(pa.schema([("x", column.type)]))
    table = pa.table({"x": column})
    if not pa.types.is_integer(column.type):
        table = table.append_column("ids", pa.array([[1, 2]]))
    write_table(table, tmp_path / "x.parquet")
    assert writer(tmp_path / "x.parquet")[0] == "arrow"
    assert pq.read_table(tmp_path / "x.parquet")["x"].to_pylist() == column.to_pylist()


def test_views_are_plain_text_before_either_writes_them(tmp_path, eager):
    table = pa.table({"x": pa.array([["a"]], pa.list_(pa.string_view()))})
    assert not parquet_polars._suits_polars(table.schema)
    write_table(table, tmp_path / "x.parquet")
    assert writer(tmp_path / "x.parquet")[0] == "polars"
    found = pq.read_table(tmp_path / "x.parquet")["x"]
    assert (found.type, found.to_pylist()) == (pa.list_(pa.large_string()), [["a"]])


def test_metadata_that_is_no_text_is_arrows(tmp_path, eager):
    table = pa.table({"ids": pa.array([[1, 2]])}).replace_schema_metadata(
        {b"k": b"\xff"}
    )
    write_table(table, tmp_path / "x.parquet")
    assert writer(tmp_path / "x.parquet")[0] == "arrow"
    assert pq.read_schema(tmp_path / "x.parquet").metadata == {b"k": b"\xff"}


@pytest.mark.parametrize("found", [None, "1.40.0"])
def test_without_polars_arrow_writes(tmp_path, monkeypatch, found):
    def version(name):
        if found is None:
            raise PackageNotFoundError(name)
        return found

    monkeypatch.setattr(limits, "POLARS_FILE_BYTES", 1)
    monkeypatch.setattr(parquet_polars, "version", version)
    monkeypatch.setattr(
        parquet_polars, "_polars_works", parquet_polars._polars_works.__wrapped__
    )
    rows = rows_of(5, 6)
    write_rows(rows, tmp_path / "rows.parquet")
    assert writer(tmp_path / "rows.parquet")[0] == "arrow"
    assert tk.read_rows(tmp_path / "rows.parquet").equals(rows)


def test_the_child_of_a_fork_leaves_polars_alone(tmp_path, eager):
    rows = rows_of(5, 6)
    write_rows(rows, tmp_path / "before.parquet")
    with warnings.catch_warnings():
        # there are threads, which is what this is about
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        code = 1
        signal.alarm(30)  # it would wait for threads that it does not have
        try:
            write_rows(rows, tmp_path / "child.parquet")
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert writer(tmp_path / "before.parquet")[0] == "polars"
    assert writer(tmp_path / "child.parquet")[0] == "arrow"


def test_a_small_file_does_without_polars(tmp_path):
    program = f"""
import sys, trajkit as tk
call = {{"session_id": "a", "prompt_ids": [1], "output_ids": [2]}}
tk.write_rows(tk.linearize(tk.from_records([call])), {str(tmp_path / "x.parquet")!r})
assert "polars" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)

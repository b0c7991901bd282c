"""Tables of any columns: put in another order, sorted out, written and read."""

import io
from unittest import mock

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.strategies import columns_of_any_type, runs
from trajkit.errors import FormatError, SchemaError
from trajkit.tables import limits
from trajkit.tables.columns import take_rows

TEXT = "longer than what a view holds in itself"


def scattered():
    """Turns of two sessions that take turns, with texts of polars."""
    records = [
        {"session_id": name, "prompt_ids": [1, 2], "output_ids": [3], "who": TEXT}
        for _ in range(2)
        for name in "ba"
    ]
    turns = tk.from_records(records)
    frame = pl.DataFrame(turns).with_columns(
        tags=pl.Series([["a", TEXT], None, [], [None]]),
        about=pl.Series([{"k": TEXT}, None, {"k": None}, {"k": ""}]),
        data=pl.Series([b"a", None, TEXT.encode(), b""]),
        kind=pl.Series(["u", None, "v", "u"], dtype=pl.Categorical),
    )
    return frame[[1, 2, 0, 3]]


@given(st.data(), st.integers(1, 6))
def test_rows_of_any_type_are_picked(data, n):
    table = data.draw(columns_of_any_type(n))
    rows = data.draw(st.lists(st.integers(0, n - 1), max_size=8))
    found = take_rows(table, pa.array(rows, pa.int64()))
    found.validate(full=True)
    assert found.schema.equals(table.schema, check_metadata=True)
    whole = table.to_pylist()
    assert found.to_pylist() == [whole[row] for row in rows]


def test_a_column_that_has_no_order_is_named():
    runs = pa.RunEndEncodedArray.from_arrays([2], ["a"])
    with pytest.raises(SchemaError, match="column 'x' has the type run_end_encoded"):
        take_rows(pa.table({"x": runs}), pa.array([1, 0]))


def test_scattered_turns_of_polars_are_gathered(tmp_path):
    frame = scattered()
    expected = frame[[2, 0, 1, 3]].to_dicts()
    names = frame.columns
    assert tk.read_turns(frame).select(names).to_pylist() == expected
    frame.write_ipc(tmp_path / "log.arrow")
    for n_bytes in (1 << 20, 1):
        with mock.patch.multiple(limits, BUCKET_BYTES=n_bytes, SPILL_BYTES=n_bytes):
            batches = list(tk.scan_turns(tmp_path / "log.arrow"))
        assert pa.Table.from_batches(batches).select(names).to_pylist() == expected


def test_payloads_of_texts():
    turns = tk.read_turns(scattered())
    texts = pa.array([[TEXT]] * 4, pa.large_list(pa.string_view()))
    rows = tk.linearize(turns.append_column("seen", texts), payloads=["seen"])
    assert rows["seen"].type == texts.type
    assert rows["seen"].to_pylist() == [[None, None, TEXT]] * len(rows)


# Every form, reader and writer


@given(st.data(), runs(), st.sampled_from(["parquet", "arrow", "arrows"]))
def test_further_columns_of_any_type_come_back(data, records, format):
    """From compact and expand, and from every file, in the types that it has."""
    turns = tk.from_records(records)
    n = turns.num_rows
    for field, column in zip(
        (further := data.draw(columns_of_any_type(n))).schema,
        further.columns,
        strict=True,
    ):
        turns = turns.append_column(field, column)
    delta = tk.compact(turns)
    assert tk.expand(delta).equals(turns)
    for expected in (turns, delta):
        file = io.BytesIO()
        tk.write_turns(expected, file, format=format)
        back = tk.read_turns(io.BytesIO(file.getvalue()))
        assert back.to_pylist() == expected.to_pylist()
        if format != "parquet":
            assert back.equals(expected)


def test_categories_and_parts_of_structs_go_into_parquet(tmp_path):
    frame = scattered().with_columns(
        order=pl.Series(["v", "u", None, "u"], dtype=pl.Enum(["u", "v"]))
    )
    turns = tk.read_turns(frame)
    tk.write_turns(turns.to_batches(max_chunksize=1), tmp_path / "turns.parquet")
    back = tk.read_turns(tmp_path / "turns.parquet")
    assert back.to_pylist() == turns.to_pylist()
    assert back.schema.field("order").type.ordered


def test_a_type_that_parquet_has_not_is_named(tmp_path):
    turns = tk.read_turns(scattered())
    spans = pa.nulls(len(turns), pa.month_day_nano_interval())
    with pytest.raises(FormatError, match="Parquet cannot store column 'span' of type"):
        tk.write_turns(turns.append_column("span", spans), tmp_path / "turns.parquet")
    assert list(tmp_path.iterdir()) == []

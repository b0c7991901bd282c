"""Integers in thrift's compact protocol."""

import io
import random
import struct

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trajkit as tk
from benchmarks.fuzz_files import records
from trajkit.io.thrift import ThriftStruct


def test_the_offsets_of_all_columns_are_those_that_arrow_reads():
    sink = io.BytesIO()
    turns = tk.from_records(records(random.Random(1), 40))
    pq.write_table(turns, sink, row_group_size=7, use_dictionary=["session_id", "note"])
    content = sink.getvalue()
    (size,) = struct.unpack("<I", content[-8:-4])
    footer, known = ThriftStruct(content[-8 - size : -8]), pq.read_metadata(sink)
    assert footer.n_bytes == size
    assert footer.i64(3) == turns.num_rows
    for group in range(known.num_row_groups):
        for k in range(known.num_columns):
            column = known.row_group(group).column(k)
            at = (4, group, 1, k, 3)
            assert footer.i64(*at, 5) == column.num_values
            assert footer.i64(*at, 7) == column.total_compressed_size
            assert footer.i64(*at, 9) == column.data_page_offset
            assert footer.i64(*at, 11) == (column.dictionary_page_offset or 0)


def test_a_field_of_another_kind_counts_as_missing():
    found = ThriftStruct(b"\x15\x0e\x16\x10\x00")
    assert (found.i32(1), found.i64(1), found.i32(2), found.i64(2)) == (7, 0, 0, 8)


def test_numbers_have_64_bits_and_a_negative_one_counts_as_missing():
    most = b"\xfe" + 8 * b"\xff"
    assert ThriftStruct(b"\x16" + most + b"\x01\x00").i64(1) == (1 << 63) - 1
    assert ThriftStruct(b"\x16" + most + b"\x7f\x00").i64(1) == (1 << 63) - 1
    assert ThriftStruct(b"\x16\x01\x00").i64(1) == 0


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"\x16\x02\x06\x02\x04\x00", r"states field \(1,\) twice"),
        (b"\x06\x01\x02\x00", "has a field -1"),
        (b"\x06\x80\x80\x08\x02\x00", "has a field 65536"),
        (b"\x1b\x00", "a field of the kind 11"),
        (13 * b"\x1c" + 14 * b"\x00", "a field of the kind 12"),
    ],
)
def test_what_no_writer_states_is_refused(data, said):
    with pytest.raises(pa.ArrowInvalid, match=said):
        ThriftStruct(data)


@pytest.mark.parametrize("data", [b"", b"\x16", b"\x18\xff\x7f", b"\x19\xf6\xff\x7f"])
def test_data_that_end_before_the_struct_do_not_read_on(data):
    with pytest.raises(IndexError):
        ThriftStruct(data)

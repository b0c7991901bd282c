"""Damaged and hostile input: refused with words, never a crash, never a wrong table."""

import gzip
import json
from io import BytesIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import trajkit as tk
from tests.file_stages import linearize_file
from tests.fuzz import files as fuzz_files
from tests.made_tables import replaced
from tests.test_wrong_arguments import RIGHT, used
from trajkit.files import jsonl
from trajkit.importers.containers import objects
from trajkit.tables.canonical import as_table, check_buffers
from trajkit.turns.records import MAX_DEPTH

CALL = {"session_id": "a", "prompt_ids": [1, 2], "output_ids": [3, 4]}
TURNS = tk.from_records(
    {**CALL, "session_id": session, "prompt_ids": prompt}
    for session in "abc"
    for prompt in ([1, 2], [1, 2, 3, 4, 5])
)
LINKS = tk.link(TURNS)
DRIFT = tk.classify_drift(TURNS, LINKS)
ROWS = tk.linearize(TURNS)
SESSIONS = pa.table({"session_id": [*"abc"], "reward": [1.0] * 3})


def decreasing(table, name="session_id"):
    """The table with offsets of a column that fall within it."""
    column = table.column(name).combine_chunks()
    if pa.types.is_dictionary(column.type):
        column = column.cast(pa.string())
    kind = np.int64 if pa.types.is_large_list(column.type) else np.int32
    offsets = np.frombuffer(column.buffers()[1], kind).copy()
    offsets[1], offsets[2] = offsets[-1] + 40_000_000, offsets[0]
    children = [column.values] if pa.types.is_large_list(column.type) else None
    buffers = [None, pa.py_buffer(offsets), *(() if children else column.buffers()[2:])]
    bad = pa.Array.from_buffers(column.type, len(column), buffers, children=children)
    return replaced(table, name, bad)


def open_file(write, **options):
    return lambda table: write(table, BytesIO(), format="arrow", **options)


FACTS = {"turns": TURNS, "links": LINKS, "drift": DRIFT}
# a function, arguments that it takes, and which of these is damaged
TAKES = [
    *(
        (function, arguments, name)
        for function, arguments in RIGHT.items()
        for name, value in arguments.items()
        if isinstance(value, pa.Table) and "session_id" in value.column_names
    ),
    *((tk.linearize, FACTS, name) for name in ("links", "drift")),
    *((tk.linearize, {"turns": TURNS, n: SESSIONS}, n) for n in ("sessions", "reward")),
    *((read, {"source": TURNS}, "source") for read in (tk.read_turns, tk.scan_turns)),
    *((read, {"source": ROWS}, "source") for read in (tk.read_rows, tk.scan_rows)),
    (tk.read_sessions, {"source": SESSIONS}, "source"),
    (open_file(tk.write_turns), {"table": TURNS}, "table"),
    (open_file(tk.write_rows), {"table": ROWS}, "table"),
    (open_file(tk.write_rows, dedup=True), {"table": ROWS}, "table"),
]
NAME = r"column 'session_id' is not valid Arrow data: .*offset"


@pytest.mark.parametrize(("function", "arguments", "name"), TAKES)
def test_a_table_with_bad_offsets_is_refused_by_every_function(
    function, arguments, name
):
    used(function(**arguments))
    with pytest.raises(tk.errors.LayoutError, match=NAME):
        used(function(**{**arguments, name: decreasing(arguments[name])}))


@pytest.mark.parametrize(
    "stage",
    [
        tk.linearize_batches,
        tk.link_batches,
        tk.compact_batches,
        tk.validate_batches,
        tk.simulate,
        lambda turns: tk.verify_batches(ROWS, turns),
        lambda turns: tk.write_turns(turns, BytesIO(), format="arrows"),
    ],
)
def test_a_batch_with_bad_offsets_is_refused_by_every_stream(stage):
    bad = decreasing(TURNS).to_batches()
    for turns in (iter(bad), pa.RecordBatchReader.from_batches(bad[0].schema, bad)):
        with pytest.raises(tk.errors.LayoutError, match=NAME):
            list(stage(turns))


def buffer(values, kind):
    return pa.py_buffer(np.array(values, kind))


def lists(offsets, values, validity=None):
    return pa.Array.from_buffers(
        pa.large_list(values.type),
        len(offsets) - 1,
        [validity, buffer(offsets, "i8")],
        children=[values],
    )


def texts(offsets, content):
    return pa.Array.from_buffers(
        pa.string(), len(offsets) - 1, [None, buffer(offsets, "i4"), content]
    )


IDS = pa.array(np.arange(100_000, dtype=np.int32))
LETTERS = pa.py_buffer(b"a" * 400_000)


def names(indices):
    codes = pa.array(indices, pa.int8())
    return pa.DictionaryArray.from_arrays(codes, pa.array(["x", "y"]), safe=False)


def of_struct(child):
    return pa.StructArray.from_arrays([child], ["child"])


INVALID = {
    "decreasing offsets": lists([0, 3, 2, 5], IDS),
    "offsets in another list": lists([0, 200_000, 4, 5], IDS),
    "offsets under a null": lists([0, 3, 2, 5], IDS, buffer([0b101], "u1")),
    "offsets of text": texts([0, 9_000_000, 1, 2], LETTERS),
    "split UTF-8": texts([0, 1, 2, 2], pa.py_buffer("é".encode() * 200_000)),
    "no UTF-8": texts([0, 1, 2, 3], pa.py_buffer(b"\xff" * 400_000)),
    "an index past the dictionary": names([0, 1, 2]),
    "a negative index": names([0, -1, 1]),
    "a list in a list": lists([0, 1, 2, 3], lists([0, 70_000, 3, 5], IDS)),
    "text in a struct": of_struct(texts([0, 9_000_000, 1, 2], LETTERS)),
    "an index in a list": lists([0, 1, 2, 3], names([0, 1, 7])),
    "text in a list of structs": lists(
        [0, 1, 2, 3], of_struct(texts([0, 9_000_000, 1, 2], LETTERS))
    ),
}


@pytest.mark.parametrize("n", [3, 2])
@pytest.mark.parametrize("name", INVALID)
def test_an_invalid_layout_is_found_in_a_table_and_in_a_slice(name, n):
    table = pa.table({"good": [1, 2, 3], "bad": INVALID[name]}).slice(3 - n)
    with pytest.raises(tk.errors.LayoutError, match="column 'bad' is not valid"):
        as_table(table)


def test_what_a_slice_does_not_show_is_not_looked_at():
    hidden = lists([0, 1, 3, 4], texts([0, 1, 2, 9, 3], LETTERS))
    with pytest.raises(tk.errors.LayoutError):
        check_buffers(pa.table({"bad": hidden}))
    check_buffers(pa.table({"bad": hidden}).slice(0, 2))


@pytest.mark.parametrize(
    ("column", "match"),
    [
        ({"naïve": [1] * 6}, "turns.arrows is damaged, or not valid Arrow IPC: "),
        ({"odd": [{"naïve": 1}] * 6}, "turns.arrows .* column 'odd' is not valid"),
    ],
)
def test_a_name_that_is_no_text_is_refused(tmp_path, column, match):
    path = tmp_path / "turns.arrows"
    for name, values in column.items():
        tk.write_turns(TURNS.append_column(name, pa.array(values)), path)
    path.write_bytes(path.read_bytes().replace("ï".encode(), b"\xff\xff"))
    with pytest.raises(tk.errors.FormatError, match=match):
        tk.read_turns(path)


def test_policies_that_read_bodies_refuse_bodies_that_are_not_text():
    """Others neither read nor return them, and refuse such a name of a session."""
    record = {"session_id": "a", "prompt_ids": [1], "output_ids": [2]}
    message = {"role": "user", "content": "x" * (1 << 19)}
    table = tk.from_records([{**record, "prompt_messages": [message]}])
    column = table["messages"].combine_chunks()
    key, role, body = column.values.flatten()
    text = pa.py_buffer(body.buffers()[2].to_pybytes().replace(b"x", b"\xff"))
    body = pa.Array.from_buffers(body.type, 1, [None, body.buffers()[1], text])
    struct = pa.StructArray.from_arrays(
        [key, role, body], fields=list(column.type.value_type)
    )
    column = pa.LargeListArray.from_arrays(column.offsets, struct, type=column.type)
    table = replaced(table, "messages", column)
    rows = tk.linearize(table, "faithful")
    assert rows["input_ids"].to_pylist() == [[1, 2]]
    for stage in (tk.linearize, tk.linearize_batches):
        with pytest.raises(tk.errors.LayoutError, match=r"column 'messages' .* UTF8"):
            list(stage(table, "segments"))
    for stage in (tk.validate, tk.compact, tk.link):
        with pytest.raises(tk.errors.LayoutError, match=r"column 'messages' .* UTF8"):
            stage(table)


@pytest.mark.parametrize("name", ["arrow", "arrows", "parquet", "jsonl", "gz", "zst"])
def test_damaged_files_are_refused_or_read_as_they_are(name):
    counts, failed = fuzz_files.run(name, 0, 12, 600, limit=False)
    assert failed == []
    assert counts["refused"] > 0
    assert sum(counts.values()) == 12


def nested(levels, opening="["):
    closing = "]" if opening == "[" else "}"
    return opening * levels + "1" + closing * levels


def line(**values):
    text = json.dumps({**CALL, **dict.fromkeys(values, "@")})
    for value in values.values():
        text = text.replace('"@"', value, 1)
    return text


@pytest.mark.parametrize("levels", [MAX_DEPTH + 1, 400])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_a_column_nested_too_deep_is_the_session_s_error(tmp_path, levels, opening):
    path = tmp_path / "log.jsonl"
    text = line(odd=nested(levels, opening))
    path.write_text(f"{text}\n{line(session_id=chr(34) + 'b' + chr(34))}\n")
    with pytest.raises(
        tk.errors.InvalidTurnsError, match=r"'a', turn 0: .*'odd' is nested"
    ):
        tk.read_turns(path)
    aside, rows = tmp_path / "aside.parquet", tmp_path / "rows.parquet"
    assert linearize_file(path, rows, rejected=aside)["rejected"] == 1
    assert tk.read_rows(rows)["session_id"].to_pylist() == ["b"]
    path.write_text(f'{{"session_id": "a", "odd": {nested(levels, opening)}}}')
    with pytest.raises(
        tk.errors.FormatError, match=r"log.jsonl: a value of 'odd' is nested"
    ):
        tk.read_sessions(path)


def test_a_column_nested_as_deep_as_allowed_is_kept(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text(line(odd=nested(MAX_DEPTH)))
    turns = tk.read_turns(path)
    for name in ("turns.parquet", "turns.arrow"):
        tk.write_turns(turns, tmp_path / name)
        assert tk.read_turns(tmp_path / name).equals(turns)


@pytest.mark.parametrize("name", ["session_id", "prompt_ids", "weight_versions", "odd"])
@pytest.mark.parametrize("levels", [20_000, 200_000])
def test_a_line_nested_too_deep_is_refused(tmp_path, name, levels):
    path = tmp_path / "log.jsonl"
    path.write_text(line(**{name: nested(levels)}))
    with pytest.raises(
        tk.errors.FormatError, match=r"log.jsonl, line 1.*nested too deep"
    ):
        tk.read_turns(path)


def test_the_recorder_refuses_a_value_nested_too_deep():
    recorder = tk.Recorder()
    value = json.loads(nested(900))
    with pytest.raises(tk.errors.InvalidTurnsError, match="'odd' is nested deeper"):
        recorder.record("a", prompt_ids=[1], output_ids=[2], payloads={"odd": value})


def test_the_length_of_a_line_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "log.jsonl.gz"
    text = line()
    path.write_bytes(gzip.compress(f"{text}\n".encode() + b" " * (64 << 20)))
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1 << 20)
    with pytest.raises(
        tk.errors.FormatError, match=r"jsonl.gz, line 2: .* than 1048576 bytes"
    ):
        tk.read_turns(path)
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", len(text) - 1)
    path.write_bytes(gzip.compress(f"{text}\n".encode()))
    with pytest.raises(tk.errors.FormatError, match="line 1: "):
        tk.read_turns(path)
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", len(text))
    assert tk.read_turns(path).num_rows == 1


def test_the_length_of_a_foreign_file_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "log.json.gz"
    path.write_bytes(gzip.compress(b"[\n" + (b" " * 1000 + b"\n") * 4000))
    monkeypatch.setattr(jsonl, "MAX_LINE_BYTES", 1 << 20)
    [(_, found)] = objects(path, "json")
    assert "log.json.gz is longer than 1048576 bytes" in found.detail
    path.write_bytes(gzip.compress(b" " * (4 << 20)))
    with pytest.raises(
        tk.errors.FormatError, match=r"log\.json\.gz, line 1: .* longer"
    ):
        list(objects(path, "json"))


def bad_page(content, group):
    column = group.column(2)  # prompt_ids
    content[column.data_page_offset + column.total_compressed_size - 1] ^= 1


def page_of_another_kind(*columns):
    """Arrow passes over such pages."""

    def change(content, group):
        for column in columns:
            kind = group.column(column).data_page_offset + 1  # the header's first field
            assert content[kind] == 0
            content[kind] = 32

    return change


def fewer_values(content, group):
    assert group.column(2).num_values == 21
    # the field num_values of the page's header: 42 stands for 21
    at = content.index(b"\x1c\x15\x2a", group.column(2).data_page_offset)
    content[at + 2] = 0x28


def with_footer(change):
    """A change of a Parquet file's footer."""

    def changed(content, group):
        size = int.from_bytes(content[-8:-4], "little")
        footer = change(bytes(content[-8 - size : -8]))
        content[-8 - size :] = footer + len(footer).to_bytes(4, "little") + b"PAR1"

    return changed


def longer_histogram(footer):
    """Five definition levels of token ids, which have four."""
    at = footer.index(b"\x19\x46")  # field 3 of SizeStatistics, a list of four i64
    return footer[:at] + b"\x19\x56\x00" + footer[at + 2 :]


DAMAGED_PARQUET = {
    "page": (bad_page, "CRC"),
    "kind of a page": (page_of_another_kind(2), "row group 0 has 0 rows of 6"),
    "kinds of pages": (page_of_another_kind(0, 1), "row group 0 has 0 rows of 6"),
    "values": (fewer_values, r"has \[20\] of \[21\] values in 'prompt_"),
    "histogram": (
        with_footer(longer_histogram),
        "histogram size mismatch, size: 5, expected: 4",
    ),
    "footer": (
        with_footer(lambda old: b"\xa6\x00" + old[:1]),
        "Couldn't deserialize thrift",
    ),
}


@pytest.mark.parametrize("name", DAMAGED_PARQUET)
def test_damaged_parquet_is_found(tmp_path, name):
    change, said = DAMAGED_PARQUET[name]
    path = tmp_path / "turns.parquet"
    tk.write_turns(TURNS, path)
    content = bytearray(path.read_bytes())
    change(content, pq.ParquetFile(path).metadata.row_group(0))
    path.write_bytes(content)
    for read in (tk.read_turns, lambda path: list(tk.scan_turns(path))):
        with pytest.raises(
            tk.errors.FormatError, match=rf"turns.parquet is damaged.*{said}"
        ):
            read(path)


def test_columns_that_trajkit_does_not_write_are_read_from_parquet(tmp_path):
    path = tmp_path / "turns.parquet"
    odd = {
        "list of structs": pa.array([[{"a": [1]}], [None], [], None, [{"a": []}], []]),
        "tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((6, 2, 2))),
        "dotted.name": pa.array([[1]] * 6),
        "dotted": pa.array([[1, 2]] * 6),
    }
    turns = TURNS
    for name, array in odd.items():
        turns = turns.append_column(name, array)
    pq.write_table(turns, path, row_group_size=4)
    assert tk.read_turns(path).equals(turns)

import gzip
import io
import json
import os
import resource
import tempfile
from codecs import BOM_UTF8
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from unittest import mock

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import trajkit as tk
from tests.file_stages import compact_file, linearize_file
from tests.made_tables import policy_of
from tests.strategies import json_messages, policies, row_limits, runs, session_lines
from trajkit import schema
from trajkit.errors import (
    ArgumentError,
    FormatError,
    InvalidTurnsError,
    SchemaError,
    TornLogWarning,
)
from trajkit.files.tables import (
    read_rows,
    read_turns,
    write_rows,
    write_table,
    write_turns,
)
from trajkit.schema import SESSIONS
from trajkit.tables import limits
from trajkit.turns.validation import validate

FORMATS = ["parquet", "arrow", "arrows", "jsonl", "jsonl.gz", "jsonl.zst"]
SUFFIXES = [*FORMATS, "feather", "ipc", "ndjson"]

CALL = {
    "session_id": "a",
    "prompt_ids": [1, 2],
    "output_ids": [3, 4],
    "output_logprobs": [-0.1, None],
    "prompt_messages": [{"role": "user", "content": 'é"\u2028\ud800'}],
    "response_message": {"role": "assistant", "tool_calls": [{"a": 1.0}]},
    "weight_versions": [{"version": "7", "start": 0, "stop": 2}],
    "agent_id": "main",
}
OTHER = {**CALL, "session_id": "b", "prompt_messages": None, "output_logprobs": None}

per_example = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25
)


@pytest.fixture
def turns():
    return tk.from_records([CALL, CALL, OTHER, CALL])


@pytest.fixture
def rows(turns):
    return tk.linearize(turns, policy="slime", reward=0.5)


def torn_read(path):
    with pytest.warns(TornLogWarning) as caught:
        table = read_turns(path)
    (warning,) = caught
    return table, str(warning.message)


@per_example
@given(st.lists(json_messages, max_size=3))
@example([{"role": "user", "content": json.loads("[" * 300 + "]" * 300)}])
def test_any_message_survives_json_lines(messages):
    turns = tk.from_records([{**CALL, "prompt_messages": messages}] * 2)
    file = io.BytesIO()
    write_turns(turns, file, format="jsonl")
    back = read_turns(io.BytesIO(file.getvalue()))
    assert back.equals(turns)
    assert validate(back).equals(turns)


@pytest.mark.parametrize("format", FORMATS)
def test_tables_without_rows_survive(tmp_path, format):
    log, rows = tmp_path / f"log.{format}", tmp_path / f"rows.{format}"
    in_tables = format in TABLES
    plans = [schema.TURNS, schema.TURNS_DELTA] if in_tables else [schema.TURNS]
    for plan in plans:
        write_turns(plan.empty_table(), log)
        assert read_turns(log).schema.equals(plan)
        assert [batch.schema for batch in tk.scan_turns(log)] == [plan]
        assert linearize_file(log, rows, dedup=in_tables)["sessions"] == 0
        assert read_rows(rows).num_rows == 0
    assert compact_file(log, tmp_path / "again.parquet") == {"turns": 0}
    assert read_turns(tmp_path / "again.parquet").schema.equals(schema.TURNS_DELTA)


def test_json_lines_have_no_delta_form(turns):
    with pytest.raises(FormatError, match="delta form"):
        write_turns(tk.compact(turns), io.BytesIO(), format="jsonl")


def test_a_directory_is_one_log(tmp_path, turns):
    write_turns(turns[:1], tmp_path / "1.parquet")
    (tmp_path / "sub").mkdir()
    write_turns(turns[1:2], tmp_path / "sub" / "2.arrows")
    write_turns(turns[2:], tmp_path / "0.arrow")
    (tmp_path / "notes.txt").write_text("not ours")
    (tmp_path / ".hidden.jsonl").write_text("not JSON")
    assert read_turns(tmp_path).equals(turns)


def test_an_empty_directory_is_refused(tmp_path):
    with pytest.raises(FormatError, match="no file of a known format"):
        read_turns(tmp_path)


def test_long_turns_make_many_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "ROW_GROUP_BYTES", 1000)
    records = ({**OTHER, "prompt_ids": range(100)} for _ in range(8))
    write_turns(tk.from_records(records), tmp_path / "x.parquet")
    with pq.ParquetFile(tmp_path / "x.parquet") as file:
        assert file.metadata.num_row_groups > 1


def test_json_lines_keep_what_json_can_say():
    now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    record = {**CALL, "started_at": now, "note": None, "use_tool": None}
    file = io.BytesIO()
    write_turns(tk.from_records([record]), file, format="jsonl")
    line = json.loads(file.getvalue())
    assert line["started_at"] == "2026-01-02T03:04:05+00:00"
    assert line["prompt_messages"] == CALL["prompt_messages"]
    assert line["use_tool"] is None
    assert "finish_reason" not in line
    (row,) = read_turns(io.BytesIO(file.getvalue())).to_pylist()
    assert row["use_tool"] is None


# torn logs


def stream_of(turns):
    file = io.BytesIO()
    write_turns(turns.to_batches(max_chunksize=1), file, format="arrows")
    return file.getvalue()


def test_a_stream_without_its_end_is_whole(tmp_path, turns):
    path = tmp_path / "x.arrows"
    path.write_bytes(stream_of(turns)[:-8])
    assert read_turns(path).equals(turns)


def test_a_stream_cut_anywhere_gives_its_whole_batches(tmp_path, turns):
    data = stream_of(turns)
    path = tmp_path / "x.arrows"
    ends = []
    with pa.BufferReader(data) as file:
        reader = pa.ipc.open_stream(file)
        ends.append(file.tell())
        for _ in reader:
            ends.append(file.tell())
    # the iteration has read ahead of what it gave: the end of each batch is known after
    assert len(ends) == 5
    cuts = {1, 7, *(end + k for end in ends for k in (-9, -1, 1, 3, 4, 7))}
    for cut in sorted(cut for cut in cuts if cut < len(data)):
        path.write_bytes(data[:cut])
        back, message = torn_read(path)
        whole = max(sum(end <= cut for end in ends) - 1, 0)
        good = ends[whole] if cut >= ends[0] else 0
        assert back.num_rows == whole
        assert message == (
            f"{path} ends within an entry: its last {cut - good} bytes, from byte "
            f"{good} on, were left out"
        )


def test_a_log_that_never_began_is_empty(tmp_path):
    path = tmp_path / "x.arrows"
    path.write_bytes(b"")
    back, message = torn_read(path)
    assert back.equals(schema.TURNS.empty_table())
    assert "its writer stopped before the schema" in message


def test_streams_appended_to_one_another_are_one_log(tmp_path, turns):
    path = tmp_path / "x.arrows"
    path.write_bytes(stream_of(turns[:2]) + stream_of(turns[2:]))
    assert read_turns(path).equals(turns)


def test_a_stream_broken_within_is_refused(tmp_path, turns):
    data = bytearray(stream_of(turns))
    with pa.BufferReader(bytes(data)) as file:
        pa.ipc.open_stream(file)
        at = file.tell()
    data[at + 8 : at + 40] = b"\x7f" * 32
    path = tmp_path / "x.arrows"
    path.write_bytes(data)
    with pytest.raises(FormatError, match=f"not an Arrow IPC stream at byte {at}"):
        read_turns(path)


def test_a_torn_last_line_is_left_out(tmp_path, turns):
    path = tmp_path / "x.jsonl"
    write_turns(turns, path)
    text = path.read_bytes()
    path.write_bytes(text[:-1])
    assert read_turns(path).equals(turns)
    path.write_bytes(text[:-9])
    back, message = torn_read(path)
    assert back.num_rows == turns.num_rows - 1
    assert message.startswith(f"{path} ends within line 4: its last ")


# what is no file of ours


@pytest.mark.parametrize("n_lines", [1, 2])
@pytest.mark.parametrize("end", [b"", b"\n"])
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json"])
def test_a_byte_order_mark_is_passed_over(tmp_path, turns, n_lines, end, suffix):
    plain, marked = tmp_path / "plain.jsonl", tmp_path / f"marked.{suffix}"
    write_turns(turns, plain)
    text = b"".join(plain.read_bytes().splitlines(keepends=True)[:n_lines]).rstrip()
    plain.write_bytes(text)
    text = BOM_UTF8 + text + end
    marked.write_bytes(gzip.compress(text) if suffix == "jsonl.gz" else text)
    assert read_turns(marked) == read_turns(plain)
    assert len(read_turns(marked)) == n_lines


@pytest.mark.parametrize("suffix", ["csv", "parquet.gz", "arrow.zst", "txt", ""])
def test_unknown_suffixes_are_refused(tmp_path, turns, suffix):
    path = tmp_path / f"x.{suffix}"
    with pytest.raises(ArgumentError, match=r"unknown suffix.*\.parquet") as found:
        write_turns(turns, path)
    assert ".json," not in str(found.value)  # JSON is written as lines
    path.touch()
    with pytest.raises(ArgumentError, match=r"suffix.*standard input: - < FILE"):
        read_turns(path)


# the time in its head would be in the names of tests
CUT_GZIP = gzip.compress(b'{"session_id": "a"}\n' * 100, mtime=0)[:-20]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("x.parquet", b"PAR1 no", "damaged, or not valid Parquet"),
        ("x.arrow", b"ARROW1\0\0 no", "damaged, or not valid Arrow IPC"),
        ("x.jsonl", b'{"a": 1,}\n', "x.jsonl, line 1, column 9: "),
        ("x.jsonl", b'{"a":\n', "x.jsonl, line 1, column 6: "),
        ("x.jsonl", b"{}\n{]\n{}\n", r"^\S*x.jsonl, line 2, column 2: Expect[\w ]+$"),
        ("x.jsonl", b"\n[1]\n", "line 2 is not a JSON object"),
        ("x.jsonl", b'"\xff"\n', "line 1: .*utf-8"),
        ("x.jsonl.gz", b"no gzip", "cannot be decompressed"),
        ("x.jsonl.gz", CUT_GZIP, "cannot be decompressed"),
        ("x.jsonl.zst", b"", "x.jsonl.zst is empty"),
        ("x.jsonl", CUT_GZIP, r"contains jsonl.gz: rename it"),
        ("x.jsonl", b"PAR1", r"contains parquet: rename it"),
        ("x.arrow", b'{"session_id": 1}', "Arrow IPC but contains jsonl: rename it"),
        ("x.arrows", CUT_GZIP, "Arrow IPC but contains jsonl.gz: rename it"),
    ],
    ids=str,
)
def test_broken_files_are_refused(tmp_path, name, content, match):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FormatError, match=match):
        read_turns(tmp_path / name)


def test_the_file_that_fills_a_disk_is_named(tmp_path, turns):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="writing bytes") as refused:
            write_turns(turns, tmp_path / "x.parquet")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.filename == str(tmp_path / "x.parquet")
    assert not [*tmp_path.iterdir()]


def test_a_link_that_leads_nowhere_is_no_reason_to_read_less(tmp_path, turns):
    write_turns(turns, tmp_path / "a.parquet")
    (tmp_path / "b.parquet").symlink_to("absent.parquet")
    with pytest.raises(FileNotFoundError, match=r"b.parquet"):
        read_turns(tmp_path)


def test_files_that_do_not_fit_together_are_refused(tmp_path, turns):
    write_turns(turns, tmp_path / "1.parquet")
    other = turns.drop_columns(["agent_id"]).append_column(
        "agent_id", pa.array([1] * turns.num_rows)
    )
    write_turns(other, tmp_path / "2.parquet")
    with pytest.raises(SchemaError, match="do not make one table"):
        read_turns(tmp_path)
    batches = [one.to_batches()[0] for one in (turns, other)]
    for name in ("a.parquet", "a.arrow", "a.arrows"):
        with pytest.raises(SchemaError, match="make one table: agent_id is missing in"):
            write_turns(iter(batches), tmp_path / name)


def piped(content):
    """A file that can only be read on."""
    source, sink = os.pipe()
    with open(sink, "wb") as file:
        file.write(content)
    return open(source, "rb")


@pytest.mark.parametrize("format", FORMATS)
def test_pipes_are_read_when_their_format_is_given(turns, format):
    file = io.BytesIO()
    write_turns(turns, file, format=format)
    with (
        piped(file.getvalue()) as pipe,
        pytest.raises(FormatError, match="pass format="),
    ):
        read_turns(pipe)
    with piped(file.getvalue()) as pipe:
        assert read_turns(pipe, format=format).equals(turns)


def test_open_files_say_what_they_are(turns):
    with pytest.raises(FormatError, match="open file has no suffix"):
        write_turns(turns, io.BytesIO())
    with pytest.raises(FormatError, match="begins with b'hello'"):
        read_turns(io.BytesIO(b"hello"))


def test_parquet_keeps_no_dictionary_of_what_is_per_token(tmp_path, turns, rows):
    for write, table in ((write_turns, turns), (write_rows, rows)):
        write(table, tmp_path / "x.parquet")
        group = pq.read_metadata(tmp_path / "x.parquet").row_group(0)
        columns = [group.column(i) for i in range(group.num_columns)]
        encodings = {one.path_in_schema: one.encodings for one in columns}
        for path, used in encodings.items():
            name = path.partition(".")[0]
            if name in ("prompt_ids", "output_ids", "input_ids"):
                assert "PLAIN" in used
                assert "RLE_DICTIONARY" not in used
            if name in ("output_logprobs", "logprobs"):
                assert "BYTE_STREAM_SPLIT" in used
            if name == "session_id":
                assert "RLE_DICTIONARY" in used
        assert {one.compression for one in columns} == {"ZSTD"}


def test_the_body_of_another_session_s_message_is_not_taken(tmp_path):
    """It may be another that has the same key, or be filtered out of the file."""
    said = {"prompt_messages": [{"role": "user", "content": "hello"}]}
    call = {"prompt_ids": [1], "output_ids": [2], **said}
    turns = tk.from_records([{"session_id": name, **call} for name in "ab"])
    lines = turns.to_pylist()
    lines[1]["messages"][0]["body"] = None
    bare = pa.Table.from_pylist(lines, turns.schema)
    path = tmp_path / "turns.jsonl"
    path.write_text("as it was")
    with pytest.raises(InvalidTurnsError, match=r"'b', turn 0: a user message has no"):
        tk.write_turns(bare, path)
    # a write that fails leaves nothing
    assert path.read_text() == "as it was"
    assert os.listdir(tmp_path) == ["turns.jsonl"]
    lines[1]["session_id"], lines[1]["turn_index"] = "a", 1
    tk.write_turns(pa.Table.from_pylist(lines, turns.schema), path)


def test_bytes_are_refused_by_json_lines(tmp_path):
    turns = tk.from_records([{**CALL, "digest": b"\x00\xff"}])
    with pytest.raises(FormatError, match=r"cannot store column 'digest': bytes b'"):
        write_turns(turns, tmp_path / "turns.jsonl")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "value", [pa.scalar("1.5").cast(pa.decimal128(3, 1)), pa.scalar(float("nan"))]
)
def test_a_column_without_a_form_in_json_lines_is_named(tmp_path, value):
    turns = tk.from_records([CALL]).append_column("cost", pa.array([value]))
    with pytest.raises(FormatError, match="JSON lines cannot store column 'cost'"):
        write_turns(turns, tmp_path / "turns.jsonl")
    assert not (tmp_path / "turns.jsonl").exists()


@pytest.mark.parametrize("write", [json.dumps, lambda c: "\n".join(map(json.dumps, c))])
def test_lone_surrogates_in_json_are_read_on_every_way(tmp_path, write):
    """Models sample halves of pairs; JSON has them as escapes."""
    message = {"role": "user", "content": "\ud800"}
    calls = [
        {**OTHER, "session_id": name, "prompt_messages": [message]} for name in "abab"
    ]
    turns, path = tk.from_records(calls), tmp_path / "calls.json"
    path.write_text(write(calls))
    for found in (
        read_turns(path),
        one_table(tk.scan_turns(path)),
        one_table(tk.scan_turns(path, session_prefix="file")),
    ):
        messages = found["messages"].combine_chunks()
        assert messages == turns["messages"].combine_chunks()


# Every writer and every reader, in every form and format


TABLES, LINES = FORMATS[:3], FORMATS[3:]

POLARS = {
    "parquet": (pl.read_parquet, pl.DataFrame.write_parquet),
    "arrow": (pl.read_ipc, pl.DataFrame.write_ipc),
    "arrows": (pl.read_ipc_stream, pl.DataFrame.write_ipc_stream),
}

in_files = settings(max_examples=settings.default.max_examples // 3)
"""Every example writes files."""

small = st.sampled_from([1, 40, 1 << 20])
"""Sizes at which what is written or read goes in pieces, or in one."""


@contextmanager
def folder_for(size):
    """An empty folder; pieces, parts, row groups and batches are of such a size."""
    sizes = mock.patch.multiple(
        limits,
        READ_TOKENS=size,
        FILE_TURNS=max(size // 10, 1),
        BUCKET_BYTES=size,
        SPILL_BYTES=size,
        READ_BYTES=size,
        MIN_READ_ROWS=1,
        ROW_GROUP_BYTES=size,
    )
    with sizes, tempfile.TemporaryDirectory() as name:
        yield Path(name)


WRITERS = {
    "table": tk.write_turns,
    "batches": lambda turns, path: tk.write_turns(
        turns.to_batches(max_chunksize=2), path
    ),
    "reader": lambda turns, path: tk.write_turns(turns.to_reader(), path),
    "polars": lambda turns, path: tk.write_turns(pl.DataFrame(turns), path),
}


def opened(path):
    with path.open("rb") as file:
        return tk.read_turns(file)


def one_table(batches):
    return pa.Table.from_batches(list(batches))


READERS = {
    "path": tk.read_turns,
    "open file": opened,
    "directory": lambda path: tk.read_turns(path.parent),
    "stream": lambda path: one_table(tk.scan_turns(path)),
}


@pytest.mark.parametrize("format", SUFFIXES)
@in_files
@given(data=st.data(), records=runs(), size=small)
def test_turns(format, data, records, size):
    in_lines = format in (*LINES, "ndjson")
    form = data.draw(st.sampled_from(["full"] if in_lines else FORMS))
    writer = data.draw(st.sampled_from(sorted(WRITERS)))
    turns = tk.from_records(records)
    expected = in_form(turns, form)
    with folder_for(size) as folder:
        path = folder / f"turns.{format}"
        WRITERS[writer](expected, path)
        assert os.listdir(folder) == [path.name]
        for name, read in READERS.items():
            if turns.num_rows or name in ("path", "directory"):
                back = read(path)
                assert back.equals(expected), name
                assert back.schema.equals(expected.schema, check_metadata=True)
        if format in TABLES:
            read, write = POLARS[format]
            frame = read(path)
            assert tk.read_turns(frame).equals(expected)
            write(frame, path)
            assert tk.read_turns(path).equals(expected)


FORMS = ["full", "delta"]


def in_form(turns, form):
    return turns if form == "full" else tk.compact(turns)


@pytest.mark.parametrize("format", [*TABLES, *LINES])
@in_files
@given(records=runs(), choice=policies, limit=row_limits, size=small, data=st.data())
def test_rows(format, records, choice, limit, size, data):
    rows = tk.linearize(
        tk.from_records(records),
        policy_of(choice),
        max_row_tokens=limit,
        reward=0.5,
    )
    with folder_for(size) as folder:
        path = folder / f"rows.{format}"
        pieces = data.draw(st.sampled_from([rows, rows.to_batches(max_chunksize=1)]))
        dedup = data.draw(st.booleans())
        tk.write_rows(pieces, path, dedup=dedup)
        if not rows.num_rows and (format in LINES or pieces is not rows):
            return
        back = tk.read_rows(path)
        assert back.to_pylist() == rows.to_pylist()
        assert back.schema.equals(rows.schema, check_metadata=True)
        with mock.patch.object(limits, "SCANNED_ROWS", 1):
            batches = list(tk.scan_rows(path))
        assert all(batch.num_rows <= 1 for batch in batches)
        scanned = pa.Table.from_batches(batches, rows.schema)
        assert scanned.to_pylist() == rows.to_pylist()
        if format in TABLES:
            read, write = POLARS[format]
            write(read(path), path)
            assert tk.read_rows(path).to_pylist() == rows.to_pylist()


@pytest.mark.parametrize("format", [*TABLES, *LINES])
@in_files
@given(lines=session_lines())
def test_sessions(format, lines):
    text = pa.field("note", pa.string())
    table = pa.Table.from_pylist(
        lines, pa.schema([*SESSIONS, text], metadata=SESSIONS.metadata)
    )
    last = {line["session_id"]: line for line in lines}
    with folder_for(1 << 20) as folder:
        path = folder / f"sessions.{format}"
        write_table(table, path)
        assert tk.read_sessions(path).to_pylist() == list(last.values())
        if format in TABLES:
            assert tk.read_sessions(folder).to_pylist() == list(last.values())

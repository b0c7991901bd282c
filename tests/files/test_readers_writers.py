"""What every writer writes every reader reads, in every form and format.

Turns are full, in delta form or with their first prompts held once; rows whole or as
suffixes. `tests/test_importers.py` has the formats of other systems.
"""

import tempfile
from pathlib import Path
from unittest import mock

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trajkit as tk
from tests import foreign
from tests.file_stages import compact_file, expand_file, linearize_file
from tests.importers.test_importers import Letters
from tests.made_tables import policy_of
from tests.strategies import policies, row_limits, runs, session_lines, transcripts
from trajkit.files.tables import write_table
from trajkit.schema import SESSIONS
from trajkit.tables import limits

TABLES = ["parquet", "arrow", "arrows"]
LINES = ["jsonl", "jsonl.gz", "jsonl.zst"]

POLARS = {
    "parquet": (pl.read_parquet, pl.DataFrame.write_parquet),
    "arrow": (pl.read_ipc, pl.DataFrame.write_ipc),
    "arrows": (pl.read_ipc_stream, pl.DataFrame.write_ipc_stream),
}

in_files = settings(max_examples=20, deadline=None)
"""Every example writes files."""

small = st.sampled_from([1, 40, 1 << 20])
"""Sizes at which what is written or read goes in pieces, or in one."""


def in_pieces(size):
    """Pieces, parts, row groups and batches of such a size."""
    return mock.patch.multiple(
        limits,
        READ_TOKENS=size,
        FILE_TURNS=max(size // 10, 1),
        BUCKET_BYTES=size,
        SPILL_BYTES=size,
        READ_BYTES=size,
        MIN_READ_ROWS=1,
        ROW_GROUP_BYTES=size,
    )


class Folder:
    """An empty folder, and sizes, for one example."""

    def __init__(self, size):
        self.limits = in_pieces(size)
        self.folder = tempfile.TemporaryDirectory()

    def __enter__(self):
        self.limits.start()
        return Path(self.folder.name)

    def __exit__(self, *error):
        self.limits.stop()
        self.folder.cleanup()


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


@pytest.mark.parametrize("format", [*TABLES, *LINES])
@in_files
@given(data=st.data(), records=runs(), size=small)
def test_turns(format, data, records, size):
    form = data.draw(st.sampled_from(["full"] if format in LINES else FORMS))
    writer = data.draw(st.sampled_from(sorted(WRITERS)))
    turns = tk.from_records(records)
    expected = in_form(turns, form)
    with Folder(size) as folder:
        path = folder / f"turns.{format}"
        WRITERS[writer](expected, path)
        for name, read in READERS.items():
            if turns.num_rows or name in ("path", "directory"):
                assert read(path).equals(expected), name


FORMS = ["full", "delta"]


def in_form(turns, form):
    return turns if form == "full" else tk.compact(turns)


@pytest.mark.parametrize("format", TABLES)
@in_files
@given(data=st.data(), records=runs())
def test_turns_that_polars_read_and_wrote(format, data, records):
    read, write = POLARS[format]
    expected = in_form(tk.from_records(records), data.draw(st.sampled_from(FORMS)))
    with Folder(1 << 20) as folder:
        first, second = folder / f"first.{format}", folder / f"second.{format}"
        tk.write_turns(expected, first)
        frame = read(first)
        assert tk.read_turns(frame).equals(expected)
        write(frame, second)
        assert tk.read_turns(second).equals(expected)


@in_files
@given(
    records=runs(),
    formats=st.lists(st.sampled_from([*TABLES, *LINES]), min_size=3, max_size=3),
    size=small,
    parts=st.booleans(),
)
def test_turns_that_change_their_form_from_file_to_file(records, formats, size, parts):
    turns = tk.from_records(records)
    delta = formats[1] if formats[1] in TABLES else "parquet"
    with Folder(size) as folder:
        log = folder / f"log.{formats[0]}"
        tk.write_turns(turns, log)
        compacted = folder / ("delta/" if parts else f"delta.{delta}")
        full = folder / f"full.{formats[2]}"
        compact_file(log, f"{compacted}/" if parts else compacted)
        assert tk.read_turns(compacted).equals(tk.compact(turns))
        expand_file(compacted, full)
        assert tk.read_turns(full).equals(turns)
        rows = folder / f"rows.{formats[2]}"
        linearize_file(compacted, rows, "slime")
        expected = tk.linearize(turns, "slime")
        assert tk.read_rows(rows).to_pylist() == expected.to_pylist()


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
    with Folder(size) as folder:
        path = folder / f"rows.{format}"
        pieces = data.draw(st.sampled_from([rows, rows.to_batches(max_chunksize=1)]))
        dedup = data.draw(st.booleans())
        tk.write_rows(pieces, path, dedup=dedup)
        if not rows.num_rows and (format in LINES or pieces is not rows):
            return
        back = tk.read_rows(path)
        assert back.to_pylist() == rows.to_pylist()
        assert back.schema.equals(rows.schema, check_metadata=True)
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
    with Folder(1 << 20) as folder:
        path = folder / f"sessions.{format}"
        write_table(table, path)
        assert tk.read_sessions(path).to_pylist() == list(last.values())
        if format in TABLES:
            assert tk.read_sessions(folder).to_pylist() == list(last.values())


@in_files
@given(transcripts())
def test_transcripts(conversations):
    """Every reply that something precedes is a call, or told to be none."""
    tokenizer = Letters()
    expected = []
    for number, messages in enumerate(conversations, 1):
        for k, message in enumerate(messages):
            if message["role"] != "assistant" or k == 0:
                continue
            prompt, whole = (
                tokenizer.apply_chat_template(
                    said, tools=None, add_generation_prompt=asks, tokenize=False
                )
                for said, asks in ((messages[:k], True), (messages[: k + 1], False))
            )
            if whole.startswith(prompt):
                name = f"sft.jsonl, line {number}"
                reply = whole.removeprefix(prompt)
                expected.append((name, [*map(ord, prompt)], [*map(ord, reply)]))
    with Folder(1 << 20) as folder:
        foreign.write_chats(folder, conversations)
        file = folder / "sft.jsonl"
        turns, report = tk.import_turns(file, "chat", tokenizer=tokenizer)
    got = turns.select(["session_id", "prompt_ids", "output_ids"]).to_pylist()
    assert [tuple(turn.values()) for turn in got] == expected
    told = [
        (row["problem"], row["kept"])
        for row in report.to_pylist()
        # its tokens are code points, none of them special
        if row["problem"] not in ("no_end_token", "empty")
    ]
    assert told.count(("not_sampled", True)) == len(expected)
    replies = sum(m["role"] == "assistant" for said in conversations for m in said)
    silent = sum(all(m["role"] != "assistant" for m in said) for said in conversations)
    assert len(told) == replies + silent

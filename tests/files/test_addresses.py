"""Files at addresses of fsspec, by its memory file system."""

import pyarrow as pa
import pytest

import trajkit as tk
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError

fsspec = pytest.importorskip("fsspec")

TURNS = tk.from_records(
    {"session_id": name, "prompt_ids": [1], "output_ids": [2, k]}
    for k, name in enumerate("ab")
)
LINE = b'{"session_id": "a", "prompt_ids": [1], "output_ids": [-7]}\n'


@pytest.fixture
def memory(tmp_path):
    system = fsspec.filesystem("memory")
    tk.write_turns(TURNS, tmp_path / "a.parquet")
    tk.write_rows(tk.linearize(TURNS), tmp_path / "rows.parquet")
    for name, content in (
        ("/log/a.parquet", (tmp_path / "a.parquet").read_bytes()),
        ("/log/notes.txt", b"no table"),
        ("/rows.parquet", (tmp_path / "rows.parquet").read_bytes()),
        ("/bad.jsonl", LINE),
    ):
        system.pipe(name, content)
    yield system
    system.rm("/", recursive=True)


@pytest.mark.usefixtures("memory")
@pytest.mark.parametrize("name", ["log/a.parquet", "log", "log/*.parquet"])
def test_turns_and_rows_at_an_address(name):
    assert tk.read_turns(f"memory://{name}") == TURNS
    assert pa.Table.from_batches(tk.scan_turns([f"memory://{name}"])) == TURNS
    rows = tk.linearize(TURNS)
    assert tk.read_rows("memory://rows.parquet") == rows
    assert pa.Table.from_batches(tk.scan_rows("memory://rows.parquet")) == rows


def test_what_takes_no_address_says_so(memory):
    for write, table in (
        (tk.write_turns, TURNS),
        (tk.write_rows, tk.linearize(TURNS)),
    ):
        with pytest.raises(ArgumentError, match=r"memory://new.parquet is an address"):
            write(table, "memory://new.parquet")
        with memory.open("/new.parquet", "wb") as file:
            write(table, file, format="parquet")
    assert tk.read_rows("memory://new.parquet") == tk.linearize(TURNS)
    with pytest.raises(ArgumentError, match="has an address, and run reads local"):
        tk.run("memory://log", tk.linearize, "rows.parquet")


@pytest.mark.usefixtures("memory")
def test_errors_name_the_address():
    with pytest.raises(InvalidTurnsError, match=r"^memory:///bad.jsonl, line 1"):
        tk.read_turns("memory://bad.jsonl")
    with pytest.raises(FormatError, match="no such file"):
        tk.read_turns("memory://none.parquet")
    with pytest.raises(FormatError, match="no file of a known format"):
        tk.read_turns("memory://log/*.txt")

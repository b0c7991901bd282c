"""`trajkit head` and `trajkit stats` read any table."""

import json

import pyarrow as pa
import pytest
from rich.cells import cell_len

import trajkit as tk
from tests.cli.test_show import HOSTILE, terminal
from tests.made_tables import linearized
from trajkit.cli import BAD_DATA, BAD_FILE, main
from trajkit.cli.screen import visible
from trajkit.files.dedup import encoded
from trajkit.files.tables import write_table

__all__ = ["terminal"]

CALLS = [
    {
        "session_id": "a",
        "prompt_ids": [1],
        "output_ids": [2, 3],
        "finish_reason": "stop",
    },
    {"session_id": "a", "prompt_ids": [1, 2, 3, 4], "output_ids": [5, 6]},
    {"session_id": HOSTILE, "prompt_ids": [1], "output_ids": [2]},
]


@pytest.fixture
def tables(tmp_path):
    """A file of each kind of table."""
    turns = tk.from_records(CALLS)
    links = tk.link(turns)
    rows, report = linearized(turns)
    found = {
        "turns": turns,
        "delta": tk.compact(turns),
        "links": links,
        "drift": tk.classify_drift(turns, links),
        "rows": rows,
        "stored": encoded(rows),
        "report": report,
        "packs": tk.pack(rows, 8),
        "sessions": pa.table({"session_id": ["a", HOSTILE], "reward": [0.25, None]}),
    }
    for name, table in found.items():
        for suffix in ("parquet", "arrow"):
            write_table(table, tmp_path / f"{name}.{suffix}")
    return tmp_path, found


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_every_table_has_a_head_and_stats(tables, capsys, suffix):
    folder, found = tables
    for name, table in found.items():
        path = str(folder / f"{name}.{suffix}")
        assert main(["head", path, "-n", "1"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].split() == table.column_names
        assert len(lines) == 3
        assert main(["stats", path]) == 0
        out = capsys.readouterr().out
        assert out.startswith(f"{table.num_rows:,} lines\n")
        assert all(char.isprintable() for char in out.replace("\n", ""))
        shown = [line.split()[0] for line in out.split("\n\n")[1].splitlines()[2:]]
        assert shown == table.column_names


def test_lists_are_shortened_and_texts_escaped(tables, capsys):
    assert main(["head", str(tables[0] / "turns.parquet")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[3].startswith("a ")
    assert " [1, 2, … 4] " in lines[3]
    assert lines[4].startswith(visible(HOSTILE)[:16])
    assert all(map(str.isprintable, lines))


@pytest.mark.parametrize("width", [8, 40, 100])
def test_a_table_fits_the_terminal(tables, terminal, width):
    path = str(tables[0] / "turns.parquet")
    out = terminal("head", path, width=width, NO_COLOR="1")
    assert max(map(cell_len, out.splitlines())) <= width
    assert "…" in out


@pytest.mark.parametrize(
    ("name", "column", "expected"),
    [
        ("turns", "prompt_ids", {"min": 1, "mean": 2, "max": 4, "sum": 6}),
        ("turns", "finish_reason", {"nulls": 2, "names": {"stop": 1}}),
        ("turns", "session_id", {"names": {"a": 2, HOSTILE: 1}}),
        ("links", "link_reason", {"names": {"root": 2, "tokens": 1}}),
        ("sessions", "reward", {"nulls": 1, "mean": 0.25, "of": "value"}),
        ("rows", "loss_mask", {"sum": 5, "of": "true flags"}),
        ("delta", "output_ids", {"sum": 5, "of": "length"}),
    ],
)
def test_stats_are_those_of_the_columns(tables, capsys, name, column, expected):
    assert main(["stats", str(tables[0] / f"{name}.parquet"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lines"] == tables[1][name].num_rows
    assert found["columns"][column].items() >= expected.items()


def test_a_directory_is_read_for_its_turns(tmp_path, capsys):
    for k, call in enumerate(CALLS):
        tk.write_turns(tk.from_records([call]), tmp_path / f"{k}.jsonl")
    assert main(["stats", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith("3 lines\n")
    assert main(["head", str(tmp_path), "-n", "2"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_table_without_lines_is_an_error(tmp_path, capsys):
    write_table(pa.table({"a": pa.array([], pa.int32())}), tmp_path / "none.parquet")
    for command in ("head", "stats"):
        assert main([command, str(tmp_path / "none.parquet")]) == BAD_DATA
        assert "none.parquet: no lines, nothing to do" in capsys.readouterr().err
    assert main(["head", str(tmp_path / "absent.parquet")]) == BAD_FILE


def test_sums_are_larger_than_values(tmp_path, capsys):
    table = pa.table({"n": pa.array([2**31 - 1] * 3, pa.int32())})
    write_table(table, tmp_path / "large.parquet")
    assert main(["stats", str(tmp_path / "large.parquet"), "--json"]) == 0
    sums = json.loads(capsys.readouterr().out)["columns"]["n"]
    assert sums["sum"] == 3 * (2**31 - 1)

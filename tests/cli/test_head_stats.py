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


def test_every_table_has_a_head_and_stats(tables, capsys):
    folder, found = tables
    for name, table in found.items():
        for suffix in ("parquet", "arrow"):
            path = str(folder / f"{name}.{suffix}")
            assert main(["head", path, "-n", "1"]) == 0
            lines = capsys.readouterr().out.splitlines()
            assert lines[0].split() == table.column_names
            assert len(lines) == 3, lines
            assert main(["stats", path]) == 0
            out = capsys.readouterr().out
            assert out.startswith(f"{table.num_rows:,} lines\n")
            assert all(char.isprintable() for char in out.replace("\n", ""))
            shown = [line.split()[0] for line in out.split("\n\n")[1].splitlines()[2:]]
            assert shown == table.column_names


def test_lists_are_shortened_and_texts_escaped(tables, capsys):
    folder, _ = tables
    assert main(["head", str(folder / "turns.parquet")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert lines[3].startswith("a ")
    assert " [1, 2, … 4] " in lines[3]
    assert lines[4].startswith(visible(HOSTILE)[:16])
    assert all(map(str.isprintable, lines))


@pytest.mark.parametrize("width", [8, 40, 100])
def test_a_table_fits_the_terminal(tables, terminal, width):
    folder, _ = tables
    out = terminal("head", str(folder / "turns.parquet"), width=width, NO_COLOR="1")
    assert max(map(cell_len, out.splitlines())) <= width
    assert "…" in out


def test_stats_are_those_of_the_columns(tables, capsys):
    folder, _ = tables
    assert main(["stats", str(folder / "turns.parquet"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["lines"] == 3
    prompts = found["columns"]["prompt_ids"]
    assert (prompts["min"], prompts["mean"], prompts["max"]) == (1, 2, 4)
    reasons = found["columns"]["finish_reason"]
    assert (reasons["nulls"], reasons["names"]) == (2, {"stop": 1})
    assert found["totals"] == {"sessions": 2, "prompt tokens": 6, "tokens sampled": 5}
    assert main(["stats", str(folder / "links.arrow"), "--json"]) == 0
    links = json.loads(capsys.readouterr().out)["columns"]["link_reason"]
    assert links["names"] == {"root": 2, "tokens": 1}
    assert main(["stats", str(folder / "sessions.parquet"), "--json"]) == 0
    reward = json.loads(capsys.readouterr().out)["columns"]["reward"]
    assert (reward["nulls"], reward["mean"], reward["of"]) == (1, 0.25, "value")


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("rows", ["sessions: 2", "tokens: 8", "tokens trained: 5, 62.5 % of tokens"]),
        ("packs", ["tokens: 8", "tokens trained: 5, 62.5 % of tokens"]),
        ("delta", ["sessions: 2", "tokens stored: 3", "tokens sampled: 5"]),
    ],
)
def test_totals_are_those_of_the_kind(tables, capsys, name, lines):
    folder, _ = tables
    assert main(["stats", str(folder / f"{name}.parquet")]) == 0
    assert capsys.readouterr().out.split("\n\n")[-1].splitlines() == lines


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

"""Tries the command of an installed wheel, where the extra ``cli`` is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

import trajkit as tk

pytest.importorskip("cyclopts", reason="needs the extra cli")

COMMAND = Path(sys.executable).with_name("trajkit")


def test_the_command_makes_rows(tmp_path):
    call = {"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}
    turns = tk.from_records([call])
    tk.write_turns(turns, tmp_path / "turns.parquet")
    command = [COMMAND, "linearize", "turns.parquet", "-o", "rows.parquet"]
    subprocess.run(command, check=True, cwd=tmp_path)
    assert tk.read_rows(tmp_path / "rows.parquet") == tk.linearize(turns)


def test_a_command_names_the_extra_that_it_needs(tmp_path):
    done = subprocess.run(
        [COMMAND, "serve", "--out", tmp_path / "run"],
        capture_output=True,
        check=False,
        text=True,
    )
    assert done.returncode == 2
    assert "trajkit[shim]" in done.stderr

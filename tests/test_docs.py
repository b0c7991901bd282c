"""The example on a page of the documentation prints what the page says."""

import re
from pathlib import Path

import pyarrow as pa
import pytest

import trajkit as tk
from tests.generated import generated_runs
from tests.tables import turns_table
from trajkit.policies import PRESETS

DOCS = Path(__file__).parents[1] / "docs"


def test_the_policies_page_prints_what_it_says(capsys):
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    code, said = re.search(
        r"```python\n(.*?)```.*?```text\n(.*?)```", page, re.DOTALL
    ).groups()
    exec(compile(code, "docs/policies.md", "exec"), {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed == [line.rstrip() for line in said.splitlines()]


@pytest.mark.parametrize("policy", PRESETS)
def test_every_policy_has_its_section(policy):
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    assert re.search(rf"^### {policy}\b", page, re.MULTILINE)


def test_the_scale_page_runs(tmp_path, monkeypatch):
    """Its Python, one piece after another; the engines' own are in tests/engines."""
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    engines = re.compile(r"duckdb|polars|pyspark|trajkit\.ray")
    pieces = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    ours = [piece for piece in pieces if not engines.search(piece)]
    assert len(ours) >= 5
    turns = turns_table(generated_runs(4, 3, max_turns=4))
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    tk.write_turns(turns, "runs/log.parquet")
    names = turns["session_id"].unique().to_pylist()
    sessions = {"session_id": names, "reward": [1.0] * len(names)}
    known = {"sessions": pa.table({**sessions, "group_id": ["task"] * len(names)})}
    for piece in ours:
        exec(compile(piece, "docs/scale.md", "exec"), known)
    assert tk.read_rows("weighed.parquet").num_rows == tk.linearize(turns).num_rows

"""The snippets of the pages run, and print what the pages show."""

import inspect
import re
from pathlib import Path

import pyarrow as pa
import pytest

import trajkit as tk
from tests.generated import generated_runs
from tests.tables import turns_table
from trajkit.policies import PRESETS
from trajkit.schema import LOSSES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    "page", ["README.md", "docs/quickstart.md", "docs/policies.md", "docs/packs.md"]
)
def test_snippets_print_the_text_below_them(page, tmp_path, monkeypatch, capsys):
    text = (ROOT / page).read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    known = {}
    blocks = re.findall(r"```(python|text)\n(.*?)```", text, re.DOTALL)
    assert {kind for kind, _ in blocks} == {"python", "text"}
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, page, "exec"), known)
        else:
            assert capsys.readouterr().out.rstrip() == block.rstrip()
    assert capsys.readouterr().out == ""


def test_the_quickstart_explains_every_loss():
    page = (DOCS / "quickstart.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `lost_(\w+)`", page, re.MULTILINE) == list(LOSSES)


def test_the_api_page_lists_the_public_names():
    page = (DOCS / "api.md").read_text(encoding="utf-8").partition("| subpackage")[0]
    listed = [
        name
        for cell in re.findall(r"^\| (`.*?`) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    ]
    public = [
        name
        for name in dir(tk)
        if not name.startswith("_") and not inspect.ismodule(getattr(tk, name))
    ]
    assert sorted(listed) == sorted(public)


def test_the_glossary_is_short_and_defines_each_term_once():
    page = (DOCS / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| (?!term|---)([^|]+) \|", page, re.MULTILINE)
    assert len(set(terms)) == len(terms) <= 42


@pytest.mark.parametrize("policy", PRESETS)
def test_every_policy_has_its_section(policy):
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    assert re.search(rf"^### {policy}\b", page, re.MULTILINE)


def test_the_scale_page_runs(tmp_path, monkeypatch):
    """Its Python, one piece after another; the engines' own are in tests/engines."""
    page = (DOCS / "scale.md").read_text(encoding="utf-8")
    engines = re.compile(r"duckdb|polars|pyspark|import ray")
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

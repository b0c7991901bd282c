"""The snippets of the pages run, and print what the pages show."""

import inspect
import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest

import trajkit as tk
from tests.made_tables import Letters
from trajkit.policies import PRESETS
from trajkit.schema import LOSSES

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted(DOCS.glob("*.md")))]
LANGUAGES = {"eval-rst", "json", "none", "python", "sh", "text", "toml"}
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<why>.+) -->\n)?^```(?P<language>.*)\n(?P<code>(?s:.*?))^```$",
    re.MULTILINE,
)

ASK = {"role": "user", "content": "List the files."}
LS = {"role": "assistant", "content": "ls"}
FILES = {"role": "tool", "name": "bash", "content": "a.py"}


@pytest.fixture
def given(tmp_path, monkeypatch):
    """What pages take as given: two sessions, also as a log in the folder ``runs``."""
    records = [
        {
            "session_id": name,
            "output_ids": reply,
            "output_logprobs": [-0.5] * len(reply),
            "prompt_ids": prompt,
            "prompt_messages": messages,
            "response_message": LS,
            "prompt_message_index": index,
            "prompt_is_content": [True] * len(prompt),
            "message_tool_names": [None, None, "bash"][: len(messages)],
        }
        for name in ("a", "b")
        for prompt, reply, messages, index in (
            ([65, 66], [67, 68], [ASK], [0, 0]),
            ([65, 66, 67, 0, 69], [70], [ASK, LS, FILES], [0, 0, 1, 1, 2]),
        )
    ]
    turns = tk.from_records(records)
    sessions = {
        "session_id": ["a", "b"],
        "reward": [1.0, 0.0],
        "group_id": ["task"] * 2,
    }
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    tk.write_turns(turns, "runs/log.parquet")
    return {
        "tk": tk,
        "turns": turns,
        "sessions": pa.table(sessions),
        "rows": tk.linearize(turns),
        "tokenizer": Letters(),
        "adapter": SimpleNamespace(),
    }


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run_and_print_the_text_below_them(page, given, capsys):
    """A snippet that cannot run here has a comment ``not run: REASON`` above it.

    Pictures that snippets write are those in ``docs/``.
    """
    if page == "docs/pictures.md" and find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    blocks = list(FENCE.finditer((ROOT / page).read_text(encoding="utf-8")))
    for block in blocks:
        language = block["language"]
        assert language in LANGUAGES or language.startswith("{"), block[0]
        if language == "python" and not block["why"]:
            assert capsys.readouterr().out == "", "no text below the snippet before"
            exec(compile(block["code"], page, "exec"), given)
        elif language == "text":
            assert capsys.readouterr().out.rstrip() == block["code"].rstrip()
    assert capsys.readouterr().out == ""
    for picture in Path().glob("*.svg"):
        assert picture.read_text() == (DOCS / picture).read_text()


NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_run_from_top_to_bottom(path):
    assert len(NOTEBOOKS) >= 2
    known = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            assert cell["execution_count"] is None
            exec(compile("".join(cell["source"]), path.name, "exec"), known)


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


@pytest.mark.parametrize("policy", PRESETS)
def test_every_policy_has_its_section(policy):
    page = (DOCS / "policies.md").read_text(encoding="utf-8")
    assert re.search(rf"^### {policy}\b", page, re.MULTILINE)

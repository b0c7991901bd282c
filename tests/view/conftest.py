"""Runs to look at, and one browser for all tests."""

import subprocess
import sys
from pathlib import Path

import pytest

import trajkit as tk
from benchmarks import data
from tests.view.browser import CHROMIUM, browser
from trajkit.cli.options import load_tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = ROOT / "shim/trajkit_shim/engines/embedded"


@pytest.fixture(scope="session")
def _browser(tmp_path_factory):
    if CHROMIUM is None:
        pytest.skip("chromium is not installed: apt-get install chromium")
    with browser(tmp_path_factory.mktemp("chromium")) as tab:
        yield tab


@pytest.fixture
def tab(_browser):
    """A tab; the test fails if its page raised an error or broke its policy."""
    _browser.size(1400, 900)
    _browser.errors.clear()
    yield _browser
    assert _browser.errors == []


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The folder of a run of the demo."""
    pytest.importorskip("minisweagent", reason="the demo's agent is in the extra dev")
    folder = tmp_path_factory.mktemp("demo") / "demo"
    command = [Path(sys.executable).with_name("trajkit"), "demo", "--out", folder]
    options = ["--seed", "7", "--sessions", "1"]
    subprocess.run([*command, *options], check=True, capture_output=True)
    return folder


@pytest.fixture(scope="session")
def recorded(demo):
    """The turns of the demo, and their one session."""
    turns = tk.read_turns(demo)
    (session,) = turns["session_id"].unique().to_pylist()
    return turns, session


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(TOKENIZER)


@pytest.fixture(scope="session")
def long():
    """A session of 131,072 tokens in 128 turns, whose replies lose their reasoning."""
    records = data.rollout("long", data.quoted("head_dropped"), "head_dropped", 1)
    return tk.from_records(list(records))


@pytest.fixture(scope="session")
def short():
    """A session of 16 turns of the same kind."""
    records = data.rollout("short", data.SMALL, "head_dropped", 1)
    return tk.from_records(list(records))

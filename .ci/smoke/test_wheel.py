"""Tries an installed wheel, in an environment that has pytest and the wheel only.

Run it from a folder that has no checkout above it, so that only the wheel is imported.
"""

import importlib.metadata
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

import trajkit as tk
from trajkit import _core
from trajkit.policies import PRESETS

COMMAND = Path(sys.executable).with_name("trajkit")

CALLS = [
    {
        "session_id": "a",
        "prompt_ids": prompt,
        "output_ids": output,
        "output_logprobs": [-0.5] * len(output),
    }
    for prompt, output in [
        ([1, 2], [3, 4]),
        ([1, 2, 3, 4, 5], [6]),
        ([1, 2, 3, 4, 5, 9, 7], [8, 9]),
    ]
]
TURNS = tk.from_records(CALLS)


def test_the_wheel_is_what_is_imported():
    assert Path(sys.prefix) in Path(tk.__file__).parents
    assert Path(sys.prefix) in Path(_core.__file__).parents
    assert _core.BUILD == "release"
    assert importlib.metadata.version("trajkit") != "0.0.0"


@pytest.mark.skipif(find_spec("cyclopts") is not None, reason="the extra cli is there")
def test_no_other_package_is_installed_or_imported():
    installed = {found.name for found in importlib.metadata.distributions()}
    of_pytest = {"iniconfig", "packaging", "pip", "pluggy", "Pygments", "pygments"}
    needed = {"numpy", "orjson", "pyarrow", "trajkit"}
    assert installed - of_pytest - {"pytest", "setuptools"} == needed
    names = "[getattr(tk, name) for name in dir(tk)]"
    code = f"import sys, trajkit as tk; {names}; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, check=True, text=True
    )
    loaded = {name.partition(".")[0] for name in done.stdout.split()}
    # the module names that Cython registers
    loaded = {name for name in loaded if not name.startswith(("_", "cython_runtime"))}
    assert loaded - set(sys.stdlib_module_names) == needed


@pytest.mark.parametrize("policy", sorted(PRESETS.keys() - {"polar"}))
def test_rows_keep_the_promises_of_their_policy(policy):
    rows, report = tk.linearize(TURNS, policy), tk.report(TURNS, policy)
    lost = sum(
        report[name].to_pylist()[0] for name in report.column_names if "lost_" in name
    )
    (sampled,) = report["tokens_sampled"].to_pylist()
    (trained,) = report["tokens_trained"].to_pylist()
    assert sampled == 5 == trained + lost
    assert tk.verify(rows, TURNS, policy).num_rows == 0


@pytest.mark.parametrize(
    "name", ["t.parquet", "t.arrow", "t.arrows", "t.jsonl", "t.jsonl.gz", "t.jsonl.zst"]
)
def test_files_of_every_format_come_back(tmp_path, name):
    tk.write_turns(TURNS, tmp_path / name)
    assert tk.read_turns(tmp_path / name) == TURNS


def test_forms_recorder_and_packs_agree():
    rows = tk.linearize(TURNS)
    assert tk.linearize(tk.compact(TURNS)) == rows
    recorder = tk.Recorder()
    for call in CALLS:
        recorder.record(call["session_id"], **{k: call[k] for k in call if k[0] != "s"})
    assert tk.linearize(recorder.pop("a"))["input_ids"] == rows["input_ids"]
    packs = tk.pack(rows, max_tokens=64)
    assert tk.verify_packs(packs, rows).num_rows == 0


def test_threads_give_the_same_rows():
    rows = tk.linearize(TURNS)
    with ThreadPoolExecutor(4) as pool:
        for other in pool.map(lambda _: tk.linearize(TURNS), range(16)):
            assert other == rows


def test_a_run_makes_rows(tmp_path):
    turns, rows = tmp_path / "turns.parquet", tmp_path / "rows.parquet"
    tk.write_turns(TURNS, turns)
    tk.run(turns, tk.linearize_batches, rows)
    assert tk.read_rows(rows) == tk.linearize(TURNS)


@pytest.mark.skipif(find_spec("cyclopts") is not None, reason="the extra cli is there")
def test_the_command_names_the_extra_that_it_needs():
    done = subprocess.run(
        [COMMAND, "head"], capture_output=True, check=False, text=True
    )
    assert done.returncode == 2
    assert "trajkit[cli]" in done.stderr

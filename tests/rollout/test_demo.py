"""The demo: real agents once, and the pieces it is made of."""

import contextlib
import io
import json
import os
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import trajkit as tk
from tests.rollout.test_sandbox import unpack
from trajkit import cli
from trajkit.cli import application
from trajkit.policies import PRESETS
from trajkit_rollout import demo as demo_package
from trajkit_rollout.demo import SUBMIT, run_demo, solve
from trajkit_rollout.settings import HARNESSES
from trajkit_rollout.tasks import read_tasks
from trajkit_shim.engines.embedded import Special

pytest.importorskip("minisweagent", reason="the demo's agent is in the extra dev")

ROOT = Path(__file__).parents[2]
(TASK,) = read_tasks(Path(demo_package.__file__).parent / "median")


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The directory of one recorded session."""
    out = tmp_path_factory.mktemp("demo") / "runs/demo"
    # the extra `demo` does not have transformers
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from trajkit_rollout.demo import run_demo\n"
        f"sys.exit(run_demo({str(out)!r}, sessions=1, seed=1, json=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    made = json.loads(done.stdout)
    return {**made, **printed("drift", made), **printed("simulate", made)}


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """The directory of a recorded group of two, and what people are shown."""
    out = tmp_path_factory.mktemp("pair") / "runs/demo"
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert run_demo(out, sessions=2, seed=1) == 0
    return out, text.getvalue()


def printed(command, made):
    """What a command prints about the demo's turns."""
    argv = [command, made["turns"], "--json"]
    if command == "simulate":
        argv += ["--sessions", f"{Path(made['turns']).parent}/agents/sessions.parquet"]
    with contextlib.redirect_stdout(io.StringIO()) as text:
        assert cli.main(argv) == cli.DONE
    facts = json.loads(text.getvalue())
    if command == "simulate":
        return {"policies": facts["policies"]}
    return {"drift": [line for line in facts["groups"] if line["cause"] != "clean"]}


def test_each_session_of_a_real_agent_drifts(demo):
    (session,) = demo["sessions"]
    assert session["end"] == "solved"
    assert demo["drift"]
    assert all(line["tokens_after_drift"] > 0 for line in demo["drift"])
    turns = tk.read_turns(demo["turns"])
    assert turns.num_rows == session["turns"] == 4
    links = tk.link(turns)
    assert links["parent"].to_pylist() == [None, 0, 1, 2]
    assert not any(turns["ill_formed"].to_pylist())
    # the prompt and output of a turn that is not canonical come back otherwise
    assert tk.classify_drift(turns, links)["size"].to_numpy().max() > 0


# at least these lose tokens where a reply drifts
LOSSY = ("slime", "segments", "miles")


def rows_of(demo, policy):
    return pl.read_parquet(Path(demo["turns"]).parent / f"rows-{policy}.parquet")


def test_the_demo_writes_rows_of_each_policy_that_polars_reads(demo):
    turns = tk.read_turns(demo["turns"])
    sampled = sum(map(len, turns["output_ids"].to_pylist()))
    policies = {line["policy"]: line for line in demo["policies"]}
    assert list(policies) == list(PRESETS)
    for line in demo["policies"]:
        rows = rows_of(demo, line["policy"])
        assert rows.height == line["rows"] > 0
        masks = rows["loss_mask"].list.sum().sum()
        # where every row that holds a claim trains it, masks count it again
        again = PRESETS[line["policy"]].train_in == "every"
        assert (
            masks >= line["tokens_trained"]
            if again
            else masks == line["tokens_trained"]
        )
        lost = sum(n for name, n in line.items() if name.startswith("lost_"))
        assert line["tokens_trained"] + lost == sampled
        assert lost > 0 or line["policy"] not in LOSSY
        assert rows["input_ids"].list.len().sum() == line["tokens_forward"]
        spread = PRESETS[line["policy"]].rewards == "uniform"
        each = 1 / rows.height if spread else 1.0
        assert rows["reward"].to_list() == [each] * rows.height
        assert rows["group_id"].to_list() == ["median"] * rows.height
    assert policies["strict"]["rows"] < policies["per_call"]["rows"]


def printed_commands():
    """The commands in the code blocks of README and docs, in order of appearance."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if page.name in OWN_TESTS:
            continue
        blocks = re.findall(
            r"^```\w*\n(.*?)^```|^((?:    .*\n)+)", page.read_text("utf-8"), re.M | re.S
        )
        for line in "".join(map("".join, blocks)).replace("\\\n", "").splitlines():
            if line.strip().startswith("trajkit "):
                yield shlex.split(line, comments=True)[1:]


# tests/cli/test_pages.py runs it
OWN_TESTS = ("look.md",)
# they take long, or need an engine, a harness, or what another system recorded
ELSEWHERE = ("demo", "serve", "rollout", "import")
# the reader's own file, and the rows that the page makes with a command before
OWN, ROWS = "turns.jsonl", "rows.parquet"


# what the command prints about rows longer than a trainer's default
@pytest.mark.filterwarnings("ignore::trajkit.errors.LongRowsWarning")
@pytest.mark.parametrize("command", list(printed_commands()), ids=" ".join)
def test_printed_commands_run_on_what_the_demo_wrote(
    tmp_path, monkeypatch, capsys, pair, command
):
    serves = command[0] == "view" and "-o" not in command
    # tests/cli/test_pages.py runs those on the example
    if command[0] in ELSEWHERE or serves or "log.parquet" in command:
        application(command[:1]).parse_args(
            command, print_error=False, exit_on_error=False
        )
        return
    if command[0] == "plot" and find_spec("matplotlib") is None:
        pytest.skip("needs matplotlib")
    run, _ = pair
    (tmp_path / "runs").symlink_to(run.parent)
    (tmp_path / "shim").symlink_to(ROOT / "shim")
    (tmp_path / "docs/pictures").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    if OWN in command:
        assert cli.main(["expand", str(run), "-o", OWN]) == cli.DONE
    if ROWS in command and command[command.index(ROWS) - 1] != "-o":
        policy = []
        if "--policy" in command:
            policy = [*command, "--sessions"][command.index("--policy") :]
            policy = policy[: policy.index("--sessions")]
        rows = ["linearize", str(run), "-o", ROWS, *policy]
        if "--sessions" not in policy:
            rows += ["--sessions", f"{run}/agents/sessions.parquet"]
        assert cli.main(rows) == cli.DONE
    assert cli.main(command) == cli.DONE, capsys.readouterr().err


def test_the_gateways_log_goes_through_json_lines(tmp_path, demo):
    out = str(tmp_path / "turns.jsonl")
    assert cli.main(["expand", demo["turns"], "-o", out]) == cli.DONE
    turns, back = tk.read_turns(demo["turns"]), tk.read_turns(out)
    same = [name for name in turns.column_names if not name.endswith("_at")]
    for name in same:
        assert back[name].to_pylist() == turns[name].to_pylist(), name


def test_logprobs_in_the_rows_are_those_that_the_engine_gave(demo):
    turns = pl.from_arrow(tk.read_turns(demo["turns"]))
    given = turns["output_logprobs"].explode().to_numpy()
    assert np.isfinite(given).all()
    assert (given <= 0).all()
    rows = rows_of(demo, "per_call")
    kept = rows["logprobs"].explode().drop_nulls().to_numpy()
    assert kept.tolist() == given.tolist()


def test_what_cannot_be_run_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ValueError, match="sessions = 0"):
        run_demo(tmp_path / "run", sessions=0)
    assert list(tmp_path.iterdir()) == []


def test_people_are_shown_the_agents_and_what_the_commands_print(pair):
    """Rewards of a group differ, so that its advantages are not zero."""
    run, shown = pair
    assert shown.startswith("session_id ")
    for text in ("$ trajkit drift ", "$ trajkit simulate ", "the lowest cost: "):
        assert text in shown
    sessions = tk.read_sessions(run / "agents/sessions.parquet")
    assert sorted(sessions["reward"].to_pylist()) == [0.0, 1.0]
    assert len(sessions["group_id"].unique()) == 1
    report = tk.report(tk.read_turns(run), sessions=sessions)
    assert 0.0 not in tk.learn.advantages(report, "group_mean")["advantage"].to_pylist()


def test_an_agent_that_does_not_start_ends_the_demo(tmp_path, capsys, monkeypatch):
    missing = replace(HARNESSES["mini-swe-agent"], check="no-such-agent")
    monkeypatch.setitem(HARNESSES, "mini-swe-agent", missing)
    assert cli.main(["demo", "--out", str(tmp_path), "--sessions", "1"]) == cli.BAD_FILE
    assert "mini-swe-agent is not installed: pip" in capsys.readouterr().err


def test_a_directory_that_holds_a_run_is_refused(tmp_path):
    (tmp_path / "turns-00000.arrows").touch()
    with pytest.raises(FileExistsError):
        run_demo(tmp_path)


def conversation(*later, system="You help."):
    opening = [("system", f'{system} "name": "bash"'), ("user", TASK.prompt)]
    return "".join(
        f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in [*opening, *later]
    )


def command(reply):
    """The shell command that a reply calls for; None: no call can be read from it."""
    if Special("<tool_call>") not in reply.parts:
        return None
    body = reply.parts[reply.parts.index(Special("<tool_call>")) + 1]
    try:
        return json.loads(body)["arguments"]["command"]
    except json.JSONDecodeError:
        return None


SEEN = ("user", "<tool_response>\n...\n</tool_response>")
HOW = ("user", f"Submit with {SUBMIT}")


def test_every_second_session_gets_the_solution(tmp_path):
    policy = solve([TASK])
    (edit,), (look,), (again,) = (policy(conversation(SEEN)) for _ in range(3))
    assert command(look) == "git status --short"
    assert edit == again
    for name, content in unpack(TASK.workspace).items():
        (tmp_path / name).write_bytes(content)
    test = shlex.split(TASK.grade.command.replace("python", sys.executable))
    before = subprocess.run(test, cwd=tmp_path, capture_output=True, check=False)
    assert before.returncode == 1
    subprocess.run(["sh", "-c", command(edit)], cwd=tmp_path, check=True)
    subprocess.run(test, cwd=tmp_path, capture_output=True, check=True)
    (last,) = policy(conversation(HOW, *[SEEN] * 3))
    assert command(last) == f"echo {SUBMIT}"

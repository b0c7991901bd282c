"""Rollouts: a small agent, the embedded engine, and every way that they can end."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import trajkit as tk
from tests.made_tables import linearized
from tests.rollout.test_sandbox import ISOLATED, goes_on, marked
from tests.shim.processes import COMMAND
from trajkit.cli import BAD_DATA, BAD_FILE, BAD_USAGE, DONE, main
from trajkit.errors import FormatError
from trajkit_rollout import rollout
from trajkit_rollout.demo import solve
from trajkit_rollout.rollout import Rollouts
from trajkit_rollout.sandbox import LocalSandbox, SandboxError, _abilities
from trajkit_rollout.settings import Settings
from trajkit_rollout.tasks import read_tasks
from trajkit_shim import workers
from trajkit_shim.app import create_app
from trajkit_shim.call import Options
from trajkit_shim.client import GatewayClient
from trajkit_shim.engines.embedded import EmbeddedEngine, Reply
from trajkit_shim.prompting.render import embedded_renderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

AGENT = f"{sys.executable} -S {Path(__file__).parent / 'small_agent.py'}"
EXAMPLES = Path(__file__).parents[2] / "examples/repair"
# namespaces cost a bit; test_sandbox.py has them
QUICK = ("--sandbox-option", "namespaces=no")
UNSAFE = "trajkit: warning: the local sandbox isolates nothing ("
LOOSE = "trajkit: warning: memory_mb is per process"


def write_tasks(path, **tasks):
    """A JSONL file of tasks: their fields by id."""
    lines = []
    for name, fields in tasks.items():
        task = {
            "id": name,
            "prompt": f"Make {name}.txt say yes.",
            "workspace": {f"{name}.txt": "no\n"},
            "solution": {f"{name}.txt": "yes\n"},
            "grade": {"command": f"grep -qx yes {name}.txt"},
            "agent": {"timeout_s": 60},
        }
        lines.append(json.dumps({**task, **fields}))
    path.write_text("\n".join(lines))
    return path


def command(tasks, out, *options, harness="shell", agent=AGENT, manners=""):
    argv = [str(tasks), "--harness", harness, "-o", str(out), "--json"]
    argv += [*options, *([] if "--odds" in options else ["--odds", "1"])]
    if harness == "shell":
        # an isolated sandbox sees no other folder of this repository
        argv += ["--path", str(Path(__file__).parent)]
        argv += ["--argument", f"AGENT_MANNERS='{manners}' {agent}"]
    return argv


def run(argv):
    return main(["rollout", *argv])


def fails(capsys, code, match):
    """The command failed, and its error matches."""
    assert code == BAD_FILE
    assert re.search(match, capsys.readouterr().err)


@pytest.fixture
def do(capsys):
    """Run a command: its exit code, and what it says."""

    def done(argv):
        code = run(argv)
        said = capsys.readouterr()
        warns = "namespaces=no" in argv or not ISOLATED or not _abilities()[1]
        assert said.err == "" or (warns and said.err.startswith((UNSAFE, LOOSE)))
        return code, json.loads(said.out)

    return done


@pytest.fixture
def roll(tmp_path, do):
    """Run one task ``a``: the exit code, what the command says, and the session."""

    def rolled(fields, *options, **how):
        tasks = write_tasks(tmp_path / "t.jsonl", a=fields)
        code, said = do(command(tasks, tmp_path / "run", *QUICK, *options, **how))
        (line,) = sessions(tmp_path / "run").values()
        return code, said, line

    return rolled


def sessions(out):
    return {line["session_id"]: line for line in read_sessions(out).to_pylist()}


def read_sessions(out):
    return pq.read_table(out / "sessions.parquet")


def rows_of(out):
    """Rows of a run and their report, verified."""
    turns = tk.read_turns(out / "turns")
    facts = read_sessions(out)
    rows, report = linearized(turns, sessions=facts)
    assert tk.verify(rows, turns, sessions=facts).num_rows == 0
    return rows, {line["session_id"]: line for line in report.to_pylist()}


def test_groups_of_rollouts_are_graded_and_become_rows(tmp_path, do):
    tasks = write_tasks(tmp_path / "t.jsonl", a={}, b={"solution": {"other": "x\n"}})
    out = tmp_path / "run"
    code, said = do(command(tasks, out, "--repeat", "2", "--parallel", "3"))
    assert (code, said["over"], said["graded"], said["failures"]) == (DONE, 4, 4, {})
    assert said["mean_reward"] == 0.5
    lines = sessions(out)
    assert {(s["group_id"], s["sample"], s["reward"]) for s in lines.values()} == {
        ("a", 0, 1.0),
        ("a", 1, 1.0),
        ("b", 0, 0.0),
        ("b", 1, 0.0),
    }
    for name, line in lines.items():
        assert line["error"] is None
        assert (line["agent_end"], line["exit_code"], line["turns"]) == (
            "finished",
            0,
            4,
        )
        patch = (out / "sessions" / name / "patch.diff").read_text()
        assert len(patch) == line["patch_bytes"]
        added = "+yes" if line["group_id"] == "a" else "+x"
        assert added in patch.splitlines()
    rows, report = rows_of(out)
    assert set(report) == set(lines)
    assert {r["session_id"]: r["reward"] for r in rows.to_pylist()} == {
        name: line["reward"] for name, line in lines.items()
    }
    assert all(r["tokens_trained"] == r["tokens_sampled"] for r in report.values())
    assert not (out / "sandboxes").exists()


ENDS_BEFORE = """
import os, pathlib, pytest

if "yes" not in pathlib.Path(os.environ["WORKSPACE"], "compared.txt").read_text():
    os._exit(0)
def test_f(): pytest.skip()
"""
UNSOLVED = {"solution": {}}
# task: its fields, the agent's manners, how it ends, the reward, and the error or finding
ENDS = {
    "fine": ({}, "", "finished", 1.0, None),
    "mute": (
        {},
        "mute",
        "finished",
        None,
        "harness: it ended without an answered model",
    ),
    "unset": (
        {"grade": {"command": "true", "env": {"A": "${TRAJKIT_X}"}}},
        *("", "finished", None),
        "grade: A = '${TRAJKIT_X}', which is not set here",
    ),
    "setup": (
        {"setup": {"command": "echo no luck; exit 2"}},
        *("", None, None, "setup: exit code 2: no luck"),
    ),
    "image": ({"image": "any"}, "", None, None, "sandbox: image = 'any'"),
    "unchanged": (
        {"grade": {"command": "no-such"}, **UNSOLVED},
        *("", "finished", None, "grade: no-such: exit code 127"),
    ),
    # what changes may have caused: an agent could take its failures out of training
    "slow": (
        {"grade": {"command": "sleep 600", "timeout_s": 2}},
        *("", "finished", 0.0),
        "cannot be graded: grade: sleep 600: timed out after 2 s",
    ),
    "changed": (
        {"grade": {"command": "no-such"}},
        *("", "finished", 0.0, "cannot be graded: grade: no-such: exit code 127"),
    ),
    "killed": (
        {"grade": {"command": "kill -9 $$"}},
        *("", "finished", 0.0, "cannot be graded: grade: kill -9 $$: exit code -9"),
    ),
    # otherwise an agent could skip tests where those of the base commit do not end
    "compared": (
        {
            "grade": {"command": "python -m pytest -q"},
            "tests": {"test_a.py": ENDS_BEFORE},
        },
        *("", "finished", 0.0),
        "skipped: test_a.py::test_f; nothing is known of the base commit",
    ),
    # its model got all its answers, and may have ended the harness itself
    "left": (UNSOLVED, "fail", "failed", 0.0, "harness failed: exit code 3: I give up"),
    "solved": ({}, "fail", "failed", 1.0, "harness failed: exit code 3: I give up"),
    "few": ({"agent": {"max_turns": 2}}, "", "turn_limit", 1.0, None),
}


def test_every_end_of_a_rollout_has_a_reason_and_maybe_a_reward(tmp_path, capsys):
    tasks = {}
    for name, (fields, manners, *_) in ENDS.items():
        workspace = {f"{name}.txt": "no\n", "manners": manners}
        tasks[name] = {"workspace": workspace, **fields}
    out = tmp_path / "run"
    agent = f'AGENT_MANNERS="$(cat manners)" {AGENT}'
    tasks = write_tasks(tmp_path / "t.jsonl", **tasks)
    argv = command(tasks, out, *QUICK, agent=agent)
    # as people are shown it
    assert run([one for one in argv if one != "--json"]) == BAD_DATA
    said = capsys.readouterr().out
    assert "rollouts 13 (0 finished before), graded 8" in said
    assert "fine 1 1 1.00 4".split() in [text.split() for text in said.splitlines()]
    lines = {line["group_id"]: line for line in sessions(out).values()}
    for name, (_, _, end, reward, why) in ENDS.items():
        line = lines[name]
        assert (line["agent_end"], line["reward"]) == (end, reward), name
        if reward is None:
            assert line["error"].startswith(why)
            assert line["error"] in said
        else:
            assert line["error"] is None
            assert len(line["findings"]) == (why is not None)
            assert why is None or why in line["findings"][0]
    assert lines["few"]["turns"] == 2
    _, report = rows_of(out)
    for line in lines.values():
        if line["turns"]:
            counts = report[line["session_id"]]
            lost = 0 if line["error"] is None else counts["tokens_sampled"]
            assert counts["lost_untrainable"] == lost


def test_an_agent_whose_time_is_up_is_graded_on_what_it_left(tmp_path, do):
    tasks = write_tasks(
        tmp_path / "t.jsonl",
        a={"grade": {"command": "test $(cat a.txt) = no"}},
        b={"grade": {"kind": "completed"}},
    )
    out = tmp_path / "run"
    code, _ = do(command(tasks, out, *QUICK, "--timeout", "8", manners="hang"))
    assert code == DONE
    found = {s["group_id"]: s for s in sessions(out).values()}
    assert {s["agent_end"] for s in found.values()} == {"timed_out"}
    assert found["a"]["exit_code"] is None
    assert (found["a"]["reward"], found["b"]["reward"]) == (1.0, 0.0)
    rows, _ = rows_of(out)
    assert set(rows["session_id"].to_pylist()) == set(sessions(out))


def test_a_busy_gateway_is_asked_again_and_a_silent_trainer_counted(roll, monkeypatch):
    finish, slow = GatewayClient.finish, [1, 2]

    def later(*given):
        if slow:
            raise ConnectionError(f"no answer {slow.pop()}")
        return finish(*given)

    monkeypatch.setattr(GatewayClient, "finish", later)
    monkeypatch.setattr(rollout, "_PAUSES_SECONDS", (0.0, 0.0))
    code, said, line = roll({}, "--callback", "http://127.0.0.1:9/")
    assert (code, line["turns"], line["reward"], slow) == (DONE, 4, 1.0, [])
    assert said["callbacks_missed"] == 1


CHANGES = """
git config user.name me && git config user.email me@localhost
printf 'a\\0b\\377' > binary && git add binary && git commit -qm one
echo new > 'un tracked' && mkdir -p sub && echo deep > sub/file && chmod +x sub/file
rm gone && git checkout -qb elsewhere && echo cheat > hidden_test && ln -s gone link
"""


def test_all_that_an_agent_changed_is_graded_but_for_the_tests(tmp_path, roll):
    """Committed on a branch of its own, untracked, binary, removed, a mode, a link."""
    grade = (
        "test \"$(od -An -tx1 binary)\" = ' 61 00 62 ff' && test -f 'un tracked' && "
        "test -x sub/file && test ! -e gone && test -L link && "
        "test $(cat hidden_test) = right"
    )
    task = {
        "workspace": {"gone": "x", "hidden_test": "wrong"},
        "tests": {"hidden_test": "right"},
        "editable": ["**"],
        "grade": {"command": grade, "in_workspace": True},
    }
    agent = tmp_path / "agent.sh"
    agent.write_text(f"set -e\n{CHANGES}\n{AGENT}")
    code, _, line = roll(task, agent=f"sh {agent}")
    assert (code, line["error"], line["reward"]) == (DONE, None, 1.0)


def runner_of(argv):
    """A run in a process of its own, without its output."""
    root = str(Path(__file__).parents[2])
    return subprocess.Popen(
        [sys.executable, "-c", COMMAND, "rollout", *argv],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])},
        stdout=subprocess.DEVNULL,
    )


def killed_run(argv, out, ended, *, by=signal.SIGKILL, turns=0):
    """The exit code of a run in a process of its own, which a signal ended.

    The signal is sent when ``ended`` rollouts have ended and the log has ``turns`` turns.
    """
    with runner_of(argv) as runner:
        journal = out / "rollouts.log"
        try:
            while not (
                journal.exists()
                and len(of_log(out)[1]) >= ended
                and logged(out) >= turns
            ):
                assert goes_on(runner)
            runner.send_signal(by)
            runner.wait(60)
        finally:
            runner.kill()
    return runner.returncode


def of_log(out):
    """The sessions of a run that began, and those that ended."""
    lines = (out / "rollouts.log").read_text().split("\n")[1:-1]
    records = [json.loads(line) for line in lines]
    ended = {each["session_id"] for each in records if each["seconds"] is not None}
    return {each["session_id"] for each in records}, ended


def logged(out):
    """The turns in the log of a run that goes on."""
    paths = list((out / "turns").rglob("turns-*.arrows"))
    return turns_of(paths[0], paths[0].stat().st_size) if paths else -1


@cache
def turns_of(path, size):
    """The turns of a log that only grows: it is read when it did."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", tk.errors.TornLogWarning)
        return tk.read_turns(path).num_rows if size else -1


def test_a_run_that_was_killed_is_taken_up_where_it_was(tmp_path, do):
    tasks = write_tasks(tmp_path / "t.jsonl", **{f"t{i}": {} for i in range(4)})
    out = tmp_path / "run"
    killed_run(command(tasks, out, "--parallel", "2", manners="orphan"), out, 2)
    with (out / "rollouts.log").open("a") as journal:
        journal.write('{"task": "torn')
    began, over = of_log(out)
    assert over < began

    code, said = do(command(tasks, out, "--parallel", "2"))
    assert (code, said["over_before"]) == (DONE, len(over))
    assert said["over"] == 4 - len(over)
    lines = sessions(out)
    graded = [s for s in lines.values() if s["error"] is None]
    assert sorted(s["group_id"] for s in graded) == [f"t{i}" for i in range(4)]
    assert {s["reward"] for s in graded} == {1.0}
    for name in began - over:
        assert lines[name]["reward"] is None
        assert lines[name]["error"] == (
            "interrupted: the run was stopped before it ended "
            f"(sampled again as {name}~2)"
        )
        assert lines[f"{name}~2"]["attempt"] == 2
    # what was sampled before the kill is counted, and not trained
    _, report = rows_of(out)
    for name, line in report.items():
        lost = line["tokens_sampled"] if name in began - over else 0
        assert line["lost_untrainable"] == lost
    assert not (out / "sandboxes").exists()

    # as if it had been killed after the last rollout
    (out / "sessions.parquet").unlink()
    code, said = do(command(tasks, out))
    assert (code, said["over_before"], said["over"]) == (DONE, 4, 0)
    assert sessions(out) == lines


@pytest.mark.slow
def test_nothing_is_lost_or_counted_twice_after_twenty_kills(tmp_path, do):
    """Each at a random line of the log; the gateway lives on."""
    tasks = write_tasks(tmp_path / "t.jsonl", a={})
    out, draw = tmp_path / "run", random.Random(1)
    app = create_app(
        EmbeddedEngine(solve(read_tasks(tasks), 1.0)),
        embedded_renderer(),
        TurnLog(tmp_path / "far"),
        Options(admin_token="secret"),
    )
    journal = out / "rollouts.log"
    with running(app) as url:
        options = ("--gateway", url, "--admin-token", "secret", "--repeat", "24")
        argv = command(tasks, out, *QUICK, *options, "--parallel", "3")
        kills = 0
        while kills < 20:
            begun = len(journal.read_bytes().splitlines()) if journal.exists() else 0
            lines = begun + draw.randint(1, 5)
            with runner_of(argv) as runner:
                while goes_on(runner):
                    if journal.exists() and journal.read_bytes().count(b"\n") >= lines:
                        runner.kill()
                kills += 1
            assert runner.returncode in (0, -signal.SIGKILL)
        code, said = do(argv)
    assert (code, said["failures"]) == (DONE, {})
    lines = sessions(out)
    graded = [line for line in lines.values() if line["error"] is None]
    assert sorted(line["sample"] for line in graded) == [*range(24)]
    assert {line["reward"] for line in graded} == {1.0}
    turns = tk.read_turns(tmp_path / "far")
    assert {*turns["session_id"].to_pylist()} <= lines.keys()
    rows, report = linearized(turns, sessions=read_sessions(out))
    assert {*rows["session_id"].to_pylist()} == {s["session_id"] for s in graded}
    for line in report.to_pylist():
        lost = 0 if line["error"] is None else line["tokens_sampled"]
        assert line["lost_untrainable"] == lost
    assert not (out / "sandboxes").exists()


def test_a_run_that_is_asked_to_end_clears_its_sandboxes_away(tmp_path, do):
    tasks = write_tasks(tmp_path / "t.jsonl", a={}, b={})
    out = tmp_path / "run"
    argv = command(tasks, out, "--parallel", "1", manners="orphan hang")
    assert killed_run(argv, out, 0, by=signal.SIGTERM, turns=1) != 0
    (line,) = sessions(out).values()
    assert line["error"] == "interrupted: the run was stopped before it ended"
    assert not (out / "sandboxes").exists()
    assert marked(f"trajkit-{line['session_id']}-agent") == set()
    _, report = rows_of(out)
    assert report[line["session_id"]]["lost_untrainable"] > 0


def test_more_samples_and_failed_ones_can_be_asked_for(tmp_path, do, capsys):
    tasks = write_tasks(tmp_path / "t.jsonl", a={})
    out = tmp_path / "run"
    code, said = do(command(tasks, out, *QUICK, manners="mute"))
    failures = {"harness: it ended without an answered model call": 1}
    assert (code, said["failures"]) == (BAD_DATA, failures)
    code, said = do(command(tasks, out, *QUICK, "--repeat", "2"))
    assert (code, said["over_before"], said["over"]) == (DONE, 1, 1)
    code, said = do(command(tasks, out, *QUICK, "--repeat", "2", "--retry-failed"))
    assert (code, said["over_before"], said["over"]) == (DONE, 1, 1)
    first, second, again = sorted(
        sessions(out).values(), key=lambda s: (s["attempt"], s["sample"])
    )
    assert (first["sample"], first["reward"]) == (0, None)
    assert first["error"].endswith(f"(sampled again as {again['session_id']})")
    assert (second["sample"], second["reward"]) == (1, 1.0)
    assert (again["sample"], again["attempt"], again["reward"]) == (0, 2, 1.0)
    # and nothing else
    other = ("--sandbox", f"{__name__}:StuckSandbox")
    for argv, refusal in (
        (command(tasks, out, harness="codex"), "harness 'shell', not 'codex'"),
        (command(tasks, out, *QUICK, *other), "'local', not '.*:StuckSandbox'"),
    ):
        fails(capsys, run(argv), refusal)
    write_tasks(tasks, a={"workspace": {"a.txt": "not yet\n"}})
    changed = r"task 'a' has changed since .* default"
    fails(capsys, run(command(tasks, out, *QUICK)), changed)


def test_attempts_at_a_sample_have_the_same_sandboxes(tmp_path):
    """The second one removes the container that a killed one left."""
    (task,) = read_tasks(write_tasks(tmp_path / "t.jsonl", a={}))
    how, names = Settings(harness="shell"), set()
    for attempt in (1, 2):
        begun = rollout._begun(task, how, "run", 0, attempt)
        each = rollout.Attempt(task, how, begun, tmp_path, threading.Event())
        names.add(each.sandbox("agent").spec.name)
    assert names == {"trajkit-a.0.run-agent"}


def rollouts_of(tasks, out):
    return Rollouts(read_tasks(tasks), Settings(harness="shell"), out)


# options | exit code | a part of the error
REFUSALS = """
--harness emacs | 2 | 'emacs' is not one of claude-code, codex
--sandbox cloud | 2 | 'cloud' is not one of
--sandbox-option x | 2 | NAME=VALUE is expected
--timeout -1 | 2 | Must be > 0
--engine sglang | 2 | needs --engine-url
--ray auto | 2 | --ray needs --gateway
--resource gpu=x | 2 | could not convert string to float
--path bin | 2 | --path bin: an absolute path is expected
--harness opencode | 3 | opencode is not installed: npm install
--sandbox docker | 3 | a sandbox of kind docker needs an image
--sandbox-option namespaces=no --untrusted | 3 | --untrusted: the local sandbox isolates
--gateway http://127.0.0.1:9 --admin-token x | 3 | http://127.0.0.1:9
"""


@pytest.mark.parametrize("line", REFUSALS.strip().split("\n"))
def test_what_cannot_be_run_ends_the_run_at_once(tmp_path, capsys, line):
    options, code, said = line.split(" | ")
    tasks, out = write_tasks(tmp_path / "t.jsonl", a={}), tmp_path / "run"
    harness = [] if "--harness" in options else ["--harness", "shell"]
    argv = [str(tasks), "-o", str(out), *harness, *options.split()]
    assert run([*argv, "--argument", AGENT]) == int(code)
    assert said in capsys.readouterr().err
    assert not (out / "turns").exists()


def test_one_process_works_on_a_run(tmp_path, capsys):
    tasks = write_tasks(tmp_path / "t.jsonl", a={})
    said = "another process works on this run"
    with rollouts_of(tasks, tmp_path):
        fails(capsys, run(command(tasks, tmp_path)), said)


INTRUDER = """
python - <<'END'
import json, os, urllib.request
url, key = os.environ["OPENAI_BASE_URL"].removesuffix("/v1"), os.environ["OPENAI_API_KEY"]
def tried(path, body=None, method="POST", **headers):
    data = json.dumps(body or {}).encode()
    request = urllib.request.Request(url + path, data, headers, method=method)
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code
said = {"messages": [{"role": "user", "content": "hi"}]}
mine = open("name").read().strip()
statuses = [
    tried("/sessions", {"reward": 100}),
    tried(f"/sessions/{mine}/finish", {"reward": 100}, authorization=f"Bearer {key}"),
    tried(f"/sessions/{mine}/drop"),
    tried("/engine/pause"),
    tried("/engine/resume"),
    tried("/v1/chat/completions", said, authorization=f"Bearer {mine}"),
    tried(f"/s/{mine}/v1/chat/completions", said),
    tried("/v1/chat/completions", said, **{"x-session-key": mine}),
]
open("statuses", "w").write(json.dumps(statuses))
END
"""


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_an_agent_has_no_access_to_the_trainer_s_routes(tmp_path, roll, host):
    """Nor can it guess the key of a session from its name."""
    agent = tmp_path / "agent.sh"
    out = tmp_path / "run"
    # the name of its session, as earlier versions used it for the key
    name = f"basename {out}/sessions/*"
    agent.write_text(f"{name} > name\n{INTRUDER}\n{AGENT}")
    code, _, line = roll({}, "--host", host, agent=f"sh {agent}")
    assert (code, line["error"], line["reward"]) == (DONE, None, 1.0)
    patch = (out / "sessions" / line["session_id"] / "patch.diff").read_text()
    assert "+[401, 401, 401, 401, 401, 401, 401, 401]" in patch.splitlines()
    assert line["turns"] == 4


def test_rollouts_use_a_gateway_that_runs_elsewhere(tmp_path, do, monkeypatch, capsys):
    tasks = write_tasks(tmp_path / "t.jsonl", a={})
    log = TurnLog(tmp_path / "far")
    engine = EmbeddedEngine(solve(read_tasks(tasks), 1.0))
    renderer = embedded_renderer()
    out = tmp_path / "run"
    with running(
        create_app(engine, renderer, log, Options(admin_token="secret"))
    ) as url:
        argv = command(tasks, out, *QUICK, "--gateway", url)
        assert run(argv) == BAD_USAGE
        assert "needs its token" in capsys.readouterr().err
        monkeypatch.setenv("TRAJKIT_ADMIN_TOKEN", "secret")
        code, said = do(argv)
    assert (code, said["mean_reward"], said["turns"]) == (DONE, 1.0, None)
    assert set(tk.read_turns(tmp_path / "far")["session_id"].to_pylist()) == {
        *sessions(out)
    }


@contextmanager
def listener(statuses):
    """A trainer: what it is sent, answered with these statuses in turn."""
    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(statuses.pop(0) if statuses else 200)
            self.end_headers()

        def log_message(self, *_):
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/", got
        finally:
            server.shutdown()
            thread.join()


def test_a_trainer_is_told_of_each_rollout(roll):
    """Also of names that are not UTF-8, which the findings escape."""
    # afterwards: the agent may list its files, and reads text
    agent = f"{AGENT} && touch \"$(printf '\\377.pth')\""
    with listener([503]) as (url, got):
        code, said, line = roll({}, "--callback", url, agent=agent)
    assert (code, said["mean_reward"], said["callbacks_missed"]) == (DONE, 1.0, 0)
    assert [one["reward"] for one in got] == [1.0, 1.0]
    assert got[0]["session_id"] == line["session_id"]
    assert line["findings"] == got[0]["findings"] == ["not graded: \\udcff.pth"]


def test_a_trainer_that_does_not_answer_is_counted(roll, monkeypatch):
    monkeypatch.setattr(rollout, "_PAUSES_SECONDS", (0.0, 0.0))
    code, said, line = roll({}, "--callback", "http://127.0.0.1:9/")
    assert (code, said["callbacks_missed"], line["reward"]) == (DONE, 1, 1.0)
    # it gets what it missed once, and no agent runs again
    with listener([]) as (url, got):
        for count in (0, 1):
            code, said, again = roll({}, "--callback", url)
            assert (code, said["over_before"], again) == (DONE, count, line)
    assert [each["session_id"] for each in got] == [line["session_id"]]


def test_a_journal_that_is_none_is_refused(tmp_path):
    tasks = write_tasks(tmp_path / "t.jsonl", a={})
    path = tmp_path / "rollouts.log"
    for text, said in (("[1]\n", "rollouts.log:1"), ("x\n", "rollouts.log:1")):
        path.write_text(text)
        with pytest.raises(FormatError, match=said):
            rollouts_of(tasks, tmp_path)
    path.write_text("")
    with rollouts_of(tasks, tmp_path) as rollouts:
        assert len(rollouts.todo) == 1


# The ten tasks that ship


NAMES = sorted(path.name for path in EXAMPLES.iterdir())


@pytest.mark.parametrize(
    ("names", "mended"),
    [
        (NAMES[::4], True),
        *(pytest.param(NAMES, each, marks=pytest.mark.slow) for each in (True, False)),
    ],
    ids=["some", "all", "none"],
)
def test_the_fault_of_an_example_fails_and_its_solution_passes(
    tmp_path, do, names, mended
):
    """As they are graded, after an agent that does nothing, or puts the solution."""
    tasks, agent = tmp_path / "tasks", tmp_path / "agent.sh"
    tasks.mkdir()
    for name in names:
        (tasks / name).symlink_to(EXAMPLES / name)
    # the prompt's task is found by a file that only its workspace has
    solution = (
        f"for task in {EXAMPLES}/*; do "
        "if diff -rq $task/workspace . | grep -qv '^Only in [.]'; then :; "
        "else cp $task/solution/* .; fi; done; "
    )
    agent.write_text(f"{solution if mended else ''}TASK_PROMPT=hello {AGENT}")
    argv = command(tasks, tmp_path / "run", *QUICK, agent=f"sh {agent}")
    code, said = do(argv)
    assert (code, said["failures"]) == (DONE, {})
    rewards = {line["group_id"]: line["reward"] for line in said["rollouts"]}
    assert sorted(rewards) == names
    assert all((reward == 1.0) is mended for reward in rewards.values())


@pytest.mark.skipif(
    find_spec("minisweagent") is None, reason="its agent is in the extra dev"
)
def test_examples_have_a_reward_where_they_were_edited(tmp_path, do):
    """By mini-swe-agent: a task is solved where its patch is the solution."""
    out, tasks = tmp_path / "run", tmp_path / "tasks"
    names = ["cart", "leap", "slug"]
    for name in names:
        shutil.copytree(EXAMPLES / name, tasks / name)
    options = ("--seed", "1", "--parallel", "2", "--odds", "0.75")
    argv = command(tasks, out, *options, harness="mini-swe-agent")
    code, said = do(argv)
    assert (code, said["failures"]) == (DONE, {})
    turns = tk.read_turns(out / "turns")
    graded = {s["group_id"]: s for s in sessions(out).values()}
    assert sorted(graded) == names
    for name, line in graded.items():
        edited = line["patch_bytes"] > 0
        assert (line["reward"] == 1.0) == edited, name
        assert (turns["session_id"].to_pylist()).count(line["session_id"]) == 4
    rows, report = rows_of(out)
    assert {*rows["session_id"].to_pylist()} == {*sessions(out)}
    assert all(r["tokens_trained"] == r["tokens_sampled"] for r in report.values())


def test_the_policy_says_a_word_where_it_knows_no_better():
    policy = solve(read_tasks(EXAMPLES / "leap"), 1.0)
    assert policy("<|im_start|>user\nHello<|im_end|>\n") == [Reply(("Fine.",))]


def test_an_agent_that_changes_its_task_is_graded_by_what_was_read(tmp_path, do):
    tasks = tmp_path / "task"
    shutil.copytree(EXAMPLES / "leap", tasks)
    agent = f"echo > {tasks}/tests/test_leap.py; TASK_PROMPT=hello {AGENT}"
    code, said = do(command(tasks, tmp_path / "run", *QUICK, agent=agent))
    assert (code, said["failures"], said["mean_reward"]) == (DONE, {}, 0.0)


# Faults that no part of a rollout expects


class StuckSandbox(LocalSandbox):
    """One that cannot be removed after the agent of a task, or the grading of another."""

    kind = "stuck"

    def stop(self):
        super().stop()
        if re.fullmatch(r"trajkit-(a\..*-agent|graded\..*-grade)", self.spec.name):
            raise SandboxError("it is stuck")


STUCK = ("--sandbox", f"{__name__}:StuckSandbox", *QUICK)


def test_an_unexpected_fault_is_the_error_of_its_own_rollout(tmp_path, capsys, caplog):
    """The other tasks are graded, and the table has all of them."""
    tasks = write_tasks(tmp_path / "t.jsonl", fine={}, gone={}, a={}, graded={})
    out = tmp_path / "run"
    # the folder that its log is in
    gone = f"rm -rf {out}/sessions/gone.*"
    agent = f"{AGENT}; test ! -e gone.txt || {gone}"
    assert run(command(tasks, out, *STUCK, agent=agent)) == BAD_DATA
    assert json.loads(capsys.readouterr().out)["over"] == 4
    lines = {line["group_id"]: line for line in sessions(out).values()}
    rewards = {name: line["reward"] for name, line in lines.items()}
    assert rewards == {"fine": 1.0, "gone": None, "a": None, "graded": 1.0}
    assert lines["gone"]["error"].startswith("FileNotFoundError: ")
    assert lines["a"]["error"] == "sandbox: it is stuck"
    # a reward is kept if only the graded copy cannot be removed
    assert lines["graded"]["error"] is None
    assert "SandboxError: it is stuck" in caplog.text
    assert "Traceback" in caplog.text


def test_a_sandbox_that_cannot_be_removed_does_not_keep_a_run_from_its_end(tmp_path):
    tasks = write_tasks(tmp_path / "t.jsonl", a={}, b={})
    out = tmp_path / "run"
    argv = command(tasks, out, *STUCK, "--parallel", "2", manners="hang")
    assert killed_run(argv, out, 0, by=signal.SIGTERM, turns=2) != 0
    lines = sessions(out).values()
    assert {line["group_id"] for line in lines} == {"a", "b"}
    assert {line["error"] for line in lines} == {
        "interrupted: the run was stopped before it ended"
    }
    for line in lines:
        assert marked(f"trajkit-{line['session_id']}-agent") == set()


class Deadly:
    def __reduce__(self):
        return os._exit, (3,)  # it ends the process that reads it


def test_a_gateway_that_ends_while_it_starts_is_named(monkeypatch):
    """It has not read its tasks, which are more than a pipe holds."""
    monkeypatch.undo()  # a process starts as users' do
    jobs = [(Deadly(), bytes(1 << 20))]
    with workers.children("the gateway", print, jobs) as (gateway,):
        with pytest.raises(ConnectionError, match="the gateway ended with exit code 3"):
            gateway.received()

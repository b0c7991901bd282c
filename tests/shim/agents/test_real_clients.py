"""The real Claude Code and the real Codex, unmodified, against the gateway on loopback.

``TRAJKIT_CLIENTS`` is a directory in whose ``node_modules`` they are installed. They get
an environment of their own, with a home that is empty and no proxies, and settings that
switch telemetry and updates off.
"""

import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import trajkit as tk
from tests.shim.clients import http
from tests.shim.rollout.test_rollout import EXAMPLES
from tests.shim.rollout.test_rollout import run as run_command
from trajkit_shim.app import create_app
from trajkit_shim.engines.embedded import (
    EmbeddedEngine,
    Reply,
    load_tokenizer,
    tool_call,
)
from trajkit_shim.engines.embedded.script import messages
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.rollout import solver
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

pytestmark = pytest.mark.clients

MODULES = Path(os.environ["TRAJKIT_CLIENTS"]).resolve() / "node_modules"
CLAUDE = MODULES / "@anthropic-ai/claude-code-linux-x64/claude"
CODEX = next(MODULES.glob("@openai/codex-linux-x64/vendor/*/bin/codex"), None)


def scripted(scripts):
    """A policy that says the k-th line of the script whose key the user wrote.

    Where no user wrote any key, as in a side call, it says one word.
    """

    def policy(prompt):
        read = messages(prompt)
        asked = " ".join(message.text for message in read if message.role == "user")
        said = sum(message.role == "assistant" for message in read)
        for key, lines in scripts.items():
            if key in asked:
                return [Reply(lines[min(said, len(lines) - 1)])]
        return [Reply(("Fine.",))]

    return policy


@contextmanager
def gateway(directory, scripts):
    """A session of a gateway in this process: its URL, key and log."""
    engine = EmbeddedEngine(scripted(scripts), seed=3)
    log = TurnLog(directory / "run")
    app = create_app(engine, ChatRenderer(load_tokenizer()), log)
    with running(app) as url:
        opened = http.post(f"{url}/sessions", json={}).json()
        yield url, opened["api_key"], log
        shown = http.get(f"{url}/sessions/{opened['session_id']}").json()
        (directory / "session.json").write_text(json.dumps(shown))


def run(directory, command, environment, expected=0, seconds=120):
    # no git repository: Claude Code writes its state into the system prompt
    work = directory / "work"
    work.mkdir(exist_ok=True)
    done = subprocess.run(
        [str(part) for part in command],
        cwd=work,
        env={"PATH": "/usr/bin:/bin", "HOME": str(directory), **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    (directory / "stdout.txt").write_text(done.stdout)
    (directory / "stderr.txt").write_text(done.stderr)
    assert done.returncode == expected, done.stdout + done.stderr
    return done.stdout, work


def forgetful(turns, links):
    """The turns whose user speaks behind what was thought, which the template drops."""
    parents = dict(
        zip(links["turn_index"].to_pylist(), links["parent"].to_pylist(), strict=True)
    )
    # of each turn: its messages, and whether some thought stands behind the last user
    said, thinks, found = {}, {}, set()
    # a body is written where it stands for the first time
    bodies = {}
    for turn in turns.to_pylist():
        name, parent = turn["turn_index"], parents[turn["turn_index"]]
        said[name] = turn["messages"]
        thought = False
        if parent is not None:
            new = turn["messages"][len(said[parent]) + 1 :]
            thought = thinks[parent]
            if thought and any(message["role"] == "user" for message in new):
                found.add(name)
                thought = False
        for message in (*turn["messages"], turn["response"]):
            if message["body"] is not None:
                bodies[message["key"]] = json.loads(message["body"])
        reply = bodies[turn["response"]["key"]]
        thinks[name] = thought or "reasoning_content" in reply
    return found


def check(log, directory, roots):
    """Every call once, each conversation a chain, and rows that verify.

    What the client sends back is what was sampled, to the token: no turn drifts, but
    where the user speaks behind what was thought each one does.
    """
    turns = tk.read_turns(log.path)
    tk.validate(turns)
    links = tk.link(turns)
    assert links["parent"].to_pylist().count(None) == roots
    shown = json.loads((directory / "session.json").read_text())
    assert shown["turns"] == shown["answered"] == len(turns)
    assert shown["echo"]["new"] == 0, shown
    expected = forgetful(turns, links)
    drift = tk.classify_drift(turns, links).to_pylist()
    assert {pair["turn_index"] for pair in drift if pair["size"]} == expected
    rendered = {
        turn["turn_index"]: turn["render_reason"]
        for turn in turns.select(["turn_index", "render_reason"]).to_pylist()
    }
    assert {n for n, why in rendered.items() if why == "reasoning"} == expected
    counts = {
        "opening": roots,
        "reasoning": len(expected),
        "append": len(turns) - roots - len(expected),
    }
    assert shown["prompts"] == {why: n for why, n in counts.items() if n}
    rows = tk.linearize(turns, policy="faithful", reward=1.0)
    assert tk.verify(rows, turns).num_rows == 0
    return turns.to_pylist(), shown


CLAUDE_OPTIONS = ["--output-format", "json", "--allowedTools", "Bash,Agent"]
CODEX_OPTIONS = ["--skip-git-repo-check", "--json"]


def claude_environment(url, session):
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": session,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1",
        "DISABLE_TELEMETRY": "1",
        "IS_SANDBOX": "1",
    }


def write_codex_config(directory, url):
    home = directory / ".codex"
    home.mkdir()
    (home / "config.toml").write_text(
        f"""
model = "any"
model_provider = "gateway"
sandbox_mode = "danger-full-access"
approval_policy = "never"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.gateway]
name = "gateway"
base_url = "{url}/v1"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
"""
    )


# where nothing is thought, nothing drifts
THINKS = pytest.mark.parametrize(
    "thought", [("<think>\nEasy.\n</think>\n\n",), ()], ids=["thinks", "plain"]
)


@THINKS
@pytest.mark.skipif(not CLAUDE.exists(), reason="Claude Code is not installed")
def test_claude_code(tmp_path, thought):
    write = '{"command": "echo 42 >  answer.txt", "timeout": 1.0e4}'
    look = '{"command":"cat answer.txt",  "description": "caf\\u00e9"}'
    agent = '{"description": "check", "prompt": "SUBTASK", "subagent_type": "claude"}'
    scripts = {
        "SUBTASK": [tool_call("Bash", look), ("It says 42.",)],
        "MAINTASK": [
            (
                *thought,
                "Let me write it. \n\n",
                *tool_call("Bash", write),
            ),
            tool_call("Agent", agent),
            (*tool_call("Bash", look), *tool_call("Bash", look)),
            (" Done: 42.",),
        ],
    }
    with gateway(tmp_path, scripts) as (url, session, log):
        environment = claude_environment(url, session)
        said, work = run(
            tmp_path, [CLAUDE, "-p", "MAINTASK", *CLAUDE_OPTIONS], environment
        )
        again, _ = run(
            tmp_path,
            [CLAUDE, "--continue", "-p", "Sure?", *CLAUDE_OPTIONS],
            environment,
        )
    # the sub-agent's conversation is one of its own
    turns, shown = check(log, tmp_path, roots=2)
    assert bool(thought) == ("reasoning" in shown["prompts"])
    for result in (said, again):
        assert json.loads(result)["result"].strip() == "Done: 42."
    assert (work / "answer.txt").read_text() == "42\n"
    assert {turn["harness"] for turn in turns} == {"claude-code"}
    main = [turn for turn in turns if turn["agent_id"] is None]
    assert len(main) == 5
    assert len(turns) - len(main) == 2


@THINKS
@pytest.mark.skipif(CODEX is None, reason="Codex is not installed")
def test_codex(tmp_path, thought):
    write = '{"cmd": "echo 42 >  answer.txt", "yield_time_ms":  1000}'
    look = '{"cmd":"cat answer.txt"}'
    scripts = {
        "MAINTASK": [
            (
                *thought,
                "Let me write it. \n\n",
                *tool_call("exec_command", write),
            ),
            (*tool_call("exec_command", look), *tool_call("exec_command", look)),
            (" Done: 42.",),
        ],
    }
    with gateway(tmp_path, scripts) as (url, session, log):
        write_codex_config(tmp_path, url)
        environment = {"OPENAI_API_KEY": session}
        said, work = run(
            tmp_path, [CODEX, "exec", *CODEX_OPTIONS, "MAINTASK"], environment
        )
        again, _ = run(
            tmp_path,
            [CODEX, "exec", *CODEX_OPTIONS, "resume", "--last", "Sure?"],
            environment,
        )
    turns, shown = check(log, tmp_path, roots=1)
    assert bool(thought) == ("reasoning" in shown["prompts"])
    for lines in (said, again):
        last = json.loads(lines.splitlines()[-2])
        assert last["item"]["text"].strip() == "Done: 42."
    assert (work / "answer.txt").read_text() == "42\n"
    assert len(turns) == 4
    assert {turn["harness"] for turn in turns} == {"codex"}
    assert len({turn["agent_id"] for turn in turns}) == 1
    assert shown["tools_left_out"] == {"web_search": 4}


def refused(tmp_path, client):
    """What a client says whose session is closed; it must end by itself."""
    with gateway(tmp_path, {}) as (url, session, log):
        http.post(f"{url}/admin/drain", json={"wait_seconds": 0})
        if client == "claude":
            command = [CLAUDE, "-p", "hi", *CLAUDE_OPTIONS]
            environment = claude_environment(url, session)
        else:
            write_codex_config(tmp_path, url)
            command = [CODEX, "exec", *CODEX_OPTIONS, "hi"]
            environment = {"OPENAI_API_KEY": session}
        said, _ = run(tmp_path, command, environment, expected=1)
    assert tk.read_turns(log.path).num_rows == 0
    return said


@pytest.mark.skipif(not CLAUDE.exists(), reason="Claude Code is not installed")
def test_claude_code_takes_a_closed_session_for_the_end(tmp_path):
    assert json.loads(refused(tmp_path, "claude"))["api_error_status"] == 410


@pytest.mark.skipif(CODEX is None, reason="Codex is not installed")
def test_codex_takes_a_closed_session_for_the_end(tmp_path):
    last = json.loads(refused(tmp_path, "codex").splitlines()[-1])
    assert last["type"] == "turn.failed"
    assert "410" in last["error"]["message"]


# what holds each harness's program; those of npm need node beside them
PROGRAMS = {
    "claude-code": CLAUDE,
    "codex": CODEX,
    "opencode": MODULES / "opencode-linux-x64/bin/opencode",
    "gemini-cli": MODULES / ".bin/gemini",
    "qwen-code": MODULES / ".bin/qwen",
    "pi": MODULES / ".bin/pi",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_rollouts_of_a_real_agent_are_graded(tmp_path, monkeypatch, name):
    """In a sandbox, on two tasks that it solves; every call once, in rows that verify."""
    program = PROGRAMS[name]
    if program is None or not program.exists():
        pytest.skip(f"{name} is not installed")
    monkeypatch.setattr(solver.solve, "__defaults__", (1.0,))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for task in ("leap", "query"):
        (tasks / task).symlink_to(EXAMPLES / task)
    out = tmp_path / "run"
    argv = [
        str(tasks),
        "--harness",
        name,
        "-o",
        str(out),
        "--path",
        str(program.parent),
    ]
    assert run_command([*argv, "--parallel", "2", "--timeout", "120"]) == 0
    sessions = pq.read_table(out / "sessions.parquet")
    for line in sessions.to_pylist():
        assert (line["reward"], line["agent_end"]) == (1.0, "finished"), line
    turns = tk.read_turns(out / "turns")
    tk.validate(turns)
    assert sorted(turns["turn_index"].to_pylist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert tk.link(turns)["parent"].to_pylist().count(None) == 2
    rows = tk.linearize(turns, sessions=sessions)
    assert tk.verify(rows, turns, sessions=sessions).num_rows == 0

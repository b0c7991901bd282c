"""Real clients, unmodified, against the gateway on loopback.

``TRAJKIT_CLIENTS`` is a directory in whose ``node_modules`` they are installed. Each is
started as its harness describes, in an empty home, without proxies, and with telemetry
and updates switched off.
"""

import json
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

import trajkit as tk
from tests.rollout.test_rollout import EXAMPLES
from tests.rollout.test_rollout import run as run_command
from tests.shim.clients import http
from tests.shim.fakes import load_tokenizer
from trajkit_rollout.settings import HARNESSES
from trajkit_shim.app import create_app
from trajkit_shim.engines.embedded import (
    EmbeddedEngine,
    Reply,
    messages,
    tool_call,
)
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

pytestmark = pytest.mark.clients

MODULES = Path(os.environ["TRAJKIT_CLIENTS"]).resolve() / "node_modules"
# the program of each harness
PROGRAMS = {
    "claude-code": MODULES / "@anthropic-ai/claude-code-linux-x64/claude",
    "codex": next(MODULES.glob("@openai/codex-linux-x64/vendor/*/bin/codex"), None),
    "gemini-cli": MODULES / ".bin/gemini",
    "opencode": MODULES / "opencode-linux-x64/bin/opencode",
    "qwen-code": MODULES / ".bin/qwen",
    "pi": MODULES / ".bin/pi",
}


class Launch(NamedTuple):
    """How a client is started."""

    command: list[str]
    env: dict[str, str]
    files: dict[str, bytes]
    stdin: bytes


def program_of(name):
    """The program of a harness; a test without it is skipped."""
    program = PROGRAMS[name]
    if program is None or not program.exists():
        pytest.skip(f"{name} is not installed")
    return program


# Scripts

# what a client's user asks for when it compacts its history
COMPACTIONS = (
    "<state_snapshot>",
    "CONTEXT CHECKPOINT COMPACTION",
    "Your task is to create a detailed summary",
    "Here is the conversation so far",
)


SUMMARY = ("<state_snapshot>SUMMARY: it is 42.</state_snapshot>",)


def line_of(scripts, prompt):
    """The line that follows a prompt; None: the scripts have none.

    That is the k-th line, or the last one, of the script whose key the user wrote last,
    if k replies follow that message.
    """
    replies = 0
    for message in reversed(messages(prompt)):
        replies += message.role == "assistant"
        if message.role != "user" or message.text.startswith("<tool_response>"):
            continue
        for key, lines in scripts.items():
            if key in message.text:
                line = lines[min(replies, len(lines) - 1)]
                return line(prompt) if callable(line) else line
    return None


def scripted(scripts):
    """A policy that follows scripts, and replies with one word to other prompts."""
    return lambda prompt: [Reply(line_of(scripts, prompt) or ("Fine.",))]


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


def start(directory, name, gateway, prompt, *arguments, **options):
    """Run a harness on a prompt; what it prints.

    ``gateway``: the first two values of `gateway`. ``edit`` changes how it is started,
    ``expected`` is its exit code, ``seconds`` the time that it may take.
    """
    program = program_of(name)
    # no git repository: Claude Code writes its state into the system prompt
    work = directory / "work"
    work.mkdir(exist_ok=True)
    values = {"base_url": gateway[0], "api_key": gateway[1], "model": "any"}
    values |= {"prompt": prompt, "home": str(directory), "workspace": str(work)}
    launch = Launch(*HARNESSES[name].launch(values, arguments))
    launch = options.get("edit", lambda launch: launch)(launch)
    for path, content in launch.files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(content)
    done = subprocess.run(
        [str(program), *launch.command[1:]],
        cwd=work,
        env={"PATH": "/usr/bin:/bin", "HOME": str(directory), **launch.env},
        input=launch.stdin.decode(),
        capture_output=True,
        text=True,
        timeout=options.get("seconds", 120),
    )
    assert done.returncode == options.get("expected", 0), done.stdout + done.stderr
    return done.stdout


TOKENIZER = load_tokenizer()

# What the log owes


def check(log, name, directory, tokenizer=TOKENIZER):
    """Every call once; tokens of trainable turns are trained once; rows verify.

    Returns the turns, the session as the gateway shows it, and of each turn that drifts
    the causes of its findings.
    """
    turns = tk.read_turns(log.path)
    tk.validate(turns)
    shown = json.loads((directory / "session.json").read_text())
    assert shown["turns"] == shown["answered"] == len(turns)
    assert {*turns["harness"].to_pylist()} == {name}
    rows = tk.linearize(turns, policy="faithful", reward=1.0)
    assert tk.verify(rows, turns).num_rows == 0
    sampled = turns.filter(turns["trainable"])["output_ids"]
    n_trained = pc.sum(pc.list_flatten(rows["loss_mask"])).as_py()
    assert n_trained == len(pc.list_flatten(sampled))
    links = tk.link(turns)
    causes: dict[int, set[str]] = {}
    for finding in tk.analysis.explain_drift(turns, links, tokenizer).to_pylist():
        causes.setdefault(finding["turn_index"], set()).add(finding["cause"])
    parents = links["parent"].to_pylist()
    return (
        [
            {**turn, "parent": parent}
            for turn, parent in zip(turns.to_pylist(), parents, strict=True)
        ],
        shown,
        causes,
    )


def roots(turns):
    """The number of turns that continue no other."""
    return sum(turn["parent"] is None for turn in turns)


def without_thoughts(turns):
    """The turns whose prompt omits what was thought, as the template has it."""
    return {
        turn["turn_index"] for turn in turns if turn["render_reason"] == "reasoning"
    }


# Sessions


@dataclass(frozen=True, kw_only=True)
class Client:
    """What the model of a client writes, and how its user continues and compacts."""

    # its shell, with a call that writes and one that reads; the client sends them back
    # in another spelling
    shell: str
    write: str
    read: str
    # its tool for sub-agents, and the call's arguments for a task
    agent: str
    delegate: Callable[[str], dict[str, object]]
    # the arguments that resume the last session
    resume: tuple[str, ...]
    # the prompt that compacts the history, or any prompt and what makes the client
    # compact a long history by itself
    compact: str = "Sure?"
    small: Callable[[Launch], Launch] = lambda launch: launch
    # it begins with a reply that no model sampled
    greets: bool = False
    # it changes the history when it resumes a session
    rewrites: bool = False

    def call(self, arguments):
        return tool_call(self.shell, arguments)

    def run_long(self):
        """A call of the shell that prints 13,000 tokens."""
        command = "yes the quick brown fox | head -n 1500"
        return self.call(self.write.replace("echo 42 >  answer.txt", command))


def with_file(change):
    """A change of the only configuration file of a launch, which is JSON."""

    def edit(launch):
        ((path, text),) = launch.files.items()
        settings = json.loads(text)
        change(settings)
        return launch._replace(files={path: json.dumps(settings).encode()})

    return edit


def limit_context(settings):
    for model in settings["provider"]["gateway"]["models"].values():
        model["limit"] = {"context": 20_000, "output": 1_000}


def limit_codex(launch):
    limit = "-c", "model_auto_compact_token_limit=18000"
    head, *rest = launch.command
    return launch._replace(command=(head, *limit, *rest))


CLIENTS = {
    "claude-code": Client(
        shell="Bash",
        write='{"command": "echo 42 >  answer.txt", "timeout": 1.0e4}',
        read='{"command":"cat answer.txt",  "description": "caf\\u00e9"}',
        agent="Agent",
        delegate=lambda task: {
            "description": "check",
            "prompt": task,
            "subagent_type": "claude",
        },
        resume=("--continue",),
        compact="/compact",
    ),
    "codex": Client(
        shell="exec_command",
        write='{"cmd": "echo 42 >  answer.txt", "yield_time_ms":  1000}',
        read='{"cmd":"cat answer.txt"}',
        agent="multi_agent_v1__spawn_agent",
        delegate=lambda task: {"message": task},
        resume=("resume", "--last"),
        small=limit_codex,
    ),
    "gemini-cli": Client(
        shell="run_shell_command",
        write='{"command": "echo 42 >  answer.txt",  "description": "write"}',
        read='{"command":"cat answer.txt",  "description": "caf\\u00e9"}',
        agent="invoke_agent",
        delegate=lambda task: {"agent_name": "generalist", "prompt": task},
        resume=("--resume", "latest"),
        rewrites=True,
        # of a context of 1,048,576 tokens
        small=with_file(lambda it: it.update(model={"compressionThreshold": 0.005})),
    ),
    "opencode": Client(
        shell="bash",
        write='{"command": "echo 42 >  answer.txt", "timeout":  10000}',
        read='{"command":"cat answer.txt"}',
        agent="task",
        delegate=lambda task: {
            "description": "check",
            "prompt": task,
            "subagent_type": "general",
        },
        resume=("--continue",),
        small=with_file(limit_context),
    ),
    "qwen-code": Client(
        shell="run_shell_command",
        write='{"command": "echo 42 >  answer.txt",  "is_background": false}',
        read='{"command":"cat answer.txt",  "description": "caf\\u00e9"}',
        agent="agent",
        delegate=lambda task: {
            "description": "check",
            "prompt": task,
            "subagent_type": "general-purpose",
        },
        resume=("--continue",),
        compact="/compress",
        greets=True,
        rewrites=True,
    ),
}


def wait_for(index):
    """Codex's call that waits for the sub-agent of that number."""

    def line(prompt):
        agent_id = re.findall(r'"agent_id": ?"([^"]+)"', prompt)[index]
        return tool_call(
            "multi_agent_v1__wait_agent", json.dumps({"targets": [agent_id]})
        )

    return line


def scripts_of(name, thought=()):
    """A task with two sub-agents at once, and its continuations."""
    client = CLIENTS[name]
    look = client.call(client.read)
    agents = [
        tool_call(client.agent, json.dumps(client.delegate(task)))
        for task in ("SUBONE", "SUBTWO")
    ]
    ends = ("It says 42.",)
    if name == "gemini-cli":
        ends = tool_call("complete_task", '{"result": {"response": "It says 42."}}')
    return {
        # what the client shows after it compacted, and what it asks for to compact
        "SUMMARY": [("Still 42.",)],
        **{key: [SUMMARY] for key in COMPACTIONS},
        "SUBONE": [look, ends],
        "SUBTWO": [look, ends],
        "MAINTASK": [
            (*thought, "Let me write it. \n\n", *client.call(client.write)),
            (*agents[0], *agents[1]),
            *([wait_for(0), wait_for(1)] if name == "codex" else []),
            (*look, *look),
            (" Done: 42.",),
        ],
        "Sure?": [(" Sure: 42.",)],
        "LONGTASK": [client.run_long(), ("Still 42.",)],
        "And?": [("And 42.",)],
    }


# where nothing is thought, nothing drifts
THINKS = pytest.mark.parametrize(
    "thought", [("<think>\nEasy.\n</think>\n\n",), ()], ids=["thinks", "plain"]
)


@THINKS
@pytest.mark.parametrize("name", CLIENTS)
def test_a_session_with_two_sub_agents_at_once_that_is_resumed(tmp_path, name, thought):
    client = CLIENTS[name]
    with gateway(tmp_path, scripts_of(name, thought)) as (*at, log):
        said = start(tmp_path, name, at, "MAINTASK")
        again = start(tmp_path, name, at, "Sure?", *client.resume)
    assert "Done: 42." in said
    assert "Sure: 42." in again
    assert (tmp_path / "work/answer.txt").read_text() == "42\n"
    turns, shown, causes = check(log, name, tmp_path)
    # the template omits what was thought before the user spoke
    forgets = bool(thought) and not client.rewrites
    n_turns = 11 if name == "codex" else 9
    counts = Counter({"unknown_reply" if client.greets else "opening": 3})
    counts.update(unknown_reply=client.rewrites, reasoning=int(forgets))
    counts["append"] = n_turns - counts.total()
    assert shown["prompts"] == {reason: n for reason, n in counts.items() if n}
    assert len(turns) == n_turns
    assert roots(turns) == 3 + client.rewrites
    assert all(turn["trainable"] for turn in turns)
    agents = Counter(turn["agent_id"] for turn in turns)
    if name in ("gemini-cli", "qwen-code"):
        # they name no agents
        assert agents == {None: n_turns}
    else:
        assert sorted(agents.values()) == [2, 2, n_turns - 4]
    assert {*causes} == without_thoughts(turns)
    for found in causes.values():
        assert "reasoning_dropped" in found
        assert found <= {"reasoning_dropped", "white_space", "same_text"}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_session_that_is_compacted(tmp_path, name):
    client = CLIENTS[name]
    with gateway(tmp_path, scripts_of(name)) as (*at, log):
        start(tmp_path, name, at, "LONGTASK")
        start(tmp_path, name, at, client.compact, *client.resume, edit=client.small)
        said = start(tmp_path, name, at, "And?", *client.resume)
    turns, _, causes = check(log, name, tmp_path)
    assert "And 42." in said
    compactions = [turn for turn in turns if turn["call_kind"] == "compaction"]
    # Gemini CLI has the model look through its summary
    assert len(compactions) == (2 if name == "gemini-cli" else 1)
    assert not any(turn["trainable"] for turn in compactions)
    # what follows is a history of its own, which is shorter
    before = turns[compactions[0]["turn_index"] - 1]
    after = turns[compactions[-1]["turn_index"] + 1]
    assert after["parent"] is None
    assert len(after["prompt_ids"]) < len(before["prompt_ids"])
    # Codex compacts without its tools
    expected = {"template"} if name == "codex" else None
    found = {compactions[0]["turn_index"]: expected} if expected else {}
    assert causes == found


CLOSED = {"claude-code": '"api_error_status":410', "codex": "410"}


@pytest.mark.parametrize("name", CLOSED)
def test_a_closed_session_is_the_end(tmp_path, name):
    with gateway(tmp_path, {}) as (*at, log):
        (session,) = tk.read_sessions(log.directory)["session_id"].to_pylist()
        http.post(f"{at[0]}/sessions/{session}/finish", json={})
        said = start(tmp_path, name, at, "hi", expected=1)
    assert tk.read_turns(log.path).num_rows == 0
    assert CLOSED[name] in said.splitlines()[-1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_rollouts_of_a_real_agent_are_graded(tmp_path, name):
    """In a sandbox, on two tasks that it solves; every call once, in rows that verify."""
    program = program_of(name)
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
        # the programs in .bin are links into other folders
        "--path",
        str(MODULES),
    ]
    options = ("--parallel", "2", "--timeout", "120", "--odds", "1")
    assert run_command([*argv, *options]) == 0
    sessions = pq.read_table(out / "sessions.parquet")
    for line in sessions.to_pylist():
        assert (line["reward"], line["agent_end"]) == (1.0, "finished"), line
    turns = tk.read_turns(out / "turns")
    tk.validate(turns)
    assert sorted(turns["turn_index"].to_pylist()) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert tk.link(turns)["parent"].to_pylist().count(None) == 2
    rows = tk.linearize(turns, sessions=sessions)
    assert tk.verify(rows, turns, sessions=sessions).num_rows == 0

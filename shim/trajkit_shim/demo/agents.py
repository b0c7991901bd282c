"""Real coding agents: mini-swe-agent in its own process, in a scratch repository."""

import importlib.util
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import httpx

from trajkit.cli.progress import Progress
from trajkit_shim.agents.harnesses.mini_swe_agent import environment
from trajkit_shim.app import create_app
from trajkit_shim.demo.proxy import LossyProxy
from trajkit_shim.demo.scripted_model import REVIEWER, write_code
from trajkit_shim.demo.tasks import Task
from trajkit_shim.engines.embedded import EmbeddedEngine, load_tokenizer
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.serve import running
from trajkit_shim.sessions.turn_log import TurnLog

# high enough that every run has turns that are not canonical
_DRIFT = 0.1
_TIMEOUT_S = 300.0
# variables passed on from this process; keys and proxies are not
_KEPT = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR")

_SUBAGENT = """#!/bin/sh
# subagent TASK: a second agent, with another system prompt, on the same session
{command} -t "$1" > {log} 2>&1
code=$?
tail -n 20 {log}
exit $code
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How one session ended."""

    session_id: str
    task: str
    error: str | None  # the agent's error, if any
    solved: bool  # the task's test passes in the agent's repository


def record(
    out: Path, tasks: Sequence[Task], seed: int | None
) -> tuple[Path, list[End]]:
    """Have one agent work on each task concurrently, and log their model calls.

    Returns the path of the turns. Raises as `trajkit_shim.demo.run_demo`.
    """
    if importlib.util.find_spec("minisweagent") is None:
        raise ModuleNotFoundError("No module named 'minisweagent'", name="minisweagent")
    log = TurnLog(out)
    engine = EmbeddedEngine(write_code, drift=_DRIFT, seed=seed)
    # rendered prompts drift, which the demo is to show
    gateway = create_app(engine, ChatRenderer(load_tokenizer()), log, prompts="render")
    lost: dict[str, tuple[int, ...]] = {}
    ends = []
    with (
        running(LossyProxy(gateway, lost)) as url,
        Progress("agents at work", "agents") as progress,
        ThreadPoolExecutor(len(tasks)) as pool,
    ):
        agents = []
        for i, task in enumerate(tasks):
            session_id = f"{task.name}-{i}"
            answer = httpx.post(f"{url}/sessions", json={"session_id": session_id})
            answer.raise_for_status()
            key = answer.json()["api_key"]
            lost[key] = task.loses
            folder = out.resolve() / "agents" / session_id
            agents.append(Agent(f"{url}/v1", key, task, folder))
            agents[-1].prepare()
        progress.begin(len(agents))
        for end in pool.map(Agent.work, agents):
            ends.append(end)
            progress.advance(1)
    return log.path, ends


@dataclass(frozen=True, slots=True)
class Agent:
    """One agent working on one task, with the gateway's URL and its session's key.

    ``folder`` gets its files: ``repository``, ``bin``, ``home`` and ``agent.log``.
    """

    base_url: str
    api_key: str
    task: Task
    folder: Path

    def prepare(self) -> None:
        """Create the repository with its first commit, and the sub-agent tool."""
        repository = self.folder / "repository"
        repository.mkdir(parents=True)
        (repository / self.task.module).write_text(self.task.source)
        (repository / f"test_{self.task.module}").write_text(self.task.test)
        (repository / ".gitignore").write_text("__pycache__/\n")
        who = ("-c", "user.name=demo", "-c", "user.email=demo@localhost")
        for step in (["init", "-q"], ["add", "."], ["commit", "-qm", "Start"]):
            self._run(["git", *who, *step]).check_returncode()
        tool = self.folder / "bin" / "subagent"
        tool.parent.mkdir()
        command = [
            *self._command("subagent"),
            *("-c", f"agent.system_template={REVIEWER}"),
        ]
        log = shlex.quote(str(self.folder / "subagent.log"))
        tool.write_text(_SUBAGENT.format(command=shlex.join(command), log=log))
        tool.chmod(0o755)

    def work(self) -> End:
        """Run the agent to its end, for at most five minutes."""
        test = f"test_{self.task.module}"
        statement = (
            f"{self.task.issue} The test is {test}: run it with python. "
            "`subagent TASK` starts a second agent, if you need one."
        )
        error = None
        with (self.folder / "agent.log").open("wb") as log:
            try:
                code = self._run(
                    [*self._command("agent"), "-t", statement], log
                ).returncode
                error = f"exit code {code}" if code else None
            except subprocess.TimeoutExpired:
                error = f"timed out after {_TIMEOUT_S:g} s"
        solved = self._run([sys.executable, test]).returncode == 0
        return End(
            session_id=self.folder.name, task=self.task.name, error=error, solved=solved
        )

    def _run(
        self, command: list[str], log: IO[bytes] | None = None
    ) -> "subprocess.CompletedProcess[bytes]":
        """Run a command in the repository, in an environment without downloads."""
        home = str(self.folder / "home")
        path = (self.folder / "bin", Path(sys.executable).parent, os.environ["PATH"])
        return subprocess.run(
            command,
            cwd=self.folder / "repository",
            env={
                **{name: os.environ[name] for name in _KEPT if name in os.environ},
                "PATH": os.pathsep.join(map(str, path)),
                "HOME": home,
                "TERM": "dumb",
                "GIT_CONFIG_GLOBAL": os.devnull,
                "GIT_CONFIG_NOSYSTEM": "1",
                "NO_PROXY": "127.0.0.1",
                **environment(self.base_url, self.api_key, home),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if log is None else log,
            stderr=subprocess.DEVNULL if log is None else subprocess.STDOUT,
            timeout=_TIMEOUT_S,
            check=False,
        )

    def _command(self, name: str) -> list[str]:
        """The command of mini-swe-agent with its own configuration, unattended."""
        return [
            *(sys.executable, "-m", "minisweagent"),
            *("-m", "openai/trajkit-embedded", "-y", "--exit-immediately", "-l", "0"),
            *("-c", "mini.yaml", "-c", "environment.timeout=240"),
            *("-c", "agent.step_limit=30", "-o", str(self.folder / f"{name}.json")),
            # litellm 1.106 looks for an MCP gateway among the tools, and fails without mcp
            *("-c", "model.model_kwargs._skip_mcp_handler=true"),
        ]

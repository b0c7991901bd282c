"""Real coding agents: mini-swe-agent in its own process, in a scratch repository."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from trajkit_shim.agents.harnesses.mini_swe_agent import environment
from trajkit_shim.demo.scripted_model import REVIEWER
from trajkit_shim.demo.tasks import Task

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
class Agent:
    """One agent working on one task.

    Parameters
    ----------
    api_key : str
        The key of its session.
    task : Task
    folder : Path
        For its files: ``repository``, ``bin``, ``home`` and ``agent.log``.
    """

    api_key: str
    task: Task
    folder: Path

    @property
    def repository(self) -> Path:
        """The scratch git repository that it changes."""
        return self.folder / "repository"

    def prepare(self) -> None:
        """Create the repository with its first commit, and the sub-agent tool."""
        self.repository.mkdir(parents=True)
        (self.repository / self.task.module).write_text(self.task.source)
        (self.repository / f"test_{self.task.module}").write_text(self.task.test)
        (self.repository / ".gitignore").write_text("__pycache__/\n")
        who = ("-c", "user.name=demo", "-c", "user.email=demo@localhost")
        for step in (["init", "-q"], ["add", "."], ["commit", "-qm", "Start"]):
            subprocess.run(
                ["git", *who, *step],
                cwd=self.repository,
                env=self._environment(""),
                check=True,
                stdin=subprocess.DEVNULL,
            )
        tool = self.folder / "bin" / "subagent"
        tool.parent.mkdir()
        command = _command(self.folder / "subagent.json")
        command += ["-c", f"agent.system_template={REVIEWER}"]
        log = self.folder / "subagent.log"
        tool.write_text(
            _SUBAGENT.format(command=shlex.join(command), log=shlex.quote(str(log)))
        )
        tool.chmod(0o755)

    def work(self, base_url: str) -> int:
        """Run the agent to its end and return its exit code.

        ``base_url`` is the gateway's, with the API version. Raises
        `subprocess.TimeoutExpired` after five minutes.
        """
        statement = (
            f"{self.task.issue} The test is test_{self.task.module}: run it with "
            f"python. `subagent TASK` starts a second agent, if you need one."
        )
        with (self.folder / "agent.log").open("wb") as log:
            done = subprocess.run(
                [*_command(self.folder / "agent.json"), "-t", statement],
                cwd=self.repository,
                env=self._environment(base_url),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=_TIMEOUT_S,
                check=False,
            )
        return done.returncode

    def solved(self) -> bool:
        """Whether the repository's test passes now."""
        done = subprocess.run(
            [sys.executable, f"test_{self.task.module}"],
            cwd=self.repository,
            env=self._environment(""),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        return done.returncode == 0

    def _environment(self, base_url: str) -> dict[str, str]:
        """The agent's complete environment, with all downloads disabled."""
        home = self.folder / "home"
        path = (self.folder / "bin", Path(sys.executable).parent, os.environ["PATH"])
        return {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "PATH": os.pathsep.join(map(str, path)),
            "HOME": str(home),
            "TERM": "dumb",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "NO_PROXY": "127.0.0.1",
            **environment(base_url, self.api_key, str(home)),
        }


def _command(trajectory: Path) -> list[str]:
    """The command of mini-swe-agent with its own configuration, unattended."""
    return [
        *(sys.executable, "-m", "minisweagent"),
        *("-m", "openai/trajkit-embedded", "-y", "--exit-immediately", "-l", "0"),
        *("-c", "mini.yaml", "-c", "environment.timeout=240"),
        *("-c", "agent.step_limit=30", "-o", str(trajectory)),
        # litellm 1.106 looks for an MCP gateway among the tools, and fails without mcp
        *("-c", "model.model_kwargs._skip_mcp_handler=true"),
    ]

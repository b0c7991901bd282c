"""Real coding agents: mini-swe-agent in its own process, in a scratch repository."""

import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from trajkit_shim.demo.script import REVIEWER
from trajkit_shim.demo.tasks import Task

_TIMEOUT_S = 300.0
# what a process needs of this one's environment; keys and proxies stay out
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
    """One agent at work on one task.

    Parameters
    ----------
    api_key : str
        The key of the session that its calls belong to.
    task : Task
        What it works on.
    folder : Path
        Its own folder: ``repository``, ``bin``, ``home`` and ``agent.log``.
    """

    api_key: str
    task: Task
    folder: Path

    @property
    def repository(self) -> Path:
        """The scratch git repository that it changes."""
        return self.folder / "repository"

    def prepare(self) -> None:
        """Write the repository with its first commit, and the tool for sub-agents.

        Raises
        ------
        subprocess.CalledProcessError
            git refused.
        """
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
        """Run the agent to its end.

        Parameters
        ----------
        base_url : str
            The gateway, with the API's version.

        Returns
        -------
        int
            The process's exit code.

        Raises
        ------
        subprocess.TimeoutExpired
            It took longer than five minutes.
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
        """All that the agent sees of this one's; whatever would fetch is off."""
        home = self.folder / "home"
        path = (self.folder / "bin", Path(sys.executable).parent, os.environ["PATH"])
        return {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "PATH": os.pathsep.join(map(str, path)),
            "HOME": str(home),
            "TERM": "dumb",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "OPENAI_API_KEY": self.api_key,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_BASE": base_url,
            "NO_PROXY": "127.0.0.1",
            # mini-swe-agent asks for a model on its first start, and prices each call
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_GLOBAL_CONFIG_DIR": str(home),
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "3",
            "MSWEA_SILENT_STARTUP": "1",
            # litellm fetches its price list when it is imported
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LITELLM_LOCAL_BLOG_POSTS": "True",
            "LITELLM_TELEMETRY": "False",
            "HF_HUB_OFFLINE": "1",
        }


def _command(trajectory: Path) -> list[str]:
    """mini-swe-agent with its own configuration, unattended."""
    return [
        *(sys.executable, "-m", "minisweagent"),
        *("-m", "openai/trajkit-embedded", "-y", "--exit-immediately", "-l", "0"),
        *("-c", "mini.yaml", "-c", "environment.timeout=240"),
        *("-c", "agent.step_limit=30", "-o", str(trajectory)),
        # litellm 1.106 looks for an MCP gateway among the tools, and fails without mcp
        *("-c", "model.model_kwargs._skip_mcp_handler=true"),
    ]

"""Descriptions of harnesses: how one is started, and how its result is read.

A harness is one record in a module of `agents.harnesses`. It gets the gateway's URL and
a key. The key is the session's, so its unmodified calls find their session.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trajkit_shim.agents.sandbox import CommandResult, Sandbox, pack

Tried = Literal["tasks", "start", "no"]
"""How a harness was tested in its pinned version: complete tasks through the gateway;
only its start and first call; or not at all (written from its documentation)."""

_INSTALL_SECONDS = 900.0
_CHECK_SECONDS = 120.0


class HarnessError(Exception):
    """The harness is missing or failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task for a harness, with paths and URLs as seen in its sandbox."""

    base_url: str  # the gateway, without a path
    api_key: str  # the session's
    model: str  # the gateway's name of its model
    prompt: str
    home: str
    workspace: str
    arguments: tuple[str, ...] = ()  # extra arguments for the harness's command


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How to start a harness on a job."""

    command: tuple[str, ...]
    # added to the sandbox's own variables
    env: Mapping[str, str] = field(default_factory=dict)
    # content of configuration files, by path below the home directory
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""


def failed_by_code(done: CommandResult) -> str | None:
    """Return the error of a command with a nonzero exit code, else None."""
    return None if done.code == 0 else done.summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """One coding agent."""

    name: str
    protocol: str
    version: str  # the version that the record was written for; empty: any
    check: tuple[str, ...]  # exits with 0 if it is installed
    install: str  # a shell command; empty: none
    tried: Tried
    launch: Callable[[Job], Launch]
    # returns the error from its `CommandResult`, or None
    failed: Callable[[CommandResult], str | None] = failed_by_code

    def ready(self, sandbox: Sandbox, *, install: bool) -> None:
        """Check that it is installed, or install it.

        Raises `HarnessError`: it is not installed, and ``install`` is false or failed.
        """
        if self._installed(sandbox):
            return
        hint = f": {self.install}" if self.install else ""
        if not install or not self.install:
            raise HarnessError(f"{self.check[0]} is not installed{hint}")
        command = ["sh", "-c", self.install]
        done = sandbox.exec(command, timeout_s=_INSTALL_SECONDS)
        if done.code != 0:
            raise HarnessError(f"{self.install}: {done.summary}")
        if not self._installed(sandbox):
            raise HarnessError(f"{self.check[0]} is still missing after {self.install}")

    def _installed(self, sandbox: Sandbox) -> bool:
        return sandbox.exec(self.check, timeout_s=_CHECK_SECONDS).code == 0

    def run(
        self,
        sandbox: Sandbox,
        job: Job,
        *,
        env: Mapping[str, str],
        timeout_s: float,
        log: Path,
    ) -> CommandResult:
        """Start it on a job and wait for its end; see `Sandbox.exec`.

        The harness's own variables override ``env``.
        """
        launch = self.launch(job)
        if launch.files:
            files = {name: text.encode() for name, text in launch.files.items()}
            sandbox.put(pack(files), job.home)
        return sandbox.exec(
            launch.command,
            timeout_s=timeout_s,
            cwd=job.workspace,
            env={**env, **launch.env},
            stdin=launch.stdin.encode(),
            log=log,
        )

"""What a rollout needs to know of a harness: how it is started, and how it ended.

A harness is one record in a module of `trajkit_shim.harnesses`. It is told the gateway's
URL and a key; the key is the session's id, so its calls find their session unmodified.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from trajkit_shim.sandbox import Done, Sandbox, pack

Tried = Literal["tasks", "start", "no"]
"""How far a harness has been tried with the pinned version: whole tasks through the
gateway; its start and its first call; not at all (written from its documentation)."""

_INSTALL_SECONDS = 900.0
_CHECK_SECONDS = 120.0


class HarnessError(Exception):
    """The harness is not there, or did not do its work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One piece of work for a harness, in the words of its sandbox.

    Parameters
    ----------
    base_url : str
        The gateway, without a path.
    api_key : str
        The session's.
    model : str
        The name that the gateway gives its model.
    prompt : str
        The task.
    home, workspace : str
        Directories: the user's, and the one to work in.
    arguments : tuple of str
        More of them, for the harness's command.
    """

    base_url: str
    api_key: str
    model: str
    prompt: str
    home: str
    workspace: str
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How a harness is started on a job.

    Parameters
    ----------
    command : tuple of str
        The program and its arguments.
    env : mapping of str to str
        What it needs beside the sandbox's own variables.
    files : mapping of str to str
        Text of configuration files, by path below the home directory.
    stdin : str
        What it reads.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stdin: str = ""


def failed_by_code(done: Done) -> str | None:
    """What went wrong, where the exit code tells; None: nothing."""
    return None if done.code == 0 else done.how


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """One coding agent.

    Parameters
    ----------
    name : str
        As it is asked for.
    protocol : str
        What it speaks to the gateway (`trajkit_shim.protocols`).
    version : str
        That the record was written for; empty: any.
    check : tuple of str
        A command that ends with code 0 where it is installed.
    install : str
        A shell command that installs it; empty: there is none.
    tried : Tried
    launch : callable
        How it is started on a `Job`.
    failed : callable
        What went wrong, from its `Done`; None: it ended well.
    """

    name: str
    protocol: str
    version: str
    check: tuple[str, ...]
    install: str
    tried: Tried
    launch: Callable[[Job], Launch]
    failed: Callable[[Done], str | None] = failed_by_code

    def ready(self, sandbox: Sandbox, *, install: bool) -> None:
        """See that it is there, or install it.

        Raises
        ------
        HarnessError
            It is not there, and was not to be installed or cannot be.
        """
        if self._there(sandbox):
            return
        hint = f": {self.install}" if self.install else ""
        if not install or not self.install:
            raise HarnessError(f"{self.check[0]} is not installed{hint}")
        command = ["sh", "-c", self.install]
        done = sandbox.exec(command, timeout_s=_INSTALL_SECONDS)
        if done.code != 0:
            raise HarnessError(f"{self.install}: {done.how}")
        if not self._there(sandbox):
            raise HarnessError(f"{self.check[0]} is not there after {self.install}")

    def _there(self, sandbox: Sandbox) -> bool:
        return sandbox.exec(self.check, timeout_s=_CHECK_SECONDS).code == 0

    def run(
        self,
        sandbox: Sandbox,
        job: Job,
        *,
        env: Mapping[str, str],
        timeout_s: float,
        log: Path,
    ) -> Done:
        """Start it on a job and wait for its end; see `Sandbox.exec`.

        What the harness itself needs goes before ``env``.

        Raises
        ------
        SandboxError
            The sandbox failed.
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

"""What a harness is: how it is installed and started, and how its result is read.

A harness is a record (`harnesses.toml` has ours). It gets the gateway's URL and a key.
The key is the session's, so its unmodified calls find their session.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path

from trajkit_rollout.sandbox import CommandResult, Sandbox, SandboxError, pack

_INSTALL_SECONDS = 900.0
_CHECK_SECONDS = 120.0
_PLACEHOLDER = re.compile(r"\{(base_url|api_key|model|prompt|home|workspace)\}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task for a harness, with paths and URLs as seen in its sandbox."""

    model: str  # the gateway's name of its model
    home: str
    base_url: str = ""  # the gateway, without a path
    api_key: str = ""  # the session's
    prompt: str = ""
    workspace: str = ""
    arguments: tuple[str, ...] = ()  # extra arguments for the harness's command


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A harness's command on one job, with everything filled in."""

    command: tuple[str, ...]
    env: Mapping[str, str]
    files: Mapping[str, str]
    stdin: str


def failed_by_code(done: CommandResult) -> str | None:
    """Return the error of a command with a nonzero exit code, else None."""
    return None if done.code == 0 else done.summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """One coding agent.

    ``command``, ``env``, ``files`` and ``stdin`` may contain ``{base_url}``,
    ``{api_key}``, ``{model}``, ``{prompt}``, ``{home}`` and ``{workspace}``, the fields
    of a `Job`. The argument ``{arguments}`` is replaced by the job's arguments.
    """

    name: str
    # a shell command that installs the version that the record was written for
    install: str = ""
    # a shell command that exits with 0 if it is installed; empty: PROGRAM --version
    check: str = ""
    # split into arguments as a shell does, before values are filled in
    command: str
    stdin: str = ""
    env: Mapping[str, str] = field(default_factory=dict)  # added to the sandbox's own
    # configuration files by path below the home directory; in these the fields are
    # escaped as in JSON, for a place between quotes
    files: Mapping[str, str] = field(default_factory=dict)
    # returns the error from its `CommandResult`, or None
    failed: Callable[[CommandResult], str | None] = failed_by_code

    def launch(self, job: Job) -> Launch:
        """Return its command on a job."""
        values = asdict(job)
        quoted = {k: json.dumps(v, ensure_ascii=False)[1:-1] for k, v in values.items()}
        command: list[str] = []
        for word in shlex.split(self.command):
            command += job.arguments if word == "{arguments}" else [_fill(word, values)]
        return Launch(
            command=tuple(command),
            env={name: _fill(text, values) for name, text in self.env.items()},
            files={path: _fill(text, quoted) for path, text in self.files.items()},
            stdin=_fill(self.stdin, values),
        )

    def ready(self, sandbox: Sandbox, *, install: bool) -> None:
        """Check that it is installed, or install it.

        Raises `SandboxError`: it is not installed, and ``install`` is false or failed.
        """
        check = self.check or f"{shlex.split(self.command)[0]} --version"

        def shell(command: str, timeout_s: float) -> CommandResult:
            return sandbox.exec(["sh", "-c", command], timeout_s=timeout_s)

        if shell(check, _CHECK_SECONDS).code == 0:
            return
        if not install or not self.install:
            hint = f": {self.install}" if self.install else ""
            raise SandboxError(f"{self.name} is not installed{hint}")
        done = shell(self.install, _INSTALL_SECONDS)
        if done.code != 0:
            raise SandboxError(f"{self.install}: {done.summary}")
        if shell(check, _CHECK_SECONDS).code != 0:
            raise SandboxError(f"{self.name} is still missing after {self.install}")

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


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values[found[1]], text)


def _claude_failed(done: CommandResult) -> str | None:
    """Return the error in its last line, a JSON object, or by its exit code."""
    try:
        result = json.loads(done.stdout.splitlines()[-1])
        if result["is_error"]:
            return f"{result.get('subtype')}: {result.get('result')}"[:300]
    except (LookupError, TypeError, ValueError):
        pass
    return failed_by_code(done)


_FAILED = {"claude-code": _claude_failed}
_RECORDS = files("trajkit_rollout").joinpath("harnesses.toml").read_text("utf-8")

HARNESSES: Mapping[str, Harness] = {
    name: Harness(name=name, failed=_FAILED.get(name, failed_by_code), **record)
    for name, record in tomllib.loads(_RECORDS).items()
}
"""Our harnesses by name."""

"""The settings of a run, which are options of the command, and the harnesses."""

import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from pkgutil import resolve_name
from typing import Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from trajkit.errors import ArgumentError
from trajkit_rollout.sandbox import SANDBOXES, CommandResult, Sandbox, SandboxError
from trajkit_shim.cli import Count

_INSTALL_SECONDS = 900.0
_PLACEHOLDER = re.compile(r"\{(base_url|api_key|model|prompt|home|workspace)\}")
# variables of each harness
_ENV = {"OPENAI_API_KEY": "{api_key}", "OPENAI_BASE_URL": "{base_url}/v1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """One coding agent, which finds its session by the key that it gets.

    ``command``, ``env``, ``files`` and ``stdin`` may contain ``{base_url}`` (of the
    gateway, without a path), ``{api_key}`` (of the session), ``{model}``, ``{prompt}``,
    ``{home}`` and ``{workspace}``, as seen in the sandbox. The argument ``{arguments}`` is
    replaced by extra arguments.
    """

    name: str
    # a shell command that installs the version that the record was written for
    install: str = ""
    # a shell command that exits with 0 if it is installed; empty: PROGRAM --version
    check: str = ""
    # split into arguments as a shell does, before values are filled in
    command: str
    stdin: str = ""
    env: dict[str, str] = field(default_factory=dict)  # added to `_ENV`
    # configuration files by path below the home directory (@NAME: of this package); in
    # these the fields are escaped as in JSON, for a place between quotes
    files: Mapping[str, str] = field(default_factory=dict)
    failure: str = ""  # pattern of the last line of a failure with exit code 0

    def launch(
        self, values: Mapping[str, str], arguments: Sequence[str] = ()
    ) -> tuple[list[str], dict[str, str], dict[str, bytes], bytes]:
        """Return command, variables, files and input with the values of the fields."""
        quoted = {k: json.dumps(v, ensure_ascii=False)[1:-1] for k, v in values.items()}
        configured = {
            path: _file(f"harnesses/{text[1:]}") if text.startswith("@") else text
            for path, text in self.files.items()
        }
        command: list[str] = []
        for word in shlex.split(self.command):
            command += arguments if word == "{arguments}" else [_fill(word, values)]
        return (
            command,
            {name: _fill(text, values) for name, text in (_ENV | self.env).items()},
            {path: _fill(text, quoted).encode() for path, text in configured.items()},
            _fill(self.stdin, values).encode(),
        )

    def ready(self, sandbox: Sandbox, *, install: bool) -> None:
        """Check that it is installed, or install it; `SandboxError` if that fails."""
        check = self.check or f"{shlex.split(self.command)[0]} --version"
        script = f"({check}) > /dev/null 2>&1"
        if installing := install and self.install:
            script = f"{script} || {{ {self.install}\n}} && {check}"
        done = sandbox.exec(["sh", "-c", script], timeout_s=_INSTALL_SECONDS)
        if done.code != 0:
            reason = f": {done.summary}" if installing else ""
            raise SandboxError(f"{self.name} is not installed: {self.install}{reason}")

    def failed(self, done: CommandResult) -> str | None:
        """Return the error of a command that has ended, else None."""
        failed = self.failure and re.search(self.failure, done.last_line)
        return done.summary if done.code or failed else None


def _fill(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda found: values[found[1]], text)


def _file(name: str) -> str:
    return files(__package__).joinpath(name).read_text("utf-8")


HARNESSES: dict[str, Harness] = {
    name: Harness(name=name, **record)
    for name, record in tomllib.loads(_file("harnesses.toml")).items()
}
"""Our harnesses by name."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a run, with the names of the command's options.

    Attributes
    ----------
    harness
        The agent, by name or import path (package.module:record); see docs/serving.md.
    argument
        Extra argument of the agent, or the shell harness's command; may be repeated.
    install
        Install the agent in each sandbox if it is missing.
    sandbox
        local, docker, apptainer, e2b, or an import path.
    sandbox_option
        NAME=VALUE, an option of that kind of sandbox; may be repeated.
    image
        For sandboxes that need one, unless the task names one.
    path
        Directory to put first on the sandbox's PATH; may be repeated.
    gateway_url
        URL of the gateway as seen from the sandboxes, if it differs.
    untrusted
        Refuse a sandbox that exposes something of this machine; see docs/sandboxes.md.
    repeat
        Rollouts of each task, which share its group.
    parallel
        Concurrent rollouts.
    timeout
        Time limit of each agent in seconds, overriding its task.
    retry_failed
        When continuing a run, also repeat rollouts that failed.
    """

    harness: str = ""
    argument: Annotated[tuple[str, ...], Parameter(allow_leading_hyphen=True)] = ()
    install: bool = False
    sandbox: str = "local"
    sandbox_option: tuple[str, ...] = ()
    image: str | None = None
    path: tuple[str, ...] = ()
    gateway_url: str | None = None
    untrusted: bool = False
    repeat: Count = 1
    parallel: Count = 4
    timeout: Annotated[float | None, Parameter(validator=Number(gt=0))] = None
    retry_failed: bool = False

    def resolve(self) -> tuple[Harness, type[Sandbox], dict[str, str]]:
        """Return harness, sandbox and its options. `ArgumentError`: one is invalid."""
        options = {}
        for text in self.sandbox_option:
            name, equals, options[name] = text.partition("=")
            if not equals:
                raise ArgumentError(f"--sandbox-option {name}: NAME=VALUE is expected")
        for path in self.path:
            if not path.startswith("/"):
                raise ArgumentError(f"--path {path}: an absolute path is expected")
        harness: Any = _find("--harness", self.harness, HARNESSES)
        kind: Any = _find("--sandbox", self.sandbox, SANDBOXES)
        if not isinstance(harness, Harness):
            raise ArgumentError(f"--harness {harness!r}, not an instance of Harness")
        if not (isinstance(kind, type) and issubclass(kind, Sandbox)):
            raise ArgumentError(f"--sandbox {kind!r}, not a subclass of Sandbox")
        return harness, kind, options

    def check(self, sandbox: Sandbox, hidden: Iterable[Path]) -> None:
        """Raise `SandboxError` if an agent would see too much, or is not installed."""
        sandbox.hide(hidden)
        if sandbox.exposes and self.untrusted:
            raise SandboxError(f"--untrusted: {sandbox.exposes}")
        self.resolve()[0].ready(sandbox, install=self.install)


def _find(option: str, name: str, known: Mapping[str, object]) -> object:
    """The object of a known name (``_`` for ``-`` is accepted) or import path."""
    if (found := known.get(name.replace("_", "-"))) is not None:
        return found
    if ":" not in name:
        rule = f"is not one of {', '.join(known)}, nor an import path"
        raise ArgumentError(f"{option} {name!r} {rule} (package.module:name)")
    try:
        return resolve_name(name)
    except (AttributeError, ImportError) as error:
        raise ArgumentError(f"{option} {name!r}: {error}") from error

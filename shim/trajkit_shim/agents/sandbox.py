"""What a rollout needs from the environment that an agent works in.

A sandbox runs commands and contains files. Files are copied with commands too, so a new
kind of sandbox needs only the abstract methods of `Sandbox`.
"""

import io
import secrets
import shlex
import tarfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Self

from trajkit_shim.agents.processes import (
    Command,
    CommandResult,
    Processes,
    SandboxError,
)

_COPY_SECONDS = 600.0
_STOP_SECONDS = 60.0
# some container clients set HOME themselves and do not accept another one from outside
_SCRIPT = (
    'PATH="$1$PATH" HOME=/home TMPDIR=/tmp; export PATH HOME TMPDIR; shift; exec "$@"'
)
# kills all processes with a variable
_KILL = (
    "for each in /proc/[0-9]*; do tr '\\0' '\\n' < $each/environ 2> /dev/null | "
    'grep -qxF "$0" && kill -9 ${each#/proc/}; done; true'
)

SHARED_NETWORK = (
    "the sandbox shares this machine's network: an agent can reach the engine and every "
    "other server that this machine can"
)
"""What a sandbox exposes (`Sandbox.exposes`) without a network of its own."""

MARK = "TRAJKIT_SANDBOX"
"""Environment variable of every process of a sandbox: the sandbox's name."""

COMMAND_MARK = "TRAJKIT_COMMAND"
"""Environment variable of every process of one command: a random token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Resource limits for the processes of one sandbox. ``None``: no limit.

    A kind of sandbox that cannot enforce a limit rejects it.
    """

    memory_mb: int | None = None  # MiB
    cpus: float | None = None  # number of processors, may be fractional
    processes: int | None = None  # processes and threads at once
    file_mb: int | None = None  # MiB per file
    disk_mb: int | None = None  # MiB of all files


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A sandbox to create."""

    name: str  # unique among all running ones: letters, digits, ``.``, ``_`` and ``-``
    scratch: Path  # directory of this machine for the sandbox's files
    image: str | None = None  # for kinds that need one
    limits: Limits = field(default_factory=Limits)
    # directories to put first on ``PATH``, as paths in the sandbox
    path: tuple[str, ...] = ()
    # URL of the gateway as seen from the sandbox. Default: the sandbox derives it.
    gateway: str | None = None
    # options of one kind of sandbox
    options: Mapping[str, str] = field(default_factory=dict)


class Sandbox(ABC):
    """One environment with files and processes of its own.

    As a context manager it starts and stops. `stop` may be called on another thread than
    `exec`; it ends the running command. The constructor raises `SandboxError` if the
    sandbox cannot be created here: a tool is missing, an option is unknown, or a limit
    cannot be enforced. All methods raise it if the sandbox fails.
    """

    kind: ClassVar[str]
    # allowed keys of `Spec.options` and their defaults, or their choices: "first|second"
    options: ClassVar[Mapping[str, str]] = {}
    limits: ClassVar[Collection[str]] = ()  # fields of `Limits` that it enforces
    needs_image: ClassVar[bool] = False
    # what an agent can reach that it should not; None: nothing that is known
    exposes: str | None = None

    def __init__(self, spec: Spec) -> None:
        self.chosen = {name: text.split("|")[0] for name, text in self.options.items()}
        for name, value in spec.options.items():
            if name not in self.options:
                known = f"known options: {', '.join(self.options) or 'none'}"
                raise SandboxError(f"option {name!r} is unknown; {known}")
            _, *others = choices = self.options[name].split("|")
            if others and value not in choices:
                rule = f"is not one of {', '.join(choices)}"
                raise SandboxError(f"{name} = {value!r} {rule}")
            self.chosen[name] = value
        for name, value in asdict(spec.limits).items():
            if value is not None and name not in self.limits:
                rule = f"a sandbox of kind {self.kind} cannot enforce it"
                raise SandboxError(f"{name} = {value}: {rule}")
        if self.needs_image and spec.image is None:
            raise SandboxError(f"a sandbox of kind {self.kind} needs an image")
        self.spec = spec
        self.processes = Processes()  # commands of this machine
        self._removing = threading.Lock()

    @abstractmethod
    def start(self) -> None:
        """Create the sandbox, so that commands can run in it."""

    @abstractmethod
    def _run(self, command: Command) -> CommandResult:
        """Run one command to its end; see `exec`."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove everything, if there is anything; one thread at a time calls it."""

    def stop(self) -> None:
        """End all processes and remove everything. Idempotent."""
        self.processes.end()
        # the end of a run stops sandboxes that their own threads stop too
        with self._removing:
            self._remove()

    def map_path(self, path: str) -> str:
        """Return the path in this sandbox for an absolute path of a task."""
        return path

    def map_url(self, url: str) -> str:
        """Return the gateway's URL as seen from this sandbox."""
        return self.spec.gateway or url

    def exec(
        self,
        arguments: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        log: Path | None = None,
    ) -> CommandResult:
        """Run one command to its end; a missing program is exit code 127.

        After ``timeout_s`` it is killed, with every process it started. ``cwd``: by
        default the task's ``/work``. ``env``: added to the sandbox's own variables.
        ``log``: file of this machine that receives standard output and error. Raises
        `SandboxError`: the sandbox could not run it.
        """
        marks = {MARK: self.spec.name, COMMAND_MARK: secrets.token_hex(8)}
        return self._run(
            Command(
                arguments=tuple(arguments),
                timeout_s=timeout_s,
                cwd=cwd or self.map_path("/work"),
                env={**(env or {}), **marks},
                stdin=stdin,
                log=log,
            )
        )

    def put(self, archive: bytes, directory: str) -> None:
        """Unpack a tar archive into a directory of the sandbox, created if missing."""
        where = shlex.quote(directory)
        self._shell(f"mkdir -p {where} && tar -xof - -C {where}", archive)

    def get(self, path: str) -> bytes:
        """Return the content of a file; raise `SandboxError` if it does not exist."""
        return self._shell(f"cat {shlex.quote(path)}")

    def _shell(self, script: str, stdin: bytes = b"", cwd: str | None = None) -> bytes:
        shell = ["sh", "-c", script]
        done = self.exec(shell, timeout_s=_COPY_SECONDS, stdin=stdin, cwd=cwd)
        if done.code != 0:
            raise SandboxError(f"{script}: {done.summary}")
        return done.stdout

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


class ForeignSandbox(Sandbox):
    """A sandbox whose processes this one cannot end itself, such as a container."""

    def _run(self, command: Command) -> CommandResult:
        """Run one command, and end its processes if it takes too long."""
        first = "".join(f"{folder}:" for folder in self.spec.path)
        wrapped = ("sh", "-c", _SCRIPT, "sh", first, *command.arguments)
        done = self._enter(replace(command, arguments=wrapped))
        if done.code is None:
            mark = f"{COMMAND_MARK}={command.env[COMMAND_MARK]}"
            kill = ("sh", "-c", _KILL, mark)
            self._enter(Command(arguments=kill, timeout_s=_STOP_SECONDS))
        return done

    @abstractmethod
    def _enter(self, command: Command) -> CommandResult:
        """Run one command, whose processes may continue after its timeout."""

    def _make_directories(self) -> None:
        self._shell("mkdir -p /home /tmp /work", cwd="/")


def pack(files: Mapping[str, bytes]) -> bytes:
    """Return a tar archive of files by relative path."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            # scripts with a shebang line are executable
            entry.mode = 0o755 if content.startswith(b"#!") else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()

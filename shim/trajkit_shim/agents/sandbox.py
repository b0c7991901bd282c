"""What a rollout needs from the environment that an agent works in.

A sandbox runs commands and contains files. Files are copied with commands too, so a new
kind of sandbox needs only the abstract methods of `Sandbox`.
"""

import io
import os
import secrets
import shlex
import signal
import subprocess
import tarfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, ClassVar, Self, TypeAlias

_LOOK_SECONDS = 0.5
_MAX_OUTPUT = 1 << 30
_COPY_SECONDS = 600.0
_STOP_SECONDS = 60.0
# some container clients set HOME themselves and do not accept another one from outside
_SCRIPT = (
    'PATH="$1$PATH" HOME=/home TMPDIR=/tmp; export PATH HOME TMPDIR; shift; exec "$@"'
)
# kills the processes with a mark again and again, until it finds no more
_KILL = (
    "found=1; while test $found; do found=; for each in /proc/[0-9]*; do "
    "tr '\\0' '\\n' < $each/environ 2> /dev/null | "
    'grep -qxF "$0" && kill -9 ${each#/proc/} && found=1; done; done; true'
)

SHARED_NETWORK = (
    "the sandbox shares this machine's network: an agent can reach the engine and every "
    "other server that this machine can"
)
"""What a sandbox exposes (`Sandbox.exposes`) without a network of its own."""

MARK = "TRAJKIT_SANDBOX"
"""Environment variable of every process: the sandbox's name, ``/``, and a token of the
command that started it."""

TAIL_BYTES = 1 << 16
"""Size of the end of a command's log that its `CommandResult` holds."""


class SandboxError(OSError):
    """The sandbox failed, not the program that runs in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to run; see `Sandbox.exec`. ``env`` includes its mark."""

    arguments: tuple[str, ...]
    timeout_s: float
    cwd: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    log: Path | None = None
    pass_fds: tuple[int, ...] = ()  # descriptors that it inherits


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended."""

    # exit code, negative for a signal; None: it was killed at its timeout
    code: int | None
    # Complete output. For a command with a log, ``stdout`` is the last `TAIL_BYTES` of
    # both streams and ``stderr`` is empty.
    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def last_line(self) -> str:
        """The last line that is not blank, cut to 300 characters."""
        text = (self.stdout + b"\n" + self.stderr).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "no output"

    @property
    def summary(self) -> str:
        """How it ended, for an error message."""
        if self.code is None:
            return "timed out"
        return f"exit code {self.code}: {self.last_line}"


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
    # what an agent can reach that it should not; None: nothing that is known
    exposes: str | None = None

    def __init__(self, spec: Spec) -> None:
        self.chosen = {name: text.split("|")[0] for name, text in self.options.items()}
        self.chosen |= spec.options
        for name, value in spec.options.items():
            if name not in self.options:
                known = f"known options: {', '.join(self.options) or 'none'}"
                raise SandboxError(f"option {name!r} is unknown; {known}")
            choices = self.options[name].split("|")
            if len(choices) > 1 and value not in choices:
                rule = f"is not one of {', '.join(choices)}"
                raise SandboxError(f"{name} = {value!r} {rule}")
        for name, value in asdict(spec.limits).items():
            if value is not None and name not in self.limits:
                rule = f"a sandbox of kind {self.kind} cannot enforce it"
                raise SandboxError(f"{name} = {value}: {rule}")
        self.spec = spec
        self._stopped = threading.Event()
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
        self._stopped.set()
        # the end of a run stops sandboxes that their own threads stop too
        with self._removing:
            self._remove()

    def _check(self, pid: int) -> None:
        """Raise `SandboxError` if a command of this machine has to end."""
        if self._stopped.is_set():
            raise SandboxError("the sandbox was stopped")

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
        mark = f"{self.spec.name}/{secrets.token_hex(8)}"
        return self._run(
            Command(
                arguments=tuple(arguments),
                timeout_s=timeout_s,
                cwd=cwd or self.map_path("/work"),
                env={**(env or {}), MARK: mark},
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
            kill = ("sh", "-c", _KILL, f"{MARK}={command.env[MARK]}")
            self._enter(Command(arguments=kill, timeout_s=_STOP_SECONDS))
        return done

    @abstractmethod
    def _enter(self, command: Command) -> CommandResult:
        """Run one command, whose processes may continue after its timeout."""

    def _make_directories(self) -> None:
        self._shell("mkdir -p /home /tmp /work", cwd="/")


Check: TypeAlias = Callable[[int], None]
"""Raises if a command has to end, by its process's id."""


def run_here(command: Command, check: Check = lambda _: None) -> CommandResult:
    """Run a command of this machine, with ``env`` as its complete environment.

    Its process group ends with it. ``check`` is called twice a second. Raises
    `SandboxError`: it cannot be started, or its output is too long.
    """
    log = command.log
    try:
        with (
            TemporaryFile() as given,
            TemporaryFile() if log is None else log.open("w+b") as out,
            TemporaryFile() as err,
        ):
            given.write(command.stdin)
            given.seek(0)
            process = subprocess.Popen(
                command.arguments,
                stdin=given,
                stdout=out,
                stderr=err if log is None else out,
                env=command.env,
                start_new_session=True,  # its own process group
                pass_fds=command.pass_fds,
            )
            code, until = None, time.monotonic() + command.timeout_s
            try:
                while code is None and (left := until - time.monotonic()) > 0:
                    try:
                        code = process.wait(min(left, _LOOK_SECONDS))
                    except subprocess.TimeoutExpired:
                        check(process.pid)
                        _check_length(out, err)
            finally:
                # also what it started and left running
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            # between two checks a sparse file becomes longer than the memory
            _check_length(out, err)
            length = out.seek(0, os.SEEK_END)
            out.seek(0 if log is None else max(0, length - TAIL_BYTES))
            err.seek(0)
            return CommandResult(code, out.read(_MAX_OUTPUT), err.read(_MAX_OUTPUT))
    except SandboxError:
        raise
    # an argument may be too long, or contain a null character
    except (OSError, ValueError) as error:
        raise SandboxError(f"{command.arguments[0]} cannot be run: {error}") from error


def _check_length(*files: IO[bytes]) -> None:
    if any(os.fstat(file.fileno()).st_size > _MAX_OUTPUT for file in files):
        raise SandboxError(f"its output is longer than {_MAX_OUTPUT} bytes")


def remove(root: Path) -> None:
    """Remove a directory, if it exists, whatever permissions and depth an agent gave it.

    Raises `OSError`.
    """
    # shutil.rmtree fails at Python's recursion limit. The content of a directory without
    # permissions cannot be removed.
    script = (
        'rm -rf "$0" 2> /dev/null || { find "$0" -type d ! -perm -700 '
        "-exec chmod 700 {} ';'; rm -rf \"$0\"; }"
    )
    done = subprocess.run(("sh", "-c", script, root), capture_output=True, check=False)
    if done.returncode != 0:
        lines = done.stderr.decode(errors="replace").splitlines()
        raise OSError(lines[-1][-300:])


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

"""What a rollout needs from the environment that an agent works in.

A sandbox runs commands and contains files. Files are copied with commands too, so a new
kind of sandbox needs only the abstract methods of `Sandbox`.
"""

import io
import os
import secrets
import selectors
import shlex
import signal
import subprocess
import tarfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, ClassVar, Self, TypeAlias

_LOOK_SECONDS = 0.5
_MAX_OUTPUT = 1 << 28
_PIPE_SECONDS = 0.1
_PIECE_BYTES = 1 << 16
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


class LimitError(SandboxError):
    """The program that ran in the sandbox exceeded a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to run; see `Sandbox.exec`. ``env`` includes its mark.

    ``log_bytes``: the longest log that it may write.
    """

    arguments: tuple[str, ...]
    timeout_s: float
    cwd: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    log: Path | None = None
    log_bytes: int = _MAX_OUTPUT
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
    # of the task: see `trajkit_rollout.tasks.Task`
    build: str | None = None
    plain: bool = False
    places: tuple[str, ...] = ()


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
    # limits that are not those of the sum of its processes, as far as one is asked for
    loose: str | None = None

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

    def shown(self) -> Sequence[str]:
        """Return the files and folders of this machine that are shown to commands."""
        return ()

    def hide(self, paths: Iterable[Path]) -> None:
        """Raise `SandboxError` if a path contains something `shown`, or is below it."""
        shown = [Path(path).resolve() for path in self.shown()]
        for path in paths:
            hidden = path.resolve()
            for each in shown:
                if hidden.is_relative_to(each) or each.is_relative_to(hidden):
                    rule = "an agent would see tests, solutions or rewards"
                    message = f"{each} is visible in the sandbox, and one of it and "
                    raise SandboxError(f"{message}{path} contains the other: {rule}")

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

        One at a time: the end of a command may end all processes of the sandbox.
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
                log_bytes=min((self.spec.limits.disk_mb or 1024) << 20, _MAX_OUTPUT),
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


def run_here(
    command: Command,
    check: Check = lambda _: None,
    end: Callable[[], None] = lambda: None,
) -> CommandResult:
    """Run a command of this machine, with ``env`` as its complete environment.

    Its process group ends with it. ``check`` is called twice a second, ``end`` when the
    group has ended, before the output is complete. Raises `SandboxError`: it cannot be
    started, or its output is too long.
    """
    try:
        with ExitStack() as stack:
            given = stack.enter_context(TemporaryFile())
            given.write(command.stdin)
            given.seek(0)
            out = _Output(stack, command.log, command.log_bytes)
            err = out if command.log else _Output(stack, None, command.log_bytes)
            process = subprocess.Popen(
                command.arguments,
                stdin=given,
                stdout=out.target,
                stderr=err.target,
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
                        out.check()
                        err.check()
            finally:
                # also what it started and left running
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                end()
            return CommandResult(code, out.end(), b"" if err is out else err.end())
    except SandboxError:
        raise
    # an argument may be too long, or contain a null character
    except (OSError, ValueError) as error:
        raise SandboxError(f"{command.arguments[0]} cannot be run: {error}") from error


class _Output:
    """What a command writes to a pipe, copied on a thread up to a length.

    A program could empty a file that it writes to.
    """

    def __init__(self, stack: ExitStack, log: Path | None, limit: int) -> None:
        near, far = os.pipe()
        self._source = stack.enter_context(open(near, "rb", buffering=0))
        self.target = stack.enter_context(open(far, "wb", buffering=0))
        file: IO[bytes] = TemporaryFile() if log is None else log.open("w+b")
        self._copy = stack.enter_context(file)
        self._tail = None if log is None else TAIL_BYTES
        self._limit, self._length = limit, 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        stack.callback(self._finish)

    def _run(self) -> None:
        with selectors.PollSelector() as selector:
            selector.register(self._source, selectors.EVENT_READ)
            while self._length <= self._limit:
                if not selector.select(_PIPE_SECONDS):
                    # a process that outlives the command may keep the other end open
                    if self._ending.is_set():
                        return
                elif data := self._source.read(_PIECE_BYTES):
                    self._copy.write(data[: self._limit - self._length])
                    self._length += len(data)
                else:
                    return

    def check(self) -> None:
        """Raise `LimitError` if there was more than fits."""
        if self._length > self._limit:
            raise LimitError(f"its output is longer than {self._limit} bytes")

    def end(self) -> bytes:
        """Wait until what was written is copied; return it, or the end of a log."""
        self._finish()
        self.check()
        self._copy.seek(max(0, self._length - (self._tail or self._length)))
        return self._copy.read()

    def _finish(self) -> None:
        self.target.close()
        self._ending.set()
        self._thread.join()


def remove(root: Path) -> None:
    """Remove a directory, if it exists, whatever permissions and depth an agent gave it.

    Raises `OSError`.
    """
    if root.is_dir():
        script = 'chmod -R u+rwx "$0"; rm -rf "$0"'
        done = subprocess.run(
            ("sh", "-c", script, str(root)), capture_output=True, check=False
        )
        if done.returncode:
            raise OSError(done.stderr.decode(errors="replace").strip()[-300:])


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

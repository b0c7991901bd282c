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
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, ClassVar, Self

_LOOK_SECONDS = 0.05
_PIPE_SECONDS = 0.1
_PIECE_BYTES = 1 << 16
_COPY_SECONDS = 600.0
_MAX_OUTPUT = 1 << 28
_MAX_FILE = 1 << 26

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
    """A command to run; see `Sandbox.exec`. ``env`` includes its mark."""

    arguments: tuple[str, ...]
    timeout_s: float
    cwd: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    log: Path | None = None
    max_bytes: int | None = None  # of its output
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
        text = (self.stdout + b"\n" + self.stderr).decode(errors="replace").strip()
        return text.splitlines()[-1].strip()[:300] if text else "no output"

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
    path: tuple[str, ...] = ()  # folders of the sandbox to put first on ``PATH``
    gateway: str | None = None  # its URL as seen from there; default: derived
    options: Mapping[str, str] = field(default_factory=dict)  # of one kind of sandbox
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
    exposes: str | None = None  # what an agent can reach that it should not
    loose: str | None = None  # limits that hold for each process only, or not at all

    def __init__(self, spec: Spec) -> None:
        defaults = {name: text.split("|")[0] for name, text in self.options.items()}
        self.spec, self.chosen = spec, {**defaults, **spec.options}
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

    def _check(self) -> None:
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
                max_bytes=(self.spec.limits.disk_mb or 1024) << 20,
            )
        )

    def put(self, archive: bytes, directory: str) -> None:
        """Unpack a tar archive into a directory of the sandbox, created if missing."""
        where = shlex.quote(directory)
        script = f"mkdir -p {where} && tar -xof - -C {where}"
        shell = ["sh", "-c", script]
        # the default directory may not exist yet
        done = self.exec(shell, timeout_s=_COPY_SECONDS, stdin=archive, cwd="/")
        if done.code != 0:
            raise SandboxError(f"{script}: {done.summary}")

    def get(self, path: str) -> bytes | None:
        """Return the start of a regular file, 64 MiB at most; None if there is none."""
        where = shlex.quote(path)
        script = f"test -f {where} && ! test -L {where} && head -c {_MAX_FILE} {where}"
        done = self.exec(["sh", "-c", script], timeout_s=_COPY_SECONDS)
        return done.stdout if done.code == 0 else None

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def run_here(
    command: Command,
    check: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
) -> CommandResult:
    """Run a command of this machine, with ``env`` as its complete environment.

    Its process group ends with it. ``check`` is called often, and raises if the command
    has to end; ``end`` when the group has ended, before the output is complete. Raises
    `SandboxError`: it cannot be started, or its output is too long.
    """
    try:
        with ExitStack() as stack:
            given = stack.enter_context(TemporaryFile())
            given.write(command.stdin)
            given.seek(0)
            path = command.log
            log = None if path is None else stack.enter_context(path.open("wb"))
            process = stack.enter_context(
                subprocess.Popen(
                    command.arguments,
                    stdin=given,
                    # no file, which a program could empty
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT if log else subprocess.PIPE,
                    env=command.env,
                    start_new_session=True,  # its own process group
                    pass_fds=command.pass_fds,
                )
            )
            limit = min(command.max_bytes or _MAX_OUTPUT, _MAX_OUTPUT)
            output = stack.enter_context(_Output(process, log, limit))
            code, until = None, time.monotonic() + command.timeout_s
            try:
                while code is None and time.monotonic() < until:
                    check()
                    output.copy(_LOOK_SECONDS)
                    code = process.poll()
            finally:
                # also what it started and left running
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                end()
            # a process that outlives the command may keep the other end open
            while output.copy(_PIPE_SECONDS):
                pass
            return CommandResult(code, *map(bytes, output.texts.values()))
    except SandboxError:
        raise
    # an argument may be too long, or contain a null character
    except (OSError, ValueError) as error:
        raise SandboxError(f"{command.arguments[0]} cannot be run: {error}") from error


class _Output(selectors.DefaultSelector):
    """What a process writes to its pipes, up to a length."""

    def __init__(
        self, process: subprocess.Popen[bytes], log: IO[bytes] | None, limit: int
    ) -> None:
        super().__init__()
        self._process, self._log, self._limit = process, log, limit
        pipes = [pipe for pipe in (process.stdout, process.stderr) if pipe is not None]
        self.texts = {pipe.fileno(): bytearray() for pipe in pipes}
        self._lengths = dict.fromkeys(self.texts, 0)
        for pipe in pipes:
            self.register(pipe, selectors.EVENT_READ)

    def copy(self, wait_s: float) -> bool:
        """Copy what is there, or wait for it or the process's end; False: nothing was."""
        if not self.get_map():
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(wait_s)
            return False
        ready = self.select(wait_s)
        for key, _ in ready:
            data = os.read(key.fd, _PIECE_BYTES)
            if not data:
                self.unregister(key.fileobj)
            fits = data[: self._limit - self._lengths[key.fd]]
            self._lengths[key.fd] += len(fits)
            self.texts[key.fd] += fits
            if self._log is not None:
                self._log.write(fits)
                del self.texts[key.fd][:-TAIL_BYTES]
            if len(fits) < len(data):
                raise LimitError(f"its output is longer than {self._limit} bytes")
        return bool(ready)


def remove(root: Path) -> None:
    """Remove a directory, if it exists, whatever permissions and depth an agent gave it.

    Raises `OSError`.
    """
    if root.is_dir():
        script = 'chmod -R u+rwx "$0"; rm -rf "$0"'
        shell = ("sh", "-c", script, str(root))
        done = subprocess.run(shell, capture_output=True, check=False)
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


def unpack(archive: bytes) -> dict[str, bytes]:
    """Return the files of a tar archive by path."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        files = [(entry.name, tar.extractfile(entry)) for entry in tar]
        return {n.removeprefix("./"): f.read() for n, f in files if f is not None}

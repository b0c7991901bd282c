"""What a rollout needs from the environment that an agent works in, and its kinds.

A sandbox runs commands and contains files. Files are copied with commands too, so a new
kind of sandbox needs only the abstract methods of `Sandbox`.
"""

import asyncio
import importlib
import io
import math
import os
import secrets
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ClassVar, Self
from urllib.parse import urlsplit

# an image may have to be fetched, and converted
_START_SECONDS = 1800.0
_STOP_SECONDS = 60.0
_COPY_SECONDS = 600.0
# a killed process that still exists after this waits for a disk and does nothing more
_DYING_SECONDS = 5.0
_LOOK_SECONDS = 0.05
_PIPE_SECONDS = 0.1
_PIECE_BYTES = 1 << 16
_MAX_OUTPUT = 1 << 28
_MAX_FILE = 1 << 26
# exit code of a sandbox that failed before the command ran, as in `docker run`
_FAILED = 125
_SHARED_NETWORK = (
    "the sandbox shares this machine's network: an agent can reach the engine and every "
    "other server that this machine can"
)


def program(name: str) -> str:
    """Return the text of a shell program of this package."""
    return files(__package__).joinpath("programs", name).read_text("utf-8")


_ENTER, _HOLD, _KILL = map(program, ("enter.sh", "hold.sh", "kill.sh"))

MARK = "TRAJKIT_SANDBOX"
"""Environment variable of every process of a sandbox: its name, and ``/``."""

TAIL_BYTES = 1 << 16
"""Size of the end of a command's log that its `CommandResult` holds."""


class SandboxError(OSError):
    """The sandbox failed, not the program that runs in it."""


class LimitError(SandboxError):
    """The program that ran in the sandbox exceeded a limit."""


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
    path: Sequence[str] = ()  # folders of the sandbox to put first on ``PATH``
    gateway: str | None = None  # its URL as seen from there; default: derived
    options: Mapping[str, str] = field(default_factory=dict)  # of one kind of sandbox
    # of the task: see `trajkit_rollout.tasks.Task`
    build: str | None = None
    plain: bool = False
    places: Sequence[str] = ()


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
    # Fields of `Limits` that it enforces, and the arguments of a client that do so, with
    # {0} for the value and {1} for its bytes.
    limits: ClassVar[Mapping[str, str]] = {}
    # how the last line starts if a command was not run
    refusals: ClassVar[tuple[str, ...]] = ()
    exposes: str | None = None  # what an agent can reach that it should not
    loose: str | None = None  # limits that hold for each process only, or not at all
    before: str = ""  # shell commands before each command

    def __init__(self, spec: Spec) -> None:
        defaults = {name: text.split("|")[0] for name, text in self.options.items()}
        self.spec, self.chosen = spec, {**defaults, **spec.options}
        for name, value in spec.options.items():
            choices = self.options.get(name, "").split("|")
            if name not in self.options:
                known = ", ".join(self.options) or "none"
                raise SandboxError(
                    f"option {name!r} is unknown; known options: {known}"
                )
            if len(choices) > 1 and value not in choices:
                rule = f"is not one of {', '.join(choices)}"
                raise SandboxError(f"{name} = {value!r} {rule}")
        for name, value in asdict(spec.limits).items():
            if value is not None and name not in self.limits:
                rule = f"a sandbox of kind {self.kind} cannot enforce it"
                raise SandboxError(f"{name} = {value}: {rule}")
        self._max_bytes = (spec.limits.disk_mb or 1024) << 20  # of a command's output
        self._stopped = threading.Event()
        self._removing = threading.Lock()

    @abstractmethod
    def start(self) -> None:
        """Create the sandbox, so that commands can run in it."""

    @abstractmethod
    def _run(
        self, arguments: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> CommandResult:
        """Run one command; ``options`` are ``timeout_s``, ``stdin`` and ``log``."""

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

    def _make_folders(self) -> None:
        for folder in ("/home", "/tmp", "/work"):
            self.put(pack({}), folder)

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
                    raise SandboxError(
                        f"{each} is visible in the sandbox, and one of it and {path} "
                        "contains the other: an agent would see tests or rewards"
                    )

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
        path = "".join(f"{folder}:" for folder in self.spec.path)
        home, tmp, work = map(self.map_path, ("/home", "/tmp", "/work"))
        given = ("sh", "-c", self.before + _ENTER, "sh", path, home, tmp, cwd or work)
        done = self._run(
            (*given, *arguments),
            {**(env or {}), MARK: f"{self.spec.name}/"},
            timeout_s=timeout_s,
            stdin=stdin,
            log=log,
        )
        refused = done.code and done.last_line.startswith(self.refusals)
        if done.code == _FAILED or refused:
            raise SandboxError(f"{self.spec.name}: {done.last_line}")
        return done

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
    arguments: Sequence[str],
    env: Mapping[str, str],
    *,
    timeout_s: float,
    stdin: bytes = b"",
    log: Path | None = None,
    max_bytes: int = _MAX_OUTPUT,
    check: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
    pass_fds: Sequence[int] = (),
) -> CommandResult:
    """Run a command of this machine, with ``env`` as its complete environment.

    Its process group ends with it. ``check`` is called often, and raises if the command
    has to end; ``end`` when the group has ended, before the output is complete. Raises
    `SandboxError`: it cannot be started, or its output is too long.
    """
    limit = min(max_bytes, _MAX_OUTPUT)
    try:
        with ExitStack() as stack:
            given = stack.enter_context(TemporaryFile())
            given.write(stdin)
            given.seek(0)
            file = log and stack.enter_context(log.open("wb"))
            process = stack.enter_context(
                subprocess.Popen(
                    arguments,
                    stdin=given,
                    # no file, which a program could empty
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT if log else subprocess.PIPE,
                    env=env,
                    start_new_session=True,  # its own process group
                    pass_fds=pass_fds,
                )
            )
            waiting = stack.enter_context(selectors.DefaultSelector())
            texts = [bytearray(), bytearray()]
            room = [limit, limit]
            for k, pipe in enumerate(filter(None, (process.stdout, process.stderr))):
                waiting.register(pipe, selectors.EVENT_READ, k)

            def copy(wait_s: float) -> bool:
                """Copy what is there, or wait for it; False: there was nothing."""
                ready = waiting.select(wait_s)
                for key, _ in ready:
                    data, k = os.read(key.fd, _PIECE_BYTES), key.data
                    if not data:
                        waiting.unregister(key.fileobj)
                    fits = data[: room[k]]
                    room[k] -= len(fits)
                    texts[k] += fits
                    if file:
                        file.write(fits)
                        del texts[k][:-TAIL_BYTES]
                    if len(fits) < len(data):
                        raise LimitError(f"its output is longer than {limit} bytes")
                return bool(ready)

            code, until = None, time.monotonic() + timeout_s
            try:
                while code is None and time.monotonic() < until:
                    check()
                    copy(_LOOK_SECONDS)
                    code = process.poll()
            finally:
                # also what it started and left running
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                end()
            # a process that outlives the command may keep the other end open
            while waiting.get_map() and copy(_PIPE_SECONDS):
                pass
            return CommandResult(code, *map(bytes, texts))
    except SandboxError:
        raise
    # an argument may be too long, or contain a null character
    except (OSError, ValueError) as error:
        raise SandboxError(f"{arguments[0]} cannot be run: {error}") from error


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


# A sandbox of this machine's own processes

# variables passed on from this process; keys and proxies are not
_KEPT = ("LD_LIBRARY_PATH", "LC_ALL")
_ENVIRONMENT = {"LANG": "C.UTF-8", "TERM": "dumb", "NO_PROXY": "127.0.0.1,localhost"}
# the sandbox's directory in its own namespaces, the same in every sandbox, so that equal
# prompts stay equal
_INSIDE = "/sandbox"
# what it sees of this machine; a missing path is left out
_SYSTEM = (
    *("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/opt"),
    *("/etc/alternatives", "/etc/ca-certificates", "/etc/group", "/etc/hosts"),
    *("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime"),
    *("/etc/mime.types", "/etc/nsswitch.conf", "/etc/passwd", "/etc/pki"),
    *("/etc/protocols", "/etc/resolv.conf", "/etc/services", "/etc/ssl"),
)
_ISOLATED = (
    *("bwrap", "--unshare-all", "--unshare-user", "--disable-userns"),
    *("--uid", "0", "--gid", "0", "--cap-drop", "ALL", "--hostname", "sandbox"),
    # a process dies with the thread that started it
    *("--new-session", "--die-with-parent", "--proc", "/proc", "--dev", "/dev"),
    # otherwise files in /dev could fill half of the memory
    *("--size", str(64 << 20), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"),
)
_UNSHARE = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--fork"),
    *("--kill-child", "--mount-proc"),
)
_FIRST_ID = 302
# the kernel that has limits of process ids per namespace; before, they are the machine's
_IDS_KERNEL = (6, 14)
# limits of an isolated sandbox whose task sets none
_DISK_MB = 2048
_PROCESSES = 1024
_MAX_FILES = 1 << 20
# the gateway's port in the sandbox
_PORT = 8765
# becomes a command; its arguments: the descriptor of `bridge`, and the command
_OPEN = f"""\
import os, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as line:
    with socket.create_server(("127.0.0.1", {_PORT})) as listener:
        socket.send_fds(line, [b"."], [listener.fileno()])
os.execvp(sys.argv[2], sys.argv[2:])
"""
# an agent must not use up the descriptors of this process
_MAX_CONNECTIONS = 128


class LocalSandbox(Sandbox):
    """A sandbox of this machine's own processes; docs/sandboxes.md has what it isolates.

    With bubblewrap each command runs in namespaces of its own; without it nothing is
    isolated. An isolated sandbox is held by one process (`_HOLD`), the first of a namespace
    that has its files, a file system in memory, and all of its processes. The kernel limits
    both, and removes both when that process ends, which it does with this one.
    """

    kind = "local"
    options: ClassVar = {"namespaces": "auto|no", "network": "gateway|host"}
    limits: ClassVar = dict.fromkeys(
        ("memory_mb", "processes", "file_mb", "disk_mb"), ""
    )
    refusals = ("bwrap: ", "nsenter: ")

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.image is not None and not spec.plain:
            raise SandboxError(f"image = {spec.image!r}: a local sandbox has no image")
        unwanted = self.chosen["namespaces"] == "no" and "namespaces = 'no'"
        self._missing = missing = unwanted or _why_not_isolated()
        if missing and spec.places:
            places = ", ".join(spec.places)
            raise SandboxError(f"no isolated sandbox ({missing}): {places}: only there")
        self._shares_network = self.chosen["network"] == "host"
        self._scope = () if missing else _scope()
        loose = {
            "memory_mb is per process: no cgroup v2 of systemd": not self._scope,
            "processes is not enforced": not self._scope and not self._last_id(),
            "disk_mb is per file": missing,
        }
        self.loose = "; ".join(text for text, holds in loose.items() if holds) or None
        if missing:
            rule = "an agent can read and change this machine's files and processes"
            self.exposes = f"the local sandbox isolates nothing ({missing}): {rule}"
        elif self._shares_network:
            self.exposes = _SHARED_NETWORK
        limits = spec.limits
        self._disk_mb = limits.disk_mb or (0 if missing else _DISK_MB)
        # in blocks of 512 bytes and in KiB
        steps = ["ulimit -c 0"]
        if file_mb := limits.file_mb or self._disk_mb:
            steps.append(f"ulimit -f {file_mb * 2048}")
        if limits.memory_mb is not None and not self._scope:
            steps.append(f"ulimit -v {limits.memory_mb * 1024}")
        self.before = f"{' && '.join(steps)} || exit {_FAILED}; "
        self._root = spec.scratch.resolve() / spec.name
        self._holder: subprocess.Popen[bytes] | None = None
        self._first = 0  # the holder's first process
        self._gateway: tuple[str, int] | None = None

    def start(self) -> None:
        names = ("home", "tmp", "work", *self.spec.places)
        folders = [f"{self._root}/{name.lstrip('/')}" for name in names]
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            if not self._missing:
                self._hold()
            self._among("mkdir", "-p", *folders).check_returncode()
        except (OSError, subprocess.CalledProcessError) as error:
            raise SandboxError(f"{self._root}: {error}") from error

    def _hold(self) -> None:
        size = f"size={self._disk_mb}m,nr_inodes={_MAX_FILES},mode=755"
        program = (*_UNSHARE, "sh", "-c", _HOLD, "sh", str(self._root), size)
        self._holder = holder = subprocess.Popen(
            (*program, self._last_id()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"ready\n":
            raise OSError(holder.stderr.read().decode(errors="replace").strip())
        children = f"/proc/{holder.pid}/task/{holder.pid}/children"
        self._first = int(Path(children).read_text())

    def _last_id(self) -> str:
        """The greatest process id of the namespace; empty: the kernel has no limit."""
        limited = not self._missing and _limits_ids()
        last_id = _FIRST_ID + (self.spec.limits.processes or _PROCESSES)
        return str(last_id) if limited else ""

    def _among(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = (*self._entered(), *arguments)
        return subprocess.run(command, capture_output=True, check=False)

    def _entered(self) -> Iterator[str]:
        """The arguments before those of a command in the sandbox's own namespace."""
        if self._holder is not None:
            yield from ("nsenter", "--target", str(self._first), "--user", "--mount")
            yield from ("--pid", "--preserve-credentials", "--")

    def _run(
        self, arguments: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> CommandResult:
        own = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
        kept = {name: os.environ[name] for name in _KEPT if name in os.environ}
        env = {**kept, **_ENVIRONMENT, "PATH": os.pathsep.join(own), **env}
        with ExitStack() as stack:
            passed = []
            if self._gateway is not None:
                passed.append(stack.enter_context(bridge(*self._gateway)))
                helper = (sys.executable, "-I", "-S", "-c", _OPEN, str(passed[0]))
                arguments = (*helper, *arguments)
            if not self._missing:
                arguments = (*self._namespaces(), *arguments)
            own_options = {"check": self._check, "end": self._end, "pass_fds": passed}
            options |= own_options | {"max_bytes": self._max_bytes}
            return run_here(arguments, env, **options)

    def _end(self) -> None:
        if self._holder is None:
            end_processes(self.spec.name)
            return
        processes = Path("/proc", str(self._first), "root", "proc")
        until = time.monotonic() + _DYING_SECONDS
        while sum(path.name.isdecimal() for path in processes.iterdir()) > 1:
            if time.monotonic() > until:
                break
            self._among("sh", "-c", "kill -9 -1")

    def _remove(self) -> None:
        if self._holder is not None:
            # it ends with its input, when all processes of its namespace have ended
            self._holder.communicate()
            self._holder = None
        if self._missing:
            self._end()
        try:
            remove(self._root)
        except OSError as error:
            raise SandboxError(f"{self._root}: cannot be removed: {error}") from error

    def map_path(self, path: str) -> str:
        if any(f"{path}/".startswith(f"{place}/") for place in self.spec.places):
            return path
        return (str(self._root) if self._missing else _INSIDE) + path

    def map_url(self, url: str) -> str:
        """Return the gateway's URL, which commands can reach from now on."""
        if self._missing or self._shares_network or self.spec.gateway is not None:
            return super().map_url(url)
        address = urlsplit(url)
        if address.scheme != "http":
            rule = "an isolated local sandbox needs an http URL, or network=host"
            raise SandboxError(f"{url}: {rule}")
        self._gateway = str(address.hostname), address.port or 80
        return f"http://127.0.0.1:{_PORT}"

    def _namespaces(self) -> Iterator[str]:
        if self._scope:
            limits = self.spec.limits
            yield from self._scope
            yield f"--property=TasksMax={limits.processes or _PROCESSES}"
            if limits.memory_mb is not None:
                yield f"--property=MemoryMax={limits.memory_mb}M"
                yield "--property=MemorySwapMax=0"
            yield "--"
        yield from self._entered()
        yield from _ISOLATED
        if self._shares_network:
            yield "--share-net"
        root = str(self._root)
        yield from ("--bind", root, _INSIDE, "--bind", f"{root}/tmp", "/tmp")
        for path in self.shown():
            yield from ("--ro-bind-try", path, path)
        for place in self.spec.places:
            yield from ("--bind", f"{root}{place}", place)
        yield from ("--remount-ro", "/", "--")

    def shown(self) -> Sequence[str]:
        """Return what an isolated command sees; without isolation it sees everything."""
        if self._missing:
            return ()
        return (*_SYSTEM, sys.base_prefix, sys.prefix, *self.spec.path)


@contextmanager
def bridge(host: str, port: int) -> Iterator[int]:
    """Let the commands of a network namespace reach one address outside of it.

    A listener belongs to the namespace that it was opened in, whichever process accepts
    its connections. So `_OPEN` opens one there, passes it to this process by the
    descriptor that is yielded, and becomes the command.
    """
    near, far = socket.socketpair()

    def serve() -> None:
        # a line that ends brings none
        for number in socket.recv_fds(near, 1, 1)[1]:
            asyncio.run(_forward(near, socket.socket(fileno=number), host, port))

    with near, far:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield far.fileno()
        finally:
            far.close()
            near.shutdown(socket.SHUT_RDWR)
            thread.join()


async def _forward(
    line: socket.socket, listener: socket.socket, host: str, port: int
) -> None:
    free = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Copy what one side sends until it ends; the other one may still answer."""
        with suppress(OSError), closing(writer):
            while data := await reader.read(_PIECE_BYTES):
                writer.write(data)
                await writer.drain()

    async def connected(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with suppress(OSError, asyncio.CancelledError), closing(writer):
            if not free.locked():
                async with free:
                    far_reader, far_writer = await asyncio.open_connection(host, port)
                    both = copy(reader, far_writer), copy(far_reader, writer)
                    await asyncio.gather(*both)

    server = await asyncio.start_server(connected, sock=listener)
    line.setblocking(False)
    await asyncio.get_running_loop().sock_recv(line, 1)
    server.close()


def clear(scratch: Path) -> None:
    """Remove the sandboxes that a killed run left, and their processes."""
    for root in scratch.iterdir():
        end_processes(root.name)
    remove(scratch)


def end_processes(name: str) -> None:
    with suppress(subprocess.TimeoutExpired):
        subprocess.run(_killing(name), check=True, timeout=_DYING_SECONDS)


def _killing(name: str) -> Sequence[str]:
    return "sh", "-c", _KILL, f"{MARK}={name}/"


def _limits_ids() -> bool:
    version = os.uname().release.split(".")
    return tuple(int(part) for part in version[:2]) >= _IDS_KERNEL


def _failure(command: Sequence[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    except FileNotFoundError:
        return f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.decode().strip() or "it failed" if done.returncode else None


@cache
def _scope() -> Sequence[str]:
    """The start of a command that runs another one in a cgroup; empty if that fails."""
    user = () if os.getuid() == 0 else ("--user",)
    start = ("systemd-run", *user, "--scope", "--quiet", "--collect")
    limited = (*start, "--property=MemoryMax=64M", "--", "true")
    v2 = Path("/sys/fs/cgroup/cgroup.controllers").exists()
    return start if v2 and _failure(limited) is None else ()


@cache
def _why_not_isolated() -> str | None:
    """Why commands cannot be isolated; None: they can."""
    isolated = (*_ISOLATED, "--ro-bind", "/", "/", "true")
    return _failure(isolated) or _failure((*_UNSHARE, "true"))


# Containers

# name of the host machine inside a container that does not use the host's network
_HOST = "host.docker.internal"


class ContainerSandbox(Sandbox):
    """A container. A kind states the arguments of its client, ``options["binary"]``."""

    building: ClassVar[str] = ""  # makes its image from a folder
    starting: ClassVar[str]  # creates the container
    entering: ClassVar[str]  # before the arguments of a command
    removing: ClassVar[str]
    # what the client puts before the names of variables that it passes on
    env_prefix: ClassVar[str] = ""
    hosts: str = ""  # arguments that name this machine

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.image is None:
            raise SandboxError(f"a sandbox of kind {self.kind} needs an image")
        if spec.build is not None and not self.building:
            rule = f"a sandbox of kind {self.kind} cannot build an image"
            raise SandboxError(f"build = {spec.build!r}: {rule}")
        binary = self.chosen["binary"]
        self._binary = shutil.which(binary) or ""
        if not self._binary:
            raise SandboxError(f"{binary} is not installed (not found on PATH)")
        self._started = False
        # for kinds that keep written files on this machine
        self._overlay = spec.scratch.resolve() / f"{spec.name}.overlay"

    def start(self) -> None:
        # one that a killed run left
        self._client(self.removing)
        remove(self._overlay)
        self._overlay.mkdir(parents=True)
        build = (self.building,) if self.spec.build is not None else ()
        for words in (*build, self.starting):
            done = self._client(words, timeout_s=_START_SECONDS, check=self._check)
            if done.code != 0:
                rule = f"the client cannot {words.split()[0]}: {done.summary}"
                raise SandboxError(f"{self.spec.image}: {rule}")
        self._started = True
        self._make_folders()

    def _run(
        self, arguments: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> CommandResult:
        options |= {"check": self._check, "max_bytes": self._max_bytes}
        done = self._client(self.entering, arguments, env, **options)
        if done.code is None:
            self._client(self.entering, _killing(self.spec.name))
        return done

    def _remove(self) -> None:
        try:
            done = self._client(self.removing)
        finally:
            with suppress(OSError):
                remove(self._overlay)
        # a container that was not started may be missing
        if done.code != 0 and self._started:
            raise SandboxError(f"{self.spec.name}: cannot be removed: {done.summary}")
        self._started = False

    def _client(
        self,
        words: str,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] = {},
        timeout_s: float = _STOP_SECONDS,
        **options: Any,
    ) -> CommandResult:
        spec, limits = self.spec, asdict(self.spec.limits).items()
        own = {"name": spec.name, "image": spec.image, "build": spec.build}
        values = {**self.chosen, **own, "overlay": self._overlay}
        filled = words.format(
            hosts=self.hosts,
            limits=" ".join(
                self.limits[key].format(value, int(value) << 20)
                for key, value in limits
                if value is not None
            ),
            variables=" ".join(f"--env {shlex.quote(name)}" for name in env),
            **{name: shlex.quote(str(value)) for name, value in values.items()},
        )
        given = (self._binary, *shlex.split(filled), *arguments)
        # the client reads the values from its environment: no process list shows them
        passed = {self.env_prefix + name: value for name, value in env.items()}
        return run_here(given, {**os.environ, **passed}, timeout_s=timeout_s, **options)


class DockerSandbox(ContainerSandbox):
    """A container of Docker, or of a client with the same commands (``podman``).

    In another network than ``host`` the gateway must listen on an address that the
    container can reach as ``host.docker.internal``.
    """

    kind = "docker"
    options: ClassVar = {"binary": "docker", "network": "host"}
    building = "build --quiet --tag {image} {build}"
    starting = (
        "run --detach --name {name} --network {network} {hosts} {limits} "
        "--init --entrypoint sleep {image} infinity"
    )
    entering = "exec --interactive {variables} {name}"
    removing = "rm --force --volumes {name}"
    limits: ClassVar = {
        "memory_mb": "--memory {0}m",
        "cpus": "--cpus {0:g}",
        "processes": "--pids-limit {0}",
        "file_mb": "--ulimit fsize={1}",
    }
    refusals = ("Error response from daemon", "Error: No such", "Cannot connect to")

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if self.chosen["network"] == "host":
            self.exposes = _SHARED_NETWORK
        else:
            self.hosts = f"--add-host {_HOST}:host-gateway"

    def map_url(self, url: str) -> str:
        """Return the URL with the name of the host, unless the network is the host's."""
        if self.spec.gateway is not None or not self.hosts:
            return super().map_url(url)
        scheme, _, rest = url.partition("://")
        return f"{scheme}://{_HOST}:{rest.rpartition(':')[2]}"


class ApptainerSandbox(ContainerSandbox):
    """An instance of Apptainer (or ``singularity``), on this machine's network.

    The image is a file or a URI. Written files go to an overlay in the scratch directory.
    """

    kind = "apptainer"
    options: ClassVar = {"binary": "apptainer"}
    starting = (
        "instance start --containall --cleanenv --overlay {overlay} {limits} "
        "{image} {name}"
    )
    entering = "exec --cleanenv --pwd / instance://{name}"
    removing = "instance stop --force {name}"
    limits: ClassVar = {
        "memory_mb": "--memory {0}M",
        "cpus": "--cpus {0:g}",
        "processes": "--pids-limit {0}",
    }
    refusals = ("FATAL:",)
    env_prefix = "APPTAINERENV_"
    exposes = _SHARED_NETWORK


class E2BSandbox(Sandbox):
    """A sandbox of E2B, in its cloud or on a private cluster, by its Python package.

    Needs the URL by which the gateway is reached from there. The image is an E2B template;
    None: E2B's base. ``options["lifetime"]`` is the number of seconds after which E2B ends
    a sandbox. Their package reads its key from ``E2B_API_KEY``.
    """

    kind = "e2b"
    options: ClassVar = {"lifetime": "7200"}

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        if spec.gateway is None:
            rule = "give the URL by which it reaches the gateway"
            raise SandboxError(f"an E2B sandbox cannot reach this machine: {rule}")
        if find_spec("e2b") is None:
            raise SandboxError("e2b is not installed: pip install e2b")
        if not (lifetime := self.chosen["lifetime"]).isdecimal():
            raise SandboxError(f"lifetime = {lifetime!r} is not a number of seconds")
        # an optional package whose types are not available to type checkers
        self._e2b: Any = importlib.import_module("e2b")
        self._box: Any = None

    def start(self) -> None:
        with _failures():
            self._box = self._e2b.Sandbox.create(
                template=self.spec.image,
                timeout=int(self.chosen["lifetime"]),
                metadata={MARK: self.spec.name},
            )
        self._make_folders()

    def _run(
        self, arguments: Sequence[str], env: Mapping[str, str], **options: Any
    ) -> CommandResult:
        # `stop` may take it away at any time
        box, log = self._box, options["log"]
        if box is None:
            raise SandboxError("the sandbox was stopped")

        def run(script: str, seconds: float, **more: Any) -> int | None:
            given = {"timeout": math.ceil(seconds), "user": "root", **more}
            try:
                return int(box.commands.run(script, **given).exit_code)
            except self._e2b.TimeoutException:
                return None
            except self._e2b.CommandExitException as error:
                return int(error.exit_code)

        # through files: the package decodes the streams of a command as text
        token = secrets.token_hex(8)
        given, out, err = (f"/tmp/.{token}.{name}" for name in ("in", "out", "err"))
        to = "&1" if log else err
        script = f"exec {shlex.join(arguments)} < {given} > {out} 2>{to}"
        try:
            with _failures():
                box.files.write(given, options["stdin"], user="root")
                code = run(script, options["timeout_s"], envs=dict(env))
                out_text, err_text = (
                    bytes(box.files.read(path, format="bytes", user="root"))
                    for path in (out, out if log else err)
                )
                if code is None:
                    run(shlex.join(_killing(self.spec.name)), _STOP_SECONDS)
        finally:
            with suppress(Exception):
                run(f"rm -f {given} {out} {err}", _STOP_SECONDS)
        if log is None:
            return CommandResult(code, out_text, err_text)
        log.write_bytes(out_text)
        return CommandResult(code, out_text[-TAIL_BYTES:])

    def _remove(self) -> None:
        # its lifetime may have ended
        with _failures(), suppress(self._e2b.NotFoundException):
            if self._box is not None:
                self._box.kill()
        self._box = None


@contextmanager
def _failures() -> Iterator[None]:
    """Turn what the package raises, its own errors and those of HTTP, into ours."""
    try:
        yield
    except Exception as error:
        raise SandboxError(f"e2b: {error}") from error


SANDBOXES: Mapping[str, type[Sandbox]] = {
    kind.kind: kind
    for kind in (ApptainerSandbox, DockerSandbox, E2BSandbox, LocalSandbox)
}
"""The kinds of sandbox by name."""

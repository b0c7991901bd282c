"""Sandboxes, in which agents work and tests run: what they have in common, and the kinds.

Files are copied by commands, so a new kind needs only the abstract methods of `Sandbox`.
"""

import asyncio
import importlib
import math
import os
import re
import secrets
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from asyncio import StreamReader, StreamWriter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, ClassVar, Self, TypeAlias
from urllib.parse import urlsplit

from trajkit_rollout.tasks import Task

# an image may have to be fetched, and converted
_START_SECONDS, _COPY_SECONDS, _STOP_SECONDS = 1800.0, 600.0, 60.0
# a killed process that still exists after the last one waits for a disk
_LOOK_SECONDS, _PIPE_SECONDS, _DYING_SECONDS = 0.05, 0.1, 5.0
# the tail is the end of a command's log that its result holds
_PIECE_BYTES, _TAIL_BYTES, _MAX_FILE, _MAX_OUTPUT_MB = 1 << 16, 1 << 16, 1 << 26, 256
# exit code of a sandbox that failed before the command ran, as in `docker run`
_FAILED = 125
_SHARED_NETWORK = (
    "the sandbox shares this machine's network: an agent can reach the engine"
)


@cache
def program(name: str) -> str:
    """Return the text of a shell program of this package."""
    return files(__package__).joinpath("programs", name).read_text("utf-8")


MARK = "TRAJKIT_SANDBOX"
"""Environment variable of every process of a sandbox: its name, and ``/``."""

Words: TypeAlias = Sequence[str]
Variables: TypeAlias = Mapping[str, str]


class SandboxError(OSError):
    """The sandbox failed, not the program that runs in it."""


class LimitError(SandboxError):
    """The program that ran in the sandbox exceeded a limit."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended."""

    code: int | None  # negative for a signal; None: it was killed at its timeout
    # complete output; for a command with a log, ``stdout`` is the end of both streams
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
        code = self.code
        return "timed out" if code is None else f"exit code {code}: {self.last_line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxSpec:
    """A sandbox to create."""

    name: str  # unique among all running ones: letters, digits, ``.``, ``_`` and ``-``
    scratch: Path  # directory of this machine for the sandbox's files
    task: Task = field(default_factory=Task)  # its image, limits, places and variables
    path: Words = ()  # folders of the sandbox to put first on ``PATH``
    gateway: str | None = None  # its URL as seen from there; default: derived
    options: Variables = field(default_factory=dict)  # of one kind of sandbox
    # once it is set, the running command ends, and no other one starts
    stopping: threading.Event = field(default_factory=threading.Event)


class Sandbox(ABC):
    """One environment with files and processes of its own.

    As a context manager it starts and stops. All methods raise `SandboxError`, and so does
    the constructor if a tool is missing, an option unknown, or a limit cannot be enforced.
    """

    kind: ClassVar[str]
    # allowed keys of `SandboxSpec.options`, and their default or choices
    options: ClassVar[Variables] = {}
    limits: ClassVar[tuple[str, ...]] = ()  # fields of `Limits` that it enforces
    # how the last line starts if a command was not run
    refusals: ClassVar[tuple[str, ...]] = ()
    exposes: str | None = None  # what an agent can reach, and should not
    loose: Words = ()  # limits that hold for each process only, or not at all
    _shown: Words = ()  # files and folders of this machine that commands see

    def __init__(self, spec: SandboxSpec) -> None:
        choices = {name: text.split("|") for name, text in self.options.items()}
        self.spec, self.chosen = spec, {name: each[0] for name, each in choices.items()}
        for name, value in spec.options.items():
            if name not in choices:
                known = ", ".join(choices)
                raise SandboxError(f"unknown option {name!r}; options: {known}")
            if len(choices[name]) > 1 and value not in choices[name]:
                rule = f"is not one of {', '.join(choices[name])}"
                raise SandboxError(f"{name} = {value!r} {rule}")
            self.chosen[name] = value
        for name, limit in asdict(spec.task.limits).items():
            if limit is not None and name not in self.limits:
                rule = f"a sandbox of kind {self.kind} cannot enforce it"
                self.loose = (*self.loose, f"{name} = {limit}: {rule}")
        # a task of another project does not choose among sandboxes
        if self.loose and not spec.task.places:
            raise SandboxError(self.loose[0])

    @abstractmethod
    def start(self) -> None:
        """Create the sandbox, so that commands can run in it."""

    @abstractmethod
    def _run(self, arguments: Words, env: Variables, **options: Any) -> CommandResult:
        """Run one command; ``options`` are those of `run_here` but ``end``."""

    @abstractmethod
    def stop(self) -> None:
        """End all processes and remove everything. Idempotent."""

    def _check(self) -> None:
        if self.spec.stopping.is_set():
            raise SandboxError("the sandbox was stopped")

    def _kill(self) -> None:
        """End what a command left that was killed at its timeout."""
        self._run(killing(self.spec.name), {}, timeout_s=_STOP_SECONDS)

    def hide(self, paths: Iterable[Path]) -> None:
        """Raise `SandboxError` if one of these paths, or a part of it, can be seen."""
        shown = [Path(path).resolve() for path in self._shown]
        for hidden, each in product([path.resolve() for path in paths], shown):
            if hidden.is_relative_to(each) or each.is_relative_to(hidden):
                rule = "contains the other: an agent would see tests or rewards"
                text = f"{each} is visible in the sandbox; it or {hidden} {rule}"
                raise SandboxError(text)

    def map_path(self, path: str) -> str:
        """Return the path in this sandbox for an absolute path of a task."""
        return path

    def map_url(self, url: str) -> str:
        """Return the gateway's URL as seen from this sandbox."""
        return self.spec.gateway or url

    def exec(
        self,
        arguments: Words,
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] = {},
        stdin: bytes = b"",
        log: Path | None = None,
    ) -> CommandResult:
        """Run one command to its end, one at a time; a missing program is exit code 127.

        After ``timeout_s`` it is killed, with every process it started. ``cwd``: by
        default the task's ``/work``. ``env``: added to the sandbox's own variables.
        ``log``: file of this machine that receives standard output and error.
        """
        path = "".join(f"{folder}:" for folder in self.spec.path)
        cwd = cwd or self.map_path("/work")
        folders = (path, self.map_path("/home"), self.map_path("/tmp"), cwd)
        size_mb = self.spec.task.limits.disk_mb or _MAX_OUTPUT_MB
        done = self._run(
            ("sh", "-c", program("enter.sh"), "sh", *folders, *arguments),
            {**self.spec.task.env, **env, MARK: f"{self.spec.name}/"},
            timeout_s=timeout_s,
            stdin=stdin,
            log=log,
            check=self._check,
            max_bytes=min(size_mb, _MAX_OUTPUT_MB) << 20,
        )
        if done.code is None:
            self._kill()
        refused = done.code and done.last_line.startswith(self.refusals)
        if done.code == _FAILED or refused:
            raise SandboxError(f"{self.spec.name}: {done.last_line}")
        return done

    def put(self, archive: bytes, directory: str) -> None:
        """Unpack a tar archive into a directory of the sandbox, created if missing."""
        where = shlex.quote(directory)
        shell = ["sh", "-c", f"mkdir -p {where} && tar -xof - -C {where}"]
        done = self.exec(shell, timeout_s=_COPY_SECONDS, stdin=archive, cwd="/")
        if done.code != 0:
            raise SandboxError(f"{shell[-1]}: {done.summary}")

    def get(self, path: str) -> bytes | None:
        """Return the start of a regular file, 64 MiB at most; None if there is none."""
        where = shlex.quote(path)
        script = f"test -f {where} && ! test -L {where} && head -c {_MAX_FILE} {where}"
        done = self.exec(["sh", "-c", script], timeout_s=_COPY_SECONDS)
        return done.stdout if done.code == 0 else None

    def __enter__(self) -> Self:
        try:
            self._check()
            self.start()
        except BaseException:
            # a part of it may be missing
            with suppress(SandboxError):
                self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@contextmanager
def _failing(what: object, *kinds: type[Exception]) -> Iterator[None]:
    try:
        yield
    except SandboxError:
        raise
    except kinds as error:
        raise SandboxError(f"{what}: {error}") from error


def run_here(
    arguments: Words,
    env: Variables,
    *,
    timeout_s: float,
    stdin: bytes = b"",
    log: Path | None = None,
    max_bytes: int = _MAX_OUTPUT_MB << 20,
    check: Callable[[], None] = lambda: None,
    end: Callable[[], None] = lambda: None,
    pass_fds: Sequence[int] = (),
) -> CommandResult:
    """Run a command of this machine, with ``env`` as its complete environment.

    Its process group ends with it. ``check`` is called often, and raises if the command
    has to end; ``end`` when the group has ended, before the output is complete.
    """
    # a disk may be full; an argument too long, or with a null character
    kinds = OSError, ValueError
    with _failing(f"{arguments[0]} cannot be run", *kinds), ExitStack() as stack:
        given, out, err = (stack.enter_context(TemporaryFile()) for _ in range(3))
        given.write(stdin)
        given.seek(0)
        if log is not None:
            out = stack.enter_context(log.open("w+b"))
        waiting = stack.enter_context(selectors.DefaultSelector())
        check()
        process = subprocess.Popen(
            arguments,
            stdin=given,
            # no file, which a program could empty
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if log else subprocess.PIPE,
            env=env,
            start_new_session=True,  # its own process group
            pass_fds=pass_fds,
        )
        stack.enter_context(process)
        for pipe, file in ((process.stdout, out), (process.stderr, err)):
            if pipe is not None:
                waiting.register(pipe, selectors.EVENT_READ, file)

        def copy(wait_s: float) -> bool:
            ready = waiting.select(wait_s)
            for key, _ in ready:
                data, room = os.read(key.fd, _PIECE_BYTES), max_bytes - key.data.tell()
                if not data:
                    waiting.unregister(key.fileobj)
                key.data.write(data[:room])
                if len(data) > room:
                    raise LimitError(f"its output is longer than {max_bytes} bytes")
            return bool(ready)

        code, until = None, time.monotonic() + timeout_s
        try:
            while code is None and time.monotonic() < until:
                check()
                talks = bool(waiting.get_map())
                if talks:
                    copy(_LOOK_SECONDS)
                with suppress(subprocess.TimeoutExpired):
                    code = process.wait(0 if talks else _LOOK_SECONDS)
        finally:
            # also what it started and left running
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            end()
        # a process that outlives the command may keep the other end open
        while waiting.get_map() and copy(_PIPE_SECONDS):
            pass
        # of a log, the end is enough
        out.seek(max(out.tell() - _TAIL_BYTES, 0) if log else 0)
        err.seek(0)
        return CommandResult(code, out.read(), err.read())


def remove(root: Path) -> None:
    """Remove a directory, if it exists, whatever permissions and depth an agent gave it."""
    if root.is_dir():
        shell = ("sh", "-c", 'chmod -R u+rwx "$0"; rm -rf "$0"', str(root))
        done = subprocess.run(shell, capture_output=True, check=False)
        if done.returncode:
            raise OSError(done.stderr.decode(errors="replace").strip()[-300:])


# A sandbox of this machine's own processes

# variables passed on from this process; keys and proxies are not
_PATHS = ("LD_LIBRARY_PATH", "PATH")
_ENVIRONMENT = {"LANG": "C.UTF-8", "TERM": "dumb", "NO_PROXY": "127.0.0.1,localhost"}
# the directory in the namespaces, the same in every sandbox: equal prompts stay equal
_INSIDE = "/sandbox"
# what it sees of this machine; a missing path is left out
_SYSTEM = """
/usr /bin /sbin /lib /lib32 /lib64 /libx32 /opt /etc/alternatives /etc/ca-certificates
/etc/group /etc/hosts /etc/ld.so.cache /etc/ld.so.conf /etc/ld.so.conf.d /etc/localtime
/etc/mime.types /etc/nsswitch.conf /etc/passwd /etc/pki /etc/protocols /etc/resolv.conf
/etc/services /etc/ssl
""".split()
# limits of an isolated sandbox whose task sets none; process ids begin with _FIRST_ID
_DISK_MB, _PROCESSES, _MAX_FILES, _FIRST_ID = 2048, 1024, 1 << 20, 302
_PORT = 8765  # of the gateway in the sandbox
# becomes a command; its arguments: the descriptor of `bridge`, and the command
_OPEN = f"""\
import os, socket, sys
with socket.socket(fileno=int(sys.argv[1])) as line:
    with socket.create_server(("127.0.0.1", {_PORT})) as listener:
        socket.send_fds(line, [b"."], [listener.fileno()])
os.execvp(sys.argv[2], sys.argv[2:])
"""
_MAX_CONNECTIONS = 128  # an agent must not use up the descriptors of this process
_PLACE = re.compile(r"(/(?!\.\.?(/|$))[^/]+)+")


class LocalSandbox(Sandbox):
    """A sandbox of this machine's own processes; docs/sandboxes.md has what it isolates.

    With bubblewrap each command runs in namespaces of its own; without it nothing is
    isolated. One process holds an isolated sandbox, the first of a namespace that has its
    files, in memory, and all of its processes (``programs/local.sh``). The kernel limits
    both, and removes both when that process ends, which it does with this one.
    """

    kind = "local"
    options: ClassVar = {"namespaces": "auto|no", "network": "gateway|host"}
    limits = ("memory_mb", "processes", "file_mb", "disk_mb")
    refusals = ("bwrap: ", "nsenter: ", "prlimit: ")

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        task, limits, places = spec.task, spec.task.limits, spec.task.places
        if task.image is not None and not task.plain:
            raise SandboxError(f"image = {task.image!r}: a local sandbox has no image")
        missing, cgroup, limits_ids = "namespaces = 'no'", "", False
        if self.chosen["namespaces"] != "no":
            missing, cgroup, limits_ids = _abilities()
        for place in places:
            outer = [each for each in ("/tmp", _INSIDE, *places) if _below(place, each)]
            if not _PLACE.fullmatch(place) or len(outer) > 1:
                rule = "expected a path without . and .., in no other place"
                raise SandboxError(f"place {place!r}: {rule}")
            if missing:
                rule = f"{place} needs an isolated sandbox"
                raise SandboxError(f"{rule}, which is not possible: {missing}")
        loose = {
            "memory_mb is per process: no cgroup v2 of systemd": not cgroup,
            "processes is not enforced": not cgroup and not limits_ids,
            "disk_mb is per file": missing,
        }
        self.loose = (*self.loose, *filter(loose.get, loose))
        self._isolated = not missing
        self._shares_network = self.chosen["network"] == "host"
        if missing:
            rule = "an agent can read and change this machine's files and processes"
            self.exposes = f"the local sandbox isolates nothing ({missing}): {rule}"
        else:
            self.exposes = _SHARED_NETWORK if self._shares_network else None
            self._shown = (*_SYSTEM, sys.base_prefix, sys.prefix, *spec.path)
        processes = limits.processes or _PROCESSES
        # the greatest process id of the namespace; empty: there is no limit
        self._last_id = str(_FIRST_ID + processes) if limits_ids else ""
        self._disk_mb = limits.disk_mb or (0 if missing else _DISK_MB)
        sizes = processes, limits.memory_mb, limits.file_mb or self._disk_mb
        self._limits = cgroup, *(str(size or "") for size in sizes)
        self._root = spec.scratch.resolve() / spec.name
        self._holder: subprocess.Popen[bytes] | None = None
        self._gateway: tuple[str, int] | None = None

    def start(self) -> None:
        # what the agent sees at one place must not say what is seen at another
        places = [f"at{place}" for place in self.spec.task.places]
        with _failing(self._root, OSError):
            self._clear()  # what a killed run left
            for folder in [""] if self._isolated else ["home", "tmp", "work"]:
                (self._root / folder).mkdir(parents=True, exist_ok=True)
            if not self._isolated:
                return
            size = f"size={self._disk_mb}m,nr_inodes={_MAX_FILES},mode=755"
            given = str(self._root), size, self._last_id, "in/home", "in/work", "tmp"
            self._holder = holder = subprocess.Popen(
                _local("hold", *given, *places),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            answer = holder.stdout.readline() if holder.stdout else b""
            if answer != b"ready\n":
                raise OSError(answer.decode(errors="replace").strip())

    def _run(self, arguments: Words, env: Variables, **options: Any) -> CommandResult:
        holder, pid, passed = self._holder, "", list[int]()
        if self._isolated and holder is None:
            # without one, the command would run on this machine
            raise SandboxError("the sandbox does not run")
        paths = {name: os.environ.get(name, "") for name in _PATHS}
        paths["PATH"] = f"{Path(sys.executable).parent}:{paths['PATH'] or os.defpath}"
        for name, text in paths.items():
            # an empty or relative one would be a folder of the workspace
            folders = [each for each in text.split(":") if each.startswith("/")]
            paths[name] = ":".join(folders)
        with ExitStack() as stack:
            if self._gateway is not None:
                passed.append(stack.enter_context(bridge(*self._gateway)))
                helper = (sys.executable, "-I", "-S", "-c", _OPEN, str(passed[0]))
                arguments = (*helper, *arguments)
            if holder is not None:
                pid, arguments = str(holder.pid), (*self._folders(), *arguments)
            command = _local("run", *self._limits, pid, *arguments)
            options |= {"end": self._kill, "pass_fds": passed}
            return run_here(command, {**_ENVIRONMENT, **paths, **env}, **options)

    def _folders(self) -> Iterator[str]:
        if self._shares_network:
            yield "--share-net"
        root = str(self._root)
        yield from ("--bind", f"{root}/in", _INSIDE, "--bind", f"{root}/tmp", "/tmp")
        for path in self._shown:
            yield from ("--ro-bind-try", path, path)
        for place in self.spec.task.places:
            yield from ("--bind", f"{root}/at{place}", place)
        yield from ("--remount-ro", "/", "--")

    def _kill(self) -> None:
        holder = self._holder
        _end(_local("end", f"{holder.pid}") if holder else killing(self.spec.name))

    def stop(self) -> None:
        if self._holder is not None:
            # it ends with its input, when all processes of its namespace have ended
            self._holder.communicate()
            self._holder = None
        with _failing(f"{self._root}: cannot be removed", OSError):
            self._clear()

    def _clear(self) -> None:
        if not self._isolated:
            self._kill()
        remove(self._root)

    def map_path(self, path: str) -> str:
        own = (*self.spec.task.places, "/tmp") if self._isolated else ()
        if any(_below(path, place) for place in own):
            return path
        return (_INSIDE if self._isolated else str(self._root)) + path

    def map_url(self, url: str) -> str:
        """Return the gateway's URL, which commands can reach from now on."""
        if not self._isolated or self._shares_network or self.spec.gateway:
            return super().map_url(url)
        address = urlsplit(url)
        if address.scheme != "http":
            rule = "an isolated local sandbox needs an http URL, or network=host"
            raise SandboxError(f"{url}: {rule}")
        self._gateway = str(address.hostname), address.port or 80
        return f"http://127.0.0.1:{_PORT}"


@contextmanager
def bridge(host: str, port: int) -> Iterator[int]:
    """Let the commands of a network namespace reach one address outside of it.

    `_OPEN` opens a listener there, passes it to this process by the descriptor that is
    yielded, and becomes the command: a listener stays in the namespace of its start.
    """
    near, far = socket.socketpair()
    free = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def copy(reader: StreamReader, writer: StreamWriter) -> None:
        # one side may end, and the other one still answer
        with suppress(OSError), closing(writer):
            while data := await reader.read(_PIECE_BYTES):
                writer.write(data)
                await writer.drain()

    async def connected(reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(OSError, asyncio.CancelledError), closing(writer):
            if not free.locked():
                async with free:
                    far_reader, far_writer = await asyncio.open_connection(host, port)
                    both = copy(reader, far_writer), copy(far_reader, writer)
                    await asyncio.gather(*both)

    async def forward(listener: socket.socket) -> None:
        server = await asyncio.start_server(connected, sock=listener)
        near.setblocking(False)
        await asyncio.get_running_loop().sock_recv(near, 1)
        server.close()

    def serve() -> None:
        # a line that ends brings none
        for number in socket.recv_fds(near, 1, 1)[1]:
            asyncio.run(forward(socket.socket(fileno=number)))

    with near, far:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield far.fileno()
        finally:
            far.close()
            near.shutdown(socket.SHUT_RDWR)
            thread.join()


def clear(scratch: Path) -> None:
    """Remove the sandboxes that a killed run left, if any, and their processes."""
    for root in scratch.glob("*"):
        _end(killing(root.name))
    remove(scratch)


def killing(name: str) -> Words:
    """Return the command that ends the processes with the mark of a sandbox."""
    return "sh", "-c", program("kill.sh"), f"{MARK}={name}/"


def _end(command: Words) -> None:
    # all of it ends with its time: what kills later would kill the next command
    run_here(command, os.environ, timeout_s=_DYING_SECONDS)


def _local(*arguments: str) -> Words:
    return "/bin/sh", "-c", program("local.sh"), "local.sh", *arguments


def _below(path: str, folder: str) -> bool:
    return f"{path}/".startswith(f"{folder}/")


# why commands cannot be isolated, the start of one in a cgroup, a limit of process ids
@cache
def _abilities() -> tuple[str, str, bool]:
    done = run_here(_local("check"), os.environ, timeout_s=_STOP_SECONDS)
    cgroup, _, ids = done.stdout.decode().partition("\n")
    missing = done.stderr.decode(errors="replace").strip() or done.summary
    return missing if done.code else "", cgroup, bool(ids.strip())


class ContainerSandbox(Sandbox):
    """A container, by a client of the command line, ``options["binary"]``.

    ``programs/KIND.sh`` says how it does ``start``, ``exec`` and ``remove``. Its variables
    are limits, options, and ``name``, ``image``, ``build`` (a folder), ``overlay`` (one for
    written files) and ``variables``, the names of those that a command gets. In a
    ``network`` that is not ``host`` the gateway is ``host.docker.internal``.
    """

    # what the client puts before the names of variables that it passes on
    env_prefix: ClassVar[str] = ""

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        task = spec.task
        if task.image is None:
            raise SandboxError(f"a sandbox of kind {self.kind} needs an image")
        self._apart = self.chosen.get("network", "host") != "host"
        self.exposes = None if self._apart else _SHARED_NETWORK
        self._exists = False
        self._overlay = spec.scratch.resolve() / f"{spec.name}.overlay"
        own = {"name": spec.name, "image": task.image, "build": task.build}
        values = {**own, "overlay": self._overlay, **asdict(task.limits), **self.chosen}
        self._variables = {k: "" if v is None else f"{v}" for k, v in values.items()}

    def start(self) -> None:
        # one that a killed run left
        self._client("remove")
        self._exists = True
        remove(self._overlay)
        self._overlay.mkdir(parents=True)
        done = self._client("start", timeout_s=_START_SECONDS, check=self._check)
        if done.code != 0:
            image = self.spec.task.image
            raise SandboxError(f"{image}: cannot be started: {done.summary}")

    def _run(self, arguments: Words, env: Variables, **options: Any) -> CommandResult:
        return self._client("exec", *arguments, env=env, **options)

    def stop(self) -> None:
        if self._exists:
            done = self._client("remove")
            with suppress(OSError):
                remove(self._overlay)
            if done.code != 0:
                text = f"{self.spec.name}: cannot be removed: {done.summary}"
                raise SandboxError(text)
            self._exists = False

    def _client(
        self,
        step: str,
        *arguments: str,
        env: Mapping[str, str] = {},
        timeout_s: float = _STOP_SECONDS,
        **options: Any,
    ) -> CommandResult:
        own = {**os.environ, **self._variables, "variables": " ".join(env)}
        passed = {self.env_prefix + name: value for name, value in env.items()}
        shell = ("sh", "-c", program(f"{self.kind}.sh"), self.kind, step, *arguments)
        return run_here(shell, {**own, **passed}, timeout_s=timeout_s, **options)

    def map_url(self, url: str) -> str:
        if self.spec.gateway is not None or not self._apart:
            return super().map_url(url)
        scheme, _, rest = url.partition("://")
        return f"{scheme}://host.docker.internal:{rest.rpartition(':')[2]}"


class DockerSandbox(ContainerSandbox):
    """A container of Docker, or of a client with the same commands (``podman``)."""

    kind = "docker"
    options: ClassVar = {"binary": "docker", "network": "host"}
    limits = ("memory_mb", "cpus", "processes", "file_mb")
    refusals = ("Error response from daemon", "Error: No such", "Cannot connect to")


class ApptainerSandbox(ContainerSandbox):
    """An instance of Apptainer (or ``singularity``); the image is a file or a URI."""

    kind = "apptainer"
    options: ClassVar = {"binary": "apptainer"}
    limits = ("memory_mb", "cpus", "processes")
    refusals = ("FATAL:",)
    env_prefix = "APPTAINERENV_"


class E2BSandbox(Sandbox):
    """A sandbox of E2B, in its cloud or on a private cluster, by its Python package.

    The image is an E2B template; None: E2B's base. E2B ends it after
    ``options["lifetime"]`` seconds. The package reads its key from ``E2B_API_KEY``.
    """

    kind = "e2b"
    options: ClassVar = {"lifetime": "7200"}

    def __init__(self, spec: SandboxSpec) -> None:
        super().__init__(spec)
        if spec.gateway is None:
            rule = "give the URL by which it reaches the gateway"
            raise SandboxError(f"an E2B sandbox cannot reach this machine: {rule}")
        try:
            # an optional package whose types are not available to type checkers
            self._e2b: Any = importlib.import_module("e2b")
        except ModuleNotFoundError:
            raise SandboxError("e2b is not installed: pip install e2b") from None
        self._box: Any = None

    def start(self) -> None:
        with _failing("e2b", Exception):
            self._box = self._e2b.Sandbox.create(
                template=self.spec.task.image,
                timeout=int(self.chosen["lifetime"]),
                metadata={MARK: self.spec.name},
            )

    def _run(self, arguments: Words, env: Variables, **options: Any) -> CommandResult:
        self._check()
        # `stop` may take the box away at any time
        box, log, token = self._box, options.get("log"), secrets.token_hex(8)
        # through files: the package decodes the streams of a command as text
        given, out, err = (f"/tmp/.{token}.{name}" for name in ("in", "out", "err"))
        streams = f"> {out} 2>&1" if log else f"> {out} 2> {err}"
        script = f"exec {shlex.join(arguments)} < {given} {streams}"
        with _failing("e2b", Exception):
            box.files.write(given, options.get("stdin", b""), user="root")
            code = self._shell(box, script, options["timeout_s"], envs=dict(env))
            paths = [out] if log else [out, err]
            read = [box.files.read(p, format="bytes", user="root") for p in paths]
            texts = [*map(bytes, read)]
            self._shell(box, f"rm -f {given} {out} {err}")
        if log is not None:
            log.write_bytes(texts[0])
            texts = [texts[0][-_TAIL_BYTES:]]
        return CommandResult(code, *texts)

    def _shell(
        self, box: Any, script: str, seconds: float = _STOP_SECONDS, **more: Any
    ) -> int | None:
        more |= {"timeout": math.ceil(seconds), "user": "root"}
        try:
            with ThreadPoolExecutor(1) as pool:
                job = pool.submit(box.commands.run, script, **more)
                while not wait([job], _LOOK_SECONDS).done:
                    if self.spec.stopping.is_set():
                        # that ends the command
                        self.stop()
            return int(job.result().exit_code)
        except self._e2b.TimeoutException:
            return None
        except self._e2b.CommandExitException as error:
            return int(error.exit_code)

    def stop(self) -> None:
        # its lifetime may have ended
        with _failing("e2b", Exception), suppress(self._e2b.NotFoundException):
            if self._box is not None:
                self._box.kill()
        self._box = None


SANDBOXES: Mapping[str, type[Sandbox]] = {
    kind.kind: kind
    for kind in (ApptainerSandbox, DockerSandbox, E2BSandbox, LocalSandbox)
}
"""The kinds of sandbox by name."""

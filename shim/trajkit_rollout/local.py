"""A sandbox of this machine's own processes.

With bubblewrap (``bwrap``) each command runs in namespaces of its own; without it nothing
is isolated. docs/sandboxes.md lists what that means. An isolated sandbox is held by one
process (`_HOLD`), the first of a namespace that has its files, a file system in memory,
and all of its processes. The kernel limits both, and removes both when that process ends,
which it does with this one.
"""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import cache
from glob import glob
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from trajkit_rollout import sandbox
from trajkit_rollout.sandbox import Command, CommandResult, SandboxError, remove

# variables passed on from this process; keys and proxies are not
_KEPT = ("LD_LIBRARY_PATH", "LC_ALL")
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
# Arguments: the sandbox's directory, the options of its file system, and, where the kernel
# limits the process ids of a namespace, their greatest one. It reaps what ends in the
# namespace, and ends with its input.
_HOLD = """
mount -t tmpfs -o "$2" tmpfs "$1" || exit
if test "$3"; then
  # numbers up to 300 are not given out twice
  echo 301 > /proc/sys/kernel/ns_last_pid && echo "$3" > /proc/sys/kernel/pid_max || exit
fi
echo ready
exec env --ignore-signal=CHLD cat
"""
_FIRST_ID = 302
# the kernel that has limits of process ids per namespace; before, they are the machine's
_IDS_KERNEL = (6, 14)
# limits of an isolated sandbox whose task sets none
_DISK_MB = 2048
_PROCESSES = 1024
_MAX_FILES = 1 << 20
# a killed process that still exists after this waits for a disk and does nothing more
_DYING_SECONDS = 5.0
_LOOK_SECONDS = 0.01
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

_PIECE_BYTES = 1 << 16
# an agent must not use up the descriptors of this process
_MAX_CONNECTIONS = 128
# exit code of a sandbox that failed before the command ran, as in `docker run`
_FAILED = 125


class LocalSandbox(sandbox.Sandbox):
    """See the module.

    ``options["namespaces"]`` is ``auto`` (used if available), ``no`` or ``yes``
    (required). ``options["network"]`` is ``gateway`` or ``host``, which shares this
    machine's network. ``file_mb`` applies to each file.
    """

    kind = "local"
    options: ClassVar = {"namespaces": "auto|yes|no", "network": "gateway|host"}
    limits = ("memory_mb", "processes", "file_mb", "disk_mb")

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        if spec.image is not None and not spec.plain:
            raise SandboxError(f"image = {spec.image!r}: a local sandbox has no image")
        wanted = self.chosen["namespaces"]
        self._missing = "namespaces = 'no'" if wanted == "no" else _why_not_isolated()
        if self._missing and (wanted == "yes" or spec.places):
            places = ", ".join(spec.places)
            rule = (
                f"{places}: only there" if places else "required by namespaces = 'yes'"
            )
            raise SandboxError(f"no isolated sandbox ({self._missing}): {rule}")
        self._shares_network = self.chosen["network"] == "host"
        self._scope = () if self._missing else _scope()
        loose = []
        if not self._scope:
            loose = ["memory_mb is per process: there is no cgroup v2 of systemd here"]
            if self._missing or not _limits_ids():
                loose.append("processes is not enforced")
        if self._missing:
            rule = "an agent can read and change this machine's files and processes"
            self.exposes = (
                f"the local sandbox isolates nothing ({self._missing}): {rule}"
            )
            loose.append("disk_mb is per file")
        elif self._shares_network:
            self.exposes = sandbox.SHARED_NETWORK
        self.loose = "; ".join(loose) or None
        self._root = spec.scratch.resolve() / spec.name
        self._holder: subprocess.Popen[bytes] | None = None
        self._first = 0  # the holder's first process
        self._gateway: tuple[str, int] | None = None

    def start(self) -> None:
        """Make its directories."""
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
        limits, pipe = self.spec.limits, subprocess.PIPE
        size = f"size={limits.disk_mb or _DISK_MB}m,nr_inodes={_MAX_FILES},mode=755"
        last_id = _FIRST_ID + (limits.processes or _PROCESSES)
        ids = str(last_id) if _limits_ids() else ""
        program = (*_UNSHARE, "sh", "-c", _HOLD, "sh", str(self._root), size, ids)
        self._holder = holder = subprocess.Popen(
            program, stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != b"ready\n":
            raise OSError(holder.stderr.read().decode(errors="replace").strip())
        children = f"/proc/{holder.pid}/task/{holder.pid}/children"
        self._first = int(Path(children).read_text())

    def _among(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        command = (*self._entered(), *arguments)
        return subprocess.run(command, capture_output=True, check=False)

    def _entered(self) -> Iterator[str]:
        """The arguments before those of a command in the sandbox's own namespace."""
        if self._holder is not None:
            yield from ("nsenter", "--target", str(self._first), "--user", "--mount")
            yield from ("--pid", "--preserve-credentials", "--")

    def _run(self, command: Command) -> CommandResult:
        arguments = ("sh", "-c", self._script(), "sh", command.cwd, *command.arguments)
        with ExitStack() as stack:
            passed: tuple[int, ...] = ()
            if self._gateway is not None:
                passed = (stack.enter_context(bridge(*self._gateway)),)
                helper = (sys.executable, "-I", "-S", "-c", _OPEN, str(*passed))
                arguments = (*helper, *arguments)
            if not self._missing:
                arguments = (*self._namespaces(), *arguments)
            env, mark = self._environment(command.env), command.env[sandbox.MARK]
            started = replace(command, arguments=arguments, env=env, pass_fds=passed)
            done = sandbox.run_here(started, self._check, lambda: self._end(mark))
        failed = done.code == 1 and done.last_line.startswith(("bwrap: ", "nsenter: "))
        if done.code == _FAILED or failed:
            raise SandboxError(f"the local sandbox failed: {done.last_line}")
        return done

    def _end(self, mark: str) -> None:
        """End the processes of a command, and wait for their end."""
        until = time.monotonic() + _DYING_SECONDS
        while self._alive(mark) and time.monotonic() < until:
            if self._holder is not None:
                self._among("sh", "-c", "kill -9 -1")
            time.sleep(_LOOK_SECONDS)

    def _alive(self, mark: str) -> bool:
        """Whether the sandbox has processes; kills those of one that is not isolated."""
        if self._holder is not None:
            listed = Path("/proc", str(self._first), "root", "proc").iterdir()
            return sum(path.name.isdecimal() for path in listed) > 1
        return self._missing is not None and _kill(mark)

    def _remove(self) -> None:
        if self._holder is not None:
            # it ends with its input, when all processes of its namespace have ended
            self._holder.communicate()
            self._holder = None
        self._end(f"{self.spec.name}/")
        try:
            remove(self._root)
        except OSError as error:
            raise SandboxError(f"{self._root}: cannot be removed: {error}") from error

    def map_path(self, path: str) -> str:
        """Return the path below the sandbox's own directory."""
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
        """The arguments before those of an isolated command."""
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

    def shown(self) -> tuple[str, ...]:
        """Return what an isolated command sees; without isolation it sees everything."""
        if self._missing:
            return ()
        return (*_SYSTEM, sys.base_prefix, sys.prefix, *self.spec.path)

    def _script(self) -> str:
        """Limits, directory, command; a failure before that is code 125."""
        limits = self.spec.limits
        steps = ["ulimit -c 0"]
        # in blocks of 512 bytes and in KiB
        disk_mb = limits.disk_mb or (None if self._missing else _DISK_MB)
        if file_mb := limits.file_mb or disk_mb:
            steps.append(f"ulimit -f {file_mb * 2048}")
        if limits.memory_mb is not None and not self._scope:
            steps.append(f"ulimit -v {limits.memory_mb * 1024}")
        return f'{" && ".join(steps)} && cd "$1" || exit {_FAILED}; shift; exec "$@"'

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        own = str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)
        return {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "PATH": os.pathsep.join([*self.spec.path, *own]),
            "HOME": self.map_path("/home"),
            "TMPDIR": self.map_path("/tmp"),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_PROXY": "127.0.0.1,localhost",
            **more,
        }


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
    """Forward what comes to a listener until the line ends."""
    connections = set[asyncio.Task[None] | None]()

    async def connected(
        reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        try:
            if len(connections) < _MAX_CONNECTIONS:
                connections.add(task)
                far_reader, far_writer = await asyncio.open_connection(host, port)
                both = (_copy(reader, far_writer), _copy(far_reader, writer))
                await asyncio.gather(*both)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            connections.discard(task)
            writer.close()

    server = await asyncio.start_server(connected, sock=listener)
    line.setblocking(False)
    await asyncio.get_running_loop().sock_recv(line, 1)
    server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy what one side sends until it ends; the other one may still answer."""
    try:
        with suppress(OSError):
            while data := await reader.read(_PIECE_BYTES):
                writer.write(data)
                await writer.drain()
    finally:
        writer.close()


def clear(scratch: Path) -> None:
    """Remove the sandboxes that a killed run left, and their processes."""
    for root in scratch.iterdir():
        while _kill(f"{root.name}/"):
            time.sleep(_LOOK_SECONDS)
    remove(scratch)


def _kill(start: str) -> bool:
    """Kill the processes whose mark starts with a text; return whether there were any."""
    killed, mark = False, f"\0{sandbox.MARK}={start}".encode()
    for process in glob("/proc/[0-9]*"):
        # it has ended, or belongs to another user
        with suppress(OSError):
            if mark in b"\0" + Path(process, "environ").read_bytes():
                os.kill(int(Path(process).name), signal.SIGKILL)
                killed = True
    return killed


def _limits_ids() -> bool:
    version = os.uname().release.split(".")
    return tuple(int(part) for part in version[:2]) >= _IDS_KERNEL


def _failure(command: tuple[str, ...]) -> str | None:
    """Why a command fails; None: it succeeds."""
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    except FileNotFoundError:
        return f"{command[0]} is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return done.stderr.decode().strip() or "it failed" if done.returncode else None


@cache
def _scope() -> tuple[str, ...]:
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

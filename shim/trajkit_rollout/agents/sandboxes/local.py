"""A sandbox of this machine's own processes.

It has its own directory with a home, and none of the caller's environment. With
bubblewrap (``bwrap``) each command runs in namespaces of its own. It sees the sandbox's
directory, this machine's programs (read-only), its own processes, and the gateway, but no
other file, process or network. Without bubblewrap nothing is isolated.
docs/sandboxes.md lists what that means.
"""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import cache
from glob import glob
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from trajkit_rollout.agents import sandbox
from trajkit_rollout.agents.bridge import OPEN, PORT, bridge
from trajkit_rollout.agents.sandbox import (
    Command,
    CommandResult,
    LimitError,
    SandboxError,
    remove,
)

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

# limits of an isolated sandbox whose task sets none
_DISK_MB = 8192
_PROCESSES = 1024

# shared memory of a process, in KiB
_SHARED = re.compile(r"^Pss_Shmem: +(\d+) kB$", re.MULTILINE)

# a killed process that still exists after this waits for a disk and does nothing more
_DYING_SECONDS = 5.0
_LOOK_SECONDS = 0.01

# exit code of a sandbox that failed before the command ran, as in `docker run`
_FAILED = 125


class LocalSandbox(sandbox.Sandbox):
    """See the module.

    ``options["namespaces"]`` is ``auto`` (used if available), ``no`` or ``yes``
    (required). ``options["network"]`` is ``gateway`` or ``host``, which shares this
    machine's network. ``file_mb`` and ``memory_mb`` apply per process; the latter limits
    its address space. ``disk_mb`` and ``processes`` are checked every half second.
    """

    kind = "local"
    options: ClassVar = {"namespaces": "auto|yes|no", "network": "gateway|host"}
    limits = ("memory_mb", "processes", "file_mb", "disk_mb")

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        if spec.image is not None and not spec.plain:
            rule = "a local sandbox has no image"
            raise SandboxError(f"image = {spec.image!r}: {rule}")
        wanted = self.chosen["namespaces"]
        self._missing = "namespaces = 'no'" if wanted == "no" else _why_not_isolated()
        if wanted == "yes" and self._missing:
            raise SandboxError(f"namespaces = 'yes': {self._missing}")
        self._shares_network = self.chosen["network"] == "host"
        if self._missing:
            rule = "an agent can read and change this machine's files and processes"
            reason = f"the local sandbox isolates nothing ({self._missing})"
            self.exposes = f"{reason}: {rule}"
        elif self._shares_network:
            self.exposes = sandbox.SHARED_NETWORK
        self._root = spec.scratch.resolve() / spec.name
        self._disk_mb = spec.limits.disk_mb or (None if self._missing else _DISK_MB)
        self._log: Path | None = None  # of the running command
        self._places = spec.places
        if self._places and self._missing:
            rule = "only an isolated sandbox has them where the task expects them"
            raise SandboxError(f"{', '.join(self._places)}: {rule} ({self._missing})")
        self._gateway: tuple[str, int] | None = None

    def start(self) -> None:
        """Make its directories."""
        try:
            for name in ("home", "tmp", "work", *self._places):
                (self._root / name.lstrip("/")).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxError(f"{self._root}: {error.strerror}") from error

    def _run(self, command: Command) -> CommandResult:
        arguments = ("sh", "-c", self._script(), "sh", command.cwd, *command.arguments)
        with ExitStack() as stack:
            passed: tuple[int, ...] = ()
            if self._gateway is not None:
                passed = (stack.enter_context(bridge(*self._gateway)),)
                helper = (sys.executable, "-I", "-S", "-c", OPEN, str(*passed))
                arguments = (*helper, *arguments)
            if not self._missing:
                arguments = (*self._namespaces(), *arguments)
            env = self._environment(command.env)
            started = replace(command, arguments=arguments, env=env, pass_fds=passed)
            self._log = command.log
            try:
                done = sandbox.run_here(started, self._check)
            finally:
                # a namespace ends with its first process, but killing takes a moment
                _kill(command.env[sandbox.MARK])
        failed = done.code == 1 and done.last_line.startswith("bwrap: ")
        if done.code == _FAILED or failed:
            raise SandboxError(f"the local sandbox failed: {done.last_line}")
        return done

    def _remove(self) -> None:
        _kill(f"{self.spec.name}/", self._root)
        until = time.monotonic() + _DYING_SECONDS
        while self._root.exists():
            try:
                remove(self._root)
            except OSError as error:
                # a process that dies may still write
                if time.monotonic() > until:
                    message = f"{self._root}: cannot be removed: {error}"
                    raise SandboxError(message) from error
                time.sleep(_LOOK_SECONDS)

    def map_path(self, path: str) -> str:
        """Return the path below the sandbox's own directory."""
        if any(f"{path}/".startswith(f"{place}/") for place in self._places):
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
        return f"http://127.0.0.1:{PORT}"

    def _namespaces(self) -> Iterator[str]:
        """The arguments before those of an isolated command."""
        yield from _ISOLATED
        if self._shares_network:
            yield "--share-net"
        root = str(self._root)
        yield from ("--bind", root, _INSIDE, "--bind", f"{root}/tmp", "/tmp")
        for path in self.shown():
            yield from ("--ro-bind-try", path, path)
        for place in self._places:
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
        if file_mb := limits.file_mb or self._disk_mb:
            steps.append(f"ulimit -f {file_mb * 2048}")
        if limits.memory_mb is not None:
            steps.append(f"ulimit -v {limits.memory_mb * 1024}")
        return f'{" && ".join(steps)} && cd "$1" || exit {_FAILED}; shift; exec "$@"'

    def _check(self, pid: int) -> None:
        super()._check(pid)
        isolated = not self._missing
        processes = self.spec.limits.processes or (_PROCESSES if isolated else None)
        if self._disk_mb is None and processes is None:
            return
        found = _inside(pid) if isolated else _marked(f"{self.spec.name}/")
        if self._disk_mb is not None:
            size = _disk_bytes(self._root, found)
            if self._log is not None:
                size += self._log.stat().st_size
            if size > self._disk_mb << 20:
                message = f"its files take more than disk_mb = {self._disk_mb}"
                raise LimitError(message)
        if processes is not None:
            if sum(len(glob(f"{one}/task/[0-9]*")) for one in found) > processes:
                raise LimitError(f"it runs more than processes = {processes}")

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


def clear(scratch: Path) -> None:
    """Kill the processes of sandboxes that a killed run left, and remove their files."""
    for root in scratch.iterdir():
        _kill(f"{root.name}/", root)
    remove(scratch)


def _disk_bytes(root: Path, processes: Iterable[str]) -> int:
    """What the files below a directory take, and those without a name, in bytes.

    The latter are open files and shared memory.
    """
    # `find` sees paths of any length; an empty file takes a block of 512 bytes too
    done = subprocess.run(
        ("find", root, "-printf", r"%b\n"), capture_output=True, check=False
    )
    if not done.stdout:
        raise OSError(done.stderr.decode(errors="replace").strip())
    blocks = sum(int(each) + 1 for each in done.stdout.split())
    unnamed, mapped = {}, 0
    for process in processes:
        for path in glob(f"{process}/fd/*"):
            # a process may close it at any time
            with suppress(OSError):
                facts = os.stat(path)
                if facts.st_nlink == 0:
                    unnamed[facts.st_dev, facts.st_ino] = facts.st_blocks
        # each process has its share of a page; its file may be closed
        with suppress(OSError):
            if found := _SHARED.search(Path(process, "smaps_rollup").read_text()):
                mapped += int(found[1]) << 10
    # an open file may be mapped too
    return 512 * blocks + max(512 * sum(unnamed.values()), mapped)


def _inside(pid: int) -> list[str]:
    """The directories in /proc of a namespace's processes; ``pid`` is bubblewrap's."""
    try:
        first = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]
    # the first process does not exist yet, or no longer
    except (OSError, IndexError):
        return []
    # the namespace's own; this process is in it as long as it is this machine's
    root = f"/proc/{first}/root"
    return [] if os.path.exists(f"{root}/proc/self") else glob(f"{root}/proc/[0-9]*")


def _marked(start: str, root: Path | None = None) -> list[str]:
    """The directories in /proc of all processes whose mark starts with a text.

    Also of those in the namespaces of the sandbox with a directory.
    """
    found, mark = [], f"\0{sandbox.MARK}={start}".encode()
    for process in glob("/proc/[0-9]*"):
        # it has ended, or belongs to another user
        with suppress(OSError):
            if (
                mark in b"\0" + Path(process, "environ").read_bytes()
                # a process can change its environment, but not this
                or (root and os.path.samefile(f"{process}/root{_INSIDE}", root))
            ):
                found.append(process)
    return found


def _kill(start: str, root: Path | None = None) -> None:
    """Kill all processes that `_marked` finds, and wait for their end."""
    until = time.monotonic() + _DYING_SECONDS
    while (found := _marked(start, root)) and time.monotonic() < until:
        for process in found:
            with suppress(ProcessLookupError):
                os.kill(int(Path(process).name), signal.SIGKILL)
        time.sleep(_LOOK_SECONDS)


@cache
def _why_not_isolated() -> str | None:
    """Why commands cannot be isolated; None: they can."""
    command = (*_ISOLATED, "--ro-bind", "/", "/", "true")
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    except FileNotFoundError:
        return "bubblewrap is not installed"
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.decode().strip()

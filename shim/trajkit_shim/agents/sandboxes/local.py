"""A sandbox of this machine's own processes.

It has its own directory with a home, and none of the caller's environment. If the kernel
permits, each command also gets its own user, process and mount namespace. Then none of
its processes outlives it, and the directory has the same path in every sandbox, so equal
prompts stay equal. This contains an agent's mistakes but not an attacker, who can read
this machine's files and use its network.
"""

import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from trajkit_shim.agents import sandbox
from trajkit_shim.agents.processes import Processes

# identifies the sandbox's processes: another run may have a sandbox of the same name
_OWNER = "TRAJKIT_OWNER"

# variables passed on from this process; keys and proxies are not
_KEPT = ("LD_LIBRARY_PATH", "LC_ALL")

# Candidates for the mount point: directories of this machine that must be empty, so that
# the mount hides nothing.
_MOUNT_POINTS = ("/srv", "/media", "/mnt")

# makes a process die with the thread that started it
_LEASHED = ("setpriv", "--pdeathsig", "KILL")
_NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--mount-proc"),
    *("--fork", "--kill-child"),
)

# a killed process that still exists after this waits for a disk and does nothing more
_DYING_SECONDS = 5.0

# exit code of a sandbox that failed before the command ran, as in `docker run`
_FAILED = 125


class LocalSandbox(sandbox.Sandbox):
    """See the module.

    ``options["namespaces"]`` is ``auto`` (used if available), ``no`` or ``yes``
    (required). ``file_mb`` and ``memory_mb`` apply per process; the latter limits its
    address space.
    """

    def __init__(self, spec: sandbox.Spec) -> None:
        super().__init__(spec)
        spec.limits.reject("local", "cpus", "processes")
        if spec.image is not None:
            rule = "a local sandbox has no image"
            raise sandbox.SandboxError(f"image = {spec.image!r}: {rule}")
        wanted = spec.options.get("namespaces", "auto")
        if wanted not in ("auto", "yes", "no"):
            rule = "is not auto, yes or no"
            raise sandbox.SandboxError(f"namespaces = {wanted!r} {rule}")
        mount_point = None if wanted == "no" else _find_mount_point()
        if wanted == "yes" and mount_point is None:
            raise sandbox.SandboxError(
                "namespaces = 'yes': the kernel (or a missing unshare or setpriv) "
                f"rejects them, or none of {', '.join(_MOUNT_POINTS)} is an empty directory"
            )
        self._root = spec.scratch.resolve() / spec.name
        self._mounted = mount_point
        self._processes = Processes()
        self._owner = secrets.token_hex(8)
        self._removing = threading.Lock()

    def start(self) -> None:
        """Make its directories."""
        try:
            for name in ("home", "tmp", "work"):
                (self._root / name).mkdir(parents=True)
        except OSError as error:
            raise sandbox.SandboxError(f"{self._root}: {error.strerror}") from error

    def run(self, command: sandbox.Command) -> sandbox.CommandResult:
        """Run one command in namespaces of its own; see `Sandbox.exec`."""
        leash = _LEASHED if _works(_LEASHED) else ()
        namespaces = () if self._mounted is None else _NAMESPACES
        cwd = command.cwd or self.map_path("/work")
        arguments = (
            *(*leash, *namespaces, "sh", "-c", self._script(), "sh"),
            *(str(self._root), self._mounted or "", cwd, *command.arguments),
        )
        token = secrets.token_hex(8)
        env = self._environment({**command.env, sandbox.COMMAND_MARK: token})
        try:
            done = self._processes.run(replace(command, arguments=arguments), env)
        except OSError as error:
            raise sandbox.SandboxError(f"{error.filename}: {error.strerror}") from error
        # a namespace ends with its first process, but killing takes a moment
        if self._mounted is None or done.code is None:
            _kill_marked(sandbox.COMMAND_MARK, token)
        if done.code == _FAILED:
            raise sandbox.SandboxError(f"the local sandbox failed: {done.last_line}")
        return done

    def stop(self) -> None:
        """Kill its processes and remove its directory."""
        self._processes.end()
        # the end of a run stops sandboxes that their own threads stop too
        with self._removing:
            _kill_marked(_OWNER, self._owner)
            if not self._root.exists():
                return
            remove(self._root)

    def map_path(self, path: str) -> str:
        """Return the path below the sandbox's own directory."""
        return (self._mounted or str(self._root)) + path

    def _script(self) -> str:
        """Mount, limits, directory, command; a failure before that is code 125."""
        limits = self.spec.limits
        steps = []
        if self._mounted is not None:
            steps.append('mount --bind "$1" "$2"')
        # in blocks of 512 bytes and in KiB
        if limits.file_mb is not None:
            steps.append(f"ulimit -f {limits.file_mb * 2048}")
        if limits.memory_mb is not None:
            steps.append(f"ulimit -v {limits.memory_mb * 1024}")
        steps += ["ulimit -c 0", 'cd "$3"']
        return f'{" && ".join(steps)} || exit {_FAILED}; shift 3; exec "$@"'

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
            sandbox.MARK: self.spec.name,
            _OWNER: self._owner,
            **more,
        }


def remove(root: Path) -> None:
    """Remove a directory with its content, whatever permissions the agent set."""
    os.chmod(root, stat.S_IRWXU)
    for folder, names, _ in os.walk(root):
        # the content of a directory without permissions cannot be removed
        for name in names:
            mount_point = os.path.join(folder, name)
            if not os.path.islink(mount_point):
                os.chmod(mount_point, stat.S_IRWXU)
    shutil.rmtree(root)


def _kill_marked(variable: str, value: str) -> None:
    """Kill all processes with an environment variable, and wait for their end."""
    mark = f"{variable}={value}".encode()
    until = time.monotonic() + _DYING_SECONDS
    while time.monotonic() < until:
        found = False
        for entry in Path("/proc").glob("[0-9]*/environ"):
            # it has ended, or belongs to another user
            with suppress(OSError):
                if mark in entry.read_bytes().split(b"\0"):
                    os.kill(int(entry.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)


@cache
def _find_mount_point() -> str | None:
    """The mount point of sandboxes; None: namespaces are not available."""
    for mount_point in _MOUNT_POINTS:
        with suppress(OSError):
            if not os.listdir(mount_point):
                mount = ("sh", "-c", 'mount --bind /tmp "$1"', "sh", mount_point)
                works = _works((*_LEASHED, *_NAMESPACES, *mount))
                return mount_point if works else None
    return None


@cache
def _works(command: tuple[str, ...]) -> bool:
    """Whether a command succeeds; the bare leash gets something to run."""
    if command == _LEASHED:
        command = (*command, "true")
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


SANDBOX = sandbox.SandboxKind(LocalSandbox, frozenset({"namespaces"}))

"""A sandbox of this machine's own processes.

It has a directory with a home, and an environment with nothing of the caller's in it.
Where the kernel lets it, each command also has a user, a process and a mount namespace
of its own: then nothing that it starts outlives it, and the directory stands at the same
path in every sandbox, so that equal prompts stay equal. It keeps an agent's mistakes
apart; it is no wall against one that means harm, who can read this machine's files and
reach its network.
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
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from trajkit_shim.processes import Processes
from trajkit_shim.sandbox import (
    COMMAND_MARK,
    MARK,
    Done,
    Sandbox,
    SandboxError,
    SandboxKind,
    Spec,
)

# Whose a process is: another run may have a sandbox of the same name.
_OWNER = "TRAJKIT_OWNER"

# what a process needs of this one's environment; keys and proxies stay out
_KEPT = ("LD_LIBRARY_PATH", "LC_ALL")

# An empty directory of this machine that the sandbox's own is mounted over, so that
# nothing is hidden by it.
_PLACES = ("/srv", "/media", "/mnt")

# dies with the thread that started it
_LEASHED = ("setpriv", "--pdeathsig", "KILL")
_NAMESPACES = (
    *("unshare", "--user", "--map-root-user", "--mount", "--pid", "--mount-proc"),
    *("--fork", "--kill-child"),
)

# What is killed and still there then waits for a disk, and does nothing more.
_DYING_SECONDS = 5.0

# The code of a sandbox that failed before the command ran, as of `docker run`.
_FAILED = 125


class LocalSandbox(Sandbox):
    """See the module.

    ``options["namespaces"]`` is ``auto`` (where they work), ``no``, or ``yes`` (else it
    is an error). ``file_mb`` and ``memory_mb`` are held per process, the latter as its
    address space.
    """

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        spec.limits.refuse("local", "cpus", "processes")
        if spec.image is not None:
            raise SandboxError(f"image = {spec.image!r}: a local sandbox has none")
        wanted = spec.options.get("namespaces", "auto")
        if wanted not in ("auto", "yes", "no"):
            raise SandboxError(f"namespaces = {wanted!r} is not auto, yes or no")
        place = None if wanted == "no" else _mount_place()
        if wanted == "yes" and place is None:
            raise SandboxError(
                "namespaces = 'yes': the kernel (or a missing unshare or setpriv) "
                f"refuses them, or none of {', '.join(_PLACES)} is an empty directory"
            )
        self._root = spec.scratch.resolve() / spec.name
        self._mounted = place
        self._processes = Processes()
        self._owner = secrets.token_hex(8)
        self._removing = threading.Lock()

    def start(self) -> None:
        """Make its directories."""
        try:
            for name in ("home", "tmp", "work"):
                (self._root / name).mkdir(parents=True)
        except OSError as error:
            raise SandboxError(f"{self._root}: {error.strerror}") from error

    def exec(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        log: Path | None = None,
    ) -> Done:
        """Run one command in namespaces of its own; see `Sandbox.exec`."""
        leash = _LEASHED if _works(_LEASHED) else ()
        apart = () if self._mounted is None else _NAMESPACES
        arguments = [*leash, *apart, "sh", "-c", self._script(), "sh"]
        arguments += [str(self._root), self._mounted or "", cwd or self.place("/work")]
        own = {COMMAND_MARK: secrets.token_hex(8)}
        try:
            done = self._processes.run(
                [*arguments, *command],
                timeout_s=timeout_s,
                env=self._environment({**(env or {}), **own}),
                stdin=stdin,
                log=log,
            )
        except OSError as error:
            raise SandboxError(f"{error.filename}: {error.strerror}") from error
        # a namespace ends with its first process; what is killed takes a moment
        if self._mounted is None or done.code is None:
            _sweep(COMMAND_MARK, own[COMMAND_MARK])
        if done.code == _FAILED:
            raise SandboxError(f"the local sandbox failed: {done.last_words}")
        return done

    def stop(self) -> None:
        """Kill its processes and remove its directory."""
        self._processes.end()
        # a run that ends stops sandboxes that their own threads stop too
        with self._removing:
            _sweep(_OWNER, self._owner)
            if not self._root.exists():
                return
            remove(self._root)

    def place(self, path: str) -> str:
        """Below the sandbox's own directory."""
        return (self._mounted or str(self._root)) + path

    def _script(self) -> str:
        """Mounts, limits, directory, command; what fails before that is code 125."""
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
        path = (
            *self.spec.path,
            str(Path(sys.executable).parent),
            os.environ.get("PATH", os.defpath),
        )
        return {
            **{name: os.environ[name] for name in _KEPT if name in os.environ},
            "PATH": os.pathsep.join(path),
            "HOME": self.place("/home"),
            "TMPDIR": self.place("/tmp"),
            "LANG": "C.UTF-8",
            "TERM": "dumb",
            "NO_PROXY": "127.0.0.1,localhost",
            MARK: self.spec.name,
            _OWNER: self._owner,
            **more,
        }


def remove(root: Path) -> None:
    """Remove a directory and all in it, whatever the modes that an agent gave it."""
    os.chmod(root, stat.S_IRWXU)
    for folder, names, _ in os.walk(root):
        # a directory that nobody may read or write keeps what is in it
        for name in names:
            place = os.path.join(folder, name)
            if not os.path.islink(place):
                os.chmod(place, stat.S_IRWXU)
    shutil.rmtree(root)


def _sweep(variable: str, value: str) -> None:
    """Kill all processes with a variable in their environment, and see them gone."""
    mark = f"{variable}={value}".encode()
    until = time.monotonic() + _DYING_SECONDS
    while time.monotonic() < until:
        found = False
        for entry in Path("/proc").glob("[0-9]*/environ"):
            # it is gone, or another user's
            with suppress(OSError):
                if mark in entry.read_bytes().split(b"\0"):
                    os.kill(int(entry.parent.name), signal.SIGKILL)
                    found = True
        if not found:
            return
        time.sleep(0.01)


@cache
def _mount_place() -> str | None:
    """Where sandboxes are mounted; None: there are no namespaces to be had."""
    for place in _PLACES:
        with suppress(OSError):
            if not os.listdir(place):
                mount = ("sh", "-c", 'mount --bind /tmp "$1"', "sh", place)
                return place if _works((*_LEASHED, *_NAMESPACES, *mount)) else None
    return None


@cache
def _works(command: tuple[str, ...]) -> bool:
    """Whether a command ends well; a bare leash is given something to hold."""
    if command == _LEASHED:
        command = (*command, "true")
    try:
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


SANDBOX = SandboxKind(LocalSandbox, frozenset({"namespaces"}))

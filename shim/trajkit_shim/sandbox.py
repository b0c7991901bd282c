"""What a rollout needs of the place that an agent works in.

A sandbox runs commands and holds files. Everything else, such as putting files in, is
done with commands, so that a new kind of sandbox needs three methods.
"""

import io
import shlex
import tarfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

# of putting files in and getting them out
_COPY_SECONDS = 600.0

TAIL_BYTES = 1 << 16
"""How much of a command's log its `Done` holds: the last of it."""

MARK = "TRAJKIT_SANDBOX"
"""The variable that every process of a sandbox has in its environment: its name."""

COMMAND_MARK = "TRAJKIT_COMMAND"
"""The variable that all processes of one command have in theirs."""


class SandboxError(Exception):
    """The sandbox failed, not what runs in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the processes of one sandbox may use. ``None``: as much as there is.

    A kind of sandbox that cannot hold a limit refuses it.
    """

    # MiB of memory
    memory_mb: int | None = None
    # processors, as a share of time
    cpus: float | None = None
    # processes and threads at once
    processes: int | None = None
    # MiB that one file may grow to
    file_mb: int | None = None

    def refuse(self, kind: str, *names: str) -> None:
        """Refuse limits that a kind of sandbox cannot hold.

        Raises
        ------
        SandboxError
            One of them is set.
        """
        for name in names:
            value = getattr(self, name)
            if value is not None:
                raise SandboxError(f"{name} = {value}: a {kind} sandbox can't hold it")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """One sandbox to be made.

    Parameters
    ----------
    name : str
        Unique among all that run: letters, digits, ``.``, ``_`` and ``-``.
    scratch : Path
        A directory of this machine where the sandbox may keep its files.
    image : str, optional
        What it is made of, for kinds that need one.
    limits : Limits
    path : tuple of str
        Directories that stand first in ``PATH``, as the sandbox names them.
    gateway : str, optional
        The gateway's URL as the sandbox reaches it. None: the kind of sandbox knows.
    options : mapping of str to str
        What only one kind knows.
    """

    name: str
    scratch: Path
    image: str | None = None
    limits: Limits = field(default_factory=Limits)
    path: tuple[str, ...] = ()
    gateway: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Done:
    """A command that ended.

    Parameters
    ----------
    code : int or None
        Its exit code, negative for a signal; None: it was killed when its time was up.
    stdout, stderr : bytes
        All of it. Of a command with a log, ``stdout`` is the last `TAIL_BYTES` of the
        two together and ``stderr`` is empty.
    """

    code: int | None
    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def last_words(self) -> str:
        """The last line that says something, cut to 300 characters."""
        text = (self.stdout + b"\n" + self.stderr).decode(errors="replace")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[-1][:300] if lines else "it said nothing"

    @property
    def how(self) -> str:
        """How it ended, for a message."""
        if self.code is None:
            return "its time was up"
        return f"exit code {self.code}: {self.last_words}"


class Sandbox(ABC):
    """One place with files and processes of its own.

    Used as a context manager it starts and stops. `stop` may be called by another
    thread than the one whose command runs, and ends that command.

    Parameters
    ----------
    spec : Spec

    Raises
    ------
    SandboxError
        It cannot be made here: a tool is missing, or a limit cannot be held.
    """

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @abstractmethod
    def start(self) -> None:
        """Make it. Commands can be run afterwards.

        Raises
        ------
        SandboxError
        """

    @abstractmethod
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
        """Run one command to its end.

        Parameters
        ----------
        command : sequence of str
            The program and its arguments.
        timeout_s : float
            Seconds after which it is killed, with every process that it started.
        cwd : str, optional
            A directory of the sandbox.
        env : mapping of str to str, optional
            Added to the sandbox's own variables.
        stdin : bytes
        log : Path, optional
            A file of this machine that gets standard output and error together.

        Raises
        ------
        SandboxError
            The sandbox could not run it. That the program is missing is code 127.
        """

    @abstractmethod
    def stop(self) -> None:
        """End all processes and remove everything. Stopping again changes nothing."""

    @abstractmethod
    def place(self, path: str) -> str:
        """Where an absolute path of a task stands in this sandbox."""

    def reach(self, url: str) -> str:
        """The gateway's URL as a process of the sandbox must spell it."""
        return self.spec.gateway or url

    def put(self, archive: bytes, directory: str) -> None:
        """Unpack a tar archive into a directory of the sandbox, made if missing.

        Raises
        ------
        SandboxError
        """
        where = shlex.quote(directory)
        script = f"mkdir -p {where} && tar -xof - -C {where}"
        self._copy(script, archive)

    def get(self, path: str) -> bytes:
        """The content of a file of the sandbox.

        Raises
        ------
        SandboxError
            There is no such file.
        """
        return self._copy(f"cat {shlex.quote(path)}")

    def _copy(self, script: str, stdin: bytes = b"", cwd: str | None = None) -> bytes:
        command = ["sh", "-c", script]
        done = self.exec(command, timeout_s=_COPY_SECONDS, stdin=stdin, cwd=cwd)
        if done.code != 0:
            raise SandboxError(f"{script}: {done.how}")
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


@dataclass(frozen=True, slots=True)
class SandboxKind:
    """A kind of sandbox, as its module names it under ``SANDBOX``."""

    make: Callable[[Spec], Sandbox]
    # of the Spec's options
    options: frozenset[str] = frozenset()

    def __call__(self, spec: Spec) -> Sandbox:
        """A sandbox that has not been started.

        Raises
        ------
        SandboxError
            It cannot be made here, or an option means nothing to it.
        """
        for name in spec.options:
            if name not in self.options:
                known = ", ".join(sorted(self.options)) or "none"
                raise SandboxError(f"option {name!r} is unknown; there are: {known}")
        return self.make(spec)


def pack(files: Mapping[str, bytes]) -> bytes:
    """A tar archive of files by their relative path, owned by nobody in particular."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            # a script says on its first line what runs it
            entry.mode = 0o755 if content.startswith(b"#!") else 0o644
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def sweep_script(variable: str, value: str) -> str:
    """A shell script that kills the processes with that variable in their environment."""
    mark = shlex.quote(f"{variable}={value}")
    return (
        "for each in /proc/[0-9]*; do "
        f"tr '\\0' '\\n' < $each/environ 2> /dev/null | grep -qxF {mark} && "
        "kill -9 ${each#/proc/}; done; true"
    )

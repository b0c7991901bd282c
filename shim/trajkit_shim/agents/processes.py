"""Commands of this machine, each killed together with every process it started."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_LOOK_SECONDS = 0.5
_MAX_OUTPUT = 1 << 30

TAIL_BYTES = 1 << 16
"""Size of the end of a command's log that its `CommandResult` holds."""


class SandboxError(Exception):
    """The sandbox failed, not the program that runs in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A command to run; see `trajkit_shim.agents.sandbox.Sandbox.exec`.

    For `Processes`, ``env`` is its complete environment.
    """

    arguments: tuple[str, ...]
    timeout_s: float
    cwd: str = "/"
    env: Mapping[str, str] = field(default_factory=dict)
    stdin: bytes = b""
    log: Path | None = None
    # called twice a second with the process's id; a text says which limit is exceeded
    excess: Callable[[int], str | None] = lambda _: None
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


class Processes:
    """The running commands of one sandbox, each in a process group of its own."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._ended = False

    def run(self, command: Command) -> CommandResult:
        """Run a command of this machine.

        After `end` nothing is run and the exit code is -9. Raises `SandboxError`: it
        cannot be started, or a limit is exceeded.
        """
        log = command.log
        try:
            with (
                tempfile.TemporaryFile() as given,
                tempfile.TemporaryFile() if log is None else log.open("w+b") as out,
                tempfile.TemporaryFile() as err,
            ):
                given.write(command.stdin)
                given.seek(0)
                files = (given, out, err if log is None else out)
                code = self._run(command, *files)
                length = out.seek(0, os.SEEK_END)
                out.seek(0 if log is None else max(0, length - TAIL_BYTES))
                err.seek(0)
                return CommandResult(code, out.read(), err.read())
        # an argument may be too long, or contain a null character
        except (OSError, ValueError) as error:
            message = f"{command.arguments[0]} cannot be run: {error}"
            raise SandboxError(message) from error

    def _run(
        self, command: Command, given: IO[bytes], out: IO[bytes], err: IO[bytes]
    ) -> int | None:
        """The exit code of a command, or None if its time was up."""
        with self._lock:
            if self._ended:
                return -signal.SIGKILL
            process = subprocess.Popen(
                list(command.arguments),
                stdin=given,
                stdout=out,
                stderr=err,
                env=dict(command.env),
                # its own process group
                start_new_session=True,
                pass_fds=command.pass_fds,
            )
            self._running.add(process.pid)
        try:
            until = time.monotonic() + command.timeout_s
            while (left := until - time.monotonic()) > 0:
                with suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left, _LOOK_SECONDS))
                exceeded = command.excess(process.pid)
                if os.fstat(out.fileno()).st_size > _MAX_OUTPUT:
                    exceeded = f"its output is longer than {_MAX_OUTPUT} bytes"
                if exceeded is not None:
                    raise SandboxError(exceeded)
            return None
        finally:
            # kill what it started and left running
            with self._lock:
                _kill(process.pid)
                self._running.discard(process.pid)
            process.wait()

    def end(self) -> None:
        """Kill all running commands, and start no more."""
        with self._lock:
            self._ended = True
            for pid in self._running:
                _kill(pid)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)

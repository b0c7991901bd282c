"""Commands of this machine, each killed together with every process it started."""

import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress

from trajkit_shim.agents.sandbox import (
    TAIL_BYTES,
    Command,
    CommandResult,
    SandboxError,
)

_LOOK_SECONDS = 0.5
_MAX_OUTPUT = 1 << 30


class Processes:
    """The running commands of one sandbox, each in a process group of its own."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._ended = False

    def run(
        self,
        command: Command,
        env: Mapping[str, str],
        excess: Callable[[int], str | None] = lambda _: None,
        pass_fds: Sequence[int] = (),
    ) -> CommandResult:
        """Run a command of this machine; see `trajkit_shim.agents.sandbox.Sandbox.exec`.

        ``env`` is its complete environment. ``excess``: called twice a second with the
        process's id; a returned text says which limit is exceeded. ``pass_fds``:
        descriptors that it inherits. After `end` nothing is run and the exit code is
        -9. Raises `SandboxError`: it cannot be started, or a limit is exceeded.
        """
        try:
            with ExitStack() as stack:
                return self._run(stack, command, env, excess, pass_fds)
        # an argument may be too long, or contain a null character
        except (OSError, ValueError) as error:
            message = f"{command.arguments[0]} cannot be run: {error}"
            raise SandboxError(message) from error

    def _run(
        self,
        stack: ExitStack,
        command: Command,
        env: Mapping[str, str],
        excess: Callable[[int], str | None],
        pass_fds: Sequence[int],
    ) -> CommandResult:
        given = stack.enter_context(tempfile.TemporaryFile())
        given.write(command.stdin)
        given.seek(0)
        if command.log is None:
            out = stack.enter_context(tempfile.TemporaryFile())
            err = stack.enter_context(tempfile.TemporaryFile())
        else:
            out = err = stack.enter_context(command.log.open("w+b"))
        with self._lock:
            if self._ended:
                return CommandResult(-signal.SIGKILL)
            process = subprocess.Popen(
                list(command.arguments),
                stdin=given,
                stdout=out,
                stderr=err,
                env=dict(env),
                # its own process group
                start_new_session=True,
                pass_fds=pass_fds,
            )
            self._running.add(process.pid)
        try:
            code = _wait(process, command.timeout_s, out.fileno(), excess)
        finally:
            # kill what it started and left running
            with self._lock:
                _kill(process.pid)
                self._running.discard(process.pid)
            process.wait()
        if command.log is not None:
            out.seek(max(0, out.seek(0, os.SEEK_END) - TAIL_BYTES))
            return CommandResult(code, out.read())
        out.seek(0)
        err.seek(0)
        return CommandResult(code, out.read(), err.read())

    def end(self) -> None:
        """Kill all running commands, and start no more."""
        with self._lock:
            self._ended = True
            for pid in self._running:
                _kill(pid)


def _wait(
    process: subprocess.Popen[bytes],
    timeout_s: float,
    output: int,
    excess: Callable[[int], str | None],
) -> int | None:
    """The exit code of a process, or None if it runs longer than ``timeout_s``."""
    until = time.monotonic() + timeout_s
    while (left := until - time.monotonic()) > 0:
        try:
            return process.wait(min(left, _LOOK_SECONDS))
        except subprocess.TimeoutExpired:
            exceeded = excess(process.pid)
            if os.fstat(output).st_size > _MAX_OUTPUT:
                exceeded = f"its output is longer than {_MAX_OUTPUT} bytes"
            if exceeded is not None:
                raise SandboxError(exceeded) from None
    return None


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)

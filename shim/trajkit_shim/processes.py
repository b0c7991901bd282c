"""One command of this machine, run to its end or killed with all that it started."""

import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from trajkit_shim.sandbox import TAIL_BYTES, Done


class Processes:
    """The commands that run for one sandbox, each in a process group of its own."""

    def __init__(self) -> None:
        self._running: set[int] = set()
        self._lock = threading.Lock()
        self._ended = False

    def run(
        self,
        command: Sequence[str],
        *,
        timeout_s: float,
        env: Mapping[str, str],
        stdin: bytes = b"",
        log: Path | None = None,
    ) -> Done:
        """Run a command; see `trajkit_shim.sandbox.Sandbox.exec`.

        After `end` it runs nothing more and gives the code -9.

        Raises
        ------
        OSError
            The program cannot be started.
        """
        with ExitStack() as stack:
            given = stack.enter_context(tempfile.TemporaryFile())
            given.write(stdin)
            given.seek(0)
            if log is None:
                out = stack.enter_context(tempfile.TemporaryFile())
                err = stack.enter_context(tempfile.TemporaryFile())
            else:
                out = err = stack.enter_context(log.open("w+b"))
            with self._lock:
                if self._ended:
                    return Done(-signal.SIGKILL)
                process = subprocess.Popen(
                    list(command),
                    stdin=given,
                    stdout=out,
                    stderr=err,
                    env=dict(env),
                    # its own process group
                    start_new_session=True,
                )
                self._running.add(process.pid)
            code: int | None
            try:
                code = process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                # what it started and left behind dies with it
                with self._lock:
                    _kill(process.pid)
                    self._running.discard(process.pid)
                process.wait()
            if log is not None:
                out.seek(max(0, out.seek(0, os.SEEK_END) - TAIL_BYTES))
                return Done(code, out.read())
            out.seek(0)
            err.seek(0)
            return Done(code, out.read(), err.read())

    def end(self) -> None:
        """Kill what runs, and run nothing more."""
        with self._lock:
            self._ended = True
            for pid in self._running:
                _kill(pid)


def _kill(group: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)

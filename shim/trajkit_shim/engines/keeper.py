"""A process between the gateway and the server that the gateway launched.

It starts the server, restarts it if it ends, and ends it with every process that it
started when standard input ends, which happens however the gateway ends. `engines.launch`
runs this file with the standard library only. Standard output gets one line for each
event: `HEALTHY`, or why a server was lost. Everything that the server writes goes to
standard error.

Linux only: orphaned processes of the server become children of this one
(PR_SET_CHILD_SUBREAPER of prctl(2)), so that it can end them too. A SIGKILL of this
process itself leaves the server running.
"""

import ctypes
import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path

HEALTHY = "healthy"
_SUBREAPER = 36
_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.1
_WINDOW_SECONDS = 3600.0
# as a shell reports it
_TERMINATED = 128 + signal.SIGTERM


def keep(
    command: Sequence[str],
    *,
    port: int,
    start_seconds: float,
    stop_seconds: float,
    restarts: int,
) -> None:
    """Run a server until standard input ends, or it cannot be restarted.

    For the parameters see `engines.launch.running_server`. A server that ends before the
    first one was healthy is not restarted.
    """
    ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
    # a signal has its effect in `_terminable` alone, or a server would be left
    _mask(signal.SIG_BLOCK)
    signal.signal(signal.SIGTERM, _terminate)
    lost: list[float] = []
    healthy = False
    while True:
        if _taken(port):
            return _tell(f"cannot start: another process listens on its port {port}")
        try:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=2,
                start_new_session=True,
                preexec_fn=lambda: _mask(signal.SIG_UNBLOCK),
            )
        except OSError as error:
            return _tell(f"cannot start: {error}")
        try:
            with _terminable():
                became_healthy, reason = _watch(server, port, start_seconds)
        finally:
            _end(server, stop_seconds)
        if reason is None:
            return None
        healthy = healthy or became_healthy
        now = time.monotonic()
        lost = [when for when in lost if now - when < _WINDOW_SECONDS] + [now]
        if not healthy:
            return _tell(f"{reason} before it was healthy")
        if len(lost) > restarts:
            return _tell(f"{reason}, and was restarted {restarts} times within an hour")
        _tell(f"{reason}: restart {len(lost)} of {restarts} within an hour")


def _watch(
    server: subprocess.Popen[bytes], port: int, seconds: float
) -> tuple[bool, str | None]:
    """Return whether a server became healthy, and why it was lost.

    None: standard input ended.
    """
    healthy, until = False, time.monotonic() + seconds
    with open(os.pidfd_open(server.pid), "rb") as ended:
        while True:
            wait = None if healthy else _LOOK_SECONDS
            ready = select.select([0, ended.fileno()], [], [], wait)[0]
            if 0 in ready:
                return healthy, None
            if ready:
                return healthy, f"ended with exit code {server.wait()}"
            if not healthy and _is_healthy(port):
                healthy = True
                _tell(HEALTHY)
            elif not healthy and time.monotonic() > until:
                return healthy, f"did not answer within {seconds:g} seconds"


def _taken(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((_HOST, port)) == 0


def _is_healthy(port: int) -> bool:
    # the server samples a token before it answers
    client = http.client.HTTPConnection(_HOST, port, timeout=10)
    with closing(client), suppress(OSError, http.client.HTTPException):
        client.request("GET", "/health")
        return client.getresponse().status == http.HTTPStatus.OK
    return False


def _end(server: subprocess.Popen[bytes], seconds: float) -> None:
    """End a server and all processes that it started."""
    server.terminate()
    with suppress(subprocess.TimeoutExpired):
        server.wait(seconds)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    # the children of one that ends are in the next list
    while pids := children.read_text().split():
        for pid in pids:
            os.kill(int(pid), signal.SIGKILL)
        os.waitpid(-1, 0)


def _mask(how: int) -> None:
    signal.pthread_sigmask(how, [signal.SIGTERM])


@contextmanager
def _terminable() -> Iterator[None]:
    """Within, SIGTERM ends this process."""
    try:
        _mask(signal.SIG_UNBLOCK)
        yield
    finally:
        _mask(signal.SIG_BLOCK)


def _terminate(number: int, frame: object) -> None:
    # or the next signal would interrupt what this one causes
    _mask(signal.SIG_BLOCK)
    sys.exit(_TERMINATED)


def _tell(line: str) -> None:
    # a gateway that was killed does not read it
    with suppress(BrokenPipeError):
        os.write(1, f"{line}\n".encode())


if __name__ == "__main__":
    keep(sys.argv[2:], **json.loads(sys.argv[1]))

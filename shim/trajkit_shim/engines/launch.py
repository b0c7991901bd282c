"""Starts an SGLang server for the gateway, restarts it, and ends it with the gateway."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

import httpx

_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.1
_WINDOW_SECONDS = 3600.0
_TAIL_LINES = 20
# how long the server may take to end after SIGTERM
_STOP_SECONDS = 10.0

# arguments of SGLang 0.5.23 that contradict the gateway, and why
_CHOSEN = "trajkit chooses it"
_REFUSED = {
    "--model-path": "it is the value of --launch",
    "--host": _CHOSEN,
    "--port": _CHOSEN,
    "--config": "give the arguments that it contains",
    "--skip-tokenizer-init": "stop strings and grammars need the server's tokenizer",
    "--api-key": "the gateway sends no key, and the server listens on this machine only",
    "--admin-api-key": "the gateway sends no key",
    "--ssl-keyfile": "the gateway uses plain HTTP",
    "--ssl-certfile": "the gateway uses plain HTTP",
    "--grpc-mode": "the gateway uses HTTP",
    "--smg-grpc-mode": "the gateway uses HTTP",
    "--is-embedding": "the server must sample tokens",
    "--encoder-only": "the server must sample tokens",
    "--allow-auto-truncate": "a prompt must reach the model complete",
}
# logprobs are those of the distribution that was sampled from
_ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}


def check_arguments(arguments: Sequence[str]) -> None:
    """Raise `ValueError` for a server argument that contradicts the gateway."""
    for argument in arguments:
        # the server's parser also accepts the beginning of an option's name
        name = argument.partition("=")[0].replace("_", "-")
        for refused, why in _REFUSED.items():
            if len(name) > 2 and refused.startswith(name):
                raise ValueError(f"{argument} ({refused}) is refused: {why}")


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that only a process that names it can listen on."""
    with socket.socket() as reserved:
        # with this option on both sides a server can bind it while nobody listens
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((_HOST, 0))
        yield reserved.getsockname()[1]


@contextmanager
def running_server(
    python: str,
    model: str,
    arguments: Sequence[str],
    log: Path,
    *,
    start_seconds: float = 1800.0,
    restarts: int = 3,
) -> Iterator[str]:
    """Run an SGLang server while the ``with`` block runs; yield its URL once it is healthy.

    It is healthy when ``GET /health`` answers 200, which may take ``start_seconds``. A
    server that ends is restarted, ``restarts`` times within one hour. After that this
    process gets SIGTERM, and `ConnectionError` is raised when the block ends, as it is if
    the server did not become healthy. The end of its ``log`` is then written to standard
    error. If this process is killed, the kernel kills the server, and SGLang's own
    processes end with it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with reserved_port() as port, log.open("ab") as output:
        begin = output.tell()
        command = [
            # the kernel kills the server when the thread that started it ends
            *("setpriv", "--pdeathsig", "KILL", "--"),
            *(python, "-m", "sglang.launch_server", "--model-path", model),
            *("--host", _HOST, "--port", str(port)),
            *arguments,
        ]
        server = _Server(command, f"http://{_HOST}:{port}", output, start_seconds)
        watching = threading.Thread(
            target=server.keep, args=(restarts,), name="trajkit-engine"
        )
        watching.start()
        try:
            server.decided.wait()
            if server.lost is None:
                yield server.url
        except KeyboardInterrupt:
            # the signal that `_Server.keep` sent
            if server.lost is None:
                raise
        finally:
            server.stop.set()
            watching.join()
    if server.lost is not None:
        with log.open("rb") as lines:
            lines.seek(begin)
            _report(b"".join(deque(lines, _TAIL_LINES)).decode("utf-8", "replace"))
        raise ConnectionError(
            f"the engine's server {server.lost}. The end of its log, {log}, is above"
        )


@dataclass
class _Server:
    """A server that is restarted if it ends."""

    command: Sequence[str]
    url: str
    log: IO[bytes]
    start_seconds: float
    lost: str | None = None  # why it was given up
    # set once it is healthy, or given up
    decided: threading.Event = field(default_factory=threading.Event)
    stop: threading.Event = field(default_factory=threading.Event)

    def keep(self, restarts: int) -> None:
        """Run the server until `stop` is set, or it cannot be restarted."""
        ends: list[float] = []
        try:
            while self.lost is None and (reason := self._run()) is not None:
                now = time.monotonic()
                ends = [end for end in ends if now - end < _WINDOW_SECONDS] + [now]
                if not self.decided.is_set():
                    self.lost = f"was never healthy: it {reason}"
                elif len(ends) > restarts:
                    times = f"{restarts} times within an hour"
                    self.lost = f"{reason}, and was restarted {times}"
                else:
                    restart = f"restart {len(ends)} of {restarts} within an hour"
                    _report(f"trajkit: the engine's server {reason}: {restart}")
        except Exception as error:
            # such as a process that the system cannot start
            self.lost = f"failed: {error}"
        finally:
            if self.lost is not None and self.decided.is_set():
                os.kill(os.getpid(), signal.SIGTERM)
            self.decided.set()

    def _run(self) -> str | None:
        """Run the server once; return why it was lost, or None after `stop`."""
        process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
            env=os.environ | _ENVIRONMENT,
            # signals to the gateway's process group are not for the server
            start_new_session=True,
        )
        until = time.monotonic() + self.start_seconds
        ready = False
        try:
            while not self.stop.wait(_LOOK_SECONDS):
                if process.poll() is not None:
                    return f"ended with exit code {process.returncode}"
                if not ready and self._is_healthy():
                    ready = True
                    self.decided.set()
                elif not ready and time.monotonic() > until:
                    return f"did not answer within {self.start_seconds:g} seconds"
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return None

    def _is_healthy(self) -> bool:
        with suppress(httpx.HTTPError):
            # the server samples a token before it answers
            url = f"{self.url}/health"
            return httpx.get(url, timeout=10, trust_env=False, verify=False).is_success
        return False


def _report(text: str) -> None:
    """Write lines to standard error, even if its reader is gone."""
    with suppress(OSError):
        sys.stderr.write(text.rstrip("\n") + "\n")

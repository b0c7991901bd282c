"""Starts an SGLang server for the gateway, restarts it, and ends it with the gateway."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trajkit_shim.engines import keeper

START_SECONDS = 1800.0
"""Default of how long a server may take to load its model."""

RESTARTS = 3
"""Default of how often a server is restarted within one hour."""

_TAIL_BYTES = 4 << 10
_TAIL_LINES = 20

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
    """Raise `ValueError` for a server argument that contradicts the gateway.

    The server's parser also accepts the beginning of an option's name.
    """
    for argument in arguments:
        name = argument.partition("=")[0].replace("_", "-")
        for refused, why in _REFUSED.items():
            if len(name) > 2 and refused.startswith(name):
                raise ValueError(f"{argument} ({refused}) is refused: {why}")


def sglang_command(
    python: str, model: str, port: int, arguments: Sequence[str]
) -> list[str]:
    """Return the command of an SGLang server on 127.0.0.1."""
    return [
        *(python, "-m", "sglang.launch_server", "--model-path", model),
        *("--host", "127.0.0.1", "--port", str(port)),
        # otherwise each event of a stream repeats the reply
        "--incremental-streaming-output",
        *arguments,
    ]


@contextmanager
def reserved_port() -> Iterator[int]:
    """Yield a port of 127.0.0.1 that only a process that names it can listen on."""
    with socket.socket() as reserved:
        # with this option on both sides a server can bind it while nobody listens
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


@contextmanager
def running_server(
    command: Sequence[str],
    port: int,
    log: Path,
    *,
    start_seconds: float = START_SECONDS,
    stop_seconds: float = 10.0,
    restarts: int = RESTARTS,
) -> Iterator[None]:
    """Run a server while the ``with`` block runs; enter the block once it is healthy.

    A server that ends is restarted. If there are no restarts left, this process gets
    SIGTERM, and the error is raised when the block ends. If this process is killed, the
    server ends too.

    Parameters
    ----------
    command
        Starts the server.
    port : int
        Of 127.0.0.1, on which ``GET /health`` answers 200 once the server is ready.
    log : path
        Everything that the server writes is appended to this file.
    start_seconds, stop_seconds : float
        How long the server may take to become healthy, and to end after SIGTERM.
    restarts : int
        Number of restarts within one hour.

    Raises
    ------
    ConnectionError
        The server did not become healthy, or ended too often. The end of its log was
        written to standard error.
    """
    options = {
        "port": port,
        "start_seconds": start_seconds,
        "stop_seconds": stop_seconds,
        "restarts": restarts,
    }
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        begin = output.tell()
        process = subprocess.Popen(
            # isolated: its working directory and environment are the server's
            [sys.executable, "-IS", keeper.__file__, json.dumps(options), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            env=os.environ | _ENVIRONMENT,
            text=True,
            # the keys of a terminal are for the gateway
            start_new_session=True,
        )
    assert process.stdin is not None
    assert process.stdout is not None
    events = process.stdout
    lost: list[str] = []
    ending = threading.Event()

    def watch() -> None:
        event = ""
        for event in map(str.rstrip, events):
            if event != keeper.HEALTHY:
                sys.stderr.write(f"trajkit: the engine's server {event}\n")
        if not ending.is_set():
            lost.append(event)
            os.kill(os.getpid(), signal.SIGTERM)

    watching = threading.Thread(target=watch, name="trajkit-engine", daemon=True)
    with process:
        try:
            event = events.readline().rstrip()
            if event == keeper.HEALTHY:
                watching.start()
                yield
            else:
                lost.append(event)
        except KeyboardInterrupt:
            # the signal that `watch` sent
            if not lost:
                raise
        finally:
            ending.set()
            process.stdin.close()
            if watching.ident is not None:
                watching.join()
    if lost:
        sys.stderr.write(_tail(log, begin))
        reason, code = lost[0], process.returncode
        if code:
            reason = f"lost the process that keeps it, with exit code {code}"
        raise ConnectionError(
            f"the engine's server {reason}. The end of its log, {log}, is above"
        )


def _tail(log: Path, begin: int) -> str:
    """The last lines of a log, of those from ``begin`` on."""
    with log.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(begin, size - _TAIL_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()
    return "".join(f"{line}\n" for line in lines[-_TAIL_LINES:])

"""Starts an SGLang server for the gateway, and ends it with the gateway."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

_HOST = "127.0.0.1"
_LOOK_SECONDS = 0.1
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
) -> Iterator[str]:
    """Run an SGLang server while the ``with`` block runs, as `running_program`."""
    command = [python, "-m", "sglang.launch_server", "--model-path", model]
    # logprobs are those of the distribution that was sampled from
    variables = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}
    with running_program(
        [*command, *arguments], log, variables, start_seconds=start_seconds
    ) as url:
        yield url


@contextmanager
def running_program(
    command: Sequence[str],
    log: Path,
    variables: Mapping[str, str],
    *,
    start_seconds: float = 1800.0,
) -> Iterator[str]:
    """Run an engine's server while the ``with`` block runs; yield its URL once healthy.

    It is healthy when ``GET /health`` answers 200, which may take ``start_seconds``. If it
    ends later, this process gets SIGTERM. In both cases the end of its ``log`` is written
    to standard error, and `ConnectionError` is raised, when the block has ended. If this
    process is killed, the kernel kills the server.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with reserved_port() as port, log.open("ab") as output:
        begin, url = output.tell(), f"http://{_HOST}:{port}"
        try:
            process = subprocess.Popen(
                [
                    # the kernel kills the server when the thread that started it ends
                    *("setpriv", "--pdeathsig", "KILL", "--", *command),
                    *("--host", _HOST, "--port", str(port)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | variables,
                # signals to the gateway's process group are not for the server
                start_new_session=True,
            )
        except OSError as error:
            raise ConnectionError(f"the engine's server failed: {error}") from error
        stopping = threading.Event()
        watching = threading.Thread(
            target=_interrupt_at_end, args=(process, stopping), name="trajkit-engine"
        )
        lost = None
        try:
            lost = _not_healthy(process, url, time.monotonic() + start_seconds)
            if lost is None:
                watching.start()
                yield url
                if process.poll() is not None:
                    lost = f"ended with exit code {process.returncode}"
        except KeyboardInterrupt:
            # of `_interrupt_at_end`, if the server has ended
            if process.poll() is None:
                raise
            lost = f"ended with exit code {process.returncode}"
        finally:
            stopping.set()
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_SECONDS)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if lost is not None:
        with log.open("rb") as lines:
            lines.seek(begin)
            text = b"".join(deque(lines, _TAIL_LINES)).decode("utf-8", "replace")
        with suppress(OSError):
            # its reader may be gone
            sys.stderr.write(text.rstrip("\n") + "\n")
        message = f"the engine's server {lost}. The end of its log, {log}, is above"
        raise ConnectionError(message)


def _not_healthy(
    process: "subprocess.Popen[bytes]", url: str, until: float
) -> str | None:
    """Wait until the server is healthy; return why it never was."""
    while process.poll() is None:
        with suppress(httpx.HTTPError):
            # the server samples a token before it answers
            asked = httpx.get(
                f"{url}/health", timeout=10, trust_env=False, verify=False
            )
            if asked.is_success:
                return None
        if time.monotonic() > until:
            return "was never healthy: it did not answer in time"
        time.sleep(_LOOK_SECONDS)
    return f"was never healthy: it ended with exit code {process.returncode}"


def _interrupt_at_end(
    process: "subprocess.Popen[bytes]", stopping: threading.Event
) -> None:
    """Send this process a SIGTERM if the server ends before it is stopped."""
    process.wait()
    if not stopping.is_set():
        os.kill(os.getpid(), signal.SIGTERM)

"""Starts an engine's server for the gateway, and ends it with the gateway."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from trajkit_shim.serve import plain

# how long the server may take to end after SIGTERM
_STOP_SECONDS = 10.0


def sglang_server(
    python: str, model: str, arguments: Sequence[str]
) -> tuple[list[str], dict[str, str]]:
    """Return the command of an SGLang server, and its variables."""
    command = [python, "-m", "sglang.launch_server", *arguments, "--model-path", model]
    # logprobs are those of the distribution that was sampled from
    return command, {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}


@contextmanager
def running_server(
    command: Sequence[str],
    variables: Mapping[str, str],
    log: Path,
    *,
    start_seconds: float = 1800.0,
) -> Iterator[str]:
    """Run an engine's server while the ``with`` block runs; yield its URL once healthy.

    It is healthy when ``GET /health`` answers 200, which may take ``start_seconds``, else
    the end of its ``log`` is written to standard error, and `ConnectionError` is raised.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        begin = output.tell()
        try:
            process = subprocess.Popen(
                [*command, "--host", "127.0.0.1", "--port", str(port)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=os.environ | variables,
                # signals to the gateway's process group are not for the server
                start_new_session=True,
            )
        except OSError as error:
            raise ConnectionError(f"the engine's server failed: {error}") from error
    try:
        until = time.monotonic() + start_seconds
        while not _is_healthy(url):
            why = "it did not answer in time" if time.monotonic() > until else None
            if process.poll() is not None:
                why = f"it ended with exit code {process.returncode}"
            if why is not None:
                lines = log.read_bytes()[begin:].decode("utf-8", "replace").splitlines()
                sys.stderr.write(plain("\n".join(lines[-20:])) + "\n")
                where = f"The end of its log, {log}, is above"
                message = f"the engine's server was never healthy: {why}. {where}"
                raise ConnectionError(message)
            time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
        # what it has started too
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_healthy(url: str) -> bool:
    with suppress(httpx.HTTPError):
        # the server samples a token before it answers
        return httpx.get(f"{url}/health", timeout=10, trust_env=False).is_success
    return False

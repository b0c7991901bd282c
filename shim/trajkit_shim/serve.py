"""Runs the gateway on a socket, in the foreground or on a thread."""

import ipaddress
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp


def serve(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    on_listening: Callable[[str], None] | None = None,
    drain_seconds: int | None = None,
) -> None:
    """Run the app until SIGINT or SIGTERM, then answer the running calls.

    Parameters
    ----------
    app : ASGI app
        From `trajkit_shim.app.create_app`.
    host, port
        Address to listen on. Port 0: any free one.
    on_listening : callable, optional
        Called with the base URL once connections are accepted.
    drain_seconds : int, optional
        How long running calls may take after the signal, before they are cancelled.
        Default: no limit.

    Raises
    ------
    OSError
        The address is not available.
    """
    listener, url = _listen(host, port)
    with listener:
        if on_listening is not None:
            on_listening(url)
        _server(app, drain_seconds).run(sockets=[listener])


@contextmanager
def running(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    drain_seconds: int | None = None,
) -> Iterator[str]:
    """Run the app on a thread while the ``with`` block runs; see `serve`.

    At the end of the block the running calls are answered.

    Yields
    ------
    str
        The base URL: ``http://127.0.0.1:40123``. OpenAI clients need ``/v1`` after it.

    Raises
    ------
    OSError
        The address is not available.
    """
    listener, url = _listen(host, port)
    server = _server(app, drain_seconds)
    thread = threading.Thread(
        target=server.run, args=([listener],), name="trajkit-gateway", daemon=True
    )
    with listener:
        thread.start()
        try:
            # connections before the loop runs wait in the listener's backlog
            yield url
        finally:
            server.should_exit = True
            thread.join()


def _listen(host: str, port: int) -> tuple[socket.socket, str]:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=512)
    name = f"[{host}]" if ":" in host else host
    return listener, f"http://{name}:{listener.getsockname()[1]}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    # a name may resolve to any address
    except ValueError:
        return False


def _server(app: ASGIApp, drain_seconds: int | None = None) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        log_level="warning",
        # its lines would contain the key that Gemini clients put in the URL
        access_log=False,
        lifespan="on",
        ws="none",
        # an agent's tools may run for minutes between two calls, and a call that arrives
        # while its connection is being closed is lost
        timeout_keep_alive=600,
        timeout_graceful_shutdown=drain_seconds,
    )
    return uvicorn.Server(config)

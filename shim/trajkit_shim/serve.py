"""Running the gateway on a socket: in the foreground, or beside the caller's work."""

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
    """Run the app until the process is told to stop (SIGINT, SIGTERM).

    Calls under way are answered first.

    Parameters
    ----------
    app : ASGI app
        From `trajkit_shim.app.create_app`.
    host, port
        Where to listen. Port 0: any free one.
    on_listening : callable, optional
        Called with the base URL once connections are taken.
    drain_seconds : int, optional
        How long calls under way may take once it is told to stop; then they are
        cancelled. None: as long as they want.

    Raises
    ------
    OSError
        The address cannot be listened on.
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
    """Run the app on a thread of its own while the ``with`` block runs.

    Leaving the block answers the calls under way, then stops. ``drain_seconds`` is as
    for `serve`.

    Yields
    ------
    str
        The base URL: ``http://127.0.0.1:40123``. OpenAI clients want ``/v1`` behind it.

    Raises
    ------
    OSError
        The address cannot be listened on.
    """
    listener, url = _listen(host, port)
    server = _server(app, drain_seconds)
    thread = threading.Thread(
        target=server.run, args=([listener],), name="trajkit-gateway", daemon=True
    )
    with listener:
        thread.start()
        try:
            # connections that come before the loop runs wait in the listener's backlog
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
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    # a name may stand for any address
    except ValueError:
        return False


def _server(app: ASGIApp, drain_seconds: int | None = None) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        log_level="warning",
        # a line of it would show the key that Gemini's clients put in the URL
        access_log=False,
        lifespan="on",
        ws="none",
        # an agent's tools run for minutes between two calls, and a call that comes while
        # its connection is being closed is lost
        timeout_keep_alive=600,
        timeout_graceful_shutdown=drain_seconds,
    )
    return uvicorn.Server(config)

"""Runs the gateway on a socket, in the foreground or on a thread."""

import asyncio
import gc
import ipaddress
import math
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import h11
import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

DRAIN_SECONDS = 30.0
"""Default of how long running calls may take after a stop signal."""

_CLOSING_SECONDS = 15

# more would slow programs down that look at every file they may have
_FILES = 1 << 16

REQUEST_SECONDS = 120.0
"""How long a request may take to arrive with its body, on a connection that is open."""


def serve(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    on_listening: Callable[[str], None] | None = None,
    drain_seconds: float = DRAIN_SECONDS,
) -> None:
    """Run the app until SIGINT or SIGTERM, then answer the running calls.

    Port 0: any free one. ``on_listening`` is called with the base URL. After
    ``drain_seconds``, or a second signal, the calls are ended, and their clients get the
    error of a closed session. Raises `OSError` if the address is not available.
    """
    listener, url = _listen(host, port)
    # a collection that looks at all that was imported would stop every call
    gc.collect()
    gc.freeze()
    with listener:
        if on_listening is not None:
            on_listening(url)
        _server(app, drain_seconds).run(sockets=[listener])


@contextmanager
def running(
    app: ASGIApp,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Iterator[str]:
    """Run the app on a thread while the ``with`` block runs, and yield its base URL.

    At the end of the block the running calls are answered, however long they take. Raises
    `OSError` if the address is not available.
    """
    listener, url = _listen(host, port)
    server = _server(app)
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
    _allow_files()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    plain = socket.create_server((host, port), family=family, backlog=512)
    # asyncio sends small parts without delay only if the protocol is given
    kind = family, socket.SOCK_STREAM, socket.IPPROTO_TCP
    listener = socket.socket(*kind, fileno=plain.detach())
    name = f"[{host}]" if ":" in host else host
    return listener, f"http://{name}:{listener.getsockname()[1]}"


def _allow_files() -> None:
    """Raise the soft limit of open files, often 1,024: each connection is one."""
    unlimited = resource.RLIM_INFINITY
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == unlimited else min(hard, _FILES)
    if soft != unlimited and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    # a name may resolve to any address
    except ValueError:
        return False


class _Protocol(H11Protocol):
    """Closes a connection whose request does not arrive in time."""

    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look(begun=True)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look(begun=bool(self.conn.trailing_data[0]))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look(begun=bool(self.conn.trailing_data[0]))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._late is not None:
            self._late.cancel()
        super().connection_lost(exc)

    def _look(self, *, begun: bool) -> None:
        """Start or stop waiting for the rest of a request, whose head has begun or not."""
        state = self.conn.their_state
        waits = state is h11.SEND_BODY or (begun and state is h11.IDLE)
        if self._late is not None and not waits:
            self._late.cancel()
            self._late = None
        elif self._late is None and waits:
            close = self.transport.close
            self._late = self.loop.call_later(REQUEST_SECONDS, close)


class _Server(uvicorn.Server):
    """Has the app end its calls after a while, rather than cancel their requests."""

    def __init__(self, config: uvicorn.Config, drain_seconds: float | None) -> None:
        super().__init__(config)
        self._drain_seconds = drain_seconds
        self._draining: set[asyncio.Task[None]] = set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        again = self.should_exit
        super().handle_exit(sig, frame)
        # a third one ends the process without the app's own end
        self.force_exit = len(self._captured_signals) > 2
        if again:
            self._loop.call_soon_threadsafe(self._drain, 0.0)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._drain_seconds is not None:
            self._drain(self._drain_seconds)
        await super().shutdown(sockets)

    def _drain(self, seconds: float) -> None:
        self._draining.add(
            self._loop.create_task(self.lifespan.state["drain"](seconds))
        )


def _server(app: ASGIApp, drain_seconds: float | None = None) -> uvicorn.Server:
    config = uvicorn.Config(
        app,
        http=_Protocol,
        log_level="warning",
        # its lines would contain the key that Gemini clients put in the URL
        access_log=False,
        lifespan="on",
        ws="none",
        # an agent's tools may run for minutes between two calls, and a call that arrives
        # while its connection is being closed is lost
        timeout_keep_alive=600,
        # for connections that outlast their calls
        timeout_graceful_shutdown=None
        if drain_seconds is None
        else math.ceil(drain_seconds) + _CLOSING_SECONDS,
    )
    return _Server(config, drain_seconds)

"""Runs the gateway on a socket, in the foreground or on a thread."""

import asyncio
import gc
import ipaddress
import logging
import math
import re
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

# more open files would slow programs down that look at every file they may have
_FILES = 1 << 16

REQUEST_SECONDS = 120.0
"""How long a request may take to arrive with its body, on a connection that is open."""


def serve(app: ASGIApp, listener: socket.socket, drain_seconds: float = 30.0) -> None:
    """Run the app until SIGINT or SIGTERM, then answer the running calls.

    ``listener``: from `listen`; it is closed. After ``drain_seconds``, or a second signal,
    the calls are ended, and their clients get the error of a closed session.
    """
    spare_collections()
    with listener:
        Server(app, drain_seconds).run(sockets=[listener])


def spare_collections() -> None:
    """Have the garbage collector look at less, and less often.

    A collection that looks at all that was imported would stop every call, and a long
    request has thousands of objects, none of them garbage yet.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)


@contextmanager
def running(app: ASGIApp, listener: socket.socket | None = None) -> Iterator[str]:
    """Run the app on a thread while the ``with`` block runs, and yield its base URL.

    At the end of the block the running calls are answered, however long they take.
    ``listener``: from `listen` (default: any free port of this machine).
    """
    with listener or listen("127.0.0.1", 0) as bound:
        server = Server(app)
        thread = threading.Thread(
            target=server.run, args=([bound],), name="trajkit-gateway", daemon=True
        )
        thread.start()
        try:
            # connections before the loop runs wait in the listener's backlog
            yield url_of(bound)
        finally:
            server.should_exit = True
            thread.join()


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address; port 0: any free one."""
    # Raise the soft limit of open files, often 1,024: each connection is one.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    # macOS allows less than it says
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=512)
    # connections inherit it, and send small parts without delay
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
    return listener


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    # another name may resolve to any address
    return host == "localhost"


# what a request may have beside its body
_MAX_HEAD = 1 << 18
# in the head that data begin with, the offer of another protocol
_OFFER = re.compile(rb"\A((?:.+\r\n)+?)upgrade:.*\r\n", re.IGNORECASE)
# how soon after a request the end of its client's sending side belongs to it
_WITH_REQUEST_SECONDS = 0.05
# a host that is gone is noticed within 30 seconds; not every system has every option
_PROBES = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_PROBES |= {"TCP_USER_TIMEOUT": 30_000}


def keep_alive(connection: socket.socket) -> None:
    """Have the system probe a connection, also while nothing is sent on it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _PROBES.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class _Connection(HttpToolsProtocol):
    """A connection that is closed if its request does not arrive in time, or is too long.

    uvicorn names the callbacks as `httptools.HttpRequestParser` does.
    """

    _late: asyncio.TimerHandle | None = None
    _received_at = 0.0
    # bytes that may still come: heads and trailers are kept until they are complete
    _room = _MAX_HEAD
    # no request will follow the one that is being answered
    _half_closed = False

    def connection_made(  # type: ignore[override]
        self, transport: asyncio.Transport
    ) -> None:
        super().connection_made(transport)
        self._wait(True)

    def data_received(self, data: bytes) -> None:
        self._received_at = self.loop.time()
        if self._room == _MAX_HEAD:
            # a client that would rather speak HTTP/2 has a body for this protocol, too,
            # which the parser does not read
            data = _OFFER.sub(rb"\1", data)
        self._room -= len(data)
        super().data_received(data)
        if self._room < 0 and not self.transport.is_closing():
            self.send_400_response("The head is too long.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._wait(True)

    def on_body(self, body: bytes) -> None:
        # also for the lengths of chunks; the app bounds bodies
        self._room += 2 * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._room = _MAX_HEAD
        super().on_message_complete()
        self._wait(False)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._half_closed:
            self.transport.close()

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Answer a client that ends its sending side with its request.

        One that does so later has left. Both look the same, so a client that is killed
        right after its request is noticed by the probes of the connection.
        """
        late = self.loop.time() - self._received_at > _WITH_REQUEST_SECONDS
        if late or self.cycle is None or self.cycle.response_complete:
            return None
        self._half_closed = True
        if connection := self.transport.get_extra_info("socket"):
            keep_alive(connection)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait(False)
        super().connection_lost(exc)

    def _wait(self, waits: bool) -> None:
        if self._late is not None and not waits:
            self._late.cancel()
            self._late = None
        elif self._late is None and waits:
            close = self.transport.close
            self._late = self.loop.call_later(REQUEST_SECONDS, close)


# characters that a terminal obeys
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """Return a text with control characters spelled out, but for tabs and line breaks."""
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], text)


class PlainFormatter(logging.Formatter):
    """Writes no control characters: what clients sent may be in a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line as plain text."""
        return plain(super().format(record))


class Server(uvicorn.Server):
    """Has the app end its calls after a while, rather than cancel their requests."""

    def __init__(self, app: ASGIApp, drain_seconds: float | None = None) -> None:
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # for connections that outlast their calls
        closing = None if drain_seconds is None else math.ceil(drain_seconds) + 15
        logger, handler = logging.getLogger("uvicorn"), logging.StreamHandler()
        handler.setFormatter(PlainFormatter())
        logger.handlers, logger.propagate = [handler], False
        config = uvicorn.Config(
            app,
            http=_Connection,
            # the same where uvloop is installed, as engines install it
            loop="asyncio",
            log_config=None,
            # a line for each request that is refused would fill a disk
            log_level="error",
            # its lines would contain the key that Gemini clients put in the URL
            access_log=False,
            lifespan="on",
            ws="none",
            # more get 503 at once; a call may need another connection at the engine, and
            # some files are no connections
            limit_concurrency=max(16, (files - 64) // 2),
            # an agent's tools may run for minutes between two calls, and a call that
            # arrives while its connection is being closed is lost
            timeout_keep_alive=600,
            timeout_graceful_shutdown=closing,
        )
        super().__init__(config)
        self._drain_seconds = drain_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            self._drain(0.0)
        super().handle_exit(sig, frame)
        # otherwise a second interrupt would leave out the app's own end
        self.force_exit = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._drain_seconds is not None:
            self._drain(self._drain_seconds)
        await super().shutdown(sockets)

    def _drain(self, seconds: float) -> None:
        drain = self.lifespan.state["drain"](seconds)
        # wakes the loop also for a signal
        asyncio.run_coroutine_threadsafe(drain, asyncio.get_running_loop())

"""The delivery of a reply: to whom it is sent, and whether it arrived.

A turn is recorded before its answer is sent. The answer counts as delivered once its
last byte was handed to the operating system on an open connection. A turn whose answer
was lost is amended to be context only; if the answer is sent again and arrives, the turn
is amended back. A request that is a retry, by a header or the session's ``replay``, joins
the call that is still running or gets the recorded reply.

A reply that is ready soon, or an error, is an ordinary response with its status. A
streaming client gets status 200 and the start of a stream once it has waited for a while,
and from then on keep-alive events. The reply comes in one burst. Later errors are events.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Send

from trajkit_shim.chat.request import ChatRequest, Reply
from trajkit_shim.errors import GatewayError, as_gateway_error
from trajkit_shim.json_input import Json
from trajkit_shim.protocols.base import WireProtocol, encode

KEPT = 32
"""Number of a session's latest replies that can be sent again or amended."""

_STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Type": "text/event-stream; charset=utf-8",
    "X-Accel-Buffering": "no",
}
# bytes to send before the connection is checked again: about what a server buffers for
# a client that does not read
_PIECE_BYTES = 1 << 16

Amend: TypeAlias = Callable[[list[int], str, bool | None], None]
"""Writes an amendment: indices of turns, its reason, and whether they are trainable
(None: as each turn itself states)."""


def json_response(
    body: Json, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(encode(body), status, headers, "application/json")


def is_retry(headers: Mapping[str, str]) -> bool:
    # the retry count of OpenAI's and Anthropic's clients
    count = headers.get("x-stainless-retry-count", "0")
    return count.isdecimal() and count.strip("0") != ""


class PendingReply:
    """The reply to one call, and the connections that wait for it.

    ``run`` samples and records the call, and returns its reply. It is cancelled when no
    connection waits any more.
    """

    turn: int | None = None  # of a recorded call

    def __init__(
        self,
        run: "Callable[[PendingReply], Coroutine[Any, Any, Reply]]",
        amend: Amend,
        digest: bytes,
    ) -> None:
        self.digest = digest
        self._amend = amend
        self._n_connections = 0
        self._ended: GatewayError | None = None
        # the reply has arrived, or every connection was lost before that
        self._reached = self._lost = False
        self.work = asyncio.create_task(run(self))

    def end(self, error: GatewayError) -> None:
        """Let the call fail, unless it is recorded or has failed."""
        if self.work.cancel():
            self._ended = error

    def result(self) -> Reply:
        """Return the reply once the work is done; raises `GatewayError` if it failed."""
        if self._ended is not None:
            raise self._ended
        return self.work.result()

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """Wait for the reply in this context; call `reached` when it has arrived.

        The last connection that leaves cancels the work. A recorded reply is lost then
        if it reached none.
        """
        self._n_connections += 1
        try:
            yield
        finally:
            self._n_connections -= 1
            if not self._n_connections:
                if self.turn is None:
                    self.work.cancel()
                    await asyncio.gather(self.work, return_exceptions=True)
                if self.turn is not None and not (self._reached or self._lost):
                    self._lost = True
                    self._amend([self.turn], "undelivered", False)

    def reached(self) -> None:
        """Note that the reply has arrived on a connection."""
        if self._lost and not self._reached and self.turn is not None:
            self._amend([self.turn], "delivered", None)
        self._reached = True


@asynccontextmanager
async def watched(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """Yield a task that ends when the client, whose body was read, disconnects."""

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    left = asyncio.create_task(disconnected())
    try:
        yield left
    finally:
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)


@dataclass(slots=True)
class Delivery:
    """The answer to a client that asked for a reply, and may disconnect at any time."""

    _left: asyncio.Task[None]  # see `watched`
    _send: Send
    _protocol: WireProtocol
    _request: ChatRequest
    _ping_seconds: float | None  # between keep-alive events; None: there are none
    _n_pings: int = 0
    _begun: bool = False

    async def answer(self, pending: PendingReply) -> None:
        """Wait for a reply, and send it.

        Raises `GatewayError`: the call failed before the answer began.
        `ClientDisconnect`: the client disconnected before that.
        """
        async with pending.joined():
            await self._wait(pending)
            if self._left.done():
                if self._begun:
                    return
                raise ClientDisconnect
            try:
                reply = pending.result()
            except Exception as error:
                shown, codes = as_gateway_error(error), self._protocol.streamed_errors
                as_event = self._begun or shown.code in codes
                if not self._request.stream or not as_event:
                    raise
                await self._write(*self._events(shown))
                if not isinstance(error, GatewayError):
                    # the server logs it with its traceback
                    raise
            else:
                parts = [encode(self._protocol.write(reply, self._request))]
                if self._request.stream:
                    parts = self._events(reply)
                if await self._write(*parts):
                    pending.reached()

    def _events(self, answer: Reply | GatewayError) -> list[bytes]:
        """The rest of the stream; its last event is sent once the others have left."""
        *first, last = self._protocol.stream(answer, self._request, self._n_pings)
        return [b"".join(first), last] if self._begun else [b"".join([*first, last])]

    async def _wait(self, pending: PendingReply) -> None:
        """Return when the work is done or the client left; send pings meanwhile."""
        ends: set[asyncio.Future[Any]] = {pending.work, self._left}
        how: dict[str, Any] = {"return_when": asyncio.FIRST_COMPLETED}
        while not (await asyncio.wait(ends, timeout=self._ping_seconds, **how))[0]:
            ping = self._protocol.ping(self._request, self._n_pings)
            await self._write(ping, more=True)
            self._n_pings += 1

    async def _write(self, *parts: bytes, more: bool = False) -> bool:
        """Send bytes; return whether the client was connected until the last one."""
        if not self._begun:
            self._begun = True
            headers = {"Content-Type": "application/json"}
            headers |= _STREAM_HEADERS if self._request.stream else {}
            headers |= {} if more else {"Content-Length": str(sum(map(len, parts)))}
            head = {"status": 200, "headers": Headers(headers).raw}
            await self._send({"type": "http.response.start", **head})
            await _let_loop_poll()
        pieces = [
            part[start : start + _PIECE_BYTES]
            for part in parts
            for start in range(0, len(part), _PIECE_BYTES)
        ]
        for number, piece in enumerate(pieces, 1):
            if number > 1:
                await _let_loop_poll()
            if self._left.done():
                return False
            body = {"body": piece, "more_body": more or number < len(pieces)}
            try:
                await self._send({"type": "http.response.body", **body})
            except OSError:
                # how some servers report a disconnect
                return False
        return True


async def _let_loop_poll() -> None:
    """Let the server notice a broken connection.

    A write does not wait for the network. A server notices a broken connection when the
    loop polls its sockets, and the news passes through two tasks.
    """
    for _ in range(3):
        await asyncio.sleep(0)

"""How the client of a call is answered.

A reply that is ready soon, or an error, is an ordinary response with its status. A
streaming client gets status 200 and the start of a stream once it has waited for a while,
and from then on keep-alive events. The reply comes once it is complete and recorded.
Later errors are events.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Send

from trajkit_shim import json_input, timing
from trajkit_shim.call import Options
from trajkit_shim.chat.reply import Reply
from trajkit_shim.chat.request import ChatRequest
from trajkit_shim.errors import GatewayError, as_gateway_error
from trajkit_shim.json_input import Json
from trajkit_shim.protocols.base import WireProtocol
from trajkit_shim.protocols.stream import Events, encode
from trajkit_shim.sessions.answers import SharedCall

_STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Type": "text/event-stream; charset=utf-8",
    "X-Accel-Buffering": "no",
}

# bytes to send before the connection is checked again: about what a server buffers for
# a client that does not read
_PIECE_BYTES = 1 << 16


def json_response(
    body: Json, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    """Return a response with a JSON object."""
    return Response(encode(body), status, headers, "application/json")


def bearer(headers: Headers) -> str:
    """Return the bearer token of a request, or an empty string."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def read_body(request: Request, options: Options) -> bytes:
    """Return a request's body; reject too long headers or a too long body."""
    size = sum(len(name) + len(value) for name, value in request.headers.raw)
    if size > options.max_header_bytes:
        message = f"the headers are longer than {options.max_header_bytes} bytes"
        raise GatewayError(message, 431, code="headers_too_long")
    return await json_input.read_body(request.stream(), options.max_body_bytes)


@asynccontextmanager
async def watched(receive: Receive) -> AsyncIterator[asyncio.Task[None]]:
    """Yield a task that ends when the client disconnects.

    The request's body must have been read.
    """

    async def disconnected() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    left = asyncio.create_task(disconnected())
    try:
        yield left
    finally:
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)


async def cancel_on_disconnect(
    request: Request, work: Coroutine[object, object, None]
) -> None:
    """Do a client's work, but cancel it if the client disconnects meanwhile.

    The request's body must have been read. Raises `ClientDisconnect` in that case.
    """
    task = asyncio.ensure_future(work)
    async with watched(request.receive) as left:
        try:
            await asyncio.wait({task, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    if task.cancelled():
        raise ClientDisconnect
    task.result()


@dataclass(slots=True)
class Client:
    """The client of a request for a reply. It may disconnect at any time."""

    left: asyncio.Task[None]  # see `watched`
    send: Send
    protocol: WireProtocol
    request: ChatRequest
    events: Events | None  # of a streaming client
    ping_seconds: float
    _begun: bool = False

    async def answer(self, call: SharedCall) -> None:
        """Wait for a call, and send its reply.

        Raises `GatewayError`: the call failed before the answer began.
        `ClientDisconnect`: the client disconnected before that.
        """
        async with call.joined():
            await self._wait(call)
            if self.left.done():
                if not self._begun:
                    raise ClientDisconnect
                return
            try:
                reply = call.result()
            except Exception as error:
                shown, codes = as_gateway_error(error), self.protocol.streamed_errors
                if self.events is None or not (self._begun or shown.code in codes):
                    raise
                await self._write(self.events.error(shown), more=False)
                if not isinstance(error, GatewayError):
                    # the server logs it with its traceback
                    raise
            else:
                if await self._send_reply(reply):
                    call.reached()

    async def _wait(self, call: SharedCall) -> None:
        """Return when the work is done or the client left; send pings meanwhile."""
        ends: set[asyncio.Future[Any]] = {call.work, self.left}
        seconds = None if self.events is None else self.ping_seconds
        while True:
            await asyncio.wait(
                ends, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if any(end.done() for end in ends):
                return
            assert self.events is not None
            await self._write(self.events.ping())

    async def _send_reply(self, reply: Reply) -> bool:
        """Send a reply, or what is not streamed yet of it; return whether it arrived."""
        with timing.step():
            if self.events is None:
                data = [encode(self.protocol.write(reply, self.request))]
            else:
                data = [*self.events.reply(reply)]
        if self._begun:
            *first, last = data
            await self._write(b"".join(first))
            await _look()
        else:
            last = b"".join(data)
        return await self._write(last, more=False)

    async def _write(self, data: bytes, *, more: bool = True) -> bool:
        """Send data; return whether the client was connected until the last byte."""
        if not self._begun:
            self._begun = True
            headers = {"Content-Type": "application/json"}
            if self.events is not None:
                headers = _STREAM_HEADERS
            if not more:
                headers = {**headers, "Content-Length": str(len(data))}
            head = Headers(headers).raw
            await self.send(
                {"type": "http.response.start", "status": 200, "headers": head}
            )
            await _look()
        view = memoryview(data)
        while not self.left.done():
            piece, view = view[:_PIECE_BYTES], view[_PIECE_BYTES:]
            body: Message = {
                "type": "http.response.body",
                "body": bytes(piece),
                "more_body": more or bool(view),
            }
            try:
                await self.send(body)
            except OSError:
                # how some servers report a disconnect
                return False
            if not view:
                return True
            await _look()
        return False


async def _look() -> None:
    """Let the server notice a broken connection.

    A write does not wait for the network. A server notices a broken connection when the
    loop polls its sockets, and the news passes through two tasks.
    """
    for _ in range(3):
        await asyncio.sleep(0)

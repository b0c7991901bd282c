"""How the client of a running call is answered.

A reply that is ready soon, or an error, is an ordinary response with its status. A
streaming client gets status 200 and the start of a stream once part of its reply is
known or it has waited for a while. From then on it gets the reply as it is sampled, or
keep-alive events, until the reply is complete and recorded. Later errors are events.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from trajkit_shim import timing
from trajkit_shim.chat.reply import Reply
from trajkit_shim.delivery import Delivery
from trajkit_shim.errors import GatewayError, as_gateway_error
from trajkit_shim.protocols.blocks import Events
from trajkit_shim.retries import SharedCall

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
STREAM_TYPE = "text/event-stream"


# bytes to send before the connection is checked again: about what a server buffers for
# a client that does not read
_PIECE_BYTES = 1 << 16


class Connection:
    """Watches whether a client disconnects. The request's body must have been read."""

    def __init__(self, receive: Receive) -> None:
        self.left = asyncio.create_task(_disconnected(receive))

    @property
    def gone(self) -> bool:
        """Whether the client disconnected."""
        return self.left.done()

    async def end(self) -> None:
        """Stop watching."""
        self.left.cancel()
        await asyncio.gather(self.left, return_exceptions=True)


async def cancel_on_disconnect(
    request: Request, work: Coroutine[object, object, None]
) -> None:
    """Do a client's work, but cancel it if the client disconnects meanwhile.

    The request's body must have been read. Raises `ClientDisconnect` in that case.
    """
    task = asyncio.ensure_future(work)
    connection = Connection(request.receive)
    try:
        await asyncio.wait({task, connection.left}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await connection.end()
    if task.cancelled():
        raise ClientDisconnect
    task.result()


class WatchedCall:
    """A call and the connection of a client that waits for it."""

    def __init__(self, call: SharedCall, connection: Connection) -> None:
        self.call = call
        self.connection = connection
        self._seen: Reply | None = None
        call.join()

    async def wait(self, seconds: float | None) -> bool:
        """Return whether the work ended or the client left within that time.

        Returns early if more of the reply is known than `more` returned.
        """
        ends = {self.call.work, self.connection.left}
        more = asyncio.create_task(self.call.partial.wait_beyond(self._seen))
        try:
            await asyncio.wait(
                {*ends, more}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            more.cancel()
        return any(end.done() for end in ends)

    def more(self) -> Reply | None:
        """Return the known part of the reply, or None if it has not grown."""
        before, self._seen = self._seen, self.call.partial.reply
        return None if self._seen is before else self._seen

    async def end(self) -> None:
        """Leave the call; cancel it if no other connection waits for it."""
        try:
            await self.connection.end()
        finally:
            await self.call.leave()


@dataclass(frozen=True, slots=True)
class BufferedResponse:
    """The complete response of a recorded turn, as an ASGI app.

    ``make`` builds it, ``delivery`` is notified whether it arrived, and ``end`` is called
    afterwards.
    """

    make: Callable[[], Response]
    delivery: Delivery
    connection: Connection
    end: Callable[[], Awaitable[None]]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response. The client may disconnect at any time."""
        try:
            # no await between the record and here: a disconnect during it would be
            # missed
            with self.delivery.attempt() as attempt:
                with timing.step():
                    answer = self.make()
                head: Message = {
                    "type": "http.response.start",
                    "status": answer.status_code,
                    "headers": answer.raw_headers,
                }
                writer = _Writer(send, self.connection)
                await send(head)
                await writer.look()
                attempt.reached = await writer.write(bytes(answer.body), more=False)
        finally:
            await self.end()


@dataclass(frozen=True, slots=True)
class _Writer:
    """Sends a body while the client is connected."""

    send: Send
    connection: Connection

    async def write(self, data: bytes, *, more: bool = True) -> bool:
        """Send data; return whether the client was connected until the last byte."""
        view = memoryview(data)
        while True:
            piece, view = view[:_PIECE_BYTES], view[_PIECE_BYTES:]
            if self.connection.gone:
                return False
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
            await self.look()

    async def look(self) -> None:
        """Let the server notice a broken connection.

        A write does not wait for the network. A server notices a broken connection when
        the loop polls its sockets, and the news passes through two tasks.
        """
        for _ in range(3):
            await asyncio.sleep(0)


@dataclass(frozen=True, slots=True)
class StreamingResponse:
    """A stream for a client whose reply is not ready yet, as an ASGI app."""

    watched: WatchedCall
    events: Events
    ping_seconds: float

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. The client may disconnect at any time."""
        try:
            await self._stream(send)
        finally:
            await self.watched.end()

    async def _stream(self, send: Send) -> None:
        head = Response(media_type=STREAM_TYPE, headers=STREAM_HEADERS)
        headers = [pair for pair in head.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        writer = _Writer(send, self.watched.connection)
        write = writer.write
        await write(self.events.opening() + self._more())
        while not await self.watched.wait(self.ping_seconds):
            await write(self._more())
        if self.watched.connection.gone:
            return
        try:
            answered = self.watched.call.finish()
        except Exception as error:
            await write(self.events.error(as_gateway_error(error)), more=False)
            if isinstance(error, GatewayError):
                return
            # the server logs it with its traceback
            raise
        with answered.delivery.attempt() as attempt:
            *events, last = self.events.reply(answered.reply)
            for data in events:
                await write(data)
            await writer.look()
            attempt.reached = await write(last)
        await write(b"", more=False)

    def _more(self) -> bytes:
        """The new part of the reply, or a keep-alive event."""
        more = self.watched.more()
        return self.events.ping() if more is None else self.events.partial(more)


async def _disconnected(receive: Receive) -> None:
    """Return when the client disconnects. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass

"""A call that is under way, and how its client is answered.

A reply that is ready soon, or an error, is an ordinary answer with its status. A client
that streams gets the status 200 and the head of a stream once there is something to tell
of its reply, or it has waited for a while. From then on it is told what the engine
samples as it comes, or gets signs of life, until the reply is there and recorded; what
goes wrong after that is told as an event.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from trajkit_shim import timing
from trajkit_shim.delivery import Delivery
from trajkit_shim.engine import EngineError
from trajkit_shim.errors import GatewayError, as_gateway_error
from trajkit_shim.protocols.protocol import Events
from trajkit_shim.reply import Reply
from trajkit_shim.resend import SharedCall

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
STREAM_TYPE = "text/event-stream"


# the most bytes that are handed over before the connection is looked at again: about
# what a server holds back of a client that does not read
_PIECE_BYTES = 1 << 16


class Connection:
    """Watches whether a client is still there.

    Parameters
    ----------
    receive : ASGI receive
        Of a request whose body has been read.
    """

    def __init__(self, receive: Receive) -> None:
        self.left = asyncio.create_task(_disconnected(receive))

    @property
    def gone(self) -> bool:
        """The client hung up."""
        return self.left.done()

    async def end(self) -> None:
        """Watch no longer."""
        self.left.cancel()
        await asyncio.gather(self.left, return_exceptions=True)


async def while_there(request: Request, work: Coroutine[object, object, None]) -> None:
    """Do what a client asks for, or cancel it where the client leaves meanwhile.

    Parameters
    ----------
    request : Request
        Whose body has been read.
    work : coroutine

    Raises
    ------
    ClientDisconnect
        The client left.
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


class Attended:
    """A call, watched together with the connection of a client that waits for it.

    Parameters
    ----------
    call : SharedCall
    connection : Connection
        Ended with this.
    """

    def __init__(self, call: SharedCall, connection: Connection) -> None:
        self.call = call
        self.connection = connection
        self._seen: Reply | None = None
        call.join()

    async def wait(self, seconds: float | None) -> bool:
        """Whether the work ended, or the client left, within that time.

        It returns early where there is more of the reply than `grown` gave.
        """
        ends = {self.call.work, self.connection.left}
        more = asyncio.create_task(self.call.growth.beyond(self._seen))
        try:
            await asyncio.wait(
                {*ends, more},
                timeout=seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            more.cancel()
        return any(end.done() for end in ends)

    def grown(self) -> Reply | None:
        """What can be told of the reply; None: no more than the last time."""
        before, self._seen = self._seen, self.call.growth.reply
        return None if self._seen is before else self._seen

    async def end(self) -> None:
        """Leave the call; cancel it where nobody else waits for it."""
        try:
            await self.connection.end()
        finally:
            await self.call.leave()


class WholeAnswer:
    """The answer, as an ASGI app, of a turn that is recorded.

    Parameters
    ----------
    make : callable
        Gives the answer.
    delivery : Delivery
        Learns whether it arrived.
    connection : Connection
    end : callable
        Called when all is done.
    """

    def __init__(
        self,
        make: Callable[[], Response],
        delivery: Delivery,
        connection: Connection,
        end: Callable[[], Awaitable[None]],
    ) -> None:
        self._make = make
        self._delivery = delivery
        self._connection = connection
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. The client may leave at any time."""
        try:
            # nothing may wait between the record and this: what ends a connection then
            # would be lost
            with self._delivery.attempt() as attempt:
                with timing.step():
                    answer = self._make()
                head: Message = {
                    "type": "http.response.start",
                    "status": answer.status_code,
                    "headers": answer.raw_headers,
                }
                writer = _Writer(send, self._connection)
                await send(head)
                await writer.look()
                attempt.reached = await writer.write(bytes(answer.body), more=False)
        finally:
            await self._end()


class _Writer:
    """Sends a body as long as somebody is there."""

    def __init__(self, send: Send, connection: Connection) -> None:
        self._send = send
        self._connection = connection

    async def write(self, data: bytes, *, more: bool = True) -> bool:
        """Send it; False where the client left before the last byte was handed over."""
        view = memoryview(data)
        while True:
            piece, view = view[:_PIECE_BYTES], view[_PIECE_BYTES:]
            if self._connection.gone:
                return False
            body: Message = {
                "type": "http.response.body",
                "body": bytes(piece),
                "more_body": more or bool(view),
            }
            try:
                await self._send(body)
            except OSError:
                # how some servers say that the client left
                return False
            if not view:
                return True
            await self.look()

    async def look(self) -> None:
        """Let the server see whether the connection broke.

        A write does not wait for the network, and a server learns of a broken
        connection once the loop has looked at its sockets; what it learns passes
        through two tasks.
        """
        for _ in range(3):
            await asyncio.sleep(0)


class LateStream:
    """The answer, as an ASGI app, to a streaming client whose reply is not ready.

    Parameters
    ----------
    attended : Attended
        Ended when this is done.
    events : Events
    ping_seconds : float
        Between two signs of life.
    """

    def __init__(
        self,
        attended: Attended,
        events: Events,
        ping_seconds: float,
    ) -> None:
        self._attended = attended
        self._events = events
        self._ping_seconds = ping_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. The client may leave at any time."""
        try:
            await self._stream(scope, receive, send)
        finally:
            await self._attended.end()

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = Response(media_type=STREAM_TYPE, headers=STREAM_HEADERS)
        headers = [pair for pair in head.raw_headers if pair[0] != b"content-length"]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

        writer = _Writer(send, self._attended.connection)
        write = writer.write
        await write(self._events.opening() + self._more())
        while not await self._attended.wait(self._ping_seconds):
            await write(self._more())
        if self._attended.connection.gone:
            return
        try:
            answered = self._attended.call.finish()
        except (GatewayError, EngineError) as error:
            await write(self._events.error(as_gateway_error(error)), more=False)
            return
        # the server logs it with its traceback
        except Exception as error:
            await write(self._events.error(as_gateway_error(error)), more=False)
            raise
        with answered.delivery.attempt() as attempt:
            *events, last = self._events.reply(answered.reply)
            for data in events:
                await write(data)
            await writer.look()
            attempt.reached = await write(last)
        await write(b"", more=False)

    def _more(self) -> bytes:
        """What is new of the reply, or a sign of life."""
        grown = self._attended.grown()
        return self._events.ping() if grown is None else self._events.partial(grown)


async def _disconnected(receive: Receive) -> None:
    """Return when the client hangs up. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass

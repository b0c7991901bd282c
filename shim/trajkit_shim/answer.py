"""A call that is under way, and how its client is answered.

A reply that is ready soon, or an error, is an ordinary answer with its status. A client
that streams gets the status 200 and the head of a stream once there is something to tell
of its reply, or it has waited for a while. From then on it is told what the engine
samples as it comes, or gets signs of life, until the reply is there and recorded; what
goes wrong after that is told as an event.
"""

import asyncio
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from trajkit_shim.engine import EngineError
from trajkit_shim.errors import GatewayError, as_gateway_error
from trajkit_shim.protocols.protocol import Events
from trajkit_shim.reply import Reply
from trajkit_shim.resend import SharedCall

STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
STREAM_TYPE = "text/event-stream"


class Attended:
    """A call, watched together with the connection of a client that waits for it.

    Parameters
    ----------
    call : SharedCall
    receive : ASGI receive
        Of a request whose body has been read.
    last : callable
        Called when the last connection has left the call.
    """

    def __init__(
        self, call: SharedCall, receive: Receive, last: Callable[[], None]
    ) -> None:
        self.call = call
        self._gone = asyncio.create_task(_disconnected(receive))
        self._last = last
        self._seen: Reply | None = None
        call.join()

    async def wait(self, seconds: float | None) -> bool:
        """Whether the work ended, or the client left, within that time.

        It returns early where there is more of the reply than `grown` gave.
        """
        ends = {self.call.work, self._gone}
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

    @property
    def gone(self) -> bool:
        """The client hung up."""
        return self._gone.done()

    async def end(self) -> None:
        """Leave the call; cancel it where nobody else waits for it."""
        self._gone.cancel()
        await asyncio.gather(self._gone, return_exceptions=True)
        if await self.call.leave():
            self._last()


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

        async def write(data: bytes, *, more: bool = True) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": more})

        await write(self._events.opening() + self._more())
        while not await self._attended.wait(self._ping_seconds):
            await write(self._more())
        if self._attended.gone:
            return
        try:
            reply = self._attended.call.finish()
        except (GatewayError, EngineError) as error:
            await write(self._events.error(as_gateway_error(error)), more=False)
            return
        # the server logs it with its traceback
        except Exception as error:
            await write(self._events.error(as_gateway_error(error)), more=False)
            raise
        for data in self._events.reply(reply):
            await write(data)
        await write(b"", more=False)

    def _more(self) -> bytes:
        """What is new of the reply, or a sign of life."""
        grown = self._attended.grown()
        return self._events.ping() if grown is None else self._events.partial(grown)


async def _disconnected(receive: Receive) -> None:
    """Return when the client hangs up. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass

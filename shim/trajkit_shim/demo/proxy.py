"""The unreliable network between an agent and the gateway."""

from collections import Counter
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LossyProxy:
    """Passes requests on and loses some of the replies, as a proxy that times out does.

    The gateway has answered by then; the client reads status 504 in its place, and asks
    again. As with many clients, the gateway is not told that it is a retry, and samples a
    sibling.

    Parameters
    ----------
    app : ASGI application
        The gateway.
    lost : mapping of str to tuple of int
        For each API key, which of its chat completions are lost, counted from 0.
    """

    def __init__(self, app: ASGIApp, lost: Mapping[str, tuple[int, ...]]) -> None:
        self._app = app
        self._lost = lost
        self._seen: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not path.endswith("/chat/completions"):
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        headers.pop(b"x-stainless-retry-count", None)
        scope = {**scope, "headers": list(headers.items())}
        key = headers.get(b"authorization", b"").decode().removeprefix("Bearer ")
        number = self._seen[key]
        self._seen[key] += 1
        if number not in self._lost.get(key, ()):
            await self._app(scope, receive, send)
            return
        await self._app(scope, receive, _swallow)
        body = b'{"error": {"message": "the upstream timed out"}}'
        await send(
            {
                "type": "http.response.start",
                "status": 504,
                "headers": [(b"content-type", b"application/json")],
            }
        )
        await send({"type": "http.response.body", "body": body})


async def _swallow(message: Message) -> None:
    """Where a lost reply goes."""

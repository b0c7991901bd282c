"""The unreliable network between an agent and the gateway."""

from collections import Counter
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LossyProxy:
    """Forwards requests and loses some of the replies, like a proxy that times out.

    The gateway has answered by then. The client gets status 504 instead and repeats the
    request. The proxy removes its retry header, as many clients send none, so the
    gateway samples again.

    ``lost`` has, for each API key, the indices of its chat completions to lose.
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
    """Discard a lost reply."""

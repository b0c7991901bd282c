"""The unreliable network between an agent and the gateway."""

from collections import Counter

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class LossyProxy:
    """Forwards requests and loses one reply of each API key, like a proxy that times out.

    The gateway has answered by then. The client gets status 504 instead and repeats the
    request. The proxy removes its retry header, as many clients send none, so the
    gateway samples again. ``lost`` is the index of the chat completion to lose.
    """

    def __init__(self, app: ASGIApp, lost: int) -> None:
        self._app = app
        self._lost = lost
        self._seen: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loses = False
        if scope.get("path", "").endswith("/chat/completions"):
            headers = dict(scope["headers"])
            headers.pop(b"x-stainless-retry-count", None)
            scope = {**scope, "headers": list(headers.items())}
            key = headers.get(b"authorization", b"").decode()
            loses = self._seen[key] == self._lost
            self._seen[key] += 1
        await self._app(scope, receive, _swallow if loses else send)
        if loses:
            error = {"error": {"message": "the upstream timed out"}}
            await JSONResponse(error, 504)(scope, receive, send)


async def _swallow(message: Message) -> None:
    """Discard a lost reply."""

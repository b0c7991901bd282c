"""The unreliable network between an agent and the gateway."""

from collections import Counter

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def lossy(app: ASGIApp, lost: int) -> ASGIApp:
    """Forward requests and lose one reply of each API key, like a proxy that times out.

    The gateway has answered by then. The client gets status 504 instead and repeats the
    request. The proxy removes its retry header, as many clients send none, so the
    gateway samples again. ``lost`` is the index of the chat completion to lose.
    """
    seen = Counter[str]()

    async def forward(scope: Scope, receive: Receive, send: Send) -> None:
        loses = False
        if scope.get("path", "").endswith("/chat/completions"):
            headers = dict(scope["headers"])
            headers.pop(b"x-stainless-retry-count", None)
            scope = {**scope, "headers": list(headers.items())}
            key = headers.get(b"authorization", b"").decode()
            loses = seen[key] == lost
            seen[key] += 1
        await app(scope, receive, _swallow if loses else send)
        if loses:
            error = {"error": {"message": "the upstream timed out"}}
            await JSONResponse(error, 504)(scope, receive, send)

    return forward


async def _swallow(message: Message) -> None:
    """Discard a lost reply."""

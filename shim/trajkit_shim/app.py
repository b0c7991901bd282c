"""The gateway: an ASGI app that speaks several protocols and records every call.

A call is rendered, sampled and parsed without side effects, then recorded in one step,
then answered. A call that fails, whose client disconnects, or whose session closes
meanwhile is not recorded. A recorded call that the engine aborted gets an error answer
and its turn is context only, as is a turn whose answer is lost on its way.
"""

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trajkit_shim.admin import Admin, bearer
from trajkit_shim.call import CallContext, Gateway, Options, read_body
from trajkit_shim.delivery import Delivery, json_response, request_digest, watched
from trajkit_shim.engines.base import Engine
from trajkit_shim.errors import GatewayError, as_gateway_error, retry_header
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.protocols import PROTOCOLS
from trajkit_shim.protocols.base import Verb, WireProtocol
from trajkit_shim.protocols.openai_chat import OPENAI_CHAT
from trajkit_shim.sessions.client_identity import identify
from trajkit_shim.sessions.sessions import Session
from trajkit_shim.sessions.turn_log import TurnLog

KEY_HEADER = "x-session-key"
# where the clients of the protocols put their API key
_KEY_HEADERS = ("x-api-key", "x-goog-api-key")
# no site has such a name
_PRIVATE = (".localhost", ".local", ".internal")


def create_app(
    engine: Engine,
    renderer: ChatRenderer,
    log: TurnLog,
    options: Options | None = None,
) -> Starlette:
    """Return the gateway's ASGI app, which closes engine and log at shutdown.

    Routes: the trainer's (`admin`); ``GET /v1/models``; ``GET /healthz``; ``GET
    /prompts``, which reports how prompts are built and what the chat template does; and
    the paths of every protocol (`trajkit_shim.protocols`). A call names its session by
    the session's key, in the path prefix ``/s/{key}``, else in the header
    ``x-session-key``, else as API key.

    Parameters
    ----------
    engine : Engine
    renderer : ChatRenderer
        Tokenizer and chat template of the engine's model.
    log : TurnLog
    options : Options, optional

    Raises
    ------
    ValueError
        ``images`` is an `ImageModel`, and the engine or the log takes no images.
    """
    gateway = Gateway(engine, renderer, log, options or Options())
    app = _App(gateway)
    return Starlette(
        routes=list(app.routes()),
        exception_handlers=dict.fromkeys(
            (ClientDisconnect, Exception, GatewayError, HTTPException), _answer_error
        ),
        middleware=[Middleware(_no_browsers, gateway.options.hosts)],
        lifespan=app.lifespan,
    )


def _no_browsers(app: ASGIApp, hosts: Collection[str]) -> ASGIApp:
    """Middleware that answers requests of web pages with an error.

    A page of any site can send requests to this machine, which have an ``Origin``. It can
    also let its own name point to this machine's address, which is then the ``Host``.
    """

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        answer = app
        if scope["type"] == "http":
            try:
                _check_no_browser(Headers(scope=scope), hosts)
            except GatewayError as error:
                answer = await _answer_error(Request(scope), error)
        await answer(scope, receive, send)

    return checked


def _check_no_browser(headers: Headers, hosts: Collection[str]) -> None:
    """Raise a 403 for a web page's request, or for a ``Host`` that a page may have.

    Addresses, names without a dot, those of private networks and ``hosts`` are no page's.
    """
    if "origin" in headers:
        message = f"origin: {headers['origin']!r}: requests of web pages are refused"
        raise GatewayError(message, 403, code="browser_refused")
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        if "." not in name or name.endswith(_PRIVATE) or name in hosts:
            return
        ipaddress.ip_address(name)
    except ValueError:
        rule = "not an address or name of this gateway (trajkit serve --allow-host)"
        message = f"host: {host!r}: {rule}"
        raise GatewayError(message, 403, code="unknown_host") from None


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        # nobody reads it
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        shown = GatewayError(error.detail, error.status_code)
    else:
        # the server logs unexpected exceptions with their traceback
        shown = as_gateway_error(error)
    body = _protocol_of(request.url.path).error(shown)
    return json_response(body, shown.status, retry_header(shown))


def _protocol_of(path: str) -> WireProtocol:
    """The protocol whose error format is used for a path, which may have no route."""

    def matches(known: str) -> bool:
        stem, has_model, _ = known.partition("{")
        # /v1/models/{model} is OpenAI's; Gemini's has a method after the model
        return stem in path and (not has_model or ":" in path)

    return next((p for p in PROTOCOLS if any(map(matches, p.paths))), OPENAI_CHAT)


@dataclass(frozen=True, slots=True)
class _App:
    """The routes of a gateway."""

    gateway: Gateway

    def routes(self) -> Iterator[Route]:
        """Yield all routes."""
        for path in ("/", "/healthz"):
            yield Route(path, self.health)
        yield Route("/prompts", self.describe_prompts)
        yield from Admin(self.gateway).routes()
        for prefix in ("", "/s/{session_key}"):
            yield Route(f"{prefix}/v1/models", self.models)
            for protocol in PROTOCOLS:
                for path, verb in protocol.paths.items():
                    endpoint = _Endpoint(self.gateway, protocol, verb)
                    yield Route(prefix + path, endpoint, methods=["POST"])

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[Mapping[str, object]]:
        """Serve; at the end close what the gateway was given."""
        # more than processors, because those that tokenize long texts wait for others
        threads = ThreadPoolExecutor(64, "trajkit-call")
        asyncio.get_running_loop().set_default_executor(threads)
        gateway = self.gateway
        # for the server, which ends the calls before it waits for their connections
        yield {"drain": gateway.sessions.drain}
        try:
            await gateway.sessions.drain(0.0)
        finally:
            await gateway.pause.close()
            await gateway.engine.close()
            await gateway.reply_parser.close()
            gateway.log.close()

    async def health(self, _: Request) -> Response:
        gateway = self.gateway
        state = "draining" if gateway.sessions.draining else "ok"
        if gateway.pause.mode is not None:
            state = "paused"
        return JSONResponse({"status": state, "sessions": gateway.sessions.counts()})

    async def describe_prompts(self, _: Request) -> Response:
        described = await asyncio.to_thread(self.gateway.prompts.describe)
        n_bytes = self.gateway.cache_budget.n_bytes
        return JSONResponse({**described, "cache_bytes": n_bytes})

    async def models(self, _: Request) -> Response:
        info = await self.gateway.engine.info()
        model = {"id": info.model, "max_model_len": info.max_context_tokens}
        model |= {"object": "model", "created": 0, "owned_by": "trajkit"}
        return JSONResponse({"object": "list", "data": [model]})


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A path of a protocol, as an ASGI app."""

    gateway: Gateway
    protocol: WireProtocol
    verb: Verb

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        session = self.gateway.sessions.authorise(_session_claims(request))
        with session.request(), self.gateway.working(request.headers):
            await self._answer(request, session, send)

    async def _answer(self, request: Request, session: Session, send: Send) -> None:
        gateway, protocol, verb = self.gateway, self.protocol, self.verb
        body = await read_body(request, gateway.options)
        chat = await gateway.read(protocol, verb, body)
        context = CallContext(
            gateway=gateway,
            session=session,
            protocol=protocol,
            caller=identify(request.headers, chat),
            chat=chat,
            digest=request_digest(f"{protocol.name} {verb}", body),
            variables=gateway.variables(session, chat),
        )
        if verb == "count":
            n_tokens = await gateway.count(context)
            response = json_response(protocol.count(n_tokens))
            await response(request.scope, request.receive, send)
            return
        seconds = gateway.options.ping_seconds
        async with watched(request.receive) as left:
            delivery = Delivery(left, send, protocol, chat, seconds)
            await delivery.answer(gateway.find_call(context, request.headers))


def _session_claims(request: Request) -> list[str]:
    """Return what may be the key of a call's session, in order of precedence."""
    headers = request.headers
    named = request.path_params.get("session_key") or headers.get(KEY_HEADER)
    if named is not None:
        return [named]
    keys = bearer(headers), *(headers.get(header) for header in _KEY_HEADERS)
    # older Gemini clients
    return [key for key in (*keys, request.query_params.get("key")) if key]

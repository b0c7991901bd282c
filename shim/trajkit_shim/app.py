"""The gateway: an ASGI app that speaks several protocols and records every call.

A call is rendered, sampled and parsed without side effects, then recorded in one step,
then answered. A call that fails, whose client disconnects, or whose session closes
meanwhile is not recorded. A recorded call that the engine aborted gets an error answer
and its turn is context only, as is a turn whose answer is lost on its way.

The trainer's routes (sessions, pauses, new weights) need the admin token, if
there is one; a session's key is not enough.
"""

import asyncio
import hmac
import ipaddress
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias, cast
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from trajkit_shim import json_input as read
from trajkit_shim.call import Call, Gateway, Options
from trajkit_shim.chat.request import parse_client_sampling, parse_fixed
from trajkit_shim.delivery import Delivery, json_response, watched
from trajkit_shim.engines.base import Engine
from trajkit_shim.errors import GatewayError, as_gateway_error, retry_header
from trajkit_shim.json_input import Fields, Json
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.protocols import PROTOCOLS
from trajkit_shim.protocols.base import Verb, WireProtocol
from trajkit_shim.protocols.openai import OPENAI_CHAT
from trajkit_shim.sessions.sessions import LIMITS, Outcome, SessionOptions
from trajkit_shim.sessions.turn_log import TurnLog

KEY_HEADER, TOKEN_HEADER = "x-session-key", "x-admin-token"
_KEY_PREFIX = "/s/{session_key}"
# where the clients of the protocols put their API key
_KEY_HEADERS = ("x-api-key", "x-goog-api-key")
# no site has such a name
_PRIVATE = (".localhost", ".local", ".internal")

# a duration; no request may make the gateway wait for more than a day
_SECONDS = partial(read.as_number, minimum=0.0, maximum=24 * 3600.0)
_POSITIVE = partial(read.as_integer, minimum=1)
_ANY_NUMBER = partial(read.as_number, minimum=-math.inf, maximum=math.inf)

Handler: TypeAlias = Callable[[Request, Fields], Json | Awaitable[Json]]


def create_app(
    engine: Engine,
    renderer: ChatRenderer,
    log: TurnLog,
    options: Options | None = None,
) -> Starlette:
    """Return the gateway's ASGI app, which closes engine and log at shutdown.

    Routes: the trainer's; ``GET /v1/models``; ``GET /healthz``; ``GET /prompts``, which
    reports how prompts are built and what the chat template does; and the paths of every
    protocol (`trajkit_shim.protocols`). A call names its session by the session's key, in
    the path prefix ``/s/{key}``, else in the header ``x-session-key``, else as API key.
    ``renderer`` has the tokenizer and the chat template of the engine's model.

    Raises `ValueError`: ``images`` is an `ImageModel`, and the engine or the log takes no
    images.
    """
    gateway = Gateway(engine, renderer, log, options or Options())
    calls = [
        Route(prefix + path, _Endpoint(gateway, protocol, verb), methods=["POST"])
        for prefix in ("", _KEY_PREFIX)
        for protocol in PROTOCOLS
        for path, verb in protocol.paths.items()
    ]
    app = Starlette(
        # the most frequent first
        routes=calls + _other_routes(gateway),
        exception_handlers=dict.fromkeys(
            (ClientDisconnect, Exception, GatewayError, HTTPException), answer_error
        ),
        lifespan=partial(_lifespan, gateway),
    )
    # for the first lines of a command
    app.state.prompts = gateway.prompts
    return app


@asynccontextmanager
async def _lifespan(
    gateway: Gateway, _: Starlette
) -> AsyncIterator[Mapping[str, object]]:
    """Serve; at the end close what the gateway was given."""
    # more than processors, because those that tokenize long texts wait for others
    threads = ThreadPoolExecutor(64, "trajkit-call")
    asyncio.get_running_loop().set_default_executor(threads)
    # for the server, which ends the calls before it waits for their connections
    yield {"drain": gateway.sessions.drain}
    try:
        await gateway.sessions.drain(0.0)
    finally:
        await gateway.pause.close()
        await gateway.engine.close()
        await gateway.reply_parser.close()
        gateway.log.close()


def _check_head(headers: Headers, options: Options) -> None:
    """Refuse the request of a web page (403), and a compressed body (415).

    A page of any site can send requests to this machine, which have an ``Origin``. It can
    also let its own name point to this machine's address, which is then the ``Host``.
    Addresses, names without a dot, those of private networks and ``hosts`` are no page's.
    """
    if (coding := headers.get("content-encoding", "identity")) != "identity":
        message = f"content-encoding: {coding!r}: send the body as it is, uncompressed"
        raise GatewayError(message, 415, code="unsupported_encoding")
    if "origin" in headers:
        message = f"origin: {headers['origin']!r}: requests of web pages are refused"
        raise GatewayError(message, 403, code="browser_refused")
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
        own = (each.lower() for each in options.hosts)
        if "." not in name or name.endswith(_PRIVATE) or name in own:
            return
        ipaddress.ip_address(name)
    except ValueError:
        rule = "not an address or name of this gateway (trajkit serve --allow-host)"
        message = f"host: {host!r}: {rule}"
        raise GatewayError(message, 403, code="unknown_host") from None


async def answer_error(request: Request, error: Exception) -> Response:
    """Return the answer to a request that failed, in the words of its protocol."""
    if isinstance(error, ClientDisconnect):
        # nobody reads it
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        error = GatewayError(error.detail, error.status_code)
    # the server logs unexpected exceptions with their traceback
    shown = as_gateway_error(error)
    body = _protocol_of(request.url.path).error(shown)
    return json_response(body, shown.status, retry_header(shown))


def _protocol_of(path: str) -> WireProtocol:
    """The protocol whose error format is used for a path, which may have no route."""
    for protocol in PROTOCOLS:
        for known in protocol.paths:
            stem, has_model, _ = known.partition("{")
            # /v1/models/{model} is OpenAI's; Gemini's has a method after the model
            if stem in path and (not has_model or ":" in path):
                return protocol
    return OPENAI_CHAT


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A path of a protocol, as an ASGI app."""

    gateway: Gateway
    protocol: WireProtocol
    verb: Verb

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gateway, protocol, verb = self.gateway, self.protocol, self.verb
        options, request = gateway.options, Request(scope, receive, send)
        _check_head(request.headers, options)
        session = gateway.sessions.authorise(_session_claims(request))
        with session.request(), gateway.working(session, request.headers):
            data = await read.read_body(request.stream(), options.max_body_bytes)
            call = Call(gateway, session, protocol, verb, request.headers)
            await call.read(data)
            del data
            if verb == "count":
                response = json_response(protocol.count(await call.count()))
                await response(scope, receive, send)
                return
            async with watched(receive) as left:
                seconds = options.ping_seconds if call.chat.stream else None
                delivery = Delivery(left, send, protocol, call.chat, seconds)
                await delivery.answer(call.begin())


def _session_claims(request: Request) -> list[str]:
    headers = request.headers
    named = request.path_params.get("session_key") or headers.get(KEY_HEADER)
    if named is not None:
        return [named]
    keys = _bearer(headers), *(headers.get(header) for header in _KEY_HEADERS)
    # older Gemini clients
    return [key for key in (*keys, request.query_params.get("key")) if key]


def _bearer(headers: Headers) -> str:
    scheme, _, token = headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


def _other_routes(gateway: Gateway) -> list[Route]:
    """The routes of the trainer, to which agents have no access, and of everybody."""
    store, pause, options = gateway.sessions, gateway.pause, gateway.options

    async def answer(
        handler: Handler, fields: str | None, request: Request
    ) -> Response:
        """Answer a request; ``fields``: of a body that the trainer may send."""
        body = Fields({})
        _check_head(request.headers, options)
        if fields is not None:
            check_token(request.headers, options.admin_token)
        if request.method == "POST":
            data = await read.read_body(request.stream(), options.max_body_bytes)
            body = Fields(read.parse_object(data or b"{}"))
            body.only((fields or "").split())
        answered = handler(request, body)
        known = answered if isinstance(answered, dict) else await answered
        return json_response(known)

    def health(*_: object) -> Json:
        state = "draining" if store.draining else "ok"
        state = "paused" if pause.paused else state
        return {"status": state, "sessions": store.counts()}

    async def prompts(*_: object) -> Json:
        described = await asyncio.to_thread(gateway.prompts.describe)
        return {**described, "cache_bytes": gateway.cache_budget.n_bytes}

    async def models(request: Request, _: Fields) -> Json:
        info = await gateway.engine.info()
        model = {"id": info.model, "max_model_len": info.max_context_tokens}
        model |= {"object": "model", "created": 0, "owned_by": "trajkit"}
        if "model" in request.path_params:
            return model
        return {"object": "list", "data": [model]}

    def open_one(request: Request, body: Fields) -> Json:
        session = SessionOptions(
            fixed=parse_fixed(body.section("sampling")),
            client_sampling=parse_client_sampling(body.json.get("client_sampling")),
            limits={name: body.get(name, _POSITIVE) for name in LIMITS},
            ttl_seconds=body.get("ttl_seconds", _SECONDS),
            variables=body.section("chat_template_kwargs").json,
            replay=body.flag("replay"),
            group_id=body.get("group_id", _logged_text),
        )
        opened = store.open(body.get_text("session_id"), session, _outcome(body))
        # as this client reaches the gateway
        base_url = str(request.base_url).rstrip("/")
        named = {"session_id": opened.session_id, "api_key": opened.api_key}
        return {**named, "base_url": base_url}

    async def finish(request: Request, body: Fields) -> Json:
        name = request.path_params["session_id"]
        wait = body.get("wait_seconds", _SECONDS) or 0.0
        return await store.finish(name, "finish", wait, _outcome(body))

    async def pause_engine(_: Request, body: Fields) -> Json:
        seconds = body.get("timeout_s", _SECONDS)
        seconds = 600.0 if seconds is None else seconds
        await pause.pause(seconds, renew=body.flag("renew"))
        return pause.describe()

    async def update(_: Request, body: Fields) -> Json:
        await pause.update(body.name("model_path"), body.name("weight_version"))
        return pause.describe()

    async def resume(_: Request, __: Fields) -> Json:
        await pause.resume()
        return pause.describe()

    session = "/sessions/{session_id}"
    opening = "session_id sampling client_sampling chat_template_kwargs ttl_seconds "
    opening += f"group_id reward metadata replay {' '.join(LIMITS)}"
    ending = "reward error metadata wait_seconds"
    # with the fields of the body, if there may be one; None: for everybody
    table: list[tuple[str, str, Handler, str | None]] = [
        ("POST", "/sessions", open_one, opening),
        ("GET", session, lambda r, _: store.find(**r.path_params).describe(), ""),
        ("POST", f"{session}/finish", finish, ending),
        ("POST", f"{session}/drop", lambda r, _: store.drop(**r.path_params), ""),
        ("GET", "/engine", lambda *_: pause.describe(), ""),
        ("POST", "/engine/pause", pause_engine, "timeout_s renew"),
        ("POST", "/engine/update", update, "model_path weight_version"),
        ("POST", "/engine/resume", resume, ""),
        ("GET", "/", health, None),
        ("GET", "/healthz", health, None),
        ("GET", "/prompts", prompts, None),
        ("GET", "/v1/models", models, None),
        ("GET", "/v1/models/{model:path}", models, None),
        ("GET", f"{_KEY_PREFIX}/v1/models", models, None),
        ("GET", f"{_KEY_PREFIX}/v1/models/{{model:path}}", models, None),
    ]
    return [
        Route(path, partial(answer, handler, fields), methods=[method])
        for method, path, handler, fields in table
    ]


def check_token(headers: Headers, token: str | None) -> None:
    """Raise a 401 for a request without the admin token, if there is one."""
    given = headers.get(TOKEN_HEADER) or _bearer(headers)
    # constant time: the duration does not reveal how much of it is right
    if token is not None and not hmac.compare_digest(given.encode(), token.encode()):
        rule = f"send it as bearer token or in {TOKEN_HEADER}"
        message = f"the admin token is missing: {rule}"
        raise GatewayError(message, 401, code="invalid_admin_token")


def _logged_text(value: object, where: str) -> str:
    """Return a string of a text column, which is UTF-8."""
    text = read.as_text(value, where)
    try:
        text.encode()
    except UnicodeEncodeError:
        read.refuse(where, "half of a surrogate pair is no text")
    return text


def _outcome(body: Fields) -> Outcome:
    readers: dict[str, read.Reader[object]]
    readers = {"reward": _ANY_NUMBER, "error": _logged_text, "metadata": read.as_object}
    fields = {k: body.get(k, read) for k, read in readers.items() if k in body.json}
    if fields.get("metadata", {}) is None:
        del fields["metadata"]
    return cast("Outcome", fields)

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
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trajkit_shim import timing
from trajkit_shim.admin import Admin
from trajkit_shim.call import (
    CallContext,
    Gateway,
    ModelCall,
    Options,
    count_tokens,
    prepare_call,
)
from trajkit_shim.chat.reply import Reply
from trajkit_shim.chat.request import ChatRequest
from trajkit_shim.engines.base import Engine
from trajkit_shim.errors import (
    EngineError,
    GatewayError,
    as_gateway_error,
    retry_header,
)
from trajkit_shim.json_input import Json, parse_object
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.protocols import PROTOCOLS
from trajkit_shim.protocols.base import Verb, WireProtocol
from trajkit_shim.protocols.openai_chat import OPENAI_CHAT
from trajkit_shim.responses import Client, bearer, json_response, read_body, watched
from trajkit_shim.sessions.answers import SharedCall, is_retry, request_digest
from trajkit_shim.sessions.client_identity import identify
from trajkit_shim.sessions.sessions import (
    Session,
    closed_error,
    writing,
)
from trajkit_shim.sessions.turn_log import TurnLog

KEY_HEADER = "x-session-key"
# bytes of a request body that is parsed in well below a millisecond
_SHORT_BODY = 16 << 10
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
    gateway = _App(engine, renderer, log, options or Options())
    return Starlette(
        routes=list(gateway.routes()),
        exception_handlers=dict.fromkeys(
            (ClientDisconnect, Exception, GatewayError, HTTPException), _answer_error
        ),
        middleware=[Middleware(_no_browsers, gateway.options.hosts)],
        lifespan=gateway.lifespan,
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


class _App(Gateway):
    """The routes."""

    _n_bytes = 0  # of the bodies of requests

    def routes(self) -> Iterator[Route]:
        """Yield all routes."""
        for path in ("/", "/healthz"):
            yield Route(path, self.health)
        yield Route("/prompts", self.describe_prompts)
        yield from Admin(self).routes()
        for prefix in ("", "/s/{session_key}"):
            yield Route(f"{prefix}/v1/models", self.models)
            for protocol in PROTOCOLS:
                for path, verb in protocol.paths.items():
                    endpoint = _Endpoint(self, protocol, verb)
                    yield Route(prefix + path, endpoint, methods=["POST"])

    @asynccontextmanager
    async def lifespan(self, _: Starlette) -> AsyncIterator[Mapping[str, object]]:
        """Serve; at the end close what the gateway was given."""
        # more than processors, because those that tokenize long texts wait for others
        threads = ThreadPoolExecutor(64, "trajkit-call")
        asyncio.get_running_loop().set_default_executor(threads)
        # for the server, which ends the calls before it waits for their connections
        yield {"drain": self.sessions.drain}
        try:
            await self.sessions.drain(0.0)
        finally:
            # cancels the timer of a pause
            self.gate.resume()
            await self.weights.close()
            await self.engine.close()
            await self.reply_parser.close()
            self.log.close()

    async def health(self, _: Request) -> Response:
        state = "draining" if self.sessions.draining else "ok"
        if self.gate.paused:
            state = "paused"
        return JSONResponse({"status": state, "sessions": self.sessions.counts()})

    async def describe_prompts(self, _: Request) -> Response:
        described = await asyncio.to_thread(self.prompts.describe)
        return JSONResponse({**described, "cache_bytes": self.cache_budget.n_bytes})

    async def models(self, _: Request) -> Response:
        info = await self.engine.info()
        model = {"id": info.model, "max_model_len": info.max_context_tokens}
        model |= {"object": "model", "created": 0, "owned_by": "trajkit"}
        return JSONResponse({"object": "list", "data": [model]})

    async def read(
        self, protocol: WireProtocol, verb: Verb, body: bytes
    ) -> ChatRequest:
        """Read the body of a request, and its images."""
        read = partial(protocol.read, images=self.image_policy, count=verb == "count")

        @timing.step()
        def parse() -> ChatRequest:
            return read(parse_object(body))

        # A long body would delay every other call; a short one takes less time than
        # a thread switch. Images are decoded.
        text_only = isinstance(self.image_policy, str)
        if text_only and len(body) <= _SHORT_BODY:
            chat = parse()
        else:
            chat = await asyncio.to_thread(parse)
        limit = self.options.max_messages
        if len(chat.messages) > limit:
            message = f"{len(chat.messages)} messages; the limit is {limit}"
            raise GatewayError(message, 413, code="too_many_messages")
        if not text_only:
            chat = replace(chat, images=self.images.take(chat.messages))
        return replace(chat, stream=True) if verb == "stream" else chat

    @contextmanager
    def working(self, headers: Headers) -> Iterator[None]:
        """Work on a request in this context; raises a 503 if there is too much work."""
        length, most = headers.get("content-length", ""), self.options.max_body_bytes
        # a longer one is refused when it is read
        n_bytes = min(int(length), most) if length.isdecimal() else most
        limit = max(self.options.max_work_bytes, most)
        if self._n_bytes + n_bytes > limit:
            message = f"the requests at work have more than {limit} bytes together"
            raise GatewayError(message, 503, code="busy", retry_after=5)
        self._n_bytes += n_bytes
        try:
            yield
        finally:
            self._n_bytes -= n_bytes

    def variables(self, session: Session, chat: ChatRequest) -> Json:
        """The template's variables: the session's, the request's, the gateway's."""
        known = self.prompts.renderer.variables
        asked = chat.thinking.resolve(known, chat.ignored)
        fixed = session.terms.variables
        for name in asked.keys() & fixed.keys():
            if asked[name] != fixed[name]:
                chat.ignored[f"chat_template_kwargs.{name}"] += 1
        return {**self.options.variables, **asked, **fixed}

    async def count(self, context: CallContext) -> int:
        """Return the length of a prompt that the session could still send.

        Only some are counted at once, because a prompt's tokens take much more memory than
        its text.
        """
        session = context.session
        session.check_open()
        session.counts.token_counts += 1
        async with self.counting:
            n_tokens = await count_tokens(context)
        session.left("prompt_tokens", n_tokens)
        return n_tokens

    def find_call(self, context: CallContext, headers: Headers) -> SharedCall:
        """Return the call that a retry asks for again, or begin one.

        Raises `GatewayError`: the session may make no more calls, or the log is full.
        """
        session, digest = context.session, context.digest
        if session.terms.replay or is_retry(headers):
            session.check_open()
            if call := session.again(digest):
                session.counts.replayed += 1
                return call
        if self.log.full:
            message = "the log is full: it has reached its maximum size"
            raise GatewayError(message, 507, code="log_full")
        reserved = session.admit()
        run = partial(self._run, context)
        call = SharedCall(run, session.amend, digest, reserved)
        session.calls[call] = None
        call.work.add_done_callback(lambda _: session.calls.pop(call, None))
        return call

    async def _run(self, context: CallContext, call: SharedCall) -> Reply:
        """Sample and record a call."""
        try:
            prepared = await prepare_call(context, call.reserved)
            await self.images.write(context.chat.images)
            return self._record(context, call, prepared)
        except GatewayError as error:
            context.session.counts.failed += error.status >= 500
            raise

    @timing.step()
    def _record(self, context: CallContext, call: SharedCall, made: ModelCall) -> Reply:
        """Write and count the turn of a call, and return its reply.

        Does not await, so no other call interferes.
        """
        session, turn, counts = context.session, made.turn, context.session.counts
        # closing the session cancelled the work
        if session.closed:
            raise closed_error(session.session_id)
        # of earlier turns; a full disk may have room again
        session.write_amendments()
        turn.resend_of = session.request_ids.get(call.digest)
        conversation, caller = session.conversation, context.caller
        started = conversation.started_by(
            made.restored,
            caller.agent_id,
            caller.parent_agent_id,
            named=caller.harness is not None,
        )
        vars(turn).update(started)
        turn.delta = conversation.delta(made.restored, turn.prompt_ids)
        turn_index = counts.turns
        with writing("the turn"):
            self.log.append(turn, turn_index, conversation.logged)
        counts.prompts[turn.render_reason or "append"] += 1
        counts.turns += 1
        counts.prompt_tokens += len(turn.prompt_ids)
        counts.output_tokens += len(turn.output_ids)
        if self.options.attributed:
            counts.unattributed += turn.prompt_message_index is None
        conversation.count(made.restored)
        if made.reply is None or made.node is None:
            reason = turn.finish_reason or "no reason"
            message = (
                f"the engine broke off the call after {len(turn.output_ids)} tokens"
            )
            raise EngineError(f"{message}, with {reason}", 503)
        counts.answered += 1
        made.node.turn = turn_index
        conversation.add(made.node, self.cache_budget)
        call.turn, call.request_id = turn_index, turn.request_id
        session.remember(call)
        counts.tools_left_out.update(context.chat.left_out)
        counts.ignored.update(context.chat.ignored)
        counts.sampling_overruled.update(made.overruled)
        return made.reply


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A path of a protocol, as an ASGI app."""

    gateway: _App
    protocol: WireProtocol
    verb: Verb

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        session = self.gateway.sessions.authorise(_session_claims(request))
        timed = timing.Timing()
        # of this task and of those that it starts
        timing.current.set(timed)
        with session.request():
            await self._answer(request, session, send)
        self.gateway.timings.add(timed)

    async def _answer(self, request: Request, session: Session, send: Send) -> None:
        with self.gateway.working(request.headers):
            await self._work(request, session, send)

    async def _work(self, request: Request, session: Session, send: Send) -> None:
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
        events = protocol.events(chat) if chat.stream else None
        seconds = gateway.options.ping_seconds
        async with watched(request.receive) as left:
            client = Client(left, send, protocol, chat, events, seconds)
            await client.answer(gateway.find_call(context, request.headers))


def _session_claims(request: Request) -> list[str]:
    """Return what may be the key of a call's session, in order of precedence."""
    headers = request.headers
    named = request.path_params.get("session_key") or headers.get(KEY_HEADER)
    if named is not None:
        return [named]
    keys = bearer(headers), *(headers.get(header) for header in _KEY_HEADERS)
    # older Gemini clients
    return [key for key in (*keys, request.query_params.get("key")) if key]

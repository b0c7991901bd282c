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
from trajkit_shim.chat.sampling_params import ignored_params
from trajkit_shim.engines.base import Engine
from trajkit_shim.errors import (
    EngineError,
    GatewayError,
    as_gateway_error,
    retry_header,
)
from trajkit_shim.prompting.known_requests import (
    ReadRequest,
    find_known,
    read_request,
)
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
        self, protocol: WireProtocol, verb: Verb, session: Session, body: bytes
    ) -> ReadRequest:
        """Read the body of a session's request; its images are fetched."""
        read = partial(protocol.read, images=self.image_policy, count=verb == "count")
        with timing.step():
            known = find_known(body, protocol.name, session.paths.requests())

        @timing.step()
        def parse(most: int) -> ReadRequest | None:
            names = protocol.name, protocol.history
            return read_request(body, *names, read, known, most)

        # A long body would delay every other call; a short one takes less time than
        # a thread switch. Images are decoded.
        text_only = isinstance(self.image_policy, str)
        found = parse(_SHORT_BODY) if text_only else None
        if found is None:
            found = await asyncio.to_thread(parse, len(body))
        assert found is not None
        messages, limit = found.chat.messages, self.options.max_messages
        if len(messages) > limit:
            message = f"{len(messages)} messages; the limit is {limit}"
            raise GatewayError(message, 413, code="too_many_messages")
        if not text_only:
            images = await self.images.take(messages)
            found.chat = replace(found.chat, images=images)
        if verb == "stream":
            found.chat = replace(found.chat, stream=True)
        return found

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
        reserved = session.admit(context.read.chat.n)
        # the reply that may be asked for again is the one that the client has now
        run = partial(self._run, context, session.retried(digest))
        clock = session.clock.time
        call = SharedCall(run, session.amend, clock, digest, reserved)
        session.calls[call] = None
        call.work.add_done_callback(lambda _: session.calls.pop(call, None))
        return call

    async def _run(
        self, context: CallContext, retried: SharedCall | None, call: SharedCall
    ) -> Reply:
        """Sample and record a call. ``retried``: `Session.retried` when it began."""
        chat = context.read.chat
        # several replies are streamed once all are complete
        streamed = call.update if chat.stream and chat.n == 1 else None
        try:
            prepared = await prepare_call(context, call.reserved, streamed)
            await self.images.write(chat.images)
            reply = self._record(context, call, prepared, retried)
        except GatewayError as error:
            context.session.counts.failed += error.status >= 500
            raise
        # it stays in memory with the call
        call.partial = None
        return reply

    @timing.step()
    def _record(
        self,
        context: CallContext,
        call: SharedCall,
        prepared: list[ModelCall],
        retried: SharedCall | None,
    ) -> Reply:
        """Write and count the turns of a call, and return its reply.

        Does not await, so no other call interferes. If a turn cannot be written, or the
        engine aborted it, the others are context only.
        """
        session, restored = context.session, prepared[0].restored
        # closing the session cancelled the work
        if session.closed:
            raise closed_error(session.session_id)
        last = next(restored.replies, None)
        if last is not None:
            session.confirm(restored.positions[last])
        if retried is not None and retried.confirmed:
            retried = None
        shared = {
            "resend_of": session.request_ids.get(call.digest),
            "retry_of": retried and retried.request_id,
            **session.agent_starts.find(restored, context.caller),
        }
        turns, replies = list[int](), list[Reply]()
        try:
            for each in prepared:
                vars(each.turn).update(shared)
                turn_index = self._record_turn(context, each)
                if each.reply is not None:
                    turns.append(turn_index)
                    replies.append(each.reply)
            for each in prepared:
                if each.reply is None:
                    n_output = len(each.turn.output_ids)
                    reason = each.turn.finish_reason or "no reason"
                    message = f"the engine broke off the call after {n_output} tokens"
                    raise EngineError(f"{message}, with {reason}", 503)
        except GatewayError:
            session.amend(turns, "undelivered", False)
            raise
        call.turns, call.request_id = turns, prepared[0].turn.request_id
        call.positions = [each.position for each in prepared]
        session.remember(call)
        if retried is not None:
            session.counts.retried += 1
            if not self.options.train_retried:
                retried.retry()
        session.counts.tools_left_out.update(context.read.chat.left_out)
        ignored = ignored_params(context.read.chat.sampling, prepared[0].sampling)
        session.counts.sampling_overruled.update(ignored)
        first, *others = replies
        return first.joined(others)

    def _record_turn(self, context: CallContext, call: ModelCall) -> int:
        """Write and count one turn; return its index."""
        session, turn = context.session, call.turn
        counts = session.counts
        turn_index = counts.turns
        with writing("the turn"):
            self.log.append(turn, turn_index, session.written)
        answered = call.reply is not None
        counts.prompts[turn.render_reason or "append"] += 1
        counts.turns += 1
        counts.answered += answered
        counts.prompt_tokens += len(turn.prompt_ids)
        counts.output_tokens += len(turn.output_ids)
        if self.options.attributed:
            counts.unattributed += turn.prompt_message_index is None
        session.replies.count(call.restored)
        if answered:
            session.replies.remember(call.restored.position, call.message)
            session.agent_starts.add(turn_index, turn.agent_id, call.message)
            if call.path is not None:
                known = context.read.answered(call.restored)
                session.paths.remember(call.path, self.cache_budget, known)
        return turn_index


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
        gateway, protocol, verb = self.gateway, self.protocol, self.verb
        body = await read_body(request, gateway.options)
        read = await gateway.read(protocol, verb, session, body)
        context = CallContext(
            gateway=gateway,
            session=session,
            protocol=protocol,
            caller=identify(request.headers, read.chat),
            read=read,
            digest=request_digest(f"{protocol.name} {verb}", read.identity),
        )
        if verb == "count":
            response = json_response(protocol.count(await count_tokens(context)))
            await response(request.scope, request.receive, send)
            return
        events = protocol.events(read.chat) if read.chat.stream else None
        seconds = gateway.options.ping_seconds
        async with watched(request.receive) as left:
            client = Client(left, send, protocol, read.chat, events, seconds)
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

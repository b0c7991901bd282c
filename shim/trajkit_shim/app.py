"""The gateway: an ASGI app that speaks several protocols and records every call.

A call is rendered, sampled and parsed without side effects, then recorded in one step,
then answered. A call that fails, whose client disconnects, or whose session closes
meanwhile is not recorded. A recorded call that the engine aborted gets an error answer
and its turn is context only, as is a turn whose answer is lost on its way.
"""

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterator,
    Mapping,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import Any, TypeAlias

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trajkit_shim import json_input, timing
from trajkit_shim.admin import Admin
from trajkit_shim.browsers import check_no_browser
from trajkit_shim.call import (
    CallContext,
    CallSettings,
    PreparedCall,
    count_tokens,
    prepare_call,
)
from trajkit_shim.chat.image_store import ImageLimits, ImageStore, NewImages
from trajkit_shim.chat.images import NoImages
from trajkit_shim.chat.request import ReadOptions
from trajkit_shim.clock import Clock
from trajkit_shim.delivery import Amend, Answered, Delivery
from trajkit_shim.engines.base import Engine
from trajkit_shim.errors import (
    EngineError,
    GatewayError,
    as_gateway_error,
    retry_header,
)
from trajkit_shim.json_input import Json
from trajkit_shim.pause import Gate
from trajkit_shim.prompting.image_places import ImageModel, ImagePlaces
from trajkit_shim.prompting.known_requests import (
    ReadRequest,
    find_known,
    read_request,
)
from trajkit_shim.prompting.prompts import Mode, Prompts
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.prompting.token_cache import CacheBudget
from trajkit_shim.protocols import PROTOCOLS
from trajkit_shim.protocols.base import Verb, WireProtocol
from trajkit_shim.protocols.blocks import Events
from trajkit_shim.protocols.openai_chat import OPENAI_CHAT
from trajkit_shim.protocols.sse import encode
from trajkit_shim.replies.parse import FormParser, ReplyParser
from trajkit_shim.replies.parsers import form_of
from trajkit_shim.responses import (
    STREAM_HEADERS,
    STREAM_TYPE,
    BufferedResponse,
    Connection,
    StreamingResponse,
    WatchedCall,
)
from trajkit_shim.retries import PartialReply, SharedCall, is_retry, request_digest
from trajkit_shim.sessions.append_log import LogFullError
from trajkit_shim.sessions.client_identity import identify
from trajkit_shim.sessions.sessions import Session, SessionStore, closed_error
from trajkit_shim.sessions.turn_log import TurnLog
from trajkit_shim.timing import Timings
from trajkit_shim.weight_updates import Weights

Endpoint: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]

KEY_HEADER = "x-session-key"
# bytes of a request body that is parsed in well below a millisecond
_SHORT_BODY = 16 << 10
# where the clients of the protocols put their API key
_KEY_HEADERS = ("x-api-key", "x-goog-api-key")


def create_app(
    engine: Engine,
    renderer: ChatRenderer,
    log: TurnLog,
    *,
    max_new_tokens: int = 4096,
    max_body_bytes: int = 16 << 20,
    images: NoImages | ImageModel = "refuse",
    image_limits: ImageLimits | None = None,
    ping_seconds: float = 10.0,
    attributed: bool = True,
    train_side_calls: bool = False,
    train_retried: bool = True,
    reply_parser: ReplyParser | None = None,
    prompts: Mode = "append",
    check_prompts: bool = False,
    cache_bytes: int = 1 << 30,
    max_header_bytes: int = 32 << 10,
    max_messages: int = 10_000,
    admin_token: str | None = None,
    hosts: Collection[str] = (),
    pause_wait_seconds: float = 300.0,
    max_ended_sessions: int = 10_000,
    clock: Clock | None = None,
) -> Starlette:
    """Return the gateway's ASGI app, which closes engine and log at shutdown.

    Routes: the trainer's (`admin`, `weight_updates`); ``GET /v1/models``; ``GET
    /healthz``; ``GET /prompts``, which reports how prompts are built and what the chat
    template does; and the paths of every protocol (`trajkit_shim.protocols`). A call
    names its session by the session's key, in the path prefix ``/s/{key}``, else in the
    header ``x-session-key``, else as API key.

    Parameters
    ----------
    engine : Engine
    renderer : ChatRenderer
        Tokenizer and chat template of the engine's model.
    log : TurnLog
    max_new_tokens : int
        Maximum length of a reply, and its default. The room left in the context limits
        it too.
    max_body_bytes, max_header_bytes, max_messages : int
        Limits of a request; it is rejected with 413, 431 and 413 respectively.
    images : ImageModel, "refuse" or "omit"
        What the model does with images, which are stored in the log's folder ``images``;
        or reject a request with an image (400), or replace the image by a text.
    image_limits : ImageLimits, optional
        Sizes of images, and whether those at URLs are fetched (default: no).
    ping_seconds : float
        How long a streaming client waits for its first event, and between keep-alive
        events.
    attributed : bool
        Record which message each prompt token belongs to, where it can be determined
        exactly (`trajkit.schema.ATTRIBUTION`). A log in full form is twice as
        large with it, one in delta form about 8 % larger.
    train_side_calls : bool
        Train the harness's own calls too (`sessions.client_identity`).
    train_retried : bool
        Train a turn whose delivered reply an unmarked retry asks for again (`retries`),
        also if no later request contains the reply.
    reply_parser : ReplyParser, optional
        Parses replies. Closed with the app. Default: the gateway's own parser, for the
        form of tool calls that the chat template asks for.
    prompts : "append" or "render"
        Append new messages to the token ids of an earlier turn if template and request
        permit, or render every prompt from its messages (`prompting.prompts`).
    check_prompts : bool
        Compare every prompt with the template's complete text, rather than whenever a
        conversation has doubled.
    cache_bytes : int
        Memory limit of all sessions for ``append``.
    admin_token : str, optional
        Token required for the trainer's routes. Default: none.
    hosts : collection of str
        Names that clients use for this machine, besides addresses and names of private
        networks (`trajkit_shim.browsers`).
    pause_wait_seconds : float
        How long a call waits for the end of a pause before it is rejected with 503.
    max_ended_sessions : int
        Ended sessions to remember: their calls are answered with 410, later with 401.
    clock : Clock, optional
        Measures idle sessions and pauses. Default: the event loop.

    Raises
    ------
    ValueError
        ``images`` is an `ImageModel`, and the engine or the log takes no images.
    """
    gate = Gate(wait_seconds=pause_wait_seconds, clock=clock)
    sessions = SessionStore(
        log.write_session,
        lambda session_id, turns: log.amend(session_id, turns, "dropped", False),
        clock=clock,
        max_ended=max_ended_sessions,
    )
    places = None
    store = ImageStore(log.directory / "images", image_limits, fsync=log.fsync)
    if isinstance(images, str):
        reading = ReadOptions(images=images)
    elif not getattr(engine, "takes_images", False) or not log.images:
        what = f"{type(engine).__name__} or the log"
        raise ValueError(f"{what} takes no images")
    else:
        places, reading = ImagePlaces(images, store), ReadOptions(images=store.limits)
    settings = CallSettings(
        engine=engine,
        gate=gate,
        prompts=Prompts(renderer, prompts, places, check=check_prompts),
        max_new_tokens=max_new_tokens,
        attributed=attributed,
        train_side_calls=train_side_calls,
        train_retried=train_retried,
        reply_parser=reply_parser or FormParser(form_of(renderer.chat_template)),
    )
    gateway = _Gateway(
        settings,
        log,
        sessions,
        reading,
        store,
        CacheBudget(cache_bytes),
        ping_seconds=ping_seconds,
        max_body_bytes=max_body_bytes,
        max_header_bytes=max_header_bytes,
        max_messages=max_messages,
    )
    weights = Weights(engine)
    admin = Admin(
        sessions, gate, weights, gateway.timings, gateway.read_body, admin_token
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[Mapping[str, object]]:
        # more than processors, because those that tokenize long texts wait for others
        threads = ThreadPoolExecutor(64, "trajkit-call")
        asyncio.get_running_loop().set_default_executor(threads)
        # for the server, which ends the calls before it waits for their connections
        yield {"drain": sessions.drain}
        try:
            await sessions.drain(0.0)
        finally:
            # cancels the timer of a pause
            gate.resume()
            await weights.close()
            await engine.close()
            await settings.reply_parser.close()
            log.close()

    return Starlette(
        routes=[
            Route("/", gateway.health, methods=["GET"]),
            Route("/healthz", gateway.health, methods=["GET"]),
            Route("/prompts", gateway.prompts, methods=["GET"]),
            *admin.routes(),
            *(
                Route(prefix + path, endpoint, methods=[method])
                for path, method, endpoint in gateway.client_routes()
                for prefix in ("", "/s/{session_key}")
            ),
        ],
        exception_handlers={
            ClientDisconnect: _answer_nobody,
            Exception: _answer_error,
            **dict.fromkeys((GatewayError, HTTPException), _answer_error),
        },
        middleware=[Middleware(_no_browsers, hosts)],
        lifespan=lifespan,
    )


def _no_browsers(app: ASGIApp, hosts: Collection[str]) -> ASGIApp:
    """Middleware that answers requests of web pages with an error."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        answer = app
        if scope["type"] == "http":
            try:
                check_no_browser(Headers(scope=scope), hosts)
            except GatewayError as error:
                answer = await _answer_error(Request(scope), error)
        await answer(scope, receive, send)

    return checked


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        shown = GatewayError(error.detail, error.status_code)
    else:
        # the server logs unexpected exceptions with their traceback
        shown = as_gateway_error(error)
    body = _protocol_of(request).error(shown)
    return _json(body, shown.status, retry_header(shown))


async def _answer_nobody(_: Request, __: Exception) -> Response:
    # the client disconnected before its request was complete
    return Response(status_code=499)


def _protocol_of(request: Request) -> WireProtocol:
    """The protocol whose error format is used for a request."""
    protocol: WireProtocol | None = getattr(request.state, "protocol", None)
    if protocol is not None:
        return protocol
    # no route, or not with this method
    path = request.url.path

    def matches(known: str) -> bool:
        stem, has_model, _ = known.partition("{")
        # /v1/models/{model} is OpenAI's; Gemini's has a method after the model
        return stem in path and (not has_model or ":" in path)

    return next((p for p in PROTOCOLS if any(map(matches, p.paths))), OPENAI_CHAT)


def _json(
    body: Json, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(encode(body), status, headers, "application/json")


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request for a reply."""

    http: Request
    protocol: WireProtocol
    session: Session
    read: ReadRequest
    digest: bytes
    images: NewImages
    events: Events | None  # of a streaming client

    def answer(
        self,
        answered: Answered,
        connection: Connection,
        end: Callable[[], Awaitable[None]],
    ) -> ASGIApp:
        """Return the answer of a recorded turn; ``end`` is called when it was sent."""

        def make() -> Response:
            if self.events is None:
                return _json(self.protocol.write(answered.reply, self.read.chat))
            events = self.events.opening(), *self.events.reply(answered.reply)
            return _stream(b"".join(events))

        return BufferedResponse(make, answered.delivery, connection, end)


@dataclass
class _Gateway:
    """The routes, and their shared state."""

    settings: CallSettings
    log: TurnLog
    sessions: SessionStore
    read_options: ReadOptions
    images: ImageStore
    cache_budget: CacheBudget
    _: KW_ONLY
    ping_seconds: float
    max_body_bytes: int
    max_header_bytes: int
    max_messages: int
    timings: Timings = field(default_factory=Timings)

    def client_routes(self) -> Iterator[tuple[str, str, Endpoint]]:
        """Yield path, method and endpoint of the routes for clients."""
        yield "/v1/models", "GET", self.models
        for protocol in PROTOCOLS:
            for path, verb in protocol.paths.items():
                yield path, "POST", self._endpoint(protocol, verb)

    async def health(self, _: Request) -> Response:
        state = "draining" if self.sessions.draining else "ok"
        if self.settings.gate.paused:
            state = "paused"
        return JSONResponse({"status": state, "sessions": self.sessions.counts()})

    async def prompts(self, _: Request) -> Response:
        described = await asyncio.to_thread(self.settings.prompts.describe)
        return JSONResponse({**described, "cache_bytes": self.cache_budget.n_bytes})

    async def models(self, _: Request) -> Response:
        info = await self.settings.engine.info()
        model = {"id": info.model, "max_model_len": info.max_context_tokens}
        model |= {"object": "model", "created": 0, "owned_by": "trajkit"}
        return JSONResponse({"object": "list", "data": [model]})

    async def read_body(self, request: Request) -> bytes:
        """Return a request's body; reject too long headers or a too long body."""
        size = sum(len(name) + len(value) for name, value in request.headers.raw)
        if size > self.max_header_bytes:
            message = f"the headers are longer than {self.max_header_bytes} bytes"
            raise GatewayError(message, 431, code="headers_too_long")
        return await json_input.read_body(request.stream(), self.max_body_bytes)

    def _endpoint(self, protocol: WireProtocol, verb: Verb) -> Endpoint:
        async def endpoint(request: Request) -> ASGIApp:
            # for the format of errors
            request.state.protocol = protocol
            session = self.sessions.authorise(_session_claims(request))
            timed = timing.begin()
            with session.request() as answered:
                app = await self._serve(protocol, verb, session, request)

            async def answer(scope: Scope, receive: Receive, send: Send) -> None:
                try:
                    await app(scope, receive, send)
                finally:
                    answered()
                    self.timings.add(timed)

            return answer

        return endpoint

    async def _serve(
        self, protocol: WireProtocol, verb: Verb, session: Session, request: Request
    ) -> ASGIApp:
        """Answer a request of one session."""
        body = await self.read_body(request)
        read = protocol.read_for_count if verb == "count" else protocol.read
        with timing.step():
            known = find_known(body, protocol.name, session.paths.requests())

        @timing.step()
        def parse(most: int) -> ReadRequest | None:
            names = protocol.name, protocol.history
            return read_request(body, *names, read, self.read_options, known, most)

        # A long body would delay every other call; a short one takes less time than
        # a thread switch. Images are decoded.
        text_only = isinstance(self.read_options.images, str)
        found = parse(_SHORT_BODY) if text_only else None
        if found is None:
            found = await asyncio.to_thread(parse, len(body))
        assert found is not None
        if verb == "stream":
            found.chat = replace(found.chat, stream=True)
        chat = found.chat
        if len(chat.messages) > self.max_messages:
            message = f"{len(chat.messages)} messages; the limit is {self.max_messages}"
            raise GatewayError(message, 413, code="too_many_messages")
        if not text_only:
            images = await self.images.take(chat.messages)
            chat = found.chat = replace(chat, images=images)
        if verb == "count":
            prompts = self.settings.prompts
            tokens = await count_tokens(chat, found.restored, session, prompts)
            return _json(protocol.count(tokens))
        digest = request_digest(f"{protocol.name} {verb}", found.identity)
        events = protocol.events(chat) if chat.stream else None
        new_images = NewImages(self.images, chat.images)
        asked = _Asked(request, protocol, session, found, digest, new_images, events)
        return await self._reply(asked)

    async def _reply(self, asked: _Asked) -> ASGIApp:
        session, events, retries = asked.session, asked.events, asked.session.retries
        call = None
        if session.terms.replay or is_retry(asked.http.headers):
            session.check_open()
            known = retries.reply(asked.digest)
            call = retries.running.get(asked.digest)
            session.counts.replayed += known is not None or call is not None
            if known is not None:
                connection = Connection(asked.http.receive)
                return asked.answer(known, connection, connection.end)
        if call is None:
            if self.log.full:
                raise _log_full("it has reached its maximum size")
            call = self._begin(asked)
        watched = WatchedCall(call, Connection(asked.http.receive))
        # whoever answers ends it; until then this function must
        must_end = True
        try:
            ready = await watched.wait(None if events is None else self.ping_seconds)
            if events is not None and not ready:
                must_end = False
                return StreamingResponse(watched, events, self.ping_seconds)
            if watched.connection.gone:
                # nobody will read it
                return Response(status_code=499)
            answered = call.finish()
            must_end = False
        except GatewayError as error:
            if events is None or error.code not in asked.protocol.streamed_errors:
                raise
            return _stream(events.opening() + events.error(error))
        finally:
            if must_end:
                await watched.end()
        return asked.answer(answered, watched.connection, watched.end)

    def _begin(self, asked: _Asked) -> SharedCall:
        """Start a call; raises `GatewayError` if the session has none left."""
        session, digest, partial = asked.session, asked.digest, PartialReply()
        context = CallContext(
            settings=self.settings,
            session=session,
            protocol=asked.protocol,
            caller=identify(asked.http.headers, asked.read.chat),
            request=asked.read.chat,
            head=asked.read.restored,
            reservation=session.admit(asked.read.chat.n),
            # several replies are streamed once all are complete
            on_partial=partial.update
            if asked.events and asked.read.chat.n == 1
            else None,
        )

        async def prepare() -> list[PreparedCall]:
            prepared = await prepare_call(context)
            await asked.images.write()
            return prepared

        work = asyncio.create_task(prepare())
        retried = session.retries.retried(digest, session.clock.time())

        @timing.step()
        def record() -> Answered:
            # closing the session cancelled the work
            if session.closed:
                raise closed_error(session.session_id)
            prepared = work.result()
            restored = prepared[0].restored
            if indices := restored.replies:
                session.retries.confirm(restored.positions[indices[-1]])
            start = session.agent_starts.find(restored, context.caller)
            again = None if retried and retried.delivery.confirmed else retried
            shared = {
                "resend_of": session.retries.earlier(digest),
                "retry_of": again and again.request_id,
                **(asdict(start) if start else {}),
            }
            answered = self._record(asked, prepared, shared)
            if again is not None:
                session.counts.retried += 1
                if not self.settings.train_retried:
                    again.delivery.retry()
            session.counts.tools_left_out.update(asked.read.chat.left_out)
            session.counts.sampling_overruled.update(prepared[0].ignored_params)
            session.retries.remember(digest, answered)
            return answered

        def over() -> None:
            asked.images.discard()
            context.reservation.release()
            session.calls.discard(work)
            if session.retries.running.get(digest) is call:
                del session.retries.running[digest]

        call = SharedCall(work, record, over, partial)
        timing.sampled()
        session.calls.add(work)
        session.retries.running[digest] = call
        return call

    def _record(
        self,
        asked: _Asked,
        calls: list[PreparedCall],
        shared: dict[str, Any],
    ) -> Answered:
        """Write and count the turns of one request, with the fields that they share.

        Does not await, so no other call interferes. If a turn cannot be written, or the
        engine aborted it, the others are context only.
        """
        amends: list[Amend] = []

        def amend(reason: str, trainable: bool | None) -> None:
            for each in amends:
                each(reason, trainable)

        try:
            for call in calls:
                for name, value in shared.items():
                    setattr(call.turn, name, value)
                amends.append(self._record_turn(asked, call))
            for call in calls:
                if call.reply is None:
                    n_output = len(call.turn.output_ids)
                    message = f"the engine aborted the call after {n_output} tokens"
                    raise EngineError(message, 503)
        except (EngineError, GatewayError):
            amend("undelivered", False)
            raise
        first, *others = (call.reply for call in calls if call.reply)
        return Answered(
            calls[0].turn.request_id,
            tuple(call.position for call in calls),
            first.joined(others),
            Delivery(amend, asked.session.clock.time),
        )

    def _record_turn(self, asked: _Asked, call: PreparedCall) -> Amend:
        """Write and count one turn; return what amends it."""
        session, turn = asked.session, call.turn
        counts = session.counts
        turn_index = counts.turns
        try:
            with asked.images.stored():
                self.log.append(turn, turn_index, session.written)
        except LogFullError as error:
            raise _log_full(str(error)) from error
        except OSError as error:
            message = f"the turn could not be written: {error}"
            raise GatewayError(message, 500, code="log_failed") from error
        answered, n_output = call.reply is not None, len(turn.output_ids)
        counts.prompts[turn.render_reason or "append"] += 1
        counts.turns += 1
        counts.answered += answered
        session.budget.spend(len(turn.prompt_ids), n_output, answered=answered)
        if self.settings.attributed:
            counts.unattributed += turn.prompt_message_index is None
        session.replies.count(call.restored)
        if not answered:
            # it is context only by itself
            return lambda reason, trainable: None
        session.replies.remember(call.restored.position, call.message)
        session.agent_starts.add(turn_index, turn.agent_id, call.message)
        if call.path is not None:
            session.paths.remember(
                call.path, self.cache_budget, asked.read.answered(call.restored)
            )

        def amend(reason: str, trainable: bool | None) -> None:
            # a dropped turn stays dropped
            if turn_index >= counts.dropped:
                self.log.amend(session.session_id, [turn_index], reason, trainable)
            counts.undelivered += {"undelivered": 1, "delivered": -1}.get(reason, 0)

        return amend


def _log_full(why: str) -> GatewayError:
    return GatewayError(f"the log is full: {why}", 507, code="log_full")


def _stream(events: bytes) -> Response:
    return Response(events, headers=STREAM_HEADERS, media_type=STREAM_TYPE)


def _session_claims(request: Request) -> Iterator[str]:
    """Yield what may be the key of a call's session, in order of precedence."""
    named = request.path_params.get("session_key") or request.headers.get(KEY_HEADER)
    if named is not None:
        yield named
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    for header in _KEY_HEADERS:
        yield request.headers.get(header, "")
    # older Gemini clients
    yield request.query_params.get("key", "")

"""The gateway: an ASGI app that speaks several protocols and records every call.

A call is prepared (rendered, sampled, parsed) without touching anything, then recorded
in one step, then answered. A call that fails, that the client walks away from, or whose
session closes meanwhile is never recorded. A recorded call that the engine itself cut
short is not answered: its turn is context only, and so is one whose answer is lost on
its way.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from trajkit_shim import timing, wire
from trajkit_shim.admin import Admin
from trajkit_shim.answer import (
    STREAM_HEADERS,
    STREAM_TYPE,
    Attended,
    Connection,
    LateStream,
    WholeAnswer,
)
from trajkit_shim.call import PreparedCall, count_tokens, prepare_call
from trajkit_shim.callers import identify
from trajkit_shim.chat import ChatRequest, Images, Reading
from trajkit_shim.clock import Clock
from trajkit_shim.delivery import Answered, Delivery
from trajkit_shim.engine import Engine, EngineError
from trajkit_shim.errors import GatewayError, as_gateway_error, retry_header
from trajkit_shim.growth import Growth
from trajkit_shim.held import HeldBudget
from trajkit_shim.log import LogFullError, TurnLog
from trajkit_shim.parsers import ToolForm, form_of
from trajkit_shim.pause import Gate
from trajkit_shim.prompts import Mode, Prompts
from trajkit_shim.protocols import PROTOCOLS
from trajkit_shim.protocols.openai_chat import OPENAI_CHAT
from trajkit_shim.protocols.protocol import Events, Verb, WireProtocol
from trajkit_shim.protocols.sse import encode
from trajkit_shim.render import ChatRenderer
from trajkit_shim.reply_parsers import ReplyParser
from trajkit_shim.resend import SharedCall, request_digest, says_retry
from trajkit_shim.sessions import Session, SessionStore
from trajkit_shim.timing import Timings
from trajkit_shim.weights import Weights
from trajkit_shim.wire import Json

Endpoint: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]

SESSION_HEADER = "x-session-id"
# bytes of a request that is read in well below a millisecond
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
    images: Images = "refuse",
    ping_seconds: float = 10.0,
    attributed: bool = True,
    tool_form: ToolForm | None = None,
    reply_parser: ReplyParser | None = None,
    prompts: Mode = "append",
    held_bytes: int = 1 << 30,
    max_header_bytes: int = 32 << 10,
    max_messages: int = 10_000,
    admin_token: str | None = None,
    pause_wait_seconds: float = 300.0,
    max_ended_sessions: int = 10_000,
    clock: Clock | None = None,
) -> Starlette:
    """The gateway's ASGI app. It closes the engine and the log when it shuts down.

    Routes: those of the trainer (`trajkit_shim.admin`, `trajkit_shim.weights`); ``GET
    /v1/models``; ``GET /healthz``; ``GET /prompts`` says how prompts are built and
    what the chat template does; and the paths of every protocol
    (`trajkit_shim.protocols`). A call names its session by a prefix of its path,
    ``/s/{id}``, else by the header ``x-session-id``, else by its API key.

    Parameters
    ----------
    engine : Engine
    renderer : ChatRenderer
        The tokenizer and chat template of the engine's model.
    log : TurnLog
    max_new_tokens : int
        The most tokens that a reply may have, and how many it may have where the client
        names no limit. The room left in the context bounds it too.
    max_body_bytes : int
        The longest request body that is read; a longer one is answered with 413.
    images : "refuse" or "omit"
        Whether a request with an image is answered with 400, or a text stands in the
        image's place.
    ping_seconds : float
        How long a streaming client waits for its reply until the stream begins, and
        then for each sign of life.
    attributed : bool
        Write with each turn which message each prompt token shows (the columns
        `trajkit.schema.ATTRIBUTION`), where it can be told exactly; a session counts
        the turns where not (``unattributed``). The log is twice as large with it.
    tool_form : ToolForm, optional
        In which the model writes its calls (`trajkit_shim.parsers`). None: as the chat
        template tells.
    reply_parser : ReplyParser, optional
        Takes whole replies apart in place of the gateway's own parsers
        (`trajkit_shim.reply_parsers`). Closed with the app.
    max_header_bytes, max_messages : int
        The longest headers that a request may have, and the most messages: 431 and 413.
    admin_token : str, optional
        What requests to ``/sessions`` and ``/admin`` must bring. None: nothing.
    pause_wait_seconds : float
        How long a call waits for the end of a pause before it is told to come again.
    max_ended_sessions : int
        Sessions that ended and are remembered: a call of one is told so. A call of an
        older one is told that there is no such session.
    clock : Clock, optional
        What idle sessions and pauses are measured by. Default: the event loop.
    prompts : "append" or "render"
        Build each prompt behind the ids of the turn that it goes on from, where the
        template allows it and the request does so, or render each one whole
        (`trajkit_shim.prompts`).
    held_bytes : int
        The most memory that the ids of all sessions' turns take, for that.

    Returns
    -------
    Starlette
    """
    gate = Gate(wait_seconds=pause_wait_seconds, clock=clock)
    sessions = SessionStore(
        log.write_session,
        lambda session_id, turns: log.amend(session_id, turns, "dropped", False),
        clock=clock,
        max_ended=max_ended_sessions,
    )
    gateway = _Gateway(
        engine,
        gate,
        log,
        sessions,
        max_new_tokens,
        _Most(max_body_bytes, max_header_bytes, max_messages),
        Reading(images=images),
        ping_seconds,
        attributed,
        tool_form or form_of(renderer.chat_template),
        reply_parser,
        Prompts(renderer, prompts),
        HeldBudget(held_bytes),
    )
    admin = Admin(sessions, gate, gateway.timings, gateway.read_body, admin_token)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        try:
            await sessions.drain(0.0)
        finally:
            # a pause that would end by itself
            gate.resume()
            await gateway.weights.close()
            await engine.close()
            if reply_parser is not None:
                await reply_parser.close()
            log.close()

    return Starlette(
        routes=[
            Route("/", gateway.health, methods=["GET"]),
            Route("/healthz", gateway.health, methods=["GET"]),
            Route("/prompts", gateway.prompts, methods=["GET"]),
            *admin.routes(gateway.weights.routes(gateway.read_body)),
            *(
                Route(prefix + path, endpoint, methods=[method])
                for path, method, endpoint in gateway.client_routes()
                for prefix in ("", "/s/{session_id}")
            ),
        ],
        exception_handlers={
            GatewayError: _answer_error,
            EngineError: _answer_error,
            HTTPException: _answer_error,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_error,
        },
        lifespan=lifespan,
    )


async def _answer_error(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        told = GatewayError(error.detail, error.status_code)
    else:
        # the server logs what is no GatewayError with its traceback
        told = as_gateway_error(error)
    protocol = _protocol_of(request)
    return _json(protocol.error(told), told.status, retry_header(told))


async def _answer_nobody(_: Request, __: Exception) -> Response:
    """The client left before it had sent its request."""
    return Response(status_code=499)


def _protocol_of(request: Request) -> WireProtocol:
    """The protocol in whose words a client is told of an error."""
    protocol: WireProtocol | None = getattr(request.state, "protocol", None)
    if protocol is not None:
        return protocol
    # a path that nothing answers, or not this method
    path = request.url.path

    def begins(known: str) -> bool:
        stem, has_model, _ = known.partition("{")
        # /v1/models/{model} alone is OpenAI's, and Gemini's with a method behind it
        return stem in path and (not has_model or ":" in path)

    return next((p for p in PROTOCOLS if any(map(begins, p.paths))), OPENAI_CHAT)


def _json(
    body: Json, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(encode(body), status, headers, "application/json")


@dataclass(frozen=True, slots=True)
class _Most:
    """What a request may have."""

    body_bytes: int
    header_bytes: int
    messages: int


class _Gateway:
    """The routes, and what they share."""

    def __init__(
        self,
        engine: Engine,
        gate: Gate,
        log: TurnLog,
        sessions: SessionStore,
        max_new_tokens: int,
        most: _Most,
        reading: Reading,
        ping_seconds: float,
        attributed: bool,
        tool_form: ToolForm,
        reply_parser: ReplyParser | None,
        prompts: Prompts,
        budget: HeldBudget,
    ) -> None:
        self._engine = engine
        self._gate = gate
        self._log = log
        self._max_new_tokens = max_new_tokens
        self._most = most
        self._reading = reading
        self._ping_seconds = ping_seconds
        self._attributed = attributed
        self._tool_form = tool_form
        self._reply_parser = reply_parser
        self._prompts = prompts
        self._budget = budget
        self.weights = Weights(engine)
        self.timings = Timings()
        self._sessions = sessions

    def client_routes(self) -> Iterator[tuple[str, str, Endpoint]]:
        """Path, method and endpoint of what the clients call."""
        yield "/v1/models", "GET", self.models
        for protocol in PROTOCOLS:
            for path, verb in protocol.paths.items():
                yield path, "POST", self._endpoint(protocol, verb)

    async def health(self, _: Request) -> Response:
        state = "draining" if self._sessions.draining else "ok"
        if self._gate.paused:
            state = "paused"
        return JSONResponse({"status": state, "sessions": self._sessions.counts()})

    async def prompts(self, _: Request) -> Response:
        told = await asyncio.to_thread(self._prompts.describe)
        return JSONResponse({**told, "held_bytes": self._budget.n_bytes})

    async def models(self, _: Request) -> Response:
        info = await self._engine.info()
        model = {
            "id": info.model,
            "object": "model",
            "created": 0,
            "owned_by": "trajkit",
            "max_model_len": info.max_context_tokens,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def read_body(self, request: Request) -> bytes:
        """The body of a request that is not too long, nor its headers."""
        size = sum(len(name) + len(value) for name, value in request.headers.raw)
        if size > self._most.header_bytes:
            raise GatewayError(
                f"the headers are longer than {self._most.header_bytes} bytes",
                431,
                code="headers_too_long",
            )
        return await wire.read_body(request.stream(), self._most.body_bytes)

    def _endpoint(self, protocol: WireProtocol, verb: Verb) -> Endpoint:
        async def endpoint(request: Request) -> ASGIApp:
            # errors are told in its words
            request.state.protocol = protocol
            session = self._sessions.authorise(_claims(request))
            timed = timing.begin()
            with session.request() as answered:
                app = await self._serve(protocol, verb, session, request)

            def end() -> None:
                answered()
                self.timings.add(timed)

            return _Until(app, end)

        return endpoint

    async def _serve(
        self, protocol: WireProtocol, verb: Verb, session: Session, request: Request
    ) -> ASGIApp:
        """The answer to a request of one session."""
        body = await self.read_body(request)
        counts = verb == "count" and protocol.read_for_count
        read = counts or protocol.read

        @timing.step()
        def parse() -> ChatRequest:
            asked = read(wire.parse_object(body), self._reading)
            return replace(asked, stream=True) if verb == "stream" else asked

        # a long history would hold up every other call, and a short one takes less time
        # than the way to another thread and back
        short = len(body) <= _SHORT_BODY
        asked = parse() if short else await asyncio.to_thread(parse)
        if len(asked.messages) > self._most.messages:
            raise GatewayError(
                f"{len(asked.messages)} messages, where {self._most.messages} may be",
                413,
                code="too_many_messages",
            )
        if verb == "count":
            tokens = await count_tokens(
                asked, session.echo, session.held, self._prompts
            )
            return _json(protocol.count(tokens))
        digest = request_digest(f"{protocol.name} {verb}", body)
        return await self._call(protocol, session, asked, digest, request)

    async def _call(
        self,
        protocol: WireProtocol,
        session: Session,
        asked: ChatRequest,
        digest: bytes,
        request: Request,
    ) -> ASGIApp:
        events = protocol.events(asked) if asked.stream else None
        resends, call = session.resends, None
        if session.terms.replay or says_retry(request.headers):
            session.check_open()
            known = resends.reply(digest)
            call = resends.under_way.get(digest)
            resends.replayed += known is not None or call is not None
            if known is not None:
                connection = Connection(request.receive)
                return _answer(
                    protocol, asked, events, known, connection, connection.end
                )
        if call is None:
            if self._log.full:
                raise _log_full("it has as many bytes as it may have")
            call = self._begin(protocol, session, asked, digest, request)
        attended = Attended(call, Connection(request.receive))
        watched: Attended | None = attended
        try:
            ready = await attended.wait(None if events is None else self._ping_seconds)
            if events is not None and not ready:
                # which ends it
                watched = None
                return LateStream(attended, events, self._ping_seconds)
            if attended.connection.gone:
                # nobody is there to read it
                return Response(status_code=499)
            answered = call.finish()
            watched = None
        except (GatewayError, EngineError) as error:
            told = as_gateway_error(error)
            if events is None or told.code not in protocol.told_in_stream:
                raise
            return _stream(events.opening() + events.error(told))
        finally:
            if watched is not None:
                await watched.end()
        return _answer(
            protocol, asked, events, answered, attended.connection, attended.end
        )

    def _begin(
        self,
        protocol: WireProtocol,
        session: Session,
        asked: ChatRequest,
        digest: bytes,
        request: Request,
    ) -> SharedCall:
        """Start the work on a call.

        Raises
        ------
        GatewayError
            The session has no call left.
        """
        growth = Growth()
        caller = identify(request.headers, asked)
        allowance = session.admit()
        work = asyncio.create_task(
            prepare_call(
                asked,
                engine=self._engine,
                gate=self._gate,
                prompts=self._prompts,
                session_id=session.session_id,
                echo=session.echo,
                held=session.held,
                pins=session.terms.pins,
                client_sampling=session.terms.client_sampling,
                allowance=allowance,
                max_new_tokens=self._max_new_tokens,
                protocol=protocol,
                caller=caller,
                form=self._tool_form,
                reply_parser=self._reply_parser,
                attributed=self._attributed,
                growth=growth.tell if asked.stream else None,
            )
        )

        @timing.step()
        def record() -> Answered:
            # ending it cancelled the work
            session.check_recording()
            prepared = work.result()
            earlier = session.resends.earlier(digest)
            turn = replace(prepared.turn, resend_of=earlier)
            answered = self._record(session, replace(prepared, turn=turn))
            session.counts.left_out.update(asked.left_out)
            session.counts.overruled.update(prepared.overruled)
            session.resends.remember(digest, turn.request_id, answered)
            return answered

        def over() -> None:
            allowance.release()
            session.calls.discard(work)
            if session.resends.under_way.get(digest) is call:
                del session.resends.under_way[digest]

        call = SharedCall(work, record, over, growth)
        timing.sampled()
        session.calls.add(work)
        session.resends.under_way[digest] = call
        return call

    def _record(self, session: Session, call: PreparedCall) -> Answered:
        """Write the turn and count it, in one step for every other call.

        Raises
        ------
        EngineError
            The engine cut the call short.
        GatewayError
            The turn could not be written.
        """
        counts, turn = session.counts, call.turn
        turn_index = counts.recorded
        try:
            added = self._log.append(turn, turn_index, session.shown, session.deltas)
        except LogFullError as error:
            raise _log_full(str(error)) from error
        except OSError as error:
            raise GatewayError(
                f"the turn could not be written: {error}", 500, code="log_failed"
            ) from error
        counts.prompts[turn.render_reason or "append"] += 1
        counts.recorded += 1
        counts.answered += call.reply is not None
        session.budget.spend(
            len(turn.prompt_ids), len(turn.output_ids), answered=call.reply is not None
        )
        if self._attributed:
            counts.unattributed += turn.prompt_message_index is None
        session.shown |= added
        session.echo.count(call.heard)
        if call.reply is None:
            raise EngineError(
                f"the engine aborted the call after {len(call.turn.output_ids)} tokens",
                503,
            )
        session.echo.remember(call.heard.place, call.message)
        if call.path is not None:
            session.held.remember(call.path, self._budget)

        def amend(reason: str, trainable: bool | None) -> None:
            # what was dropped stays so
            if turn_index >= counts.dropped:
                self._log.amend(session.session_id, [turn_index], reason, trainable)
            counts.undelivered += 1 if reason == "undelivered" else -1

        return Answered(call.reply, Delivery(amend))


class _Until:
    """An ASGI app, and what is called once it has answered."""

    def __init__(self, app: ASGIApp, then: Callable[[], None]) -> None:
        self._app = app
        self._then = then

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        finally:
            self._then()


def _log_full(why: str) -> GatewayError:
    return GatewayError(f"the log is full: {why}", 507, code="log_full")


def _answer(
    protocol: WireProtocol,
    asked: ChatRequest,
    events: Events | None,
    answered: Answered,
    connection: Connection,
    end: Callable[[], Awaitable[None]],
) -> ASGIApp:
    """The answer of a recorded turn; ``end`` is called when it was sent."""

    def make() -> Response:
        if events is None:
            return _json(protocol.write(answered.reply, asked))
        return _stream(events.opening() + b"".join(events.reply(answered.reply)))

    return WholeAnswer(make, answered.delivery, connection, end)


def _stream(events: bytes) -> Response:
    return Response(events, headers=STREAM_HEADERS, media_type=STREAM_TYPE)


def _claims(request: Request) -> Iterator[str]:
    """What may be the id of a call's session, in order."""
    named = request.path_params.get("session_id") or request.headers.get(SESSION_HEADER)
    if named is not None:
        yield named
        return
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        yield token.strip()
    for header in _KEY_HEADERS:
        yield request.headers.get(header, "")
    # Gemini's clients of old
    yield request.query_params.get("key", "")

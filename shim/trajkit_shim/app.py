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
from dataclasses import replace
from typing import TypeAlias

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from trajkit_shim import wire
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
from trajkit_shim.delivery import Answered, Delivery
from trajkit_shim.engine import Engine, EngineError
from trajkit_shim.errors import GatewayError, as_gateway_error, retry_header
from trajkit_shim.log import TurnLog
from trajkit_shim.protocols import PROTOCOLS
from trajkit_shim.protocols.openai_chat import OPENAI_CHAT
from trajkit_shim.protocols.protocol import Events, Verb, WireProtocol
from trajkit_shim.protocols.sse import encode
from trajkit_shim.render import ChatRenderer
from trajkit_shim.resend import SharedCall, request_digest, says_retry
from trajkit_shim.sampling import parse_pins
from trajkit_shim.sessions import Session, SessionStore
from trajkit_shim.wire import Json

Endpoint: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]

# of the body that opens a session
SESSION_FIELDS = frozenset(
    {"session_id", "sampling", "max_turns", "metadata", "replay"}
)
SESSION_HEADER = "x-session-id"
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
) -> Starlette:
    """The gateway's ASGI app. It closes the engine and the log when it shuts down.

    Routes: ``POST /sessions`` opens a session, ``GET /sessions/{id}`` shows it,
    ``DELETE /sessions/{id}`` and ``POST /sessions/{id}/close`` close it;
    ``GET /v1/models``; ``GET /healthz``; and the paths of every protocol
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

    Returns
    -------
    Starlette
    """
    gateway = _Gateway(
        engine,
        renderer,
        log,
        max_new_tokens,
        max_body_bytes,
        Reading(images=images),
        ping_seconds,
        attributed,
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await engine.close()
        log.close()

    return Starlette(
        routes=[
            Route("/", gateway.health, methods=["GET"]),
            Route("/healthz", gateway.health, methods=["GET"]),
            Route("/sessions", gateway.open_session, methods=["POST"]),
            Route("/sessions/{session_id}", gateway.show_session, methods=["GET"]),
            Route("/sessions/{session_id}", gateway.close_session, methods=["DELETE"]),
            Route(
                "/sessions/{session_id}/close", gateway.close_session, methods=["POST"]
            ),
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


class _Gateway:
    """The routes, and what they share."""

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        log: TurnLog,
        max_new_tokens: int,
        max_body_bytes: int,
        reading: Reading,
        ping_seconds: float,
        attributed: bool,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._log = log
        self._max_new_tokens = max_new_tokens
        self._max_body_bytes = max_body_bytes
        self._reading = reading
        self._ping_seconds = ping_seconds
        self._attributed = attributed
        self._sessions = SessionStore()

    def client_routes(self) -> Iterator[tuple[str, str, Endpoint]]:
        """Path, method and endpoint of what the clients call."""
        yield "/v1/models", "GET", self.models
        for protocol in PROTOCOLS:
            for path, verb in protocol.paths.items():
                yield path, "POST", self._endpoint(protocol, verb)

    async def health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok", "sessions": self._sessions.counts()})

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

    async def open_session(self, request: Request) -> Response:
        body = wire.parse_object(await self._body(request) or b"{}")
        wire.only(body, SESSION_FIELDS, "")
        session_id, limit = body.get("session_id"), body.get("max_turns")
        metadata, replay = body.get("metadata"), body.get("replay")
        session = self._sessions.open(
            None if session_id is None else wire.as_text(session_id, "session_id"),
            pins=parse_pins(body.get("sampling")),
            max_turns=None
            if limit is None
            else wire.as_integer(limit, "max_turns", least=1),
            metadata=None if metadata is None else wire.as_object(metadata, "metadata"),
            replay=replay is not None and wire.as_flag(replay, "replay"),
        )
        return JSONResponse(
            {"session_id": session.session_id, "api_key": session.session_id}
        )

    async def show_session(self, request: Request) -> Response:
        return JSONResponse(self._session(request).describe())

    async def close_session(self, request: Request) -> Response:
        session = self._sessions.close(self._session(request).session_id)
        return JSONResponse(session.describe())

    async def _body(self, request: Request) -> bytes:
        return await wire.read_body(request.stream(), self._max_body_bytes)

    def _session(self, request: Request) -> Session:
        return self._sessions.get(request.path_params["session_id"])

    def _endpoint(self, protocol: WireProtocol, verb: Verb) -> Endpoint:
        async def endpoint(request: Request) -> ASGIApp:
            # errors are told in its words
            request.state.protocol = protocol
            session = self._sessions.authorise(_claims(request))
            body = await self._body(request)
            counts = verb == "count" and protocol.read_for_count
            read = counts or protocol.read

            def parse() -> ChatRequest:
                asked = read(wire.parse_object(body), self._reading)
                return replace(asked, stream=True) if verb == "stream" else asked

            # a long history would hold up every other call
            asked = await asyncio.to_thread(parse)
            if verb == "count":
                tokens = await count_tokens(asked, session.echo, self._renderer)
                return _json(protocol.count(tokens))
            digest = request_digest(f"{protocol.name} {verb}", body)
            return await self._call(protocol, session, asked, digest, request)

        return endpoint

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
        if session.replay or says_retry(request.headers):
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
            session.admit()
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
        """Start the work on a call."""
        work = asyncio.create_task(
            prepare_call(
                asked,
                engine=self._engine,
                renderer=self._renderer,
                session_id=session.session_id,
                echo=session.echo,
                pins=session.pins,
                max_new_tokens=self._max_new_tokens,
                protocol=protocol,
                caller=identify(request.headers, asked),
                attributed=self._attributed,
            )
        )

        def record() -> Answered:
            # closing it cancelled the work
            session.check_open()
            prepared = work.result()
            earlier = session.resends.earlier(digest)
            turn = replace(prepared.turn, resend_of=earlier)
            answered = self._record(session, replace(prepared, turn=turn))
            session.left_out.update(asked.left_out)
            session.resends.remember(digest, turn.request_id, answered)
            return answered

        def over() -> None:
            session.calls.discard(work)
            if session.resends.under_way.get(digest) is call:
                del session.resends.under_way[digest]

        call = SharedCall(work, record, over)
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
        try:
            added = self._log.append(call.turn, session.recorded, session.shown)
        except OSError as error:
            raise GatewayError(
                f"the turn could not be written: {error}", 500, code="log_failed"
            ) from error
        turn_index = session.recorded
        session.recorded += 1
        session.answered += call.reply is not None
        if self._attributed:
            session.unattributed += call.turn.prompt_message_index is None
        session.shown |= added
        session.echo.count(call.heard)
        if call.reply is None:
            raise EngineError(
                f"the engine aborted the call after {len(call.turn.output_ids)} tokens",
                503,
            )
        session.echo.remember(call.heard.place, call.message)

        def amend(reason: str, trainable: bool | None) -> None:
            self._log.amend(session.session_id, [turn_index], reason, trainable)
            session.undelivered += 1 if reason == "undelivered" else -1

        return Answered(call.reply, Delivery(amend))


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

"""The gateway: an ASGI app that speaks OpenAI Chat Completions and records every call.

A call is prepared (rendered, sampled, parsed) without touching anything, then recorded
in one step, then answered. A call that fails, that the client walks away from, or whose
session closes meanwhile is never recorded. The one recorded call that is not answered
is one that the engine itself cut short: its turn is context only.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive

from trajkit_shim import wire
from trajkit_shim.call import PreparedCall, prepare_call
from trajkit_shim.chat import ChatRequest, parse_request
from trajkit_shim.engine import Engine, EngineError
from trajkit_shim.errors import GatewayError, error_body
from trajkit_shim.limits import PromptError
from trajkit_shim.log import TurnLog
from trajkit_shim.render import ChatRenderer
from trajkit_shim.reply import Reply, reply_body, reply_events
from trajkit_shim.sampling import parse_pins
from trajkit_shim.sessions import Session, SessionStore


def create_app(
    engine: Engine,
    renderer: ChatRenderer,
    log: TurnLog,
    *,
    max_new_tokens: int = 4096,
    max_body_bytes: int = 16 << 20,
    attributed: bool = True,
) -> Starlette:
    """The gateway's ASGI app. It closes the engine and the log when it shuts down.

    Routes: ``POST /sessions`` opens a session, ``GET /sessions/{id}`` shows it,
    ``DELETE /sessions/{id}`` and ``POST /sessions/{id}/close`` close it;
    ``POST /v1/chat/completions`` with the session's id as API key;
    ``GET /v1/models``; ``GET /healthz``.

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
    attributed : bool
        Write with each turn which message each prompt token shows (the columns
        `trajkit.schema.ATTRIBUTION`), where it can be told exactly; a session counts
        the turns where not (``unattributed``). The log is twice as large with it.

    Returns
    -------
    Starlette
    """
    gateway = _Gateway(
        engine, renderer, log, max_new_tokens, max_body_bytes, attributed
    )

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        yield
        await engine.close()
        log.close()

    return Starlette(
        routes=[
            Route("/healthz", gateway.health, methods=["GET"]),
            Route("/sessions", gateway.open_session, methods=["POST"]),
            Route("/sessions/{session_id}", gateway.show_session, methods=["GET"]),
            Route("/sessions/{session_id}", gateway.close_session, methods=["DELETE"]),
            Route(
                "/sessions/{session_id}/close", gateway.close_session, methods=["POST"]
            ),
            Route("/v1/models", gateway.models, methods=["GET"]),
            Route("/v1/chat/completions", gateway.chat, methods=["POST"]),
        ],
        exception_handlers={
            GatewayError: _answer_error,
            EngineError: _answer_error,
            HTTPException: _answer_error,
            Exception: _answer_error,
        },
        lifespan=lifespan,
    )


async def _answer_error(_: Request, error: Exception) -> Response:
    if isinstance(error, PromptError):
        error = GatewayError(error.message, error.status, code=error.code)
    elif isinstance(error, EngineError):
        error = GatewayError(error.message, error.status, code="engine_error")
    elif isinstance(error, HTTPException):
        error = GatewayError(error.detail, error.status_code)
    elif not isinstance(error, GatewayError):
        # the server logs it with its traceback
        error = GatewayError("the gateway failed", 500, code="internal_error")
    return JSONResponse(error_body(error), error.status)


class _Gateway:
    """The routes, and what they share."""

    def __init__(
        self,
        engine: Engine,
        renderer: ChatRenderer,
        log: TurnLog,
        max_new_tokens: int,
        max_body_bytes: int,
        attributed: bool,
    ) -> None:
        self._engine = engine
        self._renderer = renderer
        self._log = log
        self._max_new_tokens = max_new_tokens
        self._max_body_bytes = max_body_bytes
        self._attributed = attributed
        self._sessions = SessionStore()

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
        wire.only(body, {"session_id", "sampling", "max_turns", "metadata"}, "")
        session_id, limit = body.get("session_id"), body.get("max_turns")
        metadata = body.get("metadata")
        session = self._sessions.open(
            None if session_id is None else wire.as_text(session_id, "session_id"),
            pins=parse_pins(body.get("sampling")),
            max_turns=None
            if limit is None
            else wire.as_integer(limit, "max_turns", least=1),
            metadata=None if metadata is None else wire.as_object(metadata, "metadata"),
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

    async def chat(self, request: Request) -> Response:
        session = self._sessions.authorise(request.headers.get("authorization"))
        asked = parse_request(wire.parse_object(await self._body(request)))
        session.admit()
        call = await self._attend(session, asked, request.receive)
        if call is None:
            # nobody is there to read it
            return Response(status_code=499)
        self._record(session, call)
        if call.reply is None:
            raise EngineError(
                f"the engine aborted the call after {len(call.turn.output_ids)} tokens",
                503,
            )
        if not asked.stream:
            return JSONResponse(reply_body(call.reply))
        return StreamingResponse(
            _events(call.reply, include_usage=asked.include_usage),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )

    async def _attend(
        self, session: Session, asked: ChatRequest, receive: Receive
    ) -> PreparedCall | None:
        """Prepare a call, watching client and session. None: the client is gone."""
        work = asyncio.create_task(
            prepare_call(
                asked,
                engine=self._engine,
                renderer=self._renderer,
                session_id=session.session_id,
                pins=session.pins,
                max_new_tokens=self._max_new_tokens,
                attributed=self._attributed,
            )
        )
        gone = asyncio.create_task(_disconnected(receive))
        session.calls.add(work)
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if gone.done():
                return None
            session.check_open()
            return work.result()
        finally:
            session.calls.discard(work)
            await _cancel(work, gone)

    def _record(self, session: Session, call: PreparedCall) -> None:
        """Write the turn and count it, in one step for every other call."""
        try:
            added = self._log.append(call.turn, session.recorded, session.shown)
        except OSError as error:
            raise GatewayError(
                f"the turn could not be written: {error}", 500, code="log_failed"
            ) from error
        session.recorded += 1
        session.answered += call.reply is not None
        if self._attributed:
            session.unattributed += call.turn.prompt_message_index is None
        session.shown |= added


async def _events(reply: Reply, *, include_usage: bool) -> AsyncIterator[bytes]:
    # Starlette would fetch each item of a plain iterator from a thread
    for event in reply_events(reply, include_usage=include_usage):
        yield event


async def _disconnected(receive: Receive) -> None:
    """Return when the client hangs up. The request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel what is under way and wait until it has cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

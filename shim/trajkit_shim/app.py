"""The gateway: an ASGI app that speaks several protocols and records every call.

A call is rendered, sampled and parsed without side effects, then recorded in one step,
then answered. A call that fails, whose client disconnects, or whose session closes
meanwhile is not recorded. A recorded call that the engine aborted gets an error answer
and its turn is context only, as is a turn whose answer is lost on its way.
"""

import asyncio
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
)
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

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
from trajkit_shim.answers import (
    Amend,
    Answered,
    Delivery,
    SharedCall,
    is_retry,
    request_digest,
)
from trajkit_shim.browsers import check_no_browser
from trajkit_shim.call import (
    CallContext,
    CallSettings,
    ModelCall,
    Options,
    count_tokens,
    prepare_call,
)
from trajkit_shim.chat.image_store import ImageStore
from trajkit_shim.chat.images import Images
from trajkit_shim.chat.reply import Reply
from trajkit_shim.engines.base import Engine
from trajkit_shim.errors import (
    EngineError,
    GatewayError,
    as_gateway_error,
    retry_header,
)
from trajkit_shim.pauses import Gate, Weights
from trajkit_shim.prompting.image_places import ImageModel, ImagePlaces
from trajkit_shim.prompting.known_requests import (
    ReadRequest,
    find_known,
    read_request,
)
from trajkit_shim.prompting.prompts import Prompts
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.prompting.token_cache import CacheBudget
from trajkit_shim.protocols import PROTOCOLS
from trajkit_shim.protocols.base import Verb, WireProtocol
from trajkit_shim.protocols.openai_chat import OPENAI_CHAT
from trajkit_shim.replies.parse import FormParser
from trajkit_shim.replies.parsers import form_of
from trajkit_shim.responses import Client, json_response, watched
from trajkit_shim.sessions.append_log import LogFullError
from trajkit_shim.sessions.client_identity import identify
from trajkit_shim.sessions.sessions import Session, SessionStore, closed_error
from trajkit_shim.sessions.turn_log import TurnLog
from trajkit_shim.timing import Timings

KEY_HEADER = "x-session-key"
# bytes of a request body that is parsed in well below a millisecond
_SHORT_BODY = 16 << 10
# where the clients of the protocols put their API key
_KEY_HEADERS = ("x-api-key", "x-goog-api-key")


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
    gateway = _Gateway(engine, renderer, log, options or Options())
    return Starlette(
        routes=list(gateway.routes()),
        exception_handlers=dict.fromkeys(
            (ClientDisconnect, Exception, GatewayError, HTTPException), _answer_error
        ),
        middleware=[Middleware(_no_browsers, gateway.options.hosts)],
        lifespan=gateway.lifespan,
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


class _Gateway:
    """The routes, and their shared state."""

    def __init__(
        self, engine: Engine, renderer: ChatRenderer, log: TurnLog, options: Options
    ) -> None:
        self.log, self.options = log, options
        self.timings = Timings()
        self.weights = Weights(engine)
        self.cache_budget = CacheBudget(options.cache_bytes)
        self.sessions = SessionStore(
            log.write_session,
            lambda session_id, turns: log.amend(session_id, turns, "dropped", False),
            clock=options.clock,
            max_ended=options.max_ended_sessions,
        )
        images, limits = options.images, options.image_limits
        self.images = ImageStore(log.directory / "images", limits, fsync=log.fsync)
        places = None
        if not isinstance(images, ImageModel):
            self.image_policy: Images = images
        elif not getattr(engine, "takes_images", False) or not log.images:
            what = f"{type(engine).__name__} or the log"
            raise ValueError(f"{what} takes no images")
        else:
            places = ImagePlaces(images, self.images)
            self.image_policy = self.images.limits
        self.settings = CallSettings(
            engine=engine,
            gate=Gate(wait_seconds=options.pause_wait_seconds),
            prompts=Prompts(
                renderer, options.prompts, places, check=options.check_prompts
            ),
            reply_parser=options.reply_parser
            or FormParser(form_of(renderer.chat_template)),
            options=options,
        )

    def routes(self) -> Iterator[Route]:
        """Yield all routes."""
        for path in ("/", "/healthz"):
            yield Route(path, self.health)
        yield Route("/prompts", self.prompts)
        yield from Admin(
            self.sessions,
            self.settings.gate,
            self.weights,
            self.timings,
            self.read_body,
            self.options.admin_token,
        ).routes()
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
            self.settings.gate.resume()
            await self.weights.close()
            await self.settings.engine.close()
            await self.settings.reply_parser.close()
            self.log.close()

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
        if size > self.options.max_header_bytes:
            message = (
                f"the headers are longer than {self.options.max_header_bytes} bytes"
            )
            raise GatewayError(message, 431, code="headers_too_long")
        return await json_input.read_body(request.stream(), self.options.max_body_bytes)

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

    def find_call(
        self, context: CallContext, headers: Headers
    ) -> SharedCall | Answered:
        """Return the call or reply that a retry asks for again, or begin a call."""
        session, digest, call = context.session, context.digest, None
        if session.terms.replay or is_retry(headers):
            session.check_open()
            call = session.retries.again(digest)
            session.counts.replayed += call is not None
        if call is None and self.log.full:
            raise _log_full("it has reached its maximum size")
        return call or self._begin(context)

    def _begin(self, context: CallContext) -> SharedCall:
        """Start a call; raises `GatewayError` if the session has none left."""
        session, digest, chat = context.session, context.digest, context.request
        retries, reservation = session.retries, session.admit(chat.n)

        async def prepare(on_partial: Callable[[Reply], None]) -> list[ModelCall]:
            # several replies are streamed once all are complete
            streamed = on_partial if chat.stream and chat.n == 1 else None
            prepared = await prepare_call(context, reservation, streamed)
            await self.images.write(chat.images)
            return prepared

        @timing.step()
        def record() -> Answered:
            # closing the session cancelled the work
            if session.closed:
                raise closed_error(session.session_id)
            calls: list[ModelCall] = call.work.result()
            restored = calls[0].restored
            last = next(restored.replies, None)
            if last is not None:
                retries.confirm(restored.positions[last])
            start = session.agent_starts.find(restored, context.caller)
            again = None if retried and retried.delivery.confirmed else retried
            shared = {
                "resend_of": retries.request_ids.get(digest),
                "retry_of": again and again.request_id,
                **(asdict(start) if start else {}),
            }
            answered = self._record(context, calls, shared)
            if again is not None:
                session.counts.retried += 1
                if not self.options.train_retried:
                    again.delivery.retry()
            session.counts.tools_left_out.update(chat.left_out)
            session.counts.sampling_overruled.update(calls[0].ignored_params())
            retries.remember(digest, answered)
            return answered

        def over() -> None:
            reservation.release()
            session.calls.discard(call.work)
            if retries.running.get(digest) is call:
                del retries.running[digest]

        call = SharedCall(prepare, record, over)
        retried = retries.retried(digest, session.clock.time())
        timing.current.get().sampled = True
        session.calls.add(call.work)
        retries.running[digest] = call
        return call

    def _record(
        self,
        context: CallContext,
        calls: list[ModelCall],
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
                amends.append(self._record_turn(context, call))
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
            Delivery(amend, context.session.clock.time),
        )

    def _record_turn(self, context: CallContext, call: ModelCall) -> Amend:
        """Write and count one turn; return what amends it."""
        session, turn = context.session, call.turn
        counts = session.counts
        turn_index = counts.turns
        try:
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
        if self.options.attributed:
            counts.unattributed += turn.prompt_message_index is None
        session.replies.count(call.restored)
        if not answered:
            # it is context only by itself
            return lambda reason, trainable: None
        session.replies.remember(call.restored.position, call.message)
        session.agent_starts.add(turn_index, turn.agent_id, call.message)
        if call.path is not None:
            known = context.read.answered(call.restored)
            session.paths.remember(call.path, self.cache_budget, known)

        def amend(reason: str, trainable: bool | None) -> None:
            # a dropped turn stays dropped
            if turn_index >= counts.dropped:
                self.log.amend(session.session_id, [turn_index], reason, trainable)
            counts.undelivered += {"undelivered": 1, "delivered": -1}.get(reason, 0)

        return amend


def _log_full(why: str) -> GatewayError:
    return GatewayError(f"the log is full: {why}", 507, code="log_full")


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """A path of a protocol, as an ASGI app."""

    gateway: _Gateway
    protocol: WireProtocol
    verb: Verb

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        request = Request(scope, receive, send)
        session = self.gateway.sessions.authorise(_session_claims(request))
        timed = timing.begin()
        with session.request() as answered:
            await self._answer(request, session, send)
            answered()
        self.gateway.timings.add(timed)

    async def _answer(self, request: Request, session: Session, send: Send) -> None:
        gateway, protocol, verb = self.gateway, self.protocol, self.verb
        body = await gateway.read_body(request)
        read = await gateway.read(protocol, verb, session, body)
        context = CallContext(
            settings=gateway.settings,
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
            found = gateway.find_call(context, request.headers)
            if isinstance(found, Answered):
                await client.send_reply(found)
            else:
                await client.answer(found)


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

"""One model call, from the chat request to what is recorded and answered.

No step here changes what other calls read, so a call that fails or is cancelled leaves no
trace. At most it takes room for ids that a later prompt then cannot use.
"""

import asyncio
import json
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

import numpy as np
from starlette.datastructures import Headers
from starlette.requests import Request

from trajkit.turns import tools_key
from trajkit_shim import json_input
from trajkit_shim.chat.images import (
    ImageLimits,
    ImageModel,
    ImagePlaces,
    Images,
    ImageStore,
    NoImages,
    PlacedImage,
    hashes_of,
    texts_of,
)
from trajkit_shim.chat.request import (
    ChatRequest,
    Identity,
    Parsed,
    Reply,
    Required,
    Usage,
    canonical_reply,
    ignored_params,
    is_fixed,
    logged_message,
    make_reply,
    resolve,
    without_fixed,
)
from trajkit_shim.delivery import PendingReply, is_retry
from trajkit_shim.engines import base, checks
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.json_input import Json, parse_object
from trajkit_shim.pauses import Pause
from trajkit_shim.prompting.conversation import (
    Budget,
    Node,
    RestoredRequest,
    next_position,
)
from trajkit_shim.prompting.prompts import Mode, Past, Prompt, Prompts
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.protocols.base import Verb, WireProtocol
from trajkit_shim.replies.parse import (
    THINK,
    FormParser,
    ReplyParser,
    grammar,
    opens_reasoning,
    tags_of,
)
from trajkit_shim.replies.parsers import form_of
from trajkit_shim.sessions.client_identity import Caller
from trajkit_shim.sessions.sessions import (
    Session,
    SessionStore,
    closed_error,
    writing,
)
from trajkit_shim.sessions.turn_log import LoggedTurn, TurnLog


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a gateway (`app.create_app`)."""

    # maximum length of a reply, and its default; the room left in the context limits it too
    max_new_tokens: int = 4096
    # limits of a request, which is rejected with 413, 431 and 413 respectively
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 32 << 10
    # bytes of all requests' bodies at once; beyond it requests get 503
    max_work_bytes: int = 4 << 30
    max_messages: int = 10_000
    # what the model does with images, which are stored in the log's folder `images`; or
    # reject a request with an image (400), or replace the image by a text
    images: NoImages | ImageModel = "refuse"
    # sizes of images, and whether those at URLs are fetched (default: no)
    image_limits: ImageLimits | None = None
    # how long a streaming client waits for its first event, and between keep-alive events
    ping_seconds: float = 10.0
    # record which message each prompt token belongs to, where it can be determined exactly
    # (`trajkit.schema.ATTRIBUTION`); a log in full form is twice as large with it, one in
    # delta form about 8 % larger
    attributed: bool = True
    # train the harness's own calls too (`sessions.client_identity`)
    train_side_calls: bool = False
    # parses replies, and is closed with the app; default: the gateway's own parser, for
    # the form of tool calls that the chat template asks for
    reply_parser: ReplyParser | None = None
    # append new messages to the token ids of an earlier turn if template and request
    # permit, or render every prompt from its messages (`prompting.prompts`)
    prompts: Mode = "append"
    # whether replies stay as sampled where the template would rewrite them
    past: Past = "auto"
    # variables of the chat template, unless a session or request sets them
    variables: Mapping[str, object] = field(default_factory=dict)
    # memory limit of all sessions for `append`
    cache_bytes: int = 1 << 30
    # token required for the trainer's routes; default: none
    admin_token: str | None = None
    # names that clients use for this machine, besides addresses and names of private
    # networks
    hosts: Collection[str] = ()
    # how long a call waits for the end of a pause before it is rejected with 503
    pause_wait_seconds: float = 300.0
    # ended sessions to remember: their calls are answered with 410, later with 401
    max_ended_sessions: int = 10_000
    # measures idle sessions and how old answers are; default: the event loop
    clock: asyncio.AbstractEventLoop | None = None


# bytes of a request body that is parsed in well below a millisecond
_SHORT_BODY = 16 << 10
# a longer prompt than this many contexts is not counted
_COUNTED_CONTEXTS = 4


async def read_body(request: Request, options: Options) -> bytes:
    """Return a request's body; reject too long headers or a too long body."""
    size = sum(len(name) + len(value) for name, value in request.headers.raw)
    if size > options.max_header_bytes:
        message = f"the headers are longer than {options.max_header_bytes} bytes"
        raise GatewayError(message, 431, code="headers_too_long")
    return await json_input.read_body(request.stream(), options.max_body_bytes)


class Gateway:
    """The way of a call: it is read, rendered, sampled, parsed and recorded."""

    def __init__(
        self,
        engine: base.Engine,
        renderer: ChatRenderer,
        log: TurnLog,
        options: Options,
    ) -> None:
        self.engine, self.log, self.options = engine, log, options
        # every call passes it on the way to the engine
        self.pause = Pause(engine, wait_seconds=options.pause_wait_seconds)
        self._n_bytes = 0  # of the bodies of requests at work
        self.cache_budget = Budget(options.cache_bytes)
        self.sessions = SessionStore(
            log, clock=options.clock, max_ended=options.max_ended_sessions
        )
        # requests for the number of tokens, which take much memory
        self.counting = asyncio.Semaphore(2)
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
        self.prompts = Prompts(renderer, options.prompts, places, past=options.past)
        self.reply_parser = options.reply_parser or FormParser(
            form_of(renderer), tags_of(renderer.chat_template)
        )

    async def read(
        self, protocol: WireProtocol, verb: Verb, body: bytes
    ) -> ChatRequest:
        images, count = self.image_policy, verb == "count"

        def parse() -> ChatRequest:
            return protocol.read(parse_object(body), images, count=count)

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
            chat = replace(chat, images=self.images.take(chat.images))
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
        fixed = session.options.variables
        for name in asked.keys() & fixed.keys():
            if asked[name] != fixed[name]:
                chat.ignored[f"chat_template_kwargs.{name}"] += 1
        return {**self.options.variables, **asked, **fixed}

    async def count(self, context: "CallContext") -> int:
        """Return the length of a prompt that the session could still send.

        Only some are counted at once, because a prompt's tokens take much more memory than
        its text.
        """
        session = context.session
        session.check_open()
        session.counts.token_counts += 1
        info = await self.engine.info()
        most = _COUNTED_CONTEXTS * info.max_context_tokens
        async with self.counting:
            _, prompt = await asyncio.to_thread(build_prompt, context, most)
        session.check_limit("prompt_tokens", len(prompt.ids))
        return len(prompt.ids)

    def find_call(self, context: "CallContext", headers: Headers) -> PendingReply:
        """Return the call that a retry asks for again, or begin one.

        Raises `GatewayError`: the session may make no more calls, or the log is full.
        """
        session, digest = context.session, context.digest
        if session.options.replay or is_retry(headers):
            session.check_open()
            if call := session.again(digest):
                session.counts.replayed += 1
                return call
        if self.log.full:
            message = "the log is full: it has reached its maximum size"
            raise GatewayError(message, 507, code="log_full")
        session.admit()
        call = PendingReply(partial(self._run, context), session.amend, digest)
        session.calls[call] = None
        call.work.add_done_callback(lambda _: session.calls.pop(call, None))
        return call

    async def _run(self, context: "CallContext", call: PendingReply) -> Reply:
        """Sample and record a call.

        Raises `GatewayError`: an invalid request, or a session without tokens for it.
        `EngineError`: the prompt is invalid, or the engine failed.
        """
        try:
            info = await self.engine.info()
            most = info.max_context_tokens
            limit = context.session.options.limits.get("max_context_tokens")
            info = replace(info, max_context_tokens=min(limit or most, most))
            made = await asyncio.to_thread(NewTurn, context, info)
            made.resolve_sampling()
            await made.run()
            await self.images.write(context.chat.images)
            return self._record(context, call, made)
        except GatewayError as error:
            context.session.counts.failed += error.status >= 500
            raise

    def _record(
        self, context: "CallContext", call: PendingReply, made: "NewTurn"
    ) -> Reply:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """One request for a reply, and what it belongs to."""

    gateway: Gateway
    session: Session
    protocol: WireProtocol
    caller: Caller
    chat: ChatRequest
    digest: bytes  # `delivery.request_digest`
    # of the chat template, and the settings of the client that are none
    variables: Mapping[str, object] = field(default_factory=dict)


def build_prompt(
    context: CallContext, max_tokens: int, *, attributed: bool = False
) -> tuple[RestoredRequest, Prompt]:
    session, request = context.session, context.chat
    prompts = context.gateway.prompts
    # every template writes the last message; this spares a long one all other steps
    for last in texts_of(request.messages[-1]["content"]):
        prompts.renderer.check_length(last, max_tokens)
    restored = session.conversation.restore(request.messages)
    prompt = prompts.build(
        restored,
        request.tools,
        context.variables,
        attributed=attributed,
        max_tokens=max_tokens,
    )
    return restored, prompt


class NewTurn:
    """One reply to a request, from its prompt to what is recorded and answered."""

    turn: LoggedTurn
    # None: the engine did not complete it, and its turn is context only
    reply: Reply | None = None
    # for the session's conversation; its turn is set when it is recorded
    node: Node | None = None

    def __init__(self, context: CallContext, info: base.EngineInfo) -> None:
        """Render the request, or extend the prompt of an earlier turn."""
        self._context, self._info = context, info
        self._gateway, self._request = context.gateway, context.chat
        self._options, prompts = self._gateway.options, self._gateway.prompts
        self._renderer, self._started_at = prompts.renderer, datetime.now(UTC)
        max_tokens, attributed = info.max_context_tokens, self._options.attributed
        # the request's messages, with the session's replies restored
        self.restored, prompt = build_prompt(context, max_tokens, attributed=attributed)
        messages, self._prompt = self.restored.messages, prompt
        # the prompt as the engine consumes it, and its images, also with their bytes
        self._ids, self._images = prompt.ids, list[PlacedImage]()
        self._pixels: Sequence[base.PromptImage] = ()
        if prompts.places is not None and hashes_of(messages):
            self._images = prompts.places.items(prompt.ids, messages)
            self._ids = prompts.places.engine_ids(prompt.ids)
            self._pixels = prompts.places.load(self._images)
        # those of the earlier turn were checked then
        n_checked = 0 if self._images else prompt.n_base
        checks.check_prompt(self._ids, info, n_checked)
        # it ends within the reply's reasoning
        self._opened = opens_reasoning(self._renderer, prompt.ids)

    def resolve_sampling(self) -> None:
        session = self._context.session
        n_prompt, limit = len(self._prompt.ids), self._options.max_new_tokens
        session.check_limit("prompt_tokens", n_prompt)
        remaining = session.check_limit("output_tokens", 1)
        fixed, client = session.options.fixed, session.options.client_sampling
        required, self.overruled = self._request.required, list[str]()
        if is_fixed("response_format", fixed, client) and required.schema is not None:
            required = replace(required, schema=None)
            self.overruled.append("response_format")
        if is_fixed("tool_choice", fixed, client) and required.limits_calls:
            required = Required(schema=required.schema)
            self.overruled.append("tool_choice")
        self.sampling = resolve(
            without_fixed(self._request.sampling, fixed, client),
            fixed,
            max_tokens=limit if remaining is None else min(limit, remaining),
            room=self._info.max_context_tokens - n_prompt,
            end_ids=self._renderer.end_ids,
            client=client,
            structural_tag=grammar(
                replace(self._request, required=required),
                self._gateway.reply_parser.form,
                fixed.extra,
                opened=self._opened,
                reasons=THINK in self._renderer.chat_template,
            ),
        )
        self.overruled += ignored_params(self._request.sampling, self.sampling)

    async def run(self) -> None:
        self._request_id = uuid.uuid4().hex
        self._identity = Identity(
            self._context.protocol.call_prefix, short=self._renderer.short_call_ids
        )
        sample = await self._gateway.pause.sample(self._sample_once)
        checks.check_sample(sample, self._ids, self.sampling, self._info)
        text = self._renderer.decode(sample.output_ids, ended=sample.ended)
        stops = self.sampling.stop if sample.ended else ()
        found = [(i, stop) for stop in stops if (i := text.find(stop)) >= 0]
        # clients never see the stop string
        start, stop = min(found, default=(None, None))
        text = text[:start]
        parsed = await self._gateway.reply_parser.parse(
            text, self._request.tools, self._ids, opened=self._opened
        )
        self._finish(sample, parsed, stop, datetime.now(UTC))

    async def _sample_once(self) -> base.Sample:
        request = base.EngineRequest(
            prompt_ids=self._ids,
            sampling=self.sampling,
            request_id=self._request_id,
            session_id=self._context.session.session_id,
            images=self._pixels,
        )
        return await self._gateway.engine.generate(request)

    def _finish(
        self,
        sample: base.Sample,
        parsed: Parsed,
        stop_sequence: str | None,
        ended_at: datetime,
    ) -> None:
        """Put reply and turn together."""
        prompt, n_output = self._prompt, len(sample.output_ids)
        aborted, n_reasoning = not sample.complete, 0
        if parsed.reasoning is not None:
            n_reasoning = n_output
            if parsed.sampled:
                # None if the end of reasoning is spelled with other tokens
                n_reasoning = self._renderer.end_of_reasoning(sample.output_ids) or 0
        reply = make_reply(
            parsed,
            sample.finish_reason or "",
            model=self._info.model,
            usage=Usage(
                prompt_tokens=len(prompt.ids),
                output_tokens=n_output,
                cached_tokens=sample.cached_tokens,
                reasoning_tokens=n_reasoning,
            ),
            identity=self._identity,
            stop_sequence=stop_sequence,
        )
        message = canonical_reply(reply)
        response, names = logged_message(message), None
        if self._options.attributed:
            names = self.restored.tool_names[prompt.n_known :]
        caller = self._context.caller
        if not aborted:
            self.reply = reply
            ids, ends = sample.output_ids, self._renderer.end_ids
            self.node = Node(
                message=message,
                position=self.restored.position,
                after=next_position(self.restored.position, response.key),
                turn=-1,
                agent_id=caller.agent_id,
                ids=np.concatenate([prompt.ids, ids]),
                between=prompt.between,
                offered=prompt.offered,
                closed=bool(len(ids)) and int(ids[-1]) in ends,
                base=prompt.base,
            )
        untrained = caller.is_side_call and not self._options.train_side_calls
        self.turn = LoggedTurn(
            session_id=self._context.session.session_id,
            request_id=self._request_id,
            model=self._info.model,
            prompt_ids=prompt.ids,
            output_ids=sample.output_ids,
            output_logprobs=sample.output_logprobs,
            finish_reason=sample.finish_reason,
            messages=self.restored.logged,
            response=None if aborted else response,
            use_tool=bool(parsed.calls),
            ill_formed=parsed.ill_formed,
            trainable=not aborted and not untrained,
            weight_versions=sample.weight_versions,
            sampling=json.dumps(asdict(self.sampling), sort_keys=True),
            cached_tokens=sample.cached_tokens,
            routed_experts=sample.routed_experts,
            sampling_mask=sample.sampling_mask,
            started_at=self._started_at,
            ended_at=ended_at,
            protocol=self._context.protocol.name,
            tools_key=tools_key(self._request.tools or []),
            **asdict(caller),
            prompt_message_index=prompt.message_index,
            message_tool_names=names,
            prompt_built=prompt.built,
            render_reason=prompt.reason,
            prompt_digest=prompt.digest,
            mm_items=[asdict(image) for image in self._images] or None,
        )

"""One model call, from the chat request to what is recorded and answered.

Before the turn is recorded, a call leaves nothing in its session but its request, with
which later ones may begin (`Conversation.restore`).
"""

import asyncio
import json
import uuid
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial

import numpy as np
from starlette.datastructures import Headers
from starlette.requests import Request

from trajkit_shim import json_input, replies
from trajkit_shim.chat import request as chats
from trajkit_shim.chat.images import (
    ImageLimits,
    ImageModel,
    ImagePlaces,
    Images,
    ImageStore,
    NoImages,
    hashes_of,
    texts_of,
)
from trajkit_shim.chat.request import ChatRequest, Reply
from trajkit_shim.delivery import PendingReply, is_retry
from trajkit_shim.engines import base, checks
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.json_input import Body, Json
from trajkit_shim.pauses import Pause
from trajkit_shim.prompting.conversation import Budget, Node, next_position
from trajkit_shim.prompting.prompts import Mode, Past, Prompt, Prompts, hashed
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.protocols.base import Verb, WireProtocol
from trajkit_shim.sessions.client_identity import identify
from trajkit_shim.sessions.sessions import Session, SessionStore, closed_error, writing
from trajkit_shim.sessions.turn_log import TurnLog

# Bytes: to read or render so many takes less time than a switch of threads. More would
# delay every other call.
_SHORT = 32 << 10
# the same for bytes that are only hashed
_HASHED = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a gateway (`app.create_app`)."""

    # maximum length of a reply, and its default; the context limits it too
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
    image_limits: ImageLimits | None = None
    # how long a streaming client waits for its first event, and between keep-alive events
    ping_seconds: float = 10.0
    # record which message each prompt token belongs to (`trajkit.schema.ATTRIBUTION`); a
    # log in full form is twice as large with it, one in delta form about 8 % larger
    attributed: bool = True
    # train the harness's own calls too (`sessions.client_identity`)
    train_side_calls: bool = False
    # parses replies, and is closed with the app; default: the gateway's own parser
    reply_parser: replies.ReplyParser | None = None
    # extend the token ids of an earlier turn where possible, or render every prompt
    prompts: Mode = "append"
    # whether replies stay as sampled where the template would rewrite them
    past: Past = "auto"
    # variables of the chat template, unless a session or request sets them
    variables: Mapping[str, object] = field(default_factory=dict)
    # memory limit of all sessions for `append`
    cache_bytes: int = 1 << 30
    # token required for the trainer's routes; default: none
    admin_token: str | None = None
    # names that clients use for this machine, besides addresses and private names
    hosts: Collection[str] = ()
    # how long a call waits for the end of a pause before it is rejected with 503
    pause_wait_seconds: float = 300.0
    # ended sessions to remember: their calls are answered with 410, later with 401
    max_ended_sessions: int = 10_000
    # measures idle sessions and how old answers are; default: the event loop
    clock: asyncio.AbstractEventLoop | None = None


async def read_body(request: Request, options: Options) -> bytes:
    """Return a request's body; reject too long headers or a too long body."""
    size = sum(len(name) + len(value) for name, value in request.headers.raw)
    if size > options.max_header_bytes:
        message = f"the headers are longer than {options.max_header_bytes} bytes"
        raise GatewayError(message, 431, code="headers_too_long")
    return await json_input.read_body(request.stream(), options.max_body_bytes)


class Gateway:
    """What all calls share."""

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
        # requests for the number of tokens; a prompt's take much more memory than its text
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
        self.reply_parser = options.reply_parser or replies.FormParser(
            replies.form_of(renderer), replies.tags_of(renderer.chat_template)
        )

    async def read(
        self, session: Session, protocol: WireProtocol, verb: Verb, data: bytes
    ) -> tuple[ChatRequest, Body]:
        images = self.image_policy
        text_only = isinstance(images, str)
        # images are taken from each request
        again = text_only and verb != "count"
        listed = protocol.listed if again else ""
        purpose = f"{protocol.name} {verb}\0".encode()
        earlier = session.conversation.bodies if again else []

        def begin() -> Body:
            return Body(data, listed, purpose, earlier)

        # it hashes what the bodies share
        short = len(data) <= _HASHED
        body = begin() if short else await asyncio.to_thread(begin)

        def parse() -> ChatRequest:
            value, known = body.parse(), body.known
            return protocol.read(value, images, known)

        # images are decoded
        short = text_only and body.n_new_bytes <= _SHORT
        chat = parse() if short else await asyncio.to_thread(parse)
        limit = self.options.max_messages
        if len(chat.messages) > limit:
            message = f"{len(chat.messages)} messages; the limit is {limit}"
            raise GatewayError(message, 413, code="too_many_messages")
        if not text_only:
            chat = replace(chat, images=self.images.take(chat.images))
        return (replace(chat, stream=True) if verb == "stream" else chat), body

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


class Call:
    """One request for a reply, from its messages to what is recorded and answered."""

    def __init__(
        self,
        gateway: Gateway,
        session: Session,
        protocol: WireProtocol,
        headers: Mapping[str, str],
        chat: ChatRequest,
        body: Body,
    ) -> None:
        self._gateway, self._session, self._protocol = gateway, session, protocol
        self._headers, self._chat = headers, chat
        self._body, self._digest = body, body.digest
        self._caller = identify(headers, chat)
        self._renderer = gateway.prompts.renderer
        self._request_id, self._started_at = uuid.uuid4().hex, datetime.now(UTC)
        # the template's variables: the session's, the request's, the gateway's
        asked = chat.thinking.resolve(self._renderer.variables, chat.ignored)
        fixed = session.options.variables
        for name in asked.keys() & fixed.keys():
            if asked[name] != fixed[name]:
                chat.ignored[f"chat_template_kwargs.{name}"] += 1
        self._variables: Json = {**gateway.options.variables, **asked, **fixed}

    async def count(self) -> int:
        """Return the length of a prompt that the session could still send."""
        session = self._session
        session.check_open()
        session.counts.token_counts += 1
        info = await self._gateway.engine.info()
        # a longer prompt is not counted
        most = 4 * info.max_context_tokens
        async with self._gateway.counting:
            make = partial(self._make_prompt, most, attributed=False, keep=False)
            prompt = await asyncio.to_thread(make)
        session.check_limit("prompt_tokens", len(prompt.ids))
        return len(prompt.ids)

    def begin(self) -> PendingReply:
        """Return the pending reply that a retry asks for again, or begin one.

        Raises `GatewayError`: the session may make no more calls, or the log is full.
        """
        session = self._session
        if session.options.replay or is_retry(self._headers):
            session.check_open()
            if pending := session.again(self._digest):
                session.counts.replayed += 1
                return pending
        if self._gateway.log.full:
            message = "the log is full: it has reached its maximum size"
            raise GatewayError(message, 507, code="log_full")
        session.admit()
        pending = PendingReply(self._run, session.amend, self._digest)
        session.calls[pending] = None
        pending.work.add_done_callback(lambda _: session.calls.pop(pending, None))
        return pending

    async def _run(self, pending: PendingReply) -> Reply:
        """Sample and record the reply.

        Raises `GatewayError`: an invalid request, or a session without tokens for it.
        `EngineError`: the prompt is invalid, or the engine failed.
        """
        gateway, session = self._gateway, self._session
        try:
            info = await gateway.engine.info()
            self._info = info
            limit = session.options.limits.get("max_context_tokens")
            if limit is not None and limit < info.max_context_tokens:
                self._info = replace(info, max_context_tokens=limit)
            try:
                if self._body.n_bytes <= _SHORT:
                    self._prepare()
                else:
                    await asyncio.to_thread(self._prepare)
            finally:
                # the request is kept, whatever becomes of the call
                session.conversation.count_kept(gateway.cache_budget)
            sampling = self._sampling()

            async def sample_once() -> base.Sample:
                return await gateway.engine.generate(
                    base.EngineRequest(
                        prompt_ids=self._ids,
                        sampling=sampling,
                        request_id=self._request_id,
                        session_id=session.session_id,
                        images=self._pixels,
                    )
                )

            sample = await gateway.pause.sample(sample_once)
            checks.check_sample(sample, self._ids, sampling, self._info)
            text = self._renderer.decode(sample.output_ids, ended=sample.ended)
            stops = sampling.stop if sample.ended else ()
            found = [(i, stop) for stop in stops if (i := text.find(stop)) >= 0]
            # clients never see the stop string
            start, stop = min(found, default=(None, None))
            text = text[:start]
            parsed = await gateway.reply_parser.parse(
                text, self._chat.tools, opened=self._opened
            )
            ended_at = datetime.now(UTC)
            reply = self._reply(sample, parsed, stop)
            self._message = chats.canonical_reply(reply)
            turn = self._turn(reply, sample, sampling)
            await gateway.images.write(self._chat.images)
            self._record(pending, sample, {**turn, "ended_at": ended_at})
        except GatewayError as error:
            session.counts.failed += error.status >= 500
            raise
        return reply

    def _make_prompt(
        self, max_tokens: int, *, attributed: bool, keep: bool = True
    ) -> Prompt:
        # refuse a last message that is too long before anything is rendered
        for last in texts_of(self._chat.messages[-1]["content"]):
            self._renderer.check_length(last, max_tokens)
        # the request's messages, with the session's replies restored
        body = self._body if self._body.known else None
        conversation = self._session.conversation
        self._restored = conversation.restore(self._chat.messages, body, keep=keep)
        return self._gateway.prompts.build(
            self._restored,
            self._chat.tools,
            self._variables,
            attributed=attributed,
            max_tokens=max_tokens,
        )

    def _prepare(self) -> None:
        """Render the request, or extend the prompt of an earlier turn."""
        most, options = self._info.max_context_tokens, self._gateway.options
        self._prompt = prompt = self._make_prompt(most, attributed=options.attributed)
        places = self._gateway.prompts.places
        # the prompt as the engine consumes it, and its images, also with their bytes
        self._ids, self._images, self._pixels = prompt.ids, [], []
        messages = [] if places is None else self._restored.messages
        if places is not None and hashes_of(messages):
            self._images = places.items(prompt.ids, messages)
            self._ids = places.engine_ids(prompt.ids)
            self._pixels = places.load(self._images)
        # the ids of the extended turn were checked when it was recorded
        n_checked = 0 if self._images else prompt.n_base
        checks.check_prompt(self._ids, self._info, n_checked)
        # it ends within the reply's reasoning
        self._opened = replies.opens_reasoning(self._renderer, prompt.ids)

    def _sampling(self) -> base.Sampling:
        session, n_prompt = self._session, len(self._prompt.ids)
        limit = self._gateway.options.max_new_tokens
        session.check_limit("prompt_tokens", n_prompt)
        remaining = session.check_limit("output_tokens", 1)
        fixed, client = session.options.fixed, session.options.client_sampling
        required, self._overruled = self._chat.required, list[str]()
        if (
            chats.is_fixed("response_format", fixed, client)
            and required.schema is not None
        ):
            required = replace(required, schema=None)
            self._overruled.append("response_format")
        if chats.is_fixed("tool_choice", fixed, client) and required.limits_calls:
            required = chats.Required(schema=required.schema)
            self._overruled.append("tool_choice")
        sampling, overruled = chats.resolve(
            self._chat.sampling,
            fixed,
            client,
            max_tokens=limit if remaining is None else min(limit, remaining),
            room=self._info.max_context_tokens - n_prompt,
            stop_token_ids=self._renderer.end_ids,
            structural_tag=replies.grammar(
                self._chat
                if required is self._chat.required
                else replace(self._chat, required=required),
                self._gateway.reply_parser.form,
                fixed.extra,
                opened=self._opened,
                reasons=replies.THINK in self._renderer.chat_template,
            ),
        )
        self._overruled += overruled
        return sampling

    def _reply(
        self, sample: base.Sample, parsed: chats.Parsed, stop_sequence: str | None
    ) -> Reply:
        n_output, n_reasoning = len(sample.output_ids), 0
        if parsed.reasoning is not None:
            n_reasoning = n_output
            if parsed.sampled:
                # None if the end of reasoning is spelled with other tokens
                n_reasoning = self._renderer.end_of_reasoning(sample.output_ids) or 0
        return chats.make_reply(
            parsed,
            sample.finish_reason or "",
            model=self._info.model,
            usage=chats.Usage(
                prompt_tokens=len(self._prompt.ids),
                output_tokens=n_output,
                cached_tokens=sample.cached_tokens,
                reasoning_tokens=n_reasoning,
            ),
            call_prefix=self._protocol.call_prefix,
            short_ids=self._renderer.short_call_ids,
            stop_sequence=stop_sequence,
        )

    def _turn(
        self, reply: Reply, sample: base.Sample, sampling: base.Sampling
    ) -> dict[str, object]:
        """What is logged of the call, but for what other calls decide."""
        prompt, options = self._prompt, self._gateway.options
        names = self._restored.tool_names[prompt.n_known :]
        untrained = self._caller.is_side_call and not options.train_side_calls
        spans = [span._asdict() for span in sample.weight_versions]
        self._logged = chats.logged_message(self._message)
        return {
            "session_id": self._session.session_id,
            "request_id": self._request_id,
            "model": self._info.model,
            "prompt_ids": prompt.ids,
            "output_ids": sample.output_ids,
            "output_logprobs": sample.output_logprobs,
            "finish_reason": sample.finish_reason,
            "messages": self._restored.logged,
            # of a reply that was broken off: no client will send it back
            "response": self._logged if sample.complete else None,
            "use_tool": bool(reply.calls),
            "ill_formed": reply.ill_formed,
            "trainable": sample.complete and not untrained,
            "weight_versions": spans or None,
            "sampling": json.dumps(sampling.values(), sort_keys=True),
            "cached_tokens": sample.cached_tokens,
            "routed_experts": sample.routed_experts,
            "sampling_mask": sample.sampling_mask,
            "started_at": self._started_at,
            "protocol": self._protocol.name,
            "tools_key": self._restored.offered.key,
            **self._caller._asdict(),
            "prompt_message_index": prompt.message_index,
            "message_tool_names": names if options.attributed else None,
            "prompt_built": prompt.built,
            "render_reason": prompt.reason,
            "prompt_digest": prompt.hasher.digest(),
            "mm_items": self._images or None,
        }

    def _record(
        self, pending: PendingReply, sample: base.Sample, turn: dict[str, object]
    ) -> None:
        """Write and count the turn.

        Does not await, so no other call interferes. Raises `EngineError` if the engine
        did not complete the reply.
        """
        session, prompt, restored = self._session, self._prompt, self._restored
        counts, conversation = session.counts, session.conversation
        # closing the session cancelled the work
        if session.closed:
            raise closed_error(session.session_id)
        # of earlier turns; a full disk may have room again
        session.write_amendments()
        caller, index = self._caller, counts.turns
        named = caller.harness is not None
        agents = caller.agent_id, caller.parent_agent_id
        turn |= conversation.started_by(restored, *agents, named=named)
        turn["delta"] = conversation.delta(restored, prompt.ids, prompt.base)
        with writing("the turn"):
            self._gateway.log.append(turn, index, conversation.logged)
        n_output = len(sample.output_ids)
        counts.prompts[prompt.reason or "append"] += 1
        counts.turns += 1
        counts.prompt_tokens += len(prompt.ids)
        counts.output_tokens += n_output
        if self._gateway.options.attributed:
            counts.unattributed += prompt.message_index is None
        conversation.count(restored)
        if not sample.complete:
            reason = f"with {sample.finish_reason or 'no reason'}"
            after = f"the engine broke off the call after {n_output} tokens"
            raise EngineError(f"{after}, {reason}", 503)
        counts.answered += 1
        ids = sample.output_ids
        node = Node(
            message=self._message,
            position=restored.position,
            after=next_position(restored.position, self._logged.key),
            turn=index,
            agent_id=caller.agent_id,
            own_ids=np.concatenate([prompt.ids, ids]),
            hasher=hashed(ids, prompt.hasher),
            between=prompt.between,
            offered=prompt.offered,
            closed=n_output > 0 and int(ids[-1]) in self._renderer.end_ids,
            base=prompt.base,
        )
        conversation.add(node, self._gateway.cache_budget)
        pending.turn = index
        session.remember(pending)
        counts.tools_left_out.update(self._chat.left_out)
        counts.ignored.update(self._chat.ignored)
        counts.sampling_overruled.update(self._overruled)

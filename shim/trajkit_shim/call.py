"""One model call, from the body of its request to what is recorded and answered.

Before the turn is recorded, a call leaves nothing in its session but its request, with
which later ones may begin (`Conversation.restore`).
"""

import asyncio
import json
import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from hashlib import blake2b
from typing import Any

import numpy as np
from starlette.datastructures import Headers

from trajkit_shim import replies
from trajkit_shim.chat import images as media
from trajkit_shim.chat import request as chats
from trajkit_shim.chat.request import ChatRequest, Reply
from trajkit_shim.delivery import PendingReply, is_retry
from trajkit_shim.engines import base, checks
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.json_input import Json, add_counts, parse_object
from trajkit_shim.pauses import Pause
from trajkit_shim.prompting.conversation import Budget, KeptIds, Node, next_position
from trajkit_shim.prompting.prompts import Mode, Past, Prompt, Prompts
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.protocols.base import Verb, WireProtocol
from trajkit_shim.sessions.client_identity import identify
from trajkit_shim.sessions.sessions import Session, SessionStore, closed_error, writing
from trajkit_shim.sessions.turn_log import TurnLog

# Bytes of a body that are read and rendered in less time than a switch of threads takes.
# More would delay every other call.
_SHORT = 32 << 10

# what the log has of a sample under the same name
_SAMPLED = "output_ids output_logprobs finish_reason cached_tokens routed_experts "
_SAMPLED += "sampling_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a gateway (`app.create_app`)."""

    # length of a reply that neither its client nor its session limits
    max_new_tokens: int = 4096
    # limit of a request's body, beyond which it is rejected with 413
    max_body_bytes: int = 16 << 20
    # bytes of all requests' bodies at once, of which a session may have as many as are
    # left; beyond it requests get 503
    max_work_bytes: int = 4 << 30
    max_messages: int = 10_000  # of a request, beyond which it is rejected with 413
    # how the model takes images; None: they are refused
    images: media.ImageModel | None = None
    # how long a streaming client waits for its first event, and between keep-alive events
    ping_seconds: float = 10.0
    train_side_calls: bool = False  # `sessions.client_identity`
    # parses replies, and is closed with the app; default: the gateway's own parser
    reply_parser: replies.ReplyParser | None = None
    # extend the token ids of an earlier turn where possible, or render every prompt
    prompts: Mode = "append"
    # whether replies stay as sampled where the template would rewrite them
    past: Past = "auto"
    # variables of the chat template, unless a session or request sets them
    variables: Mapping[str, object] = field(default_factory=dict)
    cache_bytes: int = 1 << 30  # memory limit of all sessions for `append`
    admin_token: str | None = None  # required for the trainer's routes
    # names that clients use for this machine, besides addresses and private names
    hosts: Collection[str] = ()
    # measures how long sessions are idle; default: the event loop
    clock: asyncio.AbstractEventLoop | None = None


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
        self.pause = Pause(engine)
        self._n_bytes = 0  # of the bodies of requests at work
        self.cache_budget = Budget(options.cache_bytes)
        self.sessions = SessionStore(log, clock=options.clock)
        # requests for the number of tokens; a prompt's take much more memory than its text
        self.counting = asyncio.Semaphore(2)
        images, past = options.images, options.past
        takes_images = getattr(engine, "takes_images", False) and log.images
        if images is not None and not takes_images:
            what = f"{type(engine).__name__} or the log"
            raise ValueError(f"{what} takes no images")
        self.prompts = Prompts(renderer, options.prompts, images, past=past)
        self.reply_parser = options.reply_parser or replies.parser_of(renderer)

    @contextmanager
    def working(self, session: Session, headers: Headers) -> Iterator[None]:
        """Work on a request in this context; raises a 503 if there is too much work."""
        length, most = headers.get("content-length", ""), self.options.max_body_bytes
        # a longer one is refused when it is read; of chunks it says nothing
        stated = length.isdecimal() and "transfer-encoding" not in headers
        n_bytes = min(int(length), most) if stated else most
        limit = max(self.options.max_work_bytes, most)
        if session.n_bytes + self._n_bytes + n_bytes > limit:
            message = (
                f"the requests at work have {self._n_bytes} bytes, this session's "
            )
            message += f"{session.n_bytes}: there is no room for {n_bytes} more"
            raise GatewayError(message, 503, code="busy", retry_after=5)
        self._n_bytes += n_bytes
        session.n_bytes += n_bytes
        try:
            yield
        finally:
            self._n_bytes -= n_bytes
            session.n_bytes -= n_bytes


class Call:
    """One request for a reply, from its body to what is recorded and answered."""

    chat: ChatRequest

    def __init__(
        self,
        gateway: Gateway,
        session: Session,
        protocol: WireProtocol,
        verb: Verb,
        headers: Mapping[str, str],
    ) -> None:
        self._gateway, self._session, self._protocol = gateway, session, protocol
        self._verb, self._headers = verb, headers
        self._renderer = gateway.prompts.renderer
        self._request_id, self._started_at = secrets.token_hex(16), datetime.now(UTC)

    async def read(self, data: bytes) -> None:
        """Read the request's body; raises `GatewayError`."""
        gateway, session, protocol = self._gateway, self._session, self._protocol
        takes_images = gateway.options.images is not None
        self._is_long = len(data) > _SHORT
        head = f"{protocol.name} {self._verb}\0".encode()
        earlier, known = session.conversation.elements, session.conversation.replies

        def read() -> ChatRequest:
            hasher = blake2b(head, digest_size=16)
            hasher.update(data)
            self._digest = hasher.digest()
            body = parse_object(data)
            return protocol.read(body, earlier, known, takes_images=takes_images)

        chat = await base.done(self._is_long or takes_images, read)
        limit = gateway.options.max_messages
        if len(chat.messages) > limit:
            message = f"{len(chat.messages)} messages; the limit is {limit}"
            raise GatewayError(message, 413, code="too_many_messages")
        self.chat = chat
        if self._verb == "stream":
            self.chat = replace(chat, stream=True)
        self._caller = identify(self._headers, chat)
        # the template's variables: the session's, the request's, the gateway's
        renderer = self._renderer
        if chat.tools and not renderer.shows_tools:
            chat.ignored["tools"] += 1
        asked = chat.thinking.resolve(renderer.takes, chat.ignored)
        fixed = session.options.variables
        for name in asked.keys() & fixed.keys():
            if asked[name] != fixed[name]:
                chat.ignored[f"chat_template_kwargs.{name}"] += 1
        self._variables: Json = {**gateway.options.variables, **asked, **fixed}
        unknown = self._variables.keys() - renderer.variables
        chat.ignored.update(f"chat_template_kwargs.{name}"[:100] for name in unknown)

    async def count(self) -> int:
        """Return the length of a prompt that the session could still send."""
        session = self._session
        session.check_open()
        session.counts.token_counts += 1
        info = await self._gateway.engine.info()
        # a longer prompt is not counted
        most = 4 * info.max_context_tokens
        async with session.counting, self._gateway.counting:
            make = partial(self._make_prompt, most, keep=False)
            prompt = await asyncio.to_thread(make)
        session.check_limit("prompt_tokens", len(prompt.ids))
        return len(prompt.ids)

    def begin(self) -> PendingReply:
        """Return the pending reply that a retry asks for again, or begin one.

        Raises `GatewayError`: the session may make no more calls.
        """
        session = self._session
        session.check_open()
        again = session.options.replay or is_retry(self._headers)
        if again and (known := session.again(self._digest)):
            session.counts.replayed += 1
            return known
        for name in ("answered", "prompt_tokens", "output_tokens"):
            session.check_limit(name, 1)
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
            async with session.slots:
                sample, sampling, overruled = await self._sample()
            checks.check_sample(sample, self._ids, sampling, self._info)
            reply = await self._reply(sample, sampling)
            turn = self._turn(reply, sample, sampling)
            folder, fsync = gateway.log.directory / "images", gateway.log.fsync
            await media.write_images(self.chat.images, folder, fsync=fsync)
            # does not await since, so no other call interferes
            self._record(turn, sample)
            self._remember(pending, reply, sample)
            session.counts.sampling_overruled.update(overruled)
        except GatewayError as error:
            session.counts.failed += error.status >= 500
            raise
        finally:
            # it has the task, and that the traceback of an error
            del pending
        return reply

    async def _sample(self) -> tuple[base.Sample, base.Sampling, list[str]]:
        """What the engine sampled, and how: see `_sampling`."""
        gateway, session = self._gateway, self._session
        info = await gateway.engine.info()
        limit = session.options.limits.get("max_context_tokens")
        if limit and limit < info.max_context_tokens:
            info = replace(info, max_context_tokens=limit)
        self._info = info
        try:
            await base.done(self._is_long, self._prepare)
        finally:
            # the request is kept, whatever becomes of the call
            session.conversation.count_kept(gateway.cache_budget)
        sampling, overruled = self._sampling()
        request = base.EngineRequest(
            prompt_ids=self._ids,
            sampling=sampling,
            request_id=self._request_id,
            session_id=session.session_id,
            images=self._pixels,
        )
        return await gateway.engine.generate(request), sampling, overruled

    def _make_prompt(self, max_tokens: int, *, keep: bool = True) -> Prompt:
        # refuse a last message that is too long before anything is rendered
        for last in media.texts_of(self.chat.messages[-1]["content"]):
            self._renderer.check_length(last, max_tokens)
        # the request's messages, with the session's replies restored
        self._restored = self._session.conversation.restore(
            self.chat.messages, self.chat.elements, keep=keep
        )
        return self._gateway.prompts.build(
            self._restored,
            self.chat.tools,
            self._variables,
            self.chat.images,
            attributed=keep and self._gateway.log.attributed,
            max_tokens=max_tokens,
        )

    def _prepare(self) -> None:
        """Render the request, or extend the prompt of an earlier turn."""
        self._prompt = prompt = self._make_prompt(self._info.max_context_tokens)
        # the prompt as the engine consumes it, and its images, also with their bytes
        self._ids, self._images, self._pixels = prompt.ids, list[Json](), list[Any]()
        model, messages = self._gateway.options.images, self._restored.messages
        if model is not None and media.hashes_of(messages):
            placed = model.place(prompt.ids, messages, self.chat.images)
            self._images, self._pixels = placed
            self._ids = model.engine_ids(prompt.ids)
        # the ids of the extended turn were checked when it was recorded
        n_checked = 0 if self._images else prompt.n_base
        checks.check_prompt(self._ids, self._info, n_checked)
        # it ends within the reply's reasoning
        tag = self._gateway.reply_parser.tags[0]
        self._opened = replies.opens_reasoning(self._renderer, prompt.ids, tag)

    def _sampling(self) -> tuple[base.Sampling, list[str]]:
        """The parameters of the call, and what of the client's request they overrule."""
        session, n_prompt = self._session, len(self._prompt.ids)
        room = self._info.max_context_tokens - n_prompt
        session.check_limit("prompt_tokens", n_prompt)
        remaining = session.check_limit("output_tokens", 1)
        fixed, client = session.options.fixed, session.options.client_sampling
        required, formless = self.chat.required, list[str]()
        is_fixed = partial(chats.is_fixed, fixed=fixed, client=client)
        if required.schema is not None and is_fixed("response_format"):
            required = replace(required, schema=None)
            formless.append("response_format")
        if required.limits_calls and is_fixed("tool_choice"):
            required = chats.Required(schema=required.schema)
            formless.append("tool_choice")
        form, tags = self._gateway.reply_parser.form, self._gateway.reply_parser.tags
        holds = getattr(self._gateway.engine, "takes_grammars", True)
        if form is None or not holds:
            # nothing can enforce them: wishes are counted, and requirements refused
            wishes = {"strict": required.strict, "parallel": not required.parallel}
            self.chat.ignored.update(name for name, given in wishes.items() if given)
            required = replace(required, strict=(), parallel=True)
        sampling, overruled = chats.resolve(
            self.chat.sampling,
            fixed,
            client,
            max_tokens=self._gateway.options.max_new_tokens,
            room=room if remaining is None else min(room, remaining),
            stop_token_ids=self._renderer.end_ids,
            structural_tag=replies.grammar(
                required,
                self.chat.tools,
                form,
                fixed.get("extra", {}),
                opened=self._opened,
                reasons=tags[0] in self._renderer.chat_template,
                holds=holds,
                around=tags,
            ),
        )
        return sampling, [*formless, *overruled]

    async def _reply(self, sample: base.Sample, sampling: base.Sampling) -> Reply:
        text = self._renderer.decode(sample.output_ids, ended=sample.ended)
        stops = sampling.stop if sample.ended else ()
        found = [(i, stop) for stop in stops if (i := text.find(stop)) >= 0]
        # clients never see the stop string
        start, stop = min(found, default=(None, None))
        text = text[:start]
        parsed = await self._gateway.reply_parser.parse(
            text, self.chat.tools, opened=self._opened
        )
        n_output, n_reasoning = len(sample.output_ids), 0
        if parsed.reasoning is not None:
            n_reasoning = n_output
            if len(parsed.parts) > 1:
                # 0 if the end of reasoning is spelled with other tokens
                end = self._gateway.reply_parser.tags[1]
                n_reasoning = self._renderer.n_until(sample.output_ids, end)
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
            stop_sequence=stop,
        )

    def _turn(
        self, reply: Reply, sample: base.Sample, sampling: base.Sampling
    ) -> dict[str, object]:
        """What is logged of the call, but for what other calls decide."""
        prompt, gateway = self._prompt, self._gateway
        names = self._restored.tool_names[prompt.n_known :]
        side_call = self._caller.is_side_call
        untrained = side_call and not gateway.options.train_side_calls
        spans = [span._asdict() for span in sample.weight_versions]
        # of a reply that was broken off: no client will send it back
        response = reply.logged if sample.complete else None
        return {
            "session_id": self._session.session_id,
            "request_id": self._request_id,
            "model": self._info.model,
            "prompt_ids": prompt.ids,
            **{name: getattr(sample, name) for name in _SAMPLED.split()},
            "messages": self._restored.logged,
            "response": response,
            "sampling": json.dumps(sampling.values(), sort_keys=True),
            "use_tool": bool(reply.calls),
            "ill_formed": reply.ill_formed,
            "trainable": sample.complete and not untrained,
            "weight_versions": spans or None,
            "started_at": self._started_at,
            "ended_at": datetime.now(UTC),
            "protocol": self._protocol.name,
            "tools_key": self._restored.offered.key,
            **self._caller._asdict(),
            "prompt_message_index": prompt.message_index,
            "message_tool_names": names if gateway.log.attributed else None,
            "render_reason": prompt.reason,
            "mm_items": self._images or None,
        }

    def _record(self, turn: dict[str, object], sample: base.Sample) -> None:
        """Write and count the turn.

        Raises `EngineError` if the engine did not complete the reply.
        """
        session, prompt, restored = self._session, self._prompt, self._restored
        counts, conversation = session.counts, session.conversation
        # closing the session cancelled the work
        if session.ended_by is not None:
            raise closed_error(session.session_id)
        # of earlier turns; a full disk may have room again
        session.write_amendments()
        turn |= conversation.started_by(
            restored,
            self._caller.agent_id,
            self._caller.parent_agent_id,
            named=self._caller.harness is not None,
        )
        turn["delta"] = conversation.delta(restored, prompt.ids)
        with writing("the turn"):
            self._gateway.log.append(turn, counts.turns, conversation.logged)
        n_output = len(sample.output_ids)
        counts.prompts[prompt.reason or "append"] += 1
        counts.turns += 1
        counts.prompt_tokens += len(prompt.ids)
        counts.output_tokens += n_output
        if self._gateway.log.attributed:
            counts.unattributed += prompt.message_index is None
        if not sample.complete:
            reason = f"with {sample.finish_reason or 'no reason'}"
            after = f"the engine broke off the call after {n_output} tokens"
            raise EngineError(f"{after}, {reason}", 503)

    def _remember(
        self, pending: PendingReply, reply: Reply, sample: base.Sample
    ) -> None:
        """Let later requests go on from the turn that was recorded last."""
        prompt, ids, counts = self._prompt, sample.output_ids, self._session.counts
        pending.turn, position = counts.turns - 1, self._restored.position
        node = Node(
            message=reply.message,
            logged=reply.logged,
            position=position,
            after=next_position(position, reply.logged.key),
            turn=pending.turn,
            agent_id=self._caller.agent_id,
            kept=KeptIds(np.concatenate([prompt.ids, ids])),
            n_ids=len(prompt.ids) + len(ids),
            between=prompt.between,
            offered=prompt.offered,
            closed=len(ids) > 0 and int(ids[-1]) in self._renderer.end_ids,
        )
        budget = self._gateway.cache_budget
        self._session.conversation.add(node, prompt.base, budget)
        self._session.conversation.replies[reply.reply_id] = reply
        self._session.answers.append(pending)
        counts.answered += 1
        add_counts(counts.ignored, self.chat.ignored)

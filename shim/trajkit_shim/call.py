"""One model call, from the chat request to what is recorded and answered.

No step here changes what other calls read, so a call that fails or is cancelled leaves no
trace. At most it takes room for ids that a later prompt then cannot use.
"""

import asyncio
import json
import uuid
from collections.abc import Callable, Collection, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from trajkit_shim import timing
from trajkit_shim.chat.image_store import ImageLimits
from trajkit_shim.chat.images import NoImages, hashes_of, texts_of
from trajkit_shim.chat.reply import (
    Identity,
    Parsed,
    Reply,
    Token,
    Usage,
    canonical_reply,
    extends,
    make_reply,
)
from trajkit_shim.chat.request import ChatRequest, logged_message
from trajkit_shim.chat.sampling_params import ignored_params, nth_seed, resolve
from trajkit_shim.engines import checks
from trajkit_shim.engines.base import (
    Engine,
    EngineInfo,
    EngineRequest,
    PromptImage,
    Sample,
    Sampling,
)
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.json_input import Json
from trajkit_shim.pauses import Gate
from trajkit_shim.prompting.attribution import Ids
from trajkit_shim.prompting.image_places import ImageModel, PlacedImage
from trajkit_shim.prompting.known_requests import ReadRequest
from trajkit_shim.prompting.prompts import Mode, Prompt, Prompts
from trajkit_shim.prompting.reply_matching import RestoredRequest, next_position
from trajkit_shim.prompting.token_cache import CachedPath
from trajkit_shim.prompting.tokenize_cache import NO_LIMIT, TooManyTokensError
from trajkit_shim.protocols.base import WireProtocol
from trajkit_shim.replies.grammar import grammar
from trajkit_shim.replies.parse import THINK, Decoder, IncrementalParser, ReplyParser
from trajkit_shim.sessions.client_identity import Caller
from trajkit_shim.sessions.quotas import Reservation
from trajkit_shim.sessions.sessions import Session
from trajkit_shim.sessions.turn_log import LoggedTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of a gateway (`app.create_app`)."""

    # maximum length of a reply, and its default; the room left in the context limits it too
    max_new_tokens: int = 4096
    # limits of a request, which is rejected with 413, 431 and 413 respectively
    max_body_bytes: int = 16 << 20
    max_header_bytes: int = 32 << 10
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
    # train a turn whose delivered reply an unmarked retry asks for again (`answers`), also
    # if no later request contains the reply
    train_retried: bool = True
    # parses replies, and is closed with the app; default: the gateway's own parser, for
    # the form of tool calls that the chat template asks for
    reply_parser: ReplyParser | None = None
    # append new messages to the token ids of an earlier turn if template and request
    # permit, or render every prompt from its messages (`prompting.prompts`)
    prompts: Mode = "append"
    # compare every prompt with the template's complete text, rather than whenever a
    # conversation has doubled
    check_prompts: bool = False
    # memory limit of all sessions for `append`
    cache_bytes: int = 1 << 30
    # token required for the trainer's routes; default: none
    admin_token: str | None = None
    # names that clients use for this machine, besides addresses and names of private
    # networks (`browsers`)
    hosts: Collection[str] = ()
    # how long a call waits for the end of a pause before it is rejected with 503
    pause_wait_seconds: float = 300.0
    # ended sessions to remember: their calls are answered with 410, later with 401
    max_ended_sessions: int = 10_000
    # measures idle sessions and pauses; default: the event loop
    clock: timing.Clock | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """What the calls of a gateway share."""

    engine: Engine
    gate: Gate  # every call passes it on the way to the engine
    prompts: Prompts
    reply_parser: ReplyParser
    options: Options


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """One request for a reply, and what it belongs to."""

    settings: CallSettings
    session: Session
    protocol: WireProtocol
    caller: Caller
    read: ReadRequest
    digest: bytes  # `answers.request_digest`

    @property
    def request(self) -> ChatRequest:
        """The request that was read."""
        return self.read.chat


async def prepare_call(
    context: CallContext,
    reservation: Reservation,
    on_partial: Callable[[Reply], None] | None,
) -> "list[ModelCall]":
    """Render, sample and parse one call; return one per reply that is asked for.

    ``on_partial`` receives what is known of the reply while it is sampled, if the engine
    streams. Raises `GatewayError`: an invalid request, or a session without tokens for it.
    `EngineError`: the prompt is invalid, or the engine failed.
    """
    info = reservation.narrow(await context.settings.engine.info())
    call = ModelCall(context, info, on_partial)
    await asyncio.to_thread(call.build_prompt)
    call.resolve_sampling(reservation)
    calls = [call, *(call.sibling(i) for i in range(1, context.request.n))]
    if len(calls) == 1:
        await call.sample()
    else:
        try:
            async with asyncio.TaskGroup() as group:
                for each in calls:
                    group.create_task(each.sample())
        except ExceptionGroup as errors:
            # the first cancelled the others
            raise errors.exceptions[0] from None

    def finish() -> list[ModelCall]:
        index = None
        if context.settings.options.attributed:
            # replies to one prompt share it
            index = context.settings.prompts.attribution(
                call.prompt, call.restored.messages, context.request.tools
            )
        for each in calls:
            each.finish(index)
        return calls

    # for short replies, a thread takes longer to start than this does
    if call.prompt.base is None or context.request.logprobs or len(calls) > 1:
        return await asyncio.to_thread(finish)
    return finish()


async def count_tokens(context: CallContext) -> int:
    """Return the length of a call's prompt. Nothing is sampled or recorded."""
    _, prompt = await asyncio.to_thread(_build_prompt, context, NO_LIMIT, False)
    return len(prompt.ids)


@timing.step()
def _build_prompt(
    context: CallContext, max_tokens: int, attributed: bool
) -> tuple[RestoredRequest, Prompt]:
    session, request = context.session, context.request
    prompts, head = context.settings.prompts, context.read.restored
    # every template writes the last message; this spares a long one all other steps
    for last in texts_of(request.messages[-1]["content"]):
        prompts.renderer.check_length(last, max_tokens)
    restored = session.replies.restore(request.messages[len(head.messages) :], head)
    prompt = prompts.build(
        restored,
        request.tools,
        session.replies,
        session.paths,
        attributed=attributed,
        max_tokens=max_tokens,
    )
    return restored, prompt


def _fields(record: Sampling | Caller) -> dict[str, Any]:
    """The fields of a record, not copied."""
    return {name: getattr(record, name) for name in record.__slots__}


class ModelCall:
    """The steps of one call, in order. Each uses the results of those before it.

    After the last one it can be recorded and answered.
    """

    # the request's messages, with the session's replies restored
    restored: RestoredRequest
    prompt: Prompt
    # the prompt as the engine consumes it, and its images, also with their bytes
    _engine_ids: Ids
    _images: list[PlacedImage]
    _pixels: list[PromptImage]
    _opened: bool  # the prompt ends within the reply's reasoning
    _sample: Sample
    _parsed: Parsed
    _stop_sequence: str | None  # the stop string that ended the reply
    turn: LoggedTurn
    # None: the engine aborted the call, and its turn is context only
    reply: Reply | None
    message: Json  # the reply in canonical form
    # prompt and output, for later prompts to extend; None: they cannot
    path: CachedPath | None
    position: bytes  # after the reply

    def __init__(
        self,
        context: CallContext,
        info: EngineInfo,
        on_partial: Callable[[Reply], None] | None,
    ) -> None:
        self._context = context
        self._on_partial = on_partial
        self._session = context.session
        self._settings = context.settings
        self._options = context.settings.options
        self._request = context.request
        self._renderer = context.settings.prompts.renderer
        self._info = info
        self._started_at = datetime.now(UTC)
        self._request_id = uuid.uuid4().hex
        self._identity = Identity(context.protocol.call_prefix)
        # the latest partial reply that was streamed
        self._streamed: Reply | None = None
        self._choice = None if context.request.n == 1 else 0

    def sibling(self, choice: int) -> "ModelCall":
        """Return a call for another reply to this prompt, before any was sampled."""
        other = copy(self)
        other._choice, other._request_id = choice, uuid.uuid4().hex
        other._identity = Identity(self._context.protocol.call_prefix)
        if self._sampling.seed is not None:
            # a pair of equal replies is of no use
            seed = nth_seed(self._sampling.seed, choice)
            other._sampling = replace(self._sampling, seed=seed)
        return other

    def build_prompt(self) -> None:
        """Render the request, or extend the prompt of an earlier turn."""
        max_tokens = self._info.max_context_tokens
        try:
            self.restored, self.prompt = _build_prompt(
                self._context, max_tokens, self._options.attributed
            )
        except TooManyTokensError as error:
            length = f"at least {error.n_tokens}"
            raise checks.too_long(length, error.n_tokens, max_tokens) from error
        self._opened = self._renderer.opens_reasoning(self.prompt.ids)
        self._engine_ids, self._images, self._pixels = self.prompt.ids, [], []
        places, messages = self._settings.prompts.places, self.restored.messages
        if places is not None and hashes_of(messages):
            self._images = places.items(self.prompt.ids, messages)
            self._engine_ids = places.engine_ids(self.prompt.ids)
            self._pixels = places.load(self._images)
        # those of the earlier turn were checked then
        n_checked = 0 if self._images else self.prompt.n_base
        checks.check_prompt(self._engine_ids, self._info, n_checked)

    def resolve_sampling(self, reservation: Reservation) -> None:
        """Decide the parameters, and reserve their tokens in the session's quota."""
        n_prompt = len(self.prompt.ids)
        terms = self._session.terms
        limit = self._options.max_new_tokens
        self._sampling = resolve(
            self._request.sampling,
            terms.pins,
            max_tokens=reservation.max_new_tokens(n_prompt, limit),
            room=self._info.max_context_tokens - n_prompt,
            end_ids=self._renderer.end_ids,
            client=terms.client_sampling,
            structural_tag=grammar(
                self._request,
                self._settings.reply_parser.form,
                terms.pins.extra,
                opened=self._opened,
                reasons=THINK in self._renderer.chat_template,
            ),
        )
        reservation.reserve(n_prompt, self._sampling.max_new_tokens)

    async def sample(self) -> None:
        """Sample and parse, again if a pause cut the call off before it streamed."""
        self._sample = await self._settings.gate.sample(
            self._sample_once, again=lambda: self._streamed is None
        )
        checks.check_sample(self._sample, self._info, self._sampling.max_new_tokens)
        checks.check_consumed(self._engine_ids, self._sample)
        text, self._stop_sequence = self._text()
        self._parsed = await self._settings.reply_parser.parse(
            text, self._request.tools, self._engine_ids, opened=self._opened
        )
        self._ended_at = datetime.now(UTC)

    async def _sample_once(self) -> Sample:
        request = EngineRequest(
            prompt_ids=self._engine_ids,
            sampling=self._sampling,
            request_id=self._request_id,
            session_id=self._session.session_id,
            images=self._pixels,
        )
        generate = self._settings.engine.generate
        on_partial = self._on_partial
        started = self._settings.reply_parser.start(
            self._request.tools, opened=self._opened
        )
        if on_partial is None or started is None:
            return await generate(request)
        n_prompt = len(self.prompt.ids)
        parser = IncrementalParser(self._renderer, started, self._sampling.stop)

        def on_tokens(new_ids: Sequence[int]) -> None:
            checks.check_ids(new_ids, self._info, "the engine's new ids")
            known = parser.feed(new_ids)
            if known is not None:
                n_output, model = len(parser.ids), self._info.model
                usage = Usage(
                    prompt_tokens=n_prompt, output_tokens=n_output, cached_tokens=None
                )
                self._streamed = make_reply(
                    known, "", model=model, usage=usage, identity=self._identity
                )
                on_partial(self._streamed)

        sample = await generate(replace(request, on_tokens=on_tokens))
        if sample.output_ids[: len(parser.ids)].tolist() != parser.ids:
            raise EngineError("the engine's output ids are not those that it streamed")
        return sample

    @timing.step()
    def finish(self, message_index: Ids | None) -> None:
        """Parse the reply and put the turn together; the prompt's attribution is given."""
        parsed = self._parsed
        sample, prompt = self._sample, self.prompt
        aborted = sample.finish_reason == "abort"
        n_reasoning = 0
        if parsed.reasoning is not None:
            n_reasoning = len(sample.output_ids)
            if parsed.sampled:
                # None if the end of reasoning is spelled with other tokens
                n_reasoning = self._renderer.end_of_reasoning(sample.output_ids) or 0
        reply = make_reply(
            parsed,
            sample.finish_reason,
            model=self._info.model,
            usage=Usage(
                prompt_tokens=len(prompt.ids),
                output_tokens=len(sample.output_ids),
                cached_tokens=sample.cached_tokens,
                reasoning_tokens=n_reasoning,
            ),
            identity=self._identity,
            stop_sequence=self._stop_sequence,
            tokens=self._tokens(n_reasoning) if self._request.logprobs else None,
        )
        if not aborted and self._streamed and not extends(reply, self._streamed):
            wrong = "the reply does not start with what was streamed of it"
            raise GatewayError(wrong, 500)
        self.reply = None if aborted else reply
        self.message = canonical_reply(reply)
        response = logged_message(self.message)
        names = self.path = None
        if self._options.attributed:
            names = self.restored.tool_names[prompt.n_known :]
        self.position = next_position(self.restored.position, response.key)
        if not aborted:
            self.path = self._settings.prompts.cacheable_path(
                prompt, sample.output_ids, self.position
            )
        caller = self._context.caller
        untrained = caller.is_side_call and not self._options.train_side_calls
        self.turn = LoggedTurn(
            session_id=self._session.session_id,
            request_id=self._request_id,
            model=self._info.model,
            prompt_ids=prompt.ids,
            output_ids=sample.output_ids,
            output_logprobs=sample.output_logprobs,
            finish_reason=sample.finish_reason,
            messages=self.restored.logged,
            positions=self.restored.positions,
            n_logged=self.restored.n_seen,
            response=None if aborted else response,
            use_tool=bool(parsed.calls),
            ill_formed=parsed.ill_formed,
            trainable=not aborted and not untrained,
            weight_versions=sample.weight_versions,
            sampling=json.dumps(_fields(self._sampling), sort_keys=True),
            cached_tokens=sample.cached_tokens,
            routed_experts=sample.routed_experts,
            started_at=self._started_at,
            ended_at=self._ended_at,
            choice=self._choice,
            protocol=self._context.protocol.name,
            **_fields(caller),
            prompt_message_index=message_index,
            message_tool_names=names,
            prompt_built=prompt.built,
            render_reason=prompt.reason,
            prompt_digest=prompt.digest,
            mm_items=[asdict(image) for image in self._images] or None,
        )

    def ignored_params(self) -> list[str]:
        """Return the client's sampling parameters that were not used."""
        return ignored_params(self._request.sampling, self._sampling)

    def _tokens(self, start: int) -> tuple[Token, ...]:
        """The output's tokens from ``start`` on, without stop string and end token."""
        ids, logprobs = self._sample.output_ids, self._sample.output_logprobs
        if logprobs is None:
            raise EngineError("the engine gives no logprobs", 400)
        decoder, tokens = Decoder(self._renderer), list[Token]()
        text, matched = self._text()
        left = None if matched is None else len(text)
        for i, (token, logprob) in enumerate(
            zip(ids.tolist(), logprobs.tolist(), strict=True)
        ):
            if left == 0:
                break
            shown = decoder.feed([token])[:left]
            left = None if left is None else left - len(shown)
            if i >= start and token not in self._renderer.end_ids:
                tokens.append(Token(shown, token, logprob))
        return tuple(tokens)

    def _text(self) -> tuple[str, str | None]:
        """The reply's text up to the first stop string, and that stop string."""
        ended = self._sample.finish_reason == "stop"
        text = self._renderer.decode(self._sample.output_ids, ended=ended)
        stops = self._sampling.stop if ended else ()
        found = [(i, stop) for stop in stops if (i := text.find(stop)) >= 0]
        if not found:
            return text, None
        # clients never see the stop string
        start, matched = min(found)
        return text[:start], matched

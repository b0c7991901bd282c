"""One model call, from the chat request to what is recorded and answered.

No step here changes what other calls read, so a call that fails or is cancelled leaves no
trace. At most it takes room for ids that a later prompt then cannot use.
"""

import asyncio
import json
import uuid
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from trajkit_shim import timing
from trajkit_shim.chat.images import hashes_of, texts_of
from trajkit_shim.chat.reply import Parsed, Reply, Token, Usage
from trajkit_shim.chat.request import ChatRequest, logged_message
from trajkit_shim.chat.sampling_params import nth_seed
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
from trajkit_shim.pause import Gate
from trajkit_shim.prompting.attribution import Ids
from trajkit_shim.prompting.image_places import PlacedImage
from trajkit_shim.prompting.prompts import Prompt, Prompts
from trajkit_shim.prompting.reply_matching import RestoredRequest, next_position
from trajkit_shim.prompting.token_cache import CachedPath
from trajkit_shim.prompting.tokenize_cache import NO_LIMIT, TooManyTokensError
from trajkit_shim.protocols.base import WireProtocol
from trajkit_shim.replies.grammar import grammar
from trajkit_shim.replies.incremental_decode import Decoder, IncrementalParser
from trajkit_shim.replies.parse import THINK, ReplyParser
from trajkit_shim.replies.reply_builder import (
    Identity,
    canonical_reply,
    extends,
    make_reply,
)
from trajkit_shim.sessions.client_identity import Caller
from trajkit_shim.sessions.quotas import Reservation
from trajkit_shim.sessions.sampling import ignored_params, resolve
from trajkit_shim.sessions.sessions import Session
from trajkit_shim.sessions.turn_log import LoggedTurn


@dataclass(frozen=True, slots=True, kw_only=True)
class CallSettings:
    """How a gateway makes its calls; for the parameters see `app.create_app`."""

    engine: Engine
    gate: Gate  # every call passes it on the way to the engine
    prompts: Prompts
    max_new_tokens: int
    attributed: bool
    train_side_calls: bool
    train_retried: bool
    reply_parser: ReplyParser


@dataclass(frozen=True, slots=True, kw_only=True)
class CallContext:
    """One request, and what it belongs to."""

    settings: CallSettings
    session: Session
    protocol: WireProtocol
    caller: Caller
    request: ChatRequest
    head: RestoredRequest  # of its messages that are known; it is completed
    reservation: Reservation
    # receives what is known of the reply while it is sampled, if the engine streams;
    # the complete reply starts with it
    on_partial: Callable[[Reply], None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """A call that was sampled and parsed, to be recorded and answered."""

    turn: LoggedTurn
    # the request's messages, with the session's replies restored
    restored: RestoredRequest
    # None: the engine aborted the call, and its turn is context only
    reply: Reply | None
    message: Json  # the reply in canonical form
    # prompt and output, for later prompts to extend; None: they cannot
    path: CachedPath | None
    position: bytes  # after the reply
    ignored_params: list[str]  # sampling parameters of the client that were not used


async def prepare_call(context: CallContext) -> list[PreparedCall]:
    """Render, sample and parse one call; return one per reply that is asked for.

    Raises `GatewayError`: the messages cannot be rendered, the session has no tokens
    left for them, or the reply does not start with what was streamed of it.
    `EngineError`: the prompt is invalid, or the engine failed.
    """
    info = context.reservation.narrow(await context.settings.engine.info())
    call = _Call(context, info)
    await asyncio.to_thread(call.build_prompt)
    call.resolve_sampling()
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

    def finish() -> list[PreparedCall]:
        # replies to one prompt share it
        index = call.attribution()
        return [each.finish(index) for each in calls]

    # for short replies, a thread takes longer to start than this does
    if call.prompt.base is None or context.request.logprobs or len(calls) > 1:
        return await asyncio.to_thread(finish)
    return finish()


async def count_tokens(
    request: ChatRequest, head: RestoredRequest, session: Session, prompts: Prompts
) -> int:
    """Return the length of a call's prompt. Nothing is sampled or recorded."""
    _, prompt = await asyncio.to_thread(
        _build_prompt,
        request,
        head,
        session,
        prompts,
        attributed=False,
        max_tokens=NO_LIMIT,
    )
    return len(prompt.ids)


@timing.step()
def _build_prompt(
    request: ChatRequest,
    head: RestoredRequest,
    session: Session,
    prompts: Prompts,
    *,
    attributed: bool,
    max_tokens: int,
) -> tuple[RestoredRequest, Prompt]:
    # every template writes the last message; this spares a long one all other steps
    for last in texts_of(request.messages[-1]["content"]):
        prompts.renderer.check_length(last, max_tokens)
    new = request.messages[len(head.messages) :]
    restored = session.replies.restore(new, head)
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


class _Call:
    """The steps of one call, in order. Each uses the results of those before it."""

    restored: RestoredRequest
    prompt: Prompt
    # the prompt as the engine consumes it, and its images
    _engine_ids: Ids
    _images: list[PlacedImage]
    _opened: bool  # the prompt ends within the reply's reasoning
    result: Sample
    _parsed: Parsed
    _stop_sequence: str | None  # the stop string that ended the reply

    def __init__(self, context: CallContext, info: EngineInfo) -> None:
        self._context = context
        self._session = context.session
        self._settings = context.settings
        self._request = context.request
        self._renderer = context.settings.prompts.renderer
        self._info = info
        self._started_at = datetime.now(UTC)
        self._request_id = uuid.uuid4().hex
        self._identity = Identity(context.protocol.call_prefix)
        # the latest partial reply that was streamed
        self._streamed: Reply | None = None
        self._choice = None if context.request.n == 1 else 0

    def sibling(self, choice: int) -> "_Call":
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
                self._request,
                self._context.head,
                self._session,
                self._settings.prompts,
                attributed=self._settings.attributed,
                max_tokens=max_tokens,
            )
        except TooManyTokensError as error:
            length = f"at least {error.n_tokens}"
            raise checks.too_long(length, error.n_tokens, max_tokens) from error
        self._opened = self._renderer.opens_reasoning(self.prompt.ids)
        self._engine_ids, self._images = self.prompt.ids, []
        places, messages = self._settings.prompts.places, self.restored.messages
        if places is not None and hashes_of(messages):
            self._images = places.items(self.prompt.ids, messages)
            self._engine_ids = places.engine_ids(self.prompt.ids)
        # those of the earlier turn were checked then
        n_checked = 0 if self._images else self.prompt.n_base
        checks.check_prompt(self._engine_ids, self._info, n_checked)

    def resolve_sampling(self) -> None:
        """Decide the parameters, and reserve their tokens in the session's quota."""
        n_prompt = len(self.prompt.ids)
        reservation, terms = self._context.reservation, self._session.terms
        limit = self._settings.max_new_tokens
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
        self.result = await self._settings.gate.sample(
            self._sample_once, again=lambda: self._streamed is None
        )
        checks.check_sample(self.result, self._info, self._sampling.max_new_tokens)
        checks.check_consumed(self._engine_ids, self.result)
        text, self._stop_sequence = self._text()
        self._parsed = await self._settings.reply_parser.parse(
            text, self._request.tools, self._engine_ids, opened=self._opened
        )
        self._ended_at = datetime.now(UTC)

    async def _sample_once(self) -> Sample:
        places = self._settings.prompts.places
        images: Sequence[PromptImage] = ()
        if self._images:
            assert places is not None
            images = await asyncio.to_thread(places.load, self._images)
        request = EngineRequest(
            prompt_ids=self._engine_ids,
            sampling=self._sampling,
            request_id=self._request_id,
            session_id=self._session.session_id,
            images=images,
        )
        generate = self._settings.engine.generate
        on_partial = self._context.on_partial
        started = self._settings.reply_parser.start(
            self._request.tools, opened=self._opened
        )
        if on_partial is None or started is None:
            return await generate(request)
        parser = IncrementalParser(self._renderer, started, self._sampling.stop)

        def on_tokens(new_ids: Sequence[int]) -> None:
            checks.check_ids(new_ids, self._info, "the engine's new ids")
            known = parser.feed(new_ids)
            if known is not None:
                self._streamed = self._reply(known, "", self._usage(len(parser.ids)))
                on_partial(self._streamed)

        sample = await generate(replace(request, on_tokens=on_tokens))
        if sample.output_ids[: len(parser.ids)].tolist() != parser.ids:
            raise EngineError("the engine's output ids are not those that it streamed")
        return sample

    def attribution(self) -> Ids | None:
        """Return the prompt's attribution, or None; see `Prompts.attribution`."""
        if not self._settings.attributed:
            return None
        return self._settings.prompts.attribution(
            self.prompt, self.restored.messages, self._request.tools
        )

    @timing.step()
    def finish(self, message_index: Ids | None) -> PreparedCall:
        """Parse the reply and put the turn together; the prompt's attribution is given."""
        parsed, stop_sequence = self._parsed, self._stop_sequence
        sample, prompt, settings = self.result, self.prompt, self._settings
        aborted = sample.finish_reason == "abort"
        n_reasoning = self._reasoning_tokens(parsed)
        usage = self._usage(len(sample.output_ids), sample.cached_tokens, n_reasoning)
        tokens = self._tokens(n_reasoning) if self._request.logprobs else None
        reply = self._reply(parsed, sample.finish_reason, usage, stop_sequence, tokens)
        if not aborted and self._streamed and not extends(reply, self._streamed):
            wrong = "the reply does not start with what was streamed of it"
            raise GatewayError(wrong, 500)
        message = canonical_reply(reply)
        response = logged_message(message)
        names = path = None
        if settings.attributed:
            names = self.restored.tool_names[prompt.n_known :]
        position = next_position(self.restored.position, response.key)
        if not aborted:
            path = settings.prompts.cacheable_path(prompt, sample.output_ids, position)
        caller = self._context.caller
        untrained = caller.is_side_call and not settings.train_side_calls
        turn = LoggedTurn(
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
            mm_items=[image.item() for image in self._images] or None,
        )
        return PreparedCall(
            turn=turn,
            restored=self.restored,
            reply=None if aborted else reply,
            message=message,
            path=path,
            position=position,
            ignored_params=ignored_params(self._request.sampling, self._sampling),
        )

    def _usage(
        self, output_tokens: int, cached: int | None = None, reasoning: int = 0
    ) -> Usage:
        return Usage(
            prompt_tokens=len(self.prompt.ids),
            output_tokens=output_tokens,
            cached_tokens=cached,
            reasoning_tokens=reasoning,
        )

    def _reply(
        self,
        parsed: Parsed,
        finish: str,
        usage: Usage,
        stop: str | None = None,
        tokens: tuple[Token, ...] | None = None,
    ) -> Reply:
        return make_reply(
            parsed,
            finish,
            model=self._info.model,
            usage=usage,
            identity=self._identity,
            stop_sequence=stop,
            tokens=tokens,
        )

    def _tokens(self, start: int) -> tuple[Token, ...]:
        """The output's tokens from ``start`` on, without stop string and end token."""
        ids, logprobs = self.result.output_ids, self.result.output_logprobs
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
        ended = self.result.finish_reason == "stop"
        text = self._renderer.decode(self.result.output_ids, ended=ended)
        stops = self._sampling.stop if ended else ()
        found = [(i, stop) for stop in stops if (i := text.find(stop)) >= 0]
        if not found:
            return text, None
        # clients never see the stop string
        start, matched = min(found)
        return text[:start], matched

    def _reasoning_tokens(self, parsed: Parsed) -> int:
        if parsed.reasoning is None:
            return 0
        if not parsed.sampled:
            return len(self.result.output_ids)
        # 0 if the end of reasoning is spelled with other tokens
        return self._renderer.end_of_reasoning(self.result.output_ids) or 0

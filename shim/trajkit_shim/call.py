"""One model call from the chat request to what is recorded and answered.

Nothing here changes anything: a call that fails or is cancelled on the way leaves no
trace.
"""

import asyncio
import json
import uuid
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from trajkit_shim import timing
from trajkit_shim.attribution import tool_names
from trajkit_shim.budget import Allowance
from trajkit_shim.callers import Caller
from trajkit_shim.chat import ChatRequest
from trajkit_shim.echo import EchoBook, Heard, place_behind
from trajkit_shim.engine import Engine, EngineError, Sample, StreamingEngine
from trajkit_shim.errors import GatewayError
from trajkit_shim.held import HeldPath, HeldPaths
from trajkit_shim.increments import Increments
from trajkit_shim.limits import check_consumed, check_prompt, check_sample, check_told
from trajkit_shim.log import LoggedTurn, logged_message
from trajkit_shim.parse import Parsed, Parser
from trajkit_shim.parsers import ToolForm
from trajkit_shim.pause import Gate
from trajkit_shim.prompts import Prompt, Prompts
from trajkit_shim.protocols.protocol import WireProtocol
from trajkit_shim.render import ChatRenderer
from trajkit_shim.reply import (
    Identity,
    Reply,
    Usage,
    expected_echo,
    goes_on,
    make_reply,
)
from trajkit_shim.reply_parsers import ReplyParser
from trajkit_shim.sampling import Wishes, overruled, settle
from trajkit_shim.wire import Json


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedCall:
    """A call that was sampled and parsed, to be recorded and answered."""

    turn: LoggedTurn
    # the request's messages, with the session's replies put back
    heard: Heard
    # None: the engine cut the call short, and its turn is context only
    reply: Reply | None
    # the reply in canonical form
    message: Json
    # prompt and output, for the prompts to come; None: none is built behind them
    path: HeldPath | None
    # sampling parameters that the client asked for and did not get
    overruled: list[str]


async def prepare_call(
    asked: ChatRequest,
    *,
    engine: Engine,
    gate: Gate,
    prompts: Prompts,
    session_id: str,
    echo: EchoBook,
    held: HeldPaths,
    pins: Wishes,
    client_sampling: Collection[str] = (),
    allowance: Allowance,
    max_new_tokens: int,
    protocol: WireProtocol,
    caller: Caller,
    form: ToolForm,
    reply_parser: ReplyParser | None = None,
    attributed: bool = True,
    growth: Callable[[Reply], None] | None = None,
) -> PreparedCall:
    """Render, sample and parse one call.

    Parameters
    ----------
    asked : ChatRequest
    engine, prompts
        The model, and how its prompts are built.
    gate : Gate
        That the call passes on its way to the engine.
    session_id : str
    echo, held : EchoBook, HeldPaths
        What was sampled in the session.
    pins : Wishes
        The session's sampling parameters.
    client_sampling : collection of str
        Those that the client may set.
    allowance : Allowance
        What of the session's limits the call may use.
    max_new_tokens : int
        The gateway's own limit on new tokens.
    protocol : WireProtocol
        That the call came in on.
    caller : Caller
    form : ToolForm
        In which the model writes its calls.
    reply_parser : ReplyParser, optional
        Takes the reply apart in place of the gateway's own parsers, once it is whole.
    attributed : bool
        Say of each prompt token which message it shows, for learning from tool outputs.
    growth : callable, optional
        Given what can be told of the reply while it is sampled, where the engine tells
        what it samples. The whole reply begins with it.

    Raises
    ------
    GatewayError
        The messages cannot be rendered, the session has no tokens left for them, or the
        reply does not begin with what was told.
    EngineError
        The prompt cannot be sampled from, or the engine failed.
    """
    started_at = datetime.now(UTC)
    request_id = uuid.uuid4().hex
    info = allowance.within(await engine.info())
    renderer = prompts.renderer
    heard, prompt = await asyncio.to_thread(
        _prompt, asked, echo, held, prompts, attributed=attributed
    )
    prompt_ids = prompt.ids
    check_prompt(prompt_ids, info)
    sampling = settle(
        asked.asked,
        pins,
        most=allowance.left(len(prompt_ids), max_new_tokens),
        room=info.max_context_tokens - len(prompt_ids),
        end_ids=renderer.end_ids,
        client=client_sampling,
    )
    allowance.hold(len(prompt_ids), sampling.max_new_tokens)
    identity = Identity(protocol.call_prefix)

    def parser() -> Parser:
        opened = renderer.opens_reasoning(prompt_ids)
        return Parser(tools=asked.tools, opened=opened, form=form)

    told: list[Reply] = []

    async def sampled() -> Sample:
        told_early = growth is not None and reply_parser is None
        if not told_early or not isinstance(engine, StreamingEngine):
            return await engine.generate(
                prompt_ids, sampling, request_id=request_id, session_id=session_id
            )
        increments = Increments(renderer, parser(), sampling.stop)

        def on_tokens(ids: Sequence[int]) -> None:
            check_told(ids, info)
            known = increments.feed(ids)
            if known is None:
                return
            usage = Usage(
                prompt_tokens=len(prompt_ids),
                output_tokens=len(increments.ids),
                cached_tokens=None,
            )
            so_far = make_reply(
                known, "", model=info.model, usage=usage, identity=identity
            )
            told[:] = [so_far]
            assert growth is not None
            growth(so_far)

        sample = await engine.stream(
            prompt_ids,
            sampling,
            request_id=request_id,
            session_id=session_id,
            on_tokens=on_tokens,
        )
        if sample.output_ids[: len(increments.ids)].tolist() != increments.ids:
            raise EngineError("the engine's output ids are not those that it told")
        return sample

    # what a client was told is not sampled anew
    sample = await gate.sample(sampled, again=lambda: not told)
    check_sample(sample, info)
    check_consumed(prompt_ids, sample)
    outside = None
    if reply_parser is not None:
        text, stop_at = _text(sample, sampling.stop, renderer)
        opened = renderer.opens_reasoning(prompt_ids)
        outside = (
            await reply_parser.parse(text, asked.tools, prompt_ids, opened=opened),
            stop_at,
        )
    ended_at = datetime.now(UTC)

    @timing.step()
    def finish() -> PreparedCall:
        parsed, stop_sequence = outside or _parse(
            sample, sampling.stop, renderer, parser()
        )
        aborted = sample.finish_reason == "abort"
        usage = Usage(
            prompt_tokens=len(prompt_ids),
            output_tokens=len(sample.output_ids),
            cached_tokens=sample.cached_tokens,
            reasoning_tokens=_reasoning_tokens(parsed, sample, renderer),
        )
        reply = make_reply(
            parsed,
            sample.finish_reason,
            model=info.model,
            usage=usage,
            identity=identity,
            stop_sequence=stop_sequence,
        )
        if not aborted and not all(goes_on(reply, before) for before in told):
            raise GatewayError(
                "the reply does not begin with what was streamed of it", 500
            )
        message = expected_echo(reply)
        shown = None
        if attributed:
            shown = prompts.shown(prompt, heard.messages, asked.tools)
        turn = LoggedTurn(
            session_id=session_id,
            request_id=request_id,
            model=info.model,
            prompt_ids=prompt_ids,
            output_ids=sample.output_ids,
            output_logprobs=sample.output_logprobs,
            finish_reason=sample.finish_reason,
            messages=heard.logged,
            response=None if aborted else logged_message(message),
            use_tool=bool(parsed.tool_calls),
            ill_formed=parsed.ill_formed,
            trainable=not aborted,
            weight_versions=sample.weight_versions,
            sampling=json.dumps(asdict(sampling), sort_keys=True),
            cached_tokens=sample.cached_tokens,
            routed_experts=sample.routed_experts,
            started_at=started_at,
            ended_at=ended_at,
            protocol=protocol.name,
            harness=caller.harness,
            agent_id=caller.agent_id,
            parent_agent_id=caller.parent_agent_id,
            call_kind=caller.call_kind,
            prompt_message_index=None if shown is None else shown.message_index,
            prompt_is_content=None if shown is None else shown.is_content,
            message_tool_names=tool_names(heard.messages) if attributed else None,
            prompt_built=prompt.built,
            render_reason=prompt.reason,
            prompt_digest=prompt.digest,
        )
        path = None
        if not aborted:
            said = logged_message(message)
            path = prompts.hold(
                prompt,
                shown,
                sample.output_ids,
                place=place_behind(heard.place, said.key),
                message=len(heard.messages),
            )
        return PreparedCall(
            turn=turn,
            heard=heard,
            reply=None if aborted else reply,
            message=message,
            path=path,
            overruled=overruled(asked.asked, sampling),
        )

    # decoding and digesting a long history would hold up every other call
    return await asyncio.to_thread(finish)


async def count_tokens(
    asked: ChatRequest, echo: EchoBook, held: HeldPaths, prompts: Prompts
) -> int:
    """How many tokens the prompt of a call has. Nothing is sampled or recorded.

    Raises
    ------
    GatewayError
        The messages cannot be rendered.
    """
    _, prompt = await asyncio.to_thread(
        _prompt, asked, echo, held, prompts, attributed=False
    )
    return len(prompt.ids)


@timing.step()
def _prompt(
    asked: ChatRequest,
    echo: EchoBook,
    held: HeldPaths,
    prompts: Prompts,
    *,
    attributed: bool,
) -> tuple[Heard, Prompt]:
    heard = echo.hear(asked.messages)
    return heard, prompts.build(heard, asked.tools, echo, held, attributed=attributed)


def _reasoning_tokens(parsed: Parsed, sample: Sample, renderer: ChatRenderer) -> int:
    if parsed.reasoning is None:
        return 0
    if not parsed.sampled:
        return len(sample.output_ids)
    # 0 where the end is spelled in other tokens
    return renderer.end_of_reasoning(sample.output_ids) or 0


def _parse(
    sample: Sample, stop: tuple[str, ...], renderer: ChatRenderer, parser: Parser
) -> tuple[Parsed, str | None]:
    """The reply, taken apart, and the stop string at which it was cut."""
    text, matched = _text(sample, stop, renderer)
    parser.feed(text)
    return parser.end(), matched


def _text(
    sample: Sample, stop: tuple[str, ...], renderer: ChatRenderer
) -> tuple[str, str | None]:
    """The reply's text up to a stop string, and that."""
    ended = sample.finish_reason == "stop"
    text = renderer.decode(sample.output_ids, ended=ended)
    matched = None
    if ended:
        # a client never sees the stop string that it asked for
        found = [(at, mark) for mark in stop if (at := text.find(mark)) >= 0]
        if found:
            at, matched = min(found)
            text = text[:at]
    return text, matched

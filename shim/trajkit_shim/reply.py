"""A sampled reply as OpenAI Chat Completions words it, in one piece or as events."""

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from trajkit_shim.chat import canonical_message
from trajkit_shim.parse import Parsed
from trajkit_shim.wire import Json

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one call."""

    prompt_tokens: int
    output_tokens: int
    # None: the engine does not say
    cached_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One assistant message on its way out."""

    reply_id: str
    created: int
    model: str
    # as the wire holds it
    message: Json
    finish_reason: str
    usage: Usage


def make_reply(parsed: Parsed, finish: str, *, model: str, usage: Usage) -> Reply:
    """The reply to a client for a parsed sample.

    Parameters
    ----------
    parsed : Parsed
        The sampled text, taken apart.
    finish : str
        The engine's word for how it ended. ``length`` goes out as it is, also beside
        complete calls; anything else is ``tool_calls`` or ``stop``.
    """
    message: Json = {"role": "assistant", "content": parsed.content}
    if parsed.tool_calls:
        message["content"] = parsed.content or None
        message["tool_calls"] = [
            {
                "id": f"call_{uuid.uuid4().hex[:24]}",
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in parsed.tool_calls
        ]
    ended = "tool_calls" if parsed.tool_calls else "stop"
    return Reply(
        reply_id=f"chatcmpl-{uuid.uuid4().hex}",
        created=int(time.time()),
        model=model,
        message=message,
        finish_reason="length" if finish == "length" else ended,
        usage=usage,
    )


def expected_echo(reply: Reply) -> Json:
    """The reply as the next request is expected to carry it, in canonical form."""
    return canonical_message(reply.message, "reply")


def reply_body(reply: Reply) -> Json:
    """The body of a reply that is not streamed."""
    return {
        "id": reply.reply_id,
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [
            {
                "index": 0,
                "message": {**reply.message, "refusal": None},
                "logprobs": None,
                "finish_reason": reply.finish_reason,
            }
        ],
        "usage": _usage(reply.usage),
    }


def reply_events(reply: Reply, *, include_usage: bool) -> Iterator[bytes]:
    """The server-sent events of a streamed reply, ``[DONE]`` included.

    Role, content, one event per tool call, the finish reason; then, where the client
    asked for it, the usage.
    """
    yield _chunk(reply, {"role": "assistant", "content": ""}, usage=include_usage)
    if reply.message["content"]:
        yield _chunk(reply, {"content": reply.message["content"]}, usage=include_usage)
    calls = reply.message.get("tool_calls", [])
    assert isinstance(calls, list)
    for index, call in enumerate(calls):
        delta: Json = {"tool_calls": [{"index": index, **call}]}
        yield _chunk(reply, delta, usage=include_usage)
    yield _chunk(reply, {}, finish=reply.finish_reason, usage=include_usage)
    if include_usage:
        yield _event({**_head(reply), "choices": [], "usage": _usage(reply.usage)})
    yield DONE


def _head(reply: Reply) -> Json:
    return {
        "id": reply.reply_id,
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": reply.model,
    }


def _chunk(
    reply: Reply, delta: Json, *, usage: bool, finish: str | None = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    # with include_usage every chunk but the last says usage: null
    return _event(
        {**_head(reply), "choices": [choice], **({"usage": None} if usage else {})}
    )


def _event(value: Json) -> bytes:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n".encode()


def _usage(usage: Usage) -> Json:
    counts: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    return counts

"""OpenAI Chat Completions: requests, replies, chunks and errors."""

from collections.abc import Iterator

from trajkit_shim import wire
from trajkit_shim.chat import AS_GIVEN, OMITTED_IMAGE, ChatRequest, Reading
from trajkit_shim.errors import GatewayError, error_body
from trajkit_shim.protocols.blocks import Block, Thought, Told
from trajkit_shim.protocols.protocol import WireProtocol
from trajkit_shim.protocols.sse import event
from trajkit_shim.reply import Call, Reply, Usage
from trajkit_shim.sampling import WISH_NAMES, parse_wishes
from trajkit_shim.wire import Json, refuse

DONE = b"data: [DONE]\n\n"

# Accepted and without effect: who asks, and how a provider may store and bill it.
HINTS = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
# Accepted with the one value that asks for nothing.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
}
KNOWN = frozenset(
    {
        *HINTS,
        *NEUTRAL,
        *WISH_NAMES,
        "messages",
        "model",
        "stream",
        "stream_options",
        "tool_choice",
        "tools",
    }
)

# What clients add to messages that means nothing to the model.
_SILENT = frozenset({"annotations", "cache_control", "provider_specific_fields"})
_FIELDS = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
    "assistant": frozenset(
        {"role", "content", "name", "tool_calls", "reasoning_content"}
    ),
}


def read(body: Json, reading: Reading) -> ChatRequest:
    """The chat request that the body of ``POST /v1/chat/completions`` holds.

    Raises
    ------
    GatewayError
        A field is missing, malformed, or asks for what this gateway does not do.
    """
    wire.only(body, KNOWN, "")
    for name, allowed in NEUTRAL.items():
        value = body.get(name)
        if value is not None and not any(_same(value, one) for one in allowed):
            refuse(name, f"{value!r} is not supported", code="unsupported_value")
    if body.get("model") is not None:
        wire.as_text(body["model"], "model")
    stream = body.get("stream") is not None and wire.as_flag(body["stream"], "stream")
    return ChatRequest(
        messages=_messages(body.get("messages"), reading),
        tools=_tools(body.get("tools"), body.get("tool_choice")),
        asked=parse_wishes(body),
        stream=stream,
        include_usage=_include_usage(body.get("stream_options"), stream=stream),
    )


def _same(value: object, neutral: object) -> bool:
    # 0 and false are equal in Python and not in JSON
    return isinstance(value, bool) is isinstance(neutral, bool) and value == neutral


def _include_usage(value: object, *, stream: bool) -> bool:
    if value is None:
        return False
    options = wire.as_object(value, "stream_options")
    if not stream:
        refuse("stream_options", "only a streaming request takes them")
    wire.only(options, {"include_usage", "include_obfuscation"}, "stream_options")
    wanted = options.get("include_usage")
    return wanted is not None and wire.as_flag(wanted, "stream_options.include_usage")


def _tools(value: object, choice: object) -> list[Json] | None:
    if choice not in (None, "auto", "none"):
        refuse("tool_choice", f"{choice!r} is not supported", code="unsupported_value")
    if value is None:
        return None
    tools = []
    for i, item in enumerate(wire.as_list(value, "tools")):
        where = f"tools[{i}]"
        tool = wire.as_object(item, where)
        if tool.get("type") != "function":
            refuse(
                f"{where}.type",
                f"{tool.get('type')!r} is not 'function'",
                code="unsupported_tool",
            )
        function = wire.as_object(tool.get("function"), f"{where}.function")
        wire.as_name(function.get("name"), f"{where}.function.name")
        if function.get("strict"):
            refuse(
                f"{where}.function.strict", "replies are not constrained to a schema"
            )
        tools.append(tool)
    return tools if tools and choice != "none" else None


def _messages(value: object, reading: Reading) -> list[Json]:
    items = wire.as_list(value, "messages")
    if not items:
        refuse("messages", "an empty list")
    return [
        canonical_message(item, f"messages[{i}]", reading)
        for i, item in enumerate(items)
    ]


def canonical_message(value: object, where: str, reading: Reading = AS_GIVEN) -> Json:
    """One chat message in canonical form (`trajkit_shim.chat`).

    The role ``developer`` is ``system``; null and missing content is ``""``, and text
    parts are joined by newlines.

    Parameters
    ----------
    value : dict
        A message as a client sends it, or as the gateway's reply holds it.
    where : str
        Its path, for messages.
    reading : Reading

    Raises
    ------
    GatewayError
        The role is unknown, content is not text, or a field is missing or unknown.
    """
    message = wire.as_object(value, where)
    role = wire.as_name(message.get("role"), f"{where}.role")
    role = "system" if role == "developer" else role
    if role not in _FIELDS:
        refuse(f"{where}.role", f"{role!r} is not one of {', '.join(sorted(_FIELDS))}")
    wire.only(message, _FIELDS[role] | _SILENT, where)
    content = message.get("content")
    calls = message.get("tool_calls")
    if content is None and role != "assistant":
        refuse(f"{where}.content", f"missing in a {role} message")
    canonical: Json = {
        "role": role,
        "content": _text(content, f"{where}.content", reading),
    }
    for name in ("name", "reasoning_content"):
        if message.get(name) is not None:
            canonical[name] = wire.as_text(message[name], f"{where}.{name}")
    if role == "tool":
        canonical["tool_call_id"] = wire.as_text(
            message.get("tool_call_id"), f"{where}.tool_call_id"
        )
    if calls:
        canonical["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]")
            for i, call in enumerate(wire.as_list(calls, f"{where}.tool_calls"))
        ]
    return canonical


def _text(content: object, where: str, reading: Reading) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = []
    for i, item in enumerate(wire.as_list(content, where)):
        at = f"{where}[{i}]"
        part = wire.as_object(item, at)
        if part.get("type") == "image_url" and reading.images == "omit":
            parts.append(OMITTED_IMAGE)
            continue
        if part.get("type") != "text":
            refuse(
                f"{at}.type",
                f"{part.get('type')!r} is not supported: messages are text",
                code="unsupported_content",
            )
        wire.only(part, {"type", "text", *_SILENT}, at)
        parts.append(wire.as_text(part.get("text"), f"{at}.text"))
    return "\n".join(parts)


def _tool_call(value: object, where: str) -> Json:
    call = wire.as_object(value, where)
    wire.only(call, {"id", "type", "function", "index", *_SILENT}, where)
    if call.get("type") not in (None, "function"):
        refuse(f"{where}.type", f"{call['type']!r} is not 'function'")
    function = wire.as_object(call.get("function"), f"{where}.function")
    wire.only(function, {"name", "arguments", *_SILENT}, f"{where}.function")
    arguments = function.get("arguments")
    return {
        "id": wire.as_text(call.get("id"), f"{where}.id"),
        "type": "function",
        "function": {
            "name": wire.as_name(function.get("name"), f"{where}.function.name"),
            "arguments": wire.as_text(
                "" if arguments is None else arguments, f"{where}.function.arguments"
            ),
        },
    }


def write(reply: Reply, _: ChatRequest) -> Json:
    """The body of a reply that is not streamed."""
    return {
        "id": f"chatcmpl-{reply.reply_id}",
        "object": "chat.completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [
            {
                "index": 0,
                "message": {**_message(reply), "refusal": None},
                "logprobs": None,
                "finish_reason": _finish_reason(reply),
            }
        ],
        "usage": _usage(reply.usage),
    }


def _message(reply: Reply) -> Json:
    message: Json = {"role": "assistant", "content": reply.text}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [_tool_call_of(call) for call in reply.calls]
    return message


def _tool_call_of(call: Call) -> Json:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


def _finish_reason(reply: Reply) -> str:
    # a cut reply says so beside complete calls too
    if reply.cut:
        return "length"
    return "tool_calls" if reply.calls else "stop"


class Chunks:
    """The chunks of a streamed reply, ``[DONE]`` included.

    Role; reasoning, content and tool calls in the order in which they were sampled; the
    finish reason; then, where the client asked for it, the usage.

    Parameters
    ----------
    include_usage : bool
        The client asked for the usage.
    """

    def __init__(self, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._begun = False
        self._told = Told()
        self._calls = 0

    def opening(self) -> bytes:
        """Nothing: a chunk has the reply's id."""
        return b""

    def ping(self) -> bytes:
        """A comment."""
        return b": waiting for the engine\n\n"

    def partial(self, reply: Reply) -> bytes:
        """The chunks of what is new."""
        return b"".join(self._steps(reply, done=False))

    def reply(self, reply: Reply) -> Iterator[bytes]:
        """All chunks of the reply that were not told."""
        yield from self._steps(reply, done=True)
        yield self._chunk(reply, {}, finish=_finish_reason(reply))
        if self._include_usage:
            yield event({**_head(reply), "choices": [], "usage": _usage(reply.usage)})
        yield DONE

    def error(self, error: GatewayError) -> bytes:
        """The error in place of a chunk."""
        return event(error_body(error)) + DONE

    def _steps(self, reply: Reply, *, done: bool) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield self._chunk(reply, {"role": "assistant", "content": ""})
        # white space alone is content too
        parts: list[Block] = [*reply.parts]
        if reply.reasoning is not None:
            parts.insert(0, Thought(reply.reasoning))
        for step in self._told.steps(parts, done=done):
            if step.what != "goes on":
                continue
            if isinstance(step.block, Call):
                call = {"index": self._calls, **_tool_call_of(step.block)}
                self._calls += 1
                yield self._chunk(reply, {"tool_calls": [call]})
            elif isinstance(step.block, Thought):
                yield self._chunk(reply, {"reasoning_content": step.text})
            else:
                yield self._chunk(reply, {"content": step.text})

    def _chunk(self, reply: Reply, delta: Json, *, finish: str | None = None) -> bytes:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish,
        }
        # with include_usage every chunk but the last says usage: null
        usage: Json = {"usage": None} if self._include_usage else {}
        return event({**_head(reply), "choices": [choice], **usage})


def _head(reply: Reply) -> Json:
    return {
        "id": f"chatcmpl-{reply.reply_id}",
        "object": "chat.completion.chunk",
        "created": reply.created,
        "model": reply.model,
    }


def _usage(usage: Usage) -> Json:
    counts: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens:
        counts["completion_tokens_details"] = {
            "reasoning_tokens": usage.reasoning_tokens
        }
    return counts


OPENAI_CHAT = WireProtocol(
    name="openai_chat",
    paths={"/v1/chat/completions": "reply"},
    call_prefix="call_",
    read=read,
    write=write,
    events=lambda asked: Chunks(asked.include_usage),
    error=error_body,
)

"""OpenAI Chat Completions: requests, replies, chunks and errors."""

from collections.abc import Iterator, Sequence
from functools import partial

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import Images, joined, read_image, refuse_content
from trajkit_shim.chat.reply import Call, Reply, Token, Usage
from trajkit_shim.chat.sampling_params import PARAM_NAMES, parse_sampling
from trajkit_shim.errors import GatewayError, error_body
from trajkit_shim.json_input import (
    Fields,
    Json,
    as_flag,
    as_object,
    objects,
    refuse,
)
from trajkit_shim.protocols.base import WireProtocol
from trajkit_shim.protocols.blocks import Block, Events, Thought
from trajkit_shim.protocols.sse import event

DONE = b"data: [DONE]\n\n"

# accepted and ignored: who asks, and how a provider may store and bill it
HINTS = frozenset(
    "metadata prompt_cache_key prompt_cache_retention safety_identifier service_tier "
    "store user".split()
)
# accepted with the one value that has no effect
NEUTRAL: dict[str, object] = {
    "frequency_penalty": 0,
    "logit_bias": {},
    "modalities": ["text"],
    "presence_penalty": 0,
    "top_logprobs": 0,
}
_OTHERS = (
    "logprobs messages model n parallel_tool_calls response_format stream "
    "stream_options tool_choice tools"
)
KNOWN = frozenset({*HINTS, *NEUTRAL, *PARAM_NAMES, *_OTHERS.split()})
# fields that clients add to messages and that mean nothing to the model
_SILENT = frozenset({"annotations", "cache_control", "provider_specific_fields"})
_FIELDS = {
    "system": frozenset({"role", "content", "name"}),
    "user": frozenset({"role", "content", "name"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
    "assistant": frozenset(
        {"role", "content", "name", "tool_calls", "reasoning_content"}
    ),
}


def read(body: Json, reading: chat.ReadOptions) -> chat.ChatRequest:
    """Read the body of ``POST /v1/chat/completions``; raises `GatewayError`."""
    fields = Fields(body)
    fields.only(KNOWN)
    fields.only_neutral(NEUTRAL)
    fields.get_text("model")
    stream = fields.flag("stream")
    if not stream and fields.get_object("stream_options") is not None:
        refuse("stream_options", "only allowed in a streaming request")
    options = fields.section("stream_options")
    options.only({"include_usage", "include_obfuscation"})
    schema = chat.text_schema(fields, "response_format")
    tools, required = read_required(fields, *_tools(fields), schema)
    return chat.ChatRequest(
        messages=[
            canonical_message(message.json, message.path, reading)
            for message in fields.filled("messages")
        ],
        tools=tools,
        required=required,
        sampling=parse_sampling(fields),
        n=fields.get("n", chat.as_choices) or 1,
        logprobs=fields.flag("logprobs"),
        stream=stream,
        include_usage=options.flag("include_usage"),
    )


def read_required(
    fields: Fields, tools: list[Json], strict: list[str], schema: Json | None
) -> tuple[list[Json] | None, chat.Required]:
    """Return the tools that may be called, and the required form of the reply.

    They follow from ``tool_choice`` and ``parallel_tool_calls``, the tools with the names
    of strict ones, and the schema of the text. Raises `GatewayError` for another choice.
    """
    given = fields.json.get("tool_choice") or "auto"
    names: tuple[str, ...] = ()
    if isinstance(given, dict):
        choice = fields.object("tool_choice")
        given = choice.name("type")
        if given == "function":
            given, names = "required", (_named(choice),)
        elif given == "allowed_tools":
            allowed = choice.object(given) if given in choice.json else choice
            given = allowed.name("mode")
            names = tuple(map(_named, allowed.filled("tools")))
    if given not in ("auto", "none", "required"):
        refuse("tool_choice", f"{given!r} is not supported", code="unsupported_value")
    return tools if tools and given != "none" else None, chat.Required(
        call=given == "required",
        names=names,
        parallel=fields.get("parallel_tool_calls", as_flag) is not False,
        strict=strict,
        schema=schema,
    )


def _named(choice: Fields) -> str:
    """The name of a chosen tool, which Chat Completions nest and Responses do not."""
    nested = "function" in choice.json
    return (choice.object("function") if nested else choice).name("name")


def _tools(fields: Fields) -> tuple[list[Json], list[str]]:
    """The tools, and the names of those whose arguments must match their schema."""
    tools, strict = [], []
    for tool in fields.objects("tools"):
        kind = tool.json.get("type")
        if kind != "function":
            tool.refuse("type", f"{kind!r} is not 'function'", "unsupported_tool")
        function = tool.object("function")
        name = function.name("name")
        strict += [name] * function.flag("strict")
        tools.append(tool.json)
    return tools, strict


def canonical_message(
    value: object, where: str, reading: chat.ReadOptions = chat.DEFAULT_OPTIONS
) -> Json:
    """Return a chat message in canonical form (`trajkit_shim.chat.request`).

    The role ``developer`` becomes ``system``, null or missing content ``""``, and text
    parts are joined by newlines. ``where`` is the message's path in error messages.
    Raises `GatewayError` if the role is unknown, content is not text, or a field is
    missing or unknown.
    """
    message = Fields(as_object(value, where), where)
    role = message.name("role")
    role = "system" if role == "developer" else role
    if role not in _FIELDS:
        known = ", ".join(sorted(_FIELDS))
        message.refuse("role", f"{role!r} is not one of {known}")
    message.only(_FIELDS[role] | _SILENT)
    content = message.json.get("content")
    if content is None and role != "assistant":
        message.refuse("content", f"missing in a {role} message")
    shows = role in ("user", "tool")
    found = _content(content, message.at("content"), reading.images, shows=shows)
    canonical: Json = {"role": role, "content": found}
    for name in ("name", "reasoning_content"):
        if message.json.get(name) is not None:
            canonical[name] = message.text(name)
    if role == "tool":
        canonical["tool_call_id"] = message.text("tool_call_id")
    calls = [_tool_call(call) for call in message.objects("tool_calls")]
    if calls:
        canonical["tool_calls"] = calls
    return canonical


def _content(
    content: object, where: str, images: Images, *, shows: bool
) -> str | list[Json]:
    """The content of a message that may show images or not."""
    if isinstance(content, str):
        return content
    parts: list[str | Json] = []
    for part in objects([] if content is None else content, where):
        kind = part.json.get("type")
        if kind == "image_url" and (shows or images == "omit"):
            parts.append(read_image(part, "type", partial(_url, part), images))
            continue
        if kind != "text":
            refuse_content(part, "type", kind)
        part.only({"type", "text", *_SILENT})
        parts.append(part.text("text"))
    return joined(parts)


def _url(part: Fields) -> str:
    """The source of an image, whose ``detail`` does not apply to the model's processor."""
    image = part.object("image_url")
    image.only({"url", "detail"})
    return image.text("url")


def _tool_call(call: Fields) -> Json:
    call.only({"id", "type", "function", "index", *_SILENT})
    if call.json.get("type") not in (None, "function"):
        call.refuse("type", f"{call.json['type']!r} is not 'function'")
    call_id, function = call.text("id"), call.object("function")
    function.only({"name", "arguments", *_SILENT})
    arguments = function.get_text("arguments") or ""
    return chat.tool_call(call_id, function.name("name"), arguments)


def write(reply: Reply, _: chat.ChatRequest) -> Json:
    """Return the body of a reply that is not streamed."""
    choices = [
        {
            "index": index,
            "message": {**_message(one), "refusal": None},
            "logprobs": _logprobs(one),
            "finish_reason": _finish_reason(one),
        }
        for index, one in enumerate(reply.choices)
    ]
    head = _head(reply, "chat.completion")
    return {**head, "choices": choices, "usage": _usage(reply.usage)}


def _logprobs(reply: Reply) -> Json | None:
    if reply.tokens is None:
        return None
    return {"content": token_logprobs(reply.tokens), "refusal": None}


def token_logprobs(tokens: Sequence[Token]) -> list[Json]:
    """Return tokens with their logprobs, in the form of OpenAI's protocols."""
    return [
        {
            "token": token.text,
            "bytes": [*token.text.encode("utf-8", "replace")],
            "logprob": token.logprob,
            "top_logprobs": [],
        }
        for token in tokens
    ]


def _message(reply: Reply) -> Json:
    message: Json = {"role": "assistant", "content": reply.text}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["content"] = reply.text or None
        message["tool_calls"] = [_tool_call_of(call) for call in reply.calls]
    return message


def _tool_call_of(call: Call) -> Json:
    return chat.tool_call(call.call_id, call.name, call.arguments)


def _finish_reason(reply: Reply) -> str:
    # length has precedence even after complete calls
    if reply.cut:
        return "length"
    return "tool_calls" if reply.calls else "stop"


class Chunks(Events):
    """The chunks of a streamed reply, including ``[DONE]``.

    Role; reasoning, content and tool calls in sampled order; the finish reason with all
    logprobs; the same for each other choice; then the usage, if the client asked for it.
    """

    def __init__(self, include_usage: bool, index: int = 0) -> None:
        super().__init__()
        self._include_usage = include_usage
        self._index = index
        self._begun = False
        self._calls = 0

    def ping(self) -> bytes:
        return b": waiting for the engine\n\n"

    def reply(self, reply: Reply) -> Iterator[bytes]:
        for index, one in enumerate(reply.choices):
            chunks = Chunks(self._include_usage, index) if index else self
            yield from chunks._new(one, done=True)
            yield chunks._chunk(one, {}, finish=_finish_reason(one))
        if self._include_usage:
            yield event({**_head(reply), "choices": [], "usage": _usage(reply.usage)})
        yield DONE

    def error(self, error: GatewayError) -> bytes:
        return event(error_body(error)) + DONE

    def _new(self, reply: Reply, *, done: bool) -> Iterator[bytes]:
        if not self._begun:
            self._begun = True
            yield self._chunk(reply, {"role": "assistant", "content": ""})
        # here white space alone is content too
        parts: list[Block] = [*reply.parts]
        if reply.reasoning is not None:
            parts.insert(0, Thought(reply.reasoning))
        for step in self._progress.steps(parts, done=done):
            if step.what != "text":
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
            "index": self._index,
            "delta": delta,
            "logprobs": None if finish is None else _logprobs(reply),
            "finish_reason": finish,
        }
        # with include_usage every chunk but the last has a null usage
        usage: Json = {"usage": None} if self._include_usage else {}
        return event({**_head(reply), "choices": [choice], **usage})


def _head(reply: Reply, kind: str = "chat.completion.chunk") -> Json:
    return {
        "id": f"chatcmpl-{reply.reply_id}",
        "object": kind,
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
        reasoning = {"reasoning_tokens": usage.reasoning_tokens}
        counts["completion_tokens_details"] = reasoning
    return counts


OPENAI_CHAT = WireProtocol(
    name="openai_chat",
    history="messages",
    paths={"/v1/chat/completions": "reply"},
    call_prefix="call_",
    read=read,
    write=write,
    events=lambda request: Chunks(request.include_usage),
    error=error_body,
)

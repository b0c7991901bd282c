"""OpenAI Chat Completions: requests, replies, chunks and errors.

Accepted and ignored: fields about who asks, and about storing and billing.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import GivenImage, Part, Readers, joined, read_parts
from trajkit_shim.chat.reply import Reply, Token, ToolCall, Usage
from trajkit_shim.chat.sampling_params import PARAM_NAMES, parse_sampling
from trajkit_shim.errors import error_body
from trajkit_shim.json_input import Fields, Json, as_flag
from trajkit_shim.protocols.base import WireProtocol
from trajkit_shim.protocols.stream import Thought, blocks

_CHUNK = "chat.completion.chunk"

_KNOWN = (
    "chat_template_kwargs logprobs messages metadata model n parallel_tool_calls "
    "prompt_cache_key reasoning reasoning_effort "
    "prompt_cache_retention response_format safety_identifier service_tier store stream "
    "stream_options thinking tool_choice tools user"
)
# fields that clients add to messages and that mean nothing to the model
_SILENT = frozenset({"annotations", "cache_control", "provider_specific_fields"})
# those of a message besides role, content and name
_FIELDS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("system", "developer", "user"), ()),
    "tool": ("tool_call_id",),
    "assistant": (
        *("tool_calls", "reasoning_content", "reasoning", "reasoning_details"),
        *("thinking_blocks", "refusal"),
    ),
}


def _parse(fields: Fields) -> chat.ChatRequest:
    stream = fields.flag("stream")
    options = fields.section("stream_options")
    fields.get("n", chat.as_one_reply)
    options.only({"include_usage", "include_obfuscation"})
    tools = chat.Tools()
    for tool in fields.objects("tools"):
        kind = tool.name("type")
        if kind != "function":
            # only a provider can run it
            tools.left_out.append(kind)
            continue
        function = tool.object("function")
        tools.functions.append(tool.json)
        tools.strict += [function.name("name")] * function.flag("strict")
    schema = chat.text_schema(fields, "response_format")
    offered, required = read_required(fields, tools, schema)
    return chat.ChatRequest(
        messages=[canonical_message(each) for each in fields.filled("messages")],
        tools=offered,
        required=required,
        sampling=parse_sampling(fields),
        thinking=thinking(fields),
        left_out=tuple(tools.left_out),
        logprobs=fields.flag("logprobs"),
        stream=stream,
        include_usage=options.flag("include_usage"),
    )


def thinking(fields: Fields) -> chat.Thinking:
    """Read the fields of OpenAI's protocols about reasoning, and the template's."""
    reasoning = fields.section("reasoning")
    reasoning.only({"effort", "summary", "generate_summary"})
    # as Anthropic's, from proxies
    switch = fields.section("thinking").json.get("type")
    return chat.Thinking(
        variables=fields.section("chat_template_kwargs").json,
        effort=fields.get_text("reasoning_effort") or reasoning.get_text("effort"),
        on=chat.SWITCH.get(str(switch)),
    )


def read_required(
    fields: Fields, tools: chat.Tools, schema: Json | None
) -> tuple[list[Json] | None, chat.Required]:
    """Return the tools that may be called, and the required form of the reply."""
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
        fields.ignore("tool_choice", str(given))
    return tools.offered(none=given == "none"), chat.Required(
        call=given == "required",
        names=names,
        parallel=fields.get("parallel_tool_calls", as_flag) is not False,
        strict=tools.strict,
        schema=schema,
    )


def _named(choice: Fields) -> str:
    """The name of a chosen tool, which Chat Completions nest and Responses do not."""
    nested = "function" in choice.json
    return (choice.object("function") if nested else choice).name("name")


def canonical_message(message: Fields) -> Json:
    """Return a chat message in canonical form (`trajkit_shim.chat.request`)."""
    role = known_role(message, _FIELDS)
    message.only({"role", "content", "name", *_FIELDS[role], *_SILENT})
    found = message.json.get("content") is not None
    if not found and role != "assistant":
        message.refuse("content", f"missing in a {role} message")
    parts = read_parts(message, "content", _PARTS) if found else []
    role = "system" if role == "developer" else role
    canonical: Json = {"role": role, "content": joined(parts)}
    if message.json.get("name") is not None:
        canonical["name"] = message.text("name")
    if role == "assistant":
        # as SGLang, vLLM and OpenRouter name it
        thought = message.json.get("reasoning_content") or message.json.get("reasoning")
        if isinstance(thought, str) and thought:
            canonical["reasoning_content"] = thought
    if role == "tool":
        canonical["tool_call_id"] = message.text("tool_call_id")
    calls = [_tool_call(call) for call in message.objects("tool_calls")]
    if calls:
        canonical["tool_calls"] = calls
    return canonical


def known_role(message: Fields, roles: Collection[str]) -> str:
    """Return the role of a message; one that no template knows is the user's."""
    role = message.name("role")
    if role not in roles:
        message.ignore("role", role)
        return "user"
    return role


def _text(part: Fields) -> str:
    part.only({"type", "text", *_SILENT})
    return part.text("text")


def _url(part: Fields) -> str:
    image = part.object("image_url")
    # the detail does not apply to the model's processor
    image.only({"url", "detail"})
    return image.text("url")


_image = partial(GivenImage, name="type", kind="image_url", url=_url)
_PARTS: Readers[Part] = {"text": _text, "image_url": _image}


def _tool_call(call: Fields) -> Json:
    call.only({"id", "type", "function", "index", *_SILENT})
    call_id, function = call.text("id"), call.object("function")
    function.only({"name", "arguments", *_SILENT})
    arguments = function.get_text("arguments") or ""
    return chat.tool_call(call_id, function.name("name"), arguments)


def write(reply: Reply, _: chat.ChatRequest) -> Json:
    message: Json = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = [_call(call) for call in reply.calls]
    choice: Json = {"index": 0, "message": message, **_ending(reply)}
    body = _body(reply, "chat.completion", [choice])
    return {**body, "usage": _usage(reply.usage)}


def _body(reply: Reply, kind: str, choices: list[Json]) -> Json:
    return {
        "id": f"chatcmpl-{reply.reply_id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
    }


def _ending(reply: Reply) -> Json:
    reasons = {"cut": "length", "calls": "tool_calls"}
    logprobs = None
    if reply.tokens is not None:
        logprobs = {"content": token_logprobs(reply.tokens), "refusal": None}
    return {"logprobs": logprobs, "finish_reason": reasons.get(reply.ending, "stop")}


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


def _call(call: ToolCall) -> Json:
    return chat.tool_call(call.call_id, call.name, call.arguments)


def _chunks(reply: Reply, request: chat.ChatRequest, _: int) -> Iterator[Json]:
    # with include_usage every chunk but the last has a null usage
    usage: Json = {"usage": None} if request.include_usage else {}

    def chunk(delta: Json, ending: Json | None = None) -> Json:
        ending = ending or {"logprobs": None, "finish_reason": None}
        choice = {"index": 0, "delta": delta, **ending}
        return {**_body(reply, _CHUNK, [choice]), **usage}

    yield chunk({"role": "assistant", "content": ""})
    n_calls = 0
    # here white space alone is content too
    for block in blocks(reply, spaces=True):
        if isinstance(block, ToolCall):
            yield chunk({"tool_calls": [{"index": n_calls, **_call(block)}]})
            n_calls += 1
        elif isinstance(block, Thought):
            if block.text:
                yield chunk({"reasoning_content": block.text})
        elif block:
            yield chunk({"content": block})
    yield chunk({}, _ending(reply))
    if request.include_usage:
        yield {**_body(reply, _CHUNK, []), "usage": _usage(reply.usage)}


def _usage(usage: Usage) -> Json:
    counts: Json = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
    }
    if usage.cached_tokens is not None:
        counts["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if usage.reasoning_tokens:
        reasoning = {"reasoning_tokens": usage.reasoning_tokens}
        counts["completion_tokens_details"] = reasoning
    return counts


OPENAI_CHAT = WireProtocol(
    name="openai_chat",
    paths={"/v1/chat/completions": "reply"},
    known=frozenset({*PARAM_NAMES, *_KNOWN.split()}),
    neutral={
        "frequency_penalty": 0,
        "logit_bias": {},
        "modalities": ["text"],
        "presence_penalty": 0,
        "top_logprobs": 0,
    },
    parse=_parse,
    write=write,
    events=_chunks,
    ping=lambda *_: b": waiting for the engine\n\n",
    error=error_body,
    stream_end=b"data: [DONE]\n\n",
)

"""OpenAI Chat Completions: requests, replies, chunks and errors."""

from collections.abc import Iterator
from functools import partial

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import Part, Readers, joined, read_image, read_parts
from trajkit_shim.chat.request import Reply, Usage
from trajkit_shim.errors import error_body
from trajkit_shim.json_input import Fields, Json, as_flag
from trajkit_shim.protocols.base import WireProtocol, known_role

_ROLES = ("system", "developer", "user", "tool", "assistant")


def _parse(fields: Fields) -> chat.ChatRequest:
    options = fields.section("stream_options")
    fields.get("n", chat.as_one_reply)
    tools = chat.Tools()
    for tool in fields.objects("tools"):
        kind = tool.name("type")
        if kind != "function":
            tools.leave_out(tool, kind)
            continue
        function = tool.object("function")
        tools.strict += [function.name("name")] * function.flag("strict")
        tools.functions.append(tool.whole())
        function.whole()
    sampling = {"max_tokens": "max_tokens"}
    if fields.peek("max_completion_tokens") is not None:
        newer, older = fields.json["max_completion_tokens"], fields.peek("max_tokens")
        if older not in (None, newer):
            rule = f"{newer} contradicts max_tokens = {older}"
            fields.refuse("max_completion_tokens", rule)
        sampling["max_tokens"] = "max_completion_tokens"
    schema = chat.text_schema(fields, "response_format")
    if fields.peek("modalities") not in (None, ["text"]):
        fields.ignore("modalities")
    offered, required = read_required(fields, tools, schema)
    return chat.ChatRequest(
        messages=fields.each("messages", canonical_message),
        tools=offered,
        required=required,
        sampling=chat.parse_sampling(fields, sampling),
        thinking=thinking(fields),
        left_out=tuple(tools.left_out),
        stream=fields.flag("stream"),
        include_usage=options.flag("include_usage"),
    )


def thinking(fields: Fields) -> chat.Thinking:
    """Read the fields of OpenAI's protocols about reasoning, and the template's."""
    reasoning = fields.section("reasoning")
    # as Anthropic's, from proxies
    switch = fields.section("thinking").peek("type")
    return chat.Thinking(
        variables=fields.get_object("chat_template_kwargs") or {},
        effort=fields.get_text("reasoning_effort") or reasoning.get_text("effort"),
        on=chat.SWITCH.get(str(switch)),
    )


def read_required(
    fields: Fields, tools: chat.Tools, schema: Json | None
) -> tuple[list[Json] | None, chat.Required]:
    """Return the tools that may be called, and the required form of the reply."""
    given = fields.peek("tool_choice") or "auto"
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
        choice.whole()
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
    role = known_role(message, _ROLES)
    found = message.peek("content") is not None
    if not found and role != "assistant":
        message.refuse("content", f"missing in a {role} message")
    readers = _PARTS if role in ("user", "tool") else _TEXTS
    parts = read_parts(message, "content", readers) if found else []
    canonical: Json = {
        "role": "system" if role == "developer" else role,
        "content": joined(parts),
    }
    if message.peek("name") is not None:
        canonical["name"] = message.text("name")
    if role == "tool":
        canonical["tool_call_id"] = message.text("tool_call_id")
    if role == "assistant":
        # as SGLang, vLLM and OpenRouter name it
        thought = message.peek("reasoning_content") or message.peek("reasoning")
        message.peek("reasoning")
        if isinstance(thought, str) and thought:
            canonical["reasoning_content"] = thought
        calls = [_tool_call(call) for call in message.objects("tool_calls")]
        if calls:
            canonical["tool_calls"] = calls
    return canonical


def _url(part: Fields) -> str:
    return part.object("image_url").text("url")


def _image(part: Fields) -> Part:
    return read_image(part, "type", "image_url", _url)


_TEXTS: Readers = {"text": partial(Fields.text, name="text")}
_PARTS: Readers = {**_TEXTS, "image_url": _image}


def _tool_call(call: Fields) -> Json:
    call_id, function = call.text("id"), call.object("function")
    arguments = function.get_text("arguments") or ""
    return chat.tool_call(call_id, function.name("name"), arguments)


def write(reply: Reply, _: chat.ChatRequest) -> Json:
    message: Json = {"role": "assistant", "content": reply.text, "refusal": None}
    if reply.reasoning is not None:
        message["reasoning_content"] = reply.reasoning
    if reply.calls:
        message["tool_calls"] = _calls(reply)
    body = _body(reply, "chat.completion", "message", message)
    return {**body, "usage": _usage(reply.usage)}


def _calls(reply: Reply) -> list[Json]:
    return [chat.tool_call(c.call_id, c.name, c.arguments) for c in reply.calls]


def _body(reply: Reply, kind: str, name: str, value: Json, last: bool = True) -> Json:
    reason = {"cut": "length", "calls": "tool_calls"}.get(reply.ending, "stop")
    choice: Json = {"index": 0, name: value, "logprobs": None}
    return {
        "id": f"chatcmpl-{reply.reply_id}",
        "object": kind,
        "created": reply.created,
        "model": reply.model,
        "choices": [{**choice, "finish_reason": reason if last else None}],
    }


def _chunks(reply: Reply, request: chat.ChatRequest, _: int) -> Iterator[Json]:
    # with include_usage every chunk but the last has a null usage
    usage: Json = {"usage": None} if request.include_usage else {}
    made = partial(_body, reply, "chat.completion.chunk", "delta")
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    if reply.reasoning:
        deltas.append({"reasoning_content": reply.reasoning})
    if reply.text:
        deltas.append({"content": reply.text})
    for index, call in enumerate(_calls(reply)):
        deltas.append({"tool_calls": [{"index": index, **call}]})
    for delta in deltas:
        yield made(delta, last=False) | usage
    yield made({}) | usage
    if request.include_usage:
        yield made({}) | {"choices": [], "usage": _usage(reply.usage)}


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
    listed="messages",
    parse=_parse,
    write=write,
    events=_chunks,
    ping=lambda *_: b": waiting for the engine\n\n",
    error=error_body,
    stream_end=b"data: [DONE]\n\n",
)

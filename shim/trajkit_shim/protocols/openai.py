"""OpenAI Chat Completions and Responses: requests, replies, chunks, events and errors.

A Responses client sends the entire conversation each time, but may name the items of its
session's replies by their ids. There is no ``previous_response_id``. The items of one
sampled turn form one message; they belong together up to another role's message or the
next turn's reasoning.
"""

import base64
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from trajkit_shim.chat import images
from trajkit_shim.chat import request as chat
from trajkit_shim.chat.request import ChatRequest, Reply, Spoken, Thought, ToolCall
from trajkit_shim.errors import GatewayError, error_body
from trajkit_shim.json_input import Fields, Json, as_flag, as_name
from trajkit_shim.protocols import base
from trajkit_shim.protocols.base import WireProtocol, known_role

_ROLES = ("system", "developer", "user", "tool", "assistant")
_SYSTEM = {"developer": "system"}


def _request(
    fields: Fields,
    messages: list[Json],
    tools: base.Tools,
    schema: Json | None,
    **rest: Any,
) -> ChatRequest:
    """Read what a reply has to be like, and how the model thinks."""
    given, names = fields.peek("tool_choice") or "auto", tuple[str, ...]()
    if isinstance(given, dict):
        choice = fields.object("tool_choice")
        given = choice.name("type")
        if given == "function":
            given, names = "required", (_named(choice),)
        elif given == "allowed_tools":
            allowed = choice.object(given) if given in choice.json else choice
            given = allowed.name("mode")
            names = tuple(map(_named, allowed.objects("tools", needed=True)))
        choice.whole()
    if given not in ("auto", "none", "required"):
        fields.ignore("tool_choice", str(given))
    reasoning = fields.section("reasoning")
    return base.chat_request(
        fields,
        messages,
        tools,
        none=given == "none",
        required={
            "call": given == "required",
            "names": names,
            "parallel": fields.get("parallel_tool_calls", as_flag) is not False,
            "schema": schema,
        },
        thinking={
            "effort": fields.get_text("reasoning_effort")
            or reasoning.get_text("effort"),
            # Anthropic's field comes from proxies
            "on": base.THINKS.get(str(fields.section("thinking").peek("type"))),
        },
        stream=fields.flag("stream"),
        **rest,
    )


def _named(choice: Fields) -> str:
    """The name of a chosen tool, which Chat Completions nest and Responses do not."""
    nested = "function" in choice.json
    return (choice.object("function") if nested else choice).name("name")


# Chat Completions


def _parse_chat(fields: Fields) -> ChatRequest:
    options = fields.section("stream_options")
    fields.get("n", base.one_reply)
    base.refuse_fields(fields, "offer them as tools", "functions")
    tools = base.Tools()
    for tool in fields.objects("tools"):
        kind = tool.name("type")
        if kind != "function":
            tool.leave_out(kind)
            continue
        function = tool.object("function")
        tools.strict += [function.name("name")] * function.flag("strict")
        tools.functions.append(tool.whole())
        function.whole()
    newer = fields.peek("max_completion_tokens") is not None
    limit = "max_completion_tokens" if newer else "max_tokens"
    fields.peek("max_tokens")
    return _request(
        fields,
        fields.each("messages", canonical_message),
        tools,
        base.text_schema(fields, "response_format"),
        sampling=chat.parse_sampling(fields, {"max_tokens": limit}),
        include_usage=options.flag("include_usage"),
    )


def canonical_message(message: Fields) -> Json:
    """Return a chat message in canonical form (`trajkit_shim.chat.request`)."""
    role, content = known_role(message, _ROLES), list[Any]()
    readers = _CHAT_PARTS if role in ("user", "tool") else _CHAT_TEXTS
    if message.peek("content") is not None:
        content = images.read_parts(message, "content", readers)
    elif role != "assistant":
        message.refuse("content", f"missing in a {role} message")
    text = images.joined(content)
    canonical: Json = {"role": _SYSTEM.get(role, role), "content": text}
    if role == "assistant":
        # as SGLang, vLLM and OpenRouter name it
        named = message.peek("reasoning_content"), message.peek("reasoning")
        thought = named[0] or named[1]
        thought = thought if isinstance(thought, str) else ""
        calls = map(_called, message.objects("tool_calls"))
        canonical = chat.assistant_message([Thought(thought), str(text), *calls])
    if role == "tool":
        canonical["tool_call_id"] = message.text("tool_call_id")
    if message.peek("name") is not None:
        canonical["name"] = message.text("name")
    return canonical


def _called(call: Fields) -> ToolCall:
    call_id, function = call.text("id"), call.object("function")
    arguments = function.get_text("arguments") or ""
    return ToolCall(function.name("name"), arguments, call_id)


_CHAT_TEXTS: images.Readers = {"text": partial(Fields.text, name="text")}
_CHAT_PARTS: images.Readers = {
    **_CHAT_TEXTS,
    "image_url": lambda p: images.read_image(p, p.object("image_url").text("url")),
}


def _write_chat(reply: Reply, _: ChatRequest) -> Json:
    message: Json = {"role": "assistant", "content": reply.text, "refusal": None}
    body = _body(reply, "chat.completion", "message", message | reply.message)
    return {**body, "usage": _chat_usage(reply.usage)}


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


def _chunks(reply: Reply, request: ChatRequest, _: int) -> Iterator[Json]:
    # with include_usage every chunk but the last has a null usage
    usage: Json = {"usage": None} if request.include_usage else {}
    made = partial(_body, reply, "chat.completion.chunk", "delta")
    texts = {"reasoning_content": reply.reasoning, "content": reply.text}
    deltas: list[Json] = [{"role": "assistant", "content": ""}]
    deltas += [{name: text} for name, text in texts.items() if text]
    for index, call in enumerate(reply.calls):
        deltas.append({"tool_calls": [{"index": index, **call.json}]})
    for delta in deltas:
        yield made(delta, last=False) | usage
    yield made({}) | usage
    if request.include_usage:
        yield made({}) | {"choices": [], "usage": _chat_usage(reply.usage)}


def _chat_usage(usage: chat.Usage) -> Json:
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
    parse=_parse_chat,
    write=_write_chat,
    events=_chunks,
    ping=lambda *_: b": waiting for the engine\n\n",
    error=error_body,
    stream_end=b"data: [DONE]\n\n",
)

# Responses: requests

_NAMES = {"max_tokens": "max_output_tokens", "stop": None, "seed": None, "top_k": None}
# prefix of encoded reasoning, which is not secret
_PACKED = "trajkit1."
# Codex does not retry after this and invalid_prompt
_TOO_LONG = "context_length_exceeded"


def _parse_responses(fields: Fields) -> ChatRequest:
    stored = "previous_response_id", "conversation", "prompt"
    base.refuse_fields(fields, base.STORED, *stored)
    tools = base.Tools()
    _add_tools(tools, fields)
    return _request(
        fields,
        chat.system_message(fields.get_text("instructions")) + _messages(fields),
        tools,
        base.text_schema(fields.section("text"), "format"),
        sampling=chat.parse_sampling(fields, _NAMES),
    )


def _add_tools(tools: base.Tools, fields: Fields, namespace: str = "") -> None:
    """Add a list of tools; names in a namespace get its name as prefix."""
    for tool in fields.objects("tools"):
        kind = tool.name("type")
        if kind == "function":
            prefix = f"{namespace}__" if namespace else ""
            name = tools.add(tool, tool.get_object("parameters"), prefix)
            if namespace:
                tools.namespaces[name] = namespace, tool.name("name")
        elif kind == "namespace" and not namespace:
            tool.peek("description")
            _add_tools(tools, tool, tool.name("name"))
        else:
            tool.leave_out(kind)


def _messages(fields: Fields) -> list[Json]:
    value = fields.peek("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    # a turn's parts become a message once they are complete
    found: list[Json | list[Spoken]] = []
    for read in fields.each("input", _item):
        turn = found[-1] if found else None
        if not isinstance(read, list):
            found += [] if read is None else [read]
        elif not isinstance(turn, list) or (
            any(_thoughts(read)) and not all(_thoughts(turn))
        ):
            found.append([*read])
        else:
            turn += read
    if not found:
        fields.refuse("input", "no message of a kind that is known here")
    return [chat.assistant_message(e) if isinstance(e, list) else e for e in found]


def _thoughts(parts: list[Spoken]) -> list[bool]:
    return [isinstance(part, Thought) for part in parts]


def _item(item: Fields) -> Json | list[Spoken] | None:
    """A message, parts of the assistant's, or None: an item that is not known here."""
    kind = as_name(item.json.get("type", "message"), item.at("type"))
    if kind == "item_reference":
        item_id = item.text("id")
        reply = item.reading.replies.get("".join(item_id.split("_")[1:2]))
        part = _by_id(reply).get(item_id) if reply else None
        if part is None:
            rule = "is of no reply of this session: send the item itself"
            item.refuse("id", f"{item_id!r} {rule}", "unsupported_value")
        return [part]
    if kind == "function_call_output":
        output = images.read_parts(item, "output", _PARTS)
        return chat.tool_message(item.text("call_id"), output)
    if kind == "reasoning":
        return [Thought(_reasoning(item))]
    if kind == "function_call":
        name, namespace = item.name("name"), item.get("namespace", as_name)
        name = f"{namespace}__{name}" if namespace else name
        return [ToolCall(name, item.text("arguments"), item.text("call_id"))]
    if kind != "message":
        item.leave_out(kind)
        return None
    role = known_role(item, [each for each in _ROLES if each != "tool"])
    readers = _PARTS if role == "user" else _TEXTS
    parts = images.read_parts(item, "content", readers)
    if role == "assistant":
        return parts
    return {"role": _SYSTEM.get(role, role), "content": images.joined(parts)}


def _text(part: Fields) -> str:
    part.peek("logprobs")
    return part.text("text")


_TEXTS: images.Readers = dict.fromkeys(("input_text", "output_text", "text"), _text)
_PARTS: images.Readers = {
    **_TEXTS,
    "input_image": lambda part: images.read_image(part, part.text("image_url")),
}


def _reasoning(item: Fields) -> str:
    """The text of a reasoning item: its content, or the encoded text."""
    packed = item.get_text("encrypted_content") or ""
    if item.peek("content"):
        return "".join(part.text("text") for part in item.objects("content"))
    with suppress(ValueError):
        if packed.startswith(_PACKED):
            return base64.urlsafe_b64decode(packed.removeprefix(_PACKED)).decode()
    if packed:
        # not encoded by this gateway
        item.ignore("encrypted_content")
    return ""


# Responses: replies


def _response(response_id: str, created: int, **changes: object) -> dict[str, Any]:
    """A response; without changes it has no reply."""
    unknown = ("error", "incomplete_details", "instructions", "previous_response_id")
    return {
        "id": f"resp_{response_id}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        **dict.fromkeys((*unknown, "usage")),
        "metadata": {},
        "model": "",
        "output": [],
        "parallel_tool_calls": True,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        **changes,
    }


def _outcome(reply: Reply, request: ChatRequest) -> dict[str, Any]:
    """What a response has once its reply is complete."""
    usage, cached = reply.usage, reply.usage.cached_tokens or 0
    return {
        "model": reply.model,
        "status": "incomplete" if reply.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.cut else None,
        "output": _items(reply, request),
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        },
    }


def _by_id(reply: Reply) -> dict[str, Spoken]:
    """The parts of a reply by the ids of their items."""
    blocks = reply.blocks
    if isinstance(blocks[-1], Thought):
        blocks.append(reply.text)
    kinds = {Thought: "rs", ToolCall: "fc", str: "msg"}
    names = (f"{kinds[type(b)]}_{reply.reply_id}_{k}" for k, b in enumerate(blocks))
    return dict(zip(names, blocks, strict=True))


def _items(reply: Reply, request: ChatRequest) -> list[dict[str, Any]]:
    """The output items of a complete reply, which has a text or a call."""
    items, item = list[dict[str, Any]](), dict[str, Any]()
    for name, block in _by_id(reply).items():
        if isinstance(block, Thought):
            packed = base64.urlsafe_b64encode(block.text.encode()).decode()
            item = {"type": "reasoning", "id": name, "summary": []}
            item["content"] = [{"type": "reasoning_text", "text": block.text}]
            item["encrypted_content"] = _PACKED + packed
        elif isinstance(block, ToolCall):
            item = {"type": "function_call", "id": name, "name": block.name}
            item |= {"call_id": block.call_id, "arguments": block.arguments}
            if block.name in request.namespaces:
                item["namespace"], item["name"] = request.namespaces[block.name]
        else:
            item = {"type": "message", "id": name, "role": "assistant"}
            text = {"type": "output_text", "text": block, "annotations": []}
            item["content"] = [text]
        items.append({**item, "status": "completed"})
    if reply.cut:
        items[-1]["status"] = "incomplete"
    return items


def _numbered(
    request: ChatRequest,
    n_pings: int,
    last: Iterable[tuple[str, Json]],
    **changes: object,
) -> Iterator[Json]:
    """The events that follow some keep-alive events; if none, the opening too.

    Those without fields are about the response with ``changes``.
    """
    begun: Json = {"response": _response(request.stream_id, request.created)}
    ended: Json = {"response": _response(request.stream_id, request.created, **changes)}
    opening = [] if n_pings else [("created", begun), ("in_progress", begun)]
    first = n_pings + 2 if n_pings else 0
    for number, (kind, fields) in enumerate((*opening, *last), first):
        given = {"type": f"response.{kind}", "sequence_number": number}
        yield {**given, **(fields or ended)}


def _ping(request: ChatRequest, n_pings: int) -> bytes:
    events = _numbered(request, n_pings, [("in_progress", {})])
    return b"".join(map(base.event, events))


def _failed(error: GatewayError, request: ChatRequest, n_pings: int) -> Iterator[Json]:
    code = "invalid_prompt" if error.status < 500 else "server_error"
    code = _TOO_LONG if error.code == _TOO_LONG else code
    shown = {"code": code, "message": error.message}
    return _numbered(request, n_pings, [("failed", {})], status="failed", error=shown)


def _events(reply: Reply, request: ChatRequest, n_pings: int) -> Iterator[Json]:
    outcome = _outcome(reply, request)
    filled = [e for k, item in enumerate(outcome["output"]) for e in _filled(item, k)]
    filled.append((outcome["status"], {}))
    return _numbered(request, n_pings, filled, **outcome)


def _filled(item: dict[str, Any], index: int) -> Iterator[tuple[str, Json]]:
    """The events that add an item, fill it and finish it."""
    output: Json = {"output_index": index, "item": item}
    place: Json = {"item_id": item["id"], "output_index": index}
    parts = item.get("content", [])
    if parts:
        kind, text, place["content_index"] = parts[0]["type"], parts[0]["text"], 0
        done: Json = {"text": text}
    else:
        kind, text = "function_call_arguments", item["arguments"]
        done = {"arguments": text, "name": item["name"]}
    # clients expect it of a message's text
    none: Json = {"logprobs": []} if kind == "output_text" else {}
    yield "output_item.added", {**output, "item": base.begun(item)}
    for part in parts:
        yield "content_part.added", {**place, "part": base.begun(part)}
    if text:
        yield f"{kind}.delta", {**place, "delta": text, **none}
    yield f"{kind}.done", {**place, **done, **none}
    for part in parts:
        yield "content_part.done", {**place, "part": part}
    yield "output_item.done", output


OPENAI_RESPONSES = WireProtocol(
    name="openai_responses",
    paths={"/v1/responses": "reply"},
    parse=_parse_responses,
    write=lambda reply, request: _response(
        reply.reply_id, reply.created, **_outcome(reply, request)
    ),
    events=_events,
    ping=_ping,
    failed=_failed,
    error=error_body,
    streamed_errors=frozenset({_TOO_LONG}),
)

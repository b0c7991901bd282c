"""Anthropic Messages: requests, replies, events and errors."""

import json
from collections.abc import Iterator
from functools import partial
from typing import Any

from trajkit_shim.chat import images
from trajkit_shim.chat import request as chat
from trajkit_shim.chat.request import Reply, Spoken, Thought, ToolCall
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Fields, Json, as_object
from trajkit_shim.protocols import base
from trajkit_shim.protocols.base import WireProtocol

# Start of a line that Claude Code puts before its system prompt, for its provider. It
# differs between conversations (version 2.1.197).
_BILLING = "x-anthropic-billing-header:"
# The official client then sends its conversations without a thread.
_NO_THREADS = "thread_unsupported_request"


def _parse(fields: Fields) -> chat.ChatRequest:
    base.refuse_fields(fields, base.STORED, "thread", code=_NO_THREADS)
    base.refuse_fields(fields, "ask for a summary in a message", "compaction")
    messages = _system(fields, "system")
    for read in fields.each("messages", _read):
        messages += read
    if not messages:
        fields.refuse("messages", "no message with a text")
    tools = base.Tools()
    for tool in fields.objects("tools"):
        kind = tool.get_text("type") or "custom"
        if kind != "custom":
            tool.leave_out(kind)
        else:
            tools.add(tool, tool.need("input_schema", as_object))
    choice = fields.section("tool_choice")
    chosen = choice.one_of("type", ("any", "auto", "none", "tool"), "auto")
    config, thinking = fields.section("output_config"), fields.section("thinking")
    # the format had a field of its own before
    older = base.text_schema(fields, "output_format")
    schema = base.text_schema(config, "format")
    required = {
        "call": chosen in ("any", "tool"),
        "names": (choice.name("name"),) if chosen == "tool" else (),
        "parallel": not choice.flag("disable_parallel_tool_use"),
        "schema": older if schema is None else schema,
    }
    budget = thinking.peek("budget_tokens")
    return base.chat_request(
        fields,
        messages,
        tools,
        none=chosen == "none",
        required=required,
        sampling=chat.parse_sampling(fields, {"stop": "stop_sequences", "seed": None}),
        thinking={
            "effort": config.get_text("effort"),
            "on": base.THINKS.get(str(thinking.peek("type"))),
            "budget": budget if isinstance(budget, int) else None,
        },
        stream=fields.flag("stream"),
    )


def _read(message: Fields) -> list[Json]:
    role = base.known_role(message, ("assistant", "system", "user"))
    if role == "system":
        return _system(message, "content")
    if role == "user":
        return chat.user_messages(images.read_parts(message, "content", _USER))
    return [chat.assistant_message(images.read_parts(message, "content", _ASSISTANT))]


def _system(fields: Fields, name: str) -> list[Json]:
    """The message of a system prompt, without billing lines, if it has text."""
    has_parts = fields.peek(name) is not None
    texts = images.read_parts(fields, name, _TEXTS) if has_parts else []
    kept = (t.partition("\n")[2] if t.startswith(_BILLING) else t for t in texts)
    return chat.system_message("\n".join(filter(None, kept)))


def _tool_result(block: Fields) -> Json:
    found = block.peek("content") is not None
    parts = images.read_parts(block, "content", _READABLE) if found else []
    failed = block.flag("is_error")
    return chat.tool_message(block.text("tool_use_id"), parts, failed=failed)


def _image(block: Fields) -> images.Part:
    source = block.object("source")
    if source.one_of("type", ("base64", "url")) == "url":
        return images.read_image(block, source.text("url"))
    kind, data = source.text("media_type"), source.text("data")
    return images.read_image(block, f"data:{kind};base64,{data}")


def _tool_use(block: Fields) -> ToolCall:
    given = json.dumps(block.need("input", as_object), ensure_ascii=False)
    return ToolCall(block.name("name"), given, block.text("id"))


# what a system prompt may have, a tool's result, a user's message and an assistant's
_TEXTS: images.Readers = {"text": partial(Fields.text, name="text")}
_READABLE: images.Readers = {**_TEXTS, "image": _image}
_USER: images.Readers = {**_READABLE, "tool_result": _tool_result}
_ASSISTANT: images.Readers = {
    **_TEXTS,
    "thinking": lambda block: Thought(block.text("thinking")),
    "tool_use": _tool_use,
}


def _write(reply: Reply, _: chat.ChatRequest) -> dict[str, Any]:
    cached = reply.usage.cached_tokens or 0
    reasons = {"cut": "max_tokens", "calls": "tool_use", "end": "end_turn"}
    stopped = reply.ending == "stop_sequence"
    return {
        "id": f"msg_{reply.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [_block(block) for block in reply.blocks],
        "stop_reason": reasons.get(reply.ending, reply.ending),
        "stop_sequence": reply.stop_sequence if stopped else None,
        "usage": {
            "input_tokens": reply.usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": reply.usage.output_tokens,
        },
    }


def _block(block: Spoken) -> dict[str, Any]:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if isinstance(block, ToolCall):
        call: Json = {"type": "tool_use", "id": block.call_id, "name": block.name}
        return {**call, "input": base.RawJson(block.arguments)}
    return {"type": "thinking", "thinking": block.text, "signature": base.SIGNATURE}


def _events(reply: Reply, request: chat.ChatRequest, _: int) -> Iterator[Json]:
    message = _write(reply, request)
    usage = {**message["usage"], "output_tokens": 0}
    yield {"type": "message_start", "message": {**base.begun(message), "usage": usage}}
    for index, whole in enumerate(message["content"]):
        place, kind = {"index": index}, whole["type"]
        begun = base.begun(whole)
        yield {"type": "content_block_start", **place, "content_block": begun}
        deltas = [(f"{kind}_delta", kind, whole.get(kind))]
        if kind == "tool_use":
            deltas = [("input_json_delta", "partial_json", whole["input"].text)]
        elif kind == "thinking":
            deltas.append(("signature_delta", "signature", base.SIGNATURE))
        for name, part, text in deltas:
            if text:
                delta = {"type": name, part: text}
                yield {"type": "content_block_delta", **place, "delta": delta}
        yield {"type": "content_block_stop", **place}
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ending, "usage": message["usage"]}
    yield {"type": "message_stop"}


def _error(error: GatewayError) -> Json:
    # these words make Claude Code compact
    too_long = "prompt is too long: {} tokens > {} maximum"
    kind, message = base.words_for(error, 0, too_long)
    shown: Json = {"type": kind, "message": message}
    if error.code == _NO_THREADS:
        shown["details"] = {"error_code": error.code}
    return {"type": "error", "error": shown}


ANTHROPIC = WireProtocol(
    name="anthropic",
    paths={"/v1/messages": "reply", "/v1/messages/count_tokens": "count"},
    call_prefix="toolu_",
    parse=_parse,
    write=_write,
    events=_events,
    ping=lambda *_: base.event({"type": "ping"}),
    error=_error,
)

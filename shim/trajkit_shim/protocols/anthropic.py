"""Anthropic Messages: requests, replies, events and errors.

Accepted and ignored: ``context_management`` (the gateway edits nothing), ``cache_control``
everywhere, ``metadata`` and fields about billing.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

from trajkit_shim.chat import images
from trajkit_shim.chat import request as chat
from trajkit_shim.chat.reply import Reply, ToolCall
from trajkit_shim.chat.sampling_params import parse_sampling
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Fields, Json, as_object
from trajkit_shim.protocols import stream
from trajkit_shim.protocols.base import WireProtocol, words_for
from trajkit_shim.protocols.openai_chat import known_role
from trajkit_shim.protocols.stream import Block, Thought, event

T = TypeVar("T")

_KNOWN = frozenset(
    "betas cache_control chat_template_kwargs context_management inference_geo max_tokens "
    "messages metadata model output_config output_format service_tier speed "
    "stop_sequences stream system temperature thinking tool_choice tools top_k "
    "top_p".split()
)
# fields of a block or tool that mean nothing to the model
_SILENT = frozenset({"type", "cache_control"})
_TOOL = _SILENT.union(
    "allowed_callers description eager_input_streaming input_examples input_schema "
    "name strict".split()
)

# Start of a line that Claude Code puts before its system prompt, for its provider. It
# differs between conversations (version 2.1.197).
_BILLING = "x-anthropic-billing-header:"


def _parse(fields: Fields) -> chat.ChatRequest:
    config = fields.section("output_config")
    config.only({"effort", "format", "task_budget"})
    given = None if fields.json.get("system") is None else _system(fields, "system")
    messages = chat.system_message(given)
    for message in fields.filled("messages"):
        messages += _read(message)
    tools = chat.Tools()
    for tool in fields.objects("tools"):
        kind = tool.get_text("type") or "custom"
        if kind != "custom":
            # only the provider can run it
            tools.left_out.append(kind)
            continue
        tool.only(_TOOL)
        tools.add(tool, tool.need("input_schema", as_object))
    choice = fields.section("tool_choice")
    choice.only({"type", "name", "disable_parallel_tool_use"})
    chosen = choice.one_of("type", ("any", "auto", "none", "tool"), "auto")
    schema = chat.text_schema(config, "format")
    # the format had a field of its own before
    older = chat.text_schema(fields, "output_format")
    thinking = fields.section("thinking").json
    budget = thinking.get("budget_tokens")
    return chat.ChatRequest(
        messages=messages,
        tools=tools.offered(none=chosen == "none"),
        required=chat.Required(
            call=chosen in ("any", "tool"),
            names=(choice.name("name"),) if chosen == "tool" else (),
            parallel=not choice.flag("disable_parallel_tool_use"),
            strict=tools.strict,
            schema=older if schema is None else schema,
        ),
        sampling=parse_sampling(fields, {"stop": "stop_sequences", "seed": None}),
        thinking=chat.Thinking(
            variables=fields.section("chat_template_kwargs").json,
            effort=config.get_text("effort"),
            on=chat.SWITCH.get(str(thinking.get("type"))),
            budget=budget if isinstance(budget, int) else None,
        ),
        stream=fields.flag("stream"),
        left_out=tuple(tools.left_out),
    )


def _read(message: Fields) -> list[Json]:
    message.only({"role", "content", "id", "type"})
    role = known_role(message, ("assistant", "system", "user"))
    if role == "system":
        return [{"role": "system", "content": _system(message, "content")}]
    if role == "user":
        return chat.user_messages(images.read_parts(message, "content", _USER))
    return [stream.assistant(images.read_parts(message, "content", _ASSISTANT))]


def _system(fields: Fields, name: str) -> str:
    """The text of a system prompt, without billing lines."""
    texts = images.read_parts(fields, name, {"text": _TEXT})
    kept = (t.partition("\n")[2] if t.startswith(_BILLING) else t for t in texts)
    return "\n".join(filter(None, kept))


def _tool_result(block: Fields) -> Json:
    found = block.json.get("content") is not None
    parts = images.read_parts(block, "content", _READABLE) if found else []
    failed = block.flag("is_error")
    return chat.tool_message(block.text("tool_use_id"), parts, failed=failed)


def _document(block: Fields) -> str:
    source = block.object("source")
    # documents are text
    source.one_of("type", ("text",))
    return source.text("data")


def _url(block: Fields) -> str:
    source = block.object("source")
    if source.one_of("type", ("base64", "url")) == "url":
        return source.text("url")
    return images.data_url(source, "media_type", "data")


def _tool_use(block: Fields) -> Json:
    given = json.dumps(block.object("input").json, ensure_ascii=False)
    return chat.tool_call(block.text("id"), block.name("name"), given)


def _known(read: Callable[[Fields], T], *known: str) -> Callable[[Fields], T]:
    """A reader of blocks that have these fields."""

    def checked(block: Fields) -> T:
        block.only(_SILENT.union(known))
        return read(block)

    return checked


_IMAGE = partial(images.GivenImage, name="type", kind="image", url=_url)
_TEXT = _known(images.read_text, "text", "citations")
# what the content of a tool's result may have, of a user's and of an assistant's message
_READABLE: images.Readers[images.Part] = {
    "text": _TEXT,
    "image": _known(_IMAGE, "source"),
    "document": _known(_document, "source", "title", "context", "citations"),
}
_USER: images.Readers[images.Part | Json] = {
    **_READABLE,
    "tool_result": _known(_tool_result, "tool_use_id", "content", "is_error"),
}
_ASSISTANT: images.Readers[str | Thought | Json] = {
    "text": _TEXT,
    "thinking": _known(lambda b: Thought(b.text("thinking")), "thinking", "signature"),
    "tool_use": _known(_tool_use, "id", "name", "input", "caller"),
}


def _write(reply: Reply, _: chat.ChatRequest) -> dict[str, Any]:
    cached = reply.usage.cached_tokens or 0
    reason = _REASONS.get(reply.ending, reply.ending)
    return {
        "id": f"msg_{reply.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
        "content": [_block(block, reply) for block in stream.blocks(reply)],
        "stop_reason": reason,
        "stop_sequence": reply.stop_sequence if reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": reply.usage.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": reply.usage.output_tokens,
        },
    }


_REASONS = {"cut": "max_tokens", "calls": "tool_use", "end": "end_turn"}


def _block(block: Block, reply: Reply) -> dict[str, Any]:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if isinstance(block, ToolCall):
        call: Json = {"type": "tool_use", "id": block.call_id, "name": block.name}
        return {**call, "input": stream.RawJson(block.arguments)}
    signed = stream.signature(reply)
    return {"type": "thinking", "thinking": block.text, "signature": signed}


def _events(reply: Reply, request: chat.ChatRequest, _: int) -> Iterator[Json]:
    message = _write(reply, request)
    usage = {**message["usage"], "output_tokens": 0}
    yield {
        "type": "message_start",
        "message": {**stream.begun(message), "usage": usage},
    }
    for index, block in enumerate(stream.blocks(reply)):
        place, whole = {"index": index}, _block(block, reply)
        begun = stream.begun(whole)
        yield {"type": "content_block_start", **place, "content_block": begun}
        match block:
            case Thought(text=text):
                deltas = [("thinking_delta", "thinking", text)]
                deltas.append(("signature_delta", "signature", whole["signature"]))
            case ToolCall(arguments=text):
                deltas = [("input_json_delta", "partial_json", text)]
            case text:
                deltas = [("text_delta", "text", text)]
        for kind, name, text in deltas:
            if text:
                delta = {"type": kind, name: text}
                yield {"type": "content_block_delta", **place, "delta": delta}
        yield {"type": "content_block_stop", **place}
    ending = {name: message[name] for name in ("stop_reason", "stop_sequence")}
    yield {"type": "message_delta", "delta": ending, "usage": message["usage"]}
    yield {"type": "message_stop"}


_ERRORS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error(error: GatewayError) -> Json:
    # these words make Claude Code compact
    too_long = "prompt is too long: {} tokens > {} maximum"
    kind, message = words_for(error, _ERRORS, too_long)
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = WireProtocol(
    name="anthropic",
    paths={"/v1/messages": "reply", "/v1/messages/count_tokens": "count"},
    call_prefix="toolu_",
    known=_KNOWN,
    required=("max_tokens",),
    parse=_parse,
    write=_write,
    events=_events,
    ping=lambda *_: event({"type": "ping"}),
    error=_error,
)

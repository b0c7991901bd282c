"""Anthropic Messages: requests, replies, events and errors.

Accepted and ignored: ``thinking`` and ``output_config.effort`` (the chat template decides
whether the model reasons), ``context_management`` (the gateway edits nothing),
``cache_control`` everywhere, ``metadata`` and fields about billing.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import (
    GivenImage,
    Part,
    data_url,
    read_text,
)
from trajkit_shim.chat.reply import Call, Reply, Usage
from trajkit_shim.chat.sampling_params import parse_sampling
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Fields, Json, as_object, objects
from trajkit_shim.protocols.base import WireProtocol, kind_of
from trajkit_shim.protocols.blocks import (
    Block,
    Events,
    Step,
    Thought,
    blocks,
    signature,
)
from trajkit_shim.protocols.sse import RawJson, event

T = TypeVar("T")

_KNOWN = frozenset(
    "betas cache_control context_management inference_geo max_tokens messages metadata "
    "model output_config output_format service_tier speed stop_sequences stream system "
    "temperature thinking tool_choice tools top_k top_p".split()
)
# fields of a block or tool that mean nothing to the model
_SILENT = frozenset({"type", "cache_control"})
_BLOCKS = {
    "text": frozenset({"text", "citations"}),
    "image": frozenset({"source"}),
    "document": frozenset({"source", "title", "context", "citations"}),
    "thinking": frozenset({"thinking", "signature"}),
    "tool_use": frozenset({"id", "name", "input", "caller"}),
    "tool_result": frozenset({"tool_use_id", "content", "is_error"}),
}
_ROLES = {
    "system": frozenset({"text"}),
    "user": frozenset({"text", "image", "document", "tool_result"}),
    "assistant": frozenset({"text", "thinking", "tool_use"}),
}
_IN_RESULT = frozenset({"text", "image", "document"})
_TOOL = frozenset(
    "allowed_callers description eager_input_streaming input_examples input_schema "
    "name strict".split()
)

# Start of a line that Claude Code puts before its system prompt, for its provider. It
# differs between conversations (spec: engines-and-clients 6.1).
_BILLING = "x-anthropic-billing-header:"


def _parse(fields: Fields, _: chat.ReadOptions) -> chat.ChatRequest:
    for name in ("thinking", "metadata", "context_management"):
        fields.get_object(name)
    config = fields.section("output_config")
    config.only({"effort", "format", "task_budget"})
    given = fields.json.get("system")
    front = chat.system_message(None if given is None else _system(given, "system"))
    messages = front + [m for given in fields.filled("messages") for m in _read(given)]
    if messages[-1]["role"] == "assistant":
        rule = "the last one is the assistant's: no reply is continued"
        fields.refuse("messages", rule)
    tools = chat.Tools()
    for tool in fields.objects("tools"):
        # the provider's own tools are not available here
        tool.one_of("type", ("custom",), "custom", code="unsupported_tool")
        tool.only(_TOOL | _SILENT)
        tools.add(tool, tool.need("input_schema", as_object))
    choice = fields.section("tool_choice")
    choice.only({"type", "name", "disable_parallel_tool_use"})
    modes = ("any", "auto", "none", "tool")
    chosen = choice.one_of("type", modes, "auto", code="unsupported_value")
    # the format had a field of its own before
    formats = (config, "format"), (fields, "output_format")
    schemas = [chat.text_schema(*given) for given in formats]
    return chat.ChatRequest(
        messages=messages,
        tools=(tools.functions or None) if chosen != "none" else None,
        required=chat.Required(
            call=chosen in ("any", "tool"),
            names=(choice.name("name"),) if chosen == "tool" else (),
            parallel=not choice.flag("disable_parallel_tool_use"),
            strict=tools.strict,
            schema=next((s for s in schemas if s is not None), None),
        ),
        sampling=parse_sampling(fields, {"stop": "stop_sequences", "seed": None}),
        stream=fields.flag("stream"),
        n_front=len(front),
    )


def _read(message: Fields) -> list[Json]:
    message.only({"role", "content"})
    role = message.one_of("role", _ROLES)
    content, where = message.json.get("content"), message.at("content")
    if role == "system":
        return [{"role": "system", "content": _system(content, where)}]
    found = _blocks(content, where, _ROLES[role])
    return (
        chat.user_messages(map(_user_part, found))
        if role == "user"
        else [_assistant(found)]
    )


def _system(value: object, where: str) -> str:
    """The text of a system prompt, without billing lines."""
    texts = map(read_text, _blocks(value, where, _ROLES["system"]))
    kept = (t.partition("\n")[2] if t.startswith(_BILLING) else t for t in texts)
    return "\n".join(filter(None, kept))


def _blocks(value: object, where: str, kinds: frozenset[str]) -> list[Fields]:
    """The blocks of a message's content; a string is one block."""
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, where)]
    found = list(objects(value, where))
    for block in found:
        kind = block.one_of("type", kinds, code="unsupported_content")
        block.only(_BLOCKS[kind] | _SILENT)
    return found


def _user_part(block: Fields) -> Part | Json:
    if block.json["type"] != "tool_result":
        return _readable(block)
    content = block.json.get("content")
    found = _blocks("" if content is None else content, block.at("content"), _IN_RESULT)
    return chat.tool_message(
        block.text("tool_use_id"),
        map(_readable, found),
        failed=block.flag("is_error"),
    )


def _readable(block: Fields) -> Part:
    """The text or image of a block of a user or of a tool."""
    if block.json["type"] == "text":
        return read_text(block)
    if block.json["type"] == "image":
        return GivenImage(block, "type", "image", partial(_url, block))
    source = block.object("source")
    # documents are text
    source.one_of("type", ("text",), code="unsupported_content")
    return source.text("data")


def _url(block: Fields) -> str:
    """The source of an image."""
    source = block.object("source")
    kinds = ("base64", "url")
    if source.one_of("type", kinds, code="unsupported_content") == "url":
        return source.text("url")
    return data_url(source, "media_type", "data")


def _assistant(found: list[Fields]) -> Json:
    def each(kind: str, read: Callable[[Fields], T]) -> list[T]:
        return [read(block) for block in found if block.json["type"] == kind]

    thoughts = each("thinking", lambda block: block.text("thinking"))
    texts, calls = each("text", read_text), each("tool_use", _tool_use)
    return chat.assistant_message("".join(texts), "".join(thoughts), calls)


def _tool_use(block: Fields) -> Json:
    given = json.dumps(block.object("input").json, ensure_ascii=False)
    return chat.tool_call(block.text("id"), block.name("name"), given)


def _write(reply: Reply, _: chat.ChatRequest) -> Json:
    return {
        **_head(reply),
        "content": [_block(block, reply) for block in blocks(reply, done=True)],
        **_ending(reply),
        "usage": _usage(reply.usage),
    }


def _head(reply: Reply) -> Json:
    return {
        "id": f"msg_{reply.reply_id}",
        "type": "message",
        "role": "assistant",
        "model": reply.model,
    }


def _block(block: Block, reply: Reply) -> Json:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if isinstance(block, Call):
        return {
            "type": "tool_use",
            "id": block.call_id,
            "name": block.name,
            "input": RawJson(block.arguments),
        }
    return {"type": "thinking", "thinking": block.text, "signature": signature(reply)}


_REASONS = {"cut": "max_tokens", "calls": "tool_use", "end": "end_turn"}


def _ending(reply: Reply) -> Json:
    reason = _REASONS.get(reply.ending, reply.ending)
    matched = reply.stop_sequence if reason == "stop_sequence" else None
    return {"stop_reason": reason, "stop_sequence": matched}


def _usage(usage: Usage) -> Json:
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": usage.output_tokens,
    }


class _Stream(Events):
    """The events of a streamed reply.

    ``message_start``; for each block its start, its deltas (for reasoning also one with
    the signature) and its stop; ``message_delta`` with the stop reason and the usage;
    ``message_stop``.
    """

    def ping(self) -> bytes:
        return _event("ping")

    def error(self, error: GatewayError) -> bytes:
        return event(_error(error), "error")

    def begin(self, reply: Reply) -> Iterator[bytes]:
        usage = {**_usage(reply.usage), "output_tokens": 0}
        ending = {"stop_reason": None, "stop_sequence": None}
        message = {**_head(reply), "content": [], **ending, "usage": usage}
        yield _event("message_start", message=message)

    def step(self, step: Step, reply: Reply) -> Iterator[bytes]:
        kind, field, empty = _DELTAS[type(step.block)]
        if step.what == "begin":
            block = {**_block(step.block, reply), **empty}
            yield _event("content_block_start", index=step.index, content_block=block)
        elif step.what == "text":
            yield _delta(step.index, kind, field, step.text)
        else:
            if isinstance(step.block, Thought):
                signed = signature(reply)
                yield _delta(step.index, "signature_delta", "signature", signed)
            yield _event("content_block_stop", index=step.index)

    def close(self, reply: Reply) -> Iterator[bytes]:
        usage = _usage(reply.usage)
        yield _event("message_delta", delta=_ending(reply), usage=usage)
        yield _event("message_stop")


# type and field of the deltas of each kind of block, and its fields when it is empty
_DELTAS: dict[type, tuple[str, str, Json]] = {
    str: ("text_delta", "text", {"text": ""}),
    Call: ("input_json_delta", "partial_json", {"input": {}}),
    Thought: ("thinking_delta", "thinking", {"thinking": "", "signature": ""}),
}


def _delta(index: int, kind: str, field: str, text: str) -> bytes:
    delta = {"type": kind, field: text}
    return _event("content_block_delta", index=index, delta=delta)


def _event(kind: str, **fields: object) -> bytes:
    return event({"type": kind, **fields}, kind)


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def _error(error: GatewayError) -> Json:
    message = error.message
    if error.overflow is not None:
        # what makes Claude Code compact
        message = "prompt is too long: {} tokens > {} maximum".format(*error.overflow)
    kind = kind_of(error, _ERROR_TYPES, "invalid_request_error", "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = WireProtocol(
    name="anthropic",
    history="messages",
    paths={"/v1/messages": "reply", "/v1/messages/count_tokens": "count"},
    call_prefix="toolu_",
    known=_KNOWN,
    required=("max_tokens",),
    parse=_parse,
    write=_write,
    events=lambda _: _Stream(),
    error=_error,
)

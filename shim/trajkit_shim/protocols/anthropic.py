"""Anthropic Messages: requests, replies, events and errors.

Accepted and ignored: ``thinking`` and ``output_config.effort`` (the chat template decides
whether the model reasons), ``context_management`` (the gateway edits nothing),
``cache_control`` everywhere, ``metadata`` and fields about billing.
"""

import json
from collections.abc import Callable, Iterator
from typing import TypeVar

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import (
    GivenImage,
    Part,
    Readers,
    data_url,
    read_parts,
    read_text,
)
from trajkit_shim.chat.reply import Call, Reply, Usage
from trajkit_shim.chat.sampling_params import parse_sampling
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Fields, Json, as_object
from trajkit_shim.protocols.base import WireProtocol, kind_of
from trajkit_shim.protocols.blocks import (
    Block,
    Events,
    Step,
    Thought,
    assistant,
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
    given = None if fields.json.get("system") is None else _system(fields, "system")
    front = chat.system_message(given)
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
    role = message.one_of("role", ("assistant", "system", "user"))
    if role == "system":
        return [{"role": "system", "content": _system(message, "content")}]
    if role == "user":
        return chat.user_messages(read_parts(message, "content", _USER))
    return [assistant(read_parts(message, "content", _ASSISTANT))]


def _system(fields: Fields, name: str) -> str:
    """The text of a system prompt, without billing lines."""
    texts = read_parts(fields, name, {"text": _TEXT})
    kept = (t.partition("\n")[2] if t.startswith(_BILLING) else t for t in texts)
    return "\n".join(filter(None, kept))


def _tool_result(block: Fields) -> Json:
    found = block.json.get("content") is not None
    parts = read_parts(block, "content", _READABLE) if found else []
    failed = block.flag("is_error")
    return chat.tool_message(block.text("tool_use_id"), parts, failed=failed)


def _document(block: Fields) -> str:
    source = block.object("source")
    # documents are text
    source.one_of("type", ("text",), code="unsupported_content")
    return source.text("data")


def _image(block: Fields) -> GivenImage:
    def url() -> str:
        source = block.object("source")
        kinds = ("base64", "url")
        if source.one_of("type", kinds, code="unsupported_content") == "url":
            return source.text("url")
        return data_url(source, "media_type", "data")

    return GivenImage(block, "type", "image", url)


def _tool_use(block: Fields) -> Json:
    given = json.dumps(block.object("input").json, ensure_ascii=False)
    return chat.tool_call(block.text("id"), block.name("name"), given)


def _block(read: Callable[[Fields], T], *known: str) -> Callable[[Fields], T]:
    """A reader of blocks that have these fields."""

    def checked(block: Fields) -> T:
        block.only(_SILENT.union(known))
        return read(block)

    return checked


_TEXT = _block(read_text, "text", "citations")
# what the content of a tool's result may have, of a user's and of an assistant's message
_READABLE: Readers[Part] = {
    "text": _TEXT,
    "image": _block(_image, "source"),
    "document": _block(_document, "source", "title", "context", "citations"),
}
_USER: Readers[Part | Json] = {
    **_READABLE,
    "tool_result": _block(_tool_result, "tool_use_id", "content", "is_error"),
}
_ASSISTANT: Readers[str | Thought | Json] = {
    "text": _TEXT,
    "thinking": _block(lambda b: Thought(b.text("thinking")), "thinking", "signature"),
    "tool_use": _block(_tool_use, "id", "name", "input", "caller"),
}


def _write(reply: Reply, _: chat.ChatRequest) -> Json:
    return {
        **_head(reply),
        "content": [_written(block, reply) for block in blocks(reply, done=True)],
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


def _written(block: Block, reply: Reply) -> Json:
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

    def write(self, step: Step) -> Iterator[bytes]:
        reply, place = step.reply, {"index": step.index}
        kind, field, empty = _DELTAS[type(step.block)]
        match step.what:
            case "open":
                usage = {**_usage(reply.usage), "output_tokens": 0}
                ending = {"stop_reason": None, "stop_sequence": None}
                message = {**_head(reply), "content": [], **ending, "usage": usage}
                yield _event("message_start", message=message)
            case "begin":
                block = {**_written(step.block, reply), **empty}
                yield _event("content_block_start", **place, content_block=block)
            case "text":
                delta = {"type": kind, field: step.text}
                yield _event("content_block_delta", **place, delta=delta)
            case "end":
                if isinstance(step.block, Thought):
                    delta = {"type": "signature_delta", "signature": signature(reply)}
                    yield _event("content_block_delta", **place, delta=delta)
                yield _event("content_block_stop", **place)
            case "done":
                usage = _usage(reply.usage)
                yield _event("message_delta", delta=_ending(reply), usage=usage)
                yield _event("message_stop")


# type and field of the deltas of each kind of block, and its fields when it is empty
_DELTAS: dict[type, tuple[str, str, Json]] = {
    str: ("text_delta", "text", {"text": ""}),
    Call: ("input_json_delta", "partial_json", {"input": {}}),
    Thought: ("thinking_delta", "thinking", {"thinking": "", "signature": ""}),
}


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

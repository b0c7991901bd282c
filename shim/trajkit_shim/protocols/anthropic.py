"""Anthropic Messages: requests, replies, events and errors.

Accepted and ignored: ``thinking`` and ``output_config.effort`` (the chat template decides
whether the model reasons), ``context_management`` (the gateway edits nothing),
``cache_control`` everywhere, ``metadata`` and fields about billing.
"""

import json
from collections.abc import Iterator
from functools import partial

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import data_url, joined, read_image, refuse_content
from trajkit_shim.chat.reply import Call, Reply, Usage
from trajkit_shim.chat.sampling_params import parse_sampling
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import (
    Fields,
    Json,
    as_object,
    objects,
    refuse,
)
from trajkit_shim.protocols.base import WireProtocol
from trajkit_shim.protocols.blocks import Block, Events, Thought, blocks, signature
from trajkit_shim.protocols.sse import RawJson, event

KNOWN = frozenset(
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


def read(body: Json, reading: chat.ReadOptions) -> chat.ChatRequest:
    """Read the body of ``POST /v1/messages``; raises `GatewayError`."""
    if body.get("max_tokens") is None:
        refuse("max_tokens", "missing")
    return read_for_count(body, reading)


def read_for_count(body: Json, reading: chat.ReadOptions) -> chat.ChatRequest:
    """Read the body of ``POST /v1/messages/count_tokens``, which has no token limit."""
    fields = Fields(body)
    fields.only(KNOWN)
    fields.get_text("model")
    for name in ("thinking", "metadata", "context_management"):
        fields.get_object(name)
    config = fields.section("output_config")
    config.only({"effort", "format", "task_budget"})
    front = _front(fields)
    messages = front + _messages(fields, reading)
    if messages[-1]["role"] == "assistant":
        refuse("messages", "the last one is the assistant's: no reply is continued")
    tools, strict = _tools(fields)
    choice = fields.section("tool_choice")
    choice.only({"type", "name", "disable_parallel_tool_use"})
    chosen = choice.json.get("type", "auto")
    if chosen not in ("any", "auto", "none", "tool"):
        choice.refuse("type", f"{chosen!r} is not supported", "unsupported_value")
    # the format had a field of its own before
    schemas = [
        chat.text_schema(config, "format"),
        chat.text_schema(fields, "output_format"),
    ]
    return chat.ChatRequest(
        messages=messages,
        tools=tools if tools and chosen != "none" else None,
        required=chat.Required(
            call=chosen in ("any", "tool"),
            names=(choice.name("name"),) if chosen == "tool" else (),
            parallel=not choice.flag("disable_parallel_tool_use"),
            strict=strict,
            schema=next((s for s in schemas if s is not None), None),
        ),
        sampling=parse_sampling(fields, {"stop": "stop_sequences", "seed": None}),
        stream=fields.flag("stream"),
        n_front=len(front),
    )


def _front(fields: Fields) -> list[Json]:
    if fields.json.get("system") is None:
        return []
    system = _system(fields.json["system"], "system")
    return [{"role": "system", "content": system}] if system else []


def _messages(fields: Fields, reading: chat.ReadOptions) -> list[Json]:
    messages: list[Json] = []
    for message in fields.filled("messages"):
        message.only({"role", "content"})
        role = message.name("role")
        if role not in _ROLES:
            message.refuse("role", f"{role!r} is not one of {', '.join(_ROLES)}")
        content, where = message.json.get("content"), message.at("content")
        if role == "system":
            messages.append({"role": "system", "content": _system(content, where)})
        elif role == "user":
            found = _blocks(content, where, _ROLES[role])
            messages += chat.user_messages(
                _user_part(block, reading) for block in found
            )
        else:
            messages.append(_assistant(_blocks(content, where, _ROLES[role])))
    return messages


def _system(value: object, where: str) -> str:
    """The text of a system prompt, without billing lines."""
    texts = (block.text("text") for block in _blocks(value, where, _ROLES["system"]))
    kept = (t.partition("\n")[2] if t.startswith(_BILLING) else t for t in texts)
    return "\n".join(filter(None, kept))


def _blocks(value: object, where: str, kinds: frozenset[str]) -> list[Fields]:
    """The blocks of a message's content; a string is one block."""
    if isinstance(value, str):
        return [Fields({"type": "text", "text": value}, where)]
    found = list(objects(value, where))
    for block in found:
        kind = block.name("type")
        if kind not in kinds:
            rule = f"{kind!r} is not supported here: {', '.join(sorted(kinds))}"
            block.refuse("type", rule, "unsupported_content")
        block.only(_BLOCKS[kind] | _SILENT)
    return found


def _user_part(block: Fields, reading: chat.ReadOptions) -> str | Json:
    if block.json["type"] != "tool_result":
        return _readable(block, reading)
    content, where = block.json.get("content"), block.at("content")
    found = [] if content is None else _blocks(content, where, _IN_RESULT)
    return chat.tool_message(
        block.text("tool_use_id"),
        joined(_readable(part, reading) for part in found),
        failed=block.flag("is_error"),
    )


def _readable(block: Fields, reading: chat.ReadOptions) -> str | Json:
    """The text or image of a block of a user or of a tool."""
    if block.json["type"] == "text":
        return block.text("text")
    if block.json["type"] == "image":
        return read_image(block, "type", partial(_url, block), reading.images)
    source = block.object("source")
    kind = source.json.get("type")
    if kind != "text":
        rule = f"{kind!r} is not 'text': documents are text"
        source.refuse("type", rule, "unsupported_content")
    return source.text("data")


def _url(block: Fields) -> str:
    """The source of an image."""
    source = block.object("source")
    if source.json.get("type") == "base64":
        return data_url(source, "media_type", "data")
    if source.json.get("type") != "url":
        refuse_content(source, "type", source.json.get("type"))
    return source.text("url")


def _assistant(found: list[Fields]) -> Json:
    texts, thoughts, calls = [], [], []
    for block in found:
        if block.json["type"] == "tool_use":
            given = json.dumps(block.need("input", as_object), ensure_ascii=False)
            calls.append(chat.tool_call(block.text("id"), block.name("name"), given))
        elif block.json["type"] == "text":
            texts.append(block.text("text"))
        else:
            thoughts.append(block.text("thinking"))
    return chat.assistant_message("".join(texts), "".join(thoughts), calls)


def _tools(fields: Fields) -> tuple[list[Json], list[str]]:
    """The tools, and the names of those whose arguments must match their schema."""
    tools: list[Json] = []
    strict: list[str] = []
    for tool in fields.objects("tools"):
        kind = tool.json.get("type")
        if kind not in (None, "custom"):
            rule = f"{kind!r} is not 'custom': the provider's own tools are not "
            tool.refuse("type", f"{rule}available here", "unsupported_tool")
        tool.only(_TOOL | _SILENT)
        schema = tool.need("input_schema", as_object)
        name, text = tool.name("name"), tool.get_text("description")
        tools.append(chat.function_tool(name, text, schema))
        strict += [name] * tool.flag("strict")
    return tools, strict


def write(reply: Reply, _: chat.ChatRequest) -> Json:
    """Return the body of a reply that is not streamed."""
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


def _ending(reply: Reply) -> Json:
    if reply.cut:
        reason = "max_tokens"
    elif reply.calls:
        reason = "tool_use"
    else:
        reason = "end_turn" if reply.stop_sequence is None else "stop_sequence"
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


class Stream(Events):
    """The events of a streamed reply.

    ``message_start``; for each block its start, its deltas (for reasoning also one with
    the signature) and its stop; ``message_delta`` with the stop reason and the usage;
    ``message_stop``.
    """

    _begun = False

    def ping(self) -> bytes:
        return _event({"type": "ping"})

    def reply(self, reply: Reply) -> Iterator[bytes]:
        yield from self._new(reply, done=True)
        end: Json = {"delta": _ending(reply), "usage": _usage(reply.usage)}
        yield _event({"type": "message_delta", **end})
        yield _event({"type": "message_stop"})

    def error(self, error: GatewayError) -> bytes:
        return _event(error_body(error))

    def _new(self, reply: Reply, *, done: bool) -> Iterator[bytes]:
        for step in self._progress.steps(blocks(reply, done=done), done=done):
            if not self._begun:
                self._begun = True
                yield self._start(reply)
            index: Json = {"index": step.index}
            if step.what == "begin":
                block = {**_block(step.block, reply), **_EMPTY[type(step.block)]}
                start: Json = {"type": "content_block_start", **index}
                yield _event({**start, "content_block": block})
            elif step.what == "text":
                kind, field = _DELTAS[type(step.block)]
                yield _delta(index, kind, field, step.text)
            else:
                if isinstance(step.block, Thought):
                    kind, signed = "signature_delta", signature(reply)
                    yield _delta(index, kind, "signature", signed)
                yield _event({"type": "content_block_stop", **index})

    def _start(self, reply: Reply) -> bytes:
        message: Json = {
            **_head(reply),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_usage(reply.usage), "output_tokens": 0},
        }
        return _event({"type": "message_start", "message": message})


# an empty block of each kind, and the type and field of its deltas
_EMPTY: dict[type, Json] = {
    str: {"text": ""},
    Call: {"input": {}},
    Thought: {"thinking": "", "signature": ""},
}
_DELTAS = {
    str: ("text_delta", "text"),
    Call: ("input_json_delta", "partial_json"),
    Thought: ("thinking_delta", "thinking"),
}


def _delta(index: Json, kind: str, field: str, text: str) -> bytes:
    delta: Json = {"type": kind, field: text}
    return _event({"type": "content_block_delta", **index, "delta": delta})


def _event(value: Json) -> bytes:
    return event(value, str(value["type"]))


_ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: GatewayError) -> Json:
    """Return the error in the format of Anthropic's API.

    The message for a prompt that is too long is the one that makes Claude Code compact.
    """
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.message
    if error.overflow is not None:
        message = "prompt is too long: {} tokens > {} maximum".format(*error.overflow)
    kind = _ERROR_TYPES.get(error.status, fallback)
    return {"type": "error", "error": {"type": kind, "message": message}}


ANTHROPIC = WireProtocol(
    name="anthropic",
    history="messages",
    paths={"/v1/messages": "reply", "/v1/messages/count_tokens": "count"},
    call_prefix="toolu_",
    read=read,
    read_for_count=read_for_count,
    write=write,
    events=lambda _: Stream(),
    error=error_body,
)

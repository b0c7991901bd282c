"""Anthropic Messages: requests, replies, events and errors.

Accepted and ignored: ``thinking`` and ``output_config.effort`` (the chat template decides
whether the model reasons), ``context_management`` (the gateway edits nothing),
``cache_control`` everywhere, ``metadata`` and fields about billing.
"""

import base64
import json
from collections.abc import Iterator

from trajkit_shim import json_input
from trajkit_shim.chat.reply import Call, Reply, Usage
from trajkit_shim.chat.request import (
    OMITTED_IMAGE,
    ChatRequest,
    ReadOptions,
    assistant_message,
    function_tool,
    tool_call,
)
from trajkit_shim.chat.sampling_params import parse_sampling
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json, refuse
from trajkit_shim.protocols.base import WireProtocol
from trajkit_shim.protocols.blocks import Block, BlockStream, Thought, blocks
from trajkit_shim.protocols.sse import RawJson, event

KNOWN = frozenset(
    "betas cache_control context_management inference_geo max_tokens messages metadata "
    "model output_config service_tier speed stop_sequences stream system temperature "
    "thinking tool_choice tools top_k top_p".split()
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
    "name".split()
)

# Start of a line that Claude Code puts before its system prompt, for its provider. It
# differs between conversations (spec: engines-and-clients 6.1).
_BILLING = "x-anthropic-billing-header:"


def read(body: Json, reading: ReadOptions) -> ChatRequest:
    """Read the body of ``POST /v1/messages``.

    Raises
    ------
    GatewayError
        A field is missing, invalid, or not supported.
    """
    if body.get("max_tokens") is None:
        refuse("max_tokens", "missing")
    return read_for_count(body, reading)


def read_for_count(body: Json, reading: ReadOptions) -> ChatRequest:
    """Read the body of ``POST /v1/messages/count_tokens``, which has no token limit."""
    json_input.only(body, KNOWN, "")
    json_input.optional(body, "model", json_input.as_text)
    for name in ("thinking", "metadata", "context_management"):
        json_input.optional(body, name, json_input.as_object)
    config = json_input.optional(body, "output_config", json_input.as_object)
    json_input.only(config or {}, {"effort", "task_budget"}, "output_config")
    messages = _messages(body, reading)
    if messages[-1]["role"] == "assistant":
        refuse("messages", "the last one is the assistant's: no reply is continued")
    return ChatRequest(
        messages=messages,
        tools=_tools(body),
        sampling=parse_sampling(body, names={"stop": "stop_sequences", "seed": None}),
        stream=bool(json_input.optional(body, "stream", json_input.as_flag)),
    )


def _messages(body: Json, reading: ReadOptions) -> list[Json]:
    messages: list[Json] = []
    if body.get("system") is not None:
        system = "\n".join(_texts(body["system"], "system"))
        if system:
            messages.append({"role": "system", "content": system})
    items = json_input.as_list(body.get("messages"), "messages")
    if not items:
        refuse("messages", "an empty list")
    for message, where in json_input.objects(items, "messages"):
        json_input.only(message, {"role", "content"}, where)
        role = json_input.field(message, "role", json_input.as_name, where)
        if role not in _ROLES:
            refuse(f"{where}.role", f"{role!r} is not one of {', '.join(_ROLES)}")
        content, where = message.get("content"), f"{where}.content"
        if role == "system":
            text = "\n".join(_texts(content, where))
            messages.append({"role": "system", "content": text})
        elif role == "user":
            messages += _user(_blocks(content, where, _ROLES[role]), reading)
        else:
            messages.append(_assistant(_blocks(content, where, _ROLES[role])))
    return messages


def _texts(value: object, where: str) -> Iterator[str]:
    """The texts of a system prompt, without empty ones and billing lines."""
    for block, path in _blocks(value, where, _ROLES["system"]):
        text = json_input.field(block, "text", json_input.as_text, path)
        if text.startswith(_BILLING):
            _, _, text = text.partition("\n")
        if text:
            yield text


def _blocks(value: object, where: str, kinds: frozenset[str]) -> list[tuple[Json, str]]:
    """The blocks of a message's content, each with its path; a string is one block."""
    if isinstance(value, str):
        return [({"type": "text", "text": value}, where)]
    blocks = []
    for block, path in json_input.objects(json_input.as_list(value, where), where):
        kind = json_input.field(block, "type", json_input.as_name, path)
        if kind not in kinds:
            refuse(
                f"{path}.type",
                f"{kind!r} is not supported here: {', '.join(sorted(kinds))}",
                code="unsupported_content",
            )
        json_input.only(block, _BLOCKS[kind] | _SILENT, path)
        blocks.append((block, path))
    return blocks


def _user(blocks: list[tuple[Json, str]], reading: ReadOptions) -> list[Json]:
    """A message per tool result, and one per group of texts between them."""
    messages: list[Json] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            messages.append({"role": "user", "content": "\n".join(texts)})
            texts.clear()

    for block, path in blocks:
        if block["type"] != "tool_result":
            texts += filter(None, [_readable(block, path, reading)])
            continue
        flush()
        result: Json = {
            "role": "tool",
            "content": _result(block.get("content"), f"{path}.content", reading),
            "tool_call_id": json_input.field(
                block, "tool_use_id", json_input.as_text, path
            ),
        }
        if json_input.optional(block, "is_error", json_input.as_flag, path):
            result["is_error"] = True
        messages.append(result)
    flush()
    return messages or [{"role": "user", "content": ""}]


def _result(value: object, where: str, reading: ReadOptions) -> str:
    if value is None:
        return ""
    return "\n".join(
        _readable(block, path, reading)
        for block, path in _blocks(value, where, _IN_RESULT)
    )


def _readable(block: Json, path: str, reading: ReadOptions) -> str:
    """The text of a block of a user or of a tool."""
    if block["type"] == "text":
        return json_input.field(block, "text", json_input.as_text, path)
    if block["type"] == "image":
        if reading.images == "omit":
            return OMITTED_IMAGE
        refuse(
            f"{path}.type",
            "'image' is not supported: messages are text",
            code="unsupported_content",
        )
    source = json_input.field(block, "source", json_input.as_object, path)
    path += ".source"
    if source.get("type") != "text":
        refuse(
            f"{path}.type",
            f"{source.get('type')!r} is not 'text': documents are text",
            code="unsupported_content",
        )
    return json_input.field(source, "data", json_input.as_text, path)


def _assistant(blocks: list[tuple[Json, str]]) -> Json:
    texts, thoughts, calls = [], [], []
    for block, path in blocks:
        if block["type"] == "tool_use":
            arguments = json_input.field(block, "input", json_input.as_object, path)
            calls.append(
                tool_call(
                    json_input.field(block, "id", json_input.as_text, path),
                    json_input.field(block, "name", json_input.as_name, path),
                    json.dumps(arguments, ensure_ascii=False),
                )
            )
        elif block["type"] == "text":
            texts.append(json_input.field(block, "text", json_input.as_text, path))
        else:
            thoughts.append(
                json_input.field(block, "thinking", json_input.as_text, path)
            )
    return assistant_message("".join(texts), "".join(thoughts), calls)


def _tools(body: Json) -> list[Json] | None:
    where = "tool_choice"
    choice = json_input.optional(body, where, json_input.as_object)
    chosen = "auto"
    if choice is not None:
        json_input.only(choice, {"type", "disable_parallel_tool_use"}, where)
        chosen = json_input.field(choice, "type", json_input.as_name, where)
        if chosen not in ("auto", "none"):
            refuse(
                f"{where}.type",
                f"{chosen!r} is not supported",
                code="unsupported_value",
            )
        if choice.get("disable_parallel_tool_use"):
            refuse(
                f"{where}.disable_parallel_tool_use",
                "replies are not constrained to one call",
                code="unsupported_value",
            )
    tools: list[Json] = []
    for tool, path in json_input.objects(body.get("tools"), "tools"):
        if tool.get("type") not in (None, "custom"):
            refuse(
                f"{path}.type",
                f"{tool['type']!r} is not 'custom': the provider's own tools are not "
                "available here",
                code="unsupported_tool",
            )
        json_input.only(tool, _TOOL | _SILENT, path)
        tools.append(
            function_tool(
                json_input.field(tool, "name", json_input.as_name, path),
                json_input.optional(tool, "description", json_input.as_text, path),
                json_input.field(tool, "input_schema", json_input.as_object, path),
            )
        )
    return tools if tools and chosen != "none" else None


def write(reply: Reply, _: ChatRequest) -> Json:
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
    return {"type": "thinking", "thinking": block.text, "signature": _signature(reply)}


def _signature(reply: Reply) -> str:
    return base64.b64encode(f"trajkit:{reply.reply_id}".encode()).decode()


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


class Stream(BlockStream):
    """The events of a streamed reply.

    ``message_start``; for each block its start, its deltas (for reasoning also one with
    the signature) and its stop; ``message_delta`` with the stop reason and the usage;
    ``message_stop``.
    """

    _begun = False

    def ping(self) -> bytes:
        """Return the protocol's own."""
        return _event({"type": "ping"})

    def reply(self, reply: Reply) -> Iterator[bytes]:
        """Yield all events of the reply that were not sent."""
        yield from self._new(reply, done=True)
        yield _event(
            {
                "type": "message_delta",
                "delta": _ending(reply),
                "usage": _usage(reply.usage),
            }
        )
        yield _event({"type": "message_stop"})

    def error(self, error: GatewayError) -> bytes:
        """Return the error as an event."""
        return _event(error_body(error))

    def _new(self, reply: Reply, *, done: bool) -> Iterator[bytes]:
        for step in self._progress.steps(blocks(reply, done=done), done=done):
            if not self._begun:
                self._begun = True
                yield self._start(reply)
            index: Json = {"index": step.index}
            if step.what == "begin":
                empty = _EMPTY[type(step.block)]
                block = {**_block(step.block, reply), **empty}
                yield _event(
                    {"type": "content_block_start", **index, "content_block": block}
                )
            elif step.what == "text":
                kind, field = _DELTAS[type(step.block)]
                yield _delta(index, kind, field, step.text)
            else:
                if isinstance(step.block, Thought):
                    signature = _signature(reply)
                    yield _delta(index, "signature_delta", "signature", signature)
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
    return {
        "type": "error",
        "error": {"type": _ERROR_TYPES.get(error.status, fallback), "message": message},
    }


ANTHROPIC = WireProtocol(
    name="anthropic",
    paths={"/v1/messages": "reply", "/v1/messages/count_tokens": "count"},
    call_prefix="toolu_",
    read=read,
    read_for_count=read_for_count,
    write=write,
    events=lambda _: Stream(),
    error=error_body,
)

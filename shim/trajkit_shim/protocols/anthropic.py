"""Anthropic Messages: requests, replies, events and errors.

What is taken without effect: ``thinking`` and ``output_config.effort`` (the chat template
decides whether the model reasons), ``context_management`` (the gateway edits nothing),
``cache_control`` wherever it stands, ``metadata`` and what concerns billing.
"""

import base64
import json
from collections.abc import Iterator

from trajkit_shim import wire
from trajkit_shim.chat import OMITTED_IMAGE, ChatRequest, Reading
from trajkit_shim.errors import GatewayError
from trajkit_shim.protocols.blocks import Block, Thought, Told, blocks
from trajkit_shim.protocols.protocol import WireProtocol
from trajkit_shim.protocols.sse import RawJson, event
from trajkit_shim.reply import Call, Reply, Usage
from trajkit_shim.sampling import parse_wishes
from trajkit_shim.wire import Json, refuse

KNOWN = frozenset(
    {
        "betas",
        "cache_control",
        "context_management",
        "inference_geo",
        "max_tokens",
        "messages",
        "metadata",
        "model",
        "output_config",
        "service_tier",
        "speed",
        "stop_sequences",
        "stream",
        "system",
        "temperature",
        "thinking",
        "tool_choice",
        "tools",
        "top_k",
        "top_p",
    }
)
# What means nothing to the model, on a block or a tool.
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
    {
        "allowed_callers",
        "description",
        "eager_input_streaming",
        "input_examples",
        "input_schema",
        "name",
    }
)

# A line that Claude Code puts before its system prompt for its provider. It changes
# from one conversation to the next (spec: engines-and-clients 6.1).
_BILLING = "x-anthropic-billing-header:"


def read(body: Json, reading: Reading) -> ChatRequest:
    """The chat request that the body of ``POST /v1/messages`` holds.

    Raises
    ------
    GatewayError
        A field is missing, malformed, or asks for what this gateway does not do.
    """
    if body.get("max_tokens") is None:
        refuse("max_tokens", "missing")
    return _read(body, reading)


def read_for_count(body: Json, reading: Reading) -> ChatRequest:
    """The chat request of ``POST /v1/messages/count_tokens``, which names no limit."""
    return _read(body, reading)


def _read(body: Json, reading: Reading) -> ChatRequest:
    wire.only(body, KNOWN, "")
    if body.get("model") is not None:
        wire.as_text(body["model"], "model")
    for name in ("thinking", "metadata", "context_management"):
        if body.get(name) is not None:
            wire.as_object(body[name], name)
    if body.get("output_config") is not None:
        config = wire.as_object(body["output_config"], "output_config")
        wire.only(config, {"effort", "task_budget"}, "output_config")
    messages = _messages(body, reading)
    if messages[-1]["role"] == "assistant":
        refuse("messages", "the last one is the assistant's: no reply is continued")
    return ChatRequest(
        messages=messages,
        tools=_tools(body.get("tools"), body.get("tool_choice")),
        asked=parse_wishes(body, names={"stop": "stop_sequences", "seed": None}),
        stream=body.get("stream") is not None
        and wire.as_flag(body["stream"], "stream"),
    )


def _messages(body: Json, reading: Reading) -> list[Json]:
    messages: list[Json] = []
    if body.get("system") is not None:
        system = "\n".join(_texts(body["system"], "system"))
        if system:
            messages.append({"role": "system", "content": system})
    items = wire.as_list(body.get("messages"), "messages")
    if not items:
        refuse("messages", "an empty list")
    for i, item in enumerate(items):
        where = f"messages[{i}]"
        message = wire.as_object(item, where)
        wire.only(message, {"role", "content"}, where)
        role = wire.as_name(message.get("role"), f"{where}.role")
        if role not in _ROLES:
            refuse(f"{where}.role", f"{role!r} is not one of {', '.join(_ROLES)}")
        if role == "system":
            text = "\n".join(_texts(message.get("content"), f"{where}.content"))
            messages.append({"role": "system", "content": text})
            continue
        blocks = _blocks(message.get("content"), f"{where}.content", _ROLES[role])
        if role == "user":
            messages += _user(blocks, reading)
        else:
            messages.append(_assistant(blocks))
    return messages


def _texts(value: object, where: str) -> Iterator[str]:
    """The texts of a system prompt, without empty ones and without billing lines."""
    for block, at in _blocks(value, where, _ROLES["system"]):
        text = wire.as_text(block.get("text"), f"{at}.text")
        if text.startswith(_BILLING):
            _, _, text = text.partition("\n")
        if text:
            yield text


def _blocks(value: object, where: str, kinds: frozenset[str]) -> list[tuple[Json, str]]:
    """The blocks of a message's content, each with its path; a string is one block."""
    if isinstance(value, str):
        return [({"type": "text", "text": value}, where)]
    blocks = []
    for i, item in enumerate(wire.as_list(value, where)):
        at = f"{where}[{i}]"
        block = wire.as_object(item, at)
        kind = wire.as_name(block.get("type"), f"{at}.type")
        if kind not in kinds:
            refuse(
                f"{at}.type",
                f"{kind!r} is not supported here: {', '.join(sorted(kinds))}",
                code="unsupported_content",
            )
        wire.only(block, _BLOCKS[kind] | _SILENT, at)
        blocks.append((block, at))
    return blocks


def _user(blocks: list[tuple[Json, str]], reading: Reading) -> list[Json]:
    """Tool results as messages of their own; texts that stand together as one."""
    messages: list[Json] = []
    said: list[str] = []

    def flush() -> None:
        if said:
            messages.append({"role": "user", "content": "\n".join(said)})
            said.clear()

    for block, at in blocks:
        if block["type"] != "tool_result":
            said += filter(None, [_readable(block, at, reading)])
            continue
        flush()
        result: Json = {
            "role": "tool",
            "content": _result(block.get("content"), f"{at}.content", reading),
            "tool_call_id": wire.as_text(block.get("tool_use_id"), f"{at}.tool_use_id"),
        }
        if block.get("is_error") is not None and wire.as_flag(
            block["is_error"], f"{at}.is_error"
        ):
            result["is_error"] = True
        messages.append(result)
    flush()
    return messages or [{"role": "user", "content": ""}]


def _result(value: object, where: str, reading: Reading) -> str:
    if value is None:
        return ""
    return "\n".join(
        _readable(block, at, reading) for block, at in _blocks(value, where, _IN_RESULT)
    )


def _readable(block: Json, at: str, reading: Reading) -> str:
    """The text of a block of a user or of a tool."""
    if block["type"] == "text":
        return wire.as_text(block.get("text"), f"{at}.text")
    if block["type"] == "image":
        if reading.images == "omit":
            return OMITTED_IMAGE
        refuse(
            f"{at}.type",
            "'image' is not supported: messages are text",
            code="unsupported_content",
        )
    source = wire.as_object(block.get("source"), f"{at}.source")
    if source.get("type") != "text":
        refuse(
            f"{at}.source.type",
            f"{source.get('type')!r} is not 'text': documents are text",
            code="unsupported_content",
        )
    return wire.as_text(source.get("data"), f"{at}.source.data")


def _assistant(blocks: list[tuple[Json, str]]) -> Json:
    texts, thoughts, calls = [], [], []
    for block, at in blocks:
        if block["type"] == "text":
            texts.append(wire.as_text(block.get("text"), f"{at}.text"))
        elif block["type"] == "thinking":
            thoughts.append(wire.as_text(block.get("thinking"), f"{at}.thinking"))
        else:
            calls.append(_tool_use(block, at))
    message: Json = {"role": "assistant", "content": "".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _tool_use(block: Json, at: str) -> Json:
    arguments = wire.as_object(block.get("input"), f"{at}.input")
    return {
        "id": wire.as_text(block.get("id"), f"{at}.id"),
        "type": "function",
        "function": {
            "name": wire.as_name(block.get("name"), f"{at}.name"),
            "arguments": json.dumps(arguments, ensure_ascii=False),
        },
    }


def _tools(value: object, choice: object) -> list[Json] | None:
    chosen = "auto"
    if choice is not None:
        fields = wire.as_object(choice, "tool_choice")
        wire.only(fields, {"type", "disable_parallel_tool_use"}, "tool_choice")
        chosen = wire.as_name(fields.get("type"), "tool_choice.type")
        if chosen not in ("auto", "none"):
            refuse(
                "tool_choice.type",
                f"{chosen!r} is not supported",
                code="unsupported_value",
            )
        if fields.get("disable_parallel_tool_use"):
            refuse(
                "tool_choice.disable_parallel_tool_use",
                "replies are not constrained to one call",
                code="unsupported_value",
            )
    if value is None:
        return None
    tools: list[Json] = []
    for i, item in enumerate(wire.as_list(value, "tools")):
        where = f"tools[{i}]"
        tool = wire.as_object(item, where)
        if tool.get("type") not in (None, "custom"):
            refuse(
                f"{where}.type",
                f"{tool['type']!r} is not 'custom': the provider's own tools are "
                "unknown here",
                code="unsupported_tool",
            )
        wire.only(tool, _TOOL | _SILENT, where)
        function: Json = {"name": wire.as_name(tool.get("name"), f"{where}.name")}
        if tool.get("description") is not None:
            function["description"] = wire.as_text(
                tool["description"], f"{where}.description"
            )
        function["parameters"] = wire.as_object(
            tool.get("input_schema"), f"{where}.input_schema"
        )
        tools.append({"type": "function", "function": function})
    return tools if tools and chosen != "none" else None


def write(reply: Reply, _: ChatRequest) -> Json:
    """The body of a reply that is not streamed."""
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
    return {
        "type": "thinking",
        "thinking": block.text,
        "signature": _signature(reply),
    }


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


class Stream:
    """The events of a streamed reply.

    ``message_start``; for each block its start, its deltas (for reasoning a last one
    with the signature) and its stop; ``message_delta`` with the stop reason and the
    usage; ``message_stop``.
    """

    def __init__(self) -> None:
        self._begun = False
        self._told = Told()

    def opening(self) -> bytes:
        """Nothing: ``message_start`` tells the prompt's tokens."""
        return b""

    def ping(self) -> bytes:
        """The protocol's own."""
        return _event({"type": "ping"})

    def partial(self, reply: Reply) -> bytes:
        """The events of what is new."""
        return b"".join(self._steps(reply, done=False))

    def reply(self, reply: Reply) -> Iterator[bytes]:
        """All events of the reply that were not told."""
        yield from self._steps(reply, done=True)
        yield _event(
            {
                "type": "message_delta",
                "delta": _ending(reply),
                "usage": _usage(reply.usage),
            }
        )
        yield _event({"type": "message_stop"})

    def error(self, error: GatewayError) -> bytes:
        """The error as an event."""
        return _event(error_body(error))

    def _steps(self, reply: Reply, *, done: bool) -> Iterator[bytes]:
        for step in self._told.steps(blocks(reply, done=done), done=done):
            if not self._begun:
                self._begun = True
                yield self._start(reply)
            place: Json = {"index": step.index}
            if step.what == "begins":
                empty = _EMPTY[type(step.block)]
                block = {**_block(step.block, reply), **empty}
                yield _event(
                    {"type": "content_block_start", **place, "content_block": block}
                )
                continue
            if step.what == "goes on":
                yield _delta(place, *_DELTAS[type(step.block)], step.text)
                continue
            if isinstance(step.block, Thought):
                yield _delta(place, "signature_delta", "signature", _signature(reply))
            yield _event({"type": "content_block_stop", **place})

    def _start(self, reply: Reply) -> bytes:
        message: Json = {
            **_head(reply),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**_usage(reply.usage), "output_tokens": 0},
        }
        return _event({"type": "message_start", "message": message})


# a block as it starts, and the type and field of the deltas that fill it
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


def _delta(place: Json, kind: str, field: str, text: str) -> bytes:
    delta: Json = {"type": kind, field: text}
    return _event({"type": "content_block_delta", **place, "delta": delta})


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
    """The error as Anthropic's API words it.

    A prompt that is too long is told in the words by which Claude Code knows that it
    must compact.
    """
    fallback = "api_error" if error.status >= 500 else "invalid_request_error"
    message = error.message
    if error.overflow is not None:
        message = "prompt is too long: {} tokens > {} maximum".format(*error.overflow)
    return {
        "type": "error",
        "error": {
            "type": _ERROR_TYPES.get(error.status, fallback),
            "message": message,
        },
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

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
from trajkit_shim.chat.reply import Call, Reply
from trajkit_shim.chat.sampling_params import parse_sampling
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Fields, Json, as_object
from trajkit_shim.protocols import stream
from trajkit_shim.protocols.base import WireProtocol, words_for
from trajkit_shim.protocols.openai_chat import known_role
from trajkit_shim.protocols.stream import Block, Step, Thought, event

T = TypeVar("T")

_KNOWN = frozenset(
    "betas cache_control chat_template_kwargs context_management inference_geo max_tokens "
    "messages metadata model output_config output_format service_tier speed "
    "stop_sequences stream system temperature thinking tool_choice tools top_k "
    "top_p".split()
)
# fields of a block or tool that mean nothing to the model
_SILENT = frozenset({"type", "cache_control"})
_TOOL = frozenset(
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
    front = chat.system_message(given)
    messages = front + [m for given in fields.filled("messages") for m in _read(given)]
    tools = chat.Tools()
    for tool in fields.objects("tools"):
        kind = tool.get_text("type") or "custom"
        if kind != "custom":
            # only the provider can run it
            tools.left_out.append(kind)
            continue
        tool.only(_TOOL | _SILENT)
        tools.add(tool, tool.need("input_schema", as_object))
    choice = fields.section("tool_choice")
    choice.only({"type", "name", "disable_parallel_tool_use"})
    modes = ("any", "auto", "none", "tool")
    chosen = choice.one_of("type", modes, "auto")
    schema = chat.text_schema(config, "format")
    # the format had a field of its own before
    older = chat.text_schema(fields, "output_format")
    return chat.ChatRequest(
        messages=messages,
        tools=(tools.functions or None) if chosen != "none" else None,
        required=chat.Required(
            call=chosen in ("any", "tool"),
            names=(choice.name("name"),) if chosen == "tool" else (),
            parallel=not choice.flag("disable_parallel_tool_use"),
            strict=tools.strict,
            schema=older if schema is None else schema,
        ),
        sampling=parse_sampling(fields, {"stop": "stop_sequences", "seed": None}),
        thinking=_thinking(fields, config),
        stream=fields.flag("stream"),
        left_out=tuple(tools.left_out),
        n_front=len(front),
    )


def _thinking(fields: Fields, config: Fields) -> chat.Thinking:
    given = fields.section("thinking")
    kind, budget = given.json.get("type"), given.json.get("budget_tokens")
    return chat.Thinking(
        variables=fields.section("chat_template_kwargs").json,
        effort=config.get_text("effort"),
        on={"enabled": True, "disabled": False}.get(str(kind)),
        budget=budget if isinstance(budget, int) else None,
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


def _block(block: Block, reply: Reply) -> Json:
    if isinstance(block, str):
        return {"type": "text", "text": block}
    if isinstance(block, Call):
        call: Json = {"type": "tool_use", "id": block.call_id, "name": block.name}
        return {**call, "input": stream.RawJson(block.arguments)}
    signed = stream.signature(reply)
    return {"type": "thinking", "thinking": block.text, "signature": signed}


class _Events(stream.Events):
    """The events of a streamed reply.

    ``message_start``; for each block its start, its deltas (for reasoning also one with
    the signature) and its stop; ``message_delta`` with the stop reason and the usage;
    ``message_stop``.
    """

    def ping(self) -> bytes:
        return event({"type": "ping"})

    def error(self, error: GatewayError) -> bytes:
        return event(_error(error))

    def write(self, step: Step) -> Iterator[bytes]:
        reply = step.reply
        place: Json = {"index": step.index}
        match step.what:
            case "begin":
                if step.index == 0:
                    message = stream.begun(_write(reply, self.request))
                    message["usage"]["output_tokens"] = 0
                    yield event({"type": "message_start", "message": message})
                place["content_block"] = stream.begun(_block(step.block, reply))
                yield event({"type": "content_block_start", **place})
            case "text":
                kind, field = _DELTAS[type(step.block)]
                place["delta"] = {"type": kind, field: step.text}
                yield event({"type": "content_block_delta", **place})
            case "end":
                if isinstance(step.block, Thought):
                    signed = stream.signature(reply)
                    delta = {"type": "signature_delta", "signature": signed}
                    yield event(
                        {"type": "content_block_delta", **place, "delta": delta}
                    )
                yield event({"type": "content_block_stop", **place})
            case "done":
                message = _write(reply, self.request)
                ending = {n: message[n] for n in ("stop_reason", "stop_sequence")}
                last = {"delta": ending, "usage": message["usage"]}
                yield event({"type": "message_delta", **last})
                yield event({"type": "message_stop"})


# type and field of the deltas of each kind of block
_DELTAS = {
    str: ("text_delta", "text"),
    Call: ("input_json_delta", "partial_json"),
    Thought: ("thinking_delta", "thinking"),
}
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
    history="messages",
    paths={"/v1/messages": "reply", "/v1/messages/count_tokens": "count"},
    call_prefix="toolu_",
    known=_KNOWN,
    required=("max_tokens",),
    parse=_parse,
    write=_write,
    events=_Events,
    error=_error,
)

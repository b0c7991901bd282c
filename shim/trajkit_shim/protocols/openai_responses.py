"""OpenAI Responses: requests, replies, events and errors.

The client sends the entire conversation each time. Nothing is stored, so there is no
``previous_response_id``. The items of one sampled turn form one message. An item's id
identifies its turn; items without an id belong together up to another role's message or
the next turn's reasoning.
"""

import base64
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

from trajkit_shim.chat import images
from trajkit_shim.chat import request as chat
from trajkit_shim.chat.request import Reply, ToolCall
from trajkit_shim.errors import GatewayError, error_body
from trajkit_shim.json_input import Fields, Json, as_list, as_name
from trajkit_shim.protocols import base
from trajkit_shim.protocols.base import Thought, WireProtocol, event, known_role
from trajkit_shim.protocols.openai_chat import read_required, thinking

_NAMES = {"max_tokens": "max_output_tokens", "stop": None, "seed": None, "top_k": None}
_ROLES = ("assistant", "system", "user", "developer")
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_\d+)?")
_LOGPROBS = "message.output_text.logprobs"
# prefix of encoded reasoning, which is not secret
_PACKED = "trajkit1."
# Codex does not retry after this and invalid_prompt
_TOO_LONG = "context_length_exceeded"


def _parse(fields: Fields) -> chat.ChatRequest:
    if fields.peek("previous_response_id") is not None:
        rule = "nothing is stored here: send the entire conversation as input"
        fields.refuse("previous_response_id", rule, "unsupported_parameter")
    messages = chat.system_message(fields.get_text("instructions"))
    tools = chat.Tools()
    _add_tools(tools, fields)
    schema = chat.text_schema(fields.section("text"), "format")
    offered, required = read_required(fields, tools, schema)
    if _LOGPROBS in (fields.get("include", as_list) or ()):
        fields.ignore("include", _LOGPROBS)
    fields.peek("stream_options")
    if fields.peek("truncation") not in (None, "disabled"):
        fields.ignore("truncation")
    return chat.ChatRequest(
        messages=messages + _messages(fields),
        tools=offered,
        required=required,
        sampling=chat.parse_sampling(fields, _NAMES),
        thinking=thinking(fields),
        stream=fields.flag("stream"),
        left_out=tuple(tools.left_out),
        namespaces=tools.namespaces,
    )


def _add_tools(tools: chat.Tools, fields: Fields, namespace: str = "") -> None:
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
            tools.leave_out(tool, kind)


_Part: TypeAlias = Thought | str | Json


def _messages(fields: Fields) -> list[Json]:
    value = fields.peek("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    # a turn's parts become a message once they are complete
    found: list[Json | list[_Part]] = []
    latest: str | None = None  # the reply that the latest turn is of, if known
    for item in fields.filled("input"):
        kind = as_name(item.json.get("type", "message"), item.at("type"))
        if kind not in _ITEMS:
            item.ignore("type", kind)
            item.whole()
            continue
        role = known_role(item, _ROLES) if kind == "message" else None
        if kind == "function_call_output":
            output = images.read_parts(item, "output", _PARTS)
            found.append(chat.tool_message(item.text("call_id"), output))
        elif role is not None and role != "assistant":
            role = "system" if role == "developer" else role
            readers = _PARTS if role == "user" else _TEXTS
            content = images.joined(images.read_parts(item, "content", readers))
            found.append({"role": role, "content": content})
        else:
            named = _ITEM_ID.fullmatch(str(item.json.get("id")))
            reply_id = named and named[1]
            turn = found[-1] if found else None
            if isinstance(turn, list):
                answered = not all(isinstance(part, Thought) for part in turn)
                over = answered and kind == "reasoning"
                if reply_id and latest:
                    over = reply_id != latest
            if not isinstance(turn, list) or over:
                turn = []
                latest = reply_id
                found.append(turn)
            turn += _item_parts(kind, item)
    if not found:
        fields.refuse("input", "no message of a kind that is known here")
    return [base.assistant(e) if isinstance(e, list) else e for e in found]


def _item_parts(kind: str, item: Fields) -> Sequence[_Part]:
    if kind == "message":
        return images.read_parts(item, "content", _TEXTS)
    if kind == "reasoning":
        return [Thought(_reasoning(item))]
    name, namespace = item.name("name"), item.get("namespace", as_name)
    name = f"{namespace}__{name}" if namespace else name
    return [chat.tool_call(item.text("call_id"), name, item.text("arguments"))]


def _text(part: Fields) -> str:
    part.peek("logprobs")
    return part.text("text")


def _image(part: Fields) -> images.Part:
    read = partial(Fields.text, name="image_url")
    return images.read_image(part, "type", "input_image", read)


_TEXTS: images.Readers = dict.fromkeys(("input_text", "output_text", "text"), _text)
_PARTS: images.Readers = {**_TEXTS, "input_image": _image}


def _reasoning(item: Fields) -> str:
    """The text of a reasoning item: its content, the encoded text, or a summary."""
    packed = item.get_text("encrypted_content")
    for name in ("content", "summary"):
        if item.peek(name) and (name == "content" or packed is None):
            mark = "" if name == "content" else "\n"
            return mark.join(part.text("text") for part in item.objects(name))
    try:
        if packed is not None and packed.startswith(_PACKED):
            return base64.urlsafe_b64decode(packed.removeprefix(_PACKED)).decode()
    except ValueError:
        pass
    if packed is not None:
        # not encoded by this gateway
        item.ignore("encrypted_content")
    return ""


def _write(reply: Reply, request: chat.ChatRequest) -> Json:
    response = _response(f"resp_{reply.reply_id}", reply.created)
    return response | _outcome(reply, _items(reply, request))


def _response(response_id: str, created: int) -> dict[str, Any]:
    """A response without a reply."""
    unknown = ("error", "incomplete_details", "instructions", "previous_response_id")
    return {
        "id": response_id,
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
    }


def _outcome(reply: Reply, items: list[Json]) -> Json:
    usage, cached = reply.usage, reply.usage.cached_tokens or 0
    return {
        "model": reply.model,
        "status": "incomplete" if reply.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.cut else None,
        "output": items,
        "usage": {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage.output_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.total_tokens,
        },
    }


def _items(reply: Reply, request: chat.ChatRequest) -> list[dict[str, Any]]:
    """The output items of a complete reply, which has a text or a call."""
    blocks = base.blocks(reply)
    if isinstance(blocks[-1], Thought):
        blocks.append(reply.text)
    items: list[dict[str, Any]] = []
    for number, block in enumerate(blocks, -(reply.reasoning is not None)):
        if isinstance(block, Thought):
            encoded = base64.urlsafe_b64encode(block.text.encode()).decode()
            item = {
                "type": "reasoning",
                "id": f"rs_{reply.reply_id}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": block.text}],
                "encrypted_content": _PACKED + encoded,
            }
        elif isinstance(block, ToolCall):
            item = {
                "type": "function_call",
                "id": f"fc_{reply.reply_id}_{number}",
                "call_id": block.call_id,
                "name": block.name,
                "arguments": block.arguments,
            }
            if block.name in request.namespaces:
                item["namespace"], item["name"] = request.namespaces[block.name]
        else:
            text = {"type": "output_text", "text": block, "annotations": []}
            item = {
                "type": "message",
                "id": f"msg_{reply.reply_id}_{number}",
                "role": "assistant",
                "content": [text],
            }
        items.append({**item, "status": "completed"})
    if reply.cut:
        items[-1]["status"] = "incomplete"
    return items


def _streamed(request: chat.ChatRequest, changes: Json | None = None) -> Json:
    """The response that the events of a stream are about."""
    return _response(f"resp_{request.stream_id}", request.created) | (changes or {})


def _numbered(
    request: chat.ChatRequest, n_pings: int, events: Iterable[tuple[str, Json]]
) -> Iterator[Json]:
    """The events that follow some keep-alive events; if none, the opening too."""
    begun: Json = {"response": _streamed(request)}
    opening = [] if n_pings else [("created", begun), ("in_progress", begun)]
    first = n_pings + 2 if n_pings else 0
    for number, (kind, fields) in enumerate((*opening, *events), first):
        yield {"type": f"response.{kind}", "sequence_number": number, **fields}


def _ping(request: chat.ChatRequest, n_pings: int) -> bytes:
    alive: Json = {"response": _streamed(request)}
    return b"".join(map(event, _numbered(request, n_pings, [("in_progress", alive)])))


def _failed(
    error: GatewayError, request: chat.ChatRequest, n_pings: int
) -> Iterator[Json]:
    code = "invalid_prompt" if error.status < 500 else "server_error"
    if error.code == _TOO_LONG:
        code = _TOO_LONG
    told = {"code": code, "message": error.message}
    failed: Json = {"response": _streamed(request, {"status": "failed", "error": told})}
    return _numbered(request, n_pings, [("failed", failed)])


def _events(reply: Reply, request: chat.ChatRequest, n_pings: int) -> Iterator[Json]:
    items = _items(reply, request)
    response = _streamed(request, _outcome(reply, items))
    events = [each for k, item in enumerate(items) for each in _events_of(item, k)]
    events.append((str(response["status"]), {"response": response}))
    return _numbered(request, n_pings, events)


def _events_of(item: dict[str, Any], index: int) -> Iterator[tuple[str, Json]]:
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
    paths={"/v1/responses": "reply", "/v1/responses/input_tokens": "count"},
    parse=_parse,
    write=_write,
    events=_events,
    ping=_ping,
    failed=_failed,
    error=error_body,
    count=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    streamed_errors=frozenset({_TOO_LONG}),
)

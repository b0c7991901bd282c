"""OpenAI Responses: requests, replies, events and errors.

The client sends the entire conversation each time. Nothing is stored, so there is no
``previous_response_id``. The items of one sampled turn form one message. An item's id
identifies its turn; items without an id belong together up to another role's message or
the next turn's reasoning.

Accepted and ignored: ``reasoning``, ``store``, and fields about caching and billing.
Tools that only the provider can run (web search and the like) are dropped and counted;
other tools that are not functions are rejected.
"""

import base64
import re
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, cast

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import (
    GivenImage,
    Part,
    Readers,
    joined,
    read_parts,
    read_text,
)
from trajkit_shim.chat.reply import Call, Reply, Usage
from trajkit_shim.chat.sampling_params import parse_sampling
from trajkit_shim.errors import GatewayError, error_body
from trajkit_shim.json_input import Fields, Json, as_list, as_name
from trajkit_shim.protocols.base import WireProtocol
from trajkit_shim.protocols.blocks import (
    Block,
    Events,
    Step,
    Thought,
    assistant,
    blocks,
)
from trajkit_shim.protocols.openai_chat import read_required, token_logprobs
from trajkit_shim.protocols.sse import event

# accepted and ignored
_HINTS = (
    "client_metadata metadata prompt_cache_key prompt_cache_options "
    "prompt_cache_retention reasoning safety_identifier service_tier store "
    "stream_options user"
)
_NEUTRAL: Mapping[str, object] = {
    "background": False,
    "top_logprobs": 0,
    "truncation": "disabled",
}
_READ = (
    "include input instructions max_output_tokens model parallel_tool_calls "
    "previous_response_id stream temperature text tool_choice tools top_p"
)
# run by the provider; the model cannot call them because it does not see them
_HOSTED = frozenset(
    "code_interpreter file_search image_generation web_search web_search_2025_08_26 "
    "web_search_preview web_search_preview_2025_03_11".split()
)
_NAMES = {"max_tokens": "max_output_tokens", "stop": None, "seed": None, "top_k": None}
_LOGPROBS = "message.output_text.logprobs"
_ROLES = ("assistant", "system", "user", "developer")
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_\d+)?")
# prefix of encoded reasoning, which is not secret
_PACKED = "trajkit1."


def _parse(fields: Fields, _: chat.ReadOptions) -> chat.ChatRequest:
    if fields.json.get("previous_response_id") is not None:
        rule = "nothing is stored here: send the entire conversation as input"
        fields.refuse("previous_response_id", rule, "unsupported_parameter")
    front = chat.system_message(fields.get_text("instructions"))
    tools = _Tools()
    tools.add_all(fields)
    format = fields.section("text")
    format.only({"format", "verbosity"})
    schema = chat.text_schema(format, "format")
    offered, required = read_required(fields, tools, schema)
    return chat.ChatRequest(
        messages=front + _messages(fields),
        tools=offered,
        required=required,
        sampling=parse_sampling(fields, _NAMES),
        logprobs=_LOGPROBS in (fields.get("include", as_list) or ()),
        stream=fields.flag("stream"),
        left_out=tuple(tools.left_out),
        namespaces=tools.namespaces,
        n_front=len(front),
    )


@dataclass(slots=True)
class _Tools(chat.Tools):
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add_all(self, fields: Fields, namespace: str | None = None) -> None:
        """Add a list of tools; names in a namespace get its name as prefix."""
        for tool in fields.objects("tools"):
            kind = tool.name("type")
            if kind == "function":
                prefix = "" if namespace is None else f"{namespace}__"
                name = self.add(tool, tool.get_object("parameters"), prefix)
                if namespace is not None:
                    self.namespaces[name] = namespace, tool.name("name")
            elif kind == "namespace" and namespace is None:
                self.add_all(tool, tool.name("name"))
            elif kind in _HOSTED:
                self.left_out.append(kind)
            else:
                rule = f"{kind!r} is not supported: a tool is a function with JSON "
                tool.refuse("type", f"{rule}arguments", "unsupported_tool")


_Part: TypeAlias = Thought | str | Json


@dataclass(slots=True)
class _Turn:
    """Collects the items of one sampled turn for one message."""

    reply_id: str | None  # of the reply that the items belong to, if known
    parts: list[_Part] = field(default_factory=list)

    def is_over(self, kind: str, reply_id: str | None) -> bool:
        """Whether an item of that kind and reply belongs to the next turn."""
        if reply_id is not None and self.reply_id is not None:
            return reply_id != self.reply_id
        only_thoughts = all(isinstance(part, Thought) for part in self.parts)
        return kind == "reasoning" and not only_thoughts


def _messages(fields: Fields) -> list[Json]:
    value = fields.json.get("input")
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    # a turn becomes a message once it is complete
    found: list[Json | _Turn] = []
    for item in fields.filled("input"):
        kind = as_name(item.json.get("type", "message"), item.at("type"))
        role = item.one_of("role", _ROLES) if kind == "message" else None
        if kind == "function_call_output":
            output = read_parts(item, "output", _PARTS)
            found.append(chat.tool_message(item.text("call_id"), output))
        elif role is not None and role != "assistant":
            role = "system" if role == "developer" else role
            content = joined(read_parts(item, "content", _PARTS))
            found.append({"role": role, "content": content})
        else:
            named = _ITEM_ID.fullmatch(str(item.json.get("id")))
            reply_id = None if named is None else named[1]
            turn = found[-1] if found else None
            if not isinstance(turn, _Turn) or turn.is_over(kind, reply_id):
                turn = _Turn(reply_id)
                found.append(turn)
            turn.parts += _item_parts(kind, item)
    return [assistant(e.parts) if isinstance(e, _Turn) else e for e in found]


def _item_parts(kind: str, item: Fields) -> Sequence[_Part]:
    """What an item adds to an assistant's message."""
    if kind == "message":
        return read_parts(item, "content", _TEXTS)
    if kind == "function_call":
        return [_function_call(item)]
    if kind != "reasoning":
        rule = f"{kind!r} is not supported: messages, reasoning, functions and "
        item.refuse("type", f"{rule}their results", "unsupported_content")
    return [Thought(_reasoning(item))]


def _image(part: Fields) -> GivenImage:
    return GivenImage(part, "type", "input_image", partial(part.text, "image_url"))


_TEXTS: Readers[str] = dict.fromkeys(("input_text", "output_text", "text"), read_text)
_PARTS: Readers[Part] = {**_TEXTS, "input_image": _image}


def _function_call(item: Fields) -> Json:
    name, namespace = item.name("name"), item.get("namespace", as_name)
    name = name if namespace is None else f"{namespace}__{name}"
    return chat.tool_call(item.text("call_id"), name, item.text("arguments"))


def _reasoning(item: Fields) -> str:
    """The text of a reasoning item: its content, the encoded text, or a summary."""
    if item.json.get("content"):
        return "".join(map(read_text, item.objects("content")))
    packed = item.get_text("encrypted_content")
    if packed is None:
        return "\n".join(map(read_text, item.objects("summary")))
    try:
        if not packed.startswith(_PACKED):
            raise ValueError("not encoded by this gateway")
        return base64.urlsafe_b64decode(packed.removeprefix(_PACKED)).decode()
    except ValueError:
        item.refuse("encrypted_content", "was not written by this gateway")


def _write(reply: Reply, request: chat.ChatRequest) -> Json:
    response = _response(f"resp_{reply.reply_id}", reply.created, reply.model)
    return {**response, **_outcome(reply, request)}


def _response(response_id: str, created: int, model: str) -> Json:
    """A response without a reply."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "store": False,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "truncation": "disabled",
        "usage": None,
    }


def _outcome(reply: Reply, request: chat.ChatRequest) -> Json:
    return {
        "model": reply.model,
        "status": "incomplete" if reply.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.cut else None,
        "output": _items(reply, request, _blocks(reply, done=True)),
        "usage": _usage(reply.usage),
    }


def _usage(usage: Usage) -> Json:
    cached = usage.cached_tokens or 0
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _blocks(reply: Reply, *, done: bool) -> list[Block]:
    """The blocks that become items; a complete reply has a text or a call."""
    found = blocks(reply, done=done)
    if done and isinstance(found[-1], Thought):
        found.append(reply.text)
    return found


def _items(reply: Reply, request: chat.ChatRequest, found: list[Block]) -> list[Json]:
    """The output items of the blocks, in order."""
    items: list[Json] = []
    number = 0
    for block in found:
        item: Json
        if isinstance(block, Thought):
            encoded = base64.urlsafe_b64encode(block.text.encode()).decode()
            item = {
                "type": "reasoning",
                "id": f"rs_{reply.reply_id}",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": block.text}],
                "encrypted_content": _PACKED + encoded,
            }
        elif isinstance(block, Call):
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
            part: Json = {"type": "output_text", "text": block, "annotations": []}
            if reply.tokens is not None:
                # of the complete reply, with its first text
                first = not any(item["type"] == "message" for item in items)
                part["logprobs"] = token_logprobs(reply.tokens if first else ())
            item = {
                "type": "message",
                "id": f"msg_{reply.reply_id}_{number}",
                "role": "assistant",
                "content": [part],
            }
        items.append({**item, "status": "completed"})
        number += not isinstance(block, Thought)
    if reply.cut:
        items[-1]["status"] = "incomplete"
    return items


class _Stream(Events):
    """The events of a streamed reply, numbered.

    ``response.created`` and ``response.in_progress``; for each item the events that add
    it, fill it (part added, deltas, done) and finish it; ``response.completed``, or
    ``response.incomplete`` if a token limit truncated the reply.
    """

    def __init__(self, request: chat.ChatRequest) -> None:
        super().__init__()
        self._request = request
        self._number = 0
        self._items: list[Json] = []
        self._response = _response(f"resp_{uuid.uuid4().hex}", int(time.time()), "")

    def opening(self) -> bytes:
        return self._status("created") + self._status("in_progress")

    def ping(self) -> bytes:
        return self._status("in_progress")

    def error(self, error: GatewayError) -> bytes:
        self._response["status"] = "failed"
        self._response["error"] = {"code": _failure(error), "message": error.message}
        return self._status("failed")

    def blocks(self, reply: Reply, *, done: bool) -> list[Block]:
        found = _blocks(reply, done=done)
        self._items = _items(reply, self._request, found)
        return found

    def write(self, step: Step) -> Iterator[bytes]:
        if step.what == "done":
            self._response |= _outcome(step.reply, self._request)
            yield self._status("incomplete" if step.reply.cut else "completed")
        elif step.what not in ("open", "close"):
            yield from self._write_block(step)

    def _write_block(self, step: Step) -> Iterator[bytes]:
        item, block = self._items[step.index], step.block
        output: Json = {"output_index": step.index, "item": item}
        place: Json = {"item_id": item["id"], "output_index": step.index}
        parts: list[Json] = []
        if isinstance(block, Call):
            kind, done = "function_call_arguments", {"arguments": item["arguments"]}
            done["name"] = item["name"]
        else:
            parts = cast("list[Json]", item["content"])
            kind, done = str(parts[0]["type"]), {"text": parts[0]["text"]}
            place["content_index"] = 0
        # clients expect logprobs only of a message's text; all come at its end
        none: Json = {"logprobs": []} if isinstance(block, str) else {}
        if step.what == "begin":
            begun = {**item, **_EMPTY[type(block)], "status": "in_progress"}
            yield self._event("output_item.added", {**output, "item": begun})
            for part in parts:
                empty = {**part, "text": "", **(none if "logprobs" in part else {})}
                yield self._event("content_part.added", {**place, "part": empty})
        elif step.what == "text":
            yield self._event(f"{kind}.delta", {**place, "delta": step.text, **none})
        else:
            logprobs = {name: parts[0].get(name, []) for name in none}
            yield self._event(f"{kind}.done", {**place, **done, **logprobs})
            for part in parts:
                yield self._event("content_part.done", {**place, "part": part})
            yield self._event("output_item.done", output)

    def _status(self, kind: str) -> bytes:
        return self._event(kind, {"response": self._response})

    def _event(self, kind: str, fields: Json) -> bytes:
        name = f"response.{kind}"
        numbered = {"type": name, "sequence_number": self._number, **fields}
        self._number += 1
        return event(numbered, name)


# fields of an item that has begun
_EMPTY: Mapping[type, Json] = {
    str: {"content": []},
    Call: {"arguments": ""},
    Thought: {"content": [], "encrypted_content": None},
}


def _failure(error: GatewayError) -> str:
    """The code of a failed response. Codex retries unless it is one of the first two."""
    if error.code == "context_length_exceeded":
        return error.code
    return "invalid_prompt" if error.status < 500 else "server_error"


OPENAI_RESPONSES = WireProtocol(
    name="openai_responses",
    history="input",
    paths={"/v1/responses": "reply", "/v1/responses/input_tokens": "count"},
    call_prefix="call_",
    known=frozenset(f"{_HINTS} {_READ}".split()),
    neutral=_NEUTRAL,
    parse=_parse,
    write=_write,
    events=_Stream,
    error=error_body,
    count=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    streamed_errors=frozenset({"context_length_exceeded"}),
)

"""OpenAI Responses: requests, replies, events and errors.

The client sends the whole conversation each time; nothing is stored, so there is no
``previous_response_id``. Items that were sampled in one turn are one message: an item's
id tells its turn, and items without one belong together until a message of someone else
or the reasoning of the next turn.

Taken without effect: ``reasoning``, ``store``, and what concerns caching and billing.
Tools that only the provider can run (web search and the like) are left out, and counted;
any other tool that is no function is refused.
"""

import base64
import binascii
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from trajkit_shim import wire
from trajkit_shim.chat import OMITTED_IMAGE, ChatRequest, Reading
from trajkit_shim.errors import GatewayError, error_body
from trajkit_shim.protocols.blocks import Block, Step, Thought, Told, blocks
from trajkit_shim.protocols.protocol import WireProtocol
from trajkit_shim.protocols.sse import event
from trajkit_shim.reply import Call, Reply, Usage
from trajkit_shim.sampling import parse_wishes
from trajkit_shim.wire import Json, refuse

# Accepted and without effect.
HINTS = frozenset(
    {
        "client_metadata",
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "reasoning",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_options",
        "user",
    }
)
# Accepted with the one value that asks for nothing.
NEUTRAL: dict[str, object] = {
    "background": False,
    "parallel_tool_calls": True,
    "top_logprobs": 0,
    "truncation": "disabled",
}
KNOWN = frozenset(
    {
        *HINTS,
        *NEUTRAL,
        "include",
        "input",
        "instructions",
        "max_output_tokens",
        "model",
        "stream",
        "temperature",
        "text",
        "tool_choice",
        "tools",
        "top_p",
    }
)
# Run by the provider: a model that is not told of them cannot call them.
HOSTED = frozenset(
    {
        "code_interpreter",
        "file_search",
        "image_generation",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)
_TEXTS = frozenset({"input_text", "output_text", "text"})
_ROLES = {
    "assistant": "assistant",
    "developer": "system",
    "system": "system",
    "user": "user",
}
_ITEM_ID = re.compile(r"(?:rs|msg|fc)_([0-9a-f]{32})(?:_\d+)?")
# what the reasoning of a reply is packed in; it hides nothing
_PACKED = "trajkit1."


def read(body: Json, reading: Reading) -> ChatRequest:
    """The chat request that the body of ``POST /v1/responses`` holds.

    Raises
    ------
    GatewayError
        A field is missing, malformed, or asks for what this gateway does not do.
    """
    if body.get("previous_response_id") is not None:
        refuse(
            "previous_response_id",
            "nothing is stored here: send the whole conversation as input",
            code="unsupported_parameter",
        )
    wire.only(body, KNOWN, "")
    for name, neutral in NEUTRAL.items():
        value = body.get(name)
        if value is not None and (value != neutral or type(value) is not type(neutral)):
            refuse(name, f"{value!r} is not supported", code="unsupported_value")
    if body.get("model") is not None:
        wire.as_text(body["model"], "model")
    _check_text(body.get("text"))
    _check_include(body.get("include"))
    messages: list[Json] = []
    if body.get("instructions") is not None:
        said = wire.as_text(body["instructions"], "instructions")
        if said:
            messages.append({"role": "system", "content": said})
    messages += _messages(body.get("input"), reading)
    tools = _Tools()
    tools.add_all(body.get("tools"), "tools")
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        refuse("tool_choice", f"{choice!r} is not supported", code="unsupported_value")
    offered = tools.functions and choice != "none"
    return ChatRequest(
        messages=messages,
        tools=tools.functions if offered else None,
        asked=parse_wishes(
            body,
            names={
                "max_tokens": "max_output_tokens",
                "stop": None,
                "seed": None,
                "top_k": None,
            },
        ),
        stream=body.get("stream") is not None
        and wire.as_flag(body["stream"], "stream"),
        left_out=tuple(tools.left_out),
        namespaces=tools.namespaces,
    )


def _check_text(value: object) -> None:
    if value is None:
        return
    text = wire.as_object(value, "text")
    wire.only(text, {"format", "verbosity"}, "text")
    if text.get("format") not in (None, {"type": "text"}):
        refuse(
            "text.format",
            "replies are not constrained to a format",
            code="unsupported_value",
        )


def _check_include(value: object) -> None:
    for i, name in enumerate(wire.as_list([] if value is None else value, "include")):
        if name == "message.output_text.logprobs":
            refuse(f"include[{i}]", "not supported by this gateway")


@dataclass(slots=True)
class _Tools:
    """The tools that a request declares."""

    functions: list[Json] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add_all(self, value: object, where: str, namespace: str | None = None) -> None:
        """Add a list of tools, those of a namespace under its name and theirs."""
        if value is None:
            return
        for i, item in enumerate(wire.as_list(value, where)):
            at = f"{where}[{i}]"
            tool = wire.as_object(item, at)
            kind = wire.as_name(tool.get("type"), f"{at}.type")
            if kind == "function":
                self._add_function(tool, at, namespace)
            elif kind == "namespace" and namespace is None:
                name = wire.as_name(tool.get("name"), f"{at}.name")
                self.add_all(tool.get("tools"), f"{at}.tools", name)
            elif kind in HOSTED:
                self.left_out.append(kind)
            else:
                refuse(
                    f"{at}.type",
                    f"{kind!r} is not supported: a tool is a function with arguments "
                    "in JSON",
                    code="unsupported_tool",
                )

    def _add_function(self, tool: Json, at: str, namespace: str | None) -> None:
        name = wire.as_name(tool.get("name"), f"{at}.name")
        if tool.get("strict"):
            refuse(f"{at}.strict", "replies are not constrained to a schema")
        if namespace is not None:
            known_as = f"{namespace}__{name}"
            self.namespaces[known_as] = (namespace, name)
            name = known_as
        function: Json = {"name": name}
        if tool.get("description") is not None:
            function["description"] = wire.as_text(
                tool["description"], f"{at}.description"
            )
        if tool.get("parameters") is not None:
            function["parameters"] = wire.as_object(
                tool["parameters"], f"{at}.parameters"
            )
        self.functions.append({"type": "function", "function": function})


@dataclass(slots=True)
class _Turn:
    """The items of one sampled turn, on their way to one message."""

    # of the reply whose items they are; None: the items do not say
    reply_id: str | None
    reasoning: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    calls: list[Json] = field(default_factory=list)

    def begins_anew(self, kind: str, reply_id: str | None) -> bool:
        """Whether an item of that kind and reply belongs to the next turn."""
        if reply_id is not None and self.reply_id is not None:
            return reply_id != self.reply_id
        return kind == "reasoning" and bool(self.texts or self.calls)

    def message(self) -> Json:
        message: Json = {"role": "assistant", "content": "".join(self.texts)}
        if any(self.reasoning):
            message["reasoning_content"] = "".join(self.reasoning)
        if self.calls:
            message["tool_calls"] = self.calls
        return message


def _messages(value: object, reading: Reading) -> list[Json]:
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    items = wire.as_list(value, "input")
    if not items:
        refuse("input", "an empty list")
    messages: list[Json] = []
    turn: _Turn | None = None
    for i, value in enumerate(items):
        at = f"input[{i}]"
        item = wire.as_object(value, at)
        kind = wire.as_name(item.get("type", "message"), f"{at}.type")
        if kind == "message":
            role = wire.as_name(item.get("role"), f"{at}.role")
            if role not in _ROLES:
                refuse(f"{at}.role", f"{role!r} is not one of {', '.join(_ROLES)}")
        else:
            role = "tool" if kind == "function_call_output" else "assistant"
        if role != "assistant":
            if turn is not None:
                messages.append(turn.message())
                turn = None
            if kind == "message":
                said = "\n".join(_texts(item.get("content"), f"{at}.content", reading))
                messages.append({"role": _ROLES[role], "content": said})
            else:
                messages.append(_result(item, at, reading))
            continue
        item_id = item.get("id")
        named = _ITEM_ID.fullmatch(item_id) if isinstance(item_id, str) else None
        reply_id = None if named is None else named[1]
        if turn is None or turn.begins_anew(kind, reply_id):
            if turn is not None:
                messages.append(turn.message())
            turn = _Turn(reply_id)
        _add_item(turn, kind, item, at, reading)
    if turn is not None:
        messages.append(turn.message())
    return messages


def _add_item(turn: _Turn, kind: str, item: Json, at: str, reading: Reading) -> None:
    if kind == "message":
        turn.texts += _texts(item.get("content"), f"{at}.content", reading)
    elif kind == "function_call":
        turn.calls.append(_function_call(item, at))
    elif kind == "reasoning":
        turn.reasoning.append(_reasoning(item, at))
    else:
        refuse(
            f"{at}.type",
            f"{kind!r} is not supported: messages, reasoning, functions and their "
            "results",
            code="unsupported_content",
        )


def _texts(value: object, where: str, reading: Reading) -> list[str]:
    if isinstance(value, str):
        return [value]
    texts = []
    for i, part in enumerate(wire.as_list(value, where)):
        at = f"{where}[{i}]"
        content = wire.as_object(part, at)
        kind = content.get("type")
        if kind == "input_image" and reading.images == "omit":
            texts.append(OMITTED_IMAGE)
        elif isinstance(kind, str) and kind in _TEXTS:
            texts.append(wire.as_text(content.get("text"), f"{at}.text"))
        else:
            refuse(
                f"{at}.type",
                f"{kind!r} is not supported: messages are text",
                code="unsupported_content",
            )
    return texts


def _result(item: Json, at: str, reading: Reading) -> Json:
    return {
        "role": "tool",
        "content": "\n".join(_texts(item.get("output"), f"{at}.output", reading)),
        "tool_call_id": wire.as_text(item.get("call_id"), f"{at}.call_id"),
    }


def _function_call(item: Json, at: str) -> Json:
    name = wire.as_name(item.get("name"), f"{at}.name")
    if item.get("namespace") is not None:
        name = f"{wire.as_name(item['namespace'], f'{at}.namespace')}__{name}"
    return {
        "id": wire.as_text(item.get("call_id"), f"{at}.call_id"),
        "type": "function",
        "function": {
            "name": name,
            "arguments": wire.as_text(item.get("arguments"), f"{at}.arguments"),
        },
    }


def _reasoning(item: Json, at: str) -> str:
    """The text of a reasoning item: its content, else what is packed, else a summary."""
    if item.get("content"):
        parts = wire.as_list(item["content"], f"{at}.content")
        return "".join(
            _part_text(part, f"{at}.content[{i}]") for i, part in enumerate(parts)
        )
    packed = item.get("encrypted_content")
    if packed is not None:
        return _unpacked(wire.as_text(packed, f"{at}.encrypted_content"), at)
    parts = wire.as_list(item.get("summary", []), f"{at}.summary")
    return "\n".join(
        _part_text(part, f"{at}.summary[{i}]") for i, part in enumerate(parts)
    )


def _part_text(part: object, at: str) -> str:
    return wire.as_text(wire.as_object(part, at).get("text"), f"{at}.text")


def _packed(reasoning: str) -> str:
    return _PACKED + base64.urlsafe_b64encode(reasoning.encode()).decode()


def _unpacked(packed: str, at: str) -> str:
    try:
        if not packed.startswith(_PACKED):
            raise ValueError("packed by someone else")
        return base64.urlsafe_b64decode(packed.removeprefix(_PACKED)).decode()
    except (ValueError, binascii.Error):
        refuse(f"{at}.encrypted_content", "was not written by this gateway")


def write(reply: Reply, asked: ChatRequest) -> Json:
    """The body of a reply that is not streamed."""
    response = _response(f"resp_{reply.reply_id}", reply.created, reply.model)
    return {**response, **_outcome(reply, asked)}


def _response(response_id: str, created: int, model: str) -> Json:
    """A response that nothing is known of yet."""
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


def _outcome(reply: Reply, asked: ChatRequest) -> Json:
    return {
        "model": reply.model,
        "status": "incomplete" if reply.cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if reply.cut else None,
        "output": _items(reply, asked, _blocks(reply, done=True)),
        "usage": _usage(reply.usage),
    }


def _usage(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens or 0,
            "cache_write_tokens": 0,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.prompt_tokens + usage.output_tokens,
    }


def _blocks(reply: Reply, *, done: bool) -> list[Block]:
    """What becomes the items: a whole reply says something, if only nothing."""
    found = blocks(reply, done=done)
    if done and isinstance(found[-1], Thought):
        found.append(reply.text)
    return found


def _items(reply: Reply, asked: ChatRequest, found: list[Block]) -> list[Json]:
    """The output items of the blocks, in order."""
    items: list[Json] = []
    number = 0
    for block in found:
        if isinstance(block, Thought):
            items.append(
                {
                    "type": "reasoning",
                    "id": f"rs_{reply.reply_id}",
                    "summary": [],
                    "content": [{"type": "reasoning_text", "text": block.text}],
                    "encrypted_content": _packed(block.text),
                    "status": "completed",
                }
            )
            continue
        if isinstance(block, Call):
            items.append(_call_item(block, f"fc_{reply.reply_id}_{number}", asked))
        else:
            part = {"type": "output_text", "text": block, "annotations": []}
            items.append(
                {
                    "type": "message",
                    "id": f"msg_{reply.reply_id}_{number}",
                    "role": "assistant",
                    "content": [part],
                    "status": "completed",
                }
            )
        number += 1
    if reply.cut:
        items[-1]["status"] = "incomplete"
    return items


def _call_item(call: Call, item_id: str, asked: ChatRequest) -> Json:
    item: Json = {
        "type": "function_call",
        "id": item_id,
        "call_id": call.call_id,
        "name": call.name,
        "arguments": call.arguments,
        "status": "completed",
    }
    if call.name in asked.namespaces:
        item["namespace"], item["name"] = asked.namespaces[call.name]
    return item


class Stream:
    """The events of a streamed reply, numbered.

    ``response.created`` and ``response.in_progress``; for each item it is added, filled
    (its part added, its deltas, done) and done; ``response.completed``, or
    ``response.incomplete`` where a token limit cut it.
    """

    def __init__(self, asked: ChatRequest) -> None:
        self._asked = asked
        self._number = 0
        self._response = _response(f"resp_{uuid.uuid4().hex}", int(time.time()), "")
        self._told = Told()

    def opening(self) -> bytes:
        """The response begins."""
        return self._told_as("response.created") + self._told_as("response.in_progress")

    def ping(self) -> bytes:
        """It is still in progress: an event that resets a client's clock."""
        return self._told_as("response.in_progress")

    def partial(self, reply: Reply) -> bytes:
        """The events of what is new."""
        return b"".join(self._steps(reply, done=False))

    def reply(self, reply: Reply) -> Iterator[bytes]:
        """All events of the reply that were not told."""
        yield from self._steps(reply, done=True)
        self._response |= _outcome(reply, self._asked)
        yield self._told_as(
            "response.incomplete" if reply.cut else "response.completed"
        )

    def error(self, error: GatewayError) -> bytes:
        """The response failed."""
        self._response["status"] = "failed"
        self._response["error"] = {"code": _failure(error), "message": error.message}
        return self._told_as("response.failed")

    def _told_as(self, kind: str) -> bytes:
        return self._event(kind, {"response": self._response})

    def _event(self, kind: str, fields: Json) -> bytes:
        numbered = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return event(numbered, kind)

    def _steps(self, reply: Reply, *, done: bool) -> Iterator[bytes]:
        found = _blocks(reply, done=done)
        items = _items(reply, self._asked, found)
        for step in self._told.steps(found, done=done):
            item = items[step.index]
            place: Json = {"item_id": item["id"], "output_index": step.index}
            calls = isinstance(step.block, Call)
            if step.what == "begins":
                yield self._begun(item, step.index)
            if not calls:
                yield from self._text(item, step, {**place, "content_index": 0})
            elif step.what == "goes on":
                kind = "response.function_call_arguments.delta"
                yield self._event(kind, {**place, "delta": step.text})
            elif step.what == "ends":
                whole = {"name": item["name"], "arguments": item["arguments"]}
                kind = "response.function_call_arguments.done"
                yield self._event(kind, {**place, **whole})
            if step.what == "ends":
                yield self._event(
                    "response.output_item.done",
                    {"output_index": step.index, "item": item},
                )

    def _begun(self, item: Json, index: int) -> bytes:
        calls = item["type"] == "function_call"
        empty: Json = {"arguments": ""} if calls else {"content": []}
        if item["type"] == "reasoning":
            empty["encrypted_content"] = None
        begun = {**item, **empty, "status": "in_progress"}
        return self._event(
            "response.output_item.added", {"output_index": index, "item": begun}
        )

    def _text(self, item: Json, step: Step, place: Json) -> Iterator[bytes]:
        content = item["content"]
        assert isinstance(content, list)
        (part,) = content
        kind = f"response.{part['type']}"
        # only a message's text has logprobs, and none are given
        logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
        if step.what == "begins":
            yield self._event(
                "response.content_part.added", {**place, "part": {**part, "text": ""}}
            )
        elif step.what == "goes on":
            yield self._event(
                f"{kind}.delta", {**place, "delta": step.text, **logprobs}
            )
        else:
            text = part["text"]
            yield self._event(f"{kind}.done", {**place, "text": text, **logprobs})
            yield self._event("response.content_part.done", {**place, "part": part})


def _failure(error: GatewayError) -> str:
    """The code of a failed response. Codex asks again unless it is one of the first two."""
    if error.code == "context_length_exceeded":
        return error.code
    return "invalid_prompt" if error.status < 500 else "server_error"


OPENAI_RESPONSES = WireProtocol(
    name="openai_responses",
    paths={"/v1/responses": "reply", "/v1/responses/input_tokens": "count"},
    call_prefix="call_",
    read=read,
    write=write,
    events=Stream,
    error=error_body,
    count=lambda tokens: {"object": "response.input_tokens", "input_tokens": tokens},
    told_in_stream=frozenset({"context_length_exceeded"}),
)

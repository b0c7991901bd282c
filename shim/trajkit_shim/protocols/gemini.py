"""Gemini generateContent and streamGenerateContent: requests, replies and errors.

A stream is always server-sent events, as with ``alt=sse``. The model in the path is not
looked at. Taken without effect: ``safetySettings``, ``thinkingConfig``, labels. Tools
that only the provider can run are left out, and counted.
"""

import base64
import json
from collections.abc import Iterator

from trajkit_shim import wire
from trajkit_shim.chat import OMITTED_IMAGE, ChatRequest, Reading
from trajkit_shim.errors import GatewayError
from trajkit_shim.protocols.blocks import Block, Told, blocks
from trajkit_shim.protocols.protocol import Verb, WireProtocol
from trajkit_shim.protocols.sse import RawJson, event
from trajkit_shim.reply import Call, Reply, Usage
from trajkit_shim.sampling import Wishes, parse_wishes
from trajkit_shim.wire import Json, refuse

KNOWN = frozenset(
    {
        "contents",
        "generationConfig",
        "labels",
        "model",
        "safetySettings",
        "serviceTier",
        "store",
        "systemInstruction",
        "toolConfig",
        "tools",
    }
)
# Accepted with the one value that asks for nothing.
NEUTRAL: dict[str, object] = {
    "candidateCount": 1,
    "frequencyPenalty": 0,
    "presencePenalty": 0,
    "responseMimeType": "text/plain",
    "responseModalities": ["TEXT"],
}
_LIMITS: dict[str, str | None] = {
    "max_tokens": "maxOutputTokens",
    "top_p": "topP",
    "top_k": "topK",
    "stop": "stopSequences",
}
_CONFIG = frozenset(
    {*NEUTRAL, "maxOutputTokens", "seed", "stopSequences", "temperature"}
    | {"thinkingConfig", "topK", "topP"}
)
# Run by the provider: a model that is not told of them cannot call them.
HOSTED = frozenset(
    {"codeExecution", "googleMaps", "googleSearch", "googleSearchRetrieval"}
    | {"urlContext"}
)
_TYPES = frozenset(
    {"ARRAY", "BOOLEAN", "INTEGER", "NULL", "NUMBER", "OBJECT", "STRING"}
)
_ROLES = {"user": "user", "function": "user", "model": "assistant"}


def read(body: Json, reading: Reading) -> ChatRequest:
    """The chat request that the body of a generateContent call holds.

    Raises
    ------
    GatewayError
        A field is missing, malformed, or asks for what this gateway does not do.
    """
    wire.only(body, KNOWN, "")
    messages: list[Json] = []
    if body.get("systemInstruction") is not None:
        where = "systemInstruction"
        parts = _parts(wire.as_object(body[where], where), where)
        said = "\n".join(filter(None, (_text(part, at) for part, at in parts)))
        if said:
            messages.append({"role": "system", "content": said})
    messages += _Conversation(reading).read(body.get("contents"))
    tools, left_out = _tools(body.get("tools"))
    offered = _may_call(body.get("toolConfig")) and bool(tools)
    return ChatRequest(
        messages=messages,
        tools=tools if offered else None,
        asked=_wishes(body.get("generationConfig")),
        stream=False,
        left_out=left_out,
    )


def read_for_count(body: Json, reading: Reading) -> ChatRequest:
    """The chat request of a countTokens call, plain or as ``generateContentRequest``."""
    whole = body.get("generateContentRequest")
    if whole is None:
        return read(body, reading)
    return read(wire.as_object(whole, "generateContentRequest"), reading)


class _Conversation:
    """Contents on their way to messages; knows the calls that wait for a result."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self._messages: list[Json] = []
        # id and name of each call
        self._open: list[tuple[str, str]] = []
        self._unnamed = 0

    def read(self, value: object) -> list[Json]:
        contents = wire.as_list(value, "contents")
        if not contents:
            refuse("contents", "an empty list")
        for i, item in enumerate(contents):
            where = f"contents[{i}]"
            content = wire.as_object(item, where)
            wire.only(content, {"role", "parts"}, where)
            role = content.get("role", "user")
            if not isinstance(role, str) or role not in _ROLES:
                refuse(f"{where}.role", f"{role!r} is not one of {', '.join(_ROLES)}")
            parts = _parts(content, where)
            if _ROLES[role] == "user":
                self._add_user(parts)
            else:
                self._add_model(parts)
        return self._messages

    def _add_user(self, parts: list[tuple[Json, str]]) -> None:
        before = len(self._messages)
        said: list[str] = []

        def flush() -> None:
            if said:
                self._messages.append({"role": "user", "content": "\n".join(said)})
                said.clear()

        for part, at in parts:
            if "functionResponse" in part:
                flush()
                self._messages.append(self._result(part, f"{at}.functionResponse"))
            elif "inlineData" in part or "fileData" in part:
                said.append(_image(part, at, self._reading))
            else:
                said += filter(None, [_text(part, at)])
        flush()
        if len(self._messages) == before:
            self._messages.append({"role": "user", "content": ""})

    def _add_model(self, parts: list[tuple[Json, str]]) -> None:
        texts, thoughts, calls = [], [], []
        self._open = []
        for part, at in parts:
            if "functionCall" in part:
                calls.append(self._call(part, f"{at}.functionCall"))
            elif part.get("thought"):
                thoughts.append(_text(part, at))
            else:
                texts.append(_text(part, at))
        message: Json = {"role": "assistant", "content": "".join(texts)}
        if any(thoughts):
            message["reasoning_content"] = "".join(thoughts)
        if calls:
            message["tool_calls"] = calls
        self._messages.append(message)

    def _call(self, part: Json, at: str) -> Json:
        call = wire.as_object(part["functionCall"], at)
        wire.only(call, {"id", "name", "args"}, at)
        name = wire.as_name(call.get("name"), f"{at}.name")
        arguments = call.get("args")
        call_id = call.get("id")
        if call_id is None:
            # a client may leave ids out; the place in the conversation stays
            self._unnamed += 1
            call_id = f"{name}-{self._unnamed}"
        self._open.append((wire.as_text(call_id, f"{at}.id"), name))
        given = {} if arguments is None else wire.as_object(arguments, f"{at}.args")
        return {
            "id": self._open[-1][0],
            "type": "function",
            "function": {
                "name": name,
                "arguments": json.dumps(given, ensure_ascii=False),
            },
        }

    def _result(self, part: Json, at: str) -> Json:
        result = wire.as_object(part["functionResponse"], at)
        wire.only(result, {"id", "name", "response"}, at)
        name = wire.as_name(result.get("name"), f"{at}.name")
        call_id = result.get("id")
        if call_id is None:
            waiting = [place for place in self._open if place[1] == name]
            if not waiting:
                refuse(at, f"the result of a call of {name!r} that was not made")
            self._open.remove(waiting[0])
            call_id = waiting[0][0]
        given = wire.as_object(result.get("response"), f"{at}.response")
        return {
            "role": "tool",
            "content": _result_text(given),
            "tool_call_id": wire.as_text(call_id, f"{at}.id"),
            **({"is_error": True} if "error" in given else {}),
        }


def _result_text(given: Json) -> str:
    """A tool's result: the one text that it is, or its JSON."""
    if len(given) == 1:
        ((key, value),) = given.items()
        if key in ("output", "result", "error") and isinstance(value, str):
            return value
    return json.dumps(given, ensure_ascii=False)


def _parts(content: Json, where: str) -> list[tuple[Json, str]]:
    """The parts of a content, each with its path."""
    parts = []
    items = [] if content.get("parts") is None else content["parts"]
    for i, item in enumerate(wire.as_list(items, f"{where}.parts")):
        at = f"{where}.parts[{i}]"
        part = wire.as_object(item, at)
        parts.append(({k: v for k, v in part.items() if v is not None}, at))
    return parts


def _text(part: Json, at: str) -> str:
    for name in part:
        if name not in ("text", "thought", "thoughtSignature"):
            refuse(
                f"{at}.{name}",
                "not supported: messages are text",
                code="unsupported_content",
            )
    # a signature may come by itself
    return wire.as_text(part.get("text", ""), f"{at}.text")


def _image(part: Json, at: str, reading: Reading) -> str:
    name = "inlineData" if "inlineData" in part else "fileData"
    kind = wire.as_object(part[name], f"{at}.{name}").get("mimeType")
    if reading.images != "omit" or not str(kind).startswith("image/"):
        refuse(
            f"{at}.{name}",
            f"{kind!r} is not supported: messages are text",
            code="unsupported_content",
        )
    return OMITTED_IMAGE


def _tools(value: object) -> tuple[list[Json], tuple[str, ...]]:
    functions: list[Json] = []
    left_out: list[str] = []
    for i, item in enumerate(wire.as_list([] if value is None else value, "tools")):
        at = f"tools[{i}]"
        for kind, given in wire.as_object(item, at).items():
            if given is None:
                continue
            if kind == "functionDeclarations":
                for j, one in enumerate(wire.as_list(given, f"{at}.{kind}")):
                    functions.append(_function(one, f"{at}.{kind}[{j}]"))
            elif kind in HOSTED:
                left_out.append(kind)
            else:
                refuse(f"{at}.{kind}", "not supported", code="unsupported_tool")
    return functions, tuple(left_out)


def _function(value: object, at: str) -> Json:
    declared = wire.as_object(value, at)
    function: Json = {"name": wire.as_name(declared.get("name"), f"{at}.name")}
    if declared.get("description") is not None:
        function["description"] = wire.as_text(
            declared["description"], f"{at}.description"
        )
    for name in ("parametersJsonSchema", "parameters"):
        if declared.get(name) is not None:
            schema = wire.as_object(declared[name], f"{at}.{name}")
            function["parameters"] = _json_schema(schema)
            break
    return {"type": "function", "function": function}


def _json_schema(value: object) -> object:
    """A schema with its types in lower case, as JSON Schema has them."""
    if isinstance(value, list):
        return [_json_schema(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: item.lower()
        if key == "type" and isinstance(item, str) and item in _TYPES
        else _json_schema(item)
        for key, item in value.items()
    }


def _may_call(value: object) -> bool:
    if value is None:
        return True
    config = wire.as_object(value, "toolConfig")
    where = "toolConfig.functionCallingConfig"
    calling = wire.as_object(config.get("functionCallingConfig") or {}, where)
    wire.only(calling, {"mode"}, where)
    mode = calling.get("mode")
    if mode not in (None, "AUTO", "NONE", "MODE_UNSPECIFIED"):
        refuse(f"{where}.mode", f"{mode!r} is not supported", code="unsupported_value")
    return mode != "NONE"


def _wishes(value: object) -> Wishes:
    where = "generationConfig"
    config = wire.as_object({} if value is None else value, where)
    wire.only(config, _CONFIG, where)
    for name, neutral in NEUTRAL.items():
        given = config.get(name)
        if given is not None and (given != neutral or isinstance(given, bool)):
            refuse(
                f"{where}.{name}",
                f"{given!r} is not supported",
                code="unsupported_value",
            )
    top_k = config.get("topK")
    if isinstance(top_k, float) and top_k.is_integer():
        # the official client sends 40.0
        config = {**config, "topK": int(top_k)}
    return parse_wishes(config, where, _LIMITS)


def write(reply: Reply, _: ChatRequest) -> Json:
    """The body of a reply that is not streamed."""
    return _chunk(reply, _reply_parts(reply), last=True)


def _reply_parts(reply: Reply) -> list[Json]:
    return [_part(block, reply) for block in blocks(reply, done=True)]


def _part(block: Block, reply: Reply) -> Json:
    if isinstance(block, Call):
        call: Json = {
            "id": block.call_id,
            "name": block.name,
            "args": RawJson(block.arguments),
        }
        return {"functionCall": call}
    if isinstance(block, str):
        return {"text": block}
    signature = base64.b64encode(f"trajkit:{reply.reply_id}".encode()).decode()
    return {"text": block.text, "thought": True, "thoughtSignature": signature}


def _chunk(reply: Reply, parts: list[Json], *, last: bool) -> Json:
    candidate: Json = {"content": {"role": "model", "parts": parts}, "index": 0}
    if last:
        candidate["finishReason"] = "MAX_TOKENS" if reply.cut else "STOP"
    return {
        "candidates": [candidate],
        "usageMetadata": _usage(reply.usage),
        "modelVersion": reply.model,
        "responseId": reply.reply_id,
    }


def _usage(usage: Usage) -> Json:
    counts: Json = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.output_tokens - usage.reasoning_tokens,
        "totalTokenCount": usage.prompt_tokens + usage.output_tokens,
    }
    if usage.cached_tokens:
        counts["cachedContentTokenCount"] = usage.cached_tokens
    if usage.reasoning_tokens:
        counts["thoughtsTokenCount"] = usage.reasoning_tokens
    return counts


class Chunks:
    """The chunks of a streamed reply, one a part or a piece of it; the last one ends it."""

    def __init__(self) -> None:
        self._told = Told()

    def opening(self) -> bytes:
        """Nothing: a chunk has the reply's id."""
        return b""

    def ping(self) -> bytes:
        """An empty line. The official client takes a comment for JSON."""
        return b"\n"

    def partial(self, reply: Reply) -> bytes:
        """The chunks of what is new."""
        return b"".join(
            event(_chunk(reply, [part], last=False))
            for part in self._parts(reply, done=False)
        )

    def reply(self, reply: Reply) -> Iterator[bytes]:
        """All chunks of the reply that were not told."""
        *before, last = [*self._parts(reply, done=True)] or [{"text": ""}]
        for part in before:
            yield event(_chunk(reply, [part], last=False))
        yield event(_chunk(reply, [last], last=True))

    def _parts(self, reply: Reply, *, done: bool) -> Iterator[Json]:
        for step in self._told.steps(blocks(reply, done=done), done=done):
            if step.what == "goes on":
                part = _part(step.block, reply)
                yield {**part, "text": step.text} if "text" in part else part

    def error(self, error: GatewayError) -> bytes:
        """The error in place of a chunk."""
        return event(error_body(error))


_STATUSES = {
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    410: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


def error_body(error: GatewayError) -> Json:
    """The error as Google's APIs word it."""
    fallback = "INTERNAL" if error.status >= 500 else "INVALID_ARGUMENT"
    message = error.message
    if error.overflow is not None:
        message = (
            "The input token count ({}) exceeds the maximum number of tokens allowed "
            "({}).".format(*error.overflow)
        )
    return {
        "error": {
            "code": error.status,
            "message": message,
            "status": _STATUSES.get(error.status, fallback),
        }
    }


_VERBS: dict[str, Verb] = {
    "generateContent": "reply",
    "streamGenerateContent": "stream",
    "countTokens": "count",
}

GEMINI = WireProtocol(
    name="gemini",
    paths={
        f"/{version}/models/{{model:path}}:{method}": verb
        for version in ("v1", "v1beta")
        for method, verb in _VERBS.items()
    },
    call_prefix="call_",
    read=read,
    read_for_count=read_for_count,
    write=write,
    events=lambda _: Chunks(),
    error=error_body,
    count=lambda tokens: {"totalTokens": tokens},
)

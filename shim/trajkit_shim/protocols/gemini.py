"""Gemini generateContent and streamGenerateContent: requests, replies and errors.

A stream always consists of server-sent events, as with ``alt=sse``. The model in the path
is ignored, as are ``safetySettings``, ``thinkingConfig`` and labels. Tools that only the
provider can run are dropped and counted.
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
from trajkit_shim.chat.sampling_params import SamplingParams, parse_sampling
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Json, refuse
from trajkit_shim.protocols.base import Verb, WireProtocol
from trajkit_shim.protocols.blocks import Block, BlockStream, blocks
from trajkit_shim.protocols.sse import RawJson, event

KNOWN = frozenset(
    "contents generationConfig labels model safetySettings serviceTier store "
    "systemInstruction toolConfig tools".split()
)
# accepted with the one value that has no effect
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
_OTHERS = "maxOutputTokens seed stopSequences temperature thinkingConfig topK topP"
_CONFIG = frozenset({*NEUTRAL, *_OTHERS.split()})
# run by the provider; the model cannot call them because it does not see them
HOSTED = frozenset(
    "codeExecution googleMaps googleSearch googleSearchRetrieval urlContext".split()
)
_TYPES = frozenset("ARRAY BOOLEAN INTEGER NULL NUMBER OBJECT STRING".split())
_ROLES = {"user": "user", "function": "user", "model": "assistant"}


def read(body: Json, reading: ReadOptions) -> ChatRequest:
    """Read the body of a generateContent call.

    Raises
    ------
    GatewayError
        A field is missing, invalid, or not supported.
    """
    json_input.only(body, KNOWN, "")
    messages: list[Json] = []
    system = json_input.optional(body, "systemInstruction", json_input.as_object)
    if system is not None:
        parts = _parts(system, "systemInstruction")
        text = "\n".join(filter(None, (_text(part, path) for part, path in parts)))
        if text:
            messages.append({"role": "system", "content": text})
    messages += _Conversation(reading).read(body.get("contents"))
    tools, left_out = _tools(body.get("tools"))
    offered = _may_call(body.get("toolConfig")) and bool(tools)
    return ChatRequest(
        messages=messages,
        tools=tools if offered else None,
        sampling=_sampling(body.get("generationConfig")),
        stream=False,
        left_out=left_out,
    )


def read_for_count(body: Json, reading: ReadOptions) -> ChatRequest:
    """Read the body of a countTokens call, plain or as ``generateContentRequest``."""
    inner = json_input.optional(body, "generateContentRequest", json_input.as_object)
    return read(body if inner is None else inner, reading)


class _Conversation:
    """Converts contents to messages; knows the calls that wait for a result."""

    def __init__(self, reading: ReadOptions) -> None:
        self._reading = reading
        self._messages: list[Json] = []
        # id and name of each call
        self._open: list[tuple[str, str]] = []
        self._unnamed = 0

    def read(self, value: object) -> list[Json]:
        if not json_input.as_list(value, "contents"):
            refuse("contents", "an empty list")
        for content, where in json_input.objects(value, "contents"):
            json_input.only(content, {"role", "parts"}, where)
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
        texts: list[str] = []

        def flush() -> None:
            if texts:
                self._messages.append({"role": "user", "content": "\n".join(texts)})
                texts.clear()

        for part, path in parts:
            if "functionResponse" in part:
                flush()
                self._messages.append(self._result(part, path))
            elif "inlineData" in part or "fileData" in part:
                texts.append(_image(part, path, self._reading))
            else:
                texts += filter(None, [_text(part, path)])
        flush()
        if len(self._messages) == before:
            self._messages.append({"role": "user", "content": ""})

    def _add_model(self, parts: list[tuple[Json, str]]) -> None:
        texts, thoughts, calls = [], [], []
        self._open = []
        for part, path in parts:
            if "functionCall" in part:
                calls.append(self._call(part, path))
            elif part.get("thought"):
                thoughts.append(_text(part, path))
            else:
                texts.append(_text(part, path))
        message = assistant_message("".join(texts), "".join(thoughts), calls)
        self._messages.append(message)

    def _call(self, part: Json, path: str) -> Json:
        call = json_input.field(part, "functionCall", json_input.as_object, path)
        path += ".functionCall"
        json_input.only(call, {"id", "name", "args"}, path)
        name = json_input.field(call, "name", json_input.as_name, path)
        call_id = json_input.optional(call, "id", json_input.as_text, path)
        if call_id is None:
            # clients may omit ids; the number in the conversation is stable
            self._unnamed += 1
            call_id = f"{name}-{self._unnamed}"
        self._open.append((call_id, name))
        given = json_input.optional(call, "args", json_input.as_object, path) or {}
        return tool_call(call_id, name, json.dumps(given, ensure_ascii=False))

    def _result(self, part: Json, path: str) -> Json:
        result = json_input.field(part, "functionResponse", json_input.as_object, path)
        path += ".functionResponse"
        json_input.only(result, {"id", "name", "response"}, path)
        name = json_input.field(result, "name", json_input.as_name, path)
        call_id = json_input.optional(result, "id", json_input.as_text, path)
        if call_id is None:
            waiting = [call for call in self._open if call[1] == name]
            if not waiting:
                refuse(path, f"there is no call of {name!r} without a result")
            self._open.remove(waiting[0])
            call_id = waiting[0][0]
        given = json_input.field(result, "response", json_input.as_object, path)
        return {
            "role": "tool",
            "content": _result_text(given),
            "tool_call_id": call_id,
            **({"is_error": True} if "error" in given else {}),
        }


def _result_text(given: Json) -> str:
    """A tool's result: its only text, or its JSON."""
    if len(given) == 1:
        ((key, value),) = given.items()
        if key in ("output", "result", "error") and isinstance(value, str):
            return value
    return json.dumps(given, ensure_ascii=False)


def _parts(content: Json, where: str) -> list[tuple[Json, str]]:
    """The parts of a content, each with its path, without null fields."""
    return [
        ({k: v for k, v in part.items() if v is not None}, path)
        for part, path in json_input.objects(content.get("parts"), f"{where}.parts")
    ]


def _text(part: Json, path: str) -> str:
    for name in part:
        if name not in ("text", "thought", "thoughtSignature"):
            refuse(
                f"{path}.{name}",
                "not supported: messages are text",
                code="unsupported_content",
            )
    # a part may be only a signature
    return json_input.as_text(part.get("text", ""), f"{path}.text")


def _image(part: Json, path: str, reading: ReadOptions) -> str:
    name = "inlineData" if "inlineData" in part else "fileData"
    kind = json_input.as_object(part[name], f"{path}.{name}").get("mimeType")
    if reading.images != "omit" or not str(kind).startswith("image/"):
        refuse(
            f"{path}.{name}",
            f"{kind!r} is not supported: messages are text",
            code="unsupported_content",
        )
    return OMITTED_IMAGE


def _tools(value: object) -> tuple[list[Json], tuple[str, ...]]:
    functions: list[Json] = []
    left_out: list[str] = []
    for tool, path in json_input.objects(value, "tools"):
        for kind, given in tool.items():
            if given is None:
                continue
            where = f"{path}.{kind}"
            if kind == "functionDeclarations":
                declared = json_input.objects(given, where)
                functions += [_function(*declaration) for declaration in declared]
            elif kind in HOSTED:
                left_out.append(kind)
            else:
                refuse(where, "not supported", code="unsupported_tool")
    return functions, tuple(left_out)


def _function(declared: Json, path: str) -> Json:
    schemas = (
        json_input.optional(declared, name, json_input.as_object, path)
        for name in ("parametersJsonSchema", "parameters")
    )
    schema = next((schema for schema in schemas if schema is not None), None)
    return function_tool(
        json_input.field(declared, "name", json_input.as_name, path),
        json_input.optional(declared, "description", json_input.as_text, path),
        None if schema is None else _json_schema(schema),
    )


def _json_schema(value: object) -> object:
    """A schema with its types in lower case, as in JSON Schema."""
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
    config = json_input.as_object(value, "toolConfig")
    where = "toolConfig.functionCallingConfig"
    calling = json_input.as_object(config.get("functionCallingConfig") or {}, where)
    json_input.only(calling, {"mode"}, where)
    mode = calling.get("mode")
    if mode not in (None, "AUTO", "NONE", "MODE_UNSPECIFIED"):
        refuse(f"{where}.mode", f"{mode!r} is not supported", code="unsupported_value")
    return mode != "NONE"


def _sampling(value: object) -> SamplingParams:
    where = "generationConfig"
    config = json_input.as_object({} if value is None else value, where)
    json_input.only(config, _CONFIG, where)
    json_input.only_neutral(config, NEUTRAL, where)
    top_k = config.get("topK")
    if isinstance(top_k, float) and top_k.is_integer():
        # the official client sends 40.0
        config = {**config, "topK": int(top_k)}
    return parse_sampling(config, where, _LIMITS)


def write(reply: Reply, _: ChatRequest) -> Json:
    """Return the body of a reply that is not streamed."""
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


class Chunks(BlockStream):
    """The chunks of a streamed reply, each with a part or a piece of one."""

    def ping(self) -> bytes:
        """Return an empty line, because the official client parses comments as JSON."""
        return b"\n"

    def reply(self, reply: Reply) -> Iterator[bytes]:
        """Yield all chunks of the reply that were not sent."""
        *before, last = [*self._parts(reply, done=True)] or [{"text": ""}]
        for part in before:
            yield event(_chunk(reply, [part], last=False))
        yield event(_chunk(reply, [last], last=True))

    def _new(self, reply: Reply, *, done: bool) -> Iterator[bytes]:
        for part in self._parts(reply, done=done):
            yield event(_chunk(reply, [part], last=False))

    def _parts(self, reply: Reply, *, done: bool) -> Iterator[Json]:
        for step in self._progress.steps(blocks(reply, done=done), done=done):
            if step.what == "text":
                part = _part(step.block, reply)
                yield {**part, "text": step.text} if "text" in part else part

    def error(self, error: GatewayError) -> bytes:
        """Return the error instead of a chunk."""
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
    """Return the error in the format of Google's APIs."""
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

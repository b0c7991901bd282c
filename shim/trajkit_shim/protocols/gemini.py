"""Gemini generateContent and streamGenerateContent: requests, replies and errors.

A stream always consists of server-sent events, as with ``alt=sse``. The model in the path
is ignored, as are ``safetySettings``, ``thinkingConfig`` and labels. Tools that only the
provider can run are dropped and counted.
"""

import json
from collections.abc import Iterator

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import data_url, read_image, refuse_content
from trajkit_shim.chat.reply import Call, Reply, Usage
from trajkit_shim.chat.sampling_params import SamplingParams, parse_sampling
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import (
    Fields,
    Json,
    as_list,
    as_object,
    objects,
    refuse,
)
from trajkit_shim.protocols.base import Verb, WireProtocol
from trajkit_shim.protocols.blocks import Block, Events, blocks, signature
from trajkit_shim.protocols.sse import RawJson, event

KNOWN = frozenset(
    "contents generationConfig labels model safetySettings serviceTier store "
    "systemInstruction toolConfig tools".split()
)
# accepted with the one value that has no effect
NEUTRAL: dict[str, object] = {
    "frequencyPenalty": 0,
    "logprobs": 0,
    "presencePenalty": 0,
    "responseModalities": ["TEXT"],
}
_LIMITS: dict[str, str | None] = {
    "max_tokens": "maxOutputTokens",
    "top_p": "topP",
    "top_k": "topK",
    "stop": "stopSequences",
}
_OTHERS = (
    "candidateCount maxOutputTokens responseJsonSchema responseLogprobs responseMimeType "
    "responseSchema seed stopSequences temperature thinkingConfig topK topP"
)
_CONFIG = frozenset({*NEUTRAL, *_OTHERS.split()})
# run by the provider; the model cannot call them because it does not see them
HOSTED = frozenset(
    "codeExecution googleMaps googleSearch googleSearchRetrieval urlContext".split()
)
_TYPES = frozenset("ARRAY BOOLEAN INTEGER NULL NUMBER OBJECT STRING".split())
_ROLES = {"user": "user", "function": "user", "model": "assistant"}


def read(body: Json, reading: chat.ReadOptions) -> chat.ChatRequest:
    """Read the body of a generateContent call; raises `GatewayError`."""
    fields = Fields(body)
    fields.only(KNOWN)
    parts = _parts(fields.section("systemInstruction"))
    system = "\n".join(filter(None, map(_text, parts)))
    front: list[Json] = [{"role": "system", "content": system}] if system else []
    conversation = _Conversation(reading)
    tools, left_out = _tools(fields)
    calling = fields.section("toolConfig").section("functionCallingConfig")
    calling.only({"allowedFunctionNames", "mode"})
    mode = calling.json.get("mode") or "AUTO"
    if mode not in ("ANY", "AUTO", "MODE_UNSPECIFIED", "NONE", "VALIDATED"):
        calling.refuse("mode", f"{mode!r} is not supported", "unsupported_value")
    config = fields.section("generationConfig")
    offered = tools if tools and mode != "NONE" else []
    names = calling.get("allowedFunctionNames", as_list) or []
    strict = (str(chat.function_of(tool)["name"]) for tool in offered)
    return chat.ChatRequest(
        messages=front + conversation.read(fields),
        tools=offered or None,
        required=chat.Required(
            call=mode == "ANY",
            names=tuple(map(str, names)),
            # both modes promise arguments of the schema
            strict=tuple(strict) if mode in ("ANY", "VALIDATED") else (),
            schema=_schema_of_text(config),
        ),
        sampling=_sampling(config),
        n=config.get("candidateCount", chat.as_choices) or 1,
        logprobs=config.flag("responseLogprobs"),
        stream=False,
        left_out=left_out,
        n_front=len(front),
        unnamed_calls=conversation.unnamed_calls,
    )


def read_for_count(body: Json, reading: chat.ReadOptions) -> chat.ChatRequest:
    """Read the body of a countTokens call, plain or as ``generateContentRequest``."""
    inner = Fields(body).get_object("generateContentRequest")
    return read(body if inner is None else inner, reading)


class _Conversation:
    """Converts contents to messages; knows the calls that wait for a result."""

    def __init__(self, reading: chat.ReadOptions) -> None:
        self._reading = reading
        # id and name of each call
        self._open: list[tuple[str, str]] = []
        self.unnamed_calls = reading.unnamed_calls

    def read(self, fields: Fields) -> list[Json]:
        messages: list[Json] = []
        for content in fields.filled("contents"):
            content.only({"role", "parts"})
            role = content.json.get("role", "user")
            if not isinstance(role, str) or role not in _ROLES:
                content.refuse("role", f"{role!r} is not one of {', '.join(_ROLES)}")
            parts = _parts(content)
            if _ROLES[role] == "user":
                messages += chat.user_messages(map(self._user_part, parts))
            else:
                messages.append(self._reply(parts))
        return messages

    def _user_part(self, part: Fields) -> str | Json:
        if "functionResponse" in part.json:
            return self._result(part.object("functionResponse"))
        for name in ("inlineData", "fileData"):
            if name in part.json:
                return _image(part, name, self._reading)
        return _text(part)

    def _reply(self, parts: list[Fields]) -> Json:
        texts, thoughts, calls = [], [], []
        self._open = []
        for part in parts:
            if "functionCall" in part.json:
                calls.append(self._call(part.object("functionCall")))
            elif part.json.get("thought"):
                thoughts.append(_text(part))
            else:
                texts.append(_text(part))
        return chat.assistant_message("".join(texts), "".join(thoughts), calls)

    def _call(self, call: Fields) -> Json:
        call.only({"id", "name", "args"})
        name, call_id = call.name("name"), call.get_text("id")
        if call_id is None:
            # clients may omit ids; the number in the conversation is stable
            self.unnamed_calls += 1
            call_id = f"{name}-{self.unnamed_calls}"
        self._open.append((call_id, name))
        given = json.dumps(call.section("args").json, ensure_ascii=False)
        return chat.tool_call(call_id, name, given)

    def _result(self, result: Fields) -> Json:
        result.only({"id", "name", "response"})
        name, call_id = result.name("name"), result.get_text("id")
        if call_id is None:
            waiting = next((call for call in self._open if call[1] == name), None)
            if waiting is None:
                refuse(result.path, f"there is no call of {name!r} without a result")
            self._open.remove(waiting)
            call_id = waiting[0]
        given = result.need("response", as_object)
        return chat.tool_message(call_id, _result_text(given), failed="error" in given)


def _result_text(given: Json) -> str:
    """A tool's result: its only text, or its JSON."""
    if len(given) == 1:
        ((key, value),) = given.items()
        if key in ("output", "result", "error") and isinstance(value, str):
            return value
    return json.dumps(given, ensure_ascii=False)


def _parts(content: Fields) -> list[Fields]:
    """The parts of a content, without null fields."""
    return [
        Fields({k: v for k, v in part.json.items() if v is not None}, part.path)
        for part in content.objects("parts")
    ]


def _text(part: Fields) -> str:
    for name in part.json:
        if name not in ("text", "thought", "thoughtSignature"):
            part.refuse(name, "not supported: messages are text", "unsupported_content")
    # a part may be only a signature
    return part.get_text("text") or ""


def _image(part: Fields, name: str, reading: chat.ReadOptions) -> str | Json:
    given = part.object(name)
    kind = given.json.get("mimeType")
    if reading.images == "refuse" or not str(kind).startswith("image/"):
        refuse_content(part, name, kind)

    def url() -> str:
        if name == "inlineData":
            return data_url(given, "mimeType", "data")
        return given.text("fileUri")

    return read_image(part, name, url, reading.images)


def _tools(fields: Fields) -> tuple[list[Json], tuple[str, ...]]:
    functions: list[Json] = []
    left_out: list[str] = []
    for tool in fields.objects("tools"):
        for kind, given in tool.json.items():
            if kind == "functionDeclarations" and given is not None:
                functions += map(_function, objects(given, tool.at(kind)))
            elif kind in HOSTED and given is not None:
                left_out.append(kind)
            elif given is not None:
                tool.refuse(kind, "not supported", "unsupported_tool")
    return functions, tuple(left_out)


def _function(declared: Fields) -> Json:
    given = declared.get_object("parametersJsonSchema")
    schema = declared.get_object("parameters") if given is None else given
    shown = None if schema is None else _json_schema(schema)
    text = declared.get_text("description")
    return chat.function_tool(declared.name("name"), text, shown)


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


def _schema_of_text(config: Fields) -> Json | None:
    kind = config.get_text("responseMimeType") or "text/plain"
    given = config.get_object("responseJsonSchema")
    if given is None and config.get_object("responseSchema") is not None:
        given = as_object(_json_schema(config.json["responseSchema"]), config.path)
    if kind not in ("application/json", "text/plain"):
        rule = f"{kind!r} is not supported"
        config.refuse("responseMimeType", rule, "unsupported_value")
    if kind == "text/plain" and given is not None:
        config.refuse("responseMimeType", "a schema needs 'application/json'")
    if given is None and kind == "application/json":
        return chat.ANY_OBJECT
    return given


def _sampling(config: Fields) -> SamplingParams:
    config.only(_CONFIG)
    config.only_neutral(NEUTRAL)
    top_k = config.json.get("topK")
    if isinstance(top_k, float) and top_k.is_integer():
        # the official client sends 40.0
        config = Fields({**config.json, "topK": int(top_k)}, config.path)
    return parse_sampling(config, _LIMITS)


def write(reply: Reply, _: chat.ChatRequest) -> Json:
    """Return the body of a reply that is not streamed."""
    candidates = [
        _candidate(
            one, [_part(b, one) for b in blocks(one, done=True)], index, last=True
        )
        for index, one in enumerate(reply.choices)
    ]
    return _chunk(reply, candidates)


def _part(block: Block, reply: Reply) -> Json:
    if isinstance(block, Call):
        args = RawJson(block.arguments)
        return {"functionCall": {"id": block.call_id, "name": block.name, "args": args}}
    if isinstance(block, str):
        return {"text": block}
    signed = signature(reply)
    return {"text": block.text, "thought": True, "thoughtSignature": signed}


def _candidate(reply: Reply, parts: list[Json], index: int, *, last: bool) -> Json:
    candidate: Json = {"content": {"role": "model", "parts": parts}, "index": index}
    if last:
        candidate["finishReason"] = "MAX_TOKENS" if reply.cut else "STOP"
        if reply.tokens is not None:
            chosen = [
                {
                    "token": token.text,
                    "tokenId": token.token_id,
                    "logProbability": token.logprob,
                }
                for token in reply.tokens
            ]
            candidate["logprobsResult"] = {"chosenCandidates": chosen}
    return candidate


def _chunk(reply: Reply, candidates: list[Json]) -> Json:
    return {
        "candidates": candidates,
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


class Chunks(Events):
    """The chunks of a streamed reply, each with a part or a piece of one."""

    def ping(self) -> bytes:
        # the official client parses comments as JSON
        return b"\n"

    def reply(self, reply: Reply) -> Iterator[bytes]:
        for index, one in enumerate(reply.choices):
            chunks = Chunks() if index else self
            parts = [*chunks._parts(one, done=True)] or [{"text": ""}]
            for number, part in enumerate(parts, 1):
                last = number == len(parts)
                candidate = _candidate(one, [part], index, last=last)
                yield event(_chunk(reply, [candidate]))

    def _new(self, reply: Reply, *, done: bool) -> Iterator[bytes]:
        for part in self._parts(reply, done=done):
            yield event(_chunk(reply, [_candidate(reply, [part], 0, last=False)]))

    def _parts(self, reply: Reply, *, done: bool) -> Iterator[Json]:
        for step in self._progress.steps(blocks(reply, done=done), done=done):
            if step.what == "text":
                part = _part(step.block, reply)
                yield {**part, "text": step.text} if "text" in part else part

    def error(self, error: GatewayError) -> bytes:
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
        message = "The input token count ({}) exceeds the maximum number of tokens "
        message = (message + "allowed ({}).").format(*error.overflow)
    status = _STATUSES.get(error.status, fallback)
    return {"error": {"code": error.status, "message": message, "status": status}}


_VERBS: dict[str, Verb] = {
    "generateContent": "reply",
    "streamGenerateContent": "stream",
    "countTokens": "count",
}

GEMINI = WireProtocol(
    name="gemini",
    history="contents",
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

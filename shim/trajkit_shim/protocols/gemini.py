"""Gemini generateContent and streamGenerateContent: requests, replies and errors.

A stream always consists of server-sent events, as with ``alt=sse``. The model in the path
is ignored, as are ``safetySettings``, ``thinkingConfig`` and labels. Tools that only the
provider can run are dropped and counted.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.images import GivenImage, Part, data_url, refuse_content
from trajkit_shim.chat.reply import Call, Reply
from trajkit_shim.chat.sampling_params import SamplingParams, parse_sampling
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Fields, Json, as_list, as_object, objects, refuse
from trajkit_shim.protocols.base import Verb, WireProtocol, kind_of
from trajkit_shim.protocols.blocks import (
    Block,
    Events,
    Step,
    Thought,
    assistant,
    blocks,
    signature,
)
from trajkit_shim.protocols.sse import RawJson, event

_KNOWN = (
    "contents generationConfig labels model safetySettings serviceTier store "
    "systemInstruction toolConfig tools"
)
# fields of the configuration that are accepted with the one value that has no effect
_NEUTRAL: Mapping[str, object] = {
    "frequencyPenalty": 0,
    "logprobs": 0,
    "presencePenalty": 0,
    "responseModalities": ["TEXT"],
}
_LIMITS: Mapping[str, str | None] = {
    "max_tokens": "maxOutputTokens",
    "top_p": "topP",
    "top_k": "topK",
    "stop": "stopSequences",
}
_CONFIG = frozenset(
    "candidateCount maxOutputTokens responseJsonSchema responseLogprobs responseMimeType "
    "responseSchema seed stopSequences temperature thinkingConfig topK topP".split()
)
# run by the provider; the model cannot call them because it does not see them
_HOSTED = frozenset(
    "codeExecution googleMaps googleSearch googleSearchRetrieval urlContext".split()
)
_TYPES = frozenset("ARRAY BOOLEAN INTEGER NULL NUMBER OBJECT STRING".split())


def _parse(fields: Fields, options: chat.ReadOptions) -> chat.ChatRequest:
    parts = _parts(fields.section("systemInstruction"))
    front = chat.system_message("\n".join(filter(None, map(_text, parts))))
    conversation = _Conversation(options.unnamed_calls)
    messages = [m for c in fields.filled("contents") for m in conversation.read(c)]
    tools = _tools(fields)
    calling = fields.section("toolConfig").section("functionCallingConfig")
    calling.only({"allowedFunctionNames", "mode"})
    modes = ("ANY", "AUTO", "MODE_UNSPECIFIED", "NONE", "VALIDATED")
    mode = calling.one_of("mode", modes, "AUTO", code="unsupported_value")
    # both modes promise arguments of the schema
    strict = mode in ("ANY", "VALIDATED")
    config = fields.section("generationConfig")
    config.only(_CONFIG, _NEUTRAL)
    return chat.ChatRequest(
        messages=front + messages,
        tools=(tools.functions or None) if mode != "NONE" else None,
        required=chat.Required(
            call=mode == "ANY",
            names=tuple(map(str, calling.get("allowedFunctionNames", as_list) or ())),
            strict=[
                str(chat.function_of(t)["name"]) for t in tools.functions if strict
            ],
            schema=_schema_of_text(config),
        ),
        sampling=_sampling(config),
        n=config.get("candidateCount", chat.as_choices) or 1,
        logprobs=config.flag("responseLogprobs"),
        stream=False,
        left_out=tuple(tools.left_out),
        n_front=len(front),
        unnamed_calls=conversation.unnamed_calls,
    )


@dataclass(slots=True)
class _Conversation:
    """Converts contents to messages; knows the calls that wait for a result."""

    unnamed_calls: int
    # id and name of each call
    _open: list[tuple[str, str]] = field(default_factory=list)

    def read(self, content: Fields) -> list[Json]:
        content.only({"role", "parts"})
        role = content.one_of("role", ("user", "function", "model"), "user")
        parts = _parts(content)
        if role != "model":
            return chat.user_messages(map(self._user_part, parts))
        self._open = []
        return [assistant(map(self._model_part, parts))]

    def _model_part(self, part: Fields) -> Thought | str | Json:
        if "functionCall" in part.json:
            call = part.object("functionCall")
            call.only({"id", "name", "args"})
            name, call_id = call.name("name"), call.get_text("id")
            if call_id is None:
                # clients may omit ids; the number in the conversation is stable
                self.unnamed_calls += 1
                call_id = f"{name}-{self.unnamed_calls}"
            self._open.append((call_id, name))
            given = json.dumps(call.section("args").json, ensure_ascii=False)
            return chat.tool_call(call_id, name, given)
        text = _text(part)
        return Thought(text) if part.json.get("thought") else text

    def _user_part(self, part: Fields) -> Part | Json:
        if "functionResponse" in part.json:
            return self._result(part.object("functionResponse"))
        for name in ("inlineData", "fileData"):
            if name in part.json:
                return _image(part, name)
        return _text(part)

    def _result(self, result: Fields) -> Json:
        result.only({"id", "name", "response"})
        name, call_id = result.name("name"), result.get_text("id")
        if call_id is None:
            waiting = next((call for call in self._open if call[1] == name), None)
            if waiting is None:
                refuse(result.path, f"there is no call of {name!r} without a result")
            self._open.remove(waiting)
            call_id = waiting[0]
        given = result.object("response").json
        # its only text, or its JSON
        ((key, value),) = given.items() if len(given) == 1 else [("", None)]
        text = json.dumps(given, ensure_ascii=False)
        if key in ("output", "result", "error") and isinstance(value, str):
            text = value
        return chat.tool_message(call_id, [text], failed="error" in given)


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


def _image(part: Fields, name: str) -> GivenImage:
    given = part.object(name)
    kind = given.json.get("mimeType")
    if not str(kind).startswith("image/"):
        refuse_content(part, name, kind)
    if name == "fileData":
        return GivenImage(part, name, kind, partial(given.text, "fileUri"))
    return GivenImage(part, name, kind, partial(data_url, given, "mimeType", "data"))


def _tools(fields: Fields) -> chat.Tools:
    tools = chat.Tools()
    for tool in fields.objects("tools"):
        for kind, given in tool.json.items():
            if kind == "functionDeclarations" and given is not None:
                for declared in objects(given, tool.at(kind)):
                    schema = declared.get_object("parametersJsonSchema")
                    if schema is None:
                        schema = declared.get_object("parameters")
                    tools.add(declared, schema and _json_schema(schema))
            elif kind in _HOSTED and given is not None:
                tools.left_out.append(kind)
            elif given is not None:
                tool.refuse(kind, "not supported", "unsupported_tool")
    return tools


def _json_schema(schema: object, key: str = "") -> object:
    """Return a schema with its types in lower case, as in JSON Schema."""
    if isinstance(schema, dict):
        return {name: _json_schema(item, name) for name, item in schema.items()}
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    return str(schema).lower() if key == "type" and schema in _TYPES else schema


def _schema_of_text(config: Fields) -> Json | None:
    kinds = ("text/plain", "application/json")
    kind = config.one_of(
        "responseMimeType", kinds, "text/plain", code="unsupported_value"
    )
    given = config.get_object("responseJsonSchema")
    if given is None:
        name = "responseSchema"
        given = config.get(name, lambda value, at: as_object(_json_schema(value), at))
    if kind == "text/plain" and given is not None:
        config.refuse("responseMimeType", "a schema needs 'application/json'")
    if given is None and kind == "application/json":
        return chat.ANY_OBJECT
    return given


def _sampling(config: Fields) -> SamplingParams:
    top_k = config.json.get("topK")
    if isinstance(top_k, float) and top_k.is_integer():
        # the official client sends 40.0
        config = Fields({**config.json, "topK": int(top_k)}, config.path)
    return parse_sampling(config, _LIMITS)


def _write(reply: Reply, _: chat.ChatRequest) -> Json:
    candidates = [
        _candidate(one, [_part(b, one) for b in blocks(one, done=True)], i, last=True)
        for i, one in enumerate(reply.choices)
    ]
    return _body(reply, candidates)


def _part(block: Block, reply: Reply) -> Json:
    if isinstance(block, Call):
        args = RawJson(block.arguments)
        return {"functionCall": {"id": block.call_id, "name": block.name, "args": args}}
    if isinstance(block, str):
        return {"text": block}
    signed = signature(reply)
    return {"text": block.text, "thought": True, "thoughtSignature": signed}


def _candidate(
    reply: Reply, parts: list[Json], index: int, *, last: bool = False
) -> Json:
    candidate: Json = {"content": {"role": "model", "parts": parts}, "index": index}
    if last:
        candidate["finishReason"] = "MAX_TOKENS" if reply.cut else "STOP"
    if last and reply.tokens is not None:
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


def _body(reply: Reply, candidates: list[Json]) -> Json:
    usage = reply.usage
    counts: Json = {
        "promptTokenCount": usage.prompt_tokens,
        "candidatesTokenCount": usage.output_tokens - usage.reasoning_tokens,
        "totalTokenCount": usage.total_tokens,
    }
    if usage.cached_tokens:
        counts["cachedContentTokenCount"] = usage.cached_tokens
    if usage.reasoning_tokens:
        counts["thoughtsTokenCount"] = usage.reasoning_tokens
    return {
        "candidates": candidates,
        "usageMetadata": counts,
        "modelVersion": reply.model,
        "responseId": reply.reply_id,
    }


class _Chunks(Events):
    """The chunks of a streamed reply, each with a part or a piece of one."""

    def ping(self) -> bytes:
        # the official client parses comments as JSON
        return b"\n"

    def error(self, error: GatewayError) -> bytes:
        return event(_error(error))

    def reply(self, reply: Reply) -> Iterator[bytes]:
        for self.index, one in enumerate(reply.choices):
            steps = [step for step in self.steps(one, done=True) if step.what == "text"]
            # the last chunk has the finish reason, and always a part
            *parts, last = [_new_part(step) for step in steps] or [{"text": ""}]
            for part in parts:
                yield event(_body(reply, [_candidate(one, [part], self.index)]))
            ending = _candidate(one, [last], self.index, last=True)
            yield event(_body(reply, [ending]))

    def write(self, step: Step) -> Iterator[bytes]:
        if step.what == "text":
            candidate = _candidate(step.reply, [_new_part(step)], 0)
            yield event(_body(step.reply, [candidate]))


def _new_part(step: Step) -> Json:
    part = _part(step.block, step.reply)
    return {**part, "text": step.text} if "text" in part else part


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


def _error(error: GatewayError) -> Json:
    message = error.message
    if error.overflow is not None:
        message = "The input token count ({}) exceeds the maximum number of tokens "
        message = (message + "allowed ({}).").format(*error.overflow)
    status = kind_of(error, _STATUSES, "INVALID_ARGUMENT", "INTERNAL")
    return {"error": {"code": error.status, "message": message, "status": status}}


_VERBS: Sequence[tuple[str, Verb]] = (
    ("generateContent", "reply"),
    ("streamGenerateContent", "stream"),
    ("countTokens", "count"),
)

GEMINI = WireProtocol(
    name="gemini",
    history="contents",
    paths={
        f"/{version}/models/{{model:path}}:{method}": verb
        for version in ("v1", "v1beta")
        for method, verb in _VERBS
    },
    call_prefix="call_",
    known=frozenset(_KNOWN.split()),
    parse=_parse,
    write=_write,
    events=lambda _: _Chunks(),
    error=_error,
    count_of="generateContentRequest",
    count=lambda tokens: {"totalTokens": tokens},
)

"""Gemini generateContent and streamGenerateContent: requests, replies and errors.

A stream always consists of server-sent events, as with ``alt=sse``. The model in the path
is ignored.
"""

import json
import re
from collections.abc import Iterable
from typing import Any

from trajkit_shim.chat import images
from trajkit_shim.chat import request as chat
from trajkit_shim.chat.request import Reply, Spoken, Thought, ToolCall
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Fields, Json, as_list, refuse
from trajkit_shim.protocols import base
from trajkit_shim.protocols.base import Verb, WireProtocol

_LIMITS: dict[str, str | None] = {
    "max_tokens": "maxOutputTokens",
    "top_p": "topP",
    "top_k": "topK",
    "stop": "stopSequences",
}
_TYPES = frozenset("ARRAY BOOLEAN INTEGER NULL NUMBER OBJECT STRING".split())
# fields of the API whose values have names of their own, and a field of the gateway
_FREE = frozenset(
    "args parameters parametersJsonSchema response responseJsonSchema "
    "responseSchema chat_template_kwargs".split()
)


def _camel_case(value: Any) -> Any:
    """Return JSON with the names of fields in camel case: litellm sends snake case.

    Google's API takes both spellings (https://protobuf.dev/programming-guides/json).
    """
    if isinstance(value, list):
        return [*map(_camel_case, value)]
    if not isinstance(value, dict):
        return value
    renamed = {}
    for name, inner in value.items():
        if name not in _FREE:
            name = re.sub("_([a-z])", lambda found: found[1].upper(), name)
        renamed[name] = inner if name in _FREE else _camel_case(inner)
    return renamed


def _parse(fields: Fields) -> chat.ChatRequest:
    renamed = _camel_case(fields.json)
    fields.json.clear()
    fields.json.update(renamed)
    base.refuse_fields(fields, base.STORED, "cachedContent")
    system = fields.section("systemInstruction")
    system.peek("role")
    texts = map(_text, list(system.objects("parts")))
    messages = chat.system_message("\n".join(filter(None, texts)))
    messages += _messages(fields.objects("contents", needed=True))
    tools = base.Tools()
    for tool in fields.objects("tools"):
        for declared in tool.objects("functionDeclarations"):
            tools.add(declared, _schema(declared, "parametersJsonSchema", "parameters"))
    calling = fields.section("toolConfig").section("functionCallingConfig")
    modes = ("ANY", "AUTO", "MODE_UNSPECIFIED", "NONE", "VALIDATED")
    mode = calling.one_of("mode", modes, "AUTO")
    allowed = calling.get("allowedFunctionNames", as_list) or ()
    declared_names = [str(chat.function_of(tool)["name"]) for tool in tools.functions]
    config = fields.section("generationConfig")
    config.get("candidateCount", base.one_reply)
    top_k = config.json.get("topK")
    if isinstance(top_k, float) and top_k.is_integer():
        # the official client sends 40.0
        config.json["topK"] = int(top_k)
    given = config.section("thinkingConfig")
    budget = given.peek("thinkingBudget")
    # -1: the model decides
    budget = budget if type(budget) is int and budget >= 0 else None
    return base.chat_request(
        fields,
        messages,
        tools,
        none=mode == "NONE",
        required={
            "call": mode == "ANY",
            "names": tuple(map(str, allowed)),
            # both modes promise arguments of the schema
            "strict": declared_names if mode in ("ANY", "VALIDATED") else (),
            "schema": _schema_of_text(config),
        },
        sampling=chat.parse_sampling(config, _LIMITS),
        thinking={
            "effort": given.get_text("thinkingLevel"),
            "on": None if budget is None else budget > 0,
            "budget": budget or None,
        },
        stream=False,
    )


def _messages(contents: Iterable[Fields]) -> list[Json]:
    messages: list[Json] = []
    waiting: list[ToolCall] = []  # calls of the latest reply without a result
    for content in contents:
        has_role = content.json.get("role") is not None
        roles, parts = ("user", "function", "model"), content.objects("parts")
        if has_role and base.known_role(content, roles) == "model":
            made = [_model_part(part, i) for i, part in enumerate(parts, 1)]
            waiting = [part for part in made if isinstance(part, ToolCall)]
            messages.append(chat.assistant_message(made))
        else:
            messages += chat.user_messages(_user_part(p, waiting) for p in parts)
    return messages


def _model_part(part: Fields, index: int) -> Spoken:
    if part.peek("functionCall") is not None:
        call = part.object("functionCall")
        name, call_id = call.name("name"), call.get_text("id")
        # clients may omit ids
        call_id = f"{name}-{index}" if call_id is None else call_id
        args = json.dumps(call.get_object("args") or {}, ensure_ascii=False)
        return ToolCall(name, args, call_id)
    text = _text(part)
    return Thought(text) if part.peek("thought") else text


def _user_part(part: Fields, waiting: list[ToolCall]) -> images.Part:
    if part.peek("functionResponse") is not None:
        return _result(part.object("functionResponse"), waiting)
    for name, where in (("inlineData", "data"), ("fileData", "fileUri")):
        if part.peek(name) is not None:
            given = part.object(name)
            kind, url = given.peek("mimeType"), given.text(where)
            if not str(kind).startswith("image/"):
                images.refuse_content(part, name, kind)
            url = url if name == "fileData" else f"data:{kind};base64,{url}"
            return images.read_image(part, url, name, kind)
    return _text(part)


def _result(result: Fields, waiting: list[ToolCall]) -> Json:
    name, call_id = result.name("name"), result.get_text("id")
    if call_id is None:
        calls = [call for call in waiting if call.name == name]
        if not calls:
            refuse(result.path, f"there is no call of {name!r} without a result")
        waiting.remove(calls[0])
        call_id = calls[0].call_id
    given = result.get_object("response") or {}
    shown = [_user_part(part, []) for part in result.objects("parts")]
    # its only text, or its JSON
    texts = [given.get(name) for name in ("output", "result", "error")]
    text = next((t for t in texts if isinstance(t, str) and len(given) == 1), None)
    text = json.dumps(given, ensure_ascii=False) if text is None else text
    return chat.tool_message(call_id, [text, *shown], failed="error" in given)


def _text(part: Fields) -> str:
    # a part may be only a signature
    return part.get_text("text") or ""


def _schema(fields: Fields, *names: str) -> Any:
    """The JSON schema in the first of these fields that is there."""
    given = [_json_schema(fields.get_object(name)) for name in names]
    return next((schema for schema in given if schema is not None), None)


def _json_schema(schema: Any, key: str = "") -> Any:
    """Return a schema with its types in lower case, as in JSON Schema."""
    if isinstance(schema, dict):
        return {name: _json_schema(item, name) for name, item in schema.items()}
    if isinstance(schema, list):
        return [_json_schema(item) for item in schema]
    return schema.lower() if key == "type" and schema in _TYPES else schema


def _schema_of_text(config: Fields) -> Json | None:
    kinds = ("text/plain", "application/json")
    kind = config.one_of("responseMimeType", kinds, "text/plain")
    given = _schema(config, "responseJsonSchema", "responseSchema")
    if kind == "text/plain" and given is not None:
        config.refuse("responseMimeType", "a schema needs 'application/json'")
    return chat.ANY_OBJECT if given is None and kind != "text/plain" else given


def _write(reply: Reply, _: chat.ChatRequest) -> Json:
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
    candidate: Json = {
        "content": {"role": "model", "parts": [*map(_part, reply.blocks)]},
        "finishReason": "MAX_TOKENS" if reply.cut else "STOP",
        "index": 0,
    }
    return {
        "candidates": [candidate],
        "usageMetadata": counts,
        "modelVersion": reply.model,
        "responseId": reply.reply_id,
    }


def _part(block: Spoken) -> Json:
    if isinstance(block, ToolCall):
        args = base.RawJson(block.arguments)
        return {"functionCall": {"id": block.call_id, "name": block.name, "args": args}}
    if isinstance(block, str):
        return {"text": block}
    return {"text": block.text, "thought": True, "thoughtSignature": base.SIGNATURE}


def _error(error: GatewayError) -> Json:
    too_long = (
        "The input token count ({}) exceeds the maximum number of tokens allowed ({})."
    )
    status, message = base.words_for(error, 1, too_long)
    return {"error": {"code": error.status, "message": message, "status": status}}


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
    parse=_parse,
    write=_write,
    # one event has it all, since it comes at once
    events=lambda reply, request, _: [_write(reply, request)],
    # the official client parses comments as JSON
    ping=lambda *_: b"\n",
    error=_error,
    count=lambda tokens: {"totalTokens": tokens},
)

"""What the gateway needs from a protocol: requests in, replies, events and errors out."""

import base64
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import orjson

from trajkit_shim.chat import request as chat
from trajkit_shim.chat.request import ChatRequest, Reply
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import (
    Elements,
    Fields,
    Json,
    Reading,
    as_integer,
    as_object,
    refuse,
)

Verb: TypeAlias = Literal["reply", "stream", "count"]
"""What a path returns: a reply (streamed if the body asks for it), a streamed reply, or
the number of tokens of the prompt."""

# Fields of any object that mean nothing to the model: about who asks, storing, caching
# and billing, and what clients send back of a reply.
_SILENT = frozenset(
    "allowed_callers annotations betas cache_control caller citations client_metadata "
    "context detail eager_input_streaming generate_summary id include "
    "include_obfuscation includeThoughts index inference_geo labels metadata phase "
    "prompt_cache_key prompt_cache_options prompt_cache_retention "
    "provider_specific_fields reasoning_details safetySettings safety_identifier "
    "service_tier serviceTier signature speed status store summary thinking_blocks "
    "thoughtSignature title type user".split()
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WireProtocol:
    """One protocol: functions between its JSON and the gateway's records."""

    name: str
    paths: Mapping[str, Verb]  # paths below the gateway's URL, and what each returns
    call_prefix: str = "call_"  # prefix of the ids of tool calls
    # raises `GatewayError` for missing, invalid or unsupported fields
    parse: Callable[[Fields], ChatRequest]
    write: Callable[[Reply, ChatRequest], Json]
    # the events of a streamed reply, after a number of keep-alive events
    events: Callable[[Reply, ChatRequest, int], Iterable[Json]]
    # a keep-alive event, after a number of others; clients accept any number of them
    ping: Callable[[ChatRequest, int], bytes]
    error: Callable[[GatewayError], Json]
    # the end of a stream that failed, if it is not `error`
    failed: Callable[[GatewayError, ChatRequest, int], Iterable[Json]] | None = None
    stream_end: bytes = b""
    # the body of a count
    count: Callable[[int], Json] = lambda tokens: {"input_tokens": tokens}
    # codes of errors that a streaming client only understands as an event
    streamed_errors: frozenset[str] = frozenset()

    def read(
        self,
        body: Json,
        earlier: Sequence[Elements] = (),
        replies: Mapping[str, Reply] = MappingProxyType({}),
        *,
        takes_images: bool = False,
    ) -> ChatRequest:
        """Read the body of a request for a reply or a count; raises `GatewayError`.

        ``earlier``: ``elements`` of other requests. ``replies``: the session's, by their
        ids.
        """
        reading = Reading(
            takes_images, _SILENT, self.name, earlier=earlier, replies=replies
        )
        fields = Fields(body, reading=reading)
        fields.get_text("model")
        request = self.parse(fields)
        reading.count_unread()
        if request.messages[-1]["role"] == "assistant":
            # it is shown as complete, and the model answers with another message
            reading.ignored["continuation of the last message"] += 1
        return request

    def stream(
        self, answer: Reply | GatewayError, request: ChatRequest, n_pings: int
    ) -> Iterator[bytes]:
        """Yield the encoded events of a reply or an error, to the end of the stream."""
        if isinstance(answer, Reply):
            events = self.events(answer, request, n_pings)
        elif self.failed is None:
            events = [self.error(answer)]
        else:
            events = self.failed(answer, request, n_pings)
        yield from map(event, events)
        if self.stream_end:
            yield self.stream_end


# Requests


@dataclass(slots=True)
class Tools:
    """The tools of a request (see `ChatRequest`)."""

    functions: list[Json] = field(default_factory=list)  # in OpenAI's format
    strict: list[str] = field(default_factory=list)  # names
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, tool: Fields, schema: object, prefix: str = "") -> str:
        """Add a function; return its name for the model, which begins with ``prefix``."""
        name = prefix + tool.name("name")
        function = chat.function_tool(name, tool.get_text("description"), schema)
        self.functions.append(function)
        self.strict += [name] * tool.flag("strict")
        return name


def chat_request(
    fields: Fields,
    messages: list[Json],
    tools: Tools,
    *,
    none: bool,
    required: dict[str, Any],
    thinking: dict[str, Any],
    **rest: Any,
) -> ChatRequest:
    """Return a request; ``none``: no tool may be called."""
    variables = fields.get_object("chat_template_kwargs") or {}
    # what they get until the request is read whole belongs to it
    reading = fields.reading
    return ChatRequest(
        images=reading.images,
        ignored=reading.ignored,
        elements=reading.elements,
        messages=messages,
        tools=None if none else tools.functions or None,
        required=chat.Required(**{"strict": tools.strict, **required}),
        thinking=chat.Thinking(variables=variables, **thinking),
        namespaces=tools.namespaces,
        **rest,
    )


STORED = "nothing is stored here: send the entire conversation"


def refuse_fields(
    fields: Fields, rule: str, *names: str, code: str = "unsupported_parameter"
) -> None:
    """Refuse fields without which the request would mean something else."""
    for name in names:
        if fields.peek(name):
            fields.refuse(name, rule, code)


def known_role(message: Fields, roles: Collection[str]) -> str:
    """Return the role of a message; one that no template knows is the user's."""
    role = message.name("role")
    if role not in roles:
        message.ignore("role", role)
        return "user"
    return role


THINKS = {"enabled": True, "disabled": False}
"""The types of Anthropic's field ``thinking`` that decide whether the model thinks."""


def one_reply(value: object, where: str) -> int:
    if as_integer(value, where, minimum=1) != 1:
        rule = f"{value}: a request has one reply here; open a session for each"
        refuse(where, rule, code="unsupported_value")
    return 1


def text_schema(fields: Fields, name: str) -> Json | None:
    """Return the JSON schema that OpenAI's or Anthropic's format field requires, if any."""
    if fields.peek(name) is None:
        return None
    given = fields.object(name)
    kind = given.name("type")
    given.whole()
    if kind == "json_schema":
        inner = given.object(kind) if kind in given.json else given
        inner.whole()
        return inner.need("schema", as_object)
    if kind not in ("json_object", "text"):
        # a grammar that is not kept would change the meaning
        given.refuse("type", f"{kind!r} is not supported", "unsupported_value")
    return chat.ANY_OBJECT if kind == "json_object" else None


# Errors

# the words of Anthropic and of Gemini by status; 400 and 500 stand for all others
_WORDS = {
    400: ("invalid_request_error", "INVALID_ARGUMENT"),
    401: ("authentication_error", "UNAUTHENTICATED"),
    403: ("permission_error", "PERMISSION_DENIED"),
    404: ("not_found_error", "NOT_FOUND"),
    410: ("invalid_request_error", "FAILED_PRECONDITION"),
    413: ("request_too_large", "INVALID_ARGUMENT"),
    429: ("rate_limit_error", "RESOURCE_EXHAUSTED"),
    500: ("api_error", "INTERNAL"),
    502: ("api_error", "UNAVAILABLE"),
    503: ("overloaded_error", "UNAVAILABLE"),
    504: ("timeout_error", "DEADLINE_EXCEEDED"),
}


def words_for(error: GatewayError, which: int, too_long: str) -> tuple[str, str]:
    """Return one protocol's word for an error, and the message.

    ``too_long``: the format of the message for a prompt that is too long.
    """
    long = error.overflow and too_long.format(*error.overflow)
    words = _WORDS.get(error.status, _WORDS[500 if error.status >= 500 else 400])
    return words[which], long or error.message


# Events

SIGNATURE = base64.b64encode(b"trajkit").decode()
"""What protocols with signed reasoning get as signature."""

# the fields of messages, blocks and items that a stream fills
_EMPTY: Json = {
    **dict.fromkeys(("arguments", "signature", "text", "thinking"), ""),
    **dict.fromkeys(("encrypted_content", "stop_reason", "stop_sequence")),
    "content": [],
    "input": {},
    "status": "in_progress",
}


def begun(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object before a stream fills it."""
    return {name: _EMPTY.get(name, filled) for name, filled in value.items()}


@dataclass(frozen=True, slots=True)
class RawJson:
    """A JSON text to be sent as a value, unchanged except for its line breaks."""

    text: str


def _fragment(raw: RawJson) -> orjson.Fragment:
    # JSON has line breaks only between tokens, and in an event they end its line
    return orjson.Fragment(raw.text.replace("\n", " ").replace("\r", " "))


def encode(value: Json) -> bytes:
    """Encode a value that may contain `RawJson` anywhere."""
    try:
        return orjson.dumps(value, _fragment, orjson.OPT_PASSTHROUGH_DATACLASS)
    # half a surrogate pair, which a model can spell, or an integer beyond 64 bits
    except TypeError:
        return json.dumps(value, default=lambda raw: json.loads(raw.text)).encode()


def event(value: Json) -> bytes:
    """Encode one server-sent event, which is named if its JSON has a type."""
    head = f"event: {value['type']}\n" if "type" in value else ""
    return f"{head}data: ".encode() + encode(value) + b"\n\n"

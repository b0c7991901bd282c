"""The chat request that every protocol's request is translated to.

Messages are canonical: they do not depend on the protocol, nor on whether they come from
a client or are the gateway's own reply. So a reply that a client sends back equals the
recorded one.

- ``role`` is ``system``, ``user``, ``assistant`` or ``tool``; ``content`` is a string,
  or a list of texts and images (`trajkit_shim.chat.images`).
- An assistant message may have ``reasoning_content`` and ``tool_calls`` in OpenAI's
  format, with ``arguments`` as sampled JSON text. If text was sampled after a call,
  ``sampled`` holds the reply after its reasoning unchanged. Only the gateway writes it
  (`trajkit_shim.chat.reply.canonical_reply`).
- A tool message has ``tool_call_id``.
- Fields without meaning to the model (cache hints, annotations, ...) are dropped.
"""

import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from trajkit.turns.messages import message_record
from trajkit_shim.chat.image_store import Image
from trajkit_shim.chat.images import Part, joined
from trajkit_shim.chat.sampling_params import SamplingParams
from trajkit_shim.json_input import Fields, Json, as_integer, refuse


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """A canonical message as the log has it: see `trajkit.schema.MESSAGE`."""

    key: bytes
    role: str
    body: str


def logged_message(message: Json) -> LoggedMessage:
    key, body = message_record(message)
    return LoggedMessage(key, str(message["role"]), body)


@dataclass(frozen=True, slots=True, kw_only=True)
class Required:
    """The form that a client requires of a reply. The default requires nothing."""

    call: bool = False  # at least one tool call
    names: Collection[str] = ()  # the tools that may be called; empty: all
    parallel: bool = True  # several calls in one reply are allowed
    strict: Collection[str] = ()  # tools whose arguments must match their schema
    schema: Json | None = None  # JSON schema of the text

    @property
    def limits_calls(self) -> bool:
        """Whether some calls, or none, are not allowed."""
        return bool(self.call or self.names or self.strict or not self.parallel)


@dataclass(frozen=True, slots=True, kw_only=True)
class Thinking:
    """How a client wants the model to think, and its template's variables."""

    variables: Json = field(default_factory=dict)
    effort: str | None = None
    on: bool | None = None
    budget: int | None = None  # tokens

    def resolve(self, known: Collection[str], ignored: Counter[str]) -> Json:
        """Return the variables for a template that has those; count what it lacks."""
        found: Json = {}
        # as the names that templates use
        effort: str | None = self.effort and self.effort.lower()
        on = self.on
        if effort in _NO_EFFORT:
            on = False if on is None else on
            # no effort and no thinking are one wish
            effort = effort if "reasoning_effort" in known else None
        wanted: list[tuple[str, object, list[str]]] = [
            ("thinking", on, ["enable_thinking", "thinking"]),
            ("thinking budget", self.budget, ["thinking_budget"]),
            ("reasoning effort", effort, ["reasoning_effort"]),
        ]
        for what, value, names in wanted:
            fitting = [name for name in names if name in known]
            if value is not None and not fitting:
                ignored[what] += 1
            elif value is not None:
                found |= dict.fromkeys(fitting, value)
        for name, value in self.variables.items():
            if name in known:
                found[name] = value
            else:
                ignored[f"chat_template_kwargs.{name}"[:100]] += 1
        return found


_NO_EFFORT = ("none", "off")
SWITCH = {"enabled": True, "disabled": False}
"""The types of Anthropic's field ``thinking`` that decide whether the model thinks."""


ANY_OBJECT: Json = {"type": "object"}
"""The schema of any JSON object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request for an assistant message."""

    messages: list[Json]  # canonical, at least one
    tools: list[Json] | None  # in OpenAI's format; None: no tool may be called
    sampling: SamplingParams
    stream: bool
    required: Required = Required()
    thinking: Thinking = field(default_factory=Thinking)
    logprobs: bool = False  # the reply has the logprobs of its tokens
    # end a stream with token counts (OpenAI Chat Completions)
    include_usage: bool = False
    # types of tools that only a provider can run; they are not shown to the model
    left_out: Sequence[str] = ()
    # the client's (namespace, name) of each tool whose name for the model combines both
    # (OpenAI Responses)
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    images: Sequence[Image] = ()  # of the messages that were parsed
    # fields and values that have no effect, and how often they were given
    ignored: Counter[str] = field(default_factory=Counter)
    # of a stream whose events name it before there is a reply
    stream_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))


@dataclass(slots=True)
class Tools:
    """The tools of a request (see `ChatRequest`)."""

    functions: list[Json] = field(default_factory=list)  # in OpenAI's format
    strict: list[str] = field(default_factory=list)  # names
    left_out: list[str] = field(default_factory=list)
    namespaces: dict[str, tuple[str, str]] = field(default_factory=dict)

    def offered(self, none: bool) -> list[Json] | None:
        """Return the tools that may be called: all, or none."""
        return None if none else self.functions or None

    def add(self, tool: Fields, schema: object, prefix: str = "") -> str:
        """Add a function; return its name for the model, which begins with ``prefix``."""
        name = prefix + tool.name("name")
        self.functions.append(function_tool(name, tool.get_text("description"), schema))
        self.strict += [name] * tool.flag("strict")
        return name


def as_one_reply(value: object, where: str) -> int:
    if as_integer(value, where, minimum=1) != 1:
        rule = f"{value}: a request has one reply here; open a session for each"
        refuse(where, rule, code="unsupported_value")
    return 1


def system_message(text: str | None) -> list[Json]:
    """Return the message of a system prompt in a field of its own, if it has text."""
    return [{"role": "system", "content": text}] if text else []


def text_schema(fields: Fields, name: str) -> Json | None:
    """Return the JSON schema that OpenAI's or Anthropic's format field requires, if any."""
    if fields.json.get(name) is None:
        return None
    given = fields.object(name)
    kind = given.name("type")
    if kind not in ("json_schema", "json_object", "text"):
        # a grammar that is not kept would change the meaning
        given.refuse("type", f"{kind!r} is not supported", "unsupported_value")
    if kind == "json_schema":
        inner = "json_schema" in given.json
        return (given.object(kind) if inner else given).object("schema").json
    return ANY_OBJECT if kind == "json_object" else None


def function_of(tool: Json) -> Json:
    function = tool["function"]
    assert isinstance(function, dict)
    return function


def squeezed(text: object) -> str:
    return "".join(str(text).split())


def assistant_message(
    content: str, reasoning: str = "", calls: Sequence[Json] = ()
) -> Json:
    message: Json = {"role": "assistant", "content": content}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = [*calls]
    return message


def tool_message(call_id: str, parts: Iterable[Part], *, failed: bool = False) -> Json:
    content = joined(parts)
    message: Json = {"role": "tool", "content": content, "tool_call_id": call_id}
    return {**message, "is_error": True} if failed else message


def user_messages(parts: Iterable[Part | Json]) -> list[Json]:
    """Return a user's turn: its tool messages, and the texts and images between them."""
    messages: list[Json] = []
    for is_message, group in groupby(
        filter(None, parts), lambda part: isinstance(part, dict)
    ):
        if is_message:
            messages += (part for part in group if isinstance(part, dict))
        else:
            messages.append({"role": "user", "content": joined(group)})
    return messages or [{"role": "user", "content": ""}]


def tool_call(call_id: str, name: str, arguments: str) -> Json:
    function: Json = {"name": name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def function_tool(name: str, description: str | None, parameters: object) -> Json:
    fields = {"name": name, "description": description, "parameters": parameters}
    function = {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": function}

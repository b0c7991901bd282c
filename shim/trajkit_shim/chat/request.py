"""The chat request and reply that every protocol is translated to and from.

Messages are canonical: they do not depend on the protocol, nor on whether they come from
a client or are the gateway's own reply. So a reply that a client sends back equals the
recorded one.

- ``role`` is ``system``, ``user``, ``assistant`` or ``tool``; ``content`` is a string,
  or a list of texts and images (`trajkit_shim.chat.images`).
- An assistant message may have ``reasoning_content`` and ``tool_calls`` in OpenAI's
  format, with ``arguments`` as sampled JSON text.
- A tool message has ``tool_call_id``.

Whoever opens a session (the trainer) fixes sampling parameters, which replace the
client's. Those that shape the distribution are ignored in a client's request even if they
are not fixed, unless the session leaves them to its client; what is fixed is then the
default.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from hashlib import blake2b
from itertools import groupby
from typing import Any, Literal, NamedTuple, TypeAlias

from trajkit.turns.messages import message_record
from trajkit_shim.chat.images import Images, Part, joined
from trajkit_shim.engines.base import Sampling
from trajkit_shim.json_input import (
    Elements,
    Fields,
    Json,
    Reader,
    as_integer,
    as_list,
    as_name,
    as_number,
    list_of,
    refuse,
)

ANY_OBJECT: Json = {"type": "object"}
"""The schema of any JSON object."""

# Messages


class LoggedMessage(NamedTuple):
    """A canonical message as the log has it: see `trajkit.schema.MESSAGE`."""

    key: bytes
    role: str
    body: str


def logged_message(message: Json) -> LoggedMessage:
    key, body = message_record(message)
    return LoggedMessage(key, str(message["role"]), body)


@dataclass(frozen=True, slots=True)
class Thought:
    """The reasoning of a reply."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a reply."""

    name: str
    arguments: str  # JSON text, as sampled if the model writes JSON
    call_id: str = ""  # the model's own, or given when the reply is complete

    @property
    def json(self) -> Json:
        """The call in a canonical message."""
        function: Json = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


Spoken: TypeAlias = Thought | str | ToolCall
"""A part of an assistant's message: reasoning, a text or a call."""


def assistant_message(parts: Iterable[Spoken]) -> Json:
    """Return the canonical message of an assistant's reasoning, texts and calls."""
    given = list(parts)
    content = "".join(part for part in given if isinstance(part, str))
    thought = "".join(part.text for part in given if isinstance(part, Thought))
    calls = [part.json for part in given if isinstance(part, ToolCall)]
    message: Json = {"role": "assistant", "content": content}
    message |= {"reasoning_content": thought} if thought else {}
    return message | ({"tool_calls": calls} if calls else {})


def calls_of(message: Json) -> list[ToolCall]:
    """Return the calls of a canonical message."""
    given: Any = message.get("tool_calls", ())
    return [ToolCall(**call["function"], call_id=call["id"]) for call in given]


def tool_message(call_id: str, parts: Iterable[Part], *, failed: bool = False) -> Json:
    content = joined(parts)
    message: Json = {"role": "tool", "content": content, "tool_call_id": call_id}
    return message | ({"is_error": True} if failed else {})


def user_messages(parts: Iterable[Part]) -> list[Json]:
    """Return a user's turn: its tool messages, and the texts and images between them."""
    given = [part for part in parts if part]
    messages: list[Json] = []
    groups = groupby(given, lambda part: isinstance(part, dict) and "role" in part)
    for is_message, group in groups:
        whole: list[Any] = [*group]
        if not is_message:
            whole = [{"role": "user", "content": joined(whole)}]
        messages += whole
    return messages or [{"role": "user", "content": ""}]


def system_message(text: str | None) -> list[Json]:
    """Return the message of a system prompt in a field of its own, if it has text."""
    return [{"role": "system", "content": text}] if text else []


def function_tool(name: str, description: str | None, parameters: object) -> Json:
    fields = {"name": name, "description": description, "parameters": parameters}
    function = {key: value for key, value in fields.items() if value is not None}
    return {"type": "function", "function": function}


def function_of(tool: Json) -> Json:
    function = tool["function"]
    assert isinstance(function, dict)
    return function


def squeezed(text: object) -> str:
    return "".join(str(text).split())


# Requests

SamplingParams: TypeAlias = Mapping[str, Any]
"""Sampling parameters that are given: max_tokens, temperature, top_p, top_k, stop and seed,
and in a session's own also ``extra``, for the engine."""


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

    def resolve(
        self, takes: Callable[[str, object], bool], ignored: Counter[str]
    ) -> Json:
        """Return the variables that a template takes; count the others.

        ``takes``: whether it has a variable, and does not refuse a value.
        """
        effort, on = self.effort and self.effort.lower(), self.on
        if effort in ("none", "off"):
            on = False if on is None else on
            # no effort and no thinking are one wish
            effort = effort if takes("reasoning_effort", effort) else None
        # as the names that templates use
        wanted: dict[str, tuple[object, tuple[str, ...]]] = {
            "thinking": (on, ("enable_thinking", "thinking")),
            "thinking budget": (self.budget, ("thinking_budget",)),
            "reasoning effort": (effort, ("reasoning_effort",)),
        }
        for name, value in self.variables.items():
            wanted[f"chat_template_kwargs.{name}"[:100]] = value, (name,)
        found: Json = {}
        for what, (value, names) in wanted.items():
            if value is not None:
                fitting = [name for name in names if takes(name, value)]
                found |= dict.fromkeys(fitting, value)
                ignored.update([what] * (not fitting))
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request for an assistant message."""

    messages: list[Json]  # canonical, at least one
    tools: list[Json] | None  # in OpenAI's format; None: no tool may be called
    sampling: SamplingParams  # what it gives
    stream: bool
    required: Required = Required()
    thinking: Thinking = field(default_factory=Thinking)
    # end a stream with token counts (OpenAI Chat Completions)
    include_usage: bool = False
    # the client's (namespace, name) of each tool whose name for the model combines both
    # (OpenAI Responses)
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    images: Images = field(default_factory=dict)  # of the messages
    # fields and values that have no effect, and how often they were given
    ignored: Counter[str] = field(default_factory=Counter)
    # what its messages were read as, for later requests of its session
    elements: Elements = field(default_factory=dict)
    # of a stream whose events name it before there is a reply
    stream_id: str = field(default_factory=partial(secrets.token_hex, 16))
    created: int = field(default_factory=lambda: int(time.time()))


# Sampling parameters

SHAPING = ("temperature", "top_p", "top_k")
"""Parameters that shape the distribution that tokens are drawn from."""

FIXED = ("max_tokens", "stop", "seed", "response_format", "tool_choice")
"""What a client decides unless the session fixes its sampling. Forms that a client
requires of a reply are a grammar, which shapes the distribution too."""

CLIENT = (*SHAPING, *FIXED)
"""What a session may leave to its client."""


def _not_zero(read: Reader[Any], rule: str) -> Reader[Any]:
    return lambda value, where: read(value, where) or refuse(where, f"0 {rule}")


def _stop(value: object, where: str) -> tuple[str, ...]:
    if isinstance(value, str):
        return (as_name(value, where),)
    return (*list_of(as_name)(value, where),)


_TOP_K = "leaves nothing to sample from; -1 removes the limit"
_READERS: Mapping[str, Reader[Any]] = {
    "max_tokens": partial(as_integer, minimum=1),
    "temperature": partial(as_number, minimum=0.0, maximum=2.0),
    "top_p": _not_zero(partial(as_number, minimum=0.0, maximum=1.0), "is not above 0"),
    "top_k": _not_zero(partial(as_integer, minimum=-1), _TOP_K),
    "stop": _stop,
    "seed": partial(as_integer, minimum=-(2**63), maximum=2**63 - 1),
}


def parse_sampling(
    fields: Fields, names: Mapping[str, str | None] | None = None
) -> SamplingParams:
    """Read the sampling parameters of a chat request or a session, and nothing else.

    ``names`` has the fields that are not named as the parameter; None: there is no field.
    """
    named = {name: name for name in _READERS} | dict(names or {})
    read = (
        (name, fields.get(field, _READERS[name]))
        for name, field in named.items()
        if field is not None
    )
    return {name: value for name, value in read if value is not None}


def parse_fixed(fields: Fields) -> SamplingParams:
    """Read a session's ``sampling``: as in a chat request, with ``extra`` as it is."""
    fields.only({*_READERS, "extra"})
    extra = fields.get_object("extra") or {}
    for name in extra.keys() & {*_READERS, "max_new_tokens", "n", "stop_token_ids"}:
        refuse(f"sampling.extra.{name}", "the gateway sets it, by fields of sampling")
    return {**parse_sampling(fields), **({"extra": extra} if extra else {})}


def parse_client_sampling(value: object) -> frozenset[str]:
    """Read the ``client_sampling`` of a session being opened: names of `CLIENT`."""
    names = [] if value is None else as_list(value, "client_sampling")
    for i, name in enumerate(names):
        if name not in CLIENT:
            rule = f"{name!r} is not one of {', '.join(CLIENT)}"
            refuse(f"client_sampling[{i}]", rule)
    return frozenset(map(str, names))


def is_fixed(name: str, fixed: SamplingParams, client: Collection[str]) -> bool:
    """Return whether the session decides one of `FIXED`, because it fixes sampling."""
    return name not in client and bool(fixed)


def resolve(
    requested: SamplingParams,
    fixed: SamplingParams,
    client: Collection[str] = (),
    *,
    max_tokens: int,
    room: int,
    **rest: Any,
) -> tuple[Sampling, list[str]]:
    """Return the parameters of one engine call, and those that a client did not get.

    The limit on new tokens is the smaller of the client's (``requested``) and the
    session's (``fixed``), by default the gateway's (``max_tokens``), and at most the
    ``room`` that is left for them. ``client`` has the names in `CLIENT` that the client
    may set. ``rest``: the other fields of `Sampling`.
    """
    values, overruled = dict[str, Any](), list[str]()
    for name in (*SHAPING, "stop", "seed", "max_tokens"):
        asked, own = requested.get(name), fixed.get(name)
        shapes = name in SHAPING
        fixes = name not in client if shapes else is_fixed(name, fixed, client)
        allowed = None if fixes else asked
        either = [value for value in (allowed, own) if value is not None]
        if name == "max_tokens":
            values["max_new_tokens"] = limit = min([*(either or [max_tokens]), room])
            overruled += [name] * ((asked or limit) < limit)
            continue
        # what is fixed is only the default of what shapes the distribution
        values[name] = either[0 if shapes else -1] if either else None
        overruled += [name] * (asked not in (None, values[name]))
    values["stop"] = values["stop"] or ()
    return Sampling(**values, extra=dict(fixed.get("extra", {})), **rest), overruled


# Replies


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one call."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the engine does not report it
    reasoning_tokens: int = 0  # output tokens up to the end of the reasoning

    @property
    def total_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, kw_only=True)
class Parsed:
    """What a parser finds in a reply."""

    parts: tuple[Spoken, ...]  # in sampled order; no empty text
    ill_formed: bool = False

    @property
    def reasoning(self) -> str | None:
        return next((p.text for p in self.parts if isinstance(p, Thought)), None)

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]


@dataclass(frozen=True, kw_only=True)
class Reply(Parsed):
    """One assistant message."""

    reply_id: str  # 32 hexadecimal digits, to which protocols add their prefixes
    created: int
    model: str
    cut: bool  # truncated by a token limit
    stop_sequence: str | None = None  # the client's stop string that ended it
    usage: Usage

    @property
    def ending(self) -> Literal["cut", "calls", "stop_sequence", "end"]:
        """Why it ended; a limit of tokens has precedence even after complete calls."""
        if self.cut or self.calls:
            return "cut" if self.cut else "calls"
        return "end" if self.stop_sequence is None else "stop_sequence"

    @cached_property
    def message(self) -> Json:
        """The canonical message that the next request should contain."""
        return assistant_message(self.parts)

    @cached_property
    def logged(self) -> LoggedMessage:
        """The same as the log has it."""
        return logged_message(self.message)

    @property
    def blocks(self) -> list[Spoken]:
        """Its parts, at least one. White space alone is no part: clients reject it."""
        shown = (p for p in self.parts if not isinstance(p, str) or p.strip())
        return [*shown] or [self.text]


def make_reply(
    parsed: Parsed,
    finish: str,
    *,
    call_prefix: str = "call_",
    short_ids: bool = False,
    **rest: Any,
) -> Reply:
    """Build the reply to a client, with an id for each call that has none of its own.

    ``finish``: the engine's finish reason. ``short_ids``: of nine letters and digits,
    which some templates want. ``rest``: the other fields of `Reply`.
    """
    reply_id, parts = secrets.token_hex(16), list(parsed.parts)
    # a model may sample one id twice, but results name their call by it
    taken = {""}
    for number, part in enumerate(parts):
        if not isinstance(part, ToolCall):
            continue
        if part.call_id in taken:
            call_id = f"{call_prefix}{reply_id[:20]}{number:04}"
            if short_ids:
                call_id = blake2b(f"{reply_id}{number}".encode()).hexdigest()[:9]
            parts[number] = replace(part, call_id=call_id)
        taken.add(part.call_id)
    found = {**vars(parsed), "parts": tuple(parts), "cut": finish == "length"}
    return Reply(**found, **rest, reply_id=reply_id, created=int(time.time()))

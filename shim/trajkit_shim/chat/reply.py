"""The reply to a chat request, the same for every protocol."""

import time
import uuid
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Literal

from trajkit_shim.chat.request import assistant_message, tool_call
from trajkit_shim.json_input import Json


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


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One tool call of a reply."""

    name: str
    arguments: str  # JSON text, as sampled if the model writes JSON
    call_id: str = ""  # the model's own, or given when the reply is complete


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a parser finds in a reply."""

    parts: tuple[str | ToolCall, ...]  # text and calls in sampled order; no empty text
    sampled: str  # the text of all parts as sampled
    ill_formed: bool = False
    reasoning: str | None = None  # None: the reply has no reasoning

    @property
    def text(self) -> str:
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[ToolCall]:
        return [part for part in self.parts if isinstance(part, ToolCall)]


@dataclass(frozen=True, slots=True)
class Token:
    """One sampled token of a reply."""

    # a character of several tokens is in the last one
    text: str
    token_id: int
    logprob: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply(Parsed):
    """One assistant message."""

    reply_id: str  # 32 hexadecimal digits, to which protocols add their prefixes
    created: int
    model: str
    cut: bool  # truncated by a token limit
    stop_sequence: str | None  # the client's stop string that ended it
    usage: Usage
    # tokens after the reasoning, without the end of the message; None: not asked for
    tokens: tuple[Token, ...] | None = None

    @property
    def ending(self) -> Literal["cut", "calls", "stop_sequence", "end"]:
        """Why it ended; a limit of tokens has precedence even after complete calls."""
        if self.cut:
            return "cut"
        if self.calls:
            return "calls"
        return "end" if self.stop_sequence is None else "stop_sequence"


@dataclass(frozen=True, slots=True)
class Identity:
    """The ids of a reply and its calls, the same for partial and complete replies."""

    call_prefix: str = "call_"
    short: bool = False  # nine letters and digits, which some templates want
    reply_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    def call_id(self, number: int) -> str:
        if self.short:
            return blake2b(f"{self.reply_id}{number}".encode()).hexdigest()[:9]
        return f"{self.call_prefix}{self.reply_id[:20]}{number:04}"


def make_reply(
    parsed: Parsed,
    finish: str,
    *,
    model: str,
    usage: Usage,
    identity: Identity | None = None,
    stop_sequence: str | None = None,
    tokens: tuple[Token, ...] | None = None,
) -> Reply:
    """Build the reply to a client; ``finish`` is the engine's finish reason."""
    known = identity or Identity()
    return Reply(
        reply_id=known.reply_id,
        created=known.created,
        model=model,
        reasoning=parsed.reasoning,
        parts=tuple(
            part
            if isinstance(part, str) or part.call_id
            else replace(part, call_id=known.call_id(i))
            for i, part in enumerate(parsed.parts)
        ),
        sampled=parsed.sampled,
        ill_formed=parsed.ill_formed,
        cut=finish == "length",
        stop_sequence=stop_sequence,
        usage=usage,
        tokens=tokens,
    )


def canonical_reply(reply: Reply) -> Json:
    """Return the reply as the canonical message that the next request should contain."""
    calls = [tool_call(call.call_id, call.name, call.arguments) for call in reply.calls]
    message = assistant_message(reply.text, reply.reasoning or "", calls)
    # a text that is not the first part follows a call
    if any(isinstance(part, str) for part in reply.parts[1:]):
        message["sampled"] = reply.sampled
    return message

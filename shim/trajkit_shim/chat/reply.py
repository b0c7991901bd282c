"""The reply to a chat request, the same for every protocol."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
        """Tokens of prompt and output."""
        return self.prompt_tokens + self.output_tokens


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a reply."""

    name: str
    arguments: str  # JSON text, as sampled if the model writes JSON
    call_id: str = ""  # given when the reply is complete or streamed


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What a parser finds in a reply."""

    parts: tuple[str | Call, ...]  # text and calls in sampled order; no empty text
    sampled: str  # the text of all parts as sampled
    ill_formed: bool = False
    reasoning: str | None = None  # None: the reply has no reasoning

    @property
    def text(self) -> str:
        """All text, without reasoning and calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[Call]:
        """The tool calls, in order."""
        return [part for part in self.parts if isinstance(part, Call)]


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
    usage: Usage
    stop_sequence: str | None = None  # the client's stop string that ended it
    # tokens after the reasoning, without the end of the message; None: not asked for
    tokens: tuple[Token, ...] | None = None
    # the other replies to the same request; the usage is of all of them
    others: "tuple[Reply, ...]" = ()

    @property
    def choices(self) -> "tuple[Reply, ...]":
        """All replies to the request."""
        return (self, *self.others)

    def joined(self, others: "Sequence[Reply]") -> "Reply":
        """Return this reply with the others to the same request."""
        every = [self.usage, *(other.usage for other in others)]
        usage = replace(
            self.usage,
            output_tokens=sum(one.output_tokens for one in every),
            reasoning_tokens=sum(one.reasoning_tokens for one in every),
        )
        return replace(self, usage=usage, others=tuple(others))

    @property
    def ending(self) -> Literal["cut", "calls", "stop_sequence", "end"]:
        """Why it ended; a limit of tokens has precedence even after complete calls."""
        if self.cut:
            return "cut"
        if self.calls:
            return "calls"
        return "end" if self.stop_sequence is None else "stop_sequence"


def make_reply(
    parsed: Parsed,
    finish: str,
    *,
    reply_id: str,
    created: int,
    call_prefix: str,
    model: str,
    usage: Usage,
) -> Reply:
    """Build the reply to a client; ``finish`` is the engine's finish reason.

    The ids of its calls begin with ``call_prefix``, and no others do.
    """
    numbers = itertools.count()
    return Reply(
        reply_id=reply_id,
        created=created,
        model=model,
        reasoning=parsed.reasoning,
        parts=tuple(
            part
            if isinstance(part, str)
            else replace(part, call_id=f"{call_prefix}{next(numbers):04}")
            for part in parsed.parts
        ),
        sampled=parsed.sampled,
        ill_formed=parsed.ill_formed,
        cut=finish == "length",
        usage=usage,
    )


def extends(reply: Reply, earlier: Reply) -> bool:
    """Return whether a reply starts with an earlier partial reply."""
    *settled, last = earlier.reasoning or "", *earlier.parts
    *same, then = (reply.reasoning or "", *reply.parts)[: len(settled) + 1]
    if same != settled:
        return False
    if isinstance(last, str) and isinstance(then, str):
        return then.startswith(last)
    return then == last


def canonical_reply(reply: Reply) -> Json:
    """Return the reply as the canonical message that the next request should contain."""
    calls = [tool_call(call.call_id, call.name, call.arguments) for call in reply.calls]
    message = assistant_message(reply.text, reply.reasoning or "", calls)
    # a text that is not the first part follows a call
    if any(isinstance(part, str) for part in reply.parts[1:]):
        message["sampled"] = reply.sampled
    return message

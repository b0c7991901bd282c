"""The reply to a chat request, the same for every protocol."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one call."""

    prompt_tokens: int
    output_tokens: int
    # None: the engine does not report it
    cached_tokens: int | None
    # output tokens up to the end of the reasoning
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a reply."""

    call_id: str
    name: str
    # JSON text as sampled
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One assistant message."""

    # 32 hexadecimal digits, to which protocols add their prefixes
    reply_id: str
    created: int
    model: str
    reasoning: str | None
    # text and calls in sampled order
    parts: tuple[str | Call, ...]
    # the text after the reasoning, as sampled
    sampled: str
    # truncated by a token limit
    cut: bool
    # the client's stop string that ended it
    stop_sequence: str | None
    usage: Usage

    @property
    def text(self) -> str:
        """All text, without reasoning and calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[Call]:
        """The tool calls, in order."""
        return [part for part in self.parts if isinstance(part, Call)]

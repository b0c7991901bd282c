"""The reply to a chat request, the same for every protocol."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of one call."""

    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None  # None: the engine does not report it
    reasoning_tokens: int = 0  # output tokens up to the end of the reasoning


@dataclass(frozen=True, slots=True)
class Call:
    """One tool call of a reply."""

    call_id: str
    name: str
    arguments: str  # JSON text as sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One assistant message."""

    reply_id: str  # 32 hexadecimal digits, to which protocols add their prefixes
    created: int
    model: str
    reasoning: str | None
    parts: tuple[str | Call, ...]  # text and calls in sampled order
    sampled: str  # the text after the reasoning, as sampled
    cut: bool  # truncated by a token limit
    stop_sequence: str | None  # the client's stop string that ended it
    usage: Usage

    @property
    def text(self) -> str:
        """All text, without reasoning and calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def calls(self) -> list[Call]:
        """The tool calls, in order."""
        return [part for part in self.parts if isinstance(part, Call)]

"""Splits a model's reply into reasoning, text and tool calls.

``<think>...</think>`` at the start is reasoning; if the prompt opened it, the reply
contains only its end. White space around it is dropped. The rest is text and calls in
the model's format (`replies.parsers`). A block that is not a valid call stays in the
text, and the reply is ill-formed.
"""

from dataclasses import dataclass

from trajkit_shim.replies.parsers import ToolCall, ToolForm, Tools
from trajkit_shim.replies.parsers.form import SPACE
from trajkit_shim.replies.parsers.json_calls import HERMES
from trajkit_shim.replies.parsers.scan import Scan, overlap

THINK = "<think>"
END_THINK = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A parsed reply."""

    parts: tuple[str | ToolCall, ...]  # text and calls in sampled order; no empty text
    sampled: str  # the text of all parts as sampled
    ill_formed: bool = False
    reasoning: str | None = None  # None: the reply has no reasoning

    @property
    def content(self) -> str:
        """All text, without calls."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, in order."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


class Parser:
    """Parses a reply while it comes.

    ``tools``: the offered tools. None: calls are not parsed. ``opened``: the prompt
    ends within the reasoning. ``form``: the model's format of calls.
    """

    def __init__(
        self, *, tools: Tools | None, opened: bool, form: ToolForm = HERMES
    ) -> None:
        self._scan = Scan(None if tools is None else form, tools or ())
        self._reasoning: str | None = None
        # state: beginning, reasoning, gap (after the reasoning) or rest
        self._in = "reasoning" if opened else "beginning"
        self._pending = ""  # text that later text may still change

    def feed(self, piece: str) -> None:
        """Add text, without an end-of-message token."""
        self._advance(piece, ended=False)

    def end(self) -> Parsed:
        """Return the complete reply; there is no more text."""
        self._advance("", ended=True)
        self._scan.end()
        return self.so_far()

    def so_far(self) -> Parsed:
        """Return the parts so far. Later text can only extend the last one."""
        return Parsed(
            parts=tuple(self._scan.parts),
            sampled=self._scan.text,
            ill_formed=self._scan.ill_formed,
            reasoning=self._reasoning,
        )

    def _advance(self, piece: str, *, ended: bool) -> None:
        if self._in == "rest":
            self._scan.feed(piece)
            return
        self._pending += piece
        if self._in == "beginning":
            begun = self._pending.lstrip(SPACE)
            if begun.startswith(THINK):
                self._in, self._pending = "reasoning", begun.removeprefix(THINK)
            elif ended or not THINK.startswith(begun):
                self._go_on()
                return
        if self._in == "reasoning":
            inside, closed, rest = self._pending.partition(END_THINK)
            if closed:
                self._in, self._pending = "gap", rest
            elif not ended:
                inside = inside[: len(inside) - overlap(inside, END_THINK)]
            self._reasoning = inside.strip(SPACE) or None
        if self._in == "gap":
            self._pending = self._pending.lstrip("\n")
            if self._pending:
                self._go_on()

    def _go_on(self) -> None:
        self._in = "rest"
        self._scan.feed(self._pending)
        self._pending = ""


def parse(
    text: str, *, tools: Tools | None, opened: bool, form: ToolForm = HERMES
) -> Parsed:
    """Parse a complete reply; for the parameters see `Parser`."""
    parser = Parser(tools=tools, opened=opened, form=form)
    parser.feed(text)
    return parser.end()

"""Reasoning, text and tool calls in what a model says.

``<think>...</think>`` at the start is reasoning; where the prompt opened it, the reply
holds only its end. White space around it is its frame. What follows is text and calls in
the form of the model (`trajkit_shim.parsers`). A block that does not read as a call stays
in the text as it is, and the reply is ill-formed.
"""

from dataclasses import dataclass

from trajkit_shim.parsers import ToolCall, ToolForm, Tools
from trajkit_shim.parsers.form import SPACE
from trajkit_shim.parsers.hermes import HERMES
from trajkit_shim.parsers.scan import Scan, overlap

THINK = "<think>"
END_THINK = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """A reply's text, taken apart."""

    # text and calls in the order in which they were sampled; no empty text
    parts: tuple[str | ToolCall, ...]
    # the text of all parts, as it was sampled
    sampled: str
    ill_formed: bool = False
    # None: the reply has none
    reasoning: str | None = None

    @property
    def content(self) -> str:
        """All text, calls left out."""
        return "".join(part for part in self.parts if isinstance(part, str))

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls, in order."""
        return tuple(part for part in self.parts if isinstance(part, ToolCall))


class Parser:
    """Takes a reply apart while it comes.

    Parameters
    ----------
    tools : sequence of dict or None
        The tools that were offered. None: no calls are looked for.
    opened : bool
        The prompt ends inside of the reasoning.
    form : ToolForm
        In which the model writes its calls.
    """

    def __init__(
        self, *, tools: Tools | None, opened: bool, form: ToolForm = HERMES
    ) -> None:
        self._scan = Scan(None if tools is None else form, tools or ())
        self._reasoning: str | None = None
        # what is read next: the beginning, reasoning, the gap behind it, or the rest
        self._in = "reasoning" if opened else "beginning"
        # text that is not settled
        self._held = ""

    def feed(self, piece: str) -> None:
        """More text, without a token that ends the message."""
        self._advance(piece, ended=False)

    def end(self) -> Parsed:
        """The whole reply: there is no more."""
        self._advance("", ended=True)
        self._scan.end()
        return self.so_far()

    def so_far(self) -> Parsed:
        """What more text cannot change, except that the last text of it may go on."""
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
        self._held += piece
        if self._in == "beginning":
            begun = self._held.lstrip(SPACE)
            if begun.startswith(THINK):
                self._in, self._held = "reasoning", begun.removeprefix(THINK)
            elif ended or not THINK.startswith(begun):
                self._go_on()
                return
        if self._in == "reasoning":
            inside, closed, rest = self._held.partition(END_THINK)
            if closed:
                self._in, self._held = "gap", rest
            elif not ended:
                inside = inside[: len(inside) - overlap(inside, END_THINK)]
            self._reasoning = inside.strip(SPACE) or None
        if self._in == "gap":
            self._held = self._held.lstrip("\n")
            if self._held:
                self._go_on()

    def _go_on(self) -> None:
        self._in = "rest"
        self._scan.feed(self._held)
        self._held = ""


def parse(
    text: str, *, tools: Tools | None, opened: bool, form: ToolForm = HERMES
) -> Parsed:
    """A whole reply, taken apart. The parameters are those of `Parser`."""
    parser = Parser(tools=tools, opened=opened, form=form)
    parser.feed(text)
    return parser.end()


def parse_reply(text: str, tools: Tools = (), form: ToolForm = HERMES) -> Parsed:
    """The calls and the remaining text of a reply without reasoning."""
    scan = Scan(form, tools)
    scan.feed(text)
    scan.end()
    return Parsed(
        parts=tuple(scan.parts), sampled=scan.text, ill_formed=scan.ill_formed
    )

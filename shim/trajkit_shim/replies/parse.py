"""Splits a model's reply into reasoning, text and tool calls.

``<think>...</think>`` at the start is reasoning; if the prompt opened it, the reply
contains only its end. White space around it is dropped. The rest is text and calls in
the model's format (`replies.parsers`). A block that is not a valid call stays in the
text, and the reply is ill-formed.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trajkit_shim.chat.reply import Call, Parsed
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.attribution import Ids

Tools: TypeAlias = Sequence[Json]
"""The offered tools, in OpenAI's format."""

SPACE = " \t\n\r"
THINK = "<think>"
END_THINK = "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a model writes tool calls, as far as a grammar needs it."""

    opens: str  # start of every call
    # what precedes and follows the arguments of a call of a tool, as the chat template
    # writes it, and the arguments' style in xgrammar's structural tags
    begin: Callable[[str], str]
    end: str
    style: str = "json"

    def tag(self, name: str, schema: Json) -> Json:
        """Return the tag of a grammar (`replies.grammar`) that a tool's call matches."""
        content: Json = {"type": "json_schema", "json_schema": schema}
        if self.style != "json":
            content["style"] = self.style
        begin = self.begin(name)
        return {"type": "tag", "begin": begin, "content": content, "end": self.end}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm(CallForm):
    """How a family of models writes tool calls."""

    name: str  # value of the command-line option
    closes: str  # end of every call, except for white space
    # Returns the call at an offset of a text and its end, or None. A result must not
    # change when the text grows.
    read: Callable[[str, int, Tools], tuple[Call, int] | None]
    lead: str = ""  # what must follow ``opens`` after white space; may be empty
    # a chat template that contains all of them uses this format
    known_by: tuple[str, ...] = ()

    def hopeless(self, text: str, offset: int) -> bool:
        """Return whether the text at ``offset`` can never become a call."""
        rest = text[skip(text, offset + len(self.opens)) :][: len(self.lead)]
        return not self.lead.startswith(rest)


class ReplyParser(ABC):
    """Parses replies."""

    form: CallForm | None = None  # how the model writes calls; None: unknown

    def start(self, tools: Tools | None, *, opened: bool) -> "Parser | None":
        """Return the parser of a reply that comes in pieces; None: it must be complete."""
        return None

    @abstractmethod
    async def parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, *, opened: bool
    ) -> Parsed:
        """Return what a reply contains; one that the parser rejects stays text.

        The text is as sampled, without the end-of-message token. ``opened``: the prompt
        ends within the reasoning. Raises `EngineError`: the parser cannot be reached.
        """

    async def close(self) -> None:  # noqa: B027, most have nothing to close
        """Close its connections, if it has any."""


class FormParser(ReplyParser):
    """The gateway's own parser, for one format of calls."""

    def __init__(self, form: ToolForm) -> None:
        self.form = self._form = form

    def start(self, tools: Tools | None, *, opened: bool) -> "Parser":
        return Parser(self._form, tools, opened=opened)

    async def parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, *, opened: bool
    ) -> Parsed:
        return parse(text, self._form, tools, opened=opened)


class Parser:
    """Parses a reply that comes in pieces, without an end-of-message token.

    Everything but calls is text, including its white space, except that white space
    between two calls is dropped. Parts that later text could change are withheld, so the
    result does not depend on the pieces. Without form or tools calls are text too.
    """

    def __init__(
        self, form: ToolForm | None, tools: Tools | None, *, opened: bool
    ) -> None:
        self._form = None if tools is None else form
        self._tools = tools or ()
        self._in: Literal["beginning", "reasoning", "gap", "rest"]
        self._in = "reasoning" if opened else "beginning"
        self._before = ""  # text before the rest that later text may still change
        self._reasoning: str | None = None
        self._rest = ""
        # no two texts are adjacent; the last part may grow
        self._parts: list[str | Call] = []
        self._ill_formed = False
        self._offset = 0  # of the text that is in no part
        self._between = ""  # white space after a call, dropped if another call follows
        self._closes_from = 0  # where to search for the end of the open call

    def feed(self, piece: str, *, ended: bool = False) -> None:
        """Add text, the last one if ``ended``."""
        if self._in != "rest":
            self._before += piece
            self._skip_reasoning(ended=ended)
            piece = self._before
        if self._in == "rest":
            self._rest += piece
            self._find_calls(ended=ended)

    def end(self) -> Parsed:
        """Return the complete reply; there is no more text."""
        self.feed("", ended=True)
        if self._between:
            self._parts.append(self._between)
        return self.so_far()

    def so_far(self) -> Parsed:
        """Return the parts so far. Later text can only extend the last one."""
        return Parsed(
            parts=tuple(self._parts),
            sampled=self._rest,
            ill_formed=self._ill_formed,
            reasoning=self._reasoning,
        )

    def _skip_reasoning(self, *, ended: bool) -> None:
        if self._in == "beginning":
            begun = self._before.lstrip(SPACE)
            if begun.startswith(THINK):
                self._in, self._before = "reasoning", begun.removeprefix(THINK)
            elif ended or not THINK.startswith(begun):
                self._in = "rest"
        if self._in == "reasoning":
            inside, closed, rest = self._before.partition(END_THINK)
            if closed:
                self._in, self._before = "gap", rest
            elif not ended:
                inside = inside[: len(inside) - overlap(inside, END_THINK)]
            self._reasoning = inside.strip(SPACE) or None
        if self._in == "gap":
            self._before = self._before.lstrip("\n")
            if self._before:
                self._in = "rest"

    def _find_calls(self, *, ended: bool) -> None:
        form, text = self._form, self._rest
        while form is not None:
            start = text.find(form.opens, self._offset)
            if start < 0:
                break
            self._add_text(start)
            found = self._call(form, ended=ended)
            if found is not None:
                call, self._offset = found
                self._between, self._closes_from = "", self._offset
                self._parts.append(call)
                continue
            if not ended and not form.hopeless(text, start):
                return
            # the marker is text; a call may follow it
            self._ill_formed = True
            self._add_text(start + len(form.opens))
            self._closes_from = self._offset
        stop = len(text)
        if form is not None and not ended:
            stop -= overlap(text[self._offset :], form.opens)
        self._add_text(stop)

    def _call(self, form: ToolForm, *, ended: bool) -> tuple[Call, int] | None:
        """The call at the current position, if its end may have come."""
        closes_from = max(self._closes_from, self._offset + len(form.opens))
        self._closes_from = max(closes_from, len(self._rest) - len(form.closes) + 1)
        if not ended and self._rest.find(form.closes, closes_from) < 0:
            return None
        return form.read(self._rest, self._offset, self._tools)

    def _add_text(self, stop: int) -> None:
        text, self._offset = self._rest[self._offset : stop], stop
        if self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += text
        elif self._parts and not (self._between + text).strip(SPACE):
            self._between += text
        elif text:
            self._parts.append(self._between + text)
            self._between = ""


def parse(
    text: str, form: ToolForm | None, tools: Tools | None, *, opened: bool
) -> Parsed:
    """Parse a complete reply."""
    parser = Parser(form, tools, opened=opened)
    parser.feed(text)
    return parser.end()


def skip(text: str, offset: int) -> int:
    """Return the end of the white space at an offset."""
    while offset < len(text) and text[offset] in SPACE:
        offset += 1
    return offset


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may start a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)

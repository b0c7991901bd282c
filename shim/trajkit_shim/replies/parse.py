"""Splits a model's reply into reasoning, text and tool calls, also while it is sampled.

``<think>...</think>`` at the start is reasoning; if the prompt opened it, the reply
contains only its end. White space around it is dropped. The rest is text and calls in
the model's format (`replies.parsers`). A block that is not a valid call stays in the
text, and the reply is ill-formed.

While a reply is sampled, only what later ids cannot change is returned. So half a
character, the possible start of a stop string, of a tool call or of the end of reasoning,
and outer white space are withheld. The result is a prefix of the complete reply, however
the ids are grouped.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from trajkit_shim.chat.reply import Call, Parsed
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.attribution import Ids
from trajkit_shim.prompting.render import ChatRenderer

Tools: TypeAlias = Sequence[Json]
"""The offered tools, in OpenAI's format."""

ReadCall: TypeAlias = Callable[[str, int, Tools], tuple[Call, int] | None]
"""Returns the call at an offset of a text and its end, or None. A result must not change
when the text grows."""

SPACE = " \t\n\r"
THINK = "<think>"
END_THINK = "</think>"
# a reply that is one of these may begin with reasoning
_UNDECIDED = frozenset(THINK[:n] for n in range(len(THINK)))
# half a character decodes to this
_BROKEN = "\ufffd"


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
    read: ReadCall
    # a chat template that contains all of them uses this format
    known_by: tuple[str, ...] = ()


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
        self._text = ""  # of the reasoning, then of the rest of the reply
        self._ended = False
        self._reasoning: str | None = None
        # no two texts are adjacent; the last part may grow
        self._parts: list[str | Call] = []
        self._ill_formed = False
        self._offset = 0  # of the text that is in no part
        # each step needs more text than there was
        self._steps = self._parse(None if tools is None else form, tools or (), opened)

    def feed(self, piece: str) -> None:
        """Add text."""
        self._text += piece
        next(self._steps)

    def end(self) -> Parsed:
        """Return the complete reply; there is no more text."""
        self._ended = True
        self.feed("")
        return self.so_far()

    def so_far(self) -> Parsed:
        """Return the parts so far. Later text can only extend the last one."""
        # white space after a call is text only if no other call follows
        kept = {0, len(self._parts) - 1} if self._ended else {0}
        return Parsed(
            parts=tuple(
                part
                for i, part in enumerate(self._parts)
                if isinstance(part, Call) or part.strip(SPACE) or i in kept
            ),
            sampled=self._text,
            ill_formed=self._ill_formed,
            reasoning=self._reasoning,
        )

    def _parse(
        self, form: ToolForm | None, tools: Tools, opened: bool
    ) -> Iterator[None]:
        while not (opened or self._ended) and self._text.lstrip(SPACE) in _UNDECIDED:
            yield
        begun = self._text.lstrip(SPACE)
        if opened or begun.startswith(THINK):
            self._text = self._text if opened else begun.removeprefix(THINK)
            yield from self._skip_reasoning()
        while form is None:
            self._add_text(len(self._text))
            yield
        while True:
            start = self._text.find(form.opens, self._offset)
            if start < 0:
                begun = "" if self._ended else self._text[self._offset :]
                self._add_text(len(self._text) - overlap(begun, form.opens))
                yield
            else:
                self._add_text(start)
                yield from self._read_call(form, tools)

    def _skip_reasoning(self) -> Iterator[None]:
        closed = ""
        while not closed:
            inside, closed, rest = self._text.partition(END_THINK)
            if closed or self._ended:
                self._text = rest.lstrip("\n")
            else:
                inside = inside[: len(inside) - overlap(inside, END_THINK)]
            self._reasoning = inside.strip(SPACE) or None
            if not closed:
                yield
        while not self._text:
            yield
            self._text = self._text.lstrip("\n")

    def _read_call(self, form: ToolForm, tools: Tools) -> Iterator[None]:
        """Add the call whose marker is next; one that cannot be read is text."""
        closes_from = self._offset + len(form.opens)
        while True:
            closed = self._ended or self._text.find(form.closes, closes_from) >= 0
            found = form.read(self._text, self._offset, tools) if closed else None
            if found or self._ended:
                break
            closes_from = max(closes_from, len(self._text) - len(form.closes) + 1)
            yield
        if found is None:
            # only the marker is text; a call may follow it
            self._ill_formed = True
            self._add_text(self._offset + len(form.opens))
        else:
            call, self._offset = found
            self._parts.append(call)

    def _add_text(self, stop: int) -> None:
        text, self._offset = self._text[self._offset : stop], stop
        if self._parts and isinstance(self._parts[-1], str):
            self._parts[-1] += text
        elif text:
            self._parts.append(text)


def parse(
    text: str, form: ToolForm | None, tools: Tools | None, *, opened: bool
) -> Parsed:
    """Parse a complete reply."""
    parser = Parser(form, tools, opened=opened)
    parser.feed(text)
    return parser.end()


def overlap(text: str, mark: str) -> int:
    """Return how many characters at the end of a text may start a mark."""
    lengths = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(mark[:n])), 0)


@dataclass(slots=True)
class Decoder:
    """Decodes ids that come in groups."""

    _renderer: ChatRenderer
    ids: list[int] = field(default_factory=list)
    # text up to _done was returned; decoding starts at the group before, because some
    # tokenizers write the space before a word only after another word
    _start: int = 0
    _done: int = 0

    def feed(self, ids: Sequence[int]) -> str:
        """Return the text that these ids add, up to the last complete character."""
        self.ids += ids
        stop = len(self.ids)
        withheld = self._renderer.byte_ids.union(self._renderer.end_ids)
        while stop and self.ids[stop - 1] in withheld:
            stop -= 1
        if stop <= self._done:
            return ""
        text = self._decoded(stop)
        if text.endswith(_BROKEN):
            return ""
        before = self._decoded(self._done)
        self._start, self._done = self._done, stop
        return text.removeprefix(before)

    def _decoded(self, stop: int) -> str:
        window = np.array(self.ids[self._start : stop], np.int32)
        return self._renderer.decode(window, ended=False)


class IncrementalParser:
    """Parses a reply while its ids come; its client must not see the ``stop`` strings."""

    def __init__(
        self, renderer: ChatRenderer, parser: Parser, stop: Sequence[str]
    ) -> None:
        self._decoder = Decoder(renderer)
        self.ids = self._decoder.ids
        self._parser = parser
        self._stop = stop
        self._pending = ""  # decoded but not yet parsed
        self._last: tuple[object, object] = ((), None)

    def feed(self, ids: Sequence[int]) -> Parsed | None:
        """Return what is known now, or None if it is the same as before."""
        self._pending += self._decoder.feed(ids)
        # a stop string stays pending, with all that follows it
        found = [i for mark in self._stop if (i := self._pending.find(mark)) >= 0]
        begun = max((overlap(self._pending, mark) for mark in self._stop), default=0)
        certain = min(found, default=len(self._pending) - begun)
        self._parser.feed(self._pending[:certain])
        self._pending = self._pending[certain:]
        known = self._parser.so_far()
        shown = known.parts, known.reasoning
        if shown == self._last:
            return None
        self._last = shown
        return known

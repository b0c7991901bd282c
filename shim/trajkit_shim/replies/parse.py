"""Splits a model's reply into reasoning, text and tool calls.

Reasoning between two tags comes first; if the prompt opened it, the reply contains only
its end. White space around it is dropped. The rest is text and calls in the model's format
(`replies.parsers`). A block that is not a valid call stays in the text, and the reply is
ill-formed.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from trajkit_shim.chat.reply import Parsed, ToolCall
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.render import ChatRenderer, Ids

Tools: TypeAlias = Sequence[Json]
"""The offered tools, in OpenAI's format."""

ReadCalls: TypeAlias = Callable[[str, int, Tools], tuple[list[ToolCall], int] | None]
"""Returns the calls at an offset of a text and their end, or None."""

SPACE = " \t\n\r"
THINK = "<think>"
END_THINK = "</think>"
THOUGHTS = (("<seed:think>", "</seed:think>"), ("[THINK]", "[/THINK]"))
"""Tags of reasoning other than `THINK` and `END_THINK`."""
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
class ToolForm:
    """How a family of models writes tool calls."""

    name: str  # value of the command-line option
    starts: re.Pattern[str]  # of calls
    read: ReadCalls
    # splits a complete reply of another structure into reasoning and the rest
    split: Callable[[str], tuple[str, str]] | None = None
    # a chat template that contains all of them uses this format
    template_marks: tuple[str, ...] = ()
    grammar: CallForm | None = None  # None: no grammar can enforce calls


class ReplyParser(ABC):
    """Parses replies."""

    form: CallForm | None = None  # how a grammar writes calls; None: it cannot

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
    """The gateway's own parser, for one format of calls; None: calls are text."""

    def __init__(
        self, form: ToolForm | None, tags: tuple[str, str] = (THINK, END_THINK)
    ) -> None:
        self._form, self._tags = form, tags
        self.form = None if form is None else form.grammar

    async def parse(
        self, text: str, tools: Tools | None, prompt_ids: Ids, *, opened: bool
    ) -> Parsed:
        return parse(text, self._form, tools, opened=opened, tags=self._tags)


def tags_of(chat_template: str) -> tuple[str, str]:
    """Return the tags of reasoning that a chat template writes."""
    known = (tags for tags in THOUGHTS if tags[1] in chat_template)
    return next(known, (THINK, END_THINK))


def opens_reasoning(renderer: ChatRenderer, prompt_ids: Ids) -> bool:
    """Return whether a prompt ends within the reply's reasoning."""
    # "<think>\n" in single bytes, and a few more
    end = renderer.decode(prompt_ids[-16:], ended=False).rstrip()
    return end.endswith((THINK, *(tags[0] for tags in THOUGHTS)))


def parse(
    text: str,
    form: ToolForm | None,
    tools: Tools | None,
    *,
    opened: bool,
    tags: tuple[str, str] = (THINK, END_THINK),
) -> Parsed:
    """Parse a complete reply.

    Everything but calls is text, including its white space, except that white space
    between two calls is dropped. Without form or tools calls are text too.
    """
    if form is not None and form.split is not None:
        thought, rest = form.split(text)
    else:
        thought, rest = _without_reasoning(text, tags, opened)
    parts, ill_formed, offset = list[str | ToolCall](), False, 0

    def add_text(piece: str) -> None:
        if parts and isinstance(parts[-1], str):
            parts[-1] += piece
        elif piece:
            parts.append(piece)

    calls = form if tools is not None else None
    while calls is not None and (begun := calls.starts.search(rest, offset)):
        add_text(rest[offset : begun.start()])
        found = calls.read(rest, begun.start(), tools or ())
        if found is None:
            # only the marker is text; a call may follow it
            ill_formed, stop = True, max(begun.end(), begun.start() + 1)
            add_text(rest[begun.start() : stop])
            offset = stop
        else:
            parts += found[0]
            offset = found[1]
    add_text(rest[offset:])
    # white space after a call is text only if no other call follows
    kept = {0, len(parts) - 1}
    return Parsed(
        parts=tuple(
            part
            for i, part in enumerate(parts)
            if isinstance(part, ToolCall) or part.strip(SPACE) or i in kept
        ),
        sampled=rest,
        ill_formed=ill_formed,
        reasoning=thought.strip(SPACE) or None,
    )


def _without_reasoning(
    text: str, tags: tuple[str, str], opened: bool
) -> tuple[str, str]:
    opens, closes = tags
    begun = text.lstrip(SPACE)
    if not opened and not begun.startswith(opens):
        return "", text
    inside, closed, rest = (text if opened else begun.removeprefix(opens)).partition(
        closes
    )
    return inside, rest.lstrip("\n") if closed else ""


@dataclass(slots=True)
class Decoder:
    """Decodes ids that come one by one."""

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

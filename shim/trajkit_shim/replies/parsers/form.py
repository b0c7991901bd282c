"""Description of a format of tool calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trajkit_shim.json_input import Json

Tools: TypeAlias = Sequence[Json]
"""The offered tools, in OpenAI's format."""

SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name and its arguments as JSON text.

    If the format uses JSON, the text is exactly what was sampled.
    """

    name: str
    arguments: str


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
    read: Callable[[str, int, Tools], tuple[ToolCall, int] | None]
    lead: str = ""  # what must follow ``opens`` after white space; may be empty
    # a chat template that contains all of them uses this format
    known_by: tuple[str, ...] = ()

    def hopeless(self, text: str, offset: int) -> bool:
        """Return whether the text at ``offset`` can never become a call."""
        rest = text[skip(text, offset + len(self.opens)) :][: len(self.lead)]
        return not self.lead.startswith(rest)


def skip(text: str, offset: int) -> int:
    """Return the end of the white space at an offset."""
    while offset < len(text) and text[offset] in SPACE:
        offset += 1
    return offset

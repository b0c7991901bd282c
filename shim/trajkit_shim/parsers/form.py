"""What a form of tool calls is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from trajkit_shim.wire import Json

Tools: TypeAlias = Sequence[Json]
"""The tools that were offered, in OpenAI's form."""

SPACE = " \t\n\r"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call: the tool's name and its arguments as JSON text.

    Where the form has them as JSON, the text is the one that was sampled.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """How a family of models writes its calls.

    Parameters
    ----------
    name : str
        What an option calls it.
    opens : str
        Every call starts with it.
    lead : str
        What must follow that, after white space; may be empty.
    closes : str
        Every call ends with it, or with white space behind it.
    read : callable
        The call that starts at an offset of a text, and where it ends; None where there
        is none. What it finds in a text it finds in every text that begins so.
    known_by : tuple of str
        A chat template that holds all of them is of this form.
    """

    name: str
    opens: str
    closes: str
    read: Callable[[str, int, Tools], tuple[ToolCall, int] | None]
    lead: str = ""
    known_by: tuple[str, ...] = ()

    def hopeless(self, text: str, at: int) -> bool:
        """Whether what starts at ``at`` is no call however the text goes on."""
        rest = text[skip(text, at + len(self.opens)) :][: len(self.lead)]
        return not self.lead.startswith(rest)


def skip(text: str, at: int) -> int:
    """Where the white space at an offset ends."""
    while at < len(text) and text[at] in SPACE:
        at += 1
    return at

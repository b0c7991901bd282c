"""Text on a terminal: colours, characters that could do harm, and lines that fit."""

import os
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Fragment: TypeAlias = tuple[str, str]
"""A text and the name of its style."""

STYLES = {
    "trained": "32",
    "context": "2",
    "duplicate": "36",
    "untrainable": "33",
    "lost": "31",
    "head": "1",
    "special": "1;35",
    "fold": "2;3",
}
"""Styles, as parameters of ANSI's SGR."""

_LABEL = 12
# On narrower screens, a label has a line of its own.
_NARROW = 48


def visible(text: str) -> str:
    """The text with escapes for all characters that do not show or move others.

    Control characters, line breaks, marks of direction and lone surrogates become
    ``\\x1b``, ``\\n``, ``\\u202e`` and the like.

    Examples
    --------
    >>> visible("a\\x1b[2J\\u202eb")
    'a\\\\x1b[2J\\\\u202eb'
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode()
        for char in text
    )


def lines_of(text: str) -> str:
    """As `visible`, but a line break is marked and kept."""
    return "↵\n".join(visible(line) for line in text.split("\n"))


def columns(text: str) -> int:
    """Columns that a text takes on a terminal."""
    if text.isascii():
        return len(text)
    return sum(map(_char_columns, text))


def _char_columns(char: str) -> int:
    if unicodedata.category(char) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def shortened(text: str, most: int) -> str:
    """A visible text on one line, without its middle if it is long."""
    first, last = visible(text[:most]), visible(text[-most:])
    if len(text) <= most and len(first) <= most:
        return first
    half = most // 2
    return f"{first[:half]} ... {last[-half:]}"


@dataclass(frozen=True, slots=True)
class Screen:
    """Where text is printed."""

    colour: bool
    # columns of a line. None: lines are not broken, as for a pipe
    width: int | None

    @classmethod
    def of_stdout(cls, *, colour: bool) -> "Screen":
        """Standard output; colours only on a terminal that shows them, if allowed.

        The environment variable NO_COLOR forbids them (https://no-color.org).
        """
        if not sys.stdout.isatty():
            return cls(False, None)
        plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
        return cls(colour and not plain, shutil.get_terminal_size().columns)

    def print(self, line: str = "", style: str = "") -> None:
        """Print a line. What the encoding of standard output lacks is escaped."""
        encoding = sys.stdout.encoding or "utf-8"
        text = self._painted(line, style).encode(encoding, "backslashreplace")
        sys.stdout.write(text.decode(encoding) + "\n")

    def print_table(self, lines: Sequence[Sequence[str]]) -> None:
        """Print lines of cells in columns, the first line as a head."""
        widths = [max(map(columns, cells)) for cells in zip(*lines, strict=True)]
        for k, line in enumerate(lines):
            cells = zip(line, widths, strict=True)
            text = "  ".join(
                text + " " * (room - columns(text)) for text, room in cells
            )
            self.print(text.rstrip(), "" if k else "head")

    def print_labelled(self, label: str, fragments: Iterable[Fragment]) -> None:
        """Print text in lines that fit, after a label."""
        narrow = self.width is not None and self.width < _NARROW
        indent = 1 if narrow else _LABEL
        room = None if self.width is None else max(self.width - indent, 1)
        lead = label.ljust(indent)
        if narrow:
            self.print(label)
            lead = " "
        for line in _wrapped(fragments, room):
            text = "".join(self._painted(part, style) for part, style in line)
            self.print(lead + text)
            lead = " " * indent

    def _painted(self, text: str, style: str) -> str:
        if not self.colour or not text or style not in STYLES:
            return text
        return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def _wrapped(
    fragments: Iterable[Fragment], room: int | None
) -> Iterator[list[Fragment]]:
    """Lines of at most ``room`` columns, and at line breaks."""
    line: list[Fragment] = []
    used = 0
    for text, style in fragments:
        for k, part in enumerate(text.split("\n")):
            if k:
                yield line
                line, used = [], 0
            while room is not None and used + columns(part) > room:
                fit = _fitting(part, room - used)
                if not (fit or used):  # a character that is wider than the screen
                    fit = 1
                line.append((part[:fit], style))
                yield line
                line, used, part = [], 0, part[fit:]
            if part:
                line.append((part, style))
                used += columns(part)
    if line:
        yield line


def _fitting(text: str, room: int) -> int:
    """Number of characters that fit into ``room`` columns."""
    used = 0
    for k, char in enumerate(text):
        used += _char_columns(char)
        if used > room:
            return k
    return len(text)

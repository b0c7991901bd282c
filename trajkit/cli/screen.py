"""What people see: tables, colours, characters that could do harm, progress bars."""

import sys
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TypeAlias

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text
from rich.theme import Theme

from trajkit.cli import visible

Fragment: TypeAlias = tuple[str, str]
"""A text and the name of its style."""

STYLES = {
    "trained": "green",
    "context": "dim",
    "duplicate": "cyan",
    "untrainable": "yellow",
    "lost": "red",
    "head": "bold",
    "special": "bold magenta",
    "fold": "dim italic",
}


def share(part: int, whole: int) -> str:
    """``part`` of ``whole`` in percent; empty if ``whole`` is 0."""
    return f"{100 * part / whole:.1f} %" if whole else ""


def text_table(head: Sequence[str], lines: Iterable[Sequence[str | int]]) -> str:
    """Lines under a head; numbers are right-aligned, text is left-aligned and `visible`."""
    lines = [*lines]
    numbers = [isinstance(cell, int) for cell in (lines or [head])[0]]
    cells = [
        [f"{c:,}" if isinstance(c, int) else visible(c) for c in line] for line in lines
    ]
    widths = [max(map(cell_len, column)) for column in zip(head, *cells, strict=True)]
    shown = []
    for line in [head, ["-" * width for width in widths], *cells]:
        text = ""
        for cell, width, number in zip(line, widths, numbers, strict=True):
            space = " " * (width - cell_len(cell))
            text += f"{space}{cell}  " if number else f"{cell}{space}  "
        shown.append(text.rstrip())
    return "\n".join(shown)


class Screen:
    """Standard output; on a terminal, lines are coloured and broken to fit."""

    def __init__(self) -> None:
        theme = Theme(STYLES, inherit=False)
        self._console = Console(theme=theme, highlight=False, markup=False, emoji=False)
        # columns of a line. None: lines are not broken, as for a pipe
        self.width = self._console.width if sys.stdout.isatty() else None

    def print(self, line: str | Text = "", style: str = "") -> None:
        """Print a line."""
        text = line if isinstance(line, Text) else Text(line, style)
        self._console.print(text, soft_wrap=True)

    def labelled(self, label: str, fragments: Iterable[Fragment]) -> None:
        """Print text in lines that fit, after a label."""
        lead, width = label.ljust(12), self.width
        for line in Text.assemble(*fragments).split("\n"):
            pieces = [line.plain]
            if width is not None:
                pieces = chop_cells(line.plain, max(width - len(lead), 1))
            ends = [*accumulate(map(len, pieces))][:-1]
            # a character that is wider than the screen has no piece before it
            for part in line.divide([end for end in ends if end]):
                self.print(Text.assemble(lead, part))
                lead = " " * len(lead)


class Progress(Bar):
    """A bar on stderr, if that is a terminal; it is erased at the end.

    ``unit`` names what is counted, in the plural. Without a count, the bar only moves.
    """

    def __init__(self, label: str, unit: str = "") -> None:
        done = TextColumn(f"{{task.completed:,.0f}} {unit}")
        counted = (TaskProgressColumn(), done, TimeRemainingColumn(compact=True))
        super().__init__(
            TextColumn(label),
            BarColumn(),
            *(counted if unit else ()),
            console=Console(stderr=True),
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
            disable=not sys.stderr.isatty(),
        )
        self._only = self.add_task("", total=None)

    def begin(self, total: int, done: int = 0) -> None:
        """Start to count to ``total``; ``done`` were counted in an earlier run."""
        self.reset(self._only, total=total, completed=done)

    def count(self, n: int) -> None:
        """Count ``n`` more as done."""
        self.advance(self._only, n)

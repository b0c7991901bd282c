"""A progress bar on stderr, silent where nobody watches."""

import sys
from types import TracebackType
from typing import Self

WIDTH = 32


class Progress:
    """``label [####    ]  50 %`` on stderr, redrawn in place and gone at the end.

    Where stderr is no terminal, nothing is written at all.

    Parameters
    ----------
    label : str
        What is being done.
    total : int
        What `advance` adds up to.
    """

    def __init__(self, label: str, total: int) -> None:
        self._label = label
        self._total = total
        self._done = 0
        self._shown = -1

    def __enter__(self) -> Self:
        self.advance(0)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write("\r\x1b[K")

    def advance(self, n: int) -> None:
        """Count ``n`` more as done."""
        self._done += n
        percent = 100 * self._done // self._total if self._total else 100
        if percent == self._shown:
            return
        self._shown = percent
        bar = "#" * (WIDTH * percent // 100)
        self._write(f"\r{self._label} [{bar:<{WIDTH}}] {percent:3d} %")

    def _write(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(text)
            sys.stderr.flush()

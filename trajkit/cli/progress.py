"""A progress bar on stderr, silent where nobody watches."""

import sys
from collections.abc import Callable
from time import monotonic
from types import TracebackType
from typing import Self

WIDTH = 32

# How often the bar is drawn at most, in seconds.
_PAUSE_S = 0.1


class Progress:
    """``label [####    ]  50 %  1,234 turns/s  0:12 left``, redrawn in place.

    It is gone at the end. Where stderr is no terminal, nothing is written at all.

    Parameters
    ----------
    label : str
        What is being done.
    unit : str
        What is counted, in the plural.
    clock : function, optional
        Seconds from any point on.
    """

    def __init__(
        self, label: str, unit: str, clock: Callable[[], float] = monotonic
    ) -> None:
        self._label, self._unit, self._clock = label, unit, clock
        self._total = self._before = self._done = 0
        self._start = clock()
        self._shown = float("-inf")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write("\r\x1b[K")

    def begin(self, total: int, done: int = 0) -> None:
        """Count from here, of a total of which so much is done already."""
        self._total, self._before, self._done = total, done, done
        self._start = self._clock()
        self.advance(0)

    def advance(self, n: int) -> None:
        """Count ``n`` more as done."""
        self._done += n
        now = self._clock()
        if now - self._shown < _PAUSE_S and self._done < self._total:
            return
        self._shown = now
        percent = 100 * self._done // self._total if self._total else 100
        bar = "#" * (WIDTH * percent // 100)
        text = f"\r{self._label} [{bar:<{WIDTH}}] {percent:3d} %"
        here, taken = self._done - self._before, now - self._start
        if here and taken > 0:
            rate = here / taken
            left = round((self._total - self._done) / rate)
            text += f"  {rate:,.0f} {self._unit}/s  {left // 60}:{left % 60:02d} left"
        self._write(f"{text}\x1b[K")

    def _write(self, text: str) -> None:
        if sys.stderr.isatty():
            sys.stderr.write(text)
            sys.stderr.flush()

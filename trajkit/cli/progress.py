"""A progress bar on stderr, if that is a terminal."""

import sys
from collections.abc import Callable
from time import monotonic
from typing import Self

WIDTH = 32

# seconds between two updates, at least
_PAUSE_S = 0.1


class Progress:
    """``label [####    ]  50 %  1,234 turns/s  0:12 left``, redrawn in place.

    It is erased at the end. Nothing is written if stderr is not a terminal. ``unit`` names
    what is counted, in the plural; ``clock`` returns seconds since any fixed time.
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

    def __exit__(self, *_: object) -> None:
        self._write("\r\x1b[K")

    def begin(self, total: int, done: int = 0) -> None:
        """Start to count to ``total``; ``done`` were counted in an earlier run."""
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

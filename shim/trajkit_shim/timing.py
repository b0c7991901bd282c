"""How long the gateway itself takes for a turn, apart from its engine.

Two durations are kept per turn: the time from the request's arrival to the last byte of
its answer without the engine, and the processor time of the gateway's own steps, which
waiting for other calls does not increase.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial

import numpy as np

# number of turns to keep
_KEPT = 100_000


@dataclass(slots=True)
class Timing:
    """Of one request."""

    began: float = field(default_factory=time.perf_counter)
    busy: float = 0.0  # processor seconds of the gateway's steps
    # seconds at the engine; 0: it joined a call, or got an earlier reply
    engine: float = 0.0


# of the request that a task serves; the default is for tasks without one
current: ContextVar[Timing] = ContextVar("timing", default=Timing())  # noqa: B039


@contextmanager
def _timed(clock: Callable[[], float], name: str) -> Iterator[None]:
    timing, start = current.get(), clock()
    try:
        yield
    finally:
        setattr(timing, name, getattr(timing, name) + clock() - start)


step = partial(_timed, time.thread_time, "busy")
"""Time a step of the gateway that does not await, as context manager or decorator."""

engine = partial(_timed, time.perf_counter, "engine")
"""Time the engine's work on the call."""


class Timings:
    """Durations of the latest turns of a gateway."""

    def __init__(self) -> None:
        self._turns: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)

    def add(self, timing: Timing) -> None:
        """Add a request whose last byte was sent, if it was sampled."""
        if timing.engine:
            total = time.perf_counter() - timing.began
            self._turns.append((total - timing.engine, timing.busy, timing.engine))

    def spans(self) -> dict[str, dict[str, float]]:
        """Return median and 99th percentile in milliseconds, if there is a turn."""
        if not self._turns:
            return {}
        times = np.percentile(np.array(self._turns) * 1e3, [50, 99], axis=0)
        names = "gateway_ms", "busy_ms", "engine_ms"
        return {
            name: dict(zip(("median", "p99"), column.round(3).tolist(), strict=True))
            for name, column in zip(names, times.T, strict=True)
        }

    def describe(self) -> dict[str, object]:
        """Return the number of turns, and their durations."""
        return {"turns": len(self._turns), **self.spans()}

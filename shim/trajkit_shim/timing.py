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
    engine: float = 0.0  # seconds at the engine
    # it started a call, rather than joining one or getting an earlier reply
    sampled: bool = False


_current: ContextVar[Timing | None] = ContextVar("timing", default=None)


def begin() -> Timing:
    """Time the request that this task serves, and the tasks it starts."""
    timing = Timing()
    _current.set(timing)
    return timing


def sampled() -> None:
    """Note that the request started a call."""
    timing = _current.get()
    if timing is not None:
        timing.sampled = True


@contextmanager
def _timed(clock: Callable[[], float], name: str) -> Iterator[None]:
    timing = _current.get()
    start = clock()
    try:
        yield
    finally:
        if timing is not None:
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
        """Add a request whose last byte was sent."""
        if timing.sampled:
            total = time.perf_counter() - timing.began
            self._turns.append((total - timing.engine, timing.busy, timing.engine))

    def describe(self) -> dict[str, object]:
        """Return median and 99th percentile in milliseconds, for the admin route."""
        times = np.array(self._turns).reshape(-1, 3) * 1e3
        shown: dict[str, object] = {"turns": len(times)}
        for name, column in zip(("gateway", "busy", "engine"), times.T, strict=True):
            if len(column):
                median, late = np.percentile(column, [50, 99])
                shown[f"{name}_ms"] = {
                    "median": round(float(median), 3),
                    "p99": round(float(late), 3),
                }
        return shown

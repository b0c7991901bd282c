"""How long the gateway itself takes over a turn, beside its engine.

Of a turn two times are kept: what passed between the request's arrival and the last byte
of its answer, the engine aside; and the processor time of the steps of the gateway's own
within that, which waiting for other calls does not lengthen.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import numpy as np

# turns that are remembered
_KEPT = 100_000


@dataclass(slots=True)
class Timing:
    """Of one request."""

    began: float = field(default_factory=time.perf_counter)
    # processor seconds in the steps of the gateway
    busy: float = 0.0
    # seconds that the engine took
    engine: float = 0.0
    # it began a call, and was neither joined to one nor answered again
    sampled: bool = False


_current: ContextVar[Timing | None] = ContextVar("timing", default=None)


def begin() -> Timing:
    """Time the request that this task serves, and what it starts."""
    timing = Timing()
    _current.set(timing)
    return timing


def sampled() -> None:
    """The request has begun a call."""
    timing = _current.get()
    if timing is not None:
        timing.sampled = True


@contextmanager
def step() -> Iterator[None]:
    """A step of the gateway's own, which does not await."""
    timing = _current.get()
    start = time.thread_time()
    try:
        yield
    finally:
        if timing is not None:
            timing.busy += time.thread_time() - start


@contextmanager
def engine() -> Iterator[None]:
    """The engine works on the call."""
    timing = _current.get()
    start = time.perf_counter()
    try:
        yield
    finally:
        if timing is not None:
            timing.engine += time.perf_counter() - start


class Timings:
    """Of the last turns of a gateway."""

    def __init__(self) -> None:
        self._turns: deque[tuple[float, float, float]] = deque(maxlen=_KEPT)

    def add(self, timing: Timing) -> None:
        """Take a request whose last byte was sent."""
        if timing.sampled:
            total = time.perf_counter() - timing.began
            self._turns.append((total - timing.engine, timing.busy, timing.engine))

    def describe(self) -> dict[str, object]:
        """Median and 99th percentile in milliseconds, as ``GET /admin/timings`` shows."""
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

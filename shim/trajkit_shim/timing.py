"""How long the gateway itself takes for a turn, apart from its engine.

Two durations are kept per turn: the time from the request's arrival to the last byte of
its answer without the engine, and the processor time of the gateway's own steps, which
waiting for other calls does not increase.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import numpy as np


class Clock(Protocol):
    """Measures idle sessions and pauses, such as an event loop."""

    def time(self) -> float:
        """Seconds since an arbitrary moment."""
        ...

    def call_later(
        self, delay: float, callback: Callable[[], object], /
    ) -> asyncio.TimerHandle:
        """Schedule a call in ``delay`` seconds."""
        ...


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


# of the request that a task serves; the default is for tasks without one
current: ContextVar[Timing] = ContextVar("timing", default=Timing())  # noqa: B039


def begin() -> Timing:
    """Time the request that this task serves, and the tasks it starts."""
    timing = Timing()
    current.set(timing)
    return timing


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
        """Add a request whose last byte was sent."""
        if timing.sampled:
            total = time.perf_counter() - timing.began
            self._turns.append((total - timing.engine, timing.busy, timing.engine))

    def describe(self) -> dict[str, object]:
        """Return median and 99th percentile in milliseconds, for the admin route."""
        shown: dict[str, object] = {"turns": len(self._turns)}
        if self._turns:
            times = np.percentile(np.array(self._turns) * 1e3, [50, 99], axis=0)
            for name, column in zip(
                ("gateway", "busy", "engine"), times.T, strict=True
            ):
                median, late = column.round(3).tolist()
                shown[f"{name}_ms"] = {"median": median, "p99": late}
        return shown

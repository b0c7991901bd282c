"""The clock that measures idle sessions and pauses."""

import asyncio
from collections.abc import Callable
from typing import Protocol


class Clock(Protocol):
    """A source of time, such as an event loop."""

    def time(self) -> float:
        """Seconds since an arbitrary moment."""
        ...

    def call_later(
        self, delay: float, callback: Callable[[], object], /
    ) -> asyncio.TimerHandle:
        """Schedule a call in ``delay`` seconds."""
        ...

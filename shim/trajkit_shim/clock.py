"""The time that sessions and pauses are measured by."""

from collections.abc import Callable
from typing import Protocol


class Handle(Protocol):
    """Of a callback that was arranged."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """What time is measured by; an event loop is one."""

    def time(self) -> float:
        """Seconds from any moment on."""
        ...

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Handle:
        """Have it called so many seconds from now."""
        ...

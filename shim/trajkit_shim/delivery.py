"""Whether the answer of a recorded turn reached a client.

A turn is recorded before its answer is sent. The answer counts as delivered once its
last byte was handed to the operating system on an open connection. A turn whose answer
was lost is amended to be context only; if the answer is sent again and arrives, the turn
is amended back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trajkit_shim.chat.reply import Reply

Amend = Callable[[str, bool | None], None]
"""Writes an amendment: its reason, and whether the turn is trainable (None: as the turn
itself states)."""


@dataclass(slots=True)
class Attempt:
    """One connection on which the answer is sent."""

    reached: bool = False


class Delivery:
    """The delivery of one turn's answer, over all its connections."""

    def __init__(self, amend: Amend) -> None:
        self._amend = amend
        self._running = 0
        self._reached = False
        self._lost = False

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """Send the answer in this context; set ``reached`` when it has arrived."""
        attempt = Attempt()
        self._running += 1
        try:
            yield attempt
        finally:
            self._running -= 1
            self._note(attempt.reached)

    def _note(self, reached: bool) -> None:
        if reached and not self._reached:
            self._reached = True
            if self._lost:
                self._amend("delivered", None)
        elif not (self._reached or self._lost or self._running):
            self._amend("undelivered", False)
            self._lost = True


@dataclass(frozen=True, slots=True)
class Answered:
    """The reply of a recorded turn, and its delivery to the client."""

    reply: Reply
    delivery: Delivery

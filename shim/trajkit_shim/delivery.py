"""Whether the answer of a recorded turn reached a client.

A turn is on disk before its answer is sent, and whether the answer arrived is known a
moment later: it did once its last byte was handed to the operating system on a
connection that was open. A turn whose answer was lost is amended to be context only; one
whose answer is given again, and arrives, is amended back.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trajkit_shim.reply import Reply

Amend = Callable[[str, bool | None], None]
"""Writes an amendment: its reason, and whether the turn is trainable (None: as it says
itself)."""


@dataclass(slots=True)
class Attempt:
    """One connection that the answer is sent on."""

    reached: bool = False


class Delivery:
    """The fate of one turn's answer, over all connections that it is sent on.

    Parameters
    ----------
    amend : callable
        Writes an amendment of the turn.
    """

    def __init__(self, amend: Amend) -> None:
        self._amend = amend
        self._under_way = 0
        self._reached = False
        self._lost = False

    @contextmanager
    def attempt(self) -> Iterator[Attempt]:
        """Send the answer inside; say so where it has arrived."""
        attempt = Attempt()
        self._under_way += 1
        try:
            yield attempt
        finally:
            self._under_way -= 1
            self._note(attempt.reached)

    def _note(self, reached: bool) -> None:
        if reached and not self._reached:
            self._reached = True
            if self._lost:
                self._amend("delivered", None)
        elif not (self._reached or self._lost or self._under_way):
            self._amend("undelivered", False)
            self._lost = True


@dataclass(frozen=True, slots=True)
class Answered:
    """The reply of a recorded turn, and its way to the client."""

    reply: Reply
    delivery: Delivery

"""Whether the answer of a recorded turn reached a client.

A turn is recorded before its answer is sent. The answer counts as delivered once its
last byte was handed to the operating system on an open connection. A turn whose answer
was lost is amended to be context only; if the answer is sent again and arrives, the turn
is amended back. The same holds for a turn whose request came again although the answer
counts as delivered, until a request contains the answer.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic

from trajkit_shim.chat.reply import Reply

Amend = Callable[[str, bool | None], None]
"""Writes an amendment: its reason, and whether the turn is trainable (None: as the turn
itself states)."""


@dataclass(slots=True)
class Attempt:
    """One connection on which the answer is sent."""

    reached: bool = False


class Delivery:
    """The delivery of one turn's answer, over all its connections.

    ``time`` is a clock. ``reached_at`` is when the answer first arrived, ``confirmed``
    whether a request contained it.
    """

    def __init__(self, amend: Amend, time: Callable[[], float] = monotonic) -> None:
        self.reached_at: float | None = None
        self.confirmed = False
        self._amend = amend
        self._time = time
        self._retried = False
        self._running = 0
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
        if reached and self.reached_at is None:
            self.reached_at = self._time()
            if self._lost:
                self._amend("delivered", None)
        elif self.reached_at is None and not (self._lost or self._running):
            self._amend("undelivered", False)
            self._lost = True

    def retry(self) -> None:
        """Exclude the turn from training: its request came again."""
        self._retried = True
        self._amend("retried", False)

    def confirm(self) -> None:
        """Note that a request contains the answer."""
        self.confirmed = True
        if self._retried:
            self._retried = False
            self._amend("continued", None)


@dataclass(frozen=True, slots=True)
class Answered:
    """The reply of a recorded turn, and its delivery to the client."""

    request_id: str  # of the turn
    # after each of its replies (`prompting.reply_matching`)
    positions: tuple[bytes, ...]
    reply: Reply
    delivery: Delivery

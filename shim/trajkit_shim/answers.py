"""The answer of a call: whether it reached a client, and who asks for it again.

A turn is recorded before its answer is sent. The answer counts as delivered once its
last byte was handed to the operating system on an open connection. A turn whose answer
was lost is amended to be context only; if the answer is sent again and arrives, the turn
is amended back. The same holds for a turn whose request came again although the answer
counts as delivered, until a request contains the answer.

A client whose connection broke sends its request again. If a header marks it as a retry,
or the session was opened with ``replay``, the request joins the call that is still
running or gets the recorded reply, rather than a new sample. Any other request whose
bytes equal an earlier one is sampled, and its turn names the earlier one. It is an
unmarked retry if the reply to the latest equal one was delivered at most
`UNMARKED_SECONDS` before, and no request has contained that reply since.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from time import monotonic
from typing import Any

from trajkit_shim.chat.reply import Reply

KEPT = 8
"""Number of a session's latest replies that can be sent again."""

UNMARKED_SECONDS = 60.0
"""How long after the delivery of its reply a request is an unmarked retry. Claude Code
waits up to 38 seconds (spec: engines-and-clients 6.1)."""

_KEPT_DELIVERIES = 256

# the retry count of OpenAI's and Anthropic's clients
_RETRY_HEADER = "x-stainless-retry-count"


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return whether the headers mark a request as a retry."""
    count = headers.get(_RETRY_HEADER, "0")
    return count.isdecimal() and count.strip("0") != ""


def request_digest(endpoint: str, body: bytes) -> bytes:
    """Return a 16-byte digest of a request."""
    return blake2b(endpoint.encode() + b"\0" + body, digest_size=16).digest()


Amend = Callable[[str, bool | None], None]
"""Writes an amendment: its reason, and whether the turn is trainable (None: as the turn
itself states)."""


@dataclass(slots=True)
class Attempt:
    """One connection on which the answer is sent."""

    reached: bool = False


@dataclass(slots=True)
class Delivery:
    """The delivery of one turn's answer, over all its connections."""

    _amend: Amend
    _time: Callable[[], float] = monotonic
    reached_at: float | None = None  # when the answer first arrived
    confirmed: bool = False  # a request contained the answer
    _retried: bool = False
    _running: int = 0
    _lost: bool = False

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


class SharedCall:
    """One model call, and the connections that wait for it.

    ``prepare``: prepares the call, and reports longer and longer beginnings of its reply;
    cancelled when the last connection leaves. ``record``: records the prepared call and
    returns its reply, or raises. ``over``: called, possibly more than once, when the call
    was recorded, failed, or lost its last connection.
    """

    def __init__(
        self,
        prepare: Callable[[Callable[[Reply], None]], Coroutine[Any, Any, Any]],
        record: Callable[[], Answered],
        over: Callable[[], None],
    ) -> None:
        self.partial: Reply | None = None  # what is known of the reply
        self._grown = asyncio.Event()
        self._record, self._over = record, over
        self._n_waiting = 0
        self._outcome: Answered | Exception | None = None
        self.work = asyncio.create_task(prepare(self._update))

    def _update(self, reply: Reply) -> None:
        self.partial = reply
        self._grown.set()
        self._grown = asyncio.Event()

    async def wait(
        self, left: "asyncio.Task[None]", seen: Reply | None, seconds: float | None
    ) -> bool:
        """Return whether the work or the task ``left`` ended within that time.

        Returns early if more of the reply is known than ``seen``.
        """
        if self.partial is seen:
            grown = asyncio.create_task(self._grown.wait())
            try:
                await asyncio.wait(
                    {self.work, left, grown},
                    timeout=seconds,
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                grown.cancel()
        return self.work.done() or left.done()

    def finish(self) -> Answered:
        """Return the reply of the call, whose work is done; record it the first time.

        Raises `GatewayError`: the call failed, or could not be recorded.
        """
        if self._outcome is None:
            try:
                self._outcome = self._record()
            except Exception as error:
                # it may have been recorded in part
                self._outcome = error
            finally:
                self._over()
        if isinstance(self._outcome, Answered):
            return self._outcome
        raise self._outcome

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """Wait for the call in this context; the last one to leave cancels its work."""
        self._n_waiting += 1
        try:
            yield
        finally:
            self._n_waiting -= 1
            if not self._n_waiting:
                self.work.cancel()
                await asyncio.gather(self.work, return_exceptions=True)
                self._over()


@dataclass(slots=True)
class RetryIndex:
    """The requests of one session, by `request_digest`."""

    running: dict[bytes, SharedCall] = field(default_factory=dict)
    # of the first turn with each request
    request_ids: dict[bytes, str] = field(default_factory=dict)
    _replies: OrderedDict[bytes, Answered] = field(default_factory=OrderedDict)
    # of the latest replies, by the position after them
    _deliveries: OrderedDict[bytes, Delivery] = field(default_factory=OrderedDict)

    def again(self, digest: bytes) -> SharedCall | Answered | None:
        """Return the kept reply to an equal request, or the call that still runs."""
        return self._replies.get(digest) or self.running.get(digest)

    def retried(self, digest: bytes, now: float) -> Answered | None:
        """Return the reply that an unmarked retry asks for again, if it is one.

        A request that contains the reply may still come (`Delivery.confirmed`).
        """
        known = self._replies.get(digest)
        at = None if known is None else known.delivery.reached_at
        return known if at is not None and now - at <= UNMARKED_SECONDS else None

    def confirm(self, position: bytes) -> None:
        """Note that a request contains the reply before a position as its last."""
        if position in self._deliveries:
            self._deliveries[position].confirm()

    def remember(self, digest: bytes, reply: Answered) -> None:
        """Keep the reply to a request."""
        self.request_ids.setdefault(digest, reply.request_id)
        self._replies[digest] = reply
        self._replies.move_to_end(digest)
        self._deliveries |= dict.fromkeys(reply.positions, reply.delivery)
        for kept, most in (self._replies, KEPT), (self._deliveries, _KEPT_DELIVERIES):
            while len(kept) > most:
                kept.popitem(last=False)

    def clear(self) -> None:
        """Forget everything."""
        self._replies.clear()
        self._deliveries.clear()
        self.request_ids.clear()

"""Requests that are sent again: retries of a call, and repeated questions.

A client whose connection broke sends its request again. If a header marks it as a retry,
or the session was opened with ``replay``, the request joins the call that is still
running or gets the recorded reply, rather than a new sample. Any other request whose
bytes equal an earlier one is sampled, and its turn names the earlier one.

Such a request is an unmarked retry if the reply to the latest equal one was delivered at
most `UNMARKED_SECONDS` before, and no request has contained that reply since.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from trajkit_shim.chat.reply import Reply
from trajkit_shim.delivery import Answered, Delivery

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


class PartialReply:
    """The known part of a reply that is being sampled."""

    def __init__(self) -> None:
        self.reply: Reply | None = None  # a prefix of every later value
        self._changed = asyncio.Event()

    def update(self, reply: Reply) -> None:
        """Set a longer reply and wake those who wait."""
        self.reply = reply
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def wait_beyond(self, seen: Reply | None) -> None:
        """Return once there is more than ``seen``."""
        if self.reply is seen:
            await self._changed.wait()


@dataclass(eq=False, slots=True)
class SharedCall:
    """One model call, and the connections that wait for it."""

    # prepares the call; cancelled when the last connection leaves
    work: "asyncio.Task[Any]"
    # records the finished call and returns its reply, or raises
    record: Callable[[], Answered]
    # called, possibly more than once, when the call was recorded, failed, or lost its last
    # connection
    over: Callable[[], None]
    partial: PartialReply  # what is known of the reply before that
    _waiting: int = 0
    _outcome: Answered | Exception | None = None

    def finish(self) -> Answered:
        """Return the reply of the call, whose work is done; record it the first time.

        Raises `GatewayError`: the call failed, or could not be recorded.
        """
        if self._outcome is None:
            try:
                self._outcome = self.record()
            except Exception as error:
                # it may have been recorded in part
                self._outcome = error
            finally:
                self.over()
        if isinstance(self._outcome, Answered):
            return self._outcome
        raise self._outcome

    def join(self) -> None:
        """Add a waiting connection."""
        self._waiting += 1

    async def leave(self) -> None:
        """Remove a waiting connection; cancel the work with the last one."""
        self._waiting -= 1
        if not self._waiting:
            self.work.cancel()
            await asyncio.gather(self.work, return_exceptions=True)
            self.over()


@dataclass(slots=True)
class RetryIndex:
    """The requests of one session, by `request_digest`."""

    running: dict[bytes, SharedCall] = field(default_factory=dict)
    _replies: OrderedDict[bytes, Answered] = field(default_factory=OrderedDict)
    # of the latest replies, by the position after them
    _deliveries: OrderedDict[bytes, Delivery] = field(default_factory=OrderedDict)
    _request_ids: dict[bytes, str] = field(default_factory=dict)

    def reply(self, digest: bytes) -> Answered | None:
        """Return the reply to an equal request, if it is still kept."""
        return self._replies.get(digest)

    def earlier(self, digest: bytes) -> str | None:
        """Return the ``request_id`` of the first turn with an equal request."""
        return self._request_ids.get(digest)

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
        self._request_ids.setdefault(digest, reply.request_id)
        self._replies[digest] = reply
        self._replies.move_to_end(digest)
        self._deliveries |= dict.fromkeys(reply.positions, reply.delivery)
        for kept, most in (self._replies, KEPT), (self._deliveries, _KEPT_DELIVERIES):
            while len(kept) > most:
                kept.popitem(last=False)

    def clear(self) -> None:
        """Forget everything except the count."""
        self._replies.clear()
        self._deliveries.clear()
        self._request_ids.clear()

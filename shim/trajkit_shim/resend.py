"""A request that comes again: what of it is a retry, and what is asked a second time.

A client whose connection broke sends its request once more. Where it says so by a
header, or the session was opened for clients that don't, the request joins the call that
is still under way or gets the reply that was recorded: the same one, not a sibling.
Any other request that is equal to an earlier one to the byte is sampled, and its turn
names the earlier one.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b

from trajkit_shim.call import PreparedCall
from trajkit_shim.delivery import Answered
from trajkit_shim.engine import EngineError
from trajkit_shim.errors import GatewayError
from trajkit_shim.growth import Growth

KEPT = 8
"""Replies of a session that can be given again: its last ones."""

# what the clients of OpenAI and Anthropic count their retries in
_RETRY_HEADER = "x-stainless-retry-count"


def says_retry(headers: Mapping[str, str]) -> bool:
    """Whether a request's headers say that it was sent before."""
    count = headers.get(_RETRY_HEADER, "0")
    return count.isdecimal() and count.strip("0") != ""


def request_digest(place: str, body: bytes) -> bytes:
    """16 bytes that stand for what a request asks for, and where."""
    return blake2b(place.encode() + b"\0" + body, digest_size=16).digest()


class SharedCall:
    """One model call, and the connections that wait for it.

    Parameters
    ----------
    work : task
        Prepares the call. It is cancelled when the last connection leaves.
    record : callable
        Records the call, whose work is done, and gives its reply; or raises.
    over : callable
        Called once the call was recorded, failed, or lost its last connection; also
        again.
    growth : Growth
        What can be told of the reply before that.
    """

    def __init__(
        self,
        work: "asyncio.Task[PreparedCall]",
        record: Callable[[], Answered],
        over: Callable[[], None],
        growth: Growth,
    ) -> None:
        self.work = work
        self.growth = growth
        self._record = record
        self._over = over
        self._waiting = 0
        self._outcome: Answered | GatewayError | EngineError | None = None

    def finish(self) -> Answered:
        """The reply of the call, whose work is done; the first who asks records it.

        Raises
        ------
        GatewayError, EngineError
            The call failed, or could not be recorded.
        """
        if self._outcome is None:
            try:
                self._outcome = self._record()
            except (GatewayError, EngineError) as error:
                self._outcome = error
            finally:
                self._over()
        if isinstance(self._outcome, Answered):
            return self._outcome
        raise self._outcome

    def join(self) -> None:
        """One more connection waits."""
        self._waiting += 1

    async def leave(self) -> None:
        """A connection waits no longer. The work ends with the last one."""
        self._waiting -= 1
        if not self._waiting:
            self.work.cancel()
            await asyncio.gather(self.work, return_exceptions=True)
            self._over()


@dataclass(slots=True)
class Resends:
    """What was asked in one session, by `request_digest`."""

    under_way: dict[bytes, SharedCall] = field(default_factory=dict)
    # requests that were answered again, or joined one under way
    replayed: int = 0
    _replies: OrderedDict[bytes, Answered] = field(default_factory=OrderedDict)
    _request_ids: dict[bytes, str] = field(default_factory=dict)

    def reply(self, digest: bytes) -> Answered | None:
        """The reply that such a request got, while it is kept."""
        return self._replies.get(digest)

    def earlier(self, digest: bytes) -> str | None:
        """The ``request_id`` of the first turn that was asked for so."""
        return self._request_ids.get(digest)

    def remember(self, digest: bytes, request_id: str, reply: Answered) -> None:
        """Keep what a request got."""
        self._request_ids.setdefault(digest, request_id)
        self._replies[digest] = reply
        self._replies.move_to_end(digest)
        while len(self._replies) > KEPT:
            self._replies.popitem(last=False)

    def clear(self) -> None:
        """Forget all but the count."""
        self._replies.clear()
        self._request_ids.clear()

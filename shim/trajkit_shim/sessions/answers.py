"""The answer of a call: whether it reached a client, and who asks for it again.

A turn is recorded before its answer is sent. The answer counts as delivered once its
last byte was handed to the operating system on an open connection. A turn whose answer
was lost is amended to be context only; if the answer is sent again and arrives, the turn
is amended back.

A client whose connection broke sends its request again. If a header marks it as a retry,
or the session was opened with ``replay``, the request joins the call that is still
running or gets the recorded reply, rather than a new sample. Any other request whose
bytes equal an earlier one is sampled, and its turn names the earlier one.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from trajkit_shim.chat.reply import Reply
from trajkit_shim.errors import GatewayError

KEPT = 32
"""Number of a session's latest answers that can be sent again or amended."""

# the retry count of OpenAI's and Anthropic's clients
_RETRY_HEADER = "x-stainless-retry-count"

Amend: TypeAlias = Callable[[Sequence[int], str, bool | None], None]
"""Writes an amendment: indices of turns, its reason, and whether they are trainable
(None: as each turn itself states)."""


@dataclass(kw_only=True, eq=False)
class Amounts:
    """What a session has used of its limits, or what a running call may use.

    A running call reserves it, so that concurrent calls together never use more than the
    session has left.
    """

    answered: int = 0  # turns with an answer
    prompt_tokens: int = 0
    output_tokens: int = 0


def is_retry(headers: Mapping[str, str]) -> bool:
    """Return whether the headers mark a request as a retry."""
    count = headers.get(_RETRY_HEADER, "0")
    return count.isdecimal() and count.strip("0") != ""


def request_digest(endpoint: str, body: bytes) -> bytes:
    """Return a 16-byte digest of a request."""
    return blake2b(endpoint.encode() + b"\0" + body, digest_size=16).digest()


class SharedCall:
    """One call, and the connections that wait for its answer.

    ``run``: samples and records the call, sets the attributes of a recorded one, and
    returns its reply; cancelled when the last connection leaves.
    """

    # of a recorded call: its turn and the id of its request
    turn: int | None = None
    request_id: str

    def __init__(
        self,
        run: "Callable[[SharedCall], Coroutine[Any, Any, Reply]]",
        amend: Amend,
        digest: bytes,
        reserved: Amounts,
    ) -> None:
        self.digest, self.reserved = digest, reserved
        self._amend = amend
        self._n_connections = 0
        self._ended: GatewayError | None = None
        # the answer has arrived, or every connection was lost before that
        self._reached = self._lost = False
        self.work = asyncio.create_task(run(self))

    def end(self, error: GatewayError) -> None:
        """Let the call fail, unless it is recorded or has failed."""
        if self.work.cancel():
            self._ended = error

    def result(self) -> Reply:
        """Return the reply once the work is done; raises `GatewayError` if it failed."""
        if self._ended is not None:
            raise self._ended
        return self.work.result()

    @asynccontextmanager
    async def joined(self) -> AsyncIterator[None]:
        """Wait for the answer in this context; call `reached` when it has arrived.

        The last connection that leaves cancels the work. A recorded answer is lost then
        if it reached none.
        """
        self._n_connections += 1
        try:
            yield
        finally:
            self._n_connections -= 1
            if not self._n_connections:
                if self.turn is None:
                    self.work.cancel()
                    await asyncio.gather(self.work, return_exceptions=True)
                if self.turn is not None and not (self._reached or self._lost):
                    self._lost = True
                    self._amend([self.turn], "undelivered", False)

    def reached(self) -> None:
        """Note that the answer has arrived on a connection."""
        if not self._reached:
            self._reached = True
            if self._lost:
                assert self.turn is not None
                self._amend([self.turn], "delivered", None)

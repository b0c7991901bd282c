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
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, TypeAlias

from trajkit_shim.chat.reply import Reply
from trajkit_shim.errors import GatewayError

KEPT = 32
"""Number of a session's latest answers that can be sent again or amended."""

UNMARKED_SECONDS = 60.0
"""How long after the delivery of its reply a request is an unmarked retry. Claude Code
2.1.197 waits up to 38 seconds."""

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
    returns its reply; cancelled when the last connection leaves. It may report longer and
    longer beginnings of the reply to `update`.
    """

    # of a recorded call: its turns that have an answer, the id of the first one, and the
    # position after each reply (`prompting.reply_matching`)
    turns: Sequence[int] = ()
    request_id: str
    positions: Sequence[bytes] = ()

    def __init__(
        self,
        run: "Callable[[SharedCall], Coroutine[Any, Any, Reply]]",
        amend: Amend,
        time: Callable[[], float],
        digest: bytes,
        reserved: Amounts,
    ) -> None:
        self.digest, self.reserved = digest, reserved
        self._amend, self._time = amend, time
        self.partial: Reply | None = None  # what is known of the reply
        self.grown = asyncio.get_running_loop().create_future()
        self._n_connections = 0
        self._ended: GatewayError | None = None
        self.reached_at: float | None = None  # when the answer first arrived
        self.confirmed = False  # a request contained the answer
        self._lost = self._retried = False
        self.work = asyncio.create_task(run(self))

    def update(self, reply: Reply) -> None:
        """Set what is known of the reply."""
        self.partial = reply
        self.grown.set_result(None)
        self.grown = asyncio.get_running_loop().create_future()

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
                if not self.turns:
                    self.work.cancel()
                    await asyncio.gather(self.work, return_exceptions=True)
                if self.turns and self.reached_at is None and not self._lost:
                    self._lost = True
                    self._amend(self.turns, "undelivered", False)

    def reached(self) -> None:
        """Note that the answer has arrived on a connection."""
        if self.reached_at is None:
            self.reached_at = self._time()
            if self._lost:
                self._amend(self.turns, "delivered", None)

    def retry(self) -> None:
        """Exclude the turns from training: their request came again."""
        self._retried = True
        self._amend(self.turns, "retried", False)

    def confirm(self) -> None:
        """Note that a request contains the answer."""
        self.confirmed = True
        if self._retried:
            self._retried = False
            self._amend(self.turns, "continued", None)

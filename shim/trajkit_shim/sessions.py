"""The sessions that are open: who may call, how often, and what was shown before.

Everything here runs on the event loop's thread, and no method awaits: each is one step
for every other call.
"""

import asyncio
import re
import secrets
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, get_args

from trajkit_shim.echo import EchoBook, Known
from trajkit_shim.errors import GatewayError
from trajkit_shim.resend import Resends
from trajkit_shim.sampling import Wishes

# it travels in an HTTP header and in paths
# but . and .., which a client resolves before it asks
_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:@-]{1,200}")


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """One agent run: the calls that carry its id.

    A call that is under way stands in ``calls`` and nowhere else; it changes the counts
    when it is recorded.
    """

    session_id: str
    pins: Wishes
    # calls that may be answered; None: any number
    max_turns: int | None
    metadata: dict[str, object]
    closed: bool = False
    # turns in the log, aborted ones included; the next turn's index
    recorded: int = 0
    # turns that were answered
    answered: int = 0
    # answered turns whose answer reached nobody
    undelivered: int = 0
    # recorded turns of which nobody can tell what each prompt token shows
    unattributed: int = 0
    calls: set[asyncio.Task[Any]] = field(default_factory=set)
    # each message key's last body in the log, as its digest
    shown: dict[bytes, bytes] = field(default_factory=dict)
    # the replies, to know them again
    echo: EchoBook = field(default_factory=EchoBook)
    # a request that is equal to an earlier one is that one sent again
    replay: bool = False
    resends: Resends = field(default_factory=Resends)
    # how often a recorded call offered a tool that only a provider can run, by type
    left_out: Counter[str] = field(default_factory=Counter)

    def check_open(self) -> None:
        """Refuse a session that was closed."""
        if self.closed:
            raise GatewayError(
                f"session {self.session_id!r} is closed", 410, code="session_closed"
            )

    def admit(self) -> None:
        """Refuse a call beyond ``max_turns``; a call under way counts as a turn."""
        self.check_open()
        taken = self.answered + len(self.calls)
        if self.max_turns is not None and taken >= self.max_turns:
            raise GatewayError(
                f"session {self.session_id!r} has had its {self.max_turns} turns",
                403,
                code="max_turns_exceeded",
            )

    def describe(self) -> dict[str, object]:
        """The session as ``GET /sessions/{id}`` shows it."""
        return {
            "session_id": self.session_id,
            "status": "closed" if self.closed else "open",
            "turns": self.recorded,
            "answered": self.answered,
            "undelivered": self.undelivered,
            "unattributed": self.unattributed,
            "in_flight": len(self.calls),
            "max_turns": self.max_turns,
            "echo": {kind: self.echo.counts[kind] for kind in get_args(Known)},
            "replayed": self.resends.replayed,
            "tools_left_out": dict(self.left_out),
            "metadata": self.metadata,
        }


class SessionStore:
    """All sessions of one gateway, by id."""

    def __init__(self) -> None:
        self._sessions: dict[str, Session] = {}

    def open(
        self,
        session_id: str | None = None,
        *,
        pins: Wishes | None = None,
        max_turns: int | None = None,
        metadata: dict[str, object] | None = None,
        replay: bool = False,
    ) -> Session:
        """A new session, under the given id or a fresh one.

        With ``replay`` a request that is equal to an earlier one to the byte is taken
        for a retry, whatever its headers say: for harnesses that don't say.

        Raises
        ------
        GatewayError
            The id was used before, or cannot travel in a header and in a path.
        """
        if session_id is None:
            session_id = f"s-{secrets.token_hex(16)}"
        if not _ID.fullmatch(session_id):
            raise GatewayError(
                f"session_id: {session_id!r}: 1 to 200 letters, digits and ._~:@- (not "
                ". or ..)",
                param="session_id",
            )
        if session_id in self._sessions:
            raise GatewayError(
                f"session {session_id!r} was opened before",
                409,
                code="session_exists",
                param="session_id",
            )
        session = Session(
            session_id=session_id,
            pins=pins or Wishes(),
            max_turns=max_turns,
            metadata=metadata or {},
            replay=replay,
        )
        self._sessions[session_id] = session
        return session

    def get(self, session_id: str) -> Session:
        """The session of that id, open or closed; a 404 where there is none."""
        session = self._sessions.get(session_id)
        if session is None:
            raise GatewayError(
                f"no session {session_id!r}", 404, code="session_not_found"
            )
        return session

    def authorise(self, claims: Iterable[str]) -> Session:
        """The open session that a call names.

        Parameters
        ----------
        claims : iterable of str
            What may be a session's id; the first that is one counts.

        Raises
        ------
        GatewayError
            401: there is no such session. 410: it is closed.
        """
        for claim in claims:
            session = self._sessions.get(claim)
            if session is not None:
                session.check_open()
                return session
        raise GatewayError(
            "no such session: its id is the API key, or the header x-session-id, or the "
            "path prefix /s/{id}; open one with POST /sessions",
            401,
            code="invalid_api_key",
        )

    def close(self, session_id: str) -> Session:
        """Close a session: no further turn of it is recorded.

        Calls under way are cancelled; their clients learn that the session is closed.
        Closing it again changes nothing.
        """
        session = self.get(session_id)
        session.closed = True
        session.shown.clear()
        session.echo.clear()
        session.resends.clear()
        for call in session.calls:
            call.cancel()
        return session

    def counts(self) -> dict[str, int]:
        """Sessions open and closed; calls under way and turns recorded in them all."""
        sessions = self._sessions.values()
        closed = sum(session.closed for session in sessions)
        return {
            "open": len(sessions) - closed,
            "closed": closed,
            "in_flight": sum(len(session.calls) for session in sessions),
            "turns": sum(session.recorded for session in sessions),
        }

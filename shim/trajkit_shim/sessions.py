"""The sessions: who may call, how often, what was shown before, and how they end.

Everything here runs on the event loop's thread, and what does not await is one step for
every other call. A session that ended leaves a small record; of these the oldest are
forgotten.
"""

import asyncio
import json
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias, get_args

from trajkit_shim.budget import Allowance, Budget, Limits
from trajkit_shim.clock import Clock, Handle
from trajkit_shim.deltas import DeltaBook
from trajkit_shim.echo import EchoBook, Known
from trajkit_shim.errors import GatewayError
from trajkit_shim.held import HeldPaths
from trajkit_shim.resend import Resends
from trajkit_shim.sampling import Wishes
from trajkit_shim.used_ids import UsedIds

# it travels in an HTTP header and in paths
# but . and .., which a client resolves before it asks
_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:@-]{1,200}")

_as_json = json.JSONEncoder(ensure_ascii=False).encode

# how long requests whose calls were cancelled may take to tell their clients
_GRACE_SECONDS = 5.0

EndedBy: TypeAlias = Literal["finish", "close", "drop", "idle", "shutdown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a session was opened with, and keeps."""

    pins: Wishes = field(default_factory=Wishes)
    # what the client may set: of temperature, top_p and top_k
    client_sampling: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
    # it is closed once nothing was asked for so long; None: never
    ttl_seconds: float | None = None
    # a request that is equal to an earlier one is that one sent again
    replay: bool = False
    # the task that several rollouts share
    group_id: str | None = None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What whoever opened a session says of it."""

    reward: float | None = None
    error: str | None = None
    metadata: dict[str, object] = field(default_factory=dict)

    def update(self, said: Mapping[str, object]) -> None:
        """Take what is said; metadata is added to what is there."""
        if "reward" in said:
            reward = said["reward"]
            assert reward is None or isinstance(reward, float)
            self.reward = reward
        if "error" in said:
            error = said["error"]
            assert error is None or isinstance(error, str)
            self.error = error
        metadata = said.get("metadata")
        if metadata is not None:
            assert isinstance(metadata, dict)
            self.metadata = {**self.metadata, **metadata}


@dataclass(slots=True, kw_only=True)
class Counts:
    """What happened in a session."""

    # turns in the log, aborted ones included; the next turn's index
    recorded: int = 0
    # turns that were answered
    answered: int = 0
    # answered turns whose answer reached nobody
    undelivered: int = 0
    # turns below this index were dropped
    dropped: int = 0
    # recorded turns of which nobody can tell what each prompt token shows
    unattributed: int = 0
    # recorded turns by how their prompts were built: append, or why not
    prompts: Counter[str] = field(default_factory=Counter)
    # how often a recorded call offered a tool that only a provider can run, by type
    left_out: Counter[str] = field(default_factory=Counter)
    # how often a recorded call asked for sampling that it may not set, by parameter
    overruled: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """What is kept of a session, open or ended."""

    session_id: str
    terms: Terms
    outcome: Outcome
    counts: Counts
    budget: Budget
    echo_counts: Counter[Known]
    replayed: int = 0
    ended_by: EndedBy | None = None
    # its last line says what is known of it
    written: bool = False

    def describe(self, in_flight: int = 0) -> dict[str, object]:
        """The session as ``GET /sessions/{id}`` shows it."""
        limits = self.terms.limits
        return {
            "session_id": self.session_id,
            "status": "open" if self.ended_by is None else "closed",
            "ended_by": self.ended_by,
            "turns": self.counts.recorded,
            "answered": self.counts.answered,
            "undelivered": self.counts.undelivered,
            "dropped": self.counts.dropped,
            "unattributed": self.counts.unattributed,
            "in_flight": in_flight,
            "prompt_tokens": self.budget.prompt_tokens,
            "output_tokens": self.budget.output_tokens,
            "max_turns": limits.max_turns,
            "max_prompt_tokens": limits.max_prompt_tokens,
            "max_output_tokens": limits.max_output_tokens,
            "max_context_tokens": limits.max_context_tokens,
            "ttl_seconds": self.terms.ttl_seconds,
            "echo": {kind: self.echo_counts[kind] for kind in get_args(Known)},
            "prompts": dict(self.counts.prompts),
            "replayed": self.replayed,
            "tools_left_out": dict(self.counts.left_out),
            "sampling_overruled": dict(self.counts.overruled),
            "group_id": self.terms.group_id,
            "reward": self.outcome.reward,
            "error": self.outcome.error,
            "metadata": self.outcome.metadata,
        }

    def line(self) -> dict[str, object]:
        """The session as a line of `trajkit_shim.log.SESSION_LINES`."""
        return {
            "session_id": self.session_id,
            "reward": self.outcome.reward,
            "group_id": self.terms.group_id,
            "error": self.outcome.error,
            "ended_by": self.ended_by,
            "turns": self.counts.recorded,
            "prompt_tokens": self.budget.prompt_tokens,
            "output_tokens": self.budget.output_tokens,
            "metadata": _as_json(self.outcome.metadata),
            "written_at": datetime.now(UTC),
        }


class Session:
    """One agent run that is open: the calls that carry its id.

    A call that is under way stands in ``calls`` and nowhere else; it changes the counts
    when it is recorded.
    """

    def __init__(self, record: Record, clock: Clock) -> None:
        self.record = record
        self.session_id = record.session_id
        self.terms = record.terms
        self.counts = record.counts
        self.budget = record.budget
        # no new call is taken
        self.closing = False
        # no turn is recorded any more
        self.closed = False
        self.calls: set[asyncio.Task[Any]] = set()
        # each message key's last body in the log, as its digest
        self.shown: dict[bytes, bytes] = {}
        # its turns in the log, to say what the next one adds
        self.deltas = DeltaBook()
        # the replies, to know them again
        self.echo = EchoBook(counts=record.echo_counts)
        # the ids of the replies and what they were sampled for
        self.held = HeldPaths()
        self.resends = Resends()
        # requests until their last byte was sent, and the tasks that serve them
        self.requests: dict[asyncio.Future[None], asyncio.Task[Any] | None] = {}
        self.timer: Handle | None = None
        self._clock = clock
        self.active_at = clock.time()

    def check_open(self) -> None:
        """Refuse a session that takes no call."""
        if self.closing or self.closed:
            raise _closed(self.session_id)

    def check_recording(self) -> None:
        """Refuse a turn of a session that ended meanwhile."""
        if self.closed:
            raise _closed(self.session_id)

    def admit(self) -> Allowance:
        """What a further call may use; a call under way counts as a turn.

        Raises
        ------
        GatewayError
            410: the session takes no call. 403: it has had its turns or tokens.
        """
        self.check_open()
        return self.budget.admit()

    @contextmanager
    def request(self) -> Iterator[Callable[[], None]]:
        """Serve a request inside; what is given has to be called once it was answered.

        Where the block fails it is called by itself.
        """
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests[answered] = asyncio.current_task()
        self.active_at = self._clock.time()

        def end() -> None:
            self.requests.pop(answered, None)
            self.active_at = self._clock.time()
            if not answered.done():
                answered.set_result(None)

        try:
            yield end
        except BaseException:
            end()
            raise

    def describe(self) -> dict[str, object]:
        """The session as ``GET /sessions/{id}`` shows it."""
        self.record.replayed = self.resends.replayed
        shown = self.record.describe(len(self.calls))
        return {**shown, "status": "closing"} if self.closing else shown


class SessionStore:
    """All sessions of one gateway, by id.

    Parameters
    ----------
    write : callable
        Takes a line of `trajkit_shim.log.SESSION_LINES` for each session that is opened,
        ends, or of which something is said afterwards.
    amend : callable
        Takes a session's id and the indices of its turns that are dropped.
    clock : Clock, optional
        Default: the event loop.
    max_ended : int
        Sessions that ended and are kept, to say so to whoever asks; the oldest are
        forgotten.
    """

    def __init__(
        self,
        write: Callable[[Mapping[str, object]], None],
        amend: Callable[[str, range], None],
        *,
        clock: Clock | None = None,
        max_ended: int = 10_000,
    ) -> None:
        self._write = write
        self._amend = amend
        self._clock = clock
        self._max_ended = max_ended
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, Record] = OrderedDict()
        self._forgotten = 0
        # of ended and forgotten sessions
        self._past_turns = 0
        self._used = UsedIds()
        self.draining = False

    def open(
        self,
        session_id: str | None = None,
        terms: Terms | None = None,
        outcome: Outcome | None = None,
    ) -> Session:
        """A new session, under the given id or a fresh one.

        Raises
        ------
        GatewayError
            The id was used before, or cannot travel in a header and in a path; no
            session is taken any more; or its line could not be written.
        """
        if self.draining:
            raise _draining()
        if session_id is None:
            session_id = f"s-{secrets.token_hex(16)}"
        if not _ID.fullmatch(session_id):
            raise GatewayError(
                f"session_id: {session_id!r}: 1 to 200 letters, digits and ._~:@- (not "
                ". or ..)",
                param="session_id",
            )
        if (
            session_id in self._open
            or session_id in self._ended
            or session_id in self._used
        ):
            raise GatewayError(
                f"session {session_id!r} was opened before",
                409,
                code="session_exists",
                param="session_id",
            )
        terms = terms or Terms()
        return self._begin(
            Record(
                session_id=session_id,
                terms=terms,
                outcome=outcome or Outcome(),
                counts=Counts(),
                budget=Budget(terms.limits),
                echo_counts=Counter(),
            )
        )

    def reopen(self, session_id: str) -> Session:
        """A session that ended, open again: its turns go on where they ended.

        What it sampled before is not known again in what a client sends back.

        Raises
        ------
        GatewayError
            404: there is none. 409: it is open.
        """
        if self.draining:
            raise _draining()
        record = self.record(session_id)
        if session_id in self._open:
            raise GatewayError(
                f"session {session_id!r} is open", 409, code="session_open"
            )
        before = record.ended_by
        record.ended_by = None
        try:
            session = self._begin(record)
        except GatewayError:
            record.ended_by = before
            raise
        session.resends.replayed = record.replayed
        del self._ended[session_id]
        self._past_turns -= record.counts.recorded
        return session

    def _begin(self, record: Record) -> Session:
        self._say(record)
        clock = self._clock or asyncio.get_running_loop()
        session = Session(record, clock)
        self._open[record.session_id] = session
        if record.terms.ttl_seconds is not None:
            self._watch(session, clock, record.terms.ttl_seconds)
        return session

    def _watch(self, session: Session, clock: Clock, ttl: float) -> None:
        """Close the session once it was idle for its time."""

        def look() -> None:
            left = session.active_at + ttl - clock.time()
            if session.requests or session.closing:
                left = ttl
            if left > 0:
                session.timer = clock.call_later(left, look)
            else:
                self.end(session, "idle")

        session.timer = clock.call_later(ttl, look)

    def _say(self, record: Record) -> None:
        record.written = False
        try:
            self._write(record.line())
        except OSError as error:
            raise GatewayError(
                f"the session could not be written: {error}", 500, code="log_failed"
            ) from error
        record.written = True

    def find(self, session_id: str) -> Session | None:
        """The session of that id if it is open."""
        return self._open.get(session_id)

    def record(self, session_id: str) -> Record:
        """What is known of a session, open or ended; a 404 where there is none."""
        session = self._open.get(session_id)
        if session is not None:
            return session.record
        record = self._ended.get(session_id)
        if record is None:
            raise GatewayError(
                f"no session {session_id!r}", 404, code="session_not_found"
            )
        return record

    def describe(self, session_id: str) -> dict[str, object]:
        """The session as ``GET /sessions/{id}`` shows it."""
        session = self._open.get(session_id)
        return (session or self.record(session_id)).describe()

    def authorise(self, claims: Iterable[str]) -> Session:
        """The open session that a call names.

        Parameters
        ----------
        claims : iterable of str
            What may be a session's id; the first that is one counts.

        Raises
        ------
        GatewayError
            401: there is no such session. 410: it is closed. 503: the gateway takes no
            call any more.
        """
        for claim in claims:
            session = self._open.get(claim)
            if session is not None:
                session.check_open()
                if self.draining:
                    raise _draining()
                return session
            if claim in self._ended:
                raise _closed(claim)
        raise GatewayError(
            "no such session: its id is the API key, or the header x-session-id, or the "
            "path prefix /s/{id}; open one with POST /sessions",
            401,
            code="invalid_api_key",
        )

    def end(self, session: Session, how: EndedBy) -> None:
        """End a session now: no further turn of it is recorded.

        Calls under way are cancelled; their clients learn that the session is closed.
        Ending it again changes nothing.

        Raises
        ------
        GatewayError
            500: its line could not be written. It has ended all the same.
        """
        if session.closed:
            return
        session.closed = True
        if session.timer is not None:
            session.timer.cancel()
        record = session.record
        record.ended_by = how
        record.replayed = session.resends.replayed
        session.shown.clear()
        session.deltas.clear()
        session.echo.clear()
        session.held.clear()
        session.resends.clear()
        for call in session.calls:
            call.cancel()
        del self._open[session.session_id]
        self._ended[session.session_id] = record
        self._past_turns += record.counts.recorded
        while len(self._ended) > self._max_ended:
            name, _ = self._ended.popitem(last=False)
            self._used.add(name)
            self._forgotten += 1
        self._say(record)

    async def finish(
        self,
        session_id: str,
        how: EndedBy,
        *,
        wait_seconds: float = 0.0,
        said: Mapping[str, object] | None = None,
    ) -> dict[str, object]:
        """End a session once its calls are over; what is said of it is written.

        Parameters
        ----------
        session_id : str
        how : str
            Where it ended before, that stays.
        wait_seconds : float
            Calls under way may take so long; new ones are refused meanwhile. Then they
            are cancelled.
        said : mapping, optional
            For `Outcome.update`.

        Returns
        -------
        dict
            As `describe`.

        Raises
        ------
        GatewayError
            404: there is no such session.
        """
        record = self.record(session_id)
        session = self._open.get(session_id)
        if session is not None:
            session.closing = True
            await _over(session.requests, wait_seconds)
        # whoever else ended it meanwhile wrote what was known then
        outcome_written = session is None or session.closed
        record.outcome.update(said or {})
        if session is not None:
            self.end(session, how)
            await stop(session)
        if (outcome_written and said) or not record.written:
            self._say(record)
        return record.describe()

    async def drop(self, session_id: str) -> dict[str, object]:
        """End a session and take its turns, all of them so far, out of training."""
        record = self.record(session_id)
        session = self._open.get(session_id)
        if session is not None:
            self.end(session, "drop")
            await stop(session)
        turns = range(record.counts.dropped, record.counts.recorded)
        if turns:
            try:
                self._amend(session_id, turns)
            except OSError as error:
                raise GatewayError(
                    f"the turns could not be dropped: {error}", 500, code="log_failed"
                ) from error
            record.counts.dropped = turns.stop
        if record.ended_by != "drop" or not record.written:
            record.ended_by = "drop"
            self._say(record)
        return record.describe()

    async def drain(self, wait_seconds: float, how: EndedBy = "shutdown") -> None:
        """Take no session and no call any more, and end all sessions.

        Calls under way may take so many seconds together, then they are cancelled.
        """
        self.draining = True
        sessions = list(self._open.values())
        waiting = [each for session in sessions for each in session.requests]
        await _over(waiting, wait_seconds)
        unwritten: list[GatewayError] = []
        for session in sessions:
            try:
                self.end(session, how)
            except GatewayError as error:
                unwritten.append(error)
        for session in sessions:
            await stop(session)
        if unwritten:
            raise unwritten[0]

    def counts(self) -> dict[str, int]:
        """Sessions open, closed and forgotten; calls under way; turns recorded."""
        sessions = self._open.values()
        return {
            "open": len(sessions),
            "closed": len(self._ended) + self._forgotten,
            "forgotten": self._forgotten,
            "in_flight": sum(len(session.calls) for session in sessions),
            "turns": self._past_turns
            + sum(session.counts.recorded for session in sessions),
        }


async def stop(session: Session) -> None:
    """Return when no request of an ended session is served any more.

    A client that does not read its answer is left after some seconds.
    """
    await _over(session.requests, _GRACE_SECONDS)
    for task in session.requests.values():
        if task is not None:
            task.cancel()
    await _over(session.requests, _GRACE_SECONDS)


async def _over(waiting: Iterable[asyncio.Future[None]], seconds: float) -> None:
    """Return when all are done, or after so many seconds."""
    waiting = list(waiting)
    if waiting and seconds > 0:
        await asyncio.wait(waiting, timeout=seconds)


def _closed(session_id: str) -> GatewayError:
    return GatewayError(f"session {session_id!r} is closed", 410, code="session_closed")


def _draining() -> GatewayError:
    return GatewayError("the gateway is shutting down", 503, code="draining")

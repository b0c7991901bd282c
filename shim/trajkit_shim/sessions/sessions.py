"""Sessions: who may call, how often, what was recorded before, and how they end.

Everything runs on the event loop's thread, so code that does not await is atomic for
other calls. An ended session leaves a small record; the oldest records are dropped.
"""

import asyncio
import json
import re
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal, TypeAlias, TypedDict, get_args

from trajkit_shim.answers import RetryIndex
from trajkit_shim.chat.sampling_params import SamplingParams
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import refuse
from trajkit_shim.prompting.reply_matching import Known, ReplyIndex
from trajkit_shim.prompting.token_cache import TokenCache
from trajkit_shim.sessions.agent_starts import AgentStarts
from trajkit_shim.sessions.quotas import Budget, Limits, Reservation
from trajkit_shim.sessions.turn_log import WrittenTurns
from trajkit_shim.timing import Clock

# allowed in an HTTP header and in paths, except . and .., which clients resolve
_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:@-]{1,200}")

MAX_OUTCOME = 1 << 18
"""Maximum length of a session's metadata as JSON, together with its error."""

_as_json = json.JSONEncoder(ensure_ascii=False).encode

# how long requests of cancelled calls may take to answer their clients
_GRACE_SECONDS = 5.0

FILTERS = ("status", "ended_by", "group_id")
"""Fields by which sessions can be listed."""

EndedBy: TypeAlias = Literal["finish", "close", "drop", "idle", "shutdown"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """The terms of a session, set when it is opened."""

    pins: SamplingParams = field(default_factory=SamplingParams)
    # which of temperature, top_p and top_k the client may set
    client_sampling: frozenset[str] = frozenset()
    limits: Limits = field(default_factory=Limits)
    ttl_seconds: float | None = None  # idle time after which it is closed; None: never
    replay: bool = False  # treat a request equal to an earlier one as a retry
    group_id: str | None = None  # the task, shared by several rollouts


class Outcome(TypedDict, total=False):
    """What the trainer reports about a session."""

    reward: float | None
    error: str | None
    metadata: dict[str, object]


_NOTHING_KNOWN: Outcome = {"reward": None, "error": None, "metadata": {}}


def _updated(outcome: Outcome, fields: Outcome) -> Outcome:
    """Return an outcome with the given fields and merged metadata, if not too long."""
    new: Outcome = {**outcome, **fields}
    new["metadata"] = {**outcome["metadata"], **fields.get("metadata", {})}
    length = len(new["error"] or "") + len(_as_json(new["metadata"]))
    if length > MAX_OUTCOME:
        limit = f"the limit is {MAX_OUTCOME}"
        message = f"metadata and error are {length} characters; {limit}"
        raise GatewayError(message, 413, code="metadata_too_long", param="metadata")
    return new


@dataclass(kw_only=True)
class Counts:
    """What happened in a session, as ``GET /sessions/{id}`` names it."""

    turns: int = 0  # recorded turns, including aborted ones; the next turn's index
    answered: int = 0  # turns with an answer
    undelivered: int = 0  # answered turns whose answer was lost
    retried: int = 0  # unmarked retries
    replayed: int = 0  # requests that got an earlier reply or joined a running call
    dropped: int = 0  # turns below this index were dropped
    unattributed: int = 0  # recorded turns without attribution
    # recorded turns by how their prompts were built: append, or why not
    prompts: Counter[str] = field(default_factory=Counter)
    # assistant messages of requests, by what they are
    echo: Counter[Known] = field(
        default_factory=lambda: Counter(dict.fromkeys(get_args(Known), 0))
    )
    # offered tools that only a provider can run, by type, over all recorded calls
    tools_left_out: Counter[str] = field(default_factory=Counter)
    # sampling parameters that were requested and ignored, over all recorded calls
    sampling_overruled: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """The kept data of a session, open or ended."""

    session_id: str
    api_key: str  # secret; names the session in calls
    terms: Terms
    outcome: Outcome
    budget: Budget
    counts: Counts = field(default_factory=Counts)
    ended_by: EndedBy | None = None
    written: bool = False  # the latest line in the log is up to date

    def describe(self) -> dict[str, object]:
        """Return the session for ``GET /sessions/{id}``, without calls."""
        return {
            "session_id": self.session_id,
            "status": "open" if self.ended_by is None else "closed",
            "ended_by": self.ended_by,
            **vars(self.counts),
            "in_flight": 0,
            "prompt_tokens": self.budget.prompt_tokens,
            "output_tokens": self.budget.output_tokens,
            **asdict(self.terms.limits),
            "ttl_seconds": self.terms.ttl_seconds,
            "group_id": self.terms.group_id,
            **self.outcome,
        }

    def line(self) -> dict[str, object]:
        """Return the session as a line of `sessions.turn_log.SESSION_LINES`."""
        return {
            **self.describe(),
            "metadata": _as_json(self.outcome["metadata"]),
            "written_at": datetime.now(UTC),
        }


class Session:
    """One open agent run: the calls with its id.

    A running call is only in ``calls``. It changes the counts when it is recorded.
    """

    def __init__(self, record: Record, clock: Clock) -> None:
        self.record = record
        self.session_id, self.terms = record.session_id, record.terms
        self.api_key = record.api_key
        self.counts, self.budget = record.counts, record.budget
        self.closing = False  # accepts no new calls
        self.closed = False  # records no more turns
        self.calls: set[asyncio.Task[Any]] = set()
        self.written = WrittenTurns()
        # its replies, to recognize them
        self.replies = ReplyIndex(counts=record.counts.echo)
        # the token ids of its prompts and replies
        self.paths = TokenCache()
        self.retries = RetryIndex()
        self.agent_starts = AgentStarts()
        # requests until their last byte was sent, and the tasks that serve them
        self.requests: dict[asyncio.Future[None], asyncio.Task[Any] | None] = {}
        self.timer: asyncio.TimerHandle | None = None
        self.clock = clock
        self.active_at = clock.time()

    def check_open(self) -> None:
        """Raise if the session accepts no calls."""
        if self.closing or self.closed:
            raise closed_error(self.session_id)

    def admit(self, n: int) -> Reservation:
        """Return what one more call may use (`Budget.admit`); raise if not open."""
        self.check_open()
        return self.budget.admit(n)

    @contextmanager
    def request(self) -> Iterator[Callable[[], None]]:
        """Serve a request in this context; call the yielded function once answered."""
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests[answered] = asyncio.current_task()
        self.active_at = self.clock.time()

        def end() -> None:
            self.requests.pop(answered, None)
            self.active_at = self.clock.time()
            if not answered.done():
                answered.set_result(None)

        try:
            yield end
        except BaseException:
            end()
            raise

    def describe(self) -> dict[str, object]:
        """Return the session for ``GET /sessions/{id}``."""
        shown = {**self.record.describe(), "in_flight": len(self.calls)}
        return {**shown, "status": "closing"} if self.closing else shown


class SessionStore:
    """All sessions of one gateway, by id.

    ``write`` gets a line whenever a session is opened, ends, or is updated after that,
    ``amend`` a session's id and the indices of its dropped turns. ``max_ended`` sessions
    are remembered, so that their calls get a specific error.
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
        self._ids: dict[str, str] = {}  # of open and ended sessions, by API key
        # of ended and forgotten sessions
        self._past_turns = 0
        # hashes of the ids of forgotten sessions; an id would take three times as much
        self._forgotten: set[int] = set()
        self.draining = False

    def open(
        self,
        session_id: str | None = None,
        terms: Terms | None = None,
        outcome: Outcome | None = None,
    ) -> Session:
        """Open a session under the given id, which must be new, or a generated one."""
        self._check_draining()
        if session_id is None:
            session_id = f"s-{secrets.token_hex(16)}"
        if not _ID.fullmatch(session_id):
            rule = "1 to 200 letters, digits and ._~:@- (not . or ..)"
            refuse("session_id", f"{session_id!r}: {rule}")
        known = session_id in self._open or session_id in self._ended
        if known or hash(session_id) in self._forgotten:
            message = f"session {session_id!r} was opened before"
            raise GatewayError(message, 409, code="session_exists", param="session_id")
        terms = terms or Terms()
        return self._begin(
            Record(
                session_id=session_id,
                api_key=f"tk-{secrets.token_hex(16)}",
                terms=terms,
                outcome=_updated(_NOTHING_KNOWN, outcome or {}),
                budget=Budget(terms.limits),
            )
        )

    def reopen(self, session_id: str) -> Session:
        """Open an ended session again; its turns continue, its replies are forgotten."""
        self._check_draining()
        record = self.record(session_id)
        if session_id in self._open:
            message = f"session {session_id!r} is open"
            raise GatewayError(message, 409, code="session_open")
        before, record.ended_by = record.ended_by, None
        try:
            session = self._begin(record)
        except GatewayError:
            record.ended_by = before
            raise
        del self._ended[session_id]
        self._past_turns -= record.counts.turns
        return session

    def _begin(self, record: Record) -> Session:
        self._write_line(record)
        clock = self._clock or asyncio.get_running_loop()
        session = Session(record, clock)
        self._open[record.session_id] = session
        self._ids[record.api_key] = record.session_id
        ttl = record.terms.ttl_seconds
        if ttl is None:
            return session

        def look() -> None:
            """Close the session if it has been idle for that long, or look again."""
            busy = session.requests or session.closing
            left = ttl if busy else session.active_at + ttl - clock.time()
            if left > 0:
                session.timer = clock.call_later(left, look)
            else:
                self.end(session, "idle")

        session.timer = clock.call_later(ttl, look)
        return session

    def _check_draining(self) -> None:
        if self.draining:
            raise GatewayError("the gateway is shutting down", 503, code="draining")

    def _write_line(self, record: Record) -> None:
        record.written = False
        try:
            self._write(record.line())
        except OSError as error:
            message = f"the session could not be written: {error}"
            raise GatewayError(message, 500, code="log_failed") from error
        record.written = True

    def record(self, session_id: str) -> Record:
        """Return the record of a session, open or ended, or raise a 404."""
        session = self._open.get(session_id)
        record = self._ended.get(session_id) if session is None else session.record
        if record is None:
            message = f"no session {session_id!r}"
            raise GatewayError(message, 404, code="session_not_found")
        return record

    def describe(self, session_id: str) -> dict[str, object]:
        """Return the session for ``GET /sessions/{id}``."""
        return (self._open.get(session_id) or self.record(session_id)).describe()

    def matching(self, wanted: Mapping[str, str]) -> Iterator[dict[str, object]]:
        """Yield the sessions with the given values of `FILTERS`, open ones first."""
        opened = (session.record for session in self._open.values())
        for record in [*opened, *self._ended.values()]:
            facts = {
                "status": "open" if record.ended_by is None else "closed",
                "ended_by": record.ended_by,
                "group_id": record.terms.group_id,
            }
            if all(facts[name] == value for name, value in wanted.items()):
                yield self.describe(record.session_id)

    def authorise(self, claims: Iterable[str]) -> Session:
        """Return the open session of the first claim that is a session's key."""
        session_id = next((self._ids[key] for key in claims if key in self._ids), None)
        if session_id is None:
            message = "no such session: send the api_key of POST /sessions as API key, "
            message += "as header x-session-key, or as path prefix /s/{api_key}"
            raise GatewayError(message, 401, code="invalid_api_key")
        session = self._open.get(session_id)
        if session is None:
            raise closed_error(session_id)
        session.check_open()
        self._check_draining()
        return session

    def end(self, session: Session, how: EndedBy) -> None:
        """End a session now and cancel its calls, so that no more turns are recorded.

        Idempotent. It has ended even if its line cannot be written (`GatewayError`).
        """
        if session.closed:
            return
        session.closed = True
        if session.timer is not None:
            session.timer.cancel()
        record = session.record
        record.ended_by = how
        for memory in (
            session.written,
            session.replies,
            session.paths,
            session.retries,
            session.agent_starts,
        ):
            memory.clear()
        for call in session.calls:
            call.cancel()
        del self._open[session.session_id]
        self._ended[session.session_id] = record
        self._past_turns += record.counts.turns
        while len(self._ended) > self._max_ended:
            name, oldest = self._ended.popitem(last=False)
            del self._ids[oldest.api_key]
            self._forgotten.add(hash(name))
        self._write_line(record)

    async def finish(
        self,
        session_id: str,
        how: EndedBy,
        wait_seconds: float = 0.0,
        fields: Outcome | None = None,
    ) -> dict[str, object]:
        """End a session once its calls are over, and write its outcome.

        Running calls are cancelled after ``wait_seconds``; new ones are rejected meanwhile.
        ``how`` is ignored if the session has ended before.
        """
        record = self.record(session_id)
        _updated(record.outcome, fields or {})  # raises before the session closes
        session = self._open.get(session_id)
        if session is not None:
            session.closing = True
            await _over(session.requests, wait_seconds)
        # if something else ended it meanwhile, that wrote the outcome known then
        outcome_written = session is None or session.closed
        record.outcome = _updated(record.outcome, fields or {})
        if session is not None:
            self.end(session, how)
            await stop(session)
        if (outcome_written and fields) or not record.written:
            self._write_line(record)
        return record.describe()

    async def drop(self, session_id: str) -> dict[str, object]:
        """End a session and exclude all its turns so far from training."""
        record = self.record(session_id)
        session = self._open.get(session_id)
        if session is not None:
            self.end(session, "drop")
            await stop(session)
        turns = range(record.counts.dropped, record.counts.turns)
        if turns:
            try:
                self._amend(session_id, turns)
            except OSError as error:
                message = f"the turns could not be dropped: {error}"
                raise GatewayError(message, 500, code="log_failed") from error
            record.counts.dropped = turns.stop
        if record.ended_by != "drop" or not record.written:
            record.ended_by = "drop"
            self._write_line(record)
        return record.describe()

    async def drain(self, wait_seconds: float) -> None:
        """Accept no more sessions and calls; end all sessions after ``wait_seconds``."""
        self.draining = True
        sessions = list(self._open.values())
        await _over([each for one in sessions for each in one.requests], wait_seconds)
        unwritten: list[GatewayError] = []
        for session in sessions:
            try:
                self.end(session, "shutdown")
            except GatewayError as error:
                unwritten.append(error)
        for session in sessions:
            await stop(session)
        if unwritten:
            raise unwritten[0]

    def counts(self) -> dict[str, int]:
        """Return counts of open, closed and forgotten sessions, calls and turns."""
        sessions = self._open.values()
        return {
            "open": len(sessions),
            "closed": len(self._ended) + len(self._forgotten),
            "forgotten": len(self._forgotten),
            "in_flight": sum(len(session.calls) for session in sessions),
            "turns": sum((s.counts.turns for s in sessions), self._past_turns),
        }


async def stop(session: Session) -> None:
    """Wait until the requests of an ended session are answered, for some seconds each."""
    await _over(session.requests, _GRACE_SECONDS)
    for task in session.requests.values():
        if task is not None:
            task.cancel()
    await _over(session.requests, _GRACE_SECONDS)


async def _over(waiting: Iterable[asyncio.Future[None]], seconds: float) -> None:
    """Return when all are done, or after ``seconds``."""
    waiting = list(waiting)
    if waiting and seconds > 0:
        await asyncio.wait(waiting, timeout=seconds)


def closed_error(session_id: str) -> GatewayError:
    """Return the error of a call to a session that has ended."""
    return GatewayError(f"session {session_id!r} is closed", 410, code="session_closed")

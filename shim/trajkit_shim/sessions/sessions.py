"""Sessions: who may call, how often, what was recorded before, and how they end.

Everything runs on the event loop's thread, so code that does not await is atomic for
other calls. The sessions that ended last are remembered, without what their calls need.
"""

import asyncio
import re
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeAlias, TypedDict

from trajkit_shim.chat.request import SamplingParams
from trajkit_shim.delivery import KEPT, PendingReply
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import as_json, refuse
from trajkit_shim.prompting.conversation import Conversation
from trajkit_shim.sessions.turn_log import TurnLog

MAX_OUTCOME = 1 << 18
"""Maximum length of a session's metadata as JSON, together with its error."""

MAX_REQUESTS, MAX_SAMPLED = 512, 32
"""Maximum number of requests of one session at once, and of its calls at the engine."""

MAX_ENDED = 10_000
"""Number of ended sessions, of several kB each, that are remembered."""

LIMITS = ("max_turns", "max_prompt_tokens", "max_output_tokens", "max_context_tokens")
"""Limits of a session: answered calls, tokens of all its prompts and of all its outputs,
and those of prompt and output of one call."""

EndedBy: TypeAlias = Literal["finish", "drop", "idle", "shutdown"]

# allowed in an HTTP header and in paths, except . and .., which clients resolve
_ID = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9._~:@-]{1,200}")
# how long requests of cancelled calls may take to answer their clients
_GRACE_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The options of a session, set when it is opened."""

    fixed: SamplingParams = field(default_factory=dict)
    # what the client may set (`chat.request.CLIENT`)
    client_sampling: frozenset[str] = frozenset()
    limits: Mapping[str, int | None] = field(default_factory=dict)  # by `LIMITS`
    ttl_seconds: float | None = None  # idle time after which it is closed; None: never
    variables: Mapping[str, object] = field(default_factory=dict)  # of the template
    replay: bool = False  # treat a request equal to an earlier one as a retry
    group_id: str | None = None  # the task, shared by several rollouts


class Outcome(TypedDict, total=False):
    """What the trainer reports about a session."""

    reward: float | None
    error: str | None
    metadata: dict[str, object]


@dataclass(kw_only=True, eq=False)
class Counts:
    """What happened in a session, as ``GET /sessions/{id}`` names it."""

    answered: int = 0  # turns with a reply
    prompt_tokens: int = 0  # of all turns
    output_tokens: int = 0
    turns: int = 0  # recorded turns, including aborted ones; the next turn's index
    undelivered: int = 0  # answered turns whose answer was lost
    failed: int = 0  # calls that the engine or this gateway could not answer
    replayed: int = 0  # requests that got an earlier reply or joined a running call
    dropped: int = 0  # turns below this index were dropped
    unattributed: int = 0  # recorded turns without attribution
    # recorded turns by how their prompts were built: append, or why not
    prompts: Counter[str] = field(default_factory=Counter)
    token_counts: int = 0  # requests for the number of tokens of a prompt
    # over all recorded calls: fields and values of requests that have no effect, and
    # sampling parameters that were overruled
    ignored: Counter[str] = field(default_factory=Counter)
    sampling_overruled: Counter[str] = field(default_factory=Counter)


class Session:
    """One agent run: the calls with its key.

    A running call is only in ``calls``. It changes the counts when it is recorded. Once
    the session has ended (``ended_by``), it records no more turns.
    """

    def __init__(
        self,
        session_id: str,
        options: SessionOptions,
        log: TurnLog,
        clock: asyncio.AbstractEventLoop,
    ) -> None:
        self.session_id, self.options = session_id, options
        self.api_key = f"tk-{secrets.token_hex(16)}"  # secret; names it in calls
        self.outcome = Outcome(reward=None, error=None, metadata={})
        self.counts = Counts()
        self.ended_by: EndedBy | None = None
        self.closing = False  # accepts no new calls
        # that run, the latest last; a set has no order
        self.calls: dict[PendingReply, None] = {}
        # its latest recorded calls
        self.answers: deque[PendingReply] = deque(maxlen=KEPT)
        self.conversation = Conversation()
        # a future per open request, done when its response is sent; the task that serves it
        self.requests: dict[asyncio.Future[None], asyncio.Task[Any] | None] = {}
        self.n_bytes = 0  # of their bodies
        # other sessions find threads and the engine free, whatever this one asks
        self.slots, self.counting = asyncio.Semaphore(MAX_SAMPLED), asyncio.Lock()
        self._log, self._clock = log, clock
        # amendments that could not be written yet, in order
        self._unwritten: list[tuple[list[int], str, bool | None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._active_at = clock.time()

    # The trainer's view

    def updated(self, fields: Outcome) -> Outcome:
        """Return the outcome with these fields and merged metadata, if not too long."""
        metadata = {**self.outcome["metadata"], **fields.get("metadata", {})}
        new: Outcome = {**self.outcome, **fields, "metadata": metadata}
        length = len(new["error"] or "") + len(as_json(metadata).decode())
        if length > MAX_OUTCOME:
            limit = f"the limit is {MAX_OUTCOME}"
            message = f"metadata and error are {length} characters; {limit}"
            raise GatewayError(message, 413, code="metadata_too_long", param="metadata")
        return new

    def describe(self) -> dict[str, object]:
        """Return the session for ``GET /sessions/{id}``."""
        status = "closing" if self.closing else "open"
        return {
            "session_id": self.session_id,
            "status": status if self.ended_by is None else "closed",
            "ended_by": self.ended_by,
            **vars(self.counts),
            "in_flight": len(self.calls),
            **{name: self.options.limits.get(name) for name in LIMITS},
            "ttl_seconds": self.options.ttl_seconds,
            "group_id": self.options.group_id,
            **self.outcome,
        }

    def write(self) -> None:
        """Write a line of `sessions.turn_log.SESSION_LINES`; raises `GatewayError`."""
        texts = {"metadata": self.outcome["metadata"], "ignored": self.counts.ignored}
        written = {name: as_json(value).decode() for name, value in texts.items()}
        with writing("the session"):
            line = {**self.describe(), **written, "written_at": datetime.now(UTC)}
            self._log.write_session(line)

    # Calls

    def check_open(self) -> None:
        """Raise a 410 if the session takes no new calls."""
        if self.closing or self.ended_by is not None:
            raise closed_error(self.session_id)

    def check_limit(self, name: str, needed: int) -> int | None:
        """Return how much is left of a limit, or None if there is no limit.

        ``name``: of what is counted. Running calls are not counted yet, so parallel calls
        may exceed a limit by what each of them takes. Raises a 403 `GatewayError` if less
        is left than needed.
        """
        unit = "turns" if name == "answered" else name
        limit = self.options.limits.get(f"max_{unit}")
        if limit is None:
            return None
        left: int = limit - getattr(self.counts, name)
        if needed > left:
            what = unit.replace("_", " ")
            rule = f"{limit - left} of the session's {limit} {what} are used"
            message = f"{needed} more {what} are needed, but {rule}"
            raise GatewayError(message, 403, code=f"max_{unit}_exceeded")
        return left

    def again(self, digest: bytes) -> PendingReply | None:
        """Return the latest call with an equal request that was recorded, or that runs."""
        # one that is being cancelled does not
        running = (c for c in reversed(self.calls) if not c.work.cancelling())
        calls = (*reversed(self.answers), *running)
        return next((call for call in calls if call.digest == digest), None)

    def amend(self, turns: list[int], reason: str, trainable: bool | None) -> None:
        """Write what became known of answered turns; dropped ones stay dropped."""
        if kept := [turn for turn in turns if turn >= self.counts.dropped]:
            # until it is written, the session cannot end
            self._unwritten.append((kept, reason, trainable))
        with suppress(GatewayError):
            self.write_amendments()
        change = {"undelivered": 1, "delivered": -1}.get(reason, 0)
        self.counts.undelivered += change * len(turns)

    def write_amendments(self) -> None:
        """Write the amendments that could not be written before; raises `GatewayError`."""
        while self._unwritten:
            with writing("an amendment"):
                self._log.amend(self.session_id, *self._unwritten[0])
            del self._unwritten[0]

    @contextmanager
    def request(self) -> Iterator[None]:
        """Serve a request in this context; raises a 429 if there are too many."""
        if len(self.requests) >= MAX_REQUESTS:
            message = f"{MAX_REQUESTS} requests of the session are running"
            raise GatewayError(message, 429, code="too_many_requests", retry_after=1)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.requests[answered] = asyncio.current_task()
        self._active_at = self._clock.time()
        try:
            yield
        finally:
            del self.requests[answered]
            self._active_at = self._clock.time()
            answered.set_result(None)

    # Its end

    def end_if_idle(self, ttl: float, end: "partial[None]") -> None:
        """Call ``end`` if the session has been idle for ``ttl`` seconds, or look later."""
        busy = self.requests or self.closing
        idle = 0.0 if busy else self._clock.time() - self._active_at
        if idle >= ttl:
            # its end is repeated until it is written
            with suppress(GatewayError):
                self.write_amendments()
                end()
                return
            idle = 0.0
        look = partial(self.end_if_idle, ttl, end)
        self._timer = self._clock.call_later(ttl - idle, look)

    def end(self, how: EndedBy) -> None:
        """End the calls, and forget what they need."""
        self.ended_by = how
        if self._timer is not None:
            self._timer.cancel()
        self.conversation.close()
        # running calls find an empty one, which keeps nothing
        self.conversation = Conversation()
        self.conversation.close()
        # break the cycle of references between answers and session
        self.answers.clear()
        for call in self.calls:
            call.end(closed_error(self.session_id))


class SessionStore:
    """All sessions of one gateway, by id.

    The log gets a line whenever a session is opened, ends, or is updated after that.
    """

    def __init__(
        self, log: TurnLog, *, clock: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._log, self._clock = log, clock
        self._open: dict[str, Session] = {}
        self._ended: OrderedDict[str, Session] = OrderedDict()
        self._by_key: dict[str, Session] = {}  # open and ended ones
        # of ended and forgotten sessions
        self._past_turns = 0
        # hashes of the ids of forgotten sessions; an id would take three times as much
        self._forgotten: set[int] = set()
        self.draining = False

    def open(
        self,
        session_id: str | None = None,
        options: SessionOptions | None = None,
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
        options, clock = options or SessionOptions(), self._clock
        clock = clock or asyncio.get_running_loop()
        session = Session(session_id, options, self._log, clock)
        session.outcome = session.updated(outcome or {})
        session.write()
        self._open[session_id] = self._by_key[session.api_key] = session
        if options.ttl_seconds is not None:
            end = partial(self.end, session, "idle")
            session.end_if_idle(options.ttl_seconds, end)
        return session

    def _check_draining(self) -> None:
        if self.draining:
            raise GatewayError("the gateway is shutting down", 503, code="draining")

    def find(self, session_id: str) -> Session:
        """Return a session, open or ended, or raise a 404."""
        session = self._open.get(session_id) or self._ended.get(session_id)
        if session is None and hash(session_id) in self._forgotten:
            message = f"session {session_id!r} ended, and its record is no longer kept"
            raise GatewayError(message, 410, code="session_closed")
        if session is None:
            message = f"no session {session_id!r}"
            raise GatewayError(message, 404, code="session_not_found")
        return session

    def authorise(self, claims: Iterable[str]) -> Session:
        """Return the open session of the first claim that is a session's key."""
        known = (self._by_key[key] for key in claims if key in self._by_key)
        session = next(known, None)
        if session is None:
            message = "no such session: send the api_key of POST /sessions as API key, "
            message += "as header x-session-key, or as path prefix /s/{api_key}"
            raise GatewayError(message, 401, code="invalid_api_key")
        session.check_open()
        self._check_draining()
        return session

    def end(self, session: Session, how: EndedBy) -> None:
        """End a session now and cancel its calls, so that no more turns are recorded.

        A session that has ended is only written, or becomes a dropped one. It has ended
        even if its line cannot be written (`GatewayError`).
        """
        name = session.session_id
        if session.ended_by is None:
            session.end(how)
            self._ended[name] = self._open.pop(name)
            self._past_turns += session.counts.turns
        elif how == "drop":
            session.ended_by = how
        while len(self._ended) > MAX_ENDED:
            name, oldest = self._ended.popitem(last=False)
            del self._by_key[oldest.api_key]
            self._forgotten.add(hash(name))
        session.write()

    async def _stop(self, session: Session, how: EndedBy) -> None:
        """End a session; wait until its requests are answered, some seconds each.

        Raises `GatewayError` also if it could not be written that answers were lost.
        """
        try:
            self.end(session, how)
        finally:
            await _over(session.requests, _GRACE_SECONDS)
            for task in session.requests.values():
                if task is not None:
                    task.cancel()
            await _over(session.requests, _GRACE_SECONDS)
        session.write_amendments()

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
        session, fields = self.find(session_id), fields or {}
        session.updated(fields)  # raises before the session closes
        if session.ended_by is None:
            session.closing = True
            await _over(session.requests, wait_seconds)
            try:
                session.write_amendments()
            except GatewayError:
                # turns would be trained whose answer no client has received
                session.closing = False
                raise
        session.outcome = session.updated(fields)
        await self._stop(session, how)
        return session.describe()

    async def drop(self, session_id: str) -> dict[str, object]:
        """End a session and exclude all its turns so far from training."""
        session = self.find(session_id)
        await self._stop(session, "drop")
        counts = session.counts
        if turns := range(counts.dropped, counts.turns):
            with writing("the amendment of the dropped turns"):
                self._log.amend(session_id, turns, "dropped", False)
            counts.dropped = turns.stop
        return session.describe()

    async def drain(self, wait_seconds: float) -> None:
        """Accept no more sessions and calls; end all sessions after ``wait_seconds``."""
        self.draining = True
        requests = [each for one in self._open.values() for each in one.requests]
        await _over(requests, wait_seconds)
        ends = [self.finish(session_id, "shutdown") for session_id in self._open]
        for ended in await asyncio.gather(*ends, return_exceptions=True):
            if isinstance(ended, BaseException):
                raise ended

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


async def _over(waiting: Iterable[asyncio.Future[None]], seconds: float) -> None:
    if seconds > 0 and (running := [*waiting]):
        await asyncio.wait(running, timeout=seconds)


def closed_error(session_id: str) -> GatewayError:
    return GatewayError(f"session {session_id!r} is closed", 410, code="session_closed")


@contextmanager
def writing(what: str) -> Iterator[None]:
    """Write to the log in this context; an `OSError` becomes a `GatewayError`."""
    try:
        yield
    except OSError as error:
        message = f"{what} could not be written: {error}"
        raise GatewayError(message, 500, code="log_failed") from error

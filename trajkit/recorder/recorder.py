"""Calls as they come: the online form of a ``turns`` table."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from threading import Lock
from typing import Any, NamedTuple

import pyarrow as pa

from trajkit.errors import InvalidTurnsError, SchemaError, UnknownSessionError
from trajkit.policies import Policy
from trajkit.recorder.session import Recording, Types, with_metadata
from trajkit.rows.linearize import linearize, rows_and_report
from trajkit.turns.messages import ChatMessage, check_text
from trajkit.turns.session_metadata import one_session


class Recorded(NamedTuple):
    """Where `Recorder.record` put a call.

    Attributes
    ----------
    turn_index : int
        Commit order within the session, from 0.
    base_turn : int or None
        The earlier turn whose prompt and output share the longest prefix with this
        prompt. None: no turn shares a token with it.
    shared_length : int
        Length of that prefix in tokens.
    clean : bool
        The prompt begins with the complete prompt and output of the base, or there is no
        base.
    """

    turn_index: int
    base_turn: int | None
    shared_length: int
    clean: bool


class SessionRows(NamedTuple):
    """Rows of a session (`trajkit.schema.ROWS`) and their report (`trajkit.schema.REPORT`,
    one row).
    """

    rows: pa.Table
    report: pa.Table


class Recorder:
    """Sessions in progress, each stored in compact form: new tokens and messages only.

    Every method may be called from several threads. Calls of one session are recorded one
    at a time. `rows` and `turns` contain the calls whose `record` had returned before, and
    never part of a call.

    Examples
    --------
    >>> recorder = Recorder()
    >>> recorder.record("a", prompt_ids=[1, 2], output_ids=[3]).turn_index
    0
    >>> recorder.record("a", prompt_ids=[1, 2, 3, 4], output_ids=[5]).shared_length
    3
    >>> recorder.pop("a", "strict").rows["input_ids"].to_pylist()
    [[1, 2, 3, 4, 5]]
    """

    def __init__(self) -> None:
        self._sessions: dict[str, Recording] = {}
        self._lock = Lock()
        self._types = Types()

    def record(
        self,
        session_id: str,
        *,
        prompt_ids: object,
        output_ids: object,
        output_logprobs: object = None,
        finish_reason: str | None = None,
        ill_formed: bool | None = None,
        use_tool: bool | None = None,
        trainable: bool | None = None,
        prompt_messages: Sequence[ChatMessage] | None = None,
        response_message: ChatMessage | None = None,
        weight_versions: Sequence[Mapping[str, object]] | None = None,
        payloads: Mapping[str, object] | None = None,
        output_mask: object = None,
        mm_items: Sequence[Mapping[str, object]] | None = None,
        request_id: str | None = None,
        model: str | None = None,
        agent_id: str | None = None,
        call_kind: str | None = None,
        started_at: datetime | None = None,
        ended_at: datetime | None = None,
        step: int | None = None,
    ) -> Recorded:
        """Record one call; a session begins with its first call.

        Parameters
        ----------
        session_id : str
        prompt_ids, output_ids : ints in [0, 2**31)
            A list, or a one-dimensional array or buffer of integers. An int32 array is
            compared in place; only its new part is copied.
        output_logprobs : floats, one per output id, optional
            None or empty: the engine gave none. An element None: none for that token.
        finish_reason, ill_formed, trainable, output_mask, weight_versions, mm_items
            As in `trajkit.schema.TURNS`: None, or text, bools, a bool per output id, and
            dicts.
        use_tool : bool, optional
            None: whether ``response_message`` is a dict with ``tool_calls``.
        prompt_messages : sequence of dict, or of pairs (key, role), optional
            The request's chat messages. None: the call is routed by tokens. A message
            that the base contains at the same place is compared with it, not encoded
            again.

            A pair represents a message by its key (`turns.message_key`) and role. The
            session has no body for it, unless a call gives the message as a dict.
            Policies that compare bodies (`trajkit.link`'s ``message_equality``) refuse
            such turns, and `trajkit.validate` accepts them with ``bodies=False``.
            Give a message in one of the two forms throughout: if a dict follows a pair,
            it is stored again, and the delta form shares less than `compact` would.
        response_message : dict, or pair (key, role), optional
            The reply as the next request is expected to contain it.
        payloads : mapping of str to object, optional
            Extra columns of the turn, by name: lists with an element per token, which
            `rows` carries along (see `trajkit.linearize`), or any other value that Arrow
            takes. An array of several dimensions becomes a nested list. Copied. A call
            without a value has a null in the column. The values of a column, over all
            sessions, have one type, or types that Arrow widens to one.
        request_id, model, agent_id, call_kind, started_at, ended_at, step
            Columns of `turns` under these names, if any call gives them: text, datetimes
            with a time zone, and the training step that the run belongs to.

        Returns
        -------
        Recorded

        Raises
        ------
        InvalidTurnsError
            A value breaks a rule of the schema. The session stays as it was.
        UnknownSessionError
            The session was dropped during this call.
        """
        call = {
            "prompt_ids": prompt_ids,
            "output_ids": output_ids,
            "output_logprobs": output_logprobs,
            "finish_reason": finish_reason,
            "ill_formed": ill_formed,
            "trainable": trainable,
            "prompt_messages": prompt_messages,
            "response_message": response_message,
            "weight_versions": weight_versions,
            "output_mask": output_mask,
            "mm_items": mm_items,
        }
        if use_tool is not None:
            call["use_tool"] = use_tool
        metadata = (request_id, model, agent_id, call_kind, started_at, ended_at, step)
        session = self._session(session_id)
        with session.lock:
            if session.dropped:
                raise UnknownSessionError(
                    f"session {session_id!r} was dropped during this call"
                )
            index = session.n_calls
            try:
                columns = with_metadata(payloads, metadata)
                base, shared, clean = session.add(call, columns)
            except (InvalidTurnsError, SchemaError, RecursionError) as error:
                reason = f"session {session_id!r}, turn {index}: {error}"
                if isinstance(error, RecursionError):
                    reason += ": a value is nested too deep"
                raise InvalidTurnsError(reason) from None
        # as Recorded(...) does, without a Python call
        found = (index, None if base < 0 else base, shared, clean)
        return tuple.__new__(Recorded, found)

    def has_session(self, session_id: str) -> bool:
        """Whether the session has a recorded call."""
        return self.n_turns(session_id) > 0

    def n_turns(self, session_id: str) -> int:
        """Number of recorded calls of the session; 0 if it is unknown or was dropped."""
        session = self._known(session_id)
        return 0 if session is None or session.dropped else session.n_calls

    @property
    def sessions(self) -> list[str]:
        """Ids of the sessions that have a call, in order of their first."""
        with self._lock:
            return [name for name, one in self._sessions.items() if one.n_calls]

    def turns(self, session_id: str) -> pa.Table:
        """The session's calls so far, as `trajkit.schema.TURNS_DELTA`.

        Columns that ``payloads`` or metadata of `record` named in any session come last,
        in order of appearance.

        Raises
        ------
        UnknownSessionError
            The session has no recorded call, or it was dropped.
        """
        with self._held(session_id) as session:
            return session.turns(session_id)

    def rows(self, session_id: str, policy: str | Policy, **options: Any) -> pa.Table:
        """The session's training rows so far: `trajkit.linearize` of its `turns`.

        Parameters
        ----------
        session_id : str
        policy : str or Policy
        **options
            ``reward``, ``sessions``, ``max_row_tokens``, ``payloads``: as for
            `trajkit.linearize`. ``group_id``, the task that several rollouts share, and
            ``error``, why the rollout failed: text, and not with ``sessions``.

        Returns
        -------
        Table
            `trajkit.schema.ROWS`.

        Raises
        ------
        UnknownSessionError
            The session has no recorded call, or it was dropped.
        SchemaError, InvalidTurnsError, PolicyError
            As `trajkit.linearize`; or ``sessions`` is given together with ``group_id`` or
            ``error``.
        """
        options = _of_session(session_id, **options)
        with self._held(session_id) as session:
            return linearize(session.turns(session_id), policy, **options)

    def rows_and_report(
        self, session_id: str, policy: str | Policy, **options: Any
    ) -> SessionRows:
        """As `rows`, with the report that `trajkit.linearize` makes of the same turns."""
        options = _of_session(session_id, **options)
        with self._held(session_id) as session:
            turns = session.turns(session_id)
            return SessionRows(*rows_and_report(turns, policy, **options))

    def pop(self, session_id: str, policy: str | Policy, **options: Any) -> SessionRows:
        """As `rows_and_report`, and forget the session.

        No call can be recorded between the two. If no rows can be made, the error is
        raised and the session stays.
        """
        options = _of_session(session_id, **options)
        with self._held(session_id) as session:
            turns = session.turns(session_id)
            made = SessionRows(*rows_and_report(turns, policy, **options))
            self._forget(session, session_id)
            return made

    def drop(self, session_id: str) -> None:
        """Forget a session. Tables that `turns` returned stay valid.

        Raises
        ------
        UnknownSessionError
            The session has no recorded call, or it was dropped.
        """
        with self._held(session_id) as session:
            self._forget(session, session_id)

    def _session(self, session_id: str) -> Recording:
        if not isinstance(session_id, str):
            raise InvalidTurnsError(f"session_id is {session_id!r}: expected a string")
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                check_text(session_id, "session_id")
                session = self._sessions[session_id] = Recording(self._types)
            return session

    def _known(self, session_id: str) -> Recording | None:
        with self._lock:
            is_name = isinstance(session_id, str)  # others may have no hash
            return self._sessions.get(session_id) if is_name else None

    @contextmanager
    def _held(self, session_id: str) -> Iterator[Recording]:
        """A session with a recorded call, whose lock is held."""
        session = self._known(session_id)
        if session is not None and session.n_calls:
            with session.lock:
                if not session.dropped:
                    yield session
                    return
        raise UnknownSessionError(
            f"session {session_id!r} has no recorded call, or was dropped"
        )

    def _forget(self, session: Recording, session_id: str) -> None:
        session.dropped = True
        with self._lock:
            del self._sessions[session_id]


def _of_session(
    session_id: str,
    *,
    group_id: str | None = None,
    error: str | None = None,
    **options: Any,
) -> dict[str, Any]:
    """The options of `linearize` of a session with this group and error."""
    if group_id is not None or error is not None:
        facts = options.pop("reward", None), options.pop("sessions", None)
        options["sessions"] = one_session(session_id, *facts, group_id, error)
    return options

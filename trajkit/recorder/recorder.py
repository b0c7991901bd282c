"""Calls as they come: the online form of a ``turns`` table."""

from collections.abc import Mapping, Sequence
from threading import Lock
from typing import NamedTuple

import pyarrow as pa

from trajkit.errors import InvalidTurnsError, UnknownSessionError
from trajkit.pipeline.rows import Layout, linearize
from trajkit.policies import Policy
from trajkit.recorder.extra_columns import Types
from trajkit.recorder.session import ChatMessage, Recording
from trajkit.turns.messages import check_text
from trajkit.turns.table import locate


class Recorded(NamedTuple):
    """What `Recorder.record` found of a call.

    Attributes
    ----------
    turn_index : int
        Commit order within the session, from 0.
    base_turn : int or None
        An earlier turn whose prompt and output start like this prompt for longest.
        None: no turn shares a token with it.
    shared_length : int
        Tokens that they share at their start.
    clean : bool
        The prompt begins with all of the base's prompt and output, or there is no base.
    """

    turn_index: int
    base_turn: int | None
    shared_length: int
    clean: bool


class Recorder:
    """Sessions under way, each held in compact form: new tokens and new messages only.

    Every method may be called from several threads. Calls of one session are taken one
    after another; `rows` and `turns` see the calls whose `record` had returned when
    they began, and no part of one that is under way.

    Examples
    --------
    >>> recorder = Recorder()
    >>> recorder.record("a", prompt_ids=[1, 2], output_ids=[3]).turn_index
    0
    >>> recorder.record("a", prompt_ids=[1, 2, 3, 4], output_ids=[5]).shared_length
    3
    >>> recorder.rows("a", "strict")["input_ids"].to_pylist()
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
    ) -> Recorded:
        """Take one call into its session; a session begins with its first call.

        Parameters
        ----------
        session_id : str
        prompt_ids, output_ids : ints in [0, 2**31)
            A list, or a one-dimensional array or buffer of integers. An int32 array is
            compared where it lies; only what is new of it is copied.
        output_logprobs : floats, one per output id, optional
            None or empty: the engine gave none. An element None: none for that token.
        finish_reason : str, optional
            The engine's own word.
        ill_formed, trainable : bool, optional
        use_tool : bool, optional
            None: whether ``response_message`` is a dict that has ``tool_calls``.
        prompt_messages : sequence of dict, or of pairs (key, role), optional
            The request's chat messages. None: the call is routed by tokens. A message
            that an earlier call showed is compared with it, not read anew.

            A pair stands for a message by its key (`turns.message_key`) and role. Its
            body is not known then, unless the session has it from a dict: policies that
            compare bodies (`trajkit.link`'s ``equality``) refuse such turns, and
            `trajkit.validate` takes them with ``bodies=False``.
        response_message : dict, or pair (key, role), optional
            The reply as the next request is expected to echo it.
        weight_versions : sequence of dict, optional
            With ``version`` (str), ``start`` and ``stop``: which weights sampled which
            output ids, all of them in order.
        payloads : mapping of str to object, optional
            Extra columns of the turn, by name: lists with an element per token, which
            `rows` carries along (see `trajkit.linearize`), or any other value that Arrow
            takes. An array of several dimensions becomes a nested list. Copied. A call
            that does not give one has a null in it; the values of a column, over all
            sessions, have one type, or types that Arrow widens to one.
        output_mask : bools, one per output id, optional
            False: the token is context only. None: all may be trained.

        Returns
        -------
        Recorded

        Raises
        ------
        InvalidTurnsError
            A value breaks a rule of the schema; the session is as it was before.
        UnknownSessionError
            The session was dropped while this call was under way.
        """
        session = self._sessions.get(session_id) if type(session_id) is str else None
        if session is None:
            session = self._session(session_id)
        with session.lock:
            if session.dropped:
                raise UnknownSessionError(
                    f"session {session_id!r} was dropped while a call was under way"
                )
            index = session.n_calls
            try:
                base, shared, clean = session.add(
                    prompt_ids,
                    output_ids,
                    output_logprobs,
                    finish_reason,
                    ill_formed,
                    use_tool,
                    trainable,
                    prompt_messages,
                    response_message,
                    weight_versions,
                    payloads,
                    output_mask,
                )
            except InvalidTurnsError as error:
                where = f"session {session_id!r}, turn {index}: "
                raise InvalidTurnsError(f"{where}{error}") from None
        # as Recorded(...) does, without a call of Python's between
        found = (index, None if base < 0 else base, shared, clean)
        return tuple.__new__(Recorded, found)

    def turns(self, session_id: str) -> pa.Table:
        """The session's calls so far, as `trajkit.schema.TURNS_DELTA`.

        Columns that ``payloads`` of `record` named in any session come last, in order of
        appearance.

        Raises
        ------
        UnknownSessionError
            Nothing was recorded under that id, or it was dropped.
        """
        session = self._known(session_id)
        with session.lock:
            if session.dropped:
                raise _unknown(session_id)
            return session.turns(session_id)

    def rows(
        self,
        session_id: str,
        policy: str | Policy,
        *,
        reward: float | None = None,
        max_row_tokens: int | None = None,
        layout: Layout = "full",
        payloads: Sequence[str] = (),
    ) -> pa.Table:
        """The session's training rows so far: `trajkit.linearize` of its `turns`.

        Parameters
        ----------
        session_id : str
        policy, reward, max_row_tokens, layout, payloads
            As for `trajkit.linearize`.

        Raises
        ------
        UnknownSessionError
            Nothing was recorded under that id, or it was dropped.
        """
        return linearize(
            locate(self.turns(session_id)),
            policy,
            reward=reward,
            max_row_tokens=max_row_tokens,
            layout=layout,
            payloads=payloads,
        )

    def drop(self, session_id: str) -> None:
        """Forget a session. What `turns` gave of it stays valid.

        Raises
        ------
        UnknownSessionError
            Nothing was recorded under that id, or it was dropped.
        """
        session = self._known(session_id)
        with session.lock:
            if session.dropped:
                raise _unknown(session_id)
            session.dropped = True
            with self._lock:
                del self._sessions[session_id]

    @property
    def sessions(self) -> list[str]:
        """Ids of the sessions that have a call, in order of their first."""
        with self._lock:
            return [name for name, one in self._sessions.items() if one.n_calls]

    def _session(self, session_id: str) -> Recording:
        if not isinstance(session_id, str):
            raise InvalidTurnsError(f"session_id is {session_id!r}: expected a string")
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                check_text(session_id, "session_id")
                session = self._sessions[session_id] = Recording(self._types)
            return session

    def _known(self, session_id: str) -> Recording:
        with self._lock:
            session = self._sessions.get(session_id)
        if session is None or not session.n_calls:
            raise _unknown(session_id)
        return session


def _unknown(session_id: str) -> UnknownSessionError:
    return UnknownSessionError(f"session {session_id!r}: nothing is recorded of it")

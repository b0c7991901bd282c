"""Calls as they come: the online form of a ``turns`` table."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import STOPS
from trajkit.errors import InvalidTurnsError, SchemaError, UnknownSessionError
from trajkit.schema import PAYLOADS, TURNS, TURNS_DELTA
from trajkit.schema.engine import ID_RULE, MAX_LOGPROB, NO_LOGPROB, checks_of
from trajkit.tables.ragged import Ints, Records
from trajkit.turns.messages import Message, MessageLog, check_text, counts_of
from trajkit.turns.records import (
    METADATA,
    Valid,
    check_depth,
    check_extra,
    common_type,
    concat_values,
    lists_of,
    metadata_columns,
    one_value,
    read_ids,
    read_logprobs,
    read_metadata,
)
from trajkit.turns.validation import mm_items
from trajkit.turns.validation import payloads as check_payloads

# what the pages of the site show
__all__ = ["Recorded", "Recorder"]

_LOWEST, _HIGHEST = float(NO_LOGPROB), float(MAX_LOGPROB)
# those of `METADATA` whose rules need the call's ids
_OF_IDS = METADATA[4:]


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


class Recorder:
    """Sessions in progress, each stored in compact form: new tokens and messages only.

    Every method may be called from several threads. Calls of one session are recorded one
    at a time. `turns` contains the calls whose `record` had returned before, and never
    part of a call.

    Examples
    --------
    >>> import trajkit as tk
    >>> recorder = tk.Recorder()
    >>> recorder.record("a", prompt_ids=[1, 2], output_ids=[3]).turn_index
    0
    >>> recorder.record("a", prompt_ids=[1, 2, 3, 4], output_ids=[5]).shared_length
    3
    >>> tk.linearize(recorder.pop("a"), "strict")["input_ids"].to_pylist()
    [[1, 2, 3, 4, 5]]
    """

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}
        self._lock = Lock()

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
        prompt_messages: Sequence[Message] | None = None,
        response_message: Message | None = None,
        weight_versions: Sequence[Mapping[str, object]] | None = None,
        payloads: Mapping[str, object] | None = None,
        output_mask: object = None,
        mm_items: Sequence[Mapping[str, object]] | None = None,
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
            None: whether ``response_message`` has ``tool_calls``.
        prompt_messages : sequence of dict, optional
            The request's chat messages. None: the call is routed by tokens. A message
            that the base contains at the same place is compared with it, not encoded
            again.
        response_message : dict, optional
            The reply as the next request is expected to contain it.
        payloads : mapping of str to object, optional
            Extra columns of the turn, by name: lists with an element per token, which
            rows may carry (see `trajkit.linearize`), or any other value that Arrow takes,
            such as the reward of the session or the time of the call. An array of several
            dimensions becomes a nested list. Copied. A call without a value has a null in
            the column. The values of a column in a session have one type, or types that
            Arrow widens to one.

        Returns
        -------
        Recorded

        Raises
        ------
        InvalidTurnsError
            A value breaks a rule of the schema. The session stays as it was.
        UnknownSessionError
            The session ended during this call.
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
        session = self._session(session_id)
        with session.lock:
            if session.ended:
                raise UnknownSessionError(
                    f"session {session_id!r} ended during this call"
                )
            index = session.n_calls
            try:
                base, shared, clean = session.add(call, payloads)
            except (InvalidTurnsError, SchemaError, RecursionError) as error:
                reason = f"session {session_id!r}, turn {index}: {error}"
                if isinstance(error, RecursionError):
                    reason += ": a value is nested too deep"
                raise InvalidTurnsError(reason) from None
        return Recorded(index, None if base < 0 else base, shared, clean)

    @property
    def sessions(self) -> list[str]:
        """Ids of the sessions that have a call, in order of their first."""
        with self._lock:
            return [name for name, one in self._sessions.items() if one.n_calls]

    def turns(self, session_id: str) -> pa.Table:
        """The session's calls so far, as `trajkit.schema.TURNS_DELTA`.

        The columns that its calls named in ``payloads`` come last, in order of appearance.

        Raises
        ------
        UnknownSessionError
            The session has no recorded call, or it ended.
        """
        with self._held(session_id) as session:
            return session.turns(session_id)

    def pop(self, session_id: str) -> pa.Table:
        """As `turns`, and forget the session. No call can be recorded between the two."""
        with self._held(session_id) as session:
            turns = session.turns(session_id)
            session.ended = True
            with self._lock:
                del self._sessions[session_id]
            return turns

    def _session(self, session_id: str) -> "_Session":
        if not isinstance(session_id, str):
            raise InvalidTurnsError(f"session_id is {session_id!r}: expected a string")
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None:
                check_text(session_id, "session_id")
                session = self._sessions[session_id] = _Session()
            return session

    @contextmanager
    def _held(self, session_id: str) -> Iterator["_Session"]:
        """A session with a recorded call, whose lock is held."""
        with self._lock:
            is_name = isinstance(session_id, str)  # others may have no hash
            session = self._sessions.get(session_id) if is_name else None
        if session is not None and session.n_calls:
            with session.lock:
                if not session.ended:
                    yield session
                    return
        raise UnknownSessionError(
            f"session {session_id!r} has no recorded call, or ended"
        )


class _Session:
    """One session in progress. The caller acquires the lock before it calls a method."""

    def __init__(self) -> None:
        self.lock = Lock()
        self.ended = False
        # by call: the new ids of its prompt, its output and its logprobs, if any, as one
        # block of four-byte values whose address never changes
        self.new_values: list[bytes] = []
        # by call: 0 where a logprob is null, or None
        self.valid: list[Valid] = []
        # by call: its values of the columns `METADATA`
        self.metadata: list[tuple[object, ...]] = []
        # the forest of paths (turns.sessions.Forest), grown call by call
        self.paths = _core.Growth()
        self.message_log = MessageLog()
        self.extra = _ExtraColumns()

    @property
    def n_calls(self) -> int:
        return self.paths.n_calls

    def add(
        self, call: Mapping[str, object], payloads: object
    ) -> tuple[int, int, bool]:
        """Add a call; nothing changes if it raises. Returns the result of
        `_core.Growth.insert`.
        """
        index = self.n_calls
        prompt = read_ids(call["prompt_ids"], "prompt_ids")
        output = read_ids(call["output_ids"], "output_ids")
        logprobs, valid = read_logprobs(call["output_logprobs"], len(output))
        # the copy is checked, so that what is kept is what was checked
        taken = self.paths.take(prompt, output, logprobs, _LOWEST, _HIGHEST)
        if self.paths.fault is not None:
            raise _refusal(taken, *self.paths.fault)
        metadata = read_metadata(call)
        columns = self.extra.read(payloads)
        ruled = (name for name in columns if name.removesuffix("_start") in PAYLOADS)
        known = {name: columns[name] for name in ruled}
        if known or any(one is not None for one in metadata[4:]):
            _check(prompt, output, metadata[4:], known)
        messages = self.message_log.read(
            call["prompt_messages"], call["response_message"], self.paths.base, index
        )
        # in the place of a call that was interrupted: one counts once it is inserted
        self.new_values[index:] = [taken]
        self.valid[index:] = [valid]
        self.metadata[index:] = [metadata]
        self.message_log.add(messages, index)
        self.extra.add(columns, index)
        reason, use_tool, ill_formed, trainable = metadata[:4]
        stop = STOPS.get(str(reason), STOPS["other"])
        flags = (trainable is not False, use_tool is True, ill_formed is True)
        return self.paths.insert(*flags, stop)

    def turns(self, name: str) -> pa.Table:
        """The calls so far: `trajkit.schema.TURNS_DELTA`, then the extra columns.

        Later calls do not change it.
        """
        n_calls, calls = self.n_calls, self.paths.calls
        counts, numbers = counts_of(self.message_log.calls[:n_calls])
        shared, lengths, replies = counts.T
        sessions = np.zeros(n_calls, np.int32)
        book = self.message_log.book
        messages, response = book.columns(numbers, lengths, replies, sessions)
        columns = {
            "session_id": pa.repeat(name, n_calls),
            "turn_index": pa.array(np.arange(n_calls, dtype=np.int32)),
            "base_turn": pa.array(calls["base"], mask=calls["base"] < 0),
            "shared_length": pa.array(calls["own_start"].astype(np.int32)),
            **self._token_columns(calls),
            "shared_messages": pa.array(shared, pa.int32(), mask=lengths < 0),
            "suffix_messages": messages,
            "response": response,
            **metadata_columns(self.metadata[:n_calls]),
        }
        extra = self.extra.columns(n_calls)
        fields = [pa.field(name, column.type) for name, column in extra.items()]
        schema = pa.schema([*TURNS_DELTA, *fields], metadata=TURNS_DELTA.metadata)
        arrays = [*map(columns.__getitem__, TURNS_DELTA.names), *extra.values()]
        return pa.Table.from_arrays(arrays, schema=schema)

    def _token_columns(self, calls: Records) -> dict[str, pa.Array]:
        n_own = calls["prompt_len"] - calls["own_start"]
        blocks = [memoryview(one) for one in self.new_values[: len(calls)]]
        cuts = zip(blocks, 4 * n_own, 4 * (n_own + calls["out_len"]), strict=True)
        parts = [
            (b[:middle], b[middle:stop], b[stop:] or None) for b, middle, stop in cuts
        ]
        valids = ((), (), self.valid[: len(calls)])
        names = ("suffix_ids", "output_ids", "output_logprobs")
        return {
            name: lists_of(
                [one[k] for one in parts], TURNS_DELTA.field(name).type, valid
            )
            for k, (name, valid) in enumerate(zip(names, valids, strict=True))
        }


@dataclass(slots=True)
class _ExtraColumns:
    """The extra columns of a session, with the types that `trajkit.from_records` infers."""

    types: dict[str, pa.DataType] = field(default_factory=dict)
    # by call: its values by name, each as an array of length 1
    calls: list[dict[str, pa.Array]] = field(default_factory=list)

    def read(self, given: object) -> dict[str, pa.Array]:
        """The values of a call, each in a type that its column can have."""
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise InvalidTurnsError(
                f"payloads is of type {type(given).__name__}: expected a dict of column "
                "names and values"
            )
        return {name: self._read(name, given[name]) for name in given}

    def _read(self, name: object, value: object) -> pa.Array:
        check_extra(name, "payloads has the key")
        if not isinstance(name, str) or name in TURNS_DELTA.names:
            raise InvalidTurnsError(
                f"payloads has the key {name!r}, which is a column of the delta form"
            )
        check_depth(name, value)
        try:
            stored = one_value(value)
            type_ = common_type((self.types.get(name, stored.type), stored.type))
            if type_ != self.types.get(name, type_):
                for call in self.calls:
                    if name in call:
                        concat_values([call[name]], type_)
            return concat_values([stored], type_)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidTurnsError(
                f"the value of {name!r} makes no Arrow column with the earlier values: "
                f"{error}"
            ) from None

    def add(self, read: dict[str, pa.Array], call: int) -> None:
        """Add the values of a call that `read` returned, in the place of those of a call
        that was interrupted.
        """
        self.types |= {name: value.type for name, value in read.items()}
        self.calls[call:] = [read]

    def columns(self, n_calls: int) -> dict[str, pa.Array]:
        """The columns of all calls, null where a call gave no value."""
        calls = self.calls[:n_calls]
        return {
            name: concat_values([c.get(name, pa.nulls(1, of)) for c in calls], of)
            for name, of in self.types.items()
        }


def _check(
    prompt: Ints, output: Ints, values: tuple[object, ...], known: dict[str, pa.Array]
) -> None:
    """Raise InvalidTurnsError if columns of a call break a rule of the schema."""
    columns: dict[str, object] = {"prompt_ids": prompt, "output_ids": output}
    columns |= dict(zip(_OF_IDS, values, strict=True))
    made = {n: pa.array([one], TURNS.field(n).type) for n, one in columns.items()}
    table = pa.table({**made, **known})
    for check in (*checks_of(TURNS, _OF_IDS), mm_items, check_payloads):
        for rows, explain in check(table):
            if len(rows):
                raise InvalidTurnsError(explain(0))


def _refusal(values: bytes, which: int, at: int, place: int) -> InvalidTurnsError:
    """The error for a value of a call, as `_core.Growth.fault` gives it."""
    name = ("prompt_ids", "output_ids", "output_logprobs")[which]
    rule = ID_RULE
    if which == 2:
        rule = (
            "a log-probability is finite, above -9999 and at most 0 (1e-4 is tolerated "
            "for rounding)"
        )
    value = np.frombuffer(values, np.float32 if which == 2 else np.int32)[place]
    return InvalidTurnsError(f"{name}[{at}] is {value}: {rule}")

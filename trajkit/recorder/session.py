"""One session in progress, in compact form: new tokens, messages and columns only."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from threading import Lock

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import STOPS
from trajkit.errors import InvalidTurnsError
from trajkit.schema import PAYLOADS, TURNS, TURNS_DELTA
from trajkit.schema.engine import ID_RULE, MAX_LOGPROB, NO_LOGPROB, checks_of
from trajkit.tables.ragged import Ints, Records
from trajkit.turns.messages import MessageLog, counts_of
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

_LOWEST, _HIGHEST = float(NO_LOGPROB), float(MAX_LOGPROB)
# those of `METADATA` whose rules need the call's ids
_OF_IDS = METADATA[4:]

_TEXT = (pa.string(), (str,), "a string")
_TIME = (pa.timestamp("us", tz="UTC"), (datetime,), "a datetime with a time zone")
CALL_METADATA: dict[str, tuple[pa.DataType, tuple[type, ...], str]] = {
    **dict.fromkeys(("request_id", "model", "agent_id", "call_kind"), _TEXT),
    **dict.fromkeys(("started_at", "ended_at"), _TIME),
    "step": (pa.int64(), (int, np.integer), "an integer of 64 bits"),
}
"""Columns that `Recorder.record` has an argument for: their types, and what they take."""


def with_metadata(payloads: object, values: tuple[object, ...]) -> object:
    """The payloads of a call and, in their types, the values of `CALL_METADATA` that are
    given.
    """
    if {*map(type, values)} == {type(None)} or not isinstance(payloads, Mapping | None):
        return payloads  # what is no mapping is refused as such
    result = dict(payloads or {})
    for name, value in zip(CALL_METADATA, values, strict=True):
        if value is None:
            continue
        if name in result:
            raise InvalidTurnsError(f"{name} is also a key of payloads: give it once")
        type_, kinds, expected = CALL_METADATA[name]
        fits = isinstance(value, kinds) and not isinstance(value, bool)
        try:
            if not fits or (isinstance(value, datetime) and value.tzinfo is None):
                raise TypeError
            result[name] = pa.scalar(value, type_)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError, TypeError):
            raise InvalidTurnsError(
                f"{name} is {value!r}: expected {expected}"
            ) from None
    return result


@dataclass(slots=True)
class Types:
    """The type of each extra column in all sessions of a recorder."""

    known: dict[str, pa.DataType] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)


@dataclass(slots=True)
class ExtraColumns:
    """The extra columns of a session, with the types that `trajkit.from_records` infers.

    Every session has all columns of its recorder, so that all have the same schema.
    """

    types: Types
    # by call: its values by name, each as an array of length 1
    calls: list[dict[str, pa.Array]] = field(default_factory=list)

    def read(self, given: object) -> dict[str, pa.Array]:
        """The values of a call, which `add` makes part of the session."""
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
            type_ = common_type((self.types.known.get(name, stored.type), stored.type))
            if type_ != self.types.known.get(name, type_):
                earlier = [call[name] for call in self.calls if name in call]
                concat_values([*earlier, stored], type_)
            return stored
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise _unfit(name, error) from None

    def add(self, read: dict[str, pa.Array], call: int) -> None:
        """Add the values of a call that `read` returned.

        They take the place of those of a call that was interrupted. Raises
        InvalidTurnsError if another session has given a column another type meanwhile.
        """
        known = self.types.known
        for name, value in read.items():
            if known.get(name) == value.type:
                continue
            with self.types.lock:
                try:
                    known[name] = common_type((known.get(name, value.type), value.type))
                except (pa.ArrowException, TypeError) as error:
                    raise _unfit(name, error) from None
        self.calls[call:] = [read]

    def columns(self, n_calls: int) -> dict[str, pa.Array]:
        """The columns of all calls, null if a call gave no value, in order of arrival."""
        calls, known = self.calls[:n_calls], self.types.known.copy()
        return {
            name: concat_values([c.get(name, pa.nulls(1, of)) for c in calls], of)
            for name, of in known.items()
        }


def _unfit(name: str, error: Exception) -> InvalidTurnsError:
    return InvalidTurnsError(
        f"the value of {name!r} makes no Arrow column with the earlier values: {error}"
    )


class Recording:
    """One session in progress. The caller acquires the lock before it calls a method."""

    def __init__(self, types: Types) -> None:
        self.lock = Lock()
        self.dropped = False
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
        self.extra = ExtraColumns(types)

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
        )
        rule += "for rounding)"
    value = np.frombuffer(values, np.float32 if which == 2 else np.int32)[place]
    return InvalidTurnsError(f"{name}[{at}] is {value}: {rule}")

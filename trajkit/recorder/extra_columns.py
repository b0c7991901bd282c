"""Extra columns of turns, recorded call by call."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from threading import Lock

import numpy as np
import pyarrow as pa

from trajkit.errors import InvalidTurnsError
from trajkit.schema import TURNS_DELTA
from trajkit.turns.records import (
    cast_values,
    check_depth,
    check_extra,
    common_type,
    one_value,
)

_TIME = pa.timestamp("us", tz="UTC")
METADATA = {
    "request_id": pa.string(),
    "model": pa.string(),
    "agent_id": pa.string(),
    "call_kind": pa.string(),
    "started_at": _TIME,
    "ended_at": _TIME,
    "step": pa.int64(),
}
"""Columns that `Recorder.record` has an argument for, with their types."""


def with_metadata(payloads: object, values: tuple[object, ...]) -> object:
    """The payloads of a call and, in their types, the values of `METADATA` that are
    given.

    Raises InvalidTurnsError for a value of another type, or one that payloads have as
    well.
    """
    if not any(value is not None for value in values):
        return payloads
    if payloads is not None and not isinstance(payloads, Mapping):
        return payloads  # refused as such
    result = dict(payloads or {})
    for (name, type_), value in zip(METADATA.items(), values, strict=True):
        if value is None:
            continue
        if name in result:
            raise InvalidTurnsError(f"{name} is also a key of payloads: give it once")
        result[name] = _scalar(name, value, type_)
    return result


def _scalar(name: str, value: object, type_: pa.DataType) -> pa.Scalar:
    if type_ == _TIME:
        expected = "a datetime with a time zone"
        fits = isinstance(value, datetime) and value.tzinfo is not None
    elif type_ == pa.string():
        expected, fits = "a string", isinstance(value, str)
    else:
        expected = "an integer of 64 bits"
        fits = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if fits:
        try:
            return pa.scalar(value, type_)
        except (pa.ArrowException, OverflowError, UnicodeEncodeError):
            pass
    raise InvalidTurnsError(f"{name} is {value!r}: expected {expected}")


@dataclass(slots=True)
class Column:
    """The values of a column so far."""

    type: pa.DataType = field(default_factory=pa.null)
    # the calls that gave a value, and each value as an array of length 1
    calls: list[int] = field(default_factory=list)
    values: list[pa.Array] = field(default_factory=list)


@dataclass(slots=True)
class Types:
    """The type of each column in all sessions of a recorder."""

    known: dict[str, pa.DataType] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def add(self, name: str, type_: pa.DataType) -> None:
        """Widen a column's type so that it can store values of this type."""
        if self.known.get(name) != type_:
            with self.lock:
                known = self.known.get(name, type_)
                self.known[name] = common_type((known, type_))


@dataclass(slots=True)
class ExtraColumns:
    """The extra columns of a session, with the types that `trajkit.from_records` infers.

    Every session has all columns of its recorder, so that all have the same schema.
    """

    types: Types = field(default_factory=Types)
    columns: dict[str, Column] = field(default_factory=dict)

    def read(self, given: object, call: int, where: str) -> dict[str, Column]:
        """The values of a call as columns, which `add` makes part of the session.

        ``where`` begins the error: ``session 'a', turn 7: ``. Raises InvalidTurnsError
        if a name is taken, or Arrow cannot store a value with the earlier ones.
        """
        if given is None:
            return {}
        if not isinstance(given, Mapping):
            raise InvalidTurnsError(
                f"{where}payloads is of type {type(given).__name__}: expected a dict of "
                "column names and values"
            )
        return {name: self._read(name, given[name], call, where) for name in given}

    def _read(self, name: object, value: object, call: int, where: str) -> Column:
        check_extra(name, f"{where}payloads has the key")
        if not isinstance(name, str) or name in TURNS_DELTA.names:
            raise InvalidTurnsError(
                f"{where}payloads has the key {name!r}, which is a column of the delta "
                "form"
            )
        check_depth(name, value, where)
        known = self.columns.get(name, Column())
        try:
            array = one_value(value)
            wanted = self.types.known.get(name, known.type)
            if array.type == known.type == wanted:
                return Column(known.type, [call], [array])
            type_ = common_type((known.type, wanted, array.type))
            if type_ == known.type:
                return Column(type_, [call], [cast_values(array, type_)])
            # the earlier values need a cast to the wider type
            values = [
                *(cast_values(one, type_) for one in known.values),
                cast_values(array, type_),
            ]
            return Column(type_, [*known.calls, call], values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise _unfit(where, name, error) from None

    def add(self, read: dict[str, Column], call: int) -> None:
        """Add the values of a call that `read` returned.

        They take the place of those of a call that was interrupted. Raises
        InvalidTurnsError if another session has given a column another type meanwhile.
        """
        for name, column in read.items():
            try:
                self.types.add(name, column.type)
            except (pa.ArrowException, TypeError) as error:
                raise _unfit("", name, error) from None
        for column in self.columns.values():
            while column.calls and column.calls[-1] >= call:
                column.calls.pop()
            del column.values[len(column.calls) :]
        for name, column in read.items():
            known = self.columns.get(name)
            if known is None or known.type != column.type:
                self.columns[name] = column
            else:
                known.calls += column.calls
                known.values += column.values

    def fields(self) -> list[pa.Field]:
        """The fields of the columns, in the order in which the recorder received them."""
        return [
            pa.field(name, type_) for name, type_ in self.types.known.copy().items()
        ]

    def arrays(self, fields: Sequence[pa.Field], n_calls: int) -> list[pa.Array]:
        """The columns of all calls, null if a call gave no value."""
        result = []
        for one in fields:
            column = self.columns.get(one.name, Column())
            parts, due = [], 0
            # after them may be one of an interrupted call
            n_known = bisect_left(column.calls, n_calls)
            for call, value in zip(
                column.calls[:n_known], column.values[:n_known], strict=True
            ):
                value = cast_values(value, one.type)
                parts += [pa.nulls(call - due, one.type), value]
                due = call + 1
            parts.append(pa.nulls(n_calls - due, one.type))
            result.append(pa.concat_arrays(parts))
        return result


def _unfit(where: str, name: str, error: Exception) -> InvalidTurnsError:
    return InvalidTurnsError(
        f"{where}the value of {name!r} makes no Arrow column with the earlier values: "
        f"{error}"
    )

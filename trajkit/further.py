"""Further columns of turns, taken call by call."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from trajkit.errors import InvalidTurnsError
from trajkit.records import check_extra
from trajkit.schema import TURNS_DELTA


@dataclass(slots=True)
class Column:
    """The values of a column so far."""

    type: pa.DataType = field(default_factory=pa.null)
    # which calls gave a value, and each as an array of one
    calls: list[int] = field(default_factory=list)
    values: list[pa.Array] = field(default_factory=list)


@dataclass(slots=True)
class Further:
    """Columns whose types are what `trajkit.from_records` would make of their values."""

    columns: dict[str, Column] = field(default_factory=dict)

    def read(self, given: object, call: int, where: str) -> dict[str, Column]:
        """Columns with a call's values; nothing counts yet.

        Parameters
        ----------
        given : mapping of name to value, or None
        call : int
        where : str
            For the error: ``session 'a', turn 7: ``.

        Raises
        ------
        InvalidTurnsError
            A name is taken, or a value makes no Arrow column with those before it.
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
        known = self.columns.get(name, Column())
        try:
            array = pa.array([value])
            if array.type == known.type:
                return Column(known.type, [call], [array])
            type_ = _common(known.type, array.type)
            if type_ == known.type:
                return Column(type_, [call], [_cast(array, type_)])
            # a wider type than the calls before needed
            values = [*(_cast(one, type_) for one in known.values), _cast(array, type_)]
            return Column(type_, [*known.calls, call], values)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise InvalidTurnsError(
                f"{where}the value of {name!r} makes no Arrow column with those before "
                f"it: {error}"
            ) from None

    def add(self, read: dict[str, Column]) -> None:
        """Let what was read count."""
        for name, column in read.items():
            known = self.columns.get(name)
            if known is None or known.type != column.type:
                self.columns[name] = column
            else:
                known.calls += column.calls
                known.values += column.values

    def fields(self) -> list[pa.Field]:
        """The columns' fields, in the order in which they came."""
        return [pa.field(name, column.type) for name, column in self.columns.items()]

    def arrays(self, n_calls: int) -> list[pa.Array]:
        """The columns of all calls, null where a call gave no value."""
        result = []
        for column in self.columns.values():
            parts, due = [], 0
            for call, value in zip(column.calls, column.values, strict=True):
                parts += [pa.nulls(call - due, column.type), value]
                due = call + 1
            parts.append(pa.nulls(n_calls - due, column.type))
            result.append(pa.concat_arrays(parts))
        return result


def _cast(array: pa.Array, type_: pa.DataType) -> pa.Array:
    # Arrow casts a list of nulls to its own type as one that cannot be read
    return array if array.type == type_ else array.cast(type_)


def _common(a: pa.DataType, b: pa.DataType) -> pa.DataType:
    """The type that takes the values of both."""
    schemas = [pa.schema([pa.field("value", one)]) for one in (a, b)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type

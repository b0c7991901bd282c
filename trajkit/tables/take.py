"""Rows of a table by index, for any column types.

Arrow has no kernel that takes from views of text or bytes, which polars hands over, so
these are cast to types that have one, and back.
"""

from collections.abc import Iterator
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.errors import ArgumentError, SchemaError, UnknownSessionError
from trajkit.schema.engine import list_values as list_values
from trajkit.tables import lazy_compute as pc

_Column = TypeVar("_Column", pa.Array, pa.ChunkedArray)


def take_rows(table: pa.Table, indices: pa.Array) -> pa.Table:
    """The rows of these indices, in this order, in the table's own types.

    Raises SchemaError if Arrow cannot reorder the values of a column's type.
    """
    columns = [
        take_values(column, indices, name)
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def take_values(column: _Column, indices: pa.Array, name: str) -> _Column:
    """`take_rows` of one column; ``name`` is what errors call it."""
    plain = without_views(column.type)
    try:
        if plain == column.type:
            return column.take(indices)
        return column.cast(plain).take(indices).cast(column.type)
    except pa.ArrowNotImplementedError:
        raise SchemaError(
            f"column {name!r} has the type {column.type}, whose values cannot be "
            "reordered: cast it to another type first"
        ) from None


def take_session(table: pa.Table, session_id: str, what: str = "turns") -> pa.Table:
    """The lines of one session; UnknownSessionError if the table, called ``what``, has
    none.
    """
    found = table.slice(0, 0)
    if not isinstance(session_id, str):
        raise ArgumentError(f"session_id={session_id!r}: expected a string")
    if "session_id" in table.column_names:
        found = table.filter(pc.equal(table["session_id"], session_id))
    if not found.num_rows:
        raise UnknownSessionError(f"the {what} have no session {session_id!r}")
    return found


def tuples(table: pa.Table, *names: str) -> Iterator[tuple[Any, ...]]:
    """The values of some columns, line by line, as Python objects."""
    return zip(*(table.column(name).to_pylist() for name in names), strict=True)


def row_lengths(rows: pa.Table) -> npt.NDArray[np.int64]:
    """Tokens of each row, whose shared ones a file may lack."""
    if "suffix_ids" in rows.column_names:
        n = pc.list_value_length(rows.column("suffix_ids"))
        n = pc.add(n, rows.column("suffix_start"))
    else:
        n = pc.list_value_length(rows.column("input_ids"))
    return np.asarray(n, np.int64)


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """A batch without rows, of any schema (`from_pylist` fails on categories of views)."""
    return pa.RecordBatch.from_arrays(
        [pa.nulls(0, type_) for type_ in schema.types], schema=schema
    )


def without_views(type_: pa.DataType) -> pa.DataType:
    """The type with large text and bytes instead of views, at any depth."""
    if pa.types.is_string_view(type_):
        return pa.large_string()
    if pa.types.is_binary_view(type_):
        return pa.large_binary()
    if pa.types.is_struct(type_):
        return pa.struct([_plain(field) for field in type_])
    if pa.types.is_map(type_):
        key, item = _plain(type_.key_field), _plain(type_.item_field)
        return pa.map_(key, item, type_.keys_sorted)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(_plain(type_.value_field), type_.list_size)
    if pa.types.is_list(type_):
        return pa.list_(_plain(type_.value_field))
    if pa.types.is_large_list(type_):
        return pa.large_list(_plain(type_.value_field))
    return type_


def _plain(field: pa.Field) -> pa.Field:
    return field.with_type(without_views(field.type))

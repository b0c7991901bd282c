"""Rows of a table by index, for any column types, and columns exchanged for others.

Arrow has no kernel that takes from views of text or bytes, which polars hands over, so
these are cast to types that have one, and back.
"""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, TypeAlias, TypeVar

import numpy as np
import pyarrow as pa

from trajkit.errors import ArgumentError, SchemaError, UnknownSessionError
from trajkit.schema import SEGMENT_KINDS, SPAN, SPAN_KINDS
from trajkit.schema.engine import list_values as list_values
from trajkit.tables import lazy_compute as pc
from trajkit.tables.ragged import Longs, Ragged, combined, lengths

_Column = TypeVar("_Column", pa.Array, pa.ChunkedArray)
Columns: TypeAlias = dict[str, pa.Array]


def take_rows(table: pa.Table, indices: pa.Array) -> pa.Table:
    """The rows of these indices, in this order, in the table's own types."""
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
    """The lines of one session, which the table, called ``what``, must have."""
    if not isinstance(session_id, str):
        raise ArgumentError(f"session_id={session_id!r}: expected a string")
    found = table.slice(0, 0)
    if "session_id" in table.column_names:
        own = pc.equal(table["session_id"].cast(pa.large_string()), session_id)
        found = take_rows(table, pc.indices_nonzero(own))
    if not found.num_rows:
        raise UnknownSessionError(f"the {what} have no session {session_id!r}")
    return found


def tuples(table: pa.Table, *names: str) -> Iterator[tuple[Any, ...]]:
    return zip(*(table.column(name).to_pylist() for name in names), strict=True)


def row_lengths(rows: pa.Table) -> Longs:
    """Tokens of each row, whose shared ones a file may lack."""
    if "suffix_ids" not in rows.column_names:
        return lengths(rows.column("input_ids"))
    n_suffix, start = lengths(rows.column("suffix_ids")), rows.column("suffix_start")
    return np.asarray(n_suffix + np.asarray(start), np.int64)


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
    fields = map(type_.field, range(type_.num_fields))
    inner = [field.with_type(without_views(field.type)) for field in fields]
    if pa.types.is_struct(type_):
        return pa.struct(inner)
    if pa.types.is_map(type_):
        return pa.map_(*inner[0].type, type_.keys_sorted)
    if pa.types.is_fixed_size_list(type_):
        return pa.list_(inner[0], type_.list_size)
    if pa.types.is_list(type_):
        return pa.list_(inner[0])
    return pa.large_list(inner[0]) if pa.types.is_large_list(type_) else type_


def with_column(
    table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray
) -> pa.Table:
    """The table with a column that replaces the one of that name, or is appended."""
    if name in table.column_names:
        index = table.column_names.index(name)
        field = table.field(index).with_type(column.type)
        return table.set_column(index, field, column)
    return table.append_column(name, column)


def check_no_clash(
    table: pa.Table, form: pa.Schema, wanted: pa.Schema, what: str
) -> None:
    """Raise SchemaError if an extra column has the name of one that will be made."""
    for name in wanted.names:
        if name not in form.names and name in table.column_names:
            raise SchemaError(
                f"column {name!r} would occur twice, because the other {what} has a "
                "column of that name: rename it"
            )


def replace_columns(
    table: pa.Table, form: pa.Schema, wanted: pa.Schema, parts: Sequence[Columns]
) -> pa.Table:
    """The table, which is in the form ``form``, with the columns of another schema.

    ``parts`` has the columns that only ``wanted`` has, for consecutive ranges of rows.
    Extra columns are kept.
    """
    made = {
        name: pa.chunked_array([part[name] for part in parts], wanted.field(name).type)
        for name in wanted.names
        if name not in form.names
    }
    extra = (field for field in table.schema if field.name not in form.names)
    schema = pa.schema([*wanted, *extra], metadata=table.schema.metadata)
    columns = [
        made[name] if name in made else table.column(name) for name in schema.names
    ]
    return pa.Table.from_arrays(columns, schema=schema)


@cache
def dictionary_for(names: tuple[str, ...]) -> pa.Array:
    """The dictionary of a category column: all of its names, in order."""
    # not at import: pyarrow would import pandas, if that is installed
    return pa.array(names)


def normalize_categories(rows: pa.Table) -> pa.Table:
    """Canonical rows with complete dictionaries; unknown names stay as they are.

    A file writer may leave unused names out of a dictionary, and Arrow calls tables with
    different dictionaries unequal.
    """
    segments = _encode(combined(rows.column("segment_kind")), SEGMENT_KINDS)
    column = rows.column("spans")
    lists, null = Ragged.of(column), np.asarray(column.is_null())
    fields, at = lists.values.flatten(), SPAN.get_field_index("kind")
    fields[at] = _encode(fields[at], SPAN_KINDS)
    values = pa.StructArray.from_arrays(
        fields, fields=list(SPAN), mask=lists.values.is_null()
    )
    spans = Ragged(values, lists.offsets).to_arrow(null, column.type)
    return with_column(with_column(rows, "segment_kind", segments), "spans", spans)


def _encode(array: pa.DictionaryArray, names: tuple[str, ...]) -> pa.DictionaryArray:
    """The array with the dictionary of ``names``, unless it has other names."""
    complete = dictionary_for(names)
    indices = pc.index_in(array.cast(complete.type), complete, skip_nulls=True)
    if indices.null_count > array.null_count:
        return array
    indices = indices.cast(array.type.index_type)
    return pa.DictionaryArray.from_arrays(indices, complete)

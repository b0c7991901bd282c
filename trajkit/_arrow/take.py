"""Rows of a table by their numbers, whatever the types of its columns.

Arrow has no kernel that takes from views of text or bytes, which are what polars hands
over. Columns that trajkit does not know pass through it as they are, so these are taken by
way of the types that have one.
"""

from typing import TypeVar

import pyarrow as pa

from trajkit.errors import SchemaError

_Column = TypeVar("_Column", pa.Array, pa.ChunkedArray)


def picked(table: pa.Table, rows: pa.Array) -> pa.Table:
    """The rows of these numbers, in this order, in the table's own types.

    Raises
    ------
    SchemaError
        A column is of a type whose values cannot be put in another order.
    """
    columns = [
        picked_column(column, rows, name)
        for name, column in zip(table.column_names, table.columns, strict=True)
    ]
    return pa.Table.from_arrays(columns, schema=table.schema)


def picked_column(column: _Column, rows: pa.Array, name: str) -> _Column:
    """As `picked`, of one column; ``name`` is what errors call it."""
    plain = without_views(column.type)
    try:
        if plain == column.type:
            return column.take(rows)
        return column.cast(plain).take(rows).cast(column.type)
    except pa.ArrowNotImplementedError:
        raise SchemaError(
            f"column {name!r} is {column.type}, whose values cannot be put in another "
            "order: cast it to another type first"
        ) from None


def no_rows(schema: pa.Schema) -> pa.RecordBatch:
    """A batch of the schema without rows; `from_pylist` knows no categories of views."""
    return pa.RecordBatch.from_arrays(
        [pa.nulls(0, type_) for type_ in schema.types], schema=schema
    )


def without_views(type_: pa.DataType) -> pa.DataType:
    """The type with large text and bytes for views of them, at any depth."""
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

"""Exchange the columns of one schema for those of another.

Turns are in full or delta form, rows in a file may be without shared tokens. Extra
columns are kept.
"""

from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

from trajkit.errors import SchemaError

Columns: TypeAlias = dict[str, pa.Array]


def check_no_clash(
    table: pa.Table, form: pa.Schema, wanted: pa.Schema, what: str
) -> None:
    """Raise SchemaError if an extra column has the name of one that will be made.

    ``what`` is what the two schemas are, such as "form of turns".
    """
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
    """
    made = {
        name: pa.chunked_array([part[name] for part in parts], wanted.field(name).type)
        for name in wanted.names
        if name not in form.names
    }
    extra = (field for field in table.schema if field.name not in form.names)
    fields = [*wanted, *extra]
    return pa.Table.from_arrays(
        [
            made[field.name] if field.name in made else table.column(field.name)
            for field in fields
        ],
        schema=pa.schema(fields, metadata=table.schema.metadata),
    )


def with_column(
    table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray
) -> pa.Table:
    """The table with a column that replaces the one of that name, or is appended."""
    if name in table.column_names:
        index = table.column_names.index(name)
        field = table.field(index).with_type(column.type)
        return table.set_column(index, field, column)
    return table.append_column(name, column)

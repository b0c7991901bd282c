"""A table in another form: columns of one schema become those of the other.

Turns are in full or in delta form, rows in the layout "full" or "suffix"; further columns
stay as they are.
"""

from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

from trajkit.errors import SchemaError

Columns: TypeAlias = dict[str, pa.Array]


def check_free(table: pa.Table, form: pa.Schema, wanted: pa.Schema, what: str) -> None:
    """Refuse a further column that has the name of one that is to be made.

    ``what`` says what the other form is: "form of turns".

    Raises
    ------
    SchemaError
    """
    for name in wanted.names:
        if name not in form.names and name in table.column_names:
            raise SchemaError(
                f"column {name!r} would stand twice: the other {what} has one of that "
                "name"
            )


def laid_out(
    table: pa.Table, form: pa.Schema, wanted: pa.Schema, parts: Sequence[Columns]
) -> pa.Table:
    """The table with the columns of another form.

    Parameters
    ----------
    table : Table
        In the form ``form``, with any further columns.
    form, wanted : Schema
    parts : sequence of dict
        The columns that only ``wanted`` has, of the rows in order.
    """
    made = {
        name: pa.chunked_array([part[name] for part in parts], wanted.field(name).type)
        for name in wanted.names
        if name not in form.names
    }
    fields = [
        *wanted,
        *(field for field in table.schema if field.name not in form.names),
    ]
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
    """The table with a column put in place of the one of that name, or behind."""
    if name in table.column_names:
        at = table.column_names.index(name)
        return table.set_column(at, table.field(at).with_type(column.type), column)
    return table.append_column(name, column)

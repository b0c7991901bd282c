"""Tables in types that Parquet takes, whatever their further columns are."""

from functools import lru_cache

import pyarrow as pa

from trajkit._arrow.take import without_views
from trajkit.errors import FormatError


def storable(table: pa.Table) -> pa.Table:
    """The table as Parquet can hold it: categories of views become such of plain text.

    pyarrow writes views, but no dictionary of them, which is what polars' categories
    are, and no part of a struct that has some.

    Raises
    ------
    FormatError
        A column is of a type that Parquet does not have.
    """
    for at, field in enumerate(table.schema):
        column = table.column(at)
        if pa.types.is_dictionary(field.type):
            column = _of_plain_values(column)
        elif without_views(field.type) != field.type and pa.types.is_nested(field.type):
            column = column.cast(without_views(field.type))
        if column.type != field.type:
            table = table.set_column(at, field.with_type(column.type), column)
        refused = _refused(column.type)
        if refused:
            raise FormatError(
                f"Parquet cannot hold column {field.name!r} of type {field.type}: "
                f"{refused}"
            )
    return table


def _of_plain_values(column: pa.ChunkedArray) -> pa.ChunkedArray:
    values = without_views(column.type.value_type)
    if values == column.type.value_type:
        return column
    ordered = column.type.ordered
    return pa.chunked_array(
        [
            pa.DictionaryArray.from_arrays(
                chunk.indices, chunk.dictionary.cast(values), ordered=ordered
            )
            for chunk in column.chunks
        ],
        pa.dictionary(column.type.index_type, values, ordered),
    )


@lru_cache(maxsize=256)
def _refused(type_: pa.DataType) -> str:
    """Why pyarrow does not write a column of this type; empty: it does."""
    import pyarrow.parquet as pq  # not of what `import trajkit` loads

    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([("", type_)])).close()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        return str(error)
    return ""

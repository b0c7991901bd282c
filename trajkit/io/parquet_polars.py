"""Parquet files, written by polars where it is installed and keeps the table as it is.

Arrow's encoder goes through lists element by element; polars' takes a third of the time.
polars cuts row groups by a number of rows and not by bytes. The first rows say which; where
later ones turn out much longer, Arrow writes the file.
"""

import base64
import itertools
import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pyarrow as pa

from trajkit.io.arrow import joined, read_batches, write_pieces

# Bytes of rows that say how many are to make a row group. A file that has no more is
# written by Arrow, and polars need not be loaded.
_FIRST_BYTES = 32 << 20
# Bytes of a row group, of which polars holds several, and what one may come to.
_GROUP_BYTES, _MOST_BYTES = 8 << 20, 128 << 20
# Of zstd, as Arrow has it. Polars' own takes twice the time, and saves nothing on ids.
_LEVEL = 1
# The first version that takes the schema of what it writes.
_POLARS = (2, 1)
# What polars stores as Arrow does.
_KEPT = {
    pa.bool_(),
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float32(), pa.float64(), pa.string(), pa.large_string()),
}
# The child of a fork has none of the threads that polars works on.
_forked: list[bool] = []
os.register_at_fork(after_in_child=lambda: _forked.append(True))


def write_parquet(tables: Iterator[pa.Table], schema: pa.Schema, path: Path) -> None:
    """Write tables to a Parquet file.

    Parameters
    ----------
    tables : iterator of Table
        Of one schema.
    schema : Schema
        Of the file where there are no tables.
    path : path

    Raises
    ------
    SchemaError
        The tables do not make one.
    """
    first: list[pa.Table] = []
    n_bytes = 0
    while n_bytes < _FIRST_BYTES and (table := next(tables, None)) is not None:
        first.append(table)
        n_bytes += table.nbytes
    n_rows = sum(len(table) for table in first)
    tables = itertools.chain(first, tables)
    if n_bytes < _FIRST_BYTES or not _suits_polars(first[0].schema):
        del first, table
        _by_arrow(tables, schema, path)
        return
    schema = first[0].schema
    del first, table
    left = _by_polars(tables, schema, path, max(1, n_rows * _GROUP_BYTES // n_bytes))
    if left is not None:
        begun = path.with_name(f"{path.name}.begun")
        os.replace(path, begun)
        try:
            _by_arrow(itertools.chain(_tables(begun), [left], tables), schema, path)
        finally:
            os.unlink(begun)


def _by_arrow(tables: Iterator[pa.Table], schema: pa.Schema, path: Path) -> None:
    with pa.OSFile(str(path), "w") as file:
        write_pieces(tables, schema, file, "parquet")


def _tables(path: Path) -> Iterator[pa.Table]:
    for batch in read_batches(path, "parquet", None):
        yield pa.Table.from_batches([batch])


def _by_polars(
    tables: Iterator[pa.Table], schema: pa.Schema, path: Path, group: int
) -> pa.Table | None:
    """Write row groups of so many rows, up to a table that Arrow has to write."""
    import polars as pl
    from polars.io.plugins import register_io_source

    plain, none = _plain(schema), schema.empty_table()
    left: list[pa.Table] = []
    failed: list[BaseException] = []

    def frames(*_: object) -> Iterator[pl.DataFrame]:
        n = n_bytes = 0  # of the row group that is being gathered
        try:
            for table in tables:
                joined([none, table.slice(0, 0)])  # or it says why not
                n, n_bytes = n + len(table), n_bytes + table.nbytes
                if n >= group:
                    n %= group
                    n_bytes = n * table.nbytes // len(table)
                elif n_bytes > _MOST_BYTES:
                    left.append(table)
                    return
                yield pl.DataFrame(table.cast(plain))
        # polars would give it another name
        except BaseException as error:
            failed.append(error)

    said = {
        key.decode(): text.decode() for key, text in (schema.metadata or {}).items()
    }
    # what readers of Arrow take the types from; polars would say those of ``plain``
    said["ARROW:schema"] = base64.b64encode(schema.serialize()).decode()
    register_io_source(
        frames, schema=pl.DataFrame(plain.empty_table()).schema
    ).sink_parquet(
        path,
        compression_level=_LEVEL,
        row_group_size=group,
        arrow_schema=plain,
        metadata=said,
    )
    if failed:
        raise failed[0]
    return left[0] if left else None


def _suits_polars(schema: pa.Schema) -> bool:
    """Whether polars is there, says the same of the table as Arrow, and is faster at it."""
    names = schema.names
    return (
        any(_is_list(field.type) for field in schema)
        and all(_is_kept(field.type) for field in schema)
        and len(set(names)) == len(names)
        and _is_text(schema.metadata or {})
        and not _forked
        and _polars_is_here()
    )


@cache
def _polars_is_here() -> bool:
    try:
        found = version("polars")
    except PackageNotFoundError:
        return False
    if tuple(int(part) for part in found.split(".")[:2]) < _POLARS:
        return False
    import polars as pl

    # a thread of polars' waits for the tables, and another must go on
    n_threads: int = pl.thread_pool_size()
    return n_threads > 1


def _is_text(metadata: Mapping[bytes, bytes]) -> bool:
    try:
        b" ".join([*metadata.keys(), *metadata.values()]).decode()
    except UnicodeDecodeError:
        return False
    return True


def _is_list(type_: pa.DataType) -> bool:
    return bool(pa.types.is_list(type_) or pa.types.is_large_list(type_))


def _is_kept(type_: pa.DataType) -> bool:
    """Whether polars has the type, but for offsets and dictionaries of text."""
    if pa.types.is_struct(type_):
        # where the struct is null, polars has a null in a field without any
        return type_.num_fields > 0 and all(
            field.nullable and _is_kept(field.type) for field in type_
        )
    if _is_list(type_):
        return _is_kept(type_.value_type)
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
        return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))
    return type_ in _KEPT


def _plain(schema: pa.Schema) -> pa.Schema:
    """The schema in the types that polars has: large offsets, no dictionaries."""
    return pa.schema([_plain_field(field) for field in schema])


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain_type(field.type)).remove_metadata()


def _plain_type(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(type_):
        return pa.struct([_plain_field(field) for field in type_])
    if _is_list(type_):
        return pa.large_list(_plain_field(type_.value_field))
    if pa.types.is_string(type_) or pa.types.is_dictionary(type_):
        return pa.large_string()
    return type_

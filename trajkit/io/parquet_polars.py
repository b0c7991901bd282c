"""Parquet files written by polars, if it is installed and preserves the table.

Arrow's encoder walks lists element by element; polars takes a third of the time. polars
cuts row groups by rows, not by bytes. The first rows determine how many; if later rows are
much longer, Arrow writes the file.
"""

import base64
import itertools
import os
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pyarrow as pa

from trajkit._streams import limits
from trajkit.io.arrow import concat, read_batches, write_batches

# The zstd level that Arrow uses. polars' default takes twice the time and does not make
# token ids smaller.
_LEVEL = 1
# The first version that accepts the schema of its output.
_POLARS = (2, 1)
# Types that polars stores as Arrow does.
_SAME_TYPES = {
    pa.bool_(),
    *(pa.int8(), pa.int16(), pa.int32(), pa.int64()),
    *(pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()),
    *(pa.float32(), pa.float64(), pa.string(), pa.large_string()),
}
# A forked child has none of polars' threads.
_forked: list[bool] = []
os.register_at_fork(after_in_child=lambda: _forked.append(True))


def write_parquet(tables: Iterator[pa.Table], schema: pa.Schema, path: Path) -> None:
    """Write tables of one schema as Parquet; ``schema`` is that of an empty file."""
    first: list[pa.Table] = []
    n_bytes = 0
    while (
        n_bytes < limits.POLARS_FILE_BYTES and (table := next(tables, None)) is not None
    ):
        first.append(table)
        n_bytes += table.nbytes
    n_rows = sum(len(table) for table in first)
    tables = itertools.chain(first, tables)
    if n_bytes < limits.POLARS_FILE_BYTES or not _suits_polars(first[0].schema):
        del first, table
        _by_arrow(tables, schema, path)
        return
    schema = first[0].schema
    del first, table
    left = _by_polars(
        tables, schema, path, max(1, n_rows * limits.POLARS_GROUP_BYTES // n_bytes)
    )
    if left is not None:
        begun = path.with_name(f"{path.name}.begun")
        os.replace(path, begun)
        try:
            batches = read_batches(begun, "parquet", None)
            written = (pa.Table.from_batches([batch]) for batch in batches)
            _by_arrow(itertools.chain(written, [left], tables), schema, path)
        finally:
            os.unlink(begun)


def _by_arrow(tables: Iterator[pa.Table], schema: pa.Schema, path: Path) -> None:
    with pa.OSFile(str(path), "w") as file:
        write_batches(tables, schema, file, "parquet")


def _by_polars(
    tables: Iterator[pa.Table], schema: pa.Schema, path: Path, group: int
) -> pa.Table | None:
    """Write row groups of ``group`` rows; returns a table that only Arrow can write."""
    import polars as pl
    from polars.io.plugins import register_io_source

    plain, empty = _plain(schema), schema.empty_table()
    left: list[pa.Table] = []
    failed: list[BaseException] = []

    def frames(*_: object) -> Iterator[pl.DataFrame]:
        n = n_bytes = 0  # of the current row group
        try:
            for table in tables:
                concat([empty, table.slice(0, 0)])  # raises if the schemas differ
                n, n_bytes = n + len(table), n_bytes + table.nbytes
                if n >= group:
                    n %= group
                    n_bytes = n * table.nbytes // len(table)
                elif n_bytes > limits.MAX_POLARS_GROUP_BYTES:
                    left.append(table)
                    return
                yield pl.DataFrame(table.cast(plain))
        except BaseException as error:  # polars would replace it by its own
            failed.append(error)

    metadata = {
        key.decode(): text.decode() for key, text in (schema.metadata or {}).items()
    }
    # Arrow's readers take the types from here; polars would write those of ``plain``
    metadata["ARROW:schema"] = base64.b64encode(schema.serialize()).decode()
    register_io_source(
        frames, schema=pl.DataFrame(plain.empty_table()).schema
    ).sink_parquet(
        path,
        compression_level=_LEVEL,
        row_group_size=group,
        arrow_schema=plain,
        metadata=metadata,
    )
    if failed:
        raise failed[0]
    return left[0] if left else None


def _suits_polars(schema: pa.Schema) -> bool:
    """Whether polars is installed, stores the table as Arrow does, and is faster."""
    names = schema.names
    return (
        any(_is_list(field.type) for field in schema)
        and all(_has_type(field.type) for field in schema)
        and len(set(names)) == len(names)
        and _is_text(schema.metadata or {})
        and not _forked
        and _polars_works()
    )


@cache
def _polars_works() -> bool:
    try:
        found = version("polars")
    except PackageNotFoundError:
        return False
    if tuple(int(part) for part in found.split(".")[:2]) < _POLARS:
        return False
    import polars as pl

    # one thread of polars waits for the tables, so it needs another
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


def _has_type(type_: pa.DataType) -> bool:
    """Whether polars has the type, apart from offsets and dictionaries of text."""
    if pa.types.is_struct(type_):
        # polars writes a null struct as a struct of nulls
        return type_.num_fields > 0 and all(
            field.nullable and _has_type(field.type) for field in type_
        )
    if _is_list(type_):
        return _has_type(type_.value_type)
    if pa.types.is_dictionary(type_):
        type_ = type_.value_type
        return bool(pa.types.is_string(type_) or pa.types.is_large_string(type_))
    return type_ in _SAME_TYPES


def _plain(schema: pa.Schema) -> pa.Schema:
    """The schema in polars' types: large offsets, no dictionaries."""
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

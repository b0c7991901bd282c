"""Parquet and Arrow IPC files, batch by batch."""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.errors import FormatError, LayoutError, SchemaError, TornLogWarning
from trajkit.files.formats import Format, is_json, name_of, open_input
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import UNREADABLE, Plan, check_buffers, check_columns
from trajkit.tables.columns import empty_batch, without_views

_NAMES = {"parquet": "Parquet", "arrow": "Arrow IPC", "arrows": "Arrow IPC"}
# length of the marker at the end of an IPC stream; an unfinished log has none
_END_BYTES = 8


def read_batches(
    file: Path | BinaryIO,
    kind: Format,
    batch_rows: int | None,
    plan: Plan | None = None,
) -> Iterator[pa.RecordBatch]:
    """The record batches of a Parquet or Arrow IPC file.

    Columns that do not fit the schema that ``plan`` returns for their names are an error.
    An IPC stream that ends within a message gives a TornLogWarning.
    """
    if isinstance(file, Path) or file.seekable():
        source = open_input(file, kind)
    else:
        source = pa.BufferReader(file.read())
    name = name_of(file)
    with _content_of(name, kind):
        if kind == "parquet":
            batches = _read_parquet(source, batch_rows)
        elif _is_file_form(source):
            batches = _read_file(source)
        else:
            batches = _read_stream(source, name)
        checked: pa.Schema | None = None
        for batch in batches:
            if plan is not None and batch.schema is not checked:
                checked = batch.schema
                try:
                    check_columns(checked, plan(checked.names))
                except SchemaError as error:
                    raise SchemaError(f"{name}: {error}") from None
            check_buffers(batch)
            yield batch


@contextmanager
def _content_of(name: str, kind: Format) -> Iterator[None]:
    """Turn errors about damaged bytes into a FormatError with the file's name."""
    try:
        yield
    except (*UNREADABLE, LayoutError) as error:
        raise FormatError(
            f"{name} is damaged, or not valid {_NAMES[kind]}: {error}"
        ) from None


def key_batches(
    path: Path, kind: Format, names: tuple[str, ...]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Batches of the named columns that exist, and the approximate bytes of all columns."""
    source = open_input(path, kind)
    name = name_of(path)
    with _content_of(name, kind):
        if kind == "parquet":
            file, _ = _parquet_file(source)
            found = [column for column in names if column in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                n_bytes = file.metadata.row_group(group).total_byte_size
                keys = file.read_row_group(group, columns=found)
                _check_rows(file, group, keys.num_rows if found else None)
                for batch in keys.to_batches():
                    check_buffers(batch)
                    yield batch, n_bytes
                    n_bytes = 0
            return
        # pages of a mapped file are read when they are used
        batches = (
            _read_file(pa.memory_map(str(path)))
            if _is_file_form(source)
            else _read_stream(source, name)
        )
        for batch in batches:
            keys = batch.select([n for n in names if n in batch.schema.names])
            check_buffers(keys)
            yield keys, batch.get_total_buffer_size()


def _is_file_form(source: pa.NativeFile) -> bool:
    magic = source.read(6)
    source.seek(0)
    return bool(magic == b"ARROW1")


def _read_file(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(source)
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)
    if not reader.num_record_batches:
        yield empty_batch(reader.schema)


def table_kind(file: Path, kind: Format) -> str | None:
    """The table kind in a file's metadata; None if it is missing or unreadable."""
    if is_json(kind):
        return None
    try:
        with open_input(file, kind) as source:
            if kind == "parquet":
                import pyarrow.parquet as pq

                schema = pq.read_schema(source)
            elif _is_file_form(source):
                schema = pa.ipc.open_file(source).schema
            else:
                schema = pa.ipc.open_stream(source).schema
    except UNREADABLE:
        return None
    found = (schema.metadata or {}).get(b"trajkit.table")
    return None if found is None else found.decode(errors="replace")


def _parquet_file(source: pa.NativeFile) -> tuple[Any, dict[str, list[int]]]:
    """A Parquet file, and the Parquet columns that each Arrow column consists of."""
    import pyarrow.parquet as pq

    file = pq.ParquetFile(
        source,
        buffer_size=limits.PAGE_BYTES,
        pre_buffer=False,
        page_checksum_verification=True,
    )
    groups = map(file.metadata.row_group, range(file.num_row_groups))
    if sum(group.num_rows for group in groups) != file.metadata.num_rows:
        raise pa.ArrowInvalid("the row groups do not add up to the rows of the file")
    leaves: dict[str, list[int]] = {name: [] for name in file.schema_arrow.names}
    for leaf in range(len(file.schema.names)):
        name = file.schema.column(leaf).path.partition(".")[0]
        leaves.setdefault(name, []).append(leaf)
    return file, leaves


def _read_parquet(
    source: pa.NativeFile, batch_rows: int | None
) -> Iterator[pa.RecordBatch]:
    file, leaves = _parquet_file(source)
    if file.metadata.num_rows == 0:
        yield empty_batch(file.schema_arrow)
    for k in range(file.num_row_groups):
        group = file.metadata.row_group(k)
        n_rows = 0
        n_values: dict[str, npt.NDArray[np.int64]] = {}
        # group by group, so that only one is in memory undecoded
        for batch in file.iter_batches(batch_rows or max(group.num_rows, 1), [k]):
            n_rows += batch.num_rows
            for key, array in zip(batch.schema.names, batch.columns, strict=True):
                n_values[key] = _values_in(array) + n_values.get(key, 0)
            yield batch
        _check_rows(file, k, n_rows)
        for key, found in n_values.items():
            # a page's number of values is in its header, which no checksum protects
            stored = [group.column(leaf).num_values for leaf in leaves[key]]
            if len(found) == len(stored) and found.tolist() != stored:
                raise pa.ArrowInvalid(
                    f"row group {k} has {found} of {stored} values in {key!r}"
                )


def _check_rows(file: Any, group: int, n_read: int | None) -> None:
    """Raise ArrowInvalid if fewer rows were read than the row group has.

    Arrow skips pages of an unknown kind, which a single flipped bit can make.
    """
    n_rows = file.metadata.row_group(group).num_rows
    if n_read not in (n_rows, None):
        raise pa.ArrowInvalid(f"row group {group} has {n_read} rows of {n_rows}")


def _values_in(array: pa.Array) -> npt.NDArray[np.int64]:
    """The number of values in each Parquet column that an Arrow column becomes.

    An empty or null list counts as one value. Types that are unknown here are left out.
    """
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    type_ = array.type
    if pa.types.is_struct(type_):
        return np.concatenate(
            [*map(_values_in, array.flatten()), np.zeros(0, np.int64)]
        )
    if pa.types.is_list(type_) or pa.types.is_large_list(type_):
        lengths = pc.list_value_length(array).fill_null(0).to_numpy()
        empty = len(lengths) - np.count_nonzero(lengths)
        return _values_in(array.flatten()) + empty
    return np.full(0 if pa.types.is_nested(type_) else 1, len(array))


def _read_stream(source: pa.NativeFile, name: str) -> Iterator[pa.RecordBatch]:
    """Complete batches of one stream, or of several streams that were appended."""
    size, good = source.size(), 0
    try:
        while good < size:
            reader = pa.ipc.open_stream(source)
            empty = True
            while True:
                # a complete schema or batch ends here
                good = source.tell()
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    break
                empty = False
                yield batch
            if empty:
                yield empty_batch(reader.schema)
            if source.tell() - good != _END_BYTES:
                break
            good = source.tell()
    except UNREADABLE as error:
        if source.tell() < size:
            raise FormatError(
                f"{name} is not an Arrow IPC stream at byte {good}: {error}"
            ) from None
    if good == size > 0:
        return
    text = f"{name} is empty: its writer stopped before the schema"
    if size:
        text = (
            f"{name} ends within an entry: its last {size - good} bytes, from byte "
            f"{good} on, were left out"
        )
    warnings.warn(text, TornLogWarning, stacklevel=2)


def write_batches(
    tables: Iterator[pa.Table], schema: pa.Schema, file: pa.NativeFile, kind: Format
) -> None:
    """Write tables of one schema as one file; ``schema`` is that of an empty file."""
    first = next(tables, None)
    first = schema.empty_table() if first is None else first
    tables = itertools.chain([first], tables)
    if kind == "parquet":
        _write_parquet(first.schema, tables, file)
    elif kind == "arrow":
        # the file form has one dictionary per column, so it needs all tables first
        table = pa.concat_tables(tables).unify_dictionaries()
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        with pa.ipc.new_stream(file, first.schema) as writer:
            for table in tables:
                writer.write_table(table)


def _write_parquet(
    schema: pa.Schema, tables: Iterator[pa.Table], file: pa.NativeFile
) -> None:
    import pyarrow.parquet as pq

    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    floats = [path for path, type_ in leaves if pa.types.is_floating(type_)]
    # Token ids and logprobs are too diverse for a dictionary. Floats compress better if
    # their bytes are split.
    encoded = [
        path
        for path, type_ in leaves
        if not pa.types.is_floating(type_) and not pa.types.is_integer(type_)
    ]
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=encoded or False,
        write_page_checksum=True,
        dictionary_pagesize_limit=limits.DICTIONARY_BYTES,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT") or None,
    ) as writer:
        for group in _row_groups(tables):
            writer.write_table(group, row_group_size=max(len(group), 1))


def _row_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The rows in tables of about `limits.ROW_GROUP_BYTES`."""
    parts: list[pa.Table] = []
    n_bytes = 0
    for table in tables:
        each = max(1, len(table) * limits.ROW_GROUP_BYTES // max(table.nbytes, 1))
        for start in range(0, max(len(table), 1), each):
            parts.append(table.slice(start, each))
            n_bytes += parts[-1].nbytes
            if n_bytes >= limits.ROW_GROUP_BYTES:
                yield concat(parts)
                parts, n_bytes = [], 0
    if parts:
        yield concat(parts)


def concat(tables: list[pa.Table]) -> pa.Table:
    """The rows of tables with the same schema."""
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"the batches do not make one table: {error}") from None


def _leaves(path: str, type_: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """Path and type of each Parquet column that an Arrow column becomes."""
    if pa.types.is_struct(type_):
        for field in type_:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(type_) or pa.types.is_large_list(type_):
        yield from _leaves(f"{path}.list.element", type_.value_type)
    else:
        yield path, type_


def storable(table: pa.Table) -> pa.Table:
    """The table with the views that pyarrow cannot write to Parquet cast to plain types.

    It writes views, but not dictionaries of views (polars' categories) or structs that
    contain views. A column that Parquet has no type for is an error.
    """
    for index, field in enumerate(table.schema):
        type_ = field.type
        if pa.types.is_dictionary(type_):
            values = without_views(type_.value_type)
            type_ = pa.dictionary(type_.index_type, values, type_.ordered)
        elif pa.types.is_nested(type_):
            type_ = without_views(type_)
        if type_ != field.type:
            column = table.column(index).cast(type_)
            table = table.set_column(index, field.with_type(type_), column)
        refused = _refused(type_)
        if refused:
            raise FormatError(
                f"Parquet cannot store column {field.name!r} of type {field.type}: "
                f"{refused}. Cast it, or write Arrow IPC"
            )
    return table


@lru_cache(maxsize=256)
def _refused(type_: pa.DataType) -> str:
    """Why pyarrow cannot write a column of this type; empty if it can."""
    import pyarrow.parquet as pq

    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([("", type_)])).close()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        return str(error)
    return ""

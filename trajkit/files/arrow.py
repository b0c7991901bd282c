"""Parquet and Arrow IPC files, batch by batch."""

import itertools
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.errors import FormatError, LayoutError, SchemaError, TornLogWarning
from trajkit.files.formats import Format, check_begins, is_json, name_of, open_input
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import UNREADABLE, Plan, check_buffers, check_columns
from trajkit.tables.columns import empty_batch, without_views

_NAMES = {"parquet": "Parquet", "arrow": "Arrow IPC", "arrows": "Arrow IPC"}
_FILE_FORM = b"ARROW1"
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
    checked: pa.Schema | None = None
    for batch, *_ in sized_batches(file, kind, None, batch_rows):
        if plan is not None and batch.schema is not checked:
            checked = batch.schema
            try:
                check_columns(checked, plan(checked.names))
            except SchemaError as error:
                raise SchemaError(f"{name_of(file)}: {error}") from None
        yield batch


_Sized: TypeAlias = Iterator[tuple[pa.RecordBatch, int, pa.Schema]]
"""Batches, the approximate bytes of all their columns (0: counted before), and these."""


def sized_batches(
    file: Path | BinaryIO,
    kind: Format,
    names: tuple[str, ...] | None = None,
    batch_rows: int | None = None,
) -> _Sized:
    """Batches of the named columns that exist, or of all."""
    try:
        if isinstance(file, Path) or file.seekable():
            source = open_input(file, kind)
        else:
            source = pa.BufferReader(file.read())
        if kind == "parquet":
            found = _read_parquet(source, batch_rows, names)
        else:
            head = _head(source)
            check_begins(head, kind, name_of(file))
            if not head.startswith(_FILE_FORM):
                batches = _read_stream(source, name_of(file))
            else:
                # pages of a mapped file are read when they are used
                batches = _read_file(
                    source if names is None else pa.memory_map(str(file))
                )
            found = ((b, b.get_total_buffer_size(), b.schema) for b in batches)
        for batch, n_bytes, schema in found:
            if names is not None:
                batch = batch.select([n for n in names if n in batch.schema.names])
            check_buffers(batch)
            yield batch, n_bytes, schema
    except (FileNotFoundError, PermissionError):  # no damage
        raise
    except (*UNREADABLE, LayoutError) as error:
        raise FormatError(
            f"{name_of(file)} is damaged, or not valid {_NAMES[kind]}: {error}"
        ) from None


def table_kind(file: Path, kind: Format) -> str | None:
    """The table kind in a file's metadata; None if it is missing or unreadable."""
    if is_json(kind):
        return None
    try:
        with open_input(file, kind) as source:
            if kind == "parquet":
                import pyarrow.parquet as pq

                schema = pq.read_schema(source)
            elif _head(source).startswith(_FILE_FORM):
                schema = pa.ipc.open_file(source).schema
            else:
                schema = pa.ipc.open_stream(source).schema
    except UNREADABLE:
        return None
    found = (schema.metadata or {}).get(b"trajkit.table")
    return None if found is None else found.decode(errors="replace")


def _read_parquet(
    source: pa.NativeFile, batch_rows: int | None, names: tuple[str, ...] | None
) -> _Sized:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(
        source,
        buffer_size=limits.PAGE_BYTES,
        pre_buffer=False,
        page_checksum_verification=True,
    )
    columns = None
    if names is not None:
        columns = [name for name in file.schema_arrow.names if name in names]
    groups = [file.metadata.row_group(k) for k in range(file.num_row_groups)]
    if sum(group.num_rows for group in groups) != file.metadata.num_rows:
        raise pa.ArrowInvalid("the row groups do not add up to the rows of the file")
    if not file.metadata.num_rows and names is None:
        yield empty_batch(file.schema_arrow), 0, file.schema_arrow
    for k, group in enumerate(groups):
        n_rows, n_bytes = 0, group.total_byte_size
        n_values: dict[str, npt.NDArray[np.int64]] = {}
        # group by group, so that only one is in memory undecoded
        for batch in file.iter_batches(
            batch_rows or max(group.num_rows, 1), [k], columns
        ):
            n_rows += batch.num_rows
            for key, array in zip(batch.schema.names, batch.columns, strict=True):
                n_values[key] = _values_in(array) + n_values.get(key, 0)
            yield batch, n_bytes, file.schema_arrow
            n_bytes = 0
        if columns != []:
            _check_group(file, k, n_rows, n_values)


def _check_group(
    file: Any, k: int, n_rows: int, n_values: dict[str, npt.NDArray[np.int64]]
) -> None:
    """Raise ArrowInvalid if fewer rows or values were read than the row group has.

    Arrow skips pages of an unknown kind, which a single flipped bit can make, and a page's
    number of values is in its header, which no checksum protects.
    """
    group = file.metadata.row_group(k)
    if n_rows != group.num_rows:
        raise pa.ArrowInvalid(f"row group {k} has {n_rows} rows of {group.num_rows}")
    stored: dict[str, list[int]] = {}
    for leaf in range(len(file.schema.names)):
        name = file.schema.column(leaf).path.partition(".")[0]
        # Arrow aborts on damaged metadata of a column that was not read
        if name in n_values:
            stored.setdefault(name, []).append(group.column(leaf).num_values)
    for name, found in n_values.items():
        due = stored.get(name, [])
        if len(found) == len(due) and found.tolist() != due:
            raise pa.ArrowInvalid(
                f"row group {k} has {found} of {due} values in {name!r}"
            )


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


def _head(source: pa.NativeFile) -> bytes:
    head: bytes = source.read(8)
    source.seek(0)
    return head


def _read_file(source: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    reader = pa.ipc.open_file(source)
    for i in range(reader.num_record_batches):
        yield reader.get_batch(i)
    if not reader.num_record_batches:
        yield empty_batch(reader.schema)


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
    first = next(tables, schema.empty_table())
    tables = _alike(itertools.chain([first], tables), first.schema)
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


def _alike(tables: Iterator[pa.Table], schema: pa.Schema) -> Iterator[pa.Table]:
    for table in tables:
        if table.schema != schema:
            odd = sorted({field.name for field in {*schema} ^ {*table.schema}})
            raise SchemaError(
                "the batches do not make one table: "
                f"{', '.join(odd) or 'a column'} is missing in some, of several types, or "
                "in another place: give every call a value of one type"
            )
        yield table


def _write_parquet(
    schema: pa.Schema, tables: Iterator[pa.Table], file: pa.NativeFile
) -> None:
    import pyarrow.parquet as pq

    leaves = [leaf for field in schema for leaf in _leaves(field.name, field.type)]
    # Token ids and logprobs are too diverse for a dictionary. Floats compress better if
    # their bytes are split. Readers skip rows by statistics, but not by those of lists.
    floats = [path for path, type_ in leaves if pa.types.is_floating(type_)]
    encoded = [path for path, type_ in leaves if not pa.types.is_primitive(type_)]
    columns = [path for path, _ in leaves if ".list." not in path]
    with pq.ParquetWriter(
        file,
        schema,
        compression="zstd",
        use_dictionary=encoded or False,
        write_page_checksum=True,
        write_statistics=columns,
        dictionary_pagesize_limit=limits.DICTIONARY_BYTES,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT") or None,
    ) as writer:
        for group in _row_groups(tables):
            writer.write_table(group, row_group_size=max(len(group), 1))


def _row_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    parts: list[pa.Table] = []
    n_bytes = 0
    for table in tables:
        each = max(1, len(table) * limits.ROW_GROUP_BYTES // max(table.nbytes, 1))
        for start in range(0, max(len(table), 1), each):
            parts.append(table.slice(start, each))
            n_bytes += parts[-1].nbytes
            if n_bytes >= limits.ROW_GROUP_BYTES:
                yield pa.concat_tables(parts)
                parts, n_bytes = [], 0
    if parts:
        yield pa.concat_tables(parts)


def _leaves(path: str, type_: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
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
    schema = table.schema
    for index, field in enumerate(schema):
        type_ = field.type
        if pa.types.is_dictionary(type_):
            values = without_views(type_.value_type)
            type_ = pa.dictionary(type_.index_type, values, type_.ordered)
        elif pa.types.is_nested(type_):
            type_ = without_views(type_)
        _check_storable(field.name, type_)
        schema = schema.set(index, field.with_type(type_))
    return table if schema == table.schema else table.cast(schema)


@lru_cache(maxsize=256)
def _check_storable(name: str, type_: pa.DataType) -> None:
    import pyarrow.parquet as pq

    try:
        pq.ParquetWriter(pa.BufferOutputStream(), pa.schema([("", type_)])).close()
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid) as error:
        raise FormatError(
            f"Parquet cannot store column {name!r} of type {type_}: {error}. Cast it, or "
            "write Arrow IPC"
        ) from None

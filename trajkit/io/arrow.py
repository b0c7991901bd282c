"""Parquet and Arrow IPC, batch by batch."""

import itertools
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import UNREADABLE, Plan, check_buffers, check_columns
from trajkit._arrow.take import no_rows
from trajkit.errors import FormatError, LayoutError, SchemaError, TornLogWarning
from trajkit.io.formats import Format, name_of, open_input

_NAMES = {"parquet": "Parquet", "arrow": "Arrow IPC", "arrows": "Arrow IPC"}
# bytes of a row group: a turn may hold a megabyte, so rows are no measure
_GROUP_BYTES = 64 << 20
# Bytes that distinct texts of a row group may take before they are written out each time:
# prompts that sessions share are among them.
_DICTIONARY_BYTES = 16 << 20
# Bytes of a column that are read ahead, so that no row group is held as it is stored.
_PAGES = 1 << 20
# the marker at the end of an IPC stream; a log that is still written, or was never
# closed, has none
_END_BYTES = 8


def read_batches(
    file: Path | BinaryIO,
    kind: Format,
    batch_rows: int | None,
    skip: int = 0,
    plan: Plan | None = None,
) -> Iterator[pa.RecordBatch]:
    """The record batches of a Parquet or Arrow IPC file, in order, from row ``skip`` on.

    Raises
    ------
    FormatError
        The content is not of the format.
    SchemaError
        The columns are not those of the schema that ``plan`` gives for their names.

    Warns
    -----
    TornLogWarning
        An IPC stream ends within a message.
    """
    if isinstance(file, Path) or file.seekable():
        source = open_input(file, kind)
    else:
        source = pa.BufferReader(file.read())
    name = name_of(file)
    with _content_of(name, kind):
        if kind == "parquet":
            batches = _read_parquet(source, batch_rows, skip)
            skip = 0
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
            left = batch.slice(skip)
            skip = max(skip - batch.num_rows, 0)
            if left.num_rows or not batch.num_rows:
                yield left


@contextmanager
def _content_of(name: str, kind: Format) -> Iterator[None]:
    """Make a FormatError, with the file's name, of what is wrong with its bytes."""
    try:
        yield
    except (*UNREADABLE, LayoutError) as error:
        raise FormatError(
            f"{name} is damaged, or no {_NAMES[kind]} file: {error}"
        ) from None


def file_rows(path: Path, kind: Format) -> int:
    """How many rows a file has."""
    return sum(keys.num_rows for keys, _ in key_batches(path, kind, ("session_id",)))


def key_batches(
    path: Path, kind: Format, names: tuple[str, ...]
) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Those of the columns that are there, and about what all columns take as Arrow.

    Raises and warns as `read_batches`.
    """
    source = open_input(path, kind)
    name = name_of(path)
    with _content_of(name, kind):
        if kind == "parquet":
            file = _parquet_file(source)
            here = [one for one in names if one in file.schema_arrow.names]
            for group in range(file.num_row_groups):
                n_bytes = file.metadata.row_group(group).total_byte_size
                keys = file.read_row_group(group, columns=here)
                _check_rows(file, group, keys.num_rows if here else None)
                for batch in keys.to_batches():
                    check_buffers(batch)
                    yield batch, n_bytes
                    n_bytes = 0
            return
        # a mapped file is read where it is looked at
        batches = (
            _read_file(pa.memory_map(str(path)))
            if _is_file_form(source)
            else _read_stream(source, name)
        )
        for batch in batches:
            here = [one for one in names if one in batch.schema.names]
            keys = batch.select(here)
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
        # it still says of what form a file is
        yield no_rows(reader.schema)


def table_kind(file: Path, kind: Format) -> str | None:
    """What a Parquet or Arrow IPC file calls its table; None where it does not say.

    A file that cannot be read says nothing here.
    """
    try:
        with open_input(file, kind) as source:
            if kind == "parquet":
                import pyarrow.parquet as pq

                schema = pq.read_schema(source)
            elif source.read(6) == b"ARROW1":
                schema = pa.ipc.open_file(source).schema
            else:
                source.seek(0)
                schema = pa.ipc.open_stream(source).schema
    except UNREADABLE:
        return None
    said = (schema.metadata or {}).get(b"trajkit.table")
    return None if said is None else said.decode(errors="replace")


def _parquet_file(source: pa.NativeFile) -> Any:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(
        source, buffer_size=_PAGES, pre_buffer=False, page_checksum_verification=True
    )
    groups = map(file.metadata.row_group, range(file.num_row_groups))
    if sum(group.num_rows for group in groups) != file.metadata.num_rows:
        raise pa.ArrowInvalid("the row groups have not the number of rows of the file")
    return file


def _read_parquet(
    source: pa.NativeFile, batch_rows: int | None, skip: int
) -> Iterator[pa.RecordBatch]:
    file = _parquet_file(source)
    if file.metadata.num_rows == 0:
        yield no_rows(file.schema_arrow)
    for group in range(file.num_row_groups):
        n_rows = file.metadata.row_group(group).num_rows
        if skip < n_rows:
            n_read = 0
            n_values: dict[str, npt.NDArray[np.int64]] = {}
            # by the group, so that no more than one is held undecoded
            for batch in file.iter_batches(batch_rows or n_rows, [group]):
                n_read += batch.num_rows
                for name, array in zip(batch.schema.names, batch.columns, strict=True):
                    n_values[name] = _values_in(array) + n_values.get(name, 0)
                left = batch.slice(skip)
                skip = max(skip - batch.num_rows, 0)
                if left.num_rows:
                    yield left
            _check_rows(file, group, n_read)
            _check_values(file, group, n_values)
        else:
            skip -= n_rows


def _check_rows(file: Any, group: int, n_read: int | None) -> None:
    """Raise ArrowInvalid where fewer rows came than a row group has.

    Arrow passes over a page of a kind that it does not know: one flipped bit is enough.
    """
    n_rows = file.metadata.row_group(group).num_rows
    if n_read not in (n_rows, None):
        raise pa.ArrowInvalid(f"row group {group} has {n_read} rows of {n_rows}")


def _check_values(
    file: Any, group: int, n_read: Mapping[str, npt.NDArray[np.int64]]
) -> None:
    """Raise ArrowInvalid where a list column has other elements than its footer says.

    How many a page has is in its header, which no checksum protects.
    """
    metadata = file.metadata.row_group(group)
    due: dict[str, list[int]] = {}
    for i in range(metadata.num_columns):
        column = metadata.column(i)
        name = column.path_in_schema.partition(".")[0]
        due.setdefault(name, []).append(column.num_values)
    for name, found in n_read.items():
        stored = due.get(name, [])
        if len(found) == len(stored) and found.tolist() != stored:
            raise pa.ArrowInvalid(
                f"row group {group} has {found} of {stored} values in {name!r}"
            )


def _values_in(array: pa.Array) -> npt.NDArray[np.int64]:
    """As many values as Parquet counts in each column that it makes of an Arrow column.

    An empty or null list is one. Left out are those of types that are not known here.
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
    """Whole batches, of one stream or of several that were appended one by one."""
    size = source.size()
    good = 0
    try:
        while good < size:
            reader = pa.ipc.open_stream(source)
            empty = True
            while True:
                # a schema or a batch was whole up to here
                good = source.tell()
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    break
                empty = False
                yield batch
            if empty:
                yield no_rows(reader.schema)
            if source.tell() - good != _END_BYTES:
                break
            good = source.tell()
    except UNREADABLE as error:
        if source.tell() < size:
            raise FormatError(
                f"{name} is no Arrow IPC stream at byte {good}: {error}"
            ) from None
    if good < size:
        text = (
            f"{name} ends within an entry: its last {size - good} bytes, from byte "
            f"{good} on, were left out"
        )
        warnings.warn(text, TornLogWarning, stacklevel=2)
    elif size == 0:
        text = f"{name} is empty: its writer stopped before the schema"
        warnings.warn(text, TornLogWarning, stacklevel=2)


def write_pieces(
    pieces: Iterator[pa.Table], schema: pa.Schema, file: pa.NativeFile, kind: Format
) -> None:
    """Write tables of one schema as one file."""
    if kind == "parquet":
        _write_parquet(pieces, schema, file)
    elif kind == "arrow":
        # the file form holds one dictionary per column, so all is needed first
        tables = list(pieces) or [schema.empty_table()]
        table = pa.concat_tables(tables).unify_dictionaries()
        with pa.ipc.new_file(file, table.schema) as writer:
            writer.write_table(table)
    else:
        first = next(pieces, None)
        first = schema.empty_table() if first is None else first
        with pa.ipc.new_stream(file, first.schema) as writer:
            writer.write_table(first)
            for piece in pieces:
                writer.write_table(piece)


def _write_parquet(
    pieces: Iterator[pa.Table], schema: pa.Schema, file: pa.NativeFile
) -> None:
    import pyarrow.parquet as pq

    first = next(pieces, None)
    first = schema.empty_table() if first is None else first
    leaves = [
        leaf for field in first.schema for leaf in _leaves(field.name, field.type)
    ]
    floats = [path for path, type_ in leaves if pa.types.is_floating(type_)]
    # Token ids and logprobs are too many and too different for a dictionary; apart, the
    # bytes of floats repeat more.
    few = [
        path
        for path, type_ in leaves
        if not pa.types.is_floating(type_) and not pa.types.is_integer(type_)
    ]
    with pq.ParquetWriter(
        file,
        first.schema,
        compression="zstd",
        use_dictionary=few or False,
        write_page_checksum=True,
        dictionary_pagesize_limit=_DICTIONARY_BYTES,
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT") or None,
    ) as writer:
        for group in _row_groups(itertools.chain([first], pieces)):
            writer.write_table(group, row_group_size=max(len(group), 1))


def _row_groups(tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """The rows in tables of about the bytes of a row group, at least one table."""
    held: list[pa.Table] = []
    n_bytes = 0
    for table in tables:
        each = max(1, len(table) * _GROUP_BYTES // max(table.nbytes, 1))
        for start in range(0, max(len(table), 1), each):
            part = table.slice(start, each)
            held.append(part)
            n_bytes += part.nbytes
            if n_bytes >= _GROUP_BYTES:
                yield joined(held)
                held, n_bytes = [], 0
    if held:
        yield joined(held)


def joined(tables: list[pa.Table]) -> pa.Table:
    """Tables of one schema, one after another."""
    try:
        return pa.concat_tables(tables)
    except pa.ArrowInvalid as error:
        raise SchemaError(f"the batches do not make one table: {error}") from None


def _leaves(path: str, type_: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """The columns of numbers or text that Parquet makes of an Arrow column."""
    if pa.types.is_struct(type_):
        for field in type_:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(type_) or pa.types.is_large_list(type_):
        yield from _leaves(f"{path}.list.element", type_.value_type)
    else:
        yield path, type_

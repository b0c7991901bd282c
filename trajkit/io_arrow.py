"""Parquet and Arrow IPC, batch by batch."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from trajkit.errors import FormatError, TornLogWarning
from trajkit.io_formats import Format, name_of, open_input

# bytes of a row group: a turn may hold a megabyte, so rows are no measure
_GROUP_BYTES = 128 << 20
# the marker at the end of an IPC stream; a log that is still written, or was never
# closed, has none
_END_BYTES = 8


def read_batches(
    file: Path | BinaryIO, kind: Format, batch_rows: int | None
) -> Iterator[pa.RecordBatch]:
    """The record batches of a Parquet or Arrow IPC file, in order.

    Raises
    ------
    FormatError
        The content is not of the format.

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
    if kind == "parquet":
        yield from _read_parquet(source, name, batch_rows)
        return
    magic = source.read(6)
    source.seek(0)
    if magic == b"ARROW1":
        try:
            reader = pa.ipc.open_file(source)
            for i in range(reader.num_record_batches):
                yield reader.get_batch(i)
        except (pa.ArrowInvalid, OSError) as error:
            raise FormatError(f"{name} is no whole Arrow IPC file: {error}") from None
    else:
        yield from _read_stream(source, name)


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
    except (pa.ArrowInvalid, OSError):
        return None
    said = (schema.metadata or {}).get(b"trajkit.table")
    return None if said is None else said.decode()


def _read_parquet(
    source: pa.NativeFile, name: str, batch_rows: int | None
) -> Iterator[pa.RecordBatch]:
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(source)
        if batch_rows is not None:
            yield from file.iter_batches(batch_rows)
            return
        for group in range(file.num_row_groups):
            yield from file.read_row_group(group).to_batches()
    except (pa.ArrowInvalid, OSError) as error:
        raise FormatError(f"{name} is no Parquet file: {error}") from None


def _read_stream(source: pa.NativeFile, name: str) -> Iterator[pa.RecordBatch]:
    """Whole batches, of one stream or of several that were appended one by one."""
    size = source.size()
    good = 0
    try:
        while good < size:
            reader = pa.ipc.open_stream(source)
            while True:
                # a schema or a batch was whole up to here
                good = source.tell()
                try:
                    batch = reader.read_next_batch()
                except StopIteration:
                    break
                yield batch
            if source.tell() - good != _END_BYTES:
                break
            good = source.tell()
    except (pa.ArrowInvalid, OSError) as error:
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
        column_encoding=dict.fromkeys(floats, "BYTE_STREAM_SPLIT") or None,
    ) as writer:
        for piece in (first, *pieces):
            rows = max(1, len(piece) * _GROUP_BYTES // max(piece.nbytes, 1))
            writer.write_table(piece, row_group_size=rows)


def _leaves(path: str, type_: pa.DataType) -> Iterator[tuple[str, pa.DataType]]:
    """The columns of numbers or text that Parquet makes of an Arrow column."""
    if pa.types.is_struct(type_):
        for field in type_:
            yield from _leaves(f"{path}.{field.name}", field.type)
    elif pa.types.is_list(type_) or pa.types.is_large_list(type_):
        yield from _leaves(f"{path}.list.element", type_.value_type)
    else:
        yield path, type_

"""Turns and rows from and to files: Parquet, Arrow IPC and JSON lines.

The suffix of a path says the format; an open file is known by its first bytes, or by
`format`. Logs whose sessions interleave are gathered. What is read has been looked at
by the rules of `trajkit.validate`, but for message bodies and empty prompts.
"""

import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit import io_json
from trajkit.errors import SchemaError
from trajkit.io_arrow import read_batches, write_pieces
from trajkit.io_formats import (
    Format,
    atomic,
    format_of,
    is_json,
    name_of,
    open_input,
    paths_in,
)
from trajkit.records import from_records
from trajkit.schema import ROWS, TURNS
from trajkit.shared_prompts import NAME, share
from trajkit.tables import (
    ArrowStream,
    TableLike,
    canonical,
    canonical_rows,
    turns_schema,
)
from trajkit.validate import Nonfinite, check_rows, check_turns

Source: TypeAlias = str | os.PathLike[str] | BinaryIO | TableLike
Sink: TypeAlias = str | os.PathLike[str] | BinaryIO


def read_turns(
    source: Source,
    *,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
) -> pa.Table:
    """Recorded turns, in the schema's canonical form.

    Parameters
    ----------
    source : path, open binary file, or table
        ``.parquet``, ``.arrow``, ``.feather`` and ``.ipc`` (Arrow IPC, file or stream),
        ``.arrows`` (stream), ``.jsonl`` and ``.ndjson``, plain or with ``.gz`` or
        ``.zst`` behind (one call per line, as `trajkit.from_records` takes them); a
        directory: all such files below it, in order of their paths, hidden ones aside;
        or a RecordBatchReader or another Arrow stream. Turns may be in delta form.
    format : str, optional
        Overrides what suffix or first bytes say: "parquet", "arrow", "arrows",
        "jsonl", "jsonl.gz" or "jsonl.zst".
    nonfinite_logprobs : {"raise", "null"}
        As for `trajkit.from_records`.

    Returns
    -------
    Table
        Sessions in order of first appearance, each in one piece, turns ascending.

    Raises
    ------
    FormatError
        The suffix, or the content, is of no format that is read here.
    SchemaError
        A column is absent or of another type.
    InvalidTurnsError
        A value breaks a rule of the schema.

    Warns
    -----
    TornLogWarning
        A log ends within an entry; the text names file and bytes left out.
    """
    pieces = []
    lines: list[Iterator[dict[str, object]]] = []
    for part in _parts(source, format):
        if isinstance(part, Iterator):
            lines.append(part)
        else:
            pieces.append(canonical(part, turns_schema(part.column_names)))
    if lines:
        # files of one log count their turns together
        records = (record for part in lines for record in part)
        pieces.append(from_records(records, nonfinite_logprobs=nonfinite_logprobs))
    return check_turns(gather(_joined(pieces, TURNS), "turn_index"), nonfinite_logprobs)


def iter_turns(
    source: Source, *, format: Format | None = None, batch_rows: int = 256
) -> Iterator[pa.RecordBatch]:
    """Recorded turns in batches, as the files hold them: not gathered, not checked.

    A session whose turns do not follow one another stays in pieces: such a log is for
    `read_turns`.

    Parameters
    ----------
    source, format
        As for `read_turns`.
    batch_rows : int
        At most so many turns in a batch; of JSON lines more, where a session has more.
    """
    for part in _parts(source, format, batch_rows):
        if isinstance(part, Iterator):
            for records in io_json.by_session(part, batch_rows):
                yield from from_records(records).combine_chunks().to_batches()
        else:
            piece = canonical(part, turns_schema(part.column_names))
            yield from piece.to_batches(max_chunksize=batch_rows)


def write_turns(
    turns: TableLike | Iterable[pa.RecordBatch],
    sink: Sink,
    *,
    format: Format | None = None,
) -> None:
    """Write turns where `read_turns` finds them again.

    A path gets its file when all is written, or not at all. Parquet is compressed with
    zstd. JSON lines hold each call's messages in full, and of further columns what JSON
    can say (a timestamp becomes text).

    Parameters
    ----------
    turns : table, or iterable of record batches
        Plain or in delta form; the latter has no form in JSON lines.
    sink : path or open binary file
    format : str, optional
        As for `read_turns`; needed for an open file. "arrows" is IPC's stream form.

    Raises
    ------
    FormatError
        The suffix is of no format that is written here, or JSON cannot say a value.
    SchemaError, InvalidTurnsError
        The table is none of turns, or lacks a message body that JSON lines need.
    """
    _write((_canonical_turns(piece) for piece in _pieces(turns)), TURNS, sink, format)


def _canonical_turns(turns: pa.Table) -> pa.Table:
    """In canonical form; prompts that are held once stay so."""
    plain = canonical(turns, turns_schema(turns.column_names))
    return share(plain) if NAME in turns.column_names else plain


def read_rows(source: Source, *, format: Format | None = None) -> pa.Table:
    """Training rows of either layout, in canonical form; see `read_turns`.

    JSON lines hold one row each, an object of the table's columns.
    """
    pieces: list[pa.Table] = []
    for part in _parts(source, format):
        if isinstance(part, Iterator):
            pieces.extend(canonical_rows(piece) for piece in io_json.tables(part))
        else:
            pieces.append(canonical_rows(part))
    return check_rows(gather(_joined(pieces, ROWS), "row_index"))


def read_any_rows(source: Source, *, format: Format | None = None) -> pa.Table:
    """Rows of any system, as the files hold them: not gathered, not checked.

    JSON lines hold one row each, an object of the table's columns; see `read_turns`.
    """
    pieces: list[pa.Table] = []
    for part in _parts(source, format):
        if isinstance(part, Iterator):
            pieces.extend(io_json.tables(part))
        else:
            pieces.append(part)
    return _joined(pieces, ROWS)


def write_rows(
    rows: TableLike | Iterable[pa.RecordBatch],
    sink: Sink,
    *,
    format: Format | None = None,
) -> None:
    """Write training rows where `read_rows` finds them again; see `write_turns`.

    Rows of the layout "suffix" are written as they are.
    """
    _write((canonical_rows(piece) for piece in _pieces(rows)), ROWS, sink, format)


def write_table(table: pa.Table, sink: Sink, *, format: Format | None = None) -> None:
    """Write a table of any schema, links, drift or a report; see `write_turns`."""
    _write(iter([table]), table.schema, sink, format)


def write_tables(
    batches: Iterable[pa.RecordBatch], sink: Sink, *, format: Format | None = None
) -> None:
    """Write batches of one schema, whatever it is; there is one batch at least."""
    pieces = _pieces(batches)
    first = next(pieces)
    _write(itertools.chain([first], pieces), first.schema, sink, format)


def gather(table: pa.Table, index: str) -> pa.Table:
    """The table with each session in one piece, in order of first appearance.

    Parameters
    ----------
    table : Table
        In canonical form. Returned as it is where nothing has to move.
    index : str
        The column that ascends within a session, equal values keeping their order.
    """
    if len(table) == 0:
        return table
    codes = table.column("session_id").combine_chunks().dictionary_encode().indices
    order = np.lexsort((table.column(index).to_numpy(), codes.to_numpy()))
    if (np.diff(order) > 0).all():
        return table
    take = pa.array(order)
    schema, columns = table.schema, table.columns
    del table
    for i in range(len(columns)):
        # one column after the other, so that no two copies of all are held
        columns[i] = columns[i].take(take)
    return pa.Table.from_arrays(columns, schema=schema)


def _parts(
    source: Source, format: Format | None, batch_rows: int | None = None
) -> Iterator[pa.Table | Iterator[dict[str, object]]]:
    """Tables as the files hold them, or the objects of a file of JSON lines."""
    if isinstance(source, pa.Table | pa.RecordBatch):
        yield (
            pa.Table.from_batches([source])
            if isinstance(source, pa.RecordBatch)
            else source
        )
        return
    if not isinstance(source, str | os.PathLike) and isinstance(source, ArrowStream):
        reader = (
            source
            if isinstance(source, pa.RecordBatchReader)
            else pa.RecordBatchReader.from_stream(source)
        )
        for batch in reader:
            yield pa.Table.from_batches([batch])
        return
    files: Iterable[Path | BinaryIO]
    files = (
        paths_in(Path(source)) if isinstance(source, str | os.PathLike) else [source]
    )
    for file in files:
        kind = format or format_of(file)
        if is_json(kind):
            yield io_json.lines(open_input(file, kind), name_of(file))
        else:
            for batch in read_batches(file, kind, batch_rows):
                yield pa.Table.from_batches([batch])


def _joined(pieces: list[pa.Table], schema: pa.Schema) -> pa.Table:
    if not pieces:
        return schema.empty_table()
    try:
        return pa.concat_tables(pieces, promote_options="default")
    except pa.ArrowException as error:
        raise SchemaError(f"the files do not make one table: {error}") from None


def _pieces(
    source: TableLike | Iterable[pa.RecordBatch],
) -> Iterator[pa.Table]:
    if isinstance(source, pa.Table):
        yield source
    elif isinstance(source, pa.RecordBatch):
        yield pa.Table.from_batches([source])
    else:
        batches: Iterable[pa.RecordBatch] = (
            pa.RecordBatchReader.from_stream(source)
            if isinstance(source, ArrowStream)
            else source
        )
        for batch in batches:
            yield pa.Table.from_batches([batch])


def _write(
    pieces: Iterator[pa.Table], schema: pa.Schema, sink: Sink, format: Format | None
) -> None:
    target = Path(sink) if isinstance(sink, str | os.PathLike) else sink
    kind = format or format_of(target, writing=True)
    with atomic(target, kind) as file:
        if is_json(kind):
            io_json.write(pieces, schema, file)
        else:
            write_pieces(pieces, schema, file, kind)

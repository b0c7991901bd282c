"""Turns and rows from and to files: Parquet, Arrow IPC and JSON lines.

The suffix of a path says the format; an open file is known by its first bytes, or by
`format`. Logs whose sessions interleave are gathered. What is read has been looked at
by the rules of `trajkit.validate`, but for message bodies and empty prompts.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeGuard

import numpy as np
import pyarrow as pa

from trajkit._arguments import arrow_source
from trajkit._arrow.canonical import (
    Plan,
    TableLike,
    as_table,
    canonical,
    canonical_rows,
    rows_schema,
    turns_schema,
)
from trajkit._arrow.categories import with_kinds
from trajkit._arrow.take import picked_column
from trajkit._streams.session_batches import check_one_form
from trajkit.errors import FormatError, SchemaError
from trajkit.io import jsonl
from trajkit.io.arrow import read_batches, table_kind, write_pieces
from trajkit.io.formats import (
    Format,
    atomic,
    format_of,
    is_json,
    name_of,
    open_input,
    paths_in,
    whole,
)
from trajkit.io.parquet_polars import write_parquet
from trajkit.io.parquet_types import storable
from trajkit.schema import AMENDMENTS, ROWS, SESSIONS, TURNS
from trajkit.turns.amendments import Amendments
from trajkit.turns.records import from_records
from trajkit.turns.session_metadata import last_lines
from trajkit.turns.validation import Nonfinite, check_rows, check_turns

Source: TypeAlias = str | os.PathLike[str] | BinaryIO | TableLike
Sink: TypeAlias = str | os.PathLike[str] | BinaryIO
_ANY_ROWS = pa.schema([], metadata=ROWS.metadata)
_Objects: TypeAlias = Iterator[dict[str, object]]


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
        directory, which is read recursively in path order, JSON Lines files last; or a
        RecordBatchReader or another Arrow stream. Turns may be in delta form. In a
        directory, hidden files are skipped, and so are files whose metadata name
        another table (sessions, rows, a report). Its amendments are applied: a turn
        that they call context only has ``trainable = false``, and the column
        ``amended`` gives the reason.
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
        The suffix, or the content, is of no format that is read here, or damaged; a
        line of JSON has more bytes than ``TRAJKIT_MAX_LINE_BYTES`` of the environment
        says, or 256 MB.
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
    source, amendments = _amended(source, format)
    for part in _parts(source, format, turns_schema, lines_of=jsonl.calls):
        if isinstance(part, Iterator):
            lines.append(part)
        else:
            pieces.append(canonical(part, turns_schema(part.column_names)))
    if lines:
        # files of one log count their turns together
        records = (record for part in lines for record in part)
        pieces.append(from_records(records, nonfinite_logprobs=nonfinite_logprobs))
    check_one_form(pieces)
    turns = gather(_joined(pieces, TURNS), "turn_index")
    turns = check_turns(turns, nonfinite_logprobs)
    return turns if amendments is None else amendments.fold_into(turns)


def write_turns(
    turns: TableLike | Iterable[pa.RecordBatch],
    sink: Sink,
    *,
    format: Format | None = None,
) -> None:
    """Write turns where `read_turns` finds them again.

    A path gets its file when all is written, or not at all. Parquet is compressed with
    zstd. JSON lines hold each call's messages in full. In extra columns a timestamp
    becomes text there, and bytes become ``{"$base64": "..."}``, which is read back.

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
        The suffix is of no format that is written here, or JSON has no form for a value;
        the text names its column.
    SchemaError, InvalidTurnsError
        The table is none of turns, or lacks a message body that JSON lines need.
    """
    tables = (
        canonical(piece, turns_schema(piece.column_names)) for piece in _pieces(turns)
    )
    _write(tables, TURNS, sink, format)


def read_sessions(source: Source, *, format: Format | None = None) -> pa.Table:
    """What is known of each session, as `trajkit.linearize` takes it for ``sessions``.

    Parameters
    ----------
    source, format
        As for `read_turns`. Of a directory, the files that hold sessions.

    Returns
    -------
    Table
        `trajkit.schema.SESSIONS` and what else the files know, one row per session, in
        order of first appearance; of several lines of one session the last one counts.

    Raises
    ------
    FormatError
        A directory has no file of sessions, or a file is of no known format.
    SchemaError
        A column is absent or of another type.
    """
    if _is_directory(source):
        found = _files_of(source, format)
        if "sessions" not in found:
            raise FormatError(f"{source} holds no file of sessions")
        source = found["sessions"]
    pieces: list[pa.Table] = []
    for part in iter_tables(source, format=format, plan=lambda names: SESSIONS):
        pieces.append(canonical(part, SESSIONS))
    return last_lines(_joined(pieces, SESSIONS))


def write_sessions(
    sessions: TableLike, sink: Sink, *, format: Format | None = None
) -> None:
    """Write a sessions table where `read_sessions` finds it again.

    Parameters
    ----------
    sessions : table
        `trajkit.schema.SESSIONS`; extra columns are kept.
    sink, format
        As for `write_turns`.

    Raises
    ------
    SchemaError
        The table is not a sessions table.
    """
    write_table(canonical(sessions, SESSIONS), sink, format=format)


def read_rows(source: Source, *, format: Format | None = None) -> pa.Table:
    """Training rows of either layout, in canonical form; see `read_turns`.

    JSON lines hold one row each, an object of the table's columns.
    """
    pieces: list[pa.Table] = []
    for part in iter_tables(source, format=format, plan=rows_schema):
        pieces.append(canonical_rows(part))
    return with_kinds(check_rows(gather(_joined(pieces, ROWS), "row_index")))


def scan_rows(
    source: Source, *, format: Format | None = None, batch_rows: int = 256
) -> Iterator[pa.RecordBatch]:
    """Training rows in batches, as the files hold them: not gathered, not checked.

    Rows that `trajkit.jobs.linearize_file` wrote lie so that every stage takes them as a
    stream: each session in one piece, in the order of the turns.

    Parameters
    ----------
    source, format
        As for `read_rows`.
    batch_rows : int
        At most so many rows in a batch.

    Yields
    ------
    RecordBatch
        Of either layout, in canonical form.

    Raises
    ------
    FormatError, SchemaError, InvalidTurnsError
        As `read_rows`, but for what only a check of the values tells.
    """
    for table in iter_tables(source, format=format, batch_rows=batch_rows):
        yield from canonical_rows(table).to_batches(max_chunksize=batch_rows)


def read_any_rows(source: Source, *, format: Format | None = None) -> pa.Table:
    """Rows of any system, as the files hold them: not gathered, not checked.

    JSON lines hold one row each, an object of the table's columns; see `read_turns`.
    """
    return _joined(list(iter_tables(source, format=format, plan=rows_plan)), ROWS)


def rows_plan(_: list[str]) -> pa.Schema:
    """The plan of rows of any system: no other kind of table."""
    return _ANY_ROWS


def iter_tables(
    source: Source,
    *,
    format: Format | None = None,
    batch_rows: int | None = None,
    plan: Plan | None = None,
) -> Iterator[pa.Table]:
    """Tables of any kind, some rows at a time, as the files hold them.

    Parameters
    ----------
    source, format
        As for `read_turns`.
    batch_rows : int, optional
        At most so many rows of Parquet at a time. None: as many as a row group has.
    plan : function of names, optional
        The schema that each file is expected to have, given its columns.
    """
    for part in _parts(source, format, plan, batch_rows):
        if isinstance(part, Iterator):
            yield from part
        else:
            yield part


def write_rows(
    rows: TableLike | Iterable[pa.RecordBatch],
    sink: Sink,
    *,
    format: Format | None = None,
) -> None:
    """Write training rows where `read_rows` finds them again; see `write_turns`.

    Rows of the layout "suffix" are written as they are. A Parquet file of more than 32 MB
    as Arrow is written by polars, where that is installed (``trajkit[polars]``): it takes
    a third of the time, and Arrow reads the same types.
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
        columns[i] = picked_column(columns[i], take, schema.names[i])
    return pa.Table.from_arrays(columns, schema=schema)


def _is_directory(source: Source | list[Path]) -> TypeGuard[str | os.PathLike[str]]:
    return isinstance(source, str | os.PathLike) and Path(source).is_dir()


def _files_of(
    directory: str | os.PathLike[str], format: Format | None
) -> dict[str, list[Path]]:
    """The files below a directory, by the kind of table that they say they hold.

    Under ``""`` are those that do not say so, or are of JSON lines.
    """
    found: dict[str, list[Path]] = {}
    for file in paths_in(Path(directory)):
        kind = format or format_of(file)
        said = None if is_json(kind) else table_kind(file, kind)
        found.setdefault(said or "", []).append(file)
    return found


def _amended(
    source: Source, format: Format | None
) -> tuple[Source | list[Path], Amendments | None]:
    """What holds the turns of a source, and what amends them."""
    return turn_files(source, format) if _is_directory(source) else (source, None)


def log_files(
    path: str | os.PathLike[str], format: Format | None = None
) -> tuple[list[Path], list[Path]]:
    """The files of turns of a path in order, and the files of their amendments.

    Parameters
    ----------
    path : path
        A file, or a directory as for `read_turns`.
    format : str, optional
        As for `read_turns`.

    Returns
    -------
    turns : list of Path
        JSON Lines files come last: their lines count their turns together. Files whose
        metadata name another table are left out.
    amendments : list of Path

    Raises
    ------
    FormatError
        A directory holds no file of turns.
    """
    if not Path(path).is_dir():
        return [Path(path)], []
    files = _files_of(path, format)
    turns = sorted(
        [*files.pop("turns", []), *files.pop("", [])],
        key=lambda file: (is_json(format or format_of(file)), file),
    )
    if not turns:
        others = (f"{kind} ({found[0].name})" for kind, found in files.items())
        raise FormatError(f"{path} holds no file of turns, only {', '.join(others)}")
    return turns, files.get("amendments", [])


def turn_files(
    path: str | os.PathLike[str], format: Format | None = None
) -> tuple[list[Path], Amendments | None]:
    """The files of turns of a path, as `log_files` finds them, and what amends them.

    Raises
    ------
    FormatError, SchemaError
        As `read_turns`.
    """
    turns, files = log_files(path, format)
    if not files:
        return turns, None
    lines = [
        canonical(part, AMENDMENTS)
        for part in _parts(files, format)
        if isinstance(part, pa.Table)
    ]
    return turns, Amendments(_joined(lines, AMENDMENTS))


def _parts(
    source: Source | list[Path],
    format: Format | None,
    plan: Plan | None = None,
    batch_rows: int | None = None,
    lines_of: Callable[[pa.NativeFile, str], _Objects] | None = None,
) -> Iterator[pa.Table | _Objects]:
    """Tables as the files hold them; of JSON lines what ``lines_of`` gives, else tables."""
    table = None if isinstance(source, str | os.PathLike) else arrow_source(source)
    if table is not None:
        yield from _pieces(table)
        return
    files: Iterable[Path | BinaryIO]
    if isinstance(source, list):
        files = source
    elif isinstance(source, str | os.PathLike):
        files = paths_in(Path(source))
    else:
        files = [source]  # type: ignore[list-item]
    for file in files:
        kind = format or format_of(file)
        if is_json(kind):
            name = name_of(file)
            objects = (lines_of or jsonl.lines)(open_input(file, kind), name)
            if plan is not None:
                objects = jsonl.planned(objects, plan, name)
            if lines_of is None:
                yield from jsonl.tables(objects, name)
            else:
                yield objects
        else:
            for batch in read_batches(file, kind, batch_rows, plan=plan):
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
    table = arrow_source(source)
    if isinstance(table, pa.Table | pa.RecordBatch):
        yield as_table(table)
    else:
        batches: Any = source
        if table is not None and not isinstance(table, pa.RecordBatchReader):
            batches = pa.RecordBatchReader.from_stream(table)
        for batch in batches:
            yield as_table(batch)


def _write(
    pieces: Iterator[pa.Table], schema: pa.Schema, sink: Sink, format: Format | None
) -> None:
    target = Path(sink) if isinstance(sink, str | os.PathLike) else sink
    kind = format or format_of(target, writing=True)
    if kind == "parquet":
        pieces = map(storable, pieces)
    if kind == "parquet" and isinstance(target, Path):
        with whole(target) as path:
            write_parquet(pieces, schema, path)
        return
    with atomic(target, kind) as file:
        if is_json(kind):
            jsonl.write(pieces, schema, file)
        else:
            write_pieces(pieces, schema, file, kind)

"""Read and write turns, rows and sessions: Parquet, Arrow IPC and JSON lines.

The suffix of a path determines the format; an open file is recognized by its first bytes,
or by `format`. Readers apply the rules of `trajkit.validate`, except those on message
bodies and empty prompts, and make the turns of each session contiguous.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import arrow_source, check_choice, check_flag
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError, SchemaError
from trajkit.files import jsonl
from trajkit.files.arrow import read_batches, storable, table_kind, write_batches
from trajkit.files.dedup import (
    STORED_ROWS,
    decoded,
    decoded_batches,
    encoded,
    full,
    stored_schema,
)
from trajkit.files.formats import (
    Format,
    atomic,
    format_of,
    is_json,
    name_of,
    paths_in,
)
from trajkit.files.guard import check_not_read, reading
from trajkit.files.jsonl import Record
from trajkit.files.sources import (
    Naming,
    Paths,
    SessionPrefix,
    is_address,
    local_files,
    paths_of,
    placed,
)
from trajkit.schema import AMENDMENTS, REPORT, ROWS, SESSIONS, TURNS
from trajkit.tables.canonical import (
    Plan,
    TableLike,
    as_table,
    canonical,
    canonical_rows,
    concat_tables,
    turns_schema,
)
from trajkit.tables.columns import normalize_categories, take_values
from trajkit.tables.stages import check_same_form, whole_sessions
from trajkit.turns.amendments import Amendments
from trajkit.turns.mapping import Map, MapLike, read_map
from trajkit.turns.records import from_records
from trajkit.turns.session_metadata import last_lines
from trajkit.turns.sessions import with_current_keys
from trajkit.turns.validation import Nonfinite, check_table, check_turns

Source: TypeAlias = Paths | BinaryIO | TableLike
Sink: TypeAlias = str | os.PathLike[str] | BinaryIO
_ANY_ROWS = pa.schema([], metadata=ROWS.metadata)
# columns that tell a report from a table of sessions
_REPORTED = frozenset({"tokens_sampled", "tokens_trained", *SESSIONS.names})


def read_turns(
    source: Source,
    *,
    format: Format | None = None,
    map: MapLike | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    session_prefix: SessionPrefix | None = None,
) -> pa.Table:
    """Recorded turns, in the schema's canonical form.

    Parameters
    ----------
    source : path, list of paths, open binary file, or table
        A file with the suffix ``.parquet``; ``.arrow``, ``.feather`` or ``.ipc`` (Arrow
        IPC, file or stream form); ``.arrows`` (stream form); ``.jsonl`` or ``.ndjson``,
        plain or with ``.gz`` or ``.zst`` added (one call per line, as
        `trajkit.from_records` takes them); ``.json`` (lines, or one array of calls). A
        path with ``*`` is a pattern. An address (``s3://bucket/log``, ``hf://...``) is
        copied to a temporary file with fsspec. A directory is read recursively in path
        order, JSON
        Lines files last. Hidden files, files with the suffix ``.json`` and files whose
        metadata name another table (sessions, rows, a report) are skipped there.
        Amendments in a directory are applied: a turn that they call context only has
        ``trainable = false``, and the column ``amended`` gives the reason. Turns may be in
        delta form.
    format : str, optional
        Overrides suffix and first bytes: "parquet", "arrow", "arrows", "jsonl",
        "jsonl.gz", "jsonl.zst", "json", "json.gz" or "json.zst".
    map : dict, str or path, optional
        As for `trajkit.from_records`, which then takes every line or row as a record.
    nonfinite_logprobs : {"raise", "null"}
        As for `trajkit.from_records`.
    session_prefix : {"file", "folder", "no"}, optional
        What to put before session ids: the path of their file without its suffix, or of
        its directory, relative to ``source`` (or to the directory that the paths have in
        common). None and "no": nothing. With None, a session whose calls start over in
        another file is an error; calls with a ``turn_index``, and calls whose prompt
        extends that of an earlier call, do not start over.

    Returns
    -------
    Table
        Sessions in order of first appearance, each contiguous, turns ascending.

    Raises
    ------
    ArgumentError
        The suffix of a path is unknown.
    FormatError
        The content is of an unknown format, or damaged; a line of JSON is longer than
        256 MB, or than the environment variable ``TRAJKIT_MAX_LINE_BYTES``.
    SchemaError
        A column is missing or has another type.
    InvalidTurnsError
        A value breaks a rule of the schema.

    Warns
    -----
    TornLogWarning
        A log ends within an entry; the text names the file and the bytes left out.
    """
    check_choice("nonfinite_logprobs", nonfinite_logprobs, Nonfinite)
    with local_files(source) as local:
        return _read_turns(local, format, map, nonfinite_logprobs, session_prefix)


def _read_turns(
    source: Source,
    format: Format | None,
    map: MapLike | None,
    nonfinite_logprobs: Nonfinite,
    session_prefix: SessionPrefix | None,
) -> pa.Table:
    paths = paths_of(source)
    naming = Naming.of(paths or [], session_prefix)
    if map is not None:
        records = _renamed(source, format, read_map(map), naming)
        return from_records(records, nonfinite_logprobs=nonfinite_logprobs)
    files: Source | list[Path] = source
    amendments = None
    if paths is not None:
        files, amendments = turn_files(paths, format, naming)
    read = partial(from_records, nonfinite_logprobs=nonfinite_logprobs)
    try:
        tables = [
            canonical(table, turns_schema(table.column_names))
            for table in turn_tables(files, format, read, naming=naming)
        ]
        check_same_form(tables)
        turns = with_current_keys(gather(_concat(tables, TURNS), "turn_index"))
        turns = check_turns(turns, nonfinite_logprobs)
    except InvalidTurnsError as error:
        if not isinstance(files, list) or paths is None:
            raise
        raise placed(error, files, format, naming) from None
    return turns if amendments is None else amendments.fold_into(turns)


def write_turns(
    turns: TableLike | Iterable[pa.RecordBatch],
    sink: Sink,
    *,
    format: Format | None = None,
) -> None:
    """Write turns to a file that `read_turns` reads.

    The file appears when everything is written, or not at all. Parquet is compressed
    with zstd. JSON lines contain each call's complete messages. In extra columns a
    timestamp becomes text there, and bytes become ``{"$base64": "..."}``, which is read
    back.

    Parameters
    ----------
    turns : table, or iterable of record batches
        In full or delta form; JSON lines cannot store the delta form.
    sink : path or open binary file
    format : str, optional
        As for `read_turns`; required for an open file. "arrows" is IPC's stream form.

    Raises
    ------
    ArgumentError
        The suffix is unknown.
    FormatError
        JSON cannot represent a value of the column named.
    SchemaError, InvalidTurnsError
        The table is not of turns, or lacks a message body that JSON lines need.
    """
    tables = (
        canonical(table, turns_schema(table.column_names)) for table in _tables(turns)
    )
    _write(tables, TURNS, sink, format)


def read_sessions(
    source: Source,
    *,
    format: Format | None = None,
    session_prefix: SessionPrefix | None = None,
) -> pa.Table:
    """The sessions table, as `trajkit.linearize` takes it for ``sessions``.

    Parameters
    ----------
    source, format
        As for `read_turns`. In a directory, the files of sessions are read. The report of
        `trajkit.linearize` has the columns of a sessions table, too.
    session_prefix : {"folder", "no"}, optional
        As for `read_turns`. A file of sessions is not one of turns, so "file" is refused.

    Returns
    -------
    Table
        `trajkit.schema.SESSIONS` and the files' extra columns, one row per session in
        order of first appearance. The last of several lines of a session counts.

    Raises
    ------
    FormatError
        A directory has no file of sessions, or a format is unknown.
    SchemaError
        A column is missing or has another type.
    """
    paths = paths_of(source)
    if paths is None:
        parts: list[tuple[Path | None, pa.Table]] = [
            (None, table)
            for table in iter_tables(source, format=format, plan=_session_plan)
        ]
        naming = Naming.of([], None)
    else:
        files = _session_files(paths, format)
        if not files:
            raise FormatError(f"{paths[0]} has no file of sessions")
        naming = Naming.of(paths, session_prefix)
        parts = [
            (file, table)
            for file in files
            for table in iter_tables(file, format=format, plan=_session_plan)
        ]
    if naming.mode == "file":
        raise ArgumentError(
            "session_prefix='file' does not say to which file of turns a file of sessions "
            "belongs: take 'folder', or pass sessions with complete ids"
        )
    tables = []
    for file, table in parts:
        if _REPORTED <= {*table.column_names}:
            table = table.select(SESSIONS.names).replace_schema_metadata(None)
        table = canonical(table, SESSIONS)
        tables.append(table if file is None else naming.table(table, file))
    return last_lines(_concat(tables, SESSIONS))


def _session_plan(names: list[str]) -> pa.Schema:
    """The plan of sessions, or of a report, which has their columns."""
    return REPORT if _REPORTED <= {*names} else SESSIONS


def _session_files(paths: list[Path], format: Format | None) -> list[Path]:
    """The paths that are files, and the files of sessions below the others."""
    return [
        file
        for path in paths
        for file in (
            _files_of(path, format).get("sessions", []) if path.is_dir() else [path]
        )
    ]


def sessions_below(
    source: Source, session_prefix: SessionPrefix | None = None
) -> pa.Table | None:
    """`read_sessions` of the directories that have files of sessions; otherwise None."""
    folders = [path for path in paths_of(source) or [] if path.is_dir()]
    if not _session_files(folders, None):
        return None
    return read_sessions(folders, session_prefix=session_prefix)


def write_sessions(
    sessions: TableLike, sink: Sink, *, format: Format | None = None
) -> None:
    """Write a table of `trajkit.schema.SESSIONS` to a file that `read_sessions` reads.

    Extra columns are kept; see `write_turns`.
    """
    write_table(canonical(sessions, SESSIONS), sink, format=format)


def read_rows(source: Source, *, format: Format | None = None) -> pa.Table:
    """Training rows in canonical form; see `read_turns`.

    Each line of JSON lines is one row, an object of the table's columns.
    """
    with local_files(source) as local:
        return _read_rows(local, format)


def _read_rows(source: Source, format: Format | None) -> pa.Table:
    tables: dict[bool, list[pa.Table]] = {True: [], False: []}
    for table in iter_tables(source, format=format, plan=stored_schema):
        schema = stored_schema(table.column_names)
        tables[schema is ROWS].append(canonical(table, schema))
    try:
        if tables[False]:
            whole = gather(_concat(tables[False], ROWS), "row_index")
            tables[True].append(decoded(whole))
        rows = gather(_concat(tables[True], ROWS), "row_index")
        rows = check_table(rows, "rows")
    except InvalidTurnsError as error:
        paths = paths_of(source)
        if paths is None:
            raise
        files = [file for path in paths for file in paths_in(path)]
        raise placed(error, files, format, Naming.of(paths, "no")) from None
    return normalize_categories(rows)


def scan_rows(
    source: Source, *, format: Format | None = None, batch_rows: int = 256
) -> Iterator[pa.RecordBatch]:
    """Training rows in batches, neither reordered nor checked.

    Rows of ``write_rows(dedup=True)`` are read session by session. Rows that
    `trajkit.run` writes are in an order that every stage accepts as a stream: sessions
    are contiguous, in the order of the turns.

    Parameters
    ----------
    source, format
        As for `read_rows`.
    batch_rows : int
        The most rows in a batch.

    Yields
    ------
    RecordBatch
        `trajkit.schema.ROWS`, in canonical form.

    Raises
    ------
    FormatError, SchemaError, InvalidTurnsError
        As `read_rows`, except for rules on values.
    """

    def batches() -> Iterator[pa.RecordBatch]:
        with local_files(source) as local:
            tables = iter_tables(local, format=format, batch_rows=batch_rows)
            for table in decoded_batches(tables):
                yield from table.to_batches(max_chunksize=batch_rows)

    found = batches()
    given = source if isinstance(source, list | tuple) else [source]
    paths = paths_of([one for one in given if not is_address(one)])
    if paths is not None:
        reading(found, paths)
    return found


def read_any_rows(source: Source, *, format: Format | None = None) -> pa.Table:
    """Rows of any system as stored, neither reordered nor checked; see `read_rows`."""
    rows = _concat(list(iter_tables(source, format=format, plan=rows_plan)), ROWS)
    return full(rows)


def rows_plan(_: list[str]) -> pa.Schema:
    """The plan of rows of any system: any columns, but not another kind of table."""
    return _ANY_ROWS


def iter_tables(
    source: Source | list[Path],
    *,
    format: Format | None = None,
    batch_rows: int | None = None,
    plan: Plan | None = None,
) -> Iterator[pa.Table]:
    """Tables of any kind as stored, ``batch_rows`` of Parquet at a time (or a row group).

    ``plan`` returns the schema that a file should have, given its columns.
    """
    for _, part in _parts(source, format, plan, batch_rows):
        if isinstance(part, Iterator):
            yield from part
        else:
            yield part


def write_rows(
    rows: TableLike | Iterable[pa.RecordBatch],
    sink: Sink,
    *,
    format: Format | None = None,
    dedup: bool = False,
) -> None:
    """Write training rows to a file that `read_rows` reads; see `write_turns`.

    With ``dedup``, tokens that a row shares with its ``parent_row`` and does not train are
    stored once. The batches of a stream then have the rows of a session one after another,
    and a session is in memory at a time. Such a file is for trajkit's readers.
    """
    check_flag("dedup", dedup)
    if not dedup:
        _write((canonical_rows(table) for table in _tables(rows)), ROWS, sink, format)
        return
    tables = _tables(rows)
    if arrow_source(rows) is None:
        tables = whole_sessions(
            (batch for table in tables for batch in table.to_batches()), "rows"
        )
    _write(
        (encoded(canonical_rows(table)) for table in tables), STORED_ROWS, sink, format
    )


def write_table(table: pa.Table, sink: Sink, *, format: Format | None = None) -> None:
    """Write a table of any schema, such as links or a report; see `write_turns`."""
    _write(iter([table]), table.schema, sink, format)


def write_tables(
    batches: Iterable[pa.RecordBatch], sink: Sink, *, format: Format | None = None
) -> None:
    """Write batches of any one schema; there must be at least one batch."""
    tables = _tables(batches)
    first = next(tables)
    _write(itertools.chain([first], tables), first.schema, sink, format)


def write_any(
    batches: Iterator[pa.RecordBatch], path: Path, *, dedup: bool = False
) -> None:
    """Write batches with the function for their kind of table; there is at least one.

    ``dedup`` is an option of `write_rows`.
    """
    first = next(batches)
    kind = (first.schema.metadata or {}).get(b"trajkit.table", b"")
    batches = itertools.chain([first], batches)
    if kind == b"turns":
        write_turns(batches, path)
    elif kind == b"rows":
        write_rows(batches, path, dedup=dedup)
    else:
        write_tables(batches, path)


def gather(table: pa.Table, index: str) -> pa.Table:
    """The table with contiguous sessions, in order of first appearance.

    Within a session, the column ``index`` ascends if it has integers only; ties keep
    their order. A table whose order is right is returned as it is.
    """
    ids = table.column("session_id").combine_chunks().cast(pa.string())
    keys = [ids.dictionary_encode("encode").indices.to_numpy()]
    numbers = integers(table, index)
    order = np.lexsort(keys if numbers is None else [numbers, *keys])
    if (np.diff(order) > 0).all():
        return table
    indices = pa.array(order)
    schema, columns = table.schema, table.columns
    del table
    for i in range(len(columns)):
        # one by one, so that only one column is in memory twice; taking from one chunk
        # is faster
        columns[i] = columns[i].combine_chunks()
        columns[i] = take_values(columns[i], indices, schema.names[i])
    return pa.Table.from_arrays(columns, schema=schema)


def integers(
    table: pa.RecordBatch | pa.Table, name: str
) -> npt.NDArray[np.int64] | None:
    """The column of this name, if it has integers only."""
    if name not in table.schema.names:
        return None
    column = table.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        return None
    return np.asarray(column.cast(pa.int64(), safe=False).to_numpy())


def _files_of(
    directory: str | os.PathLike[str], format: Format | None
) -> dict[str, list[Path]]:
    """The files below a directory by the table kind in their metadata.

    The kind is ``""`` if the metadata does not name one, as in JSON lines.
    """
    files: dict[str, list[Path]] = {}
    for file in paths_in(Path(directory)):
        kind = format_of(file, format)
        table = None if is_json(kind) else table_kind(file, kind)
        files.setdefault(table or "", []).append(file)
    return files


def log_files(
    source: Paths, format: Format | None = None
) -> tuple[list[Path], list[Path]]:
    """The files of turns of paths in order, and the files of their amendments.

    JSON Lines files come last, because their lines are numbered together. Files whose
    metadata name another table are left out; a directory without a file of turns is an
    error.
    """
    turns: list[Path] = []
    amendments: list[Path] = []
    paths = paths_of(source) or []
    for path in paths:
        if not path.is_dir():
            turns.append(path)
            continue
        files = _files_of(path, format)
        own = [*files.pop("turns", []), *files.pop("", [])]
        if not own:
            others = (f"{kind} ({found[0].name})" for kind, found in files.items())
            raise FormatError(f"{path} has no file of turns, only {', '.join(others)}")
        turns += sorted(own)
        amendments += files.get("amendments", [])
    if len(turns) > 1:
        turns.sort(key=lambda file: is_json(format_of(file, format)))
    return turns, amendments


def turn_files(
    source: Paths, format: Format | None = None, naming: Naming | None = None
) -> tuple[list[Path], Amendments | None]:
    """The files of turns of paths, as `log_files` returns them, and their amendments."""
    turns, files = log_files(source, format)
    if not files:
        return turns, None
    if naming is not None and naming.mode == "file":
        raise ArgumentError(
            f"{files[0]} amends turns of several files, which session_prefix='file' would "
            "tell apart: take 'folder'"
        )
    lines = []
    for file in files:
        for part in iter_tables(file, format=format):
            part = canonical(part, AMENDMENTS)
            lines.append(part if naming is None else naming.table(part, file))
    return turns, Amendments(_concat(lines, AMENDMENTS))


def turn_tables(
    source: Source | list[Path],
    format: Format | None,
    read: Callable[[Iterable[Record]], pa.Table],
    batch_rows: int | None = None,
    naming: Naming | None = None,
) -> Iterator[pa.Table]:
    """Turns as stored, ``batch_rows`` at a time; None: all JSON lines make one table.

    ``read`` makes turns of JSON lines. They come last, in lists that end with a session:
    turns without a number are counted across the files of a log. ``naming`` prefixes the
    sessions of paths.
    """
    lines: list[tuple[Path, Iterator[Record]]] = []
    files = source if isinstance(source, list) else None
    for k, part in _parts(source, format, turns_schema, batch_rows, jsonl.calls):
        if isinstance(part, Iterator):
            lines.append((files[k] if files else Path(), part))
        elif naming is None or files is None:
            yield part
        else:
            yield naming.table(part, files[k])
    if naming is None or (len(lines) < 2 and not naming.mode):
        records: Iterator[Record] = itertools.chain.from_iterable(
            own for _, own in lines
        )
    else:
        records = naming.records(lines)
    if batch_rows is not None:
        yield from map(read, jsonl.by_session(records, batch_rows))
    elif (first := next(records, None)) is not None:
        yield read(itertools.chain([first], records))


def _renamed(
    source: Source, format: Format | None, own: Map, naming: Naming
) -> Iterator[Record]:
    """The lines and rows of files, under the names of a mapping."""
    paths = [file for path in paths_of(source) or [] for file in paths_in(path)]

    def files() -> Iterator[tuple[Path, Iterator[Record]]]:
        for k, part in _parts(source, format, of_lines=jsonl.lines):
            records = part if isinstance(part, Iterator) else part.to_pylist()
            file = paths[k] if paths else Path()
            yield file, (own.renamed(record) for record in records)

    return naming.records(files())


def _parts(
    source: Source | list[Path],
    format: Format | None,
    plan: Plan | None = None,
    batch_rows: int | None = None,
    of_lines: Callable[[Path | BinaryIO, Format], Iterator[Record]] | None = None,
) -> Iterator[tuple[int, pa.Table | Iterator[Record]]]:
    """Tables as stored, with the number of their file.

    JSON lines become tables too, unless ``of_lines`` is given.
    """
    paths = paths_of(source)
    table = arrow_source(source) if paths is None else None
    if table is not None:
        yield from ((0, one) for one in _tables(table))
        return
    files: Iterable[Path | BinaryIO] = [source]  # type: ignore[list-item]
    if paths is not None:
        files = [file for path in paths for file in paths_in(path)]
    elif not hasattr(source, "read"):
        raise ArgumentError(
            f"a source of type {type(source).__name__} cannot be read: expected a path, a "
            "list of paths, an open binary file or a table"
        )
    for k, file in enumerate(files):
        kind = format_of(file, format)
        if is_json(kind):
            objects = (of_lines or jsonl.lines)(file, kind)
            if plan is not None:
                objects = jsonl.planned(objects, plan, name_of(file))
            if of_lines is None:
                yield from ((k, one) for one in jsonl.tables(objects, name_of(file)))
            else:
                yield k, objects
        else:
            for batch in read_batches(file, kind, batch_rows, plan):
                yield k, pa.Table.from_batches([batch])


def _concat(tables: list[pa.Table], schema: pa.Schema) -> pa.Table:
    if not tables:
        return schema.empty_table()
    try:
        return concat_tables(tables)
    except pa.ArrowException as error:
        raise SchemaError(f"the files do not make one table: {error}") from None


def _tables(source: TableLike | Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """A table, or the batches of a stream as tables, with checked layout."""
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
    tables: Iterator[pa.Table], schema: pa.Schema, sink: Sink, format: Format | None
) -> None:
    if is_address(sink):
        raise ArgumentError(
            f"{sink} is an address: write to an open file, such as that of fsspec.open(...)"
        )
    target = Path(sink) if isinstance(sink, str | os.PathLike) else sink
    kind = format_of(target, format, writing=True)
    if isinstance(target, Path):
        check_not_read(target)
    if kind == "parquet":
        tables = map(storable, tables)
    with atomic(target, kind) as file:
        if is_json(kind):
            jsonl.write(tables, schema, file)
        else:
            write_batches(tables, schema, file, kind)

"""Tables of files: Parquet, Arrow IPC and JSON lines, read and written.

The suffix of a path determines the format; an open file is recognized by its first bytes,
or by `format`. Readers apply the rules of `trajkit.validate`, except those on message
bodies and empty prompts, and make the turns of each session contiguous.
"""

import itertools
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import arrow_source, check_flag
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError
from trajkit.files import jsonl
from trajkit.files.arrow import read_batches, storable, table_kind, write_batches
from trajkit.files.formats import Format, atomic, format_of, is_json, name_of, paths_in
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
from trajkit.schema import REPORT, ROWS, SESSIONS, TURNS, engine
from trajkit.tables import limits
from trajkit.tables.canonical import (
    Plan,
    TableLike,
    as_table,
    canonical,
    canonical_rows,
    turns_schema,
)
from trajkit.tables.columns import (
    Columns,
    check_no_clash,
    normalize_categories,
    replace_columns,
    row_lengths,
    take_values,
)
from trajkit.tables.ragged import Ragged, offsets_of, positions, runs_of
from trajkit.tables.stages import concat, whole_sessions
from trajkit.turns.session_metadata import last_lines
from trajkit.turns.validation import check_all, check_table

Source: TypeAlias = Paths | BinaryIO | TableLike
Sink: TypeAlias = str | os.PathLike[str] | BinaryIO
_ANY_ROWS = pa.schema([], metadata=ROWS.metadata)
# columns that tell a report from a table of sessions
_REPORTED = frozenset({"tokens_sampled", "tokens_trained", *SESSIONS.names})

_SUFFIXES = {
    "input_ids": "suffix_ids",
    "loss_mask": "suffix_mask",
    "logprobs": "suffix_logprobs",
}
STORED_ROWS = engine.described(
    """rows
suffix_start int32: the first of the row's tokens that is stored: its shared_length, or its
    first token that is trained, has a logprob, or differs from the parent row's, if that is
    earlier
suffix_ids [int32] (no_null)
suffix_mask [bool] (no_null)
suffix_logprobs [float32]
""",
    *(one for one in ROWS if one.name not in _SUFFIXES),
)
"""`trajkit.schema.ROWS` whose lists per token begin at ``suffix_start``."""


def stored_schema(names: list[str]) -> pa.Schema:
    """The schema of rows in a file with these columns."""
    return STORED_ROWS if "suffix_mask" in names else ROWS


def parts_of(
    source: Source | list[Path],
    format: Format | None,
    plan: Plan | None = None,
    batch_rows: int | None = None,
    of_lines: Callable[[Path | BinaryIO, Format], Iterator[Record]] | None = None,
) -> Iterator[tuple[Path, pa.Table | Iterator[Record]]]:
    """Tables as stored, with their files; ``batch_rows`` of Parquet, or a row group.

    ``plan`` returns the schema that a file should have, given its columns. JSON lines
    become tables too, unless ``of_lines`` is given.
    """
    paths = paths_of(source)
    table = arrow_source(source) if paths is None else None
    if table is not None:
        yield from ((Path(), one) for one in _tables(table))
        return
    files: Iterable[Any] = [source]
    if paths is not None:
        files = [file for path in paths for file in paths_in(path)]
    elif not hasattr(source, "read"):
        raise ArgumentError(
            f"a source of type {type(source).__name__} cannot be read: expected a path, a "
            "list of paths, an open binary file or a table"
        )
    for file in files:
        kind, path = format_of(file, format), file if paths is not None else Path()
        if not is_json(kind):
            for batch in read_batches(file, kind, batch_rows, plan):
                yield path, pa.Table.from_batches([batch])
            continue
        objects = (of_lines or jsonl.lines)(file, kind)
        if plan is not None:
            objects = jsonl.planned(objects, plan, name_of(file))
        if of_lines is not None:
            yield path, objects
        else:
            yield from ((path, one) for one in jsonl.tables(objects, name_of(file)))


def iter_tables(
    source: Source | list[Path],
    *,
    format: Format | None = None,
    batch_rows: int | None = None,
    plan: Plan | None = None,
) -> Iterator[pa.Table]:
    """Tables of any kind as stored, as `parts_of` reads them."""
    for _, part in parts_of(source, format, plan, batch_rows):
        yield part


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
    if name not in table.schema.names:
        return None
    column = table.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        return None
    return np.asarray(column.cast(pa.int64(), safe=False).to_numpy())


def _files_of(path: Path, format: Format | None) -> dict[str, list[Path]]:
    """The files below a directory by the table kind in their metadata.

    The kind is ``""`` if the metadata does not name one, as in JSON lines.
    """
    files: dict[str, list[Path]] = {}
    for file in paths_in(path):
        kind = table_kind(file, format_of(file, format))
        files.setdefault(kind or "", []).append(file)
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
    for path in paths_of(source) or []:
        files = _files_of(path, format) if path.is_dir() else {"": [path]}
        own = sorted([*files.pop("turns", []), *files.pop("", [])])
        if not own:
            others = (f"{kind} ({found[0].name})" for kind, found in files.items())
            raise FormatError(f"{path} has no file of turns, only {', '.join(others)}")
        turns += own
        amendments += files.get("amendments", [])
    if len(turns) > 1:
        turns.sort(key=lambda file: is_json(format_of(file, format)))
    return turns, amendments


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
    FormatError, SchemaError
        As for `read_turns`; a directory has no file of sessions.
    """
    paths = paths_of(source)
    naming = Naming.of(paths or [], session_prefix if paths else None)
    if naming.mode == "file":
        raise ArgumentError(
            "session_prefix='file' does not say to which file of turns a file of sessions "
            "belongs: take 'folder', or pass sessions with complete ids"
        )
    files: Any = None if paths is None else _session_files(paths, format)
    if paths and not files:
        raise FormatError(f"{paths[0]} has no file of sessions")

    def plan(names: list[str]) -> pa.Schema:
        return REPORT if _REPORTED <= {*names} else SESSIONS

    tables = [SESSIONS.empty_table()]
    for file in files or [source]:
        for table in iter_tables(file, format=format, plan=plan):
            if _REPORTED <= {*table.column_names}:
                table = table.select(SESSIONS.names).replace_schema_metadata(None)
            table = canonical(table, SESSIONS)
            tables.append(naming.table(table, file) if files else table)
    return last_lines(concat(tables))


def _session_files(paths: list[Path], format: Format | None) -> list[Path]:
    found: list[Path] = []
    for path in paths:
        own = _files_of(path, format).get("sessions", []) if path.is_dir() else [path]
        found += own
    return found


def sessions_below(
    source: Source, session_prefix: SessionPrefix | None = None
) -> pa.Table | None:
    """`read_sessions` of the directories that have files of sessions; otherwise None."""
    folders = [path for path in paths_of(source) or [] if path.is_dir()]
    if not _session_files(folders, None):
        return None
    return read_sessions(folders, session_prefix=session_prefix)


def read_rows(source: Source, *, format: Format | None = None) -> pa.Table:
    """Training rows in canonical form; see `read_turns`.

    Each line of JSON lines is one row, an object of the table's columns.
    """
    with local_files(source) as local:
        tables: dict[bool, list[pa.Table]] = {False: [], True: []}
        for table in iter_tables(local, format=format, plan=stored_schema):
            schema = stored_schema(table.column_names)
            tables[schema is STORED_ROWS].append(canonical(table, schema))
        paths = paths_of(local)
        try:
            rows = [*tables[False]] or [ROWS.empty_table()][: not tables[True]]
            if tables[True]:
                rows.append(decoded(gather(concat(tables[True]), "row_index")))
            found = check_table(gather(concat(rows), "row_index"), "rows")
        except InvalidTurnsError as error:
            if paths is None:
                raise
            files = [file for path in paths for file in paths_in(path)]
            raise placed(error, files, format, Naming.of(paths, "no")) from None
    return normalize_categories(found)


def scan_rows(
    source: Source, *, format: Format | None = None, batch_rows: int = 256
) -> Iterator[pa.RecordBatch]:
    """Training rows in batches, neither reordered nor checked; see `read_rows`.

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
    """

    def batches() -> Iterator[pa.RecordBatch]:
        with local_files(source) as local:
            tables = iter_tables(local, format=format, batch_rows=batch_rows)
            by_form = itertools.groupby(tables, lambda t: stored_schema(t.column_names))
            for schema, some in by_form:
                stored = schema is STORED_ROWS
                for table in _whole_sessions(some) if stored else some:
                    full = decoded(table) if stored else canonical(table, ROWS)
                    yield from full.to_batches(max_chunksize=batch_rows)

    found = batches()
    reading(found, source)
    return found


def _whole_sessions(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    batches = (batch for table in tables for batch in table.to_batches())
    return whole_sessions(batches, "rows")


def read_any_rows(source: Source, *, format: Format | None = None) -> pa.Table:
    """Rows of any system as stored, neither reordered nor checked; see `read_rows`."""
    tables = [*iter_tables(source, format=format, plan=rows_plan)]
    return full(concat(tables) if tables else ROWS.empty_table())


def full(rows: pa.Table) -> pa.Table:
    return decoded(rows) if "suffix_mask" in rows.column_names else rows


def rows_plan(_: list[str]) -> pa.Schema:
    """The plan of rows of any system: any columns, but not another kind of table."""
    return _ANY_ROWS


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
    ArgumentError, FormatError
        The suffix is unknown; JSON cannot represent a value of the column named.
    SchemaError, InvalidTurnsError
        The table is not of turns, or lacks a message body that JSON lines need.
    """
    tables = (
        canonical(table, turns_schema(table.column_names)) for table in _tables(turns)
    )
    _write(tables, TURNS, sink, format)


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
    tables = _tables(rows)
    if dedup:
        tables = tables if arrow_source(rows) is not None else _whole_sessions(tables)
        _write(map(encoded, map(canonical_rows, tables)), STORED_ROWS, sink, format)
    else:
        _write(map(canonical_rows, tables), ROWS, sink, format)


def write_sessions(
    sessions: TableLike, sink: Sink, *, format: Format | None = None
) -> None:
    """Write a table of `trajkit.schema.SESSIONS` to a file that `read_sessions` reads.

    Extra columns are kept; see `write_turns`.
    """
    write_table(canonical(as_table(sessions), SESSIONS), sink, format=format)


def write_table(
    table: TableLike | Iterable[pa.RecordBatch],
    sink: Sink,
    *,
    format: Format | None = None,
) -> None:
    """Write a table of any schema, such as links or a report, or its batches, of which
    there must be at least one; see `write_turns`.
    """
    tables = _tables(table)
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
        write_table(batches, path)


def _tables(source: TableLike | Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    table = arrow_source(source)
    if isinstance(table, pa.Table | pa.RecordBatch):
        return iter([as_table(table)])
    batches: Any = source
    if table is not None and not isinstance(table, pa.RecordBatchReader):
        batches = pa.RecordBatchReader.from_stream(table)
    return map(as_table, batches)


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


def encoded(rows: pa.Table) -> pa.Table:
    """Rows in canonical form as `STORED_ROWS`.

    A row whose parent is not earlier in the table is stored whole. Nothing is lost, also
    where ``shared_length`` is wrong.
    """
    check_no_clash(rows, ROWS, STORED_ROWS, "form of rows")
    ids, mask = (Ragged.of(rows.column(n), 0) for n in ("input_ids", "loss_mask"))
    logprobs = Ragged.of(rows.column("logprobs")).values
    # the places of tokens that only the row itself can give
    own = np.flatnonzero(
        mask.values | logprobs.is_valid().to_numpy(zero_copy_only=False)
    )
    own = np.append(own, len(mask.values))
    first = own[np.searchsorted(own, mask.offsets[:-1])] - mask.offsets[:-1]
    parent, found = engine.lookup(rows, "row_index", rows.column("parent_row"))
    found &= parent < np.arange(len(parent))
    most = np.minimum(
        np.minimum(first, ids.lengths), np.where(found, ids.lengths[parent], 0)
    )
    start = np.minimum(rows.column("shared_length").to_numpy().astype(np.int64), most)
    here, there = (
        positions(at, start) for at in (ids.offsets[:-1], ids.offsets[parent])
    )
    differs = np.flatnonzero(ids.values[here] != ids.values[there])
    # the first of each row: later ones are overwritten by earlier ones
    row = np.repeat(np.arange(len(start)), start)[differs[::-1]]
    start[row] = here[differs[::-1]] - ids.offsets[row]
    columns = {"suffix_start": pa.array(start.astype(np.int32))}
    for old, new in _SUFFIXES.items():
        lists = Ragged.of(rows.column(old))
        n = np.maximum(lists.lengths - start, 0)
        columns[new] = lists.take(lists.offsets[:-1] + start, n).to_arrow()
    return replace_columns(rows, ROWS, STORED_ROWS, [columns])


def decoded(rows: pa.Table) -> pa.Table:
    """`STORED_ROWS` with all rows of each session, in order, as `ROWS`.

    Raises `InvalidTurnsError` if the parent of a row is missing.
    """
    rows = canonical(rows, STORED_ROWS)
    check_no_clash(rows, STORED_ROWS, ROWS, "form of rows")
    check_all(rows, (*engine.checks_of(STORED_ROWS), _can_be_decoded))
    starts = np.append(engine.run_starts(rows), rows.num_rows)
    sizes = np.diff(offsets_of(row_lengths(rows))[starts])
    parts = [
        _full_columns(rows.slice(starts[lo], starts[hi] - starts[lo]))
        for lo, hi in runs_of(sizes, limits.PART_TOKENS)
    ]
    return replace_columns(rows, STORED_ROWS, ROWS, parts)


def _can_be_decoded(rows: pa.Table) -> Iterator[engine.Fault]:
    """What a row does not store, an earlier row has."""
    for name in ("suffix_mask", "suffix_logprobs"):
        yield from engine.as_long_as("suffix_ids", name, "{} " + name, rows)
    start = rows.column("suffix_start").to_numpy()
    parent, found = engine.lookup(rows, "row_index", rows.column("parent_row"))
    found &= parent < np.arange(len(parent))
    most = np.where(found, row_lengths(rows)[parent], 0)
    rule = "suffix_start is {}, but the parent row in the file has {} tokens"
    yield engine.broken((start < 0) | (start > most), rule, start, most)


def _full_columns(rows: pa.Table) -> Columns:
    """The columns that only `ROWS` has."""
    ids = Ragged.of(rows.column("suffix_ids"))
    start = rows.column("suffix_start").to_numpy().astype(np.int64)
    offsets = offsets_of(start + ids.lengths)
    parents = engine.lookup(rows, "row_index", rows.column("parent_row"))[0]
    # of each token of the full rows: which stored one it is, and whether the row stores it
    at = np.zeros(offsets[-1], np.int64)
    for row, (parent, n) in enumerate(zip(parents, start, strict=True)):
        first, stop = offsets[row], offsets[row + 1]
        at[first : first + n] = at[offsets[parent] : offsets[parent] + n]
        at[first + n : stop] = np.arange(*ids.offsets[row : row + 2])
    own = np.zeros(len(at), np.bool_)
    own[positions(offsets[:-1] + start, ids.lengths)] = True
    columns: Columns = {}
    for old, new in _SUFFIXES.items():
        which = pa.array(at) if old == "input_ids" else pa.array(at, mask=~own)
        values = Ragged.of(rows.column(new)).values.take(which)
        if old == "loss_mask":
            values = values.fill_null(False)
        columns[old] = Ragged(values, offsets).to_arrow()
    return columns

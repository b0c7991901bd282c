"""Tables of files: Parquet, Arrow IPC and JSON lines, read and written.

The suffix of a path determines the format; an open file is recognized by its first bytes,
or by `format`. Readers apply the rules of `trajkit.validate`, except those on message
bodies and empty prompts, and make the turns of each session contiguous.

Logs larger than memory are scanned for session ids and turn numbers alone, which are small
(`index_sessions`). If sessions are scattered, the turns are then written once to a
temporary file, from which they are read session by session (`SessionStore`).
"""

import os
import tempfile
import warnings
from collections import defaultdict
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, groupby, islice, pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias, cast

import numpy as np
import pyarrow as pa

from trajkit._arguments import arrow_source, check_choice, check_flag
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError, TornLogWarning
from trajkit.files import arrow, jsonl, sources
from trajkit.files.formats import (
    Format,
    atomic,
    format_of,
    is_json,
    name_of,
    paths_in,
)
from trajkit.files.jsonl import LINE, Record
from trajkit.schema import AMENDMENTS, REPORT, ROWS, SESSIONS, TURNS, engine
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits, stages
from trajkit.tables.canonical import (
    Plan,
    TableLike,
    as_table,
    canonical,
    canonical_rows,
    session_names,
    turns_schema,
)
from trajkit.tables.columns import (
    Columns,
    check_no_clash,
    normalize_categories,
    replace_columns,
    row_lengths,
    take_rows,
    take_values,
    tuples,
)
from trajkit.tables.ragged import (
    Longs,
    Ragged,
    codes,
    combined,
    offsets_of,
    positions,
    runs_of,
)
from trajkit.turns import validation
from trajkit.turns.amendments import Amendments
from trajkit.turns.mapping import Map, MapLike, Names, names_of, read_map
from trajkit.turns.records import FIELDS, collected, from_records, is_too_deep
from trajkit.turns.session_metadata import last_lines
from trajkit.turns.sessions import with_current_keys

Source: TypeAlias = sources.Paths | BinaryIO | TableLike
Sink: TypeAlias = str | os.PathLike[str] | BinaryIO
# columns that tell a report from a table of sessions
_REPORTED = frozenset({"tokens_sampled", "tokens_trained", *SESSIONS.names})
_NO_EXTRAS = frozenset({*FIELDS, *TURNS.names})

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
    return STORED_ROWS if "suffix_mask" in names else ROWS


def parts_of(
    source: Source | list[Path],
    format: Format | None,
    plan: Plan | None = None,
    batch_rows: int | None = None,
    of_lines: Callable[[Path | BinaryIO, Format], Iterator[Any]] | None = None,
) -> Iterator[tuple[Path, pa.Table | Iterator[Record]]]:
    """Tables as stored, with their files; ``batch_rows`` of Parquet, or a row group.

    ``plan`` returns the schema that a file should have, given its columns. JSON lines
    become tables too, unless ``of_lines`` is given.
    """
    paths = sources.paths_of(source)
    table = arrow_source(source) if paths is None else None
    if table is not None:
        yield from ((Path(), one) for one in _tables(table))
        return
    files: Iterable[Any] = [source]
    if paths is not None:
        files = [file for path in paths for file in paths_in(path)]
    elif not hasattr(source, "read") or hasattr(source, "encoding"):  # a text file
        is_empty = isinstance(source, list) and not source
        kind = "no element" if is_empty else f"type {type(source).__name__}"
        raise ArgumentError(
            f"a source of {kind} cannot be read: expected a path, a list of paths, an open "
            "binary file or a table"
        )
    for file in files:
        kind, path = format_of(file, format), file if paths is not None else Path()
        if not is_json(kind):
            for batch in arrow.read_batches(file, kind, batch_rows, plan):
                yield path, pa.Table.from_batches([batch])
            continue
        if of_lines is not None:
            objects = of_lines(file, kind)
        else:
            objects = (one for _, one in jsonl.numbered_lines(file, kind))
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


def integers(table: pa.RecordBatch | pa.Table, name: str) -> Longs | None:
    if name not in table.schema.names:
        return None
    column = table.column(name)
    if not pa.types.is_integer(column.type) or column.null_count:
        return None
    return np.asarray(column.cast(pa.int64(), safe=False).to_numpy())


def log_files(
    source: sources.Paths, format: Format | None = None
) -> tuple[list[Path], list[Path]]:
    """The files of turns of paths in order, and the files of their amendments.

    JSON Lines files come last, because their lines are numbered together. Files whose
    metadata name another table are left out; a directory without a file of turns is an
    error.
    """
    turns: list[Path] = []
    amendments: list[Path] = []
    for path in sources.paths_of(source) or []:
        files = _files_of(path, format) if path.is_dir() else {"": [path]}
        own = sorted([*files.pop("turns", []), *files.pop("", [])])
        if not own:
            others = (f"{kind} ({found[0].name})" for kind, found in files.items())
            raise FormatError(f"{path} has no file of turns, only {', '.join(others)}")
        turns += own
        amendments += files.get("amendments", [])
    if len(turns) > 1:
        sources.check_distinct(turns, set())
        turns.sort(key=lambda file: is_json(format_of(file, format)))
    return turns, amendments


def _files_of(path: Path, format: Format | None) -> dict[str, list[Path]]:
    """The files below a directory by the table kind in their metadata; "": none."""
    files: dict[str, list[Path]] = {}
    for file in paths_in(path):
        kind = arrow.table_kind(file, format_of(file, format))
        files.setdefault(kind or "", []).append(file)
    return files


def read_sessions(
    source: Source,
    *,
    format: Format | None = None,
    session_prefix: sources.SessionPrefix | None = None,
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
        order of first appearance. The last of several lines of a session counts. Errors
        are those of `read_turns`; a directory without a file of sessions is one, too.
    """
    paths = sources.paths_of(source)
    naming = sources.Naming.of(paths or [], session_prefix if paths else None)
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
    return last_lines(stages.concat(tables))


def _session_files(paths: list[Path], format: Format | None) -> list[Path]:
    own = (
        _files_of(path, format).get("sessions", []) if path.is_dir() else [path]
        for path in paths
    )
    return [*chain.from_iterable(own)]


def sessions_below(
    source: Source, session_prefix: sources.SessionPrefix | None = None
) -> pa.Table | None:
    """`read_sessions` of the directories that have files of sessions; otherwise None."""
    folders = [path for path in sources.paths_of(source) or [] if path.is_dir()]
    if not _session_files(folders, None):
        return None
    return read_sessions(folders, session_prefix=session_prefix)


def read_rows(source: Source, *, format: Format | None = None) -> pa.Table:
    """Training rows in canonical form; see `read_turns`.

    Each line of JSON lines is one row, an object of the table's columns.
    """
    with sources.local_files(source) as local:
        by_form: dict[bool, list[pa.Table]] = {}
        for table in iter_tables(local, format=format, plan=stored_schema):
            schema = stored_schema(table.column_names)
            some = by_form.setdefault(schema is STORED_ROWS, [])
            some.append(canonical(table, schema))
        paths = sources.paths_of(local)
        try:
            rows = [ROWS.empty_table()][: not by_form]
            for stored, some in by_form.items():
                each = gather(stages.concat(some), "row_index")
                rows.append(decoded(each) if stored else each)
            found = gather(stages.concat(rows), "row_index")
            found = validation.check_table(found, "rows")
        except InvalidTurnsError as error:
            if paths is None:
                raise
            files = [file for path in paths for file in paths_in(path)]
            raise sources.placed(
                error, files, format, sources.Naming.of(paths, "no")
            ) from None
    return normalize_categories(found)


def scan_rows(
    source: Source, *, format: Format | None = None
) -> Iterator[pa.RecordBatch]:
    """Training rows in batches, neither reordered nor checked; see `read_rows`.

    Rows of ``write_rows(dedup=True)`` are read session by session. Rows that
    `trajkit.run` writes are in an order that every stage accepts as a stream: sessions
    are contiguous, in the order of the turns.
    """
    sources.check_there(source)

    def batches() -> Iterator[pa.RecordBatch]:
        with sources.local_files(source) as local:
            options: Any = {"format": format, "batch_rows": limits.SCANNED_ROWS}
            for table in _full(iter_tables(local, **options)):
                yield from canonical(table, ROWS).to_batches(limits.SCANNED_ROWS)

    return batches()


def scan_any_rows(source: Source) -> Iterator[pa.RecordBatch]:
    """Rows of any system as stored, neither reordered nor checked; see `scan_rows`."""
    rows = limits.SCANNED_ROWS
    for table in _full(iter_tables(source, batch_rows=rows, plan=_any_columns)):
        yield from table.to_batches()


def read_any_rows(source: Source) -> pa.Table:
    """As `scan_any_rows`, in one table."""
    tables = [*_full(iter_tables(source, plan=_any_columns))]
    return stages.concat(tables) if tables else ROWS.empty_table()


def _any_columns(_: list[str]) -> pa.Schema:
    """Rows of any system have any columns, but are not another kind of table."""
    return pa.schema([], metadata=ROWS.metadata)


def _full(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables of rows; those that were stored with dedup are decoded by session."""
    by_form = groupby(tables, lambda t: "suffix_mask" in t.column_names)
    for stored, some in by_form:
        yield from map(decoded, _whole_sessions(some)) if stored else some


def _whole_sessions(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    batches = (batch for table in tables for batch in table.to_batches())
    return stages.whole_sessions(batches, "rows")


def write_turns(
    turns: TableLike | Iterable[pa.RecordBatch],
    sink: Sink,
    *,
    format: Format | None = None,
) -> None:
    """Write turns to a file that `read_turns` reads.

    The file appears when everything is written, or not at all. Parquet is compressed
    with zstd. JSON lines contain each call's complete messages. In extra columns a
    timestamp becomes text there, and bytes are refused.

    Parameters
    ----------
    turns : table, or iterable of record batches
        In full or delta form; JSON lines cannot store the delta form.
    sink : path or open binary file
    format : str, optional
        As for `read_turns`; required for an open file. "arrows" is IPC's stream form.

    Raises
    ------
    ArgumentError, FormatError, SchemaError, InvalidTurnsError
        The suffix is unknown; the format cannot store a value of the column named; the
        table is not of turns, or lacks a message body that JSON lines need.
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
    _write(chain([first], tables), first.schema, sink, format)


def write_any(
    batches: Iterator[pa.RecordBatch], path: Path, *, dedup: bool = False
) -> None:
    """Write batches with the function for their kind of table; there is at least one.

    ``dedup`` is an option of `write_rows`.
    """
    first = next(batches)
    kind = (first.schema.metadata or {}).get(b"trajkit.table", b"")
    batches = chain([first], batches)
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
    if not isinstance(batches, Iterable):
        kind = type(source).__name__
        raise ArgumentError(f"it is a {kind}: expected a table, or its record batches")
    return map(as_table, batches)


def _write(
    tables: Iterator[pa.Table], schema: pa.Schema, sink: Sink, format: Format | None
) -> None:
    if sources.is_address(sink):
        raise ArgumentError(
            f"{sink} is an address: write to an open file, such as that of fsspec.open(...)"
        )
    target = Path(sink) if isinstance(sink, str | os.PathLike) else sink
    if not isinstance(target, Path) and (
        not hasattr(target, "write") or hasattr(target, "encoding")
    ):
        raise ArgumentError(f"sink={sink!r}: expected a path or an open binary file")
    kind = format_of(target, format, writing=True)
    if kind == "parquet":
        tables = map(arrow.storable, tables)
    with atomic(target, kind) as file:
        if is_json(kind):
            jsonl.write(tables, schema, file)
        else:
            arrow.write_batches(tables, schema, file, kind)


def encoded(rows: pa.Table) -> pa.Table:
    """Rows in canonical form as `STORED_ROWS`.

    A row whose parent is not earlier in the table is stored whole. Nothing is lost, also
    where ``shared_length`` is wrong. Raises `InvalidTurnsError` for lists of other lengths.
    """
    check_no_clash(rows, ROWS, STORED_ROWS, "form of rows")
    layout = partial(engine.per_token, "input_ids", ("loss_mask", "logprobs"))
    rules = engine.checks_of(ROWS, ("loss_mask", "shared_length"))
    validation.check_all(rows, (layout, *rules))
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
    columns: Columns = {"suffix_start": pa.array(start.astype(np.int32))}
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
    validation.check_all(rows, (*engine.checks_of(STORED_ROWS), _can_be_decoded))
    starts = np.append(engine.run_starts(rows), rows.num_rows)
    sizes = np.diff(offsets_of(row_lengths(rows))[starts])
    parts = [
        _full_columns(rows.slice(starts[lo], starts[hi] - starts[lo]))
        for lo, hi in runs_of(sizes, limits.PART_TOKENS)
    ]
    return replace_columns(rows, STORED_ROWS, ROWS, parts)


def _can_be_decoded(rows: pa.Table) -> Iterator[engine.Fault]:
    """What a row does not store, an earlier row has."""
    yield from engine.per_token("suffix_ids", ("suffix_mask", "suffix_logprobs"), rows)
    start = rows.column("suffix_start").to_numpy()
    parent, found = engine.lookup(rows, "row_index", rows.column("parent_row"))
    found &= parent < np.arange(len(parent))
    most = np.where(found, row_lengths(rows)[parent], 0)
    rule = "suffix_start is {}, but the parent row in the file has {} tokens"
    yield engine.broken((start < 0) | (start > most), rule, start, most)


def _full_columns(rows: pa.Table) -> Columns:
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


TEMPORARY = ".trajkit-gather-"
"""Prefix of the directories in which sessions are grouped."""

# estimated bytes of text per byte of a compressed file
_INFLATED = 8


@dataclass(slots=True)
class SessionIndex:
    """The sessions of files, without their turns.

    ``turns`` is the number of turns of each session, in order of first appearance;
    ``n_bytes`` their approximate size as Arrow; ``scattered`` the first session whose
    turns are not contiguous and ascending; ``extras`` the columns beside the schema's.
    """

    turns: dict[str | None, int] = field(default_factory=dict)
    n_bytes: int = 0
    scattered: str | None = None
    extras: pa.Schema = field(default_factory=lambda: pa.schema([]))
    _current: str | None = None
    _last: int = -1

    @property
    def n_turns(self) -> int:
        return sum(self.turns.values())

    @property
    def batch_rows(self) -> int:
        rows = self.n_turns * limits.READ_BYTES // max(self.n_bytes, 1)
        return min(max(rows, limits.MIN_READ_ROWS), limits.MAX_READ_ROWS)

    def groups(self) -> dict[str | None, int]:
        """The group of each session: consecutive ones of about `limits.BUCKET_BYTES`."""
        each = self.n_bytes / max(self.n_turns, 1)
        ends = np.cumsum([*self.turns.values()])
        groups = ((ends - 1) * each // limits.BUCKET_BYTES).astype(np.int64)
        return dict(zip(self.turns, groups.tolist(), strict=True))

    def add(self, ids: pa.Array, index: Longs | None) -> None:
        """Count turns that follow the ones counted before.

        ``index`` are their turn numbers; None: unknown, or assigned by the reader.
        """
        # null counts as a name
        edges = np.flatnonzero(np.diff(codes(ids), prepend=-1, append=-1))
        for start, stop in pairwise(edges.tolist()):
            name = ids[start].as_py()
            before = self.turns.get(name, 0)
            continues = before > 0 and name == self._current
            own = np.array([-1]) if index is None else index[start:stop]
            falls = (continues and own[0] < self._last) or (np.diff(own) < 0).any()
            if (before and not continues) or (index is not None and falls):
                self.scattered = self.scattered or name
            self.turns[name] = before + stop - start
            self._current, self._last = name, int(own[-1])

    def add_columns(self, columns: Iterable[pa.Field]) -> None:
        """Count columns of some turns. If types do not fit, reading the turns says so."""
        with suppress(pa.ArrowException, ValueError, TypeError, OverflowError):
            both = self.extras, pa.schema(columns)
            self.extras = pa.unify_schemas(both, promote_options="permissive")


def index_sessions(
    paths: Iterable[Path],
    format: Format | None,
    naming: sources.Naming | None = None,
) -> SessionIndex:
    """Scan files for session ids, turn numbers and the names of columns.

    The session None has turns without a valid name; reading the turns reports it.
    """
    index, columns = SessionIndex(), ("session_id", "turn_index")
    seen = set[tuple[str, type]]()
    with warnings.catch_warnings():
        # reading the turns repeats the warning
        warnings.simplefilter("ignore", TornLogWarning)
        for path in paths:
            kind = format_of(path, format)
            prefix = "" if naming is None else naming.prefix(path)
            if is_json(kind):
                index.n_bytes += path.stat().st_size * (_INFLATED if "." in kind else 1)
                for record in jsonl.calls(path, kind):
                    index.add_columns(_extras(record, seen))
                    name, number = _session_of(record), record.get("turn_index")
                    numbers = np.array([number]) if type(number) is int else None
                    index.add(pa.array([name and prefix + name], pa.string()), numbers)
                continue
            for keys, n_bytes, own in arrow.sized_batches(path, kind, columns):
                index.n_bytes += n_bytes
                known = turns_schema(own.names).names
                index.add_columns(one for one in own if one.name not in known)
                ids = pa.nulls(keys.num_rows, pa.string())
                if "session_id" in keys.schema.names:
                    ids = session_names(keys)
                    if prefix:
                        ids = pc.binary_join_element_wise(prefix, ids, "")
                index.add(ids, integers(keys, "turn_index"))
    return index


def _extras(record: Record, seen: set[tuple[str, type]]) -> Iterator[pa.Field]:
    """The extra columns that the record of a call makes, but for those that were seen."""
    own = {
        name: value
        for name, value in record.items()
        if name not in _NO_EXTRAS and (name, type(value)) not in seen
    }
    if own and not is_too_deep(own):
        yield from pa.infer_type([own])
        # other types make columns of several types
        plain = (name for name in own if isinstance(own[name], str | float | None))
        seen.update((name, type(own[name])) for name in plain)


def _session_of(record: Record) -> str | None:
    name = record.get("session_id")
    try:
        return name if isinstance(name, str) and name.encode() is not None else None
    except UnicodeEncodeError:
        return None


class Piece(NamedTuple):
    """Complete sessions of a log; ``n_turns`` counts those that were rejected, too."""

    turns: pa.Table
    n_turns: int
    # the reasons, by session
    rejected: dict[str, str]


class Log:
    """Files of turns, or an open file or a table of them, and how to read them.

    With ``reject``, sessions that break a rule are rejected with the reason; otherwise
    they are errors. With ``bodies``, the rules on message bodies count. ``folder`` is the
    parent of the temporary directory.
    """

    def __init__(
        self,
        source: Source,
        format: Format | None = None,
        nonfinite_logprobs: validation.Nonfinite = "raise",
        reject: bool = False,
        folder: str | os.PathLike[str] | None = None,
        session_prefix: sources.SessionPrefix | None = None,
        *,
        bodies: bool = False,
    ) -> None:
        self._format, self._nonfinite = format, nonfinite_logprobs
        self._reject, self._folder, self._bodies = reject, folder, bodies
        paths = sources.paths_of(source)
        # no file, no prefix
        self._naming = sources.Naming.of(paths or [], session_prefix if paths else None)
        # why the lines of a session make no turns
        self._misread: dict[str, str] = {}
        self._source: Any = source
        self._files: list[Path] = []
        self._amendments: Amendments | None = None
        if paths is not None:
            self._files, self._amendments = turn_files(paths, format, self._naming)
            self._source = self._files

    def index(self) -> SessionIndex:
        return index_sessions(self._files, self._format, self._naming)

    def placed(self, error: InvalidTurnsError) -> InvalidTurnsError:
        return sources.placed(error, self._files, self._format, self._naming)

    def pieces(
        self, index: SessionIndex, skip: int = 0
    ) -> Generator[Piece, None, None]:
        """Tables of complete sessions, in canonical form and the order of `read_turns`.

        ``index`` is of the files as they are; without a session, there is one table. The
        first ``skip`` turns are left out; they must be those of complete pieces. Raises as
        `read_turns`.
        """
        try:
            with closing(self._sessions(index)) as tables:
                for table in (
                    stages.rechunk(_after(skip, tables)) if index.turns else tables
                ):
                    turns, rejected = self._checked(table)
                    own = [*turns_schema(turns.column_names), *index.extras]
                    columns = pa.schema(own, turns.schema.metadata)
                    if index.turns and turns.schema != columns:
                        turns = stages.concat([columns.empty_table(), turns])
                    if self._amendments is not None:
                        turns = self._amendments.fold_into(turns)
                    yield Piece(turns, table.num_rows, rejected)
        except InvalidTurnsError as error:
            raise self.placed(error) from None

    def _checked(self, table: pa.Table) -> tuple[pa.Table, dict[str, str]]:
        """The turns that break no rule, and the reasons of rejected sessions."""
        rejected: dict[str, str] = {}
        if not self._reject:
            return self._sound(table), rejected
        good = [*validation.accepted(self._sound, table, rejected)]
        for name in rejected.keys() & self._misread.keys():
            rejected[name] = self._misread[name]
        return stages.concat(good or [self._sound(table.slice(0, 0))]), rejected

    def _sound(self, table: pa.Table) -> pa.Table:
        turns = with_current_keys(canonical(table, turns_schema(table.column_names)))
        return validation.check_turns(turns, self._nonfinite, bodies=self._bodies)

    def _sessions(self, index: SessionIndex) -> Generator[pa.Table, None, None]:
        if not index.turns:
            whole = [*self._tables(None)] or [TURNS.empty_table()]
            yield gather(stages.concat(whole), "turn_index")
        elif index.scattered is None:
            tables = self._tables(index.batch_rows)
            yield from stages.whole_sessions(
                batch
                for table in tables
                for batch in table.combine_chunks().to_batches()
            )
        else:
            groups = index.groups()

            def group_of(name: str | None) -> int:
                if name not in groups:
                    raise FormatError(
                        f"session {name!r} was not there when the files were first read: "
                        "they changed since. Try again when nothing writes to them"
                    )
                return groups[name]

            with ExitStack() as stack:
                batches = self._spilled()
                store = SessionStore(batches, group_of, self._folder, stack)
                for group in sorted({*groups.values()} & store.starts.keys()):
                    tables = self._of_group(store.tables(group))
                    yield gather(stages.concat(tables), "turn_index")

    def _stored(
        self, batch_rows: int | None, of_lines: Any = jsonl.calls
    ) -> Iterator[pa.Table | Iterator[Record]]:
        """The turns as stored, and last the lines of all files: turns without a number are
        counted across the files of a log.
        """
        lines: list[tuple[Path, Iterator[Record]]] = []
        options = self._format, turns_schema, batch_rows, of_lines
        for file, part in parts_of(self._source, *options):
            if isinstance(part, pa.Table):
                yield self._naming.table(part, file)
            else:
                lines.append((file, part))
        yield self._naming.records(lines)

    def _tables(self, batch_rows: int | None) -> Iterator[pa.Table]:
        """The turns, ``batch_rows`` at a time; None: all lines of JSON make one table.

        Tables of lines end with a session.
        """
        for part in self._stored(batch_rows):
            if isinstance(part, pa.Table):
                yield self._typed(part)
            elif batch_rows is not None:
                yield from map(self._from_records, jsonl.by_session(part, batch_rows))
            elif (first := next(part, None)) is not None:
                yield self._from_records(chain([first], part))

    def _typed(self, table: pa.Table) -> pa.Table:
        try:
            return canonical(table, turns_schema(table.column_names))
        except InvalidTurnsError:
            if not self._reject:
                raise
            return table  # `_checked` finds the session

    def _from_records(self, records: Iterable[Record]) -> pa.Table:
        records = list(records) if self._reject else records
        try:
            return from_records(records, nonfinite_logprobs=self._nonfinite)
        except InvalidTurnsError as error:
            if not self._reject:
                raise
            reason = str(error)
        sessions: dict[str | None, list[Record]] = {}
        for record in records:
            sessions.setdefault(_session_of(record), []).append(record)
        if None in sessions:
            # there is no session to reject: its first call says what is wrong
            return from_records(sessions[None][:1])
        if len(sessions) > 1:
            return stages.concat(map(self._from_records, sessions.values()))
        [(name, lines)] = sessions.items()
        self._misread[str(name)] = reason
        nothing = {one.name: pa.nulls(len(lines), one.type) for one in TURNS}
        return pa.table({**nothing, "session_id": [name] * len(lines)})

    def _spilled(self) -> Iterator[pa.RecordBatch]:
        """The turns as they are stored: lines of JSON beside their session."""
        for part in self._stored(limits.MIN_READ_ROWS, jsonl.calls_with_lines):
            if isinstance(part, pa.Table):
                yield from part.to_batches()
                continue
            while some := [*islice(part, limits.JSON_ROWS)]:
                names = pa.array([_session_of(one) for one in some], pa.string())
                texts = pa.array([one[LINE] for one in some], pa.large_binary())
                yield pa.record_batch([names, texts], ["session_id", LINE])

    def _of_group(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
        for table in tables:
            if LINE not in table.column_names:
                yield self._typed(table)
                continue
            texts = (tuples(one, "session_id", LINE) for one in chain([table], tables))
            yield self._from_records(jsonl.read_again(chain.from_iterable(texts)))


def _after(skip: int, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    for table in tables:
        rest = table.slice(skip)
        skip = max(skip - table.num_rows, 0)
        if rest.num_rows:
            yield rest


def turn_files(
    source: sources.Paths,
    format: Format | None = None,
    naming: sources.Naming | None = None,
) -> tuple[list[Path], Amendments | None]:
    turns, files = log_files(source, format)
    if not files:
        return turns, None
    if naming is not None and naming.mode == "file":
        raise ArgumentError(
            f"{files[0]} amends turns of several files, which session_prefix='file' would "
            "tell apart: take 'folder'"
        )
    lines = [
        canonical(part if naming is None else naming.table(part, file), AMENDMENTS)
        for file in files
        for part in iter_tables(file, format=format)
    ]
    return turns, Amendments(stages.concat([AMENDMENTS.empty_table(), *lines]))


def read_turns(
    source: Source,
    *,
    format: Format | None = None,
    map: MapLike | None = None,
    nonfinite_logprobs: validation.Nonfinite = "raise",
    session_prefix: sources.SessionPrefix | None = None,
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
        order, JSON Lines files last, without hidden files, files with the suffix ``.json``
        and files whose metadata name another table. Its amendments are applied: a turn
        that they call context only has ``trainable = false``, and the column ``amended``
        gives the reason.
    format : str, optional
        Overrides suffix and first bytes: "parquet", "arrow", "arrows", or "jsonl" or
        "json", alone or with ".gz" or ".zst".
    map, nonfinite_logprobs : optional
        As for `trajkit.from_records`, which with ``map`` takes every line or row.
    session_prefix : {"file", "folder", "no"}, optional
        What to put before session ids: the path of their file without its suffix, or of
        its directory, relative to ``source`` (or to the directory that the paths have in
        common). None and "no": nothing. With None, a session whose calls start over in
        another file is an error: they have no ``turn_index``, and no prompt that extends
        that of an earlier call.

    Returns
    -------
    Table
        Sessions in order of first appearance, each contiguous, turns ascending.

    Raises
    ------
    ArgumentError, FormatError
        The suffix of a path is unknown. The content is of an unknown format, or damaged;
        a line of JSON is longer than 1 GiB.
    SchemaError, InvalidTurnsError
        A column is missing or has another type. A value breaks a rule of the schema.

    Warns
    -----
    TornLogWarning
        A log ends within an entry; the text names the file and the bytes left out.
    """
    check_choice("nonfinite_logprobs", nonfinite_logprobs, validation.Nonfinite)
    with sources.local_files(source) as local:
        if map is None:
            log = Log(local, format, nonfinite_logprobs, session_prefix=session_prefix)
            return next(log.pieces(SessionIndex())).turns
        own = read_map(map)
        naming = sources.Naming.of(sources.paths_of(local) or [], session_prefix)
        files: list[tuple[Path, Iterable[Record]]] = []
        rows: dict[Path, Iterator[int]] = defaultdict(count)
        for file, part in parts_of(local, format, of_lines=jsonl.numbered_lines):
            kind, objects = "line", cast(Iterable[tuple[int, Record]], part)
            if isinstance(part, pa.Table):
                kind, objects = "row", zip(rows[file], part.to_pylist(), strict=False)
            files.append((file, _calls(own, objects, file, kind)))
        return collected(naming.records(files), nonfinite_logprobs, mapped=True)


def _calls(
    own: Map, objects: Iterable[tuple[int, Record]], file: Path, kind: str
) -> Iterator[Record]:
    for number, one in objects:
        place = f"{kind} {number}"
        names: Names = {"@name": place, "/@name": place}
        if file.name:
            names = names_of(file, place)
        yield from own.renamed(one, names)


def scan_turns(
    source: sources.Paths,
    *,
    format: Format | None = None,
    nonfinite_logprobs: validation.Nonfinite = "raise",
    folder: str | os.PathLike[str] | None = None,
    session_prefix: sources.SessionPrefix | None = None,
) -> Iterator[pa.RecordBatch]:
    """The turns of files batch by batch, as `trajkit.read_turns` returns them.

    Memory is bounded by a few batches and the largest session. If sessions are scattered
    or turns out of order, all turns are first written to a temporary file.

    Parameters
    ----------
    source : path or list of paths
        Files or directories.
    format, nonfinite_logprobs, session_prefix
        As for `trajkit.read_turns`, and so are the errors.
    folder : path, optional
        Where a temporary file of about the size of the turns as Arrow is made. None:
        the system's directory for temporary files.

    Yields
    ------
    RecordBatch
        In the order of `trajkit.read_turns`. If there are no turns, one empty batch.

    Examples
    --------
    ``tk.write_rows(tk.linearize_batches(tk.scan_turns("log")), "rows.parquet")``
    """
    check_choice("nonfinite_logprobs", nonfinite_logprobs, validation.Nonfinite)
    if format is not None:
        check_choice("format", format, Format)
    sources.Naming.of([], session_prefix)
    is_path = isinstance(folder, str | os.PathLike)
    if folder is not None and not (is_path and os.path.isdir(folder)):
        raise ArgumentError(f"folder={folder!r}: expected a folder that exists")
    sources.check_there(source)

    def batches() -> Iterator[pa.RecordBatch]:
        with sources.local_files(source) as local:
            options = format, nonfinite_logprobs, False, folder
            log = Log(local, *options, session_prefix)
            with closing(log.pieces(log.index())) as found:
                yield from stages.batches_in(piece.turns for piece in found)

    return batches()


class SessionStore:
    """Tables in a temporary file, from which complete sessions are read.

    The file is in ``folder`` until the stack closes. Sessions for which ``key_of`` returns
    one key are read together. Batches may have different columns.
    """

    def __init__(
        self,
        batches: Iterable[pa.RecordBatch],
        key_of: Callable[[str | None], Hashable],
        folder: str | os.PathLike[str] | None,
        stack: ExitStack,
    ) -> None:
        self._file = stack.enter_context(
            tempfile.TemporaryFile(prefix=TEMPORARY, dir=folder)
        )
        # by key, where the streams of its rows begin
        self.starts: dict[Hashable, list[int]] = defaultdict(list)
        self.empty = pa.table({})
        for table in _blocks(batches):
            names = combined(table.column("session_id").cast(pa.string()))
            names = names.dictionary_encode("encode")
            keys = [*map(key_of, names.dictionary.to_pylist())]
            ranks = {key: rank for rank, key in enumerate(dict.fromkeys(keys))}
            rank_of = np.array([*map(ranks.__getitem__, keys)], np.int64)
            rank = rank_of[names.indices.to_numpy()]
            order = pa.array(np.argsort(rank, kind="stable"))
            table = take_rows(table.combine_chunks(), order)
            self.empty = table.slice(0, 0)
            ends = np.cumsum(np.bincount(rank)).tolist()
            for key, start, stop in zip(ranks, [0, *ends], ends, strict=False):
                self.starts[key].append(self._file.tell())
                with pa.ipc.new_stream(self._file, table.schema) as stream:
                    stream.write_table(table.slice(start, stop - start))
            del table

    def tables(self, key: Hashable) -> Iterator[pa.Table]:
        """The rows of the sessions with a key, in the order in which they came."""
        for start in self.starts.get(key, ()):
            self._file.seek(start)
            yield pa.ipc.open_stream(self._file).read_all()


def _blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches of one schema as tables of about `limits.SPILL_BYTES`."""
    some: list[pa.RecordBatch] = []
    n_bytes = 0
    for batch in batches:
        if some and (n_bytes >= limits.SPILL_BYTES or batch.schema != some[0].schema):
            yield pa.Table.from_batches(some)
            some, n_bytes = [], 0
        some.append(batch)
        n_bytes += batch.nbytes
        del batch
    if some:
        yield pa.Table.from_batches(some)

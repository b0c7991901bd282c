"""Turns of files: all at once, or in tables of complete sessions in bounded memory.

Scattered sessions are grouped first. Turns are large (a prompt may have a megabyte), but
session ids and turn numbers, which determine their order, are small. So the files are
scanned for these alone (`index_sessions`). Then the turns are written once to temporary
files ("buckets") with few enough sessions to fit in memory.
"""

import os
import reprlib
import tempfile
import warnings
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit.errors import (
    ArgumentError,
    FormatError,
    InvalidTurnsError,
    TornLogWarning,
)
from trajkit.files import jsonl
from trajkit.files.arrow import key_batches, read_batches
from trajkit.files.formats import Format, format_of, is_json, without_suffix
from trajkit.files.guard import reading
from trajkit.files.jsonl import LINE, Record
from trajkit.files.sources import (
    Naming,
    Paths,
    SessionPrefix,
    local_files,
    paths_of,
    placed,
)
from trajkit.files.tables import (
    Source,
    gather,
    integers,
    iter_tables,
    log_files,
    parts_of,
)
from trajkit.schema import AMENDMENTS, TURNS
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import canonical, check_session_id, turns_schema
from trajkit.tables.columns import take_rows, tuples
from trajkit.tables.ragged import Longs
from trajkit.tables.stages import batches_in, concat, rechunk, whole_sessions
from trajkit.turns.amendments import Amendments
from trajkit.turns.mapping import MapLike, read_map
from trajkit.turns.records import collected, from_records
from trajkit.turns.sessions import with_current_keys
from trajkit.turns.validation import REJECTED, Nonfinite, check_turns, reject_turns

TEMPORARY = ".trajkit-gather-"
"""Prefix of the directories in which sessions are grouped."""

# estimated bytes of text per byte of a compressed file
_INFLATED = 8


@dataclass(slots=True)
class SessionIndex:
    """The sessions of files, without their turns.

    ``turns`` is the number of turns of each session, in order of first appearance;
    ``n_bytes`` their approximate size as Arrow; ``scattered`` the first session whose
    turns are not contiguous and ascending.
    """

    turns: dict[str | None, int] = field(default_factory=dict)
    n_bytes: int = 0
    scattered: str | None = None
    _current: str | None = None
    _last: int = -1

    @property
    def n_turns(self) -> int:
        return sum(self.turns.values())

    @property
    def batch_rows(self) -> int:
        """Rows to read at a time, about `limits.READ_BYTES`."""
        rows = self.n_turns * limits.READ_BYTES // max(self.n_bytes, 1)
        return min(max(rows, limits.MIN_READ_ROWS), limits.MAX_READ_ROWS)

    def add(self, ids: pa.Array, index: Longs | None) -> None:
        """Count turns that follow the ones counted before.

        ``index`` are their turn numbers; None: unknown, or assigned by the reader.
        """
        # null counts as a name
        codes = ids.dictionary_encode("encode").indices.to_numpy()
        edges = np.flatnonzero(np.diff(codes, prepend=-1, append=-1))
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


def index_sessions(
    paths: Iterable[Path],
    format: Format | None,
    order: str | None = "turn_index",
    naming: Naming | None = None,
) -> SessionIndex:
    """Scan files for session ids and the column ``order``, by which a session ascends.

    The session None has turns without a valid name; reading the turns reports it.
    """
    columns = ("session_id",) if order is None else ("session_id", order)
    index = SessionIndex()
    with warnings.catch_warnings():
        # reading the turns repeats the warning
        warnings.simplefilter("ignore", TornLogWarning)
        for path in paths:
            kind = format_of(path, format)
            prefix = "" if naming is None else naming.prefix(path)
            if is_json(kind):
                index.n_bytes += path.stat().st_size * (_INFLATED if "." in kind else 1)
                for record in jsonl.calls(path, kind):
                    name = _session_of(record)
                    number = None if order is None else record.get(order)
                    index.add(
                        pa.array([name and prefix + name], pa.string()),
                        np.array([number]) if type(number) is int else None,
                    )
                continue
            for keys, n_bytes in key_batches(path, kind, columns):
                index.n_bytes += n_bytes
                ids = pa.nulls(keys.num_rows, pa.string())
                if "session_id" in keys.schema.names:
                    check_session_id(keys.schema)
                    ids = keys.column("session_id").cast(pa.string())
                    if prefix:
                        ids = pc.binary_join_element_wise(prefix, ids, "")
                index.add(ids, None if order is None else integers(keys, order))
    return index


def _session_of(record: Record) -> str | None:
    name = record.get("session_id")
    try:
        return name if isinstance(name, str) and name.encode() is not None else None
    except UnicodeEncodeError:
        return None


class Piece(NamedTuple):
    """Complete sessions of a log.

    ``turns`` are in canonical form and checked. ``n_turns`` counts all turns that were
    read, also those of rejected sessions. ``rejected`` has the schema `REJECTED`.
    """

    turns: pa.Table
    n_turns: int
    rejected: pa.Table


class Log:
    """Files of turns, or an open file or a table of them, and how to read them.

    With ``reject``, sessions that break a rule are rejected with the reason; otherwise
    they are errors. ``folder`` is the parent of the temporary directory.
    """

    def __init__(
        self,
        source: Source,
        format: Format | None = None,
        nonfinite_logprobs: Nonfinite = "raise",
        reject: bool = False,
        folder: str | os.PathLike[str] | None = None,
        session_prefix: SessionPrefix | None = None,
    ) -> None:
        self._format, self._nonfinite = format, nonfinite_logprobs
        self._reject, self._folder = reject, folder
        paths = paths_of(source)
        # no file, no prefix
        self._naming = Naming.of(paths or [], session_prefix if paths else None)
        # why the lines of a session make no turns
        self._misread: dict[str | None, str] = {}
        self._source: Any = source
        self._files: list[Path] = []
        self._amendments: Amendments | None = None
        if paths is not None:
            self._files, self._amendments = turn_files(paths, format, self._naming)
            self._source = self._files

    def index(self) -> SessionIndex:
        return index_sessions(self._files, self._format, naming=self._naming)

    def placed(self, error: InvalidTurnsError) -> InvalidTurnsError:
        """The error with its file and line, as `trajkit.files.sources.placed` adds them."""
        return placed(error, self._files, self._format, self._naming)

    def pieces(
        self, index: SessionIndex, skip: int = 0
    ) -> Generator[Piece, None, None]:
        """Tables of complete sessions, in the order of `read_turns`.

        ``index`` is of the files as they are; without a session, there is one table. The
        first ``skip`` turns are left out; they must be those of complete pieces. Raises as
        `read_turns`.
        """
        try:
            with closing(self._sessions(index)) as tables:
                for table in rechunk(_after(skip, tables)) if index.turns else tables:
                    turns, rejected = self._checked(table)
                    if self._amendments is not None:
                        turns = self._amendments.fold_into(turns)
                    yield Piece(turns, table.num_rows, rejected)
        except InvalidTurnsError as error:
            raise self.placed(error) from None

    def _checked(self, table: pa.Table) -> tuple[pa.Table, pa.Table]:
        if not self._reject:
            turns = check_turns(with_current_keys(table), self._nonfinite)
            return turns, REJECTED.empty_table()
        good, bad = reject_turns(table, self._nonfinite)
        lines = bad.to_pylist()
        for line in lines:
            line["reason"] = self._misread.pop(line["session_id"], line["reason"])
        return with_current_keys(good), pa.Table.from_pylist(lines, REJECTED)

    def _sessions(self, index: SessionIndex) -> Generator[pa.Table, None, None]:
        buckets = bucket_numbers(index)
        if index.turns and index.scattered is None:
            tables = self._tables(index.batch_rows)
            yield from whole_sessions(
                batch
                for table in tables
                for batch in table.combine_chunks().to_batches()
            )
        elif any(buckets.values()):
            with closing(grouped(self._spilled(), buckets, self._folder)) as found:
                for stored in found:
                    yield gather(concat(self._of_bucket(stored)), "turn_index")
        else:  # everything fits in memory
            whole = [*self._tables(None)] or [TURNS.empty_table()]
            yield gather(concat(whole), "turn_index")

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
        if self._reject:
            return table
        return canonical(table, turns_schema(table.column_names))

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
            odd = sessions[None][0].get("session_id")
            raise InvalidTurnsError(
                f"session_id is {reprlib.repr(odd)}: there is no session to reject"
            )
        if len(sessions) > 1:
            return concat(map(self._from_records, sessions.values()))
        [(name, lines)] = sessions.items()
        self._misread[name] = reason
        nothing = {one.name: pa.nulls(len(lines), one.type) for one in TURNS}
        return pa.table({**nothing, "session_id": [name] * len(lines)})

    def _spilled(self) -> Iterator[pa.RecordBatch]:
        """The turns as buckets store them: lines of JSON beside their session."""
        for part in self._stored(limits.MIN_READ_ROWS, jsonl.calls_with_lines):
            if isinstance(part, pa.Table):
                yield from part.to_batches()
                continue
            while some := [*islice(part, limits.JSON_ROWS)]:
                names = pa.array([_session_of(one) for one in some], pa.string())
                texts = pa.array([one[LINE] for one in some], pa.large_binary())
                yield pa.record_batch([names, texts], ["session_id", LINE])

    def _of_bucket(self, tables: Iterator[pa.Table]) -> Iterator[pa.Table]:
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
    lines = [
        canonical(part if naming is None else naming.table(part, file), AMENDMENTS)
        for file in files
        for part in iter_tables(file, format=format)
    ]
    return turns, Amendments(concat([AMENDMENTS.empty_table(), *lines]))


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
        order, JSON Lines files last, without hidden files, files with the suffix ``.json``
        and files whose metadata name another table. Its amendments are applied: a turn
        that they call context only has ``trainable = false``, and the column ``amended``
        gives the reason. Turns may be in delta form.
    format : str, optional
        Overrides suffix and first bytes: "parquet", "arrow", "arrows", or "jsonl" or
        "json", alone or with ".gz" or ".zst".
    map : dict, str or path, optional
        As for `trajkit.from_records`, which then takes every line or row as a record.
    nonfinite_logprobs : {"raise", "null"}
        As for `trajkit.from_records`.
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
        a line of JSON is longer than 256 MB, or than the environment variable
        ``TRAJKIT_MAX_LINE_BYTES``.
    SchemaError, InvalidTurnsError
        A column is missing or has another type. A value breaks a rule of the schema.

    Warns
    -----
    TornLogWarning
        A log ends within an entry; the text names the file and the bytes left out.
    """
    check_choice("nonfinite_logprobs", nonfinite_logprobs, Nonfinite)
    with local_files(source) as local:
        if map is None:
            log = Log(local, format, nonfinite_logprobs, session_prefix=session_prefix)
            return next(log.pieces(SessionIndex())).turns
        own, naming = read_map(map), Naming.of(paths_of(local) or [], session_prefix)
        files = [
            (
                file,
                (
                    call
                    for one in _objects(part)
                    for call in own.renamed(one, without_suffix(file).name)
                ),
            )
            for file, part in parts_of(local, format, of_lines=jsonl.lines)
        ]
        return collected(naming.records(files), nonfinite_logprobs, mapped=True)


def _objects(part: pa.Table | Iterator[Record]) -> Iterable[Record]:
    return part.to_pylist() if isinstance(part, pa.Table) else part


def scan_turns(
    source: Paths,
    *,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    folder: str | os.PathLike[str] | None = None,
    session_prefix: SessionPrefix | None = None,
) -> Iterator[pa.RecordBatch]:
    """The turns of files batch by batch, as `trajkit.read_turns` returns them.

    Memory is bounded by a few batches and the largest session. If sessions are scattered
    or turns out of order, all turns are first written to temporary files, grouped by
    session.

    Parameters
    ----------
    source : path or list of paths
        Files or directories.
    format, nonfinite_logprobs, session_prefix
        As for `trajkit.read_turns`, and so are the errors.
    folder : path, optional
        Where temporary files of about the size of the turns as Arrow are made. None:
        the system's directory for temporary files.

    Yields
    ------
    RecordBatch
        In canonical form and in the order of `trajkit.read_turns`. If there are no turns,
        one empty batch.

    Examples
    --------
    ``tk.write_rows(tk.linearize_batches(tk.scan_turns("log")), "rows.parquet")``
    """
    check_choice("nonfinite_logprobs", nonfinite_logprobs, Nonfinite)

    def batches() -> Iterator[pa.RecordBatch]:
        with local_files(source) as local:
            options = format, nonfinite_logprobs, False, folder
            log = Log(local, *options, session_prefix)
            with closing(log.pieces(log.index())) as found:
                yield from batches_in(piece.turns for piece in found)

    found = batches()
    reading(found, source)
    return found


def bucket_numbers(index: SessionIndex) -> dict[str | None, int]:
    """The bucket of each session: consecutive sessions of about `limits.BUCKET_BYTES`."""
    room = max(limits.BUCKET_BYTES, index.n_bytes // limits.MAX_BUCKETS)
    ends = np.cumsum(np.fromiter(index.turns.values(), np.int64, len(index.turns)))
    each = index.n_bytes / max(index.n_turns, 1)
    numbers = ((ends - 1) * each).astype(np.int64) // room
    return dict(zip(index.turns, numbers.tolist(), strict=True))


def grouped(
    batches: Iterable[pa.RecordBatch],
    buckets: Mapping[str | None, int],
    folder: str | os.PathLike[str] | None,
) -> Generator[Iterator[pa.Table], None, None]:
    """The tables of one bucket after another, through temporary files in ``folder``."""
    options = pa.ipc.IpcWriteOptions(compression="lz4")
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as root:
        for table in _blocks(batches):
            ids = table.column("session_id").combine_chunks().cast(pa.string())
            ids = ids.dictionary_encode("encode")
            names = ids.dictionary.to_pylist()
            for name in names:
                if name not in buckets:
                    raise FormatError(
                        f"session {name!r} was not there when the files were first read: "
                        "they changed since. Try again when nothing writes to them"
                    )
            numbers = np.array([buckets[name] for name in names], np.int64)
            of_row = numbers[ids.indices.to_numpy()]
            for number in np.unique(of_row).tolist():
                rows = take_rows(table, pa.array(np.flatnonzero(of_row == number)))
                # streams that were appended are read as one
                with (
                    Path(root, f"{number:08d}").open("ab") as file,
                    pa.ipc.new_stream(file, rows.schema, options=options) as writer,
                ):
                    writer.write_table(rows)
            del table, rows
        for path in sorted(Path(root).iterdir()):
            found = read_batches(path, "arrows", None)
            yield (pa.Table.from_batches([batch]) for batch in found)
            path.unlink()


def _blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.Table]:
    """Batches of one schema as tables of about `limits.SPILL_BYTES`, in one chunk each:
    taking rows of several would concatenate them for each bucket.
    """
    some: list[pa.RecordBatch] = []
    n_bytes = 0
    for batch in batches:
        if some and (n_bytes >= limits.SPILL_BYTES or batch.schema != some[0].schema):
            yield pa.Table.from_batches(some).combine_chunks()
            some, n_bytes = [], 0
        some.append(batch)
        n_bytes += batch.nbytes
        del batch
    if some:
        yield pa.Table.from_batches(some).combine_chunks()

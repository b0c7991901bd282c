"""Turns of files in tables of complete sessions, in bounded memory.

Scattered sessions are grouped first. Turns are large (a prompt may have a megabyte), but
session ids and turn numbers, which determine their order, are small. So the files are
scanned for these alone (`index_sessions`). Then the turns are written once to temporary
files ("buckets") with few enough sessions to fit in memory.
"""

import os
import reprlib
import shutil
import tempfile
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, get_args

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, check_flag
from trajkit.errors import FormatError, InvalidTurnsError, TornLogWarning
from trajkit.files import jsonl
from trajkit.files.arrow import key_batches, read_batches
from trajkit.files.formats import Format, format_of, is_json
from trajkit.files.guard import reading
from trajkit.files.sources import (
    Naming,
    Paths,
    SessionPrefix,
    is_address,
    local_files,
    paths_of,
    placed,
)
from trajkit.files.tables import gather, integers, turn_files, turn_tables
from trajkit.schema import TURNS
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import canonical, check_session_id, turns_schema
from trajkit.tables.columns import take_rows, tuples
from trajkit.tables.ragged import Longs
from trajkit.tables.stages import batches_in, concat, rechunk, whole_sessions
from trajkit.turns.records import from_records
from trajkit.turns.sessions import with_current_keys
from trajkit.turns.validation import REJECTED, Nonfinite, check_turns, reject_turns

TEMPORARY = ".trajkit-gather-"
"""Prefix of the directories in which sessions are grouped."""

# estimated bytes of text per byte of a file
_INFLATED = {
    kind: 8 if "." in kind else 1 for kind in get_args(Format) if is_json(kind)
}

# column with the reason, in the placeholder table of a rejected session
_REASON = "trajkit.turns.reject_sessions"


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
        if not len(ids):
            return
        # null counts as a name
        codes = ids.dictionary_encode("encode").indices.to_numpy()
        starts = np.concatenate([[0], 1 + np.flatnonzero(np.diff(codes)), [len(ids)]])
        for start, stop in pairwise(starts.tolist()):
            name = ids[start].as_py()
            before = self.turns.get(name, 0)
            continues = before > 0 and name == self._current
            own = None if index is None else index[start:stop]
            falls = own is not None and (
                (continues and own[0] < self._last) or bool((np.diff(own) < 0).any())
            )
            if (before and not continues) or falls:
                self.scattered = self.scattered or name
            self.turns[name] = before + stop - start
            self._current = name
            self._last = -1 if own is None else int(own[-1])


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
                index.n_bytes += path.stat().st_size * _INFLATED[kind]
                for record in jsonl.lines(path, kind):
                    number = None if order is None else record.get(order)
                    name = _session_of(record)
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


def _session_of(record: dict[str, object]) -> str | None:
    """The session of a line; None if it is invalid, which reading the turns reports."""
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
    """Files of turns, and how to read them.

    With ``reject``, sessions that break a rule are rejected with the reason, and with
    ``gather`` scattered sessions are grouped; otherwise they are errors. ``folder`` is the
    parent of the temporary directory.
    """

    def __init__(
        self,
        source: Paths,
        format: Format | None = None,
        nonfinite_logprobs: Nonfinite = "raise",
        reject: bool = False,
        gather: bool = True,
        folder: str | os.PathLike[str] | None = None,
        session_prefix: SessionPrefix | None = None,
    ) -> None:
        self._format, self._nonfinite = format, nonfinite_logprobs
        self._reject, self._gather, self._folder = reject, gather, folder
        self._naming = Naming.of(paths_of(source) or [], session_prefix)
        self._files, self._amendments = turn_files(source, format, self._naming)

    def index(self) -> SessionIndex:
        """The sessions of the files."""
        return index_sessions(self._files, self._format, naming=self._naming)

    def pieces(
        self, index: SessionIndex, skip: int = 0
    ) -> Generator[Piece, None, None]:
        """Tables of complete sessions, in the order of `read_turns`.

        ``index`` is of the files as they are. The first ``skip`` turns are left out; they
        must be those of complete pieces. Raises as `read_turns`.
        """
        try:
            for piece in self._pieces(index, skip):
                if self._amendments is not None:
                    amended = self._amendments.fold_into(piece.turns)
                    piece = piece._replace(turns=amended)
                yield piece
        except InvalidTurnsError as error:
            raise self.placed(error) from None

    def placed(self, error: InvalidTurnsError) -> InvalidTurnsError:
        """The error with its file and line, as `trajkit.files.sources.placed` adds them."""
        return placed(error, self._files, self._format, self._naming)

    def _pieces(self, index: SessionIndex, skip: int) -> Generator[Piece, None, None]:
        if not index.turns:
            yield self._checked(concat([*self._tables(None)] or [TURNS.empty_table()]))
            return
        if index.scattered is None:
            batches = (
                batch
                for table in self._tables(index.batch_rows)
                for batch in table.combine_chunks().to_batches()
            )
            tables = whole_sessions(batches)
        elif self._gather:
            tables = self._grouped(index)
        else:
            raise InvalidTurnsError(
                f"session {index.scattered!r} comes back after another session began, or "
                "its turns do not ascend: gather=True groups the turns by session"
            )
        with closing(tables):
            yield from map(self._checked, rechunk(_after(skip, tables)))

    def _checked(self, table: pa.Table) -> Piece:
        n_turns = table.num_rows
        if not self._reject:
            table = canonical(table, turns_schema(table.column_names))
            turns = check_turns(with_current_keys(table), self._nonfinite)
            return Piece(turns, n_turns, REJECTED.empty_table())
        table, misread = _split_misread(table)
        good, bad = reject_turns(table, self._nonfinite)
        good = with_current_keys(good)
        return Piece(good, n_turns, pa.concat_tables([misread, bad]))

    def _tables(self, batch_rows: int | None) -> Iterator[pa.Table]:
        """The turns as stored; JSON lines end with a session."""
        return turn_tables(
            *(self._files, self._format, self._from_records, batch_rows, self._naming)
        )

    def _from_records(self, records: Iterable[jsonl.Record]) -> pa.Table:
        """The turns of complete sessions; of a rejected session, ids and the reason."""
        records = list(records)
        try:
            return from_records(records, nonfinite_logprobs=self._nonfinite)
        except InvalidTurnsError as error:
            if not self._reject:
                raise
            reason = str(error)
        sessions: dict[str, list[jsonl.Record]] = {}
        for record in records:
            name = _session_of(record)
            if name is None:
                raise InvalidTurnsError(
                    f"session_id is {reprlib.repr(record.get('session_id'))}: there is "
                    "no session to reject"
                )
            sessions.setdefault(name, []).append(record)
        if len(sessions) > 1:
            return concat(map(self._from_records, sessions.values()))
        n = len(records)
        return pa.table({"session_id": [*sessions] * n, _REASON: [reason] * n})

    def _grouped(self, index: SessionIndex) -> Generator[pa.Table, None, None]:
        """The turns of one bucket after another, sorted."""
        buckets = bucket_numbers(index)
        if not any(buckets.values()):  # everything fits in memory
            yield gather(concat(self._tables(None)), "turn_index")
            return
        with closing(spilled(self._spill, buckets, self._folder)) as folders:
            for folder in folders:
                # their sessions have prefixes, and were checked
                options = None, self._nonfinite, self._reject
                own = Log(folder, *options, session_prefix="no")
                yield gather(concat(own._tables(None)), "turn_index")

    def _spill(self, spill: "Spill") -> None:
        lines = {}
        for path in self._files:
            kind = format_of(path, self._format)
            if is_json(kind):
                lines[path] = jsonl.raw_lines(path, kind)
                continue
            for batch in read_batches(path, kind, limits.MIN_READ_ROWS, turns_schema):
                table = self._naming.table(pa.Table.from_batches([batch]), path)
                for part in table.to_batches():
                    spill.add(part)
        for line, record in self._naming.lines(lines.items()):
            spill.add_line(line, _session_of(record))


def _after(skip: int, tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """The tables without their first ``skip`` rows."""
    for table in tables:
        left = table.slice(skip)
        skip = max(skip - table.num_rows, 0)
        if left.num_rows:
            yield left


def scan_turns(
    source: Paths,
    *,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    gather: bool = True,
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
        Files or directories, as for `trajkit.read_turns`.
    format, nonfinite_logprobs, session_prefix
        As for `trajkit.read_turns`.
    gather : bool
        False: a scattered session is an error.
    folder : path, optional
        Where temporary files of about the size of the turns as Arrow are made. None:
        the system's directory for temporary files.

    Yields
    ------
    RecordBatch
        In canonical form; sessions in order of first appearance, each contiguous, turns
        ascending. If there are no turns, one empty batch.

    Raises
    ------
    FormatError, SchemaError, InvalidTurnsError
        As `trajkit.read_turns`.

    Examples
    --------
    ``tk.write_rows(tk.linearize_batches(tk.scan_turns("log")), "rows.parquet")``
    """
    check_choice("nonfinite_logprobs", nonfinite_logprobs, Nonfinite)
    check_flag("gather", gather)

    def batches() -> Iterator[pa.RecordBatch]:
        with local_files(source) as local:
            options = format, nonfinite_logprobs, False, gather, folder
            log = Log(local, *options, session_prefix)
            with closing(log.pieces(log.index())) as found:
                yield from batches_in(piece.turns for piece in found)

    found = batches()
    given = source if isinstance(source, list | tuple) else [source]
    reading(found, paths_of([one for one in given if not is_address(one)]) or [])
    return found


def bucket_numbers(index: SessionIndex) -> dict[str | None, int]:
    """The bucket of each session: consecutive sessions of about `limits.BUCKET_BYTES`."""
    room = max(limits.BUCKET_BYTES, index.n_bytes // limits.MAX_BUCKETS)
    ends = np.cumsum(np.fromiter(index.turns.values(), np.int64, len(index.turns)))
    each = index.n_bytes / max(index.n_turns, 1)
    numbers = ((ends - 1) * each).astype(np.int64) // room
    return dict(zip(index.turns, numbers.tolist(), strict=True))


def _split_misread(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The turns that could be read, and REJECTED of the other sessions."""
    if _REASON not in table.column_names:
        return table, REJECTED.empty_table()
    valid = table.column(_REASON).is_valid()
    bad = table.select(["session_id", _REASON]).filter(valid)
    reasons = dict(tuples(bad, *bad.column_names))
    misread = pa.table([[*reasons], [*reasons.values()]], schema=REJECTED)
    read = table.filter(pc.invert(valid)).drop_columns([_REASON])
    return (read if read.num_rows else TURNS.empty_table()), misread


def spilled(
    fill: Callable[["Spill"], None],
    buckets: Mapping[str | None, int],
    folder: str | os.PathLike[str] | None,
) -> Generator[Path, None, None]:
    """The buckets' directories below ``folder``; each is deleted after use."""
    with tempfile.TemporaryDirectory(prefix=TEMPORARY, dir=folder) as root:
        spill = Spill(Path(root), buckets)
        fill(spill)
        spill.close()
        for bucket in sorted(Path(root).iterdir()):
            yield bucket
            shutil.rmtree(bucket)


class Spill:
    """Writes turns to the directories of their sessions' buckets."""

    def __init__(self, root: Path, buckets: Mapping[str | None, int]) -> None:
        self._root, self._buckets = root, buckets
        self._pending: list[pa.RecordBatch] = []
        self._bytes = 0
        self._streams: dict[int, tuple[pa.Schema, pa.ipc.RecordBatchStreamWriter]] = {}
        self._texts: dict[int, pa.NativeFile] = {}
        self._n_streams = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows, whose sessions have buckets."""
        if self._pending and not batch.schema.equals(self._pending[0].schema):
            self._flush()
        self._pending.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= limits.SPILL_BYTES:
            self._flush()

    def add_line(self, line: bytes, session: str | None) -> None:
        number = self._number(session)
        if number not in self._texts:
            path = self._folder(number) / "turns.jsonl"
            self._texts[number] = pa.OSFile(str(path), "w")
        self._texts[number].write(line + b"\n")

    def close(self) -> None:
        """Write everything."""
        self._flush()
        for _, writer in self._streams.values():
            writer.close()
        for text in self._texts.values():
            text.close()

    def _flush(self) -> None:
        if not self._pending:
            return
        # one chunk: taking rows of several would concatenate them for each bucket
        table = pa.Table.from_batches(self._pending).combine_chunks()
        self._pending, self._bytes = [], 0
        ids = table.column("session_id").combine_chunks().cast(pa.string())
        ids = ids.dictionary_encode("encode")
        numbers = [self._number(name) for name in ids.dictionary.to_pylist()]
        of_row = np.asarray(numbers, np.int64)[ids.indices.to_numpy()]
        for number in np.unique(of_row).tolist():
            rows = pa.array(np.flatnonzero(of_row == number))
            self._stream(number, table.schema).write_table(take_rows(table, rows))

    def _number(self, session: str | None) -> int:
        if session not in self._buckets:
            raise FormatError(
                f"session {session!r} was not there when the files were first read: they "
                "changed since. Try again when nothing writes to them"
            )
        return self._buckets[session]

    def _stream(self, number: int, schema: pa.Schema) -> pa.ipc.RecordBatchStreamWriter:
        known = self._streams.get(number)
        if known is not None:
            if known[0].equals(schema):
                return known[1]
            known[1].close()
        path = self._folder(number) / f"turns-{self._n_streams:06d}.arrows"
        self._n_streams += 1
        options = pa.ipc.IpcWriteOptions(compression="lz4")
        writer = pa.ipc.new_stream(str(path), schema, options=options)
        self._streams[number] = schema, writer
        return writer

    def _folder(self, number: int) -> Path:
        path = self._root / f"{number:08d}"
        path.mkdir(exist_ok=True)
        return path

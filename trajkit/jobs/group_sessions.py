"""Turns of files in tables of whole sessions, without holding the files.

Where sessions lie scattered they are gathered first. Turns are wide (a prompt may take a
megabyte), what orders them is narrow: a session id and a number. So the files are looked
through for these two alone (`jobs.session_index`), and the turns then go once through files
of few sessions each, every one of which can be held.
"""

import itertools
import os
import reprlib
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa

from trajkit._arrow.canonical import canonical, turns_schema
from trajkit._arrow.take import take_rows, take_values
from trajkit._streams import limits
from trajkit._streams.lockstep import batches_in
from trajkit._streams.session_batches import concat, rechunk, whole_sessions
from trajkit.errors import InvalidTurnsError
from trajkit.io import jsonl
from trajkit.io.arrow import file_rows, read_batches
from trajkit.io.formats import Format, format_of, is_json, open_input
from trajkit.io.tables import read_turns, turn_files
from trajkit.jobs.session_index import (
    SessionIndex,
    index_sessions,
    session_in,
    turn_numbers,
)
from trajkit.schema import TURNS
from trajkit.turns.amendments import Amendments
from trajkit.turns.records import from_records
from trajkit.turns.validation import REJECTED, Nonfinite, check_turns, reject_turns

GATHERS = ".trajkit-gather-"
"""What the names of directories begin with in which sessions are gathered."""

# Stands for a session that JSON lines spell wrongly: why.
_REASON = "trajkit.turns.reject_sessions"


@dataclass(frozen=True, slots=True)
class Log:
    """Files of turns, and how they are to be read.

    Attributes
    ----------
    source : path
        As for `trajkit.read_turns`.
    format : str, optional
    nonfinite_logprobs : {"raise", "null"}
    aside : bool
        Sessions that break a rule are set aside, with the reason.
    gather : bool
        Sessions that lie scattered are gathered.
    folder : path, optional
        Where they are gathered. None: where the system has its temporary files.
    """

    source: str | os.PathLike[str]
    format: Format | None = None
    nonfinite_logprobs: Nonfinite = "raise"
    aside: bool = False
    gather: bool = True
    folder: str | os.PathLike[str] | None = None

    def census(self) -> SessionIndex:
        """What the files hold; see `trajkit.jobs.session_index.index_sessions`."""
        return index_sessions(self._files()[0], self.format)

    def _files(self) -> tuple[list[Path], Amendments | None]:
        """The files of turns, and what amends them."""
        return turn_files(self.source, self.format)

    def pieces(
        self, census: SessionIndex, skip: int = 0
    ) -> Generator["Piece", None, None]:
        """The turns in tables of whole sessions, in the order of `read_turns`.

        Parameters
        ----------
        census : SessionIndex
            Of the files as they are.
        skip : int
            Leave out so many turns, which must be those of the first pieces.

        Raises
        ------
        SchemaError, InvalidTurnsError
            As `read_turns`; also a session that comes back, where none is gathered.
        """
        if not census.turns:
            turns = read_turns(self.source, format=self.format)
            yield Piece(turns, 0, REJECTED.empty_table())
        if self.gather and census.scattered is not None:
            tables = self._gathered(census, skip)
        else:
            rows = census.n_turns * limits.READ_BYTES // max(census.n_bytes, 1)
            rows = min(max(rows, limits.MIN_READ_ROWS), limits.MAX_READ_ROWS)
            tables = whole_sessions(self._batches(rows, skip))
        amendments = self._files()[1]
        with closing(tables):
            for table in rechunk(tables):
                piece = self._judged(table)
                if amendments is not None:
                    piece = replace(piece, turns=amendments.fold_into(piece.turns))
                yield piece

    def _judged(self, table: pa.Table) -> "Piece":
        n_turns = table.num_rows
        if not self.aside:
            table = canonical(table, turns_schema(table.column_names))
            turns = check_turns(table, self.nonfinite_logprobs)
            return Piece(turns, n_turns, REJECTED.empty_table())
        table, misread = _split_misread(table)
        good, bad = reject_turns(table, self.nonfinite_logprobs)
        return Piece(good, n_turns, pa.concat_tables([misread, bad]))

    def _batches(self, rows: int | None, skip: int = 0) -> Iterator[pa.RecordBatch]:
        """The turns as the files hold them; JSON lines by ``rows`` and more, or all."""
        files = ((path, self.format or format_of(path)) for path in self._files()[0])
        for json, run in itertools.groupby(files, lambda file: is_json(file[1])):
            if json:
                # files of one log count their turns together
                lines = itertools.chain.from_iterable(
                    jsonl.planned(
                        jsonl.calls(open_input(path, kind), str(path)),
                        turns_schema,
                        str(path),
                    )
                    for path, kind in run
                )
                while skip and next(lines, None) is not None:
                    skip -= 1
                for some in jsonl.by_session(lines, rows or sys.maxsize):
                    yield from self._from_records(some).combine_chunks().to_batches()
                continue
            for path, kind in run:
                whole = file_rows(path, kind) if skip else 0
                if skip < whole or not skip:
                    yield from read_batches(path, kind, rows, skip, turns_schema)
                skip = max(skip - whole, 0)

    def _from_records(self, records: list[dict[str, object]]) -> pa.Table:
        try:
            return from_records(records, nonfinite_logprobs=self.nonfinite_logprobs)
        except InvalidTurnsError:
            if not self.aside:
                raise
        sessions: dict[str, list[dict[str, object]]] = {}
        for record in records:
            name = session_in(record)
            if name is None:
                raise InvalidTurnsError(
                    f"session_id is {reprlib.repr(record.get('session_id'))}: there is "
                    "no session to set aside"
                )
            sessions.setdefault(name, []).append(record)
        return concat(self._session(name, own) for name, own in sessions.items())

    def _session(self, name: str, records: list[dict[str, object]]) -> pa.Table:
        try:
            return from_records(records, nonfinite_logprobs=self.nonfinite_logprobs)
        except InvalidTurnsError as error:
            n = len(records)
            return pa.table({"session_id": [name] * n, _REASON: [str(error)] * n})

    def _gathered(
        self, census: SessionIndex, skip: int
    ) -> Generator[pa.Table, None, None]:
        folders = self._folders(census)
        if set(buckets(census).values()) == {0}:
            folders = (folder for folder in [Path(self.source)])
        with closing(folders):
            for folder in folders:
                table = in_one_piece(concat(self._tables(folder)))
                left = table.slice(skip)
                skip = max(skip - table.num_rows, 0)
                if left.num_rows:
                    yield left

    def _tables(self, folder: Path) -> Iterator[pa.Table]:
        # what was gathered says by its names what it is
        plain = self
        if folder != Path(self.source):
            plain = replace(self, source=folder, format=None)
        for batch in plain._batches(None):
            yield pa.Table.from_batches([batch])

    def _folders(self, census: SessionIndex) -> Generator[Path, None, None]:
        """Directories of turns, each with the whole of a run of sessions.

        They follow one another as their first sessions do. A directory is gone when the
        next is asked for, and all of them at the end.
        """
        with tempfile.TemporaryDirectory(prefix=GATHERS, dir=self.folder) as root:
            spill = Spill(Path(root), buckets(census))
            for path in self._files()[0]:
                kind = self.format or format_of(path)
                if is_json(kind):
                    lines = jsonl.raw_lines(open_input(path, kind), str(path))
                    for line, record in lines:
                        spill.add_line(line, session_in(record))
                else:
                    for batch in read_batches(
                        path, kind, limits.MIN_READ_ROWS, plan=turns_schema
                    ):
                        spill.add(batch)
            for bucket in spill.close():
                yield bucket
                shutil.rmtree(bucket)


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole sessions of a log.

    Attributes
    ----------
    turns : Table
        In canonical form, checked.
    n_turns : int
        How many turns of the log it stands for, those set aside included.
    aside : Table
        `trajkit.turns.validation.REJECTED`: sessions that were set aside.
    """

    turns: pa.Table
    n_turns: int
    aside: pa.Table


def scan_turns(
    source: str | os.PathLike[str],
    *,
    format: Format | None = None,
    nonfinite_logprobs: Nonfinite = "raise",
    gather: bool = True,
    folder: str | os.PathLike[str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """What `trajkit.read_turns` gives of files, batch by batch.

    Held are a few batches and the largest session, never the files. Where sessions lie
    scattered, or turns out of order, all turns are written once more to temporary files
    of few sessions each.

    Parameters
    ----------
    source : path
        A file or a directory, as for `trajkit.read_turns`.
    format, nonfinite_logprobs
        As for `trajkit.read_turns`.
    gather : bool
        False: a session that comes back is an error.
    folder : path, optional
        Where the temporary files are made, of about the size of the turns as Arrow.
        None: where the system has its temporary files.

    Yields
    ------
    RecordBatch
        In canonical form; sessions in order of first appearance, each in one piece,
        turns ascending. One without rows where there are no turns.

    Raises
    ------
    FormatError, SchemaError, InvalidTurnsError
        As `trajkit.read_turns`.

    Examples
    --------
    ``tk.write_rows(tk.linearize(tk.scan_turns("log")), "rows.parquet")``
    """
    log = Log(source, format, nonfinite_logprobs, gather=gather, folder=folder)
    with closing(log.pieces(log.census())) as found:
        yield from batches_in(piece.turns for piece in found)


def buckets(census: SessionIndex) -> dict[str | None, int]:
    """Where each session is gathered: runs of sessions of about equal size."""
    room = max(limits.BUCKET_BYTES, census.n_bytes // limits.MAX_BUCKETS)
    ends = np.cumsum(np.fromiter(census.turns.values(), np.int64, len(census.turns)))
    each = census.n_bytes / max(census.n_turns, 1)
    numbers = ((ends - 1) * each).astype(np.int64) // room
    return dict(zip(census.turns, numbers.tolist(), strict=True))


def in_one_piece(table: pa.Table) -> pa.Table:
    """The table with each session in one piece, its turns ascending where they can."""
    codes = table.column("session_id").combine_chunks().cast(pa.string())
    codes = codes.dictionary_encode("encode").indices.to_numpy()
    index = turn_numbers(table)
    keys = (codes,) if index is None else (index, codes)
    order = np.lexsort(keys)
    if (np.diff(order) > 0).all():
        return table
    columns = table.columns
    schema = table.schema
    del table
    for i in range(len(columns)):
        # one column after the other, so that no two copies of all are held
        column = pa.chunked_array([columns[i].combine_chunks()], columns[i].type)
        columns[i] = take_values(column, pa.array(order), schema.names[i])
    return pa.Table.from_arrays(columns, schema=schema)


def _split_misread(table: pa.Table) -> tuple[pa.Table, pa.Table]:
    """The turns that were read, and REJECTED of those that were not."""
    if _REASON not in table.column_names:
        return table, REJECTED.empty_table()
    reasons = table.column(_REASON)
    lines = dict.fromkeys(
        (line["session_id"], line[_REASON])
        for line in table.select(["session_id", _REASON])
        .filter(reasons.is_valid())
        .to_pylist()
    )
    names, why = zip(*lines, strict=True) if lines else ((), ())
    misread = pa.table([list(names), list(why)], schema=REJECTED)
    read = table.filter(reasons.is_null()).drop_columns([_REASON])
    return (read if read.num_rows else TURNS.empty_table()), misread


class Spill:
    """Turns on their way into the directories of their sessions."""

    def __init__(self, root: Path, of_session: dict[str | None, int]) -> None:
        self._root = root
        self._of_session = of_session
        self._held: list[pa.RecordBatch] = []
        self._bytes = 0
        self._streams: dict[int, tuple[pa.Schema, pa.ipc.RecordBatchStreamWriter]] = {}
        self._texts: dict[int, pa.NativeFile] = {}
        self._n_streams = 0

    def add(self, batch: pa.RecordBatch) -> None:
        if self._held and not batch.schema.equals(self._held[0].schema):
            self._share_out()
        self._held.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= limits.SPILL_BYTES:
            self._share_out()

    def add_line(self, line: bytes, session: str | None) -> None:
        number = self._of_session[session]
        if number not in self._texts:
            path = self._folder(number) / "turns.jsonl"
            self._texts[number] = pa.OSFile(str(path), "w")
        self._texts[number].write(line + b"\n")

    def close(self) -> list[Path]:
        """All is written; the directories in order."""
        self._share_out()
        for _, writer in self._streams.values():
            writer.close()
        for text in self._texts.values():
            text.close()
        return sorted(self._root.iterdir())

    def _share_out(self) -> None:
        if not self._held:
            return
        # in one chunk: taking rows of many would join them first, for each bucket again
        table = pa.Table.from_batches(self._held).combine_chunks()
        self._held, self._bytes = [], 0
        ids = table.column("session_id").combine_chunks().cast(pa.string())
        ids = ids.dictionary_encode("encode")
        numbers = [self._of_session[name] for name in ids.dictionary.to_pylist()]
        of_turn = np.asarray(numbers, np.int64)[ids.indices.to_numpy()]
        for number in np.unique(of_turn).tolist():
            rows = pa.array(np.flatnonzero(of_turn == number))
            self._stream(number, table.schema).write_table(take_rows(table, rows))

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

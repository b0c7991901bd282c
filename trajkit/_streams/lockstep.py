"""Table stages over streams, and several streams read in step, session by session.

`map_sessions` makes a stage accept iterators of record batches. A stage is a function of
tables with complete sessions. Only the current sessions, and the names of earlier ones, are
kept in memory.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import TypeAlias, TypeGuard

import numpy as np
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike, as_table, check_buffers
from trajkit._arrow.take import empty_batch
from trajkit._streams.session_batches import concat, whole_sessions
from trajkit.errors import InvalidTurnsError, LayoutError
from trajkit.schema import LINKS, ROWS, TURNS

Stream: TypeAlias = Iterator[pa.RecordBatch]
Source: TypeAlias = TableLike | Stream
Named: TypeAlias = tuple[str, Source]
"""A source and its name in errors: "turns", "rows" or "links"."""

_SCHEMAS = {"turns": TURNS, "rows": ROWS, "links": LINKS}


def is_stream(source: object) -> TypeGuard[Stream | pa.RecordBatchReader]:
    """Whether a source is read batch by batch: an iterator or a RecordBatchReader."""
    return isinstance(source, Iterator | pa.RecordBatchReader)


def map_sessions(
    stage: Callable[..., pa.Table],
    lead: Named,
    *others: Named,
    table_of: Callable[..., pa.Table] = as_table,
) -> pa.Table | Stream:
    """Apply a stage of one table per source to tables, or to streams session by session.

    Streams in, stream out: at least one batch, unless ``lead`` is empty.
    Otherwise ``table_of`` converts ``lead`` to a table. The order of sessions is as for
    `zip_sessions`.
    """
    if not any(is_stream(source) for _, source in (lead, *others)):
        return stage(table_of(lead[1]), *(as_table(source) for _, source in others))
    return batches_in(stage(*tables) for tables in zip_sessions(lead, *others))


def map_session_pairs(
    stage: Callable[..., tuple[pa.Table, pa.Table]], lead: Named, *others: Named
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """`map_sessions` of streams, for a stage that returns two tables."""
    for tables in zip_sessions(lead, *others):
        first, second = stage(*tables)
        yield one_batch(first), one_batch(second)


def batches_in(tables: Iterable[pa.Table]) -> Stream:
    """The batches of all tables; if none has a row, one empty batch."""
    schema, has_rows = None, False
    for table in tables:
        schema = table.schema
        for batch in table.to_batches():
            has_rows = True
            yield batch
    if schema is not None and not has_rows:
        yield empty_batch(schema)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """All rows of a table as one batch, which may be empty."""
    batches = table.combine_chunks().to_batches()
    if len(batches) > 1:
        raise LayoutError(
            f"{table.num_rows} rows do not fit into one batch: a column has more than "
            "2 GB of text. Pass the table in smaller batches"
        )
    return batches[0] if batches else empty_batch(table.schema)


def zip_sessions(lead: Named, *others: Named) -> Iterator[tuple[pa.Table, ...]]:
    """Tables of the same complete sessions, one per source.

    The other sources have the order of sessions that ``lead`` has; they may lack some. A
    session that ``lead`` lacks, or had earlier, is an InvalidTurnsError.
    """
    cursors = [
        SessionCursor(what, batches_of(source), lead[0]) for what, source in others
    ]
    for table in whole_sessions(batches_of(lead[1]), lead[0]):
        yield (table, *(cursor.take(table) for cursor in cursors))
    for cursor in cursors:
        for table in cursor.rest():
            name = table.column("session_id")[0].as_py()
            raise InvalidTurnsError(
                f"session {name!r} is in {cursor.what}, but not in {lead[0]}"
            )


def batches_of(
    source: Source, unread: Collection[str] = ()
) -> Iterable[pa.RecordBatch]:
    """The batches of a stream or a table, with buffers that `check_buffers` has checked.

    A source that knows its columns yields a batch even if it has no rows.
    """

    def checked(batch: pa.RecordBatch) -> pa.RecordBatch:
        if isinstance(batch, pa.RecordBatch):  # `whole_sessions` refuses anything else
            check_buffers(batch, unread)
        return batch

    # a reader is an iterator, too
    if isinstance(source, pa.RecordBatchReader):
        return itertools.chain([empty_batch(source.schema)], map(checked, source))
    if isinstance(source, Iterator):
        return map(checked, source)
    table = as_table(source, unread)
    return table.to_batches() or [empty_batch(table.schema)]


class SessionCursor:
    """A stream that is read up to the sessions that a leading stream has reached.

    Errors call the streams ``what`` and ``leads``. A session that the leading stream is
    past is an error, or is skipped if ``is_past`` is given and names it.
    """

    def __init__(
        self,
        what: str,
        batches: Iterable[pa.RecordBatch],
        leads: str,
        is_past: Callable[[str], bool] | None = None,
    ) -> None:
        self.what, self._leads = what, leads
        self._empty = _SCHEMAS[what].empty_table()
        self._tables = whole_sessions(self._with_schema(batches), what)
        self._current = self._next()
        self._is_past = is_past
        self._taken: set[str] = set()

    def _with_schema(
        self, batches: Iterable[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        """The batches; the first one determines the columns of an empty table."""
        for k, batch in enumerate(batches):
            if k == 0 and isinstance(batch, pa.RecordBatch):
                self._empty = pa.Table.from_batches([batch.slice(0, 0)])
            yield batch

    def _next(self) -> pa.Table | None:
        return next((table for table in self._tables if table.num_rows), None)

    def take(self, lead: pa.Table) -> pa.Table:
        """The stream's rows of the sessions in ``lead``, which come next."""
        wanted = pc.unique(lead.column("session_id").cast(pa.string()))
        self._taken.update(wanted.to_pylist())
        taken = []
        while self._current is not None:
            names = self._current.column("session_id").cast(pa.string())
            inside = np.asarray(pc.is_in(names, value_set=wanted))
            n = len(inside) if inside.all() else int(np.argmin(inside))
            if n:
                taken.append(self._current.slice(0, n))
            elif not self._too_late(names[0].as_py()):
                break
            else:
                other = np.asarray(pc.not_equal(names, names[0]))
                n = int(np.argmax(other)) if other.any() else len(other)
            self._current = self._current.slice(n)
            if not self._current.num_rows:
                self._current = self._next()
        return concat(taken) if taken else self._empty

    def rest(self) -> Iterator[pa.Table]:
        """Tables of the sessions that are left when the leading stream has ended."""
        while self._current is not None:
            table, self._current = self._current, self._next()
            names = table.column("session_id").cast(pa.string()).to_pylist()
            left = table.filter(pa.array([not self._too_late(name) for name in names]))
            if left.num_rows:
                yield left

    def _too_late(self, name: str) -> bool:
        if self._is_past is not None:
            return self._is_past(name)
        if name in self._taken:
            raise InvalidTurnsError(
                f"session {name!r} comes too late in {self.what}: {self._leads} have it "
                "before a session that came already. Streams that are read in step must "
                "have their sessions in one order: sort them all by session_id"
            )
        return False

"""Stages over streams: whole sessions in, batches out, several streams side by side.

A stage is a function of tables that hold whole sessions. `over_sessions` makes of it one
that takes iterators of record batches as well; nothing but the sessions at hand, and the
names of those that went by, is held.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TypeAlias, TypeGuard

import numpy as np
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike, as_table, check_buffers
from trajkit._arrow.take import no_rows
from trajkit._streams.session_batches import joined, whole_sessions
from trajkit.errors import InvalidTurnsError
from trajkit.schema import LINKS, ROWS, TURNS

Stream: TypeAlias = Iterator[pa.RecordBatch]
Source: TypeAlias = TableLike | Stream
Named: TypeAlias = tuple[str, Source]
"""What a source is called ("turns", "rows" or "links"), and the source."""

_SCHEMAS = {"turns": TURNS, "rows": ROWS, "links": LINKS}


def is_stream(source: object) -> TypeGuard[Stream | pa.RecordBatchReader]:
    """Whether a source is read batch by batch: an iterator or a RecordBatchReader."""
    return isinstance(source, Iterator | pa.RecordBatchReader)


def over_sessions(
    one: Callable[..., pa.Table],
    lead: Named,
    *beside: Named,
    table_of: Callable[..., pa.Table] = as_table,
) -> pa.Table | Stream:
    """What a stage makes of tables; where a source is a stream, batch by batch.

    Parameters
    ----------
    one : function of tables
        The stage: of one table for each source. It is called once with all, or with
        the tables of `in_step`.
    lead, beside : (str, table or iterator of record batches)
    table_of : function
        What makes a table of ``lead`` where no source is a stream.

    Returns
    -------
    Table, or iterator of record batches where a source is a stream
        It has a batch, though maybe one without rows, unless ``lead`` has none.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `in_step`.
    """
    named = (lead, *beside)
    if not any(is_stream(source) for _, source in named):
        return one(table_of(lead[1]), *(as_table(source) for _, source in beside))
    return batches_in(one(*tables) for tables in in_step(lead, *beside))


def pairs_over_sessions(
    one: Callable[..., tuple[pa.Table, pa.Table]], lead: Named, *beside: Named
) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
    """As `over_sessions` of streams, for a stage that makes two tables."""
    for tables in in_step(lead, *beside):
        first, second = one(*tables)
        yield one_batch(first), one_batch(second)


def batches_in(tables: Iterable[pa.Table]) -> Stream:
    """The batches of tables; where none has a row, one batch without rows."""
    schema, begun = None, False
    for table in tables:
        schema = table.schema
        for batch in table.to_batches():
            begun = True
            yield batch
    if schema is not None and not begun:
        yield no_rows(schema)


def one_batch(table: pa.Table) -> pa.RecordBatch:
    """All rows of a table; of none, a batch without rows."""
    batches = table.combine_chunks().to_batches()
    return batches[0] if batches else no_rows(table.schema)


def in_step(lead: Named, *beside: Named) -> Iterator[tuple[pa.Table, ...]]:
    """Tables of the same whole sessions, one for each source.

    Parameters
    ----------
    lead : (str, table or iterator of record batches)
        Says which sessions there are.
    beside : (str, table or iterator of record batches)
        Sessions in the order of those of ``lead``; of some there may be nothing.

    Raises
    ------
    SchemaError
        As `trajkit._streams.session_batches.whole_sessions`.
    InvalidTurnsError
        A session comes back after another began; one beside is not among those of
        ``lead``, or in another place.
    """
    others = [Beside(what, batches_of(source), lead[0]) for what, source in beside]
    for table in whole_sessions(batches_of(lead[1]), lead[0]):
        yield (table, *(other.take(table) for other in others))
    for other in others:
        for table in other.rest():
            name = table.column("session_id")[0].as_py()
            raise InvalidTurnsError(
                f"session {name!r} is in {other.what}, but not in {lead[0]}"
            )


def batches_of(source: Source) -> Iterable[pa.RecordBatch]:
    """The batches of a stream as they come, or those of a table.

    A source that knows its columns gives a batch, even where it has no rows.
    """
    # a reader is an iterator, too
    if isinstance(source, pa.RecordBatchReader):
        return itertools.chain([no_rows(source.schema)], map(_checked, source))
    if isinstance(source, Iterator):
        return map(_checked, source)
    table = as_table(source)
    return table.to_batches() or [no_rows(table.schema)]


def _checked(batch: pa.RecordBatch) -> pa.RecordBatch:
    if isinstance(batch, pa.RecordBatch):  # what is none is refused by its reader
        check_buffers(batch)
    return batch


class Beside:
    """A stream that is read as far as another one has gone.

    Parameters
    ----------
    what : str
        What errors call it.
    batches : iterable of record batches
        Of valid layout; sessions in the order of those of the leading stream.
    leads : str
        What errors call the leading stream.
    is_past : function of a session's name, optional
        Whether it has no place any more in what leads: it is then passed over. None:
        those that were taken are past, and a session that comes too late is an error.
    """

    def __init__(
        self,
        what: str,
        batches: Iterable[pa.RecordBatch],
        leads: str,
        is_past: Callable[[str], bool] | None = None,
    ) -> None:
        self.what, self._leads = what, leads
        self._nothing = _SCHEMAS[what].empty_table()
        self._tables = whole_sessions(self._seen(batches), what)
        self._held = self._next()
        self._is_past = is_past
        self._passed: set[str] = set()

    def _seen(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The batches, of which the first says what columns there are."""
        first = True
        for batch in batches:
            if first and isinstance(batch, pa.RecordBatch):
                self._nothing = pa.Table.from_batches([batch.slice(0, 0)])
            first = False
            yield batch

    def _next(self) -> pa.Table | None:
        return next((table for table in self._tables if table.num_rows), None)

    def take(self, lead: pa.Table) -> pa.Table:
        """What the stream has of the sessions of ``lead``, whose turn it is.

        Raises
        ------
        InvalidTurnsError
            The next session is one of those that were taken before.
        """
        wanted = pc.unique(lead.column("session_id").cast(pa.string()))
        self._passed.update(wanted.to_pylist())
        taken = []
        while self._held is not None:
            names = self._held.column("session_id").cast(pa.string())
            inside = np.asarray(pc.is_in(names, value_set=wanted))
            n = len(inside) if inside.all() else int(np.argmin(inside))
            if n:
                taken.append(self._held.slice(0, n))
            elif not self._too_late(names[0].as_py()):
                break
            else:
                other = np.asarray(pc.not_equal(names, names[0]))
                n = int(np.argmax(other)) if other.any() else len(other)
            self._held = self._held.slice(n)
            if not self._held.num_rows:
                self._held = self._next()
        return joined(taken) if taken else self._nothing

    def rest(self) -> Iterator[pa.Table]:
        """Tables of the sessions that are left when the leading stream has ended.

        Raises
        ------
        InvalidTurnsError
            One of them was taken before.
        """
        while self._held is not None:
            table, self._held = self._held, self._next()
            late = np.array(
                [
                    self._too_late(name)
                    for name in table.column("session_id").cast(pa.string()).to_pylist()
                ]
            )
            left = table.filter(pa.array(~late))
            if left.num_rows:
                yield left

    def _too_late(self, name: str) -> bool:
        if self._is_past is not None:
            return self._is_past(name)
        if name in self._passed:
            raise InvalidTurnsError(
                f"session {name!r} comes too late in {self.what}: {self._leads} have it "
                "before a session that came already. Beside one another, streams must "
                "have their sessions in one order: sort them all by session_id"
            )
        return False

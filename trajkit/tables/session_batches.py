"""Record batches regrouped into tables of complete sessions."""

from collections.abc import Generator, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema import TURNS_DELTA
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import (
    check_session_id,
    concat_tables,
    is_list,
    turns_schema,
)

Longs: TypeAlias = npt.NDArray[np.int64]

# how to make each session of a stream contiguous
_REMEDIES = {
    "turns": "as trajkit.read_turns does, or sort it by session_id and turn_index",
    "rows": "as trajkit.read_rows does, or sort it by session_id and row_index",
}


def whole_sessions(
    batches: Iterable[pa.RecordBatch], what: str = "turns"
) -> Generator[pa.Table, None, None]:
    """Tables of complete sessions, in the order of the stream.

    A session may span consecutive batches. It is kept until another session begins or
    the stream ends, so memory is bounded by the largest session and the batch size. If
    every batch is empty, one empty table with their schema is yielded; if there are no
    batches, nothing is. A column that a batch lacks is null there. Errors call the stream
    ``what``.
    """
    pending: list[pa.RecordBatch] = []
    schema: pa.Schema | None = None
    current: str | None = None
    ended: set[str] = set()
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise SchemaError(
                f"{type(batch).__name__} is not a record batch: expected an iterator of "
                "pyarrow RecordBatch"
            )
        if "session_id" not in batch.schema.names:
            raise SchemaError(f"{what} have no column 'session_id': add it")
        check_session_id(batch.schema)
        schema = schema or batch.schema
        if batch.num_rows == 0:
            continue
        starts = [0, *session_ends(batch)[:-1].tolist()]
        names = [batch.column("session_id")[row].as_py() for row in starts]
        continues = names[0] == current
        for name in names[1:] if continues else names:
            if name in ended or name == current:
                raise InvalidTurnsError(
                    f"session {name!r} comes back after another session began: the "
                    "rows of a session must be contiguous in a stream. Gather it first, "
                    f"{_REMEDIES.get(what, 'or sort it by session_id')}"
                )
            if current is not None:
                ended.add(current)
            current = name
        if continues and len(starts) == 1:
            pending.append(batch)
            continue
        complete = [*pending, batch.slice(0, starts[-1])] if starts[-1] else pending
        if complete:
            yield _table(complete)
        pending = [batch.slice(starts[-1])]
    if pending:
        yield _table(pending)
    elif schema is not None:
        yield schema.empty_table()


def _table(batches: list[pa.RecordBatch]) -> pa.Table:
    return concat(pa.Table.from_batches([batch]) for batch in batches)


def rechunk(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Tables of complete sessions regrouped: each reaches `limits.READ_TOKENS` in cost.

    A table ends with the session that reaches the limit, and depends on nothing before
    its first session. So a job that resumes at the start of a table gets the same ones.
    """
    parts: list[pa.Table] = []
    room = limits.READ_TOKENS
    for table in tables:
        ends = session_ends(table)
        sums = np.cumsum(cost(table))[ends - 1] if len(ends) else ends
        start = before = 0
        while start < table.num_rows:
            k = int(np.searchsorted(sums, before + room))
            if k == len(ends):
                parts.append(table.slice(start))
                room -= int(sums[-1]) - before
                break
            parts.append(table.slice(start, int(ends[k]) - start))
            yield concat(parts)
            parts, room = [], limits.READ_TOKENS
            start, before = int(ends[k]), int(sums[k])
    if parts:
        yield concat(parts)


def concat(tables: Iterable[pa.Table]) -> pa.Table:
    """The rows of all tables; a column that a table lacks is null there."""
    tables = list(tables)
    check_same_form(tables)
    try:
        return concat_tables(tables)
    except pa.ArrowException as error:
        raise SchemaError(f"the batches do not make one table: {error}") from None


def check_same_form(tables: Iterable[pa.Table]) -> None:
    """Raise SchemaError if only some of the tables of turns are in delta form.

    A turn in delta form may refer to a turn of a table in full form.
    """
    if len({turns_schema(table.column_names) is TURNS_DELTA for table in tables}) > 1:
        raise SchemaError(
            "some of the turns are in full form (prompt_ids) and some in delta form "
            "(suffix_ids): bring them into one form first, with trajkit.compact or "
            "trajkit.expand"
        )


def session_ends(table: pa.Table | pa.RecordBatch) -> Longs:
    """The end of each run of rows with one session_id, as row numbers."""
    ids = table.column("session_id").cast(pa.string())
    if isinstance(ids, pa.ChunkedArray):
        ids = ids.combine_chunks()
    if not len(ids):
        return np.empty(0, np.int64)
    changes = pc.indices_nonzero(pc.not_equal(ids[1:], ids[:-1])).to_numpy()
    return np.append(changes.astype(np.int64) + 1, len(ids))


def cost(table: pa.Table) -> Longs:
    """The memory that each turn takes while it becomes rows, in tokens.

    Turns in delta form count twice, because rows repeat nearly all of their tokens. A
    row may contain the whole path, so half of the path's length is the least they count.
    """
    tokens = _n_items(table, "prompt_ids", "suffix_ids", "output_ids")
    if "suffix_ids" not in table.column_names:
        return limits.TURN_TOKENS + tokens
    path = limits.TURN_TOKENS + tokens + _shared(table)
    return np.asarray(np.maximum(limits.TURN_TOKENS + 2 * tokens, path // 2))


def _shared(table: pa.Table) -> Longs:
    """The shared_length of each turn, 0 if it is missing or invalid."""
    if "shared_length" in table.column_names:
        column = table.column("shared_length")
        if pa.types.is_integer(column.type):
            shared = column.fill_null(0).to_numpy().astype(np.int64)
            shared[shared < 0] = 0
            return np.asarray(shared)
    return np.zeros(table.num_rows, np.int64)


def _n_items(table: pa.Table, *names: str) -> Longs:
    """The items in the list columns of these names, added up row by row."""
    total = np.zeros(table.num_rows, np.int64)
    for field in table.schema:
        # validation reports a column of another type
        if field.name in names and is_list(field.type):
            n = pc.list_value_length(table.column(field.name)).fill_null(0)
            total += n.to_numpy().astype(np.int64)
    return total

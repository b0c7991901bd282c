"""A stream of record batches, cut where sessions end."""

from collections.abc import Callable, Generator, Iterable, Iterator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import check_session_id, is_list, turns_schema
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema import TURNS_DELTA

# What a piece holds at least, if there is so much: tokens, as `held` counts them.
PIECE_TOKENS = 1 << 23
# What a turn counts for beside its tokens.
_TURN = 256

Longs: TypeAlias = npt.NDArray[np.int64]
Weigh: TypeAlias = Callable[[pa.Table], Longs]

# how the sessions of a stream come together
_GATHERED = {
    "turns": "as trajkit.read_turns does, or sort it by session_id and turn_index",
    "rows": "as trajkit.read_rows does, or sort it by session_id and row_index",
}


def whole_sessions(
    batches: Iterable[pa.RecordBatch], what: str = "turns"
) -> Generator[pa.Table, None, None]:
    """Tables of whole sessions, in the order of the stream.

    A session may span batches that follow each other; the last session seen is held
    back until another begins or the stream ends, so memory is bounded by the largest
    session and the batch size. Of batches without rows comes one table without rows,
    which says of which columns they are; of no batches comes none.

    Parameters
    ----------
    batches : iterable of RecordBatch
    what : str
        What errors call the stream: "turns", "rows" or another table.

    Raises
    ------
    SchemaError
        What comes is no record batch, or one without a session_id, or a column is of
        another type than before. One that is absent is null.
    InvalidTurnsError
        A session comes back after another began.
    """
    held: list[pa.RecordBatch] = []
    first: pa.Schema | None = None
    current: str | None = None
    ended: set[str] = set()
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise SchemaError(
                f"{type(batch).__name__} is no record batch: expected an iterator of "
                "pyarrow RecordBatch"
            )
        if "session_id" not in batch.schema.names:
            raise SchemaError(f"column 'session_id' of {what} is absent")
        check_session_id(batch.schema)
        first = first or batch.schema
        if batch.num_rows == 0:
            continue
        ids = batch.column("session_id").cast(pa.string())
        changes = pc.indices_nonzero(pc.not_equal(ids[1:], ids[:-1]))
        starts = [0, *(1 + row.as_py() for row in changes)]
        began = [ids[row].as_py() for row in starts]
        goes_on = began[0] == current
        for session in began[1:] if goes_on else began:
            if session in ended or session == current:
                raise InvalidTurnsError(
                    f"session {session!r} comes back after another session began: a "
                    "stream must hold each session in one piece. Gather it first, "
                    f"{_GATHERED.get(what, 'or sort it by session_id')}"
                )
            if current is not None:
                ended.add(current)
            current = session
        if goes_on and len(starts) == 1:
            held.append(batch)
            continue
        last = starts[-1]
        whole = [*held, batch.slice(0, last)] if last else held
        if whole:
            yield _table(whole)
        held = [batch.slice(last)]
    if held:
        yield _table(held)
    elif first is not None:
        yield first.empty_table()


def _table(batches: list[pa.RecordBatch]) -> pa.Table:
    return joined(pa.Table.from_batches([batch]) for batch in batches)


def pieces(
    tables: Iterable[pa.Table], most: int | None = None, weigh: Weigh | None = None
) -> Iterator[pa.Table]:
    """Tables of whole sessions cut anew, into pieces of about equal weight.

    Where a piece ends depends on the sessions since the piece began and on nothing
    else, so a run that starts again at a piece's begin has the same pieces.

    Parameters
    ----------
    tables : iterable of Table
    most : int, optional
        A piece ends with the session that brings it to so much. None: `PIECE_TOKENS`.
    weigh : function of a Table, optional
        What each turn counts for. None: `held`.
    """
    most, weigh = most or PIECE_TOKENS, weigh or held
    begun: list[pa.Table] = []
    room = most
    for table in tables:
        ends = _session_ends(table)
        sums = np.cumsum(weigh(table))[ends - 1] if len(ends) else ends
        start = before = 0
        while start < table.num_rows:
            k = int(np.searchsorted(sums, before + room))
            if k == len(ends):
                begun.append(table.slice(start))
                room -= int(sums[-1]) - before
                break
            begun.append(table.slice(start, int(ends[k]) - start))
            yield joined(begun)
            begun, room = [], most
            start, before = int(ends[k]), int(sums[k])
    if begun:
        yield joined(begun)


def joined(tables: Iterable[pa.Table]) -> pa.Table:
    """Tables one after another; a column that one lacks is null there."""
    tables = list(tables)
    check_one_form(tables)
    try:
        return pa.concat_tables(tables, promote_options="default")
    except pa.ArrowException as error:
        raise SchemaError(f"the batches do not make one table: {error}") from None


def check_one_form(tables: Iterable[pa.Table]) -> None:
    """Raise SchemaError where some of the tables of turns are in delta form, and not all.

    A turn in delta form may refer to one that only a table in full form has.
    """
    if len({turns_schema(table.column_names) is TURNS_DELTA for table in tables}) > 1:
        raise SchemaError(
            "some of the turns are in full (prompt_ids) and some in delta form "
            "(suffix_ids): bring them into one form first, with trajkit.compact or "
            "trajkit.expand"
        )


def _session_ends(table: pa.Table) -> Longs:
    """The row after the last of each session."""
    ids = table.column("session_id").combine_chunks().cast(pa.string())
    if not len(ids):
        return np.empty(0, np.int64)
    changes = pc.indices_nonzero(pc.not_equal(ids[1:], ids[:-1])).to_numpy()
    return np.append(changes.astype(np.int64) + 1, len(ids))


def held(table: pa.Table) -> Longs:
    """What each turn counts for where it is held: its tokens, and a little.

    Those of the delta form count twice: nearly all of them are held in rows as well.
    """
    total = _listed(table, "prompt_ids", "suffix_ids", "output_ids")
    return _TURN + (2 * total if "suffix_ids" in table.column_names else total)


def weights(table: pa.Table) -> Longs:
    """What each turn can count for in rows at most: all of its prompt and output."""
    total = _TURN + _listed(table, "prompt_ids", "suffix_ids", "output_ids")
    if "shared_length" in table.column_names:
        column = table.column("shared_length")
        if pa.types.is_integer(column.type):
            total += np.maximum(column.fill_null(0).to_numpy().astype(np.int64), 0)
    return total


def _listed(table: pa.Table, *names: str) -> Longs:
    """How many elements the lists of each turn have together."""
    total = np.zeros(table.num_rows, np.int64)
    for field in table.schema:
        # what is of another type is refused by what reads the turns
        if field.name in names and is_list(field.type):
            n = pc.list_value_length(table.column(field.name)).fill_null(0)
            total += n.to_numpy().astype(np.int64)
    return total

"""The two forms of a stage: of a table, and of record batches, session by session.

`stage` makes both of one function. Of a stream, only the current sessions and the names of
earlier ones are in memory.
"""

import inspect
import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import (
    Any,
    Concatenate,
    ParamSpec,
    Protocol,
    TypeAlias,
    cast,
    runtime_checkable,
)

import numpy as np
import pyarrow as pa

from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema import TURNS_DELTA
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import (
    TableLike,
    as_table,
    check_buffers,
    concat_tables,
    is_list,
    session_names,
    turns_schema,
)
from trajkit.tables.columns import empty_batch
from trajkit.tables.ragged import Longs, lengths

Options = ParamSpec("Options")
Batches: TypeAlias = Iterator[pa.RecordBatch]
Source: TypeAlias = TableLike | Batches
"""A table, or its batches one after another."""

# how to make each session of a stream contiguous
_REMEDIES = {
    "turns": "as trajkit.read_turns does, or sort it by session_id and turn_index",
    "rows": "as trajkit.read_rows does, or sort it by session_id and row_index",
}


@runtime_checkable
class Stage(Protocol[Options]):
    """A function of a table; ``batches`` is the same function of record batches."""

    def __call__(
        self, table: TableLike, /, *args: Options.args, **kwargs: Options.kwargs
    ) -> pa.Table: ...

    def batches(
        self, batches: Source, /, *args: Options.args, **kwargs: Options.kwargs
    ) -> Batches: ...


@dataclass(frozen=True, slots=True)
class _Stream:
    """What a stage gets as its first argument when it is called for batches."""

    what: str
    source: Source


def stage(
    function: Callable[Concatenate[TableLike, Options], pa.Table],
) -> Stage[Options]:
    """Make a stage of a function that checks its options and returns `apply`.

    The name of its first parameter is what errors call the table. The form for batches
    checks the options when it is called, and reads when its result is read.
    """
    name = function.__name__
    what = function.__code__.co_varnames[0]

    @wraps(function)
    def of_table(*args: Any, **kwargs: Any) -> pa.Table:
        given = args[0] if args else kwargs.get(what)
        if isinstance(given, Iterator) and not isinstance(given, pa.RecordBatchReader):
            raise SchemaError(
                f"{what} is an iterator: {name} takes a table, {name}_batches an iterator "
                "of record batches"
            )
        return function(*args, **kwargs)

    signature = inspect.signature(function)

    @wraps(function)
    def of_batches(*args: Any, **kwargs: Any) -> Batches:
        given = signature.bind(*args, **kwargs)
        given.arguments[what] = _Stream(what, given.arguments[what])
        return cast(Batches, function(*given.args, **given.kwargs))

    first, *options = signature.parameters.values()
    of_batches.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[first.replace(annotation=Source), *options],
        return_annotation=Batches,
    )
    of_batches.__name__ = of_batches.__qualname__ = f"{name}_batches"
    of_batches.__doc__ = (
        f"From record batches to an iterator of record batches; see `{name}`.\n\n"
        "    The batches of a session are consecutive; a session may span several. The\n"
        "    result has at least one batch, unless the iterator is empty.\n    "
    )
    of_table.batches = of_batches  # type: ignore[attr-defined]
    return cast(Stage[Options], of_table)


def apply(
    work: Callable[[pa.Table], pa.Table],
    given: TableLike,
    *,
    table_of: Callable[..., pa.Table] = as_table,
    what: str | None = None,
    regroup: Callable[[Iterator[pa.Table]], Iterator[pa.Table]] = iter,
) -> pa.Table:
    """The result of a stage: ``work`` of the table, or of the sessions of a stream.

    For a stream this is an iterator of batches, which only `stage` sees; ``regroup`` may
    put sessions together.
    """
    if not isinstance(given, _Stream):
        return work(table_of(given))
    sessions = whole_sessions(batches_of(given.source), what or given.what)
    return cast(pa.Table, batches_in(map(work, regroup(sessions))))


def batches_in(tables: Iterable[pa.Table]) -> Batches:
    """The batches of all tables; if none has a row, one empty batch."""
    schema, has_rows = None, False
    for table in tables:
        schema = table.schema
        for batch in table.to_batches():
            has_rows = True
            yield batch
    if schema is not None and not has_rows:
        yield empty_batch(schema)


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


def whole_sessions(
    batches: Iterable[pa.RecordBatch], what: str = "turns"
) -> Generator[pa.Table, None, None]:
    """Tables of complete sessions, in the order of the stream.

    A session may span consecutive batches. It is kept until another session begins or the
    stream ends, so memory is bounded by the largest session and the batch size. If every
    batch is empty, one empty table with their schema is yielded; if there are no batches,
    nothing is. A column that a batch lacks is null there. Errors call the stream ``what``.
    """
    pending: list[pa.RecordBatch] = []
    schema: pa.Schema | None = None
    current: str | None = None
    began: set[str] = set()
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            raise SchemaError(
                f"{type(batch).__name__} is not a record batch: expected an iterator of "
                "pyarrow RecordBatch"
            )
        if "session_id" not in batch.schema.names:
            raise SchemaError(f"{what} have no column 'session_id': add it")
        at, named = batch.schema.get_field_index("session_id"), session_names(batch)
        if pa.types.is_integer(batch.schema.types[at]):
            batch = batch.set_column(at, "session_id", named)
        schema = schema or batch.schema
        if batch.num_rows == 0:
            continue
        starts = [0, *session_ends(batch)[:-1].tolist()]
        names = [batch.column("session_id")[row].as_py() for row in starts]
        continues = names[0] == current
        for name in names[1:] if continues else names:
            if name in began:
                raise InvalidTurnsError(
                    f"session {name!r} comes back after another session began: the "
                    "rows of a session must be contiguous in a stream. Gather it first, "
                    f"{_REMEDIES.get(what, 'or sort it by session_id')}"
                )
            began.add(name)
        current = names[-1]
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

    A table ends with the session that reaches the limit, and depends on nothing before its
    first session. So a job that resumes at the start of a table gets the same ones.
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
    """The rows of all tables; a column that a table lacks is null there.

    Raises SchemaError if only some of the turns are in delta form, or only some of the rows
    are stored with dedup.
    """
    tables = list(tables)
    names = [table.column_names for table in tables]
    if len({turns_schema(one) is TURNS_DELTA for one in names}) > 1:
        text = (
            "some of the turns are in full form (prompt_ids) and some in delta form "
            "(suffix_ids): bring them into one form first, with trajkit.compact or "
            "trajkit.expand"
        )
        if any("suffix_mask" in one for one in names):
            text = "some rows of a session are stored with dedup, and some are not"
        raise SchemaError(text)
    try:
        return concat_tables(tables)
    except pa.ArrowException as error:
        raise SchemaError(f"the batches do not make one table: {error}") from None


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

    Turns in delta form count twice, because rows repeat nearly all of their tokens. A row
    may contain the whole path, so half of the path's length is the least they count.
    Columns of other types count nothing: validation reports them.
    """
    tokens, shared = np.zeros((2, table.num_rows), np.int64)
    for field in table.schema:
        column = table.column(field.name)
        if field.name in ("prompt_ids", "suffix_ids", "output_ids"):
            tokens += lengths(column) if is_list(field.type) else 0
        elif field.name == "shared_length" and pa.types.is_integer(field.type):
            shared = np.maximum(column.fill_null(0).to_numpy().astype(np.int64), 0)
    if "suffix_ids" not in table.column_names:
        return np.asarray(limits.TURN_TOKENS + tokens)
    path = limits.TURN_TOKENS + tokens + shared
    return np.asarray(np.maximum(limits.TURN_TOKENS + 2 * tokens, path // 2))

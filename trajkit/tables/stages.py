"""The two forms of a stage: of a table, and of record batches, session by session.

`stage` makes both of one function. Of a stream, only the current sessions and the names of
earlier ones are in memory.
"""

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
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

import pyarrow as pa

from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema import LINKS, ROWS, TURNS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, check_buffers
from trajkit.tables.session_batches import concat, session_ends, whole_sessions
from trajkit.tables.take import empty_batch

Options = ParamSpec("Options")
Batches: TypeAlias = Iterator[pa.RecordBatch]
Source: TypeAlias = TableLike | Batches
"""A table, or its batches one after another."""

_SCHEMAS = {"turns": TURNS, "rows": ROWS, "links": LINKS}


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

    @wraps(function)
    def of_batches(batches: Source, *args: Any, **kwargs: Any) -> Batches:
        stream = cast(Any, _Stream(what, batches))
        return cast(Batches, function(stream, *args, **kwargs))

    signature = inspect.signature(function)
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
    work: Callable[..., pa.Table],
    lead: TableLike,
    *,
    table_of: Callable[..., pa.Table] = as_table,
    what: str | None = None,
    regroup: Callable[[Iterator[pa.Table]], Iterator[pa.Table]] = iter,
    **others: Source,
) -> pa.Table:
    """The result of a stage: ``work`` of the tables, or of the sessions of a stream.

    For a stream this is an iterator of batches, which only `stage` sees; ``regroup`` may
    put sessions together. The ``others`` follow it in its order of sessions; they may be
    tables then, too.
    """
    if not isinstance(lead, _Stream):
        return work(table_of(lead), *(as_table(other) for other in others.values()))
    what = what or lead.what
    tables: Iterator[Any] = regroup(whole_sessions(batches_of(lead.source), what))
    if others:
        ((name, other),) = others.items()
        made = _in_pairs(
            work, in_step(tables, batches_of(other), what, name), what, name
        )
    else:
        made = map(work, tables)
    return cast(pa.Table, batches_in(made))


def _in_pairs(
    work: Callable[..., pa.Table],
    pairs: Iterable[tuple[pa.Table | None, pa.Table]],
    leads: str,
    what: str,
) -> Iterator[pa.Table]:
    for own, theirs in pairs:
        if own is None:
            raise unknown(theirs, what, leads)
        yield work(own, theirs)


def unknown(rest: pa.Table, what: str, leads: str) -> InvalidTurnsError:
    """The error of a session that only the stream ``what`` has."""
    name = rest.column("session_id")[0].as_py()
    return InvalidTurnsError(f"session {name!r} is in {what}, but not in {leads}")


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


def in_step(
    lead: Iterable[pa.Table], other: Iterable[pa.RecordBatch], leads: str, what: str
) -> Iterator[tuple[pa.Table | None, pa.Table]]:
    """Each table of ``lead`` with the rows of the same sessions in another stream.

    Both have complete sessions in one order; ``other`` may lack some. Its sessions that
    ``lead`` lacks come at the end, with None; a session that ``lead`` had earlier is an
    error. Errors call the two ``leads`` and ``what``.
    """
    tables = whole_sessions(other, what)
    first = next(tables, None)
    schema = _SCHEMAS[what] if first is None else first.schema
    empty = pa.Table.from_batches([empty_batch(schema)])
    sessions = one_by_one(tables if first is None else itertools.chain([first], tables))
    del first
    earlier: set[str | None] = set()

    def follows() -> tuple[str | None, pa.Table | None]:
        """The next session of the other stream."""
        name, table = next(sessions, (None, None))
        if name in earlier:
            raise InvalidTurnsError(
                f"session {name!r} comes too late in {what}: {leads} have it before a "
                "session that came already. Streams that are read in step must have "
                "their sessions in one order: sort them all by session_id"
            )
        return name, table

    name, table = follows()
    for current in lead:
        names = pc.unique(current.column("session_id").cast(pa.string())).to_pylist()
        taken = []
        while table is not None and name in names:
            taken.append(table)
            name, table = follows()
        earlier.update(names)
        yield current, concat(taken) if taken else empty
        del current, taken
    while table is not None:
        yield None, table
        name, table = follows()


def one_by_one(tables: Iterable[pa.Table]) -> Iterator[tuple[str, pa.Table]]:
    """Each session of tables of complete sessions, with its name."""
    for table in tables:
        for start, end in itertools.pairwise([0, *session_ends(table).tolist()]):
            part = table.slice(start, end - start)
            yield part.column("session_id")[0].as_py(), part

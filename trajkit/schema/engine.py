"""What tables are made of, columns with types, null rules and rules, and their checks.

A rule is a generator of faults: the rows that break it, and the words for each, with
column, value and rule. `trajkit.validate` adds session and turn. Tables are in canonical
form; pyarrow.compute is left alone, so that importing a schema is cheap.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA_VERSION = 3
# versions that are read
SCHEMA_VERSIONS = (2, 3)

NAMES = pa.dictionary(pa.int8(), pa.string())
"""The type of a column with a small set of names."""

Bools: TypeAlias = npt.NDArray[np.bool_]
Rows: TypeAlias = npt.NDArray[np.int64]
Fault: TypeAlias = tuple[Rows, Callable[[int], str]]
"""Rows that break a rule, and a function that explains the k-th of them."""

Check: TypeAlias = Callable[[pa.Table], Iterator[Fault]]
"""A rule of a table in canonical form. It may rely on the rules before it."""

Rule: TypeAlias = Callable[[str, pa.Table], Iterator[Fault]]
"""A rule of a column, given its name and the table."""

MAX_LOGPROB = np.float32(1e-4)
"""Rounding may take a logprob this far above 0."""
NO_LOGPROB = np.float32(-9999.0)
"""vLLM writes this for a token without a logprob; sampled tokens never have it."""

_NO_NUMBER = "it is not a number (nonfinite_logprobs='null' makes it null)"
_NO_LOGPROB = (
    "engines write this if they have no logprob for a token "
    "(nonfinite_logprobs='null' makes it null)"
)
POSITIVE = "a log-probability is at most 0 (1e-4 is tolerated for rounding)"


class Column(NamedTuple):
    """A column and its rules."""

    field: pa.Field
    rules: tuple[Rule, ...] = ()


def required(name: str, type_: pa.DataType, *rules: Rule) -> Column:
    """A column without nulls."""
    return Column(pa.field(name, type_, nullable=False), rules)


_TYPES = {
    "bool": pa.bool_(),
    "int32": pa.int32(),
    "int64": pa.int64(),
    "float32": pa.float32(),
    "float64": pa.float64(),
    "text": pa.string(),
    "name": NAMES,
}
_LINE = re.compile(
    r"^    (?P<names>\w+(?:, \w+)*) (?P<list>\[)?(?P<type>\w+)\]?(?P<null>\?)?"
    r"(?: \((?P<rules>[\w, ]+)\))?(?::|$)",
    re.MULTILINE,
)


def columns(text: str, **named: Any) -> tuple[Column, ...]:
    """The columns that a text describes, a line each: ``name type (rule, rule): meaning``.

    ``[int32]`` is a list, ``int32?`` may be null, which means unknown or none. Lines that
    are indented further go on. Rules are those of this module, and types and rules those
    that are ``named``.
    """
    found = []
    for line in _LINE.finditer(text):
        type_ = {**_TYPES, **named}[line["type"]]
        type_ = pa.large_list(type_) if line["list"] else type_
        rules = line["rules"].split(", ") if line["rules"] else []
        checks = tuple({**globals(), **named}[rule] for rule in rules)
        for name in line["names"].split(", "):
            field = pa.field(name, type_, nullable=bool(line["null"]))
            found.append(Column(field, checks))
    return tuple(found)


def struct(text: str, **named: pa.DataType) -> pa.StructType:
    """The type with these fields."""
    return pa.struct([one.field for one in columns(text, **named)])


TURN = columns("""
    session_id text
    turn_index int32
""")
"""The columns that say which turn a line is about."""

_CHECKS: dict[pa.Schema, tuple[tuple[str | None, Check], ...]] = {}


def table(
    kind: str, *columns: Column | pa.Field, rules: tuple[Check, ...] = ()
) -> pa.Schema:
    """A schema of these columns, whose ``rules`` come after those of its columns."""
    own = [one if isinstance(one, Column) else Column(one) for one in columns]
    schema = pa.schema(
        [one.field for one in own],
        metadata={"trajkit.table": kind, "trajkit.version": str(SCHEMA_VERSION)},
    )
    of_columns = [
        (field.name, partial(rule, field.name)) for field, of in own for rule in of
    ]
    _CHECKS[schema] = (*of_columns, *((None, rule) for rule in rules))
    return schema


def checks_of(
    schema: pa.Schema, columns: tuple[str, ...] | None = None
) -> tuple[Check, ...]:
    """The rules of a table, or those of some of its columns alone."""
    return tuple(
        check for name, check in _CHECKS[schema] if columns is None or name in columns
    )


def defined(text: str) -> tuple[str, ...]:
    """The names that a text defines, which begin its lines: ``name, name: meaning``."""
    lines = re.findall(r"^([a-z_]+(?:, [a-z_]+)*): ", text, re.MULTILINE)
    return tuple(name for line in lines for name in line.split(", "))


@dataclass(frozen=True, slots=True)
class Violation:
    """A finding in words, and where it is: a line of a table of violations."""

    # None: of no one of them
    rule: str
    detail: str
    session_id: str | None = None
    row_index: int | None = None
    turn_index: int | None = None
    token: int | None = None
    pack: int | None = None
    row_token: int | None = None


def as_lines(found: Sequence[Violation], schema: pa.Schema) -> pa.Table:
    """The violations as a table."""
    lines = [{name: getattr(one, name) for name in schema.names} for one in found]
    return pa.Table.from_pylist(lines, schema)


def shown(value: object) -> object:
    """A value as violations show it."""
    return "null" if value is None else value


def fault(rows: Rows, template: str, *columns: Any) -> Fault:
    """A fault; the k-th value of each column fills the template."""
    return rows, lambda k: template.format(*(column[k] for column in columns))


def broken(bad: npt.ArrayLike, template: str, *columns: Any) -> Fault:
    """The rows where ``bad`` is true; a row's value of each column fills the template."""
    rows = np.flatnonzero(bad)
    return rows, lambda k: template.format(*_values(columns, int(rows[k])))


def broken_items(
    start: int, ends: Rows, bad: npt.ArrayLike, template: str, *columns: Any
) -> Fault:
    """As `broken`, for the elements of lists, see `flat_chunks`.

    The template first gets the index of the element in its list.
    """
    at = np.flatnonzero(bad)
    rows, index = owners(at, ends)
    return start + rows, lambda k: template.format(
        index[k], *_values(columns, int(at[k]))
    )


def _values(columns: tuple[Any, ...], at: int) -> list[object]:
    values = [column[at] for column in columns]
    return [v.as_py() if isinstance(v, pa.Scalar) else v for v in values]


def contiguous(name: str, table: pa.Table) -> Iterator[Fault]:
    """The rows of each session are contiguous."""
    starts = run_starts(table)
    numbers = codes(table.column(name))[starts]
    first = np.unique(numbers, return_index=True)[1]
    again = np.flatnonzero(first[numbers] != np.arange(len(numbers)))
    yield fault(
        starts[again],
        "the session began in table row {} and comes back in row {} after another: "
        "make it contiguous, for instance by sorting the table by session_id",
        starts[first[numbers[again]]],
        starts[again],
    )


def ascending(index: str, table: pa.Table) -> Iterator[Fault]:
    """`index` ascends within each session, from 0 or above."""
    values = table.column(index).to_numpy()
    yield broken(values < 0, f"{index} is negative: it counts from 0")
    before = np.append(-1, values)[: len(values)]
    before[run_starts(table)] = -1
    yield broken(values == before, f"{index} is repeated within the session")
    rule = f"{index} {{}} follows {{}}: it must ascend within a session"
    yield broken(values < before, rule, values, before)


def one_row_per_session(name: str, table: pa.Table) -> Iterator[Fault]:
    """Each session has one row."""
    again = repeated(codes(table.column(name)))
    yield broken(again, "the session has a row already")


def repeated(values: Rows) -> Bools:
    """Where a value occurred before."""
    again = np.ones(len(values), np.bool_)
    again[np.unique(values, return_index=True)[1]] = False
    return again


def finite(name: str, table: pa.Table) -> Iterator[Fault]:
    """A column of float64 contains no NaN and no infinity."""
    values = table.column(name).fill_null(0.0).to_numpy()
    rule = f"{name} is {{}}: expected a finite number or null"
    yield broken(~np.isfinite(values), rule, values)


def not_negative(name: str, table: pa.Table) -> Iterator[Fault]:
    """An integer column is null or at least 0."""
    values = table.column(name).fill_null(0).to_numpy()
    yield broken(values < 0, f"{name} is {{}}: it must not be negative", values)


def one_of(known: tuple[str, ...]) -> Rule:
    """A column contains only known names and null."""

    def rule(name: str, table: pa.Table) -> Iterator[Fault]:
        text = table.column(name).cast(pa.string()).to_pylist()
        bad = [value is not None and value not in known for value in text]
        words = f"{name} is {{!r}}: expected one of {', '.join(known)}"
        yield broken(bad, words, text)

    return rule


def refers(index: str, fits: Callable[[Rows, Rows], Bools], what: str) -> Rule:
    """A reference is null, or an index that fits the row's own."""

    def rule(name: str, table: pa.Table) -> Iterator[Fault]:
        column = table.column(name)
        values = column.fill_null(-1).to_numpy()
        good = (values >= 0) & fits(values, table.column(index).to_numpy())
        words = f"{name} {{}} is not {what} of the session"
        yield broken(~good & ~nulls(column), words, values)

    return rule


def turn_exists(name: str, table: pa.Table) -> Iterator[Fault]:
    """A reference is to a turn of the session, or null."""
    column = table.column(name)
    known = lookup(table, "turn_index", column)[1]
    words = f"{name} {{}} is not a turn of the session"
    yield broken(~known & ~nulls(column), words, column)


def token_ids(name: str, table: pa.Table) -> Iterator[Fault]:
    """A column of ids has no null and no negative element."""
    yield from no_null(name, table)
    for start, ends, values in flat_chunks(table.column(name)):
        if values.null_count:
            continue
        ids = values.to_numpy()
        if len(ids) and ids.min() < 0:
            rule = f"{name}[{{}}] is {{}}: token ids are not negative"
            yield broken_items(start, ends, ids < 0, rule, ids)


def logprobs(ids: str) -> Rule:
    """A column has one log-probability per id of another, or none at all."""

    def rule(name: str, table: pa.Table) -> Iterator[Fault]:
        yield from as_long_as(ids, name, "{} " + name, table)
        for start, ends, values in flat_chunks(table.column(name)):
            numbers = raw_floats(values)
            given = np.asarray(values.is_valid()) if values.null_count else True
            for wrong, text in (
                (np.isnan(numbers), _NO_NUMBER),
                (numbers <= NO_LOGPROB, _NO_LOGPROB),
                (numbers > MAX_LOGPROB, POSITIVE),
            ):
                words = f"{name}[{{}}] is {{}}: {text}"
                yield broken_items(start, ends, wrong & given, words, numbers)

    return rule


def as_long_as(ids: str, name: str, what: str, table: pa.Table) -> Iterator[Fault]:
    """A list is null, or has one element per id; ``what`` is its number in words."""
    column = table.column(name)
    n_here, n_ids = lengths(column), lengths(table.column(ids))
    odd = (n_here != n_ids) & ~nulls(column)
    yield broken(odd, f"{what} for {{}} {ids}", n_here, n_ids)


def no_null(name: str, table: pa.Table) -> Iterator[Fault]:
    """No element of a list column is null."""
    for start, ends, values in flat_chunks(table.column(name)):
        if values.null_count:
            yield broken_items(start, ends, values.is_null(), f"{name}[{{}}] is null")


def not_logprobs(numbers: npt.NDArray[np.float32]) -> Bools:
    """Where an engine had no logprob: NaN, an infinity, -9999 and below."""
    return ~np.isfinite(numbers) | (numbers <= NO_LOGPROB)


def lacks(structs: pa.StructArray, *names: str) -> Bools:
    """Where a struct, or one of these fields, is null."""
    parts = (structs, *(field_of(structs, name) for name in names))
    lacking: Bools = np.any([np.asarray(part.is_null()) for part in parts], axis=0)
    return lacking


def field_of(structs: pa.StructArray, name: str) -> pa.Array:
    """A field of structs, null where the struct is."""
    return structs.flatten()[structs.type.get_field_index(name)]


def lookup(table: pa.Table, index: str, wanted: pa.ChunkedArray) -> tuple[Rows, Bools]:
    """The row of each wanted index in its session, and whether it was found.

    Sessions are contiguous and ``index`` ascends in each. Null is never found.
    """
    session = session_numbers(table) << 32
    have = session + table.column(index).to_numpy()
    seek = session + wanted.fill_null(-1).to_numpy()
    row = np.minimum(np.searchsorted(have, seek), max(len(table) - 1, 0))
    found = (have[row] == seek) & ~nulls(wanted)
    return np.where(found, row, 0), found


def run_starts(table: pa.Table) -> Rows:
    """The first row of each session."""
    return np.flatnonzero(np.diff(codes(table.column("session_id")), prepend=-1))


def session_numbers(table: pa.Table) -> Rows:
    """The number of each row's session, counted from 1."""
    numbers: Rows = np.searchsorted(
        run_starts(table), np.arange(len(table)), side="right"
    )
    return numbers


def codes(*columns: pa.Array | pa.ChunkedArray) -> Rows:
    """A number for each distinct value, counted up from 0 in the order of first use.

    Of several columns, one after another, equal values have one number. Null is a value.
    """
    listed = [c.chunks if isinstance(c, pa.ChunkedArray) else [c] for c in columns]
    chunks = [chunk for chunks in listed for chunk in chunks]
    if not chunks:
        return np.zeros(0, np.int64)
    values = chunks[0] if len(chunks) == 1 else pa.concat_arrays(chunks)
    return np.asarray(values.dictionary_encode("encode").indices, np.int64)


def lengths(column: pa.ChunkedArray | pa.Array) -> Rows:
    """Elements of each list, 0 for a null list."""
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    parts = [np.asarray(chunk.value_lengths().fill_null(0)) for chunk in chunks]
    return np.concatenate([np.empty(0, np.int64), *parts])


def list_values(column: pa.ChunkedArray) -> pa.Array:
    """The elements of all lists of a column, end to end."""
    parts = [chunk.flatten() for chunk in column.chunks]
    if len(parts) == 1:
        return parts[0]
    return pa.concat_arrays([pa.array([], column.type.value_type), *parts])


def nulls(column: pa.ChunkedArray) -> Bools:
    """Where the column is null."""
    return np.asarray(column.is_null().to_numpy())


def flat_chunks(column: pa.ChunkedArray) -> Iterator[tuple[int, Rows, pa.Array]]:
    """The first row, the ends of lists and the values of each chunk of lists."""
    start = 0
    for chunk in column.chunks:
        yield start, np.cumsum(lengths(chunk), dtype=np.int64), chunk.flatten()
        start += len(chunk)


def owners(at: Rows, ends: Rows) -> tuple[Rows, Rows]:
    """The list of each value position, and the index in the list."""
    rows: Rows = np.searchsorted(ends, at, side="right")
    begins = np.concatenate([[0], ends])
    return rows, at - begins[rows]


def raw_floats(values: pa.FloatArray) -> npt.NDArray[np.float32]:
    """The numbers of an array, with the bytes under nulls as they are."""
    data = values.buffers()[1]
    if data is None:
        return np.empty(0, np.float32)
    # a buffer may be longer than its values
    return np.frombuffer(data, np.float32, len(values), 4 * values.offset)

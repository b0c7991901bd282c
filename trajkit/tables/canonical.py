"""Arrow tables of any library, cast to the types of a schema.

polars, Parquet and pyarrow hand over the same table in many layouts: views, large and
small offsets, fixed-size lists, dictionary or plain strings, wider integers, nullable
fields, chunks, no metadata. `canonical` accepts them all and copies only what it casts. It
refuses values that a cast would have to guess, round or drop.
"""

from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import arrow_source, did_you_mean, near_miss
from trajkit.errors import InvalidTurnsError, LayoutError, SchemaError
from trajkit.schema import (
    PAYLOADS,
    ROWS,
    SCHEMA_VERSION,
    SCHEMA_VERSIONS,
    TURNS,
    TURNS_DELTA,
)
from trajkit.schema.engine import Fault, fault
from trajkit.tables import lazy_compute as pc
from trajkit.tables.ragged import Ragged

if TYPE_CHECKING:
    TableLike: TypeAlias = pa.Table | pa.RecordBatch | pa.RecordBatchReader | list[Any]
else:  # one word in the signatures that a user reads

    class TableLike(Protocol):
        """What every public function accepts as a table: an object with the Arrow C stream
        interface, or one that `trajkit._arguments.arrow_source` makes a table of."""

        def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


_OWN_COLUMNS = (
    ("turns", {"prompt_ids", "output_ids"}),
    ("turns", {"suffix_ids", "output_ids"}),
    ("rows", {"input_ids", "loss_mask"}),
    ("rows", {"suffix_ids", "suffix_mask"}),
    ("sessions", {"session_id", "reward"}),
)
"""Columns that identify a table without metadata; the first match counts."""

_KNOWN = {"weight_version", *PAYLOADS}.union(TURNS.names, TURNS_DELTA.names, ROWS.names)
"""Names with a meaning; payloads of rows have the names of columns of turns."""

_EXPECTED = {
    "turns": ". Pass recorded calls, as `trajkit serve` and `trajkit import` write them",
    "rows": ". Pass training rows, as `trajkit linearize` writes them",
    "sessions": ". Pass a line per session: session_id, reward and, if they are known, "
    "group_id and error",
}
"""What errors say about a table of another kind."""

Plan: TypeAlias = Callable[[list[str]], pa.Schema]
"""The schema that a table with columns of these names is expected to have."""

UNREADABLE = (pa.ArrowException, OSError, UnicodeDecodeError)
"""What pyarrow raises for damaged bytes."""

# a smaller table is validated in one call, a larger one part by part
_SMALL_BYTES = 1 << 18


def canonical(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table in the schema's own types and column order; its layout was checked.

    Columns that already have their type are not copied. Missing nullable columns are null.
    Extra columns come last, unchanged. Values are checked by `trajkit.validate`. Raises
    SchemaError as `check_columns`, and InvalidTurnsError if a value does not fit its type
    or is null in a column without nulls.
    """
    if table.schema.equals(schema, check_metadata=True) and not any(
        column.null_count
        for field, column in zip(schema, table.columns, strict=True)
        if not field.nullable
    ):
        return table
    check_columns(table, schema)
    for rows, explain in misfits(table, schema):
        raise InvalidTurnsError(f"{place(table, int(rows[0]))}: {explain(0)}")
    return cast(table, schema)


def canonical_rows(rows: pa.Table) -> pa.Table:
    return canonical(rows, ROWS)


def as_table(table: TableLike, unread: Collection[str] = ()) -> pa.Table:
    """A pyarrow Table of valid layout; Arrow data is not copied.

    Every table that a caller passes is checked here, or by `check_buffers` batch by batch.
    The kernels rely on it. Raises SchemaError if the object is no table (see
    `trajkit._arguments.arrow_source`), and LayoutError as `check_buffers`.
    """
    source = table if isinstance(table, pa.Table) else arrow_source(table)
    if source is None:
        raise SchemaError(
            f"{type(table).__name__} is not a table: expected a table of pyarrow, "
            "polars, pandas or datasets, a list of dicts, or an object with "
            "__arrow_c_stream__ (read_turns and read_rows read files)"
        )
    if isinstance(source, pa.RecordBatch):
        source = pa.Table.from_batches([source])
    elif not isinstance(source, pa.Table):
        source = pa.RecordBatchReader.from_stream(source).read_all()
    check_buffers(source, unread)
    return source


def check_buffers(
    table: pa.Table | pa.RecordBatch, unread: Collection[str] = ()
) -> None:
    """Raise LayoutError unless every value lies inside its buffers.

    Arrow does not check data that it reads or imports: offsets may decrease or exceed their
    child, dictionary indices may exceed their dictionary, bitmaps may be too short, text
    may be invalid UTF-8. The text of columns that are ``unread`` and not returned is not
    checked for UTF-8 in a large table, which takes as long as reading it from memory.
    """
    where = "a column's name"
    try:
        for name, type_ in zip(table.schema.names, table.schema.types, strict=True):
            where = f"column {name!r}"
            _check_names(type_)
        if table.get_total_buffer_size() < _SMALL_BYTES:
            with suppress(*UNREADABLE):  # the loop below finds the column
                table.validate(full=True)
                return
        for name, column in zip(table.schema.names, table.columns, strict=True):
            where = f"column {name!r}"
            for chunk in column.chunks if isinstance(table, pa.Table) else [column]:
                _check_array(chunk, text=name not in unread)
        table.validate()  # the columns are of one length
    except UNREADABLE as error:
        raise LayoutError(
            f"{where} is not valid Arrow data: {error}. The table was damaged: write it "
            "again"
        ) from None


def _check_names(type_: pa.DataType) -> None:
    """Raise UnicodeDecodeError if the name of a nested field is invalid UTF-8."""
    for i in range(type_.num_fields):
        type_.field(i).name.encode()
        _check_names(type_.field(i).type)


def _check_array(array: pa.Array, *, text: bool) -> None:
    """Validate an array and the part of its children that it refers to.

    Arrow validates complete children for each slice of an array, which takes quadratic time
    for a table in many batches. ``text``: whether to check text for UTF-8.
    """
    type_ = array.type
    if not text and type_ in (pa.string(), pa.large_string()):
        plain = pa.binary() if type_ == pa.string() else pa.large_binary()
        array = pa.Array.from_buffers(
            plain, len(array), array.buffers(), offset=array.offset
        )
    large = pa.types.is_large_list(type_)
    is_flat = is_list(type_) and pa.types.is_primitive(type_.value_type)
    is_split = pa.types.is_struct(type_) or large or pa.types.is_list(type_)
    if not is_split or is_flat or array.get_total_buffer_size() < _SMALL_BYTES:
        array.validate(full=True)
        return
    array.validate()
    if pa.types.is_struct(type_):
        for i in range(type_.num_fields):
            _check_array(array.field(i), text=text)
        return
    offsets = pa.Array.from_buffers(
        pa.large_list(pa.null()) if large else pa.list_(pa.null()),
        len(array),
        array.buffers()[:2],
        offset=array.offset,
        children=[pa.nulls(len(array.values))],
    )
    offsets.validate(full=True)
    if len(array):
        first, last = array.offsets[0].as_py(), array.offsets[-1].as_py()
        _check_array(array.values.slice(first, last - first), text=text)


def session_names(batch: pa.RecordBatch) -> pa.Array:
    """The column session_id as text; integers are names, too."""
    column = batch.column("session_id")
    if not pa.types.is_integer(column.type):
        check_type(column.type, pa.string(), "column 'session_id'")
    return column.cast(pa.string())


def turns_schema(names: list[str]) -> pa.Schema:
    is_delta = "suffix_ids" in names and "prompt_ids" not in names
    return TURNS_DELTA if is_delta else TURNS


def place(table: pa.Table, row: int) -> str:
    """A row's name in errors: ``session 'a', turn 7``."""
    session, *indices = (
        table.column(name)[row].as_py() if name in table.column_names else None
        for name in ("session_id", "row_index", "turn_index")
    )
    if session is None:
        return f"table row {row}"
    for index, word in zip(indices, ("row", "turn"), strict=True):
        if index is not None:
            return f"session {session!r}, {word} {index}"
    return f"session {session!r}"


def check_columns(table: pa.Table | pa.Schema, schema: pa.Schema) -> None:
    """Raise SchemaError unless `cast` can convert a table with these columns."""
    given = table if isinstance(table, pa.Schema) else table.schema
    kind, names = schema.metadata[b"trajkit.table"].decode(), given.names
    found = (given.metadata or {}).get(b"trajkit.table", b"")
    check_kind(names, kind, found.decode(errors="replace"))
    version = stated_version(given)
    if version not in map(str, SCHEMA_VERSIONS):
        raise SchemaError(
            f"the {kind} table has schema version {version}: this trajkit reads versions "
            f"{SCHEMA_VERSIONS[0]} to {SCHEMA_VERSION}; columns of others have other "
            "names. Make the table again, or read it with the trajkit that wrote it"
        )
    for name in names:
        if names.count(name) > 1:
            raise SchemaError(f"column {name!r} occurs {names.count(name)} times")
    for field in schema:
        if field.name in names:
            source = given.field(field.name).type
            if pa.types.is_float64(source) and pa.types.is_integer(field.type):
                continue  # pandas makes integers floats; `misfits` refuses fractions
            is_name = field.name in ("session_id", "group_id", "agent_id")
            if is_name and pa.types.is_integer(source):
                continue  # ids of runs, groups and agents are often numbers
            check_type(source, field.type, f"column {field.name!r}")
        elif not field.nullable:
            hint = did_you_mean(field.name, set(names) - set(schema.names))
            if field.name == "turn_index" and kind == "turns":
                hint = ". trajkit.from_records makes turns of a table of calls"
            if schema is ROWS and "suffix_mask" in names:
                hint = ": write_rows with dedup stored these rows, read_rows reads them"
            raise SchemaError(
                f"no column {field.name!r} of {kind} among {_listed(names)}{hint}"
            )
    absent = tuple(name for name in schema.names if name not in names)
    for name in names:
        near = None if name in _KNOWN else near_miss(name, absent)
        if near is not None:
            hint = "An extra column needs another name"
            if near in ("messages", "response"):
                hint = "trajkit.from_records makes turns of records of calls"
            raise SchemaError(
                f"column {name!r} of {kind}, which have no {near!r}: did you mean "
                f"{near!r}? {hint}"
            )


def stated_version(schema: pa.Schema) -> str:
    """The schema version in the metadata; without metadata, the current one."""
    version = (schema.metadata or {}).get(b"trajkit.version")
    return str(SCHEMA_VERSION) if version is None else version.decode(errors="replace")


def has_old_keys(table: pa.Table) -> bool:
    """Whether a table of turns has the message keys of schema version 2."""
    return stated_version(table.schema) == "2"


def concat_tables(tables: list[pa.Table]) -> pa.Table:
    """The rows of all tables, with the schema version of the oldest; absent columns are
    null.
    """
    joined = pa.concat_tables(tables, promote_options="permissive")
    if any(map(has_old_keys, tables)) and not has_old_keys(joined):
        metadata = {**(joined.schema.metadata or {}), b"trajkit.version": b"2"}
        joined = joined.replace_schema_metadata(metadata)
    return joined


def check_kind(names: list[str], kind: str, found: str = "") -> None:
    """Raise SchemaError if ``found``, or else the columns, are of another table."""
    if not found and kind in _EXPECTED:
        own = (kind for kind, columns in _OWN_COLUMNS if columns <= {*names})
        found = next(own, "")
    if found not in ("", kind):
        raise SchemaError(
            f"a table of {found} (columns {_listed(names)}): expected {kind}"
            f"{_EXPECTED.get(kind, '')}"
        )


def _listed(names: list[str]) -> str:
    return ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")


def check_type(source: pa.DataType, target: pa.DataType, where: str) -> None:
    """Raise SchemaError unless `in_type` can cast the one to the other."""
    if source == target or pa.types.is_null(source):
        return
    if pa.types.is_dictionary(source):
        check_type(source.value_type, target, where)
        return
    if pa.types.is_dictionary(target):
        target = target.value_type
    if is_list(source) and is_list(target):
        check_type(source.value_type, target.value_type, f"{where} element")
        return
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        expected, found = ([field.name for field in one] for one in (target, source))
        if sorted(expected) != sorted(found):
            raise SchemaError(f"{where} has the fields {found}: expected {expected}")
        for field in target:
            name = f"{where} field {field.name!r}"
            check_type(source.field(field.name).type, field.type, name)
        return
    # JSON readers make integers of integral floats; no float is taken as an integer
    integral = pa.types.is_integer(source) and pa.types.is_floating(target)
    if not integral and not any(test(source) and test(target) for test in _ALIKE):
        raise SchemaError(f"{where} is {source}: expected {target}")


def _any_of(*names: str) -> Callable[[pa.DataType], bool]:
    """A test for one of these types of Arrow."""
    tests = [getattr(pa.types, f"is_{name}") for name in names]
    return lambda type_: any(test(type_) for test in tests)


is_list = _any_of(
    *("list", "large_list", "fixed_size_list", "list_view", "large_list_view")
)
"""Whether it is one of Arrow's list types."""

_ALIKE: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_boolean,
    _any_of("string", "large_string", "string_view"),
    _any_of("binary", "large_binary", "fixed_size_binary", "binary_view"),
)


def misfits(table: pa.Table, schema: pa.Schema) -> Iterator[Fault]:
    """Values that `cast` would refuse. The table passed `check_columns`."""
    for field in schema:
        if field.name not in table.column_names:
            continue
        column = table.column(field.name)
        if not field.nullable and column.null_count:
            rows = np.flatnonzero(column.is_null().to_numpy())
            yield fault(rows, f"{field.name} is null")
        if column.type == field.type:
            continue
        start = 0
        for chunk in column.chunks:
            yield from _misfits(chunk, field, start)
            start += len(chunk)


def _misfits(array: pa.Array, field: pa.Field, start: int) -> Iterator[Fault]:
    try:
        _cast(array, field.type)
    except pa.ArrowInvalid as error:
        half = len(array) // 2
        if not half:
            yield fault(np.array([start]), "{}", [f"{field.name}: {error}"])
            return
        yield from _misfits(array[:half], field, start)
        yield from _misfits(array[half:], field, start + half)


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The canonical form of a table that passed `check_columns` and `misfits`."""
    columns = []
    for field in schema:
        if field.name in table.column_names:
            column = table.column(field.name)
            column = in_type(column, field.type)
        else:
            column = pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        columns.append(column)
    extra = [field for field in table.schema if field.name not in schema.names]
    columns += [table.column(field.name) for field in extra]
    metadata = {**(table.schema.metadata or {}), **schema.metadata}
    if (schema is TURNS or schema is TURNS_DELTA) and has_old_keys(table):
        # until complete sessions are read (trajkit.turns.sessions.with_current_keys)
        metadata[b"trajkit.version"] = b"2"
    fields = pa.schema([*schema, *extra], metadata=metadata)
    return pa.Table.from_arrays(columns, schema=fields)


def in_type(column: pa.ChunkedArray, target: pa.DataType) -> pa.ChunkedArray:
    """A column of any layout in another type; an ArrowException for a value without."""
    if column.type == target:
        return column
    return pa.chunked_array([_cast(one, target) for one in column.chunks], target)


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type == target:
        return array
    if pa.types.is_dictionary(target):
        # encoded again, so that names come in the order of their first use
        encoded = _cast(array, target.value_type).dictionary_encode()
        indices = encoded.indices.cast(target.index_type)
        return pa.DictionaryArray.from_arrays(indices, encoded.dictionary)
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), target)
    if pa.types.is_dictionary(array.type):
        # the dictionary first: it is small, and Arrow cannot decode one of views
        dictionary = _cast(array.dictionary, target)
        array = pa.DictionaryArray.from_arrays(array.indices, dictionary)
        return array.dictionary_decode()
    if is_list(target):
        # not Arrow's cast: for list views it writes one offset too few (pyarrow 26)
        lists = Ragged.of(array)
        values = _cast(lists.values, target.value_type)
        null = np.asarray(array.is_null())
        return Ragged(values, lists.offsets).to_arrow(null, target)
    if pa.types.is_struct(target):
        children = [
            _cast(pc.struct_field(array, field.name), field.type) for field in target
        ]
        mask = array.is_null() if array.null_count else None
        return pa.StructArray.from_arrays(children, fields=list(target), mask=mask)
    # a float is rounded, and no other value changes
    return array.cast(target, safe=not pa.types.is_floating(target))

"""Anyone's Arrow table to the canonical form of a schema, without copying what fits.

polars, parquet and pyarrow hand over the same table in many layouts: views, large and
small offsets, fixed-size lists, dictionary or plain strings, wider integers, nullable
fields, chunks, no metadata. `canonical` takes them all. What a cast would have to
guess, round or drop is refused.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import compute as pc
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema import ROWS, ROWS_SUFFIX, SCHEMA_VERSION, TURNS, TURNS_DELTA
from trajkit.shared_prompts import unshare


@runtime_checkable
class ArrowStream(Protocol):
    """Anything that hands over a table through the Arrow C stream interface."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


TableLike: TypeAlias = pa.Table | pa.RecordBatch | pa.RecordBatchReader | ArrowStream
"""What every entry point takes for a table: a polars frame is an `ArrowStream`."""

Rows: TypeAlias = npt.NDArray[np.int64]
Violation: TypeAlias = tuple[Rows, Callable[[int], str]]
"""Rows that break a rule, and what is wrong with the k-th of them."""


def violation(
    rows: Rows, template: str, *columns: Sequence[object] | npt.NDArray[np.generic]
) -> Violation:
    """Rows that break a rule, in words: the k-th of each column fills the template."""
    return rows, lambda k: template.format(*(column[k] for column in columns))


def canonical(table: TableLike, schema: pa.Schema) -> pa.Table:
    """The table in the schema's own types and column order.

    Columns that already have their type are not copied. Nullable columns that are
    absent are null; columns that the schema does not know follow behind, as they are.

    Parameters
    ----------
    table : Table, RecordBatch, RecordBatchReader or any Arrow stream
        A reader is read to its end.
    schema : Schema
        One of `trajkit.schema`'s.

    Returns
    -------
    Table
        Values are not looked at beyond what the types demand; `trajkit.validate` does.

    Raises
    ------
    SchemaError
        A column is absent, or of a type that cannot be taken for its own; the table is
        of another kind or of a newer schema version.
    InvalidTurnsError
        A value does not fit its type: an integer out of range, a key of another width,
        a null where none may be.
    """
    source = unshare(as_table(table)) if schema is TURNS_DELTA else as_table(table)
    if source.schema.equals(schema, check_metadata=True) and not any(
        column.null_count
        for field, column in zip(schema, source.columns, strict=True)
        if not field.nullable
    ):
        return source
    check_columns(source, schema)
    for rows, explain in misfits(source, schema):
        raise InvalidTurnsError(f"{place(source, int(rows[0]))}: {explain(0)}")
    return cast(source, schema)


def as_table(table: TableLike) -> pa.Table:
    """The same columns as a pyarrow Table; nothing is copied."""
    if isinstance(table, pa.Table):
        return table
    if isinstance(table, pa.RecordBatch):
        return pa.Table.from_batches([table])
    if isinstance(table, pa.RecordBatchReader):
        return table.read_all()
    if isinstance(table, ArrowStream):
        return pa.RecordBatchReader.from_stream(table).read_all()
    raise SchemaError(
        f"{type(table).__name__} is no table: expected a pyarrow Table, RecordBatch or "
        "RecordBatchReader, or an object with __arrow_c_stream__"
    )


def check_session_id(schema: pa.Schema) -> None:
    """Raise SchemaError unless the column session_id, which is there, is one of text."""
    _check_type(schema.field("session_id").type, pa.string(), "column 'session_id'")


def turns_schema(names: list[str]) -> pa.Schema:
    """`TURNS` or `TURNS_DELTA`, by which of them the columns spell."""
    if "suffix_ids" in names and "prompt_ids" not in names:
        return TURNS_DELTA
    return TURNS


def rows_schema(names: list[str]) -> pa.Schema:
    """`ROWS` or `ROWS_SUFFIX`, by which of them the columns spell."""
    if "suffix_ids" in names and "input_ids" not in names:
        return ROWS_SUFFIX
    return ROWS


def canonical_rows(rows: TableLike) -> pa.Table:
    """Rows of either layout in canonical form."""
    table = as_table(rows)
    return canonical(table, rows_schema(table.column_names))


def place(table: pa.Table, row: int) -> str:
    """Where a row is, in words: ``session 'a', turn 7``."""
    session = _scalar(table, "session_id", row)
    if session is None:
        return f"table row {row}"
    words = f"session {session!r}"
    for name, word in (("row_index", "row"), ("turn_index", "turn")):
        index = _scalar(table, name, row)
        if index is not None:
            return f"{words}, {word} {index}"
    return words


def _scalar(table: pa.Table, name: str, row: int) -> object:
    return table.column(name)[row].as_py() if name in table.column_names else None


def check_columns(table: pa.Table, schema: pa.Schema) -> None:
    """Raise SchemaError unless `cast` can take the table for the schema's."""
    kind = schema.metadata[b"trajkit.table"].decode()
    metadata = table.schema.metadata or {}
    said = metadata.get(b"trajkit.table", kind.encode()).decode()
    if said != kind:
        raise SchemaError(f"this is a {said} table: expected {kind}")
    version = metadata.get(b"trajkit.version", b"1").decode()
    if not version.isdecimal() or int(version) > SCHEMA_VERSION:
        raise SchemaError(
            f"the {kind} table is of schema version {version}: this trajkit reads "
            f"versions up to {SCHEMA_VERSION}"
        )
    names = table.column_names
    for name in names:
        if names.count(name) > 1:
            raise SchemaError(f"column {name!r} occurs {names.count(name)} times")
    for field in schema:
        if field.name in names:
            source = table.schema.field(field.name).type
            _check_type(source, field.type, f"column {field.name!r}")
        elif not field.nullable:
            hint = ""
            if schema is ROWS and rows_schema(names) is ROWS_SUFFIX:
                hint = ": these rows hold suffixes, of which full_rows makes whole ones"
            raise SchemaError(f"column {field.name!r} of {kind} is absent{hint}")


def _check_type(source: pa.DataType, target: pa.DataType, where: str) -> None:
    if source == target or pa.types.is_null(source):
        return
    if pa.types.is_dictionary(source):
        _check_type(source.value_type, target, where)
        return
    if pa.types.is_dictionary(target):
        target = target.value_type
    if is_list(source) and is_list(target):
        _check_type(source.value_type, target.value_type, f"{where} element")
        return
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        _check_struct(source, target, where)
        return
    # JSON readers give whole numbers as integers: they are taken for a float, never a
    # float for an integer
    whole = pa.types.is_integer(source) and pa.types.is_floating(target)
    if not whole and not any(test(source) and test(target) for test in _ALIKE):
        raise SchemaError(f"{where} is {source}: expected {target}")


def _check_struct(source: pa.DataType, target: pa.DataType, where: str) -> None:
    expected = [field.name for field in target]
    found = [field.name for field in source]
    if sorted(expected) != sorted(found):
        raise SchemaError(f"{where} has the fields {found}: expected {expected}")
    for field in target:
        _check_type(
            source.field(field.name).type, field.type, f"{where} field {field.name!r}"
        )


def is_list(type_: pa.DataType) -> bool:
    """Whether it is one of Arrow's list types."""
    return any(
        test(type_)
        for test in (
            pa.types.is_list,
            pa.types.is_large_list,
            pa.types.is_fixed_size_list,
            pa.types.is_list_view,
            pa.types.is_large_list_view,
        )
    )


def _is_text(type_: pa.DataType) -> bool:
    return any(
        test(type_)
        for test in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
        )
    )


def _is_binary(type_: pa.DataType) -> bool:
    return any(
        test(type_)
        for test in (
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_fixed_size_binary,
            pa.types.is_binary_view,
        )
    )


_ALIKE: tuple[Callable[[pa.DataType], bool], ...] = (
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_boolean,
    _is_text,
    _is_binary,
)


def misfits(table: pa.Table, schema: pa.Schema) -> Iterator[Violation]:
    """Values that `cast` would refuse. The table passed `check_columns`."""
    for field in schema:
        if field.name not in table.column_names:
            continue
        column = table.column(field.name)
        if not field.nullable and column.null_count:
            rows = np.flatnonzero(column.is_null().to_numpy())
            yield violation(rows, f"{field.name} is null")
        if column.type == field.type:
            continue
        start = 0
        for chunk in column.chunks:
            yield from _misfits(chunk, field.type, field.name, start)
            start += len(chunk)


def _misfits(
    array: pa.Array, target: pa.DataType, name: str, start: int
) -> Iterator[Violation]:
    for path, leaf, type_, parents in _leaves(array, target, name, lambda rows: rows):
        if pa.types.is_integer(type_):
            bad = _out_of_range(leaf, type_)
            rule = f"is out of range for {type_}"
        else:
            bad = _of_other_width(leaf, type_.byte_width)
            rule = f"is not {type_.byte_width} bytes long"
        if bad.size:
            values = leaf.take(pa.array(bad)).to_pylist()
            yield violation(start + parents(bad), f"{path} {{!r}} {rule}", values)


def _leaves(
    array: pa.Array,
    target: pa.DataType,
    name: str,
    parents: Callable[[Rows], Rows],
) -> Iterator[tuple[str, pa.Array, pa.DataType, Callable[[Rows], Rows]]]:
    """The integers and keys in an array of another type, flat, and whose they are."""
    if array.type == target or pa.types.is_null(array.type):
        return
    if pa.types.is_dictionary(array.type) and is_list(array.type.value_type):
        array = array.dictionary_decode()
    if pa.types.is_integer(target) or pa.types.is_fixed_size_binary(target):
        if pa.types.is_dictionary(array.type):
            array = array.cast(array.type.value_type)
        yield name, array, target, parents
    elif pa.types.is_struct(target):
        for field in target:
            child = pc.struct_field(array, field.name)
            yield from _leaves(child, field.type, f"{name}.{field.name}", parents)
    elif is_list(target):
        lists = _cast(array, pa.large_list(array.type.value_type))

        def up(positions: Rows) -> Rows:
            owners = pc.list_parent_indices(lists).to_numpy()
            return parents(owners[positions])

        yield from _leaves(lists.flatten(), target.value_type, name, up)


def _out_of_range(array: pa.Array, target: pa.DataType) -> Rows:
    limits = np.iinfo(target.to_pandas_dtype())
    found = pc.min_max(array).as_py()
    if found["min"] is None or limits.min <= found["min"] <= found["max"] <= limits.max:
        return np.empty(0, np.int64)
    # the comparison is made in the source's type, which may be unsigned
    here = np.iinfo(array.type.to_pandas_dtype())
    low = pa.scalar(max(int(limits.min), int(here.min)), array.type)
    high = pa.scalar(min(int(limits.max), int(here.max)), array.type)
    bad = pc.or_(pc.less(array, low), pc.greater(array, high))
    return np.flatnonzero(bad.fill_null(False).to_numpy(zero_copy_only=False))


def _of_other_width(array: pa.Array, width: int) -> Rows:
    if pa.types.is_binary_view(array.type):  # has no kernel for its length
        array = array.cast(pa.large_binary())
    bad = pc.not_equal(pc.binary_length(array), width).fill_null(False)
    return np.flatnonzero(bad.to_numpy(zero_copy_only=False))


def cast(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table as `canonical` gives it. It passed `check_columns` and `misfits`."""
    columns, fields = [], []
    for field in schema:
        if field.name in table.column_names:
            column = table.column(field.name)
            if column.type != field.type:
                chunks = [_cast(chunk, field.type) for chunk in column.chunks]
                column = pa.chunked_array(chunks, field.type)
        else:
            column = pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        columns.append(column)
        fields.append(field)
    for field in table.schema:
        if field.name not in schema.names:
            columns.append(table.column(field.name))
            fields.append(field)
    metadata = {**(table.schema.metadata or {}), **schema.metadata}
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=metadata))


def _cast(array: pa.Array, target: pa.DataType) -> pa.Array:
    if array.type == target:
        return array
    if pa.types.is_dictionary(target):
        return _cast_names(array, target)
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), target)
    if pa.types.is_dictionary(array.type):
        # the values first: few, and in polars' hands views, which decode to nothing
        dictionary = _cast(array.dictionary, target)
        array = pa.DictionaryArray.from_arrays(array.indices, dictionary)
        return array.dictionary_decode()
    mask = array.is_null() if array.null_count else None
    if is_list(target):
        offsets, values = list_parts(array)
        values = _cast(values, target.value_type)
        return pa.LargeListArray.from_arrays(offsets, values, type=target, mask=mask)
    if pa.types.is_struct(target):
        children = [
            _cast(pc.struct_field(array, field.name), field.type) for field in target
        ]
        return pa.StructArray.from_arrays(children, fields=list(target), mask=mask)
    # `misfits` has looked at every value that the unchecked cast could mangle
    return array.cast(target, safe=False)


def _cast_names(array: pa.Array, target: pa.DataType) -> pa.DictionaryArray:
    # any encoding of the source gives way to one of the names, first seen first
    encoded = _cast(array, target.value_type).dictionary_encode()
    indices = encoded.indices.cast(target.index_type)
    return pa.DictionaryArray.from_arrays(indices, encoded.dictionary)


def list_parts(array: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Offsets (int64, from 0) and values of a list array of any layout."""
    # Arrow's own cast of list views writes one offset too few (seen in pyarrow 26)
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        offsets = array.offsets.cast(pa.int64())
        first, last = offsets[0].as_py(), offsets[-1].as_py()
        values = array.values.slice(first, last - first)
        if first or array.offset:
            # copied, as Arrow takes no mask beside offsets that are a slice
            offsets = pa.array(offsets.to_numpy() - first)
        return offsets, values
    lengths = pc.list_value_length(array).fill_null(0).to_numpy(zero_copy_only=False)
    ends = np.zeros(len(array) + 1, np.int64)
    np.cumsum(lengths, out=ends[1:])
    return pa.array(ends), array.flatten()

"""The complete dictionaries of the rows' category columns.

A file writer may leave unused names out of a dictionary, and Arrow calls tables with
different dictionaries unequal.
"""

from functools import cache

import pyarrow as pa

from trajkit.schema import SEGMENT_KINDS, SPAN, SPAN_KINDS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import list_parts


@cache
def dictionary_for(names: tuple[str, ...]) -> pa.Array:
    """The dictionary of a category column: all of its names, in order."""
    # not at import: pyarrow would import pandas, if that is installed
    return pa.array(names)


def normalize_categories(rows: pa.Table) -> pa.Table:
    """Canonical rows with complete dictionaries; unknown names stay as they are."""
    for name, change in (("spans", _spans), ("segment_kind", _segments)):
        index = rows.column_names.index(name)
        column = rows.column(index)
        chunks = [change(chunk) for chunk in column.chunks]
        if any(new is not old for new, old in zip(chunks, column.chunks, strict=True)):
            column = pa.chunked_array(chunks, column.type)
            rows = rows.set_column(index, rows.field(index), column)
    return rows


def _segments(chunk: pa.DictionaryArray) -> pa.DictionaryArray:
    return _encode(chunk, SEGMENT_KINDS)


def _spans(chunk: pa.LargeListArray) -> pa.LargeListArray:
    kinds = chunk.values.field("kind")
    if _encode(kinds, SPAN_KINDS) is kinds:
        return chunk
    offsets, values = list_parts(chunk)
    children = values.flatten()
    index = SPAN.get_field_index("kind")
    children[index] = _encode(children[index], SPAN_KINDS)
    mask = values.is_null() if values.null_count else None
    values = pa.StructArray.from_arrays(children, fields=list(SPAN), mask=mask)
    mask = chunk.is_null() if chunk.null_count else None
    return pa.LargeListArray.from_arrays(offsets, values, type=chunk.type, mask=mask)


def _encode(array: pa.DictionaryArray, names: tuple[str, ...]) -> pa.DictionaryArray:
    """The array with the dictionary of ``names``, unless it has other names."""
    complete = dictionary_for(names)
    if array.dictionary.equals(complete):
        return array
    codes = pc.index_in(array.dictionary, complete)
    if codes.null_count:
        return array
    indices = codes.take(array.indices).cast(array.type.index_type)
    return pa.DictionaryArray.from_arrays(indices, complete)

"""The dictionaries of kinds that rows have, and rows of files with these.

What writes a file may leave names out of a dictionary that do not occur, and Arrow calls
tables with other dictionaries unequal.
"""

from functools import cache

import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import list_parts
from trajkit.schema import SEGMENT_KINDS, SPAN, SPAN_KINDS


@cache
def names_of(kinds: tuple[str, ...]) -> pa.Array:
    """The dictionary of a column of kinds: all of them, in order."""
    # not at import: pyarrow would load pandas for it where that is installed
    return pa.array(kinds)


def with_kinds(rows: pa.Table) -> pa.Table:
    """The same rows, which are in canonical form; kinds that are unknown stay."""
    for name, change in (("spans", _spans), ("segment_kind", _segments)):
        at = rows.column_names.index(name)
        column = rows.column(at)
        chunks = [change(chunk) for chunk in column.chunks]
        if any(new is not old for new, old in zip(chunks, column.chunks, strict=True)):
            column = pa.chunked_array(chunks, column.type)
            rows = rows.set_column(at, rows.field(at), column)
    return rows


def _segments(chunk: pa.DictionaryArray) -> pa.DictionaryArray:
    return _among(chunk, SEGMENT_KINDS)


def _spans(chunk: pa.LargeListArray) -> pa.LargeListArray:
    values = chunk.values
    kinds = values.field("kind")
    known = _among(kinds, SPAN_KINDS)
    if known is kinds:
        return chunk
    offsets, values = list_parts(chunk)
    children = values.flatten()
    at = SPAN.get_field_index("kind")
    children[at] = _among(children[at], SPAN_KINDS)
    mask = values.is_null() if values.null_count else None
    values = pa.StructArray.from_arrays(children, fields=list(SPAN), mask=mask)
    mask = chunk.is_null() if chunk.null_count else None
    return pa.LargeListArray.from_arrays(offsets, values, type=chunk.type, mask=mask)


def _among(names: pa.DictionaryArray, kinds: tuple[str, ...]) -> pa.DictionaryArray:
    """The same names by a dictionary of all, if that has them."""
    everything = names_of(kinds)
    if names.dictionary.equals(everything):
        return names
    places = pc.index_in(names.dictionary, everything)
    if places.null_count:
        return names
    indices = places.take(names.indices).cast(names.type.index_type)
    return pa.DictionaryArray.from_arrays(indices, everything)

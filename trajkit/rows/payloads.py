"""What rows carry of their calls per token: images, weights and payloads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_names
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.schema import MM_ITEM, ROW_VERSIONS, ROWS, TURNS, TURNS_DELTA
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import is_list
from trajkit.tables.columns import take_values
from trajkit.tables.ragged import (
    Bools,
    Ints,
    Longs,
    Ragged,
    Records,
    offsets_of,
    positions,
)
from trajkit.turns.sessions import Forest, Sessions

WEIGHT_VERSION = "weight_version"
"""The payload with the weights that sampled each token; it does not need a column."""

# Suffix of the column with the position of a payload's first element.
_START = "_start"


def _entries(calls: Sessions, name: str) -> tuple[pa.StructArray, Longs, Longs, Longs]:
    """The entries of a column of ranges: with the call, start and stop of each."""
    lists = calls.table.column(name).combine_chunks()
    entries = lists.flatten()
    call = pc.list_parent_indices(lists).to_numpy().astype(np.int64)
    start, stop = (
        np.asarray(pc.struct_field(entries, bound).fill_null(0), np.int64)
        for bound in ("start", "stop")
    )
    return entries, call, start, stop


def _version_of(calls: Sessions, call: Longs, token: Longs) -> tuple[pa.Array, Longs]:
    """The versions of all calls, and the one that sampled each token of outputs, or -1."""
    entries, of_call, start, stop = _entries(calls, "weight_versions")
    names = pc.struct_field(entries, "version")
    if not len(names):
        return names, np.full(len(call), -1)
    keys = (of_call << 32) + start
    found = np.searchsorted(keys, (call << 32) + token, side="right") - 1
    at = np.maximum(found, 0)
    inside = (of_call[at] == call) & (token < stop[at]) & (found >= 0)
    return names, np.where(inside, at, -1)


def row_versions(
    calls: Sessions, rows: Records, offsets: Longs, spans: Ints
) -> pa.StructArray:
    """The column ``weight_versions`` of rows, from the offsets and the fields of their
    spans.

    ``spans`` has the fields of `trajkit.schema.SPAN` without ``kind``, shape (5,
    n_spans).
    """
    n_rows = len(rows)
    start, stop, turn, out_start, out_stop = spans.astype(np.int64)
    row = np.repeat(np.arange(n_rows), np.diff(offsets))
    call = calls.named(rows["session"][row], turn)
    ends = []
    for token, order in ((out_start, 1), (out_stop - 1, -1)):
        names, version = _version_of(calls, call, token)
        known = np.flatnonzero((version >= 0) & (stop > start))[::order]
        found, first = np.unique(row[known], return_index=True)
        source = np.full(n_rows, -1)
        source[found] = version[known[first]]
        ends.append(names.take(pa.array(source, mask=source < 0)))
    return pa.StructArray.from_arrays(
        ends, fields=list(ROW_VERSIONS), mask=ends[0].is_null()
    )


def token_versions(calls: Sessions) -> pa.LargeListArray:
    """The weights that sampled each output token of each call, null if unknown."""
    out_len = calls.calls["out_len"]
    call = np.repeat(np.arange(len(out_len)), out_len)
    tokens = positions(np.zeros_like(out_len), out_len)
    names, version = _version_of(calls, call, tokens)
    named = names.take(pa.array(version, mask=version < 0))
    return Ragged(named, offsets_of(out_len)).to_arrow()


@dataclass(frozen=True, slots=True)
class PathRanges:
    """Ranges of rows that equal ranges of calls' paths; shape (n_ranges,)."""

    row: Longs
    # start in the row
    place: Longs
    call: Longs
    # start in the call's path
    first: Longs
    length: Longs

    @classmethod
    def of_paths(cls, planned: Records) -> Self:
        """The ranges of rows that are their last call's path."""
        nowhere = np.zeros(len(planned), np.int64)
        rows, last = np.arange(len(planned)), planned["last"].astype(np.int64)
        return cls(rows, nowhere, last, nowhere, planned["n_tokens"])


def payload_names(payloads: object) -> tuple[str, ...]:
    """The payload names that the caller gave: distinct, and no columns of rows."""
    names = chosen_names("payloads", payloads)
    for name in names:
        rule = f"{name!r} is the name of a column of rows" if name in ROWS.names else ""
        if rule or names.count(name) > 1:
            rule = rule or f"{name!r} is named twice"
            raise ArgumentError(f"payloads={payloads!r}: {rule}")
    return names


def rows_schema(turns: pa.Schema, names: tuple[str, ...]) -> pa.Schema:
    """`trajkit.schema.ROWS` followed by one list column per payload."""
    schema = ROWS
    for name in names:
        schema = schema.append(pa.field(name, pa.large_list(_element(turns, name))))
    return schema


def _element(turns: pa.Schema, name: str) -> pa.DataType:
    """The type of a payload's elements."""
    at = turns.get_field_index(name)
    if at < 0 and name == WEIGHT_VERSION:
        return pa.string()
    if at < 0:
        known = {*TURNS.names, *TURNS_DELTA.names}
        others = [repr(other) for other in turns.names if other not in known]
        raise ArgumentError(
            f"payloads={name!r}: the turns have no such column, only "
            f"{', '.join(others) or 'those of every log'}"
        )
    type_ = turns.field(at).type
    if isinstance(type_, pa.FixedShapeTensorType):
        if type_.permutation not in (None, list(range(len(type_.shape)))):
            raise SchemaError(
                f"payload {name!r} is {type_}: tensors must not be permuted"
            )
        element = type_.value_type
        for size in reversed(type_.shape[1:]):
            element = pa.list_(element, size)
        return element
    if pa.types.is_null(type_):
        return type_
    if not is_list(type_):
        raise SchemaError(
            f"payload {name!r} is {type_}: expected a list with an element per token"
        )
    return type_.value_type


def _column(calls: Sessions, name: str, element: pa.DataType) -> pa.ChunkedArray:
    """A payload as a column of lists; `WEIGHT_VERSION` is made from weight_versions."""
    if name not in calls.table.column_names:
        return pa.chunked_array([token_versions(calls)])
    column = calls.table.column(name)
    if not isinstance(column.type, pa.FixedShapeTensorType):
        return column
    n, *sizes = column.type.shape  # lists along the first axis
    chunks = []
    for chunk in column.chunks:
        flat = chunk.storage.flatten()
        for size in reversed(sizes):
            flat = pa.FixedSizeListArray.from_arrays(flat, size)
        null = np.asarray(chunk.is_null())
        lists = Ragged(flat.cast(element), offsets_of(np.where(null, 0, n)))
        chunks.append(lists.to_arrow(null))
    return pa.chunked_array(chunks, pa.large_list(element))


def with_payloads(
    batch: pa.RecordBatch,
    calls: Sessions,
    planned: Records,
    names: tuple[str, ...],
    ranges: Callable[[Records], PathRanges],
) -> pa.RecordBatch:
    """Add payload columns to rows; later ``ranges`` of recorded paths take precedence."""
    schema = rows_schema(calls.table.schema, names)
    sampled, shown = _sampled(batch, calls, planned), ranges(planned)
    columns = [
        _Lists.read(calls, name).of_rows(calls.forest, planned, (sampled, shown))
        for name in names
    ]
    return pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=schema)


def _sampled(batch: pa.RecordBatch, calls: Sessions, planned: Records) -> PathRanges:
    """The ranges that the rows' spans name."""
    spans = batch.column("spans").flatten()
    start, stop, turn, first = (
        spans.field(name).to_numpy().astype(np.int64)
        for name in ("start", "stop", "turn_index", "output_start")
    )
    lengths = np.asarray(batch.column("spans").value_lengths(), np.int64)
    row = np.repeat(np.arange(len(planned)), lengths)
    call = calls.named(planned["session"][row], turn)
    first = calls.calls["prompt_len"][call] + first
    return PathRanges(row, start, call, first, stop - start)


@dataclass(frozen=True, slots=True)
class _Lists:
    """One payload column, and the range of each call's path that it covers."""

    name: str
    # the elements of all lists, concatenated
    values: pa.Array
    # shape (n_calls,): start of a call's elements in values
    start: Longs
    # shape (n_calls,): position of the first of them in the call's path
    first: Longs
    # shape (n_calls,)
    length: Longs
    # shape (n_calls,): an earlier call has the elements before
    partial: Bools

    @classmethod
    def read(cls, calls: Sessions, name: str) -> Self:
        """Read a payload column of the calls."""
        element, n_calls = _element(calls.table.schema, name), len(calls.calls)
        if pa.types.is_null(element):
            lists = Ragged(pa.nulls(0), np.zeros(n_calls + 1, np.int64))
            length = np.full(n_calls, -1)
        else:
            column = _column(calls, name, element)
            lists = Ragged.of(column)
            length = np.where(column.is_valid(), lists.lengths, -1)
        first, partial = _places(calls, name, length)
        starts = lists.offsets[:-1]
        return cls(name, lists.values, starts, first, lists.lengths, partial)

    def of_rows(
        self, forest: Forest, planned: Records, known: tuple[PathRanges, ...]
    ) -> pa.LargeListArray:
        """The payload of every token of every row, null if unknown.

        Earlier ranges in ``known`` take precedence. If no turn has the payload, every
        list is null.
        """
        offsets = offsets_of(planned["n_tokens"])
        at = np.full(int(offsets[-1]), -1)
        valid = np.asarray(self.values.is_valid())
        for ranges in known:
            self._lay(at, offsets, ranges, valid)
        for ranges in known:
            before = self._before(ranges, forest)
            while len(before.row):
                self._lay(at, offsets, before, valid)
                before = self._before(before, forest)
        taken = take_values(self.values, pa.array(at, mask=at < 0), self.name)
        absent = np.full(len(planned), pa.types.is_null(self.values.type))
        return Ragged(taken, offsets).to_arrow(absent)

    def _lay(self, at: Longs, offsets: Longs, run: PathRanges, valid: Bools) -> None:
        """Assign elements to tokens that have none; the last of several ranges counts."""
        low = np.maximum(run.first, self.first[run.call])
        stop = self.first + self.length
        high = np.minimum(run.first + run.length, stop[run.call])
        lengths = np.maximum(high - low, 0)
        places = positions(offsets[run.row] + run.place + low - run.first, lengths)
        sources = positions(self.start[run.call] + low - self.first[run.call], lengths)
        new = valid[sources] & (at[places] < 0)
        at[places[new]] = sources[new]

    def _before(self, run: PathRanges, forest: Forest) -> PathRanges:
        """The parts of ranges that a payload leaves to an earlier call, in that call."""
        base = forest.shared_with[run.call].astype(np.int64)
        end = np.minimum(run.first + run.length, self.first[run.call])
        length = np.minimum(end, forest.shared[run.call]) - run.first
        which = self.partial[run.call] & (base >= 0) & (length > 0)
        parts = (run.row, run.place, base, run.first, length)
        return PathRanges(*(part[which] for part in parts))


def _places(calls: Sessions, name: str, length: Longs) -> tuple[Longs, Bools]:
    """The position of each list's first element, and whether elements come before it.

    A list without a start has an element per output id, or per prompt and output id.
    """
    n_prompt, n_path = calls.calls["prompt_len"], calls.path_len
    first = np.select(
        [length == n_path, length == calls.calls["out_len"]],
        [np.zeros_like(n_prompt), n_prompt],
        -1,
    )
    given = np.zeros(len(first), np.bool_)
    if name + _START in calls.table.column_names:
        column = calls.table.column(name + _START)
        if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
            raise SchemaError(f"{name}{_START} is {column.type}: expected integers")
        given = column.is_valid().to_numpy()
        starts = column.cast(pa.int64()).fill_null(0).to_numpy()
        bad = np.flatnonzero(given & ((starts < 0) | (starts + length > n_path)))
        if len(bad):
            call = int(bad[0])
            raise InvalidTurnsError(
                f"{calls.place(call)}: {name}{_START} is {starts[call]} and {name} has "
                f"{max(length[call], 0)} elements: they must fit into the "
                f"{n_path[call]} ids of prompt and output"
            )
        first = np.where(given, starts, first)
    bad = np.flatnonzero((length >= 0) & (first < 0))
    if len(bad):
        call = int(bad[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: payload {name!r} has {length[call]} elements: "
            f"expected {calls.calls['out_len'][call]} (output ids) or {n_path[call]} "
            "(prompt and output ids). For another range, give the position of its first "
            f"element in the column {name}{_START}: 0 for routed experts of all ids but "
            "the last"
        )
    return np.maximum(first, 0), given & (first > 0) & (length >= 0)


def row_items(calls: Sessions, n_rows: int, shown: PathRanges) -> pa.Array:
    """The items that start in ranges of the rows, with their positions in the row."""
    items, call, start, stop = _entries(calls, "mm_items")
    keys = (call << 32) + start
    first = (shown.call << 32) + shown.first
    low, high = (np.searchsorted(keys, first + n) for n in (0, shown.length))
    taken = positions(low, high - low)
    of_range = np.repeat(np.arange(len(shown.row)), high - low)
    row = shown.row[of_range]
    moved = (shown.place - shown.first)[of_range]
    # ranges may overlap, where they have the same tokens
    _, one = np.unique((row << 32) + start[taken] + moved, return_index=True)
    taken, row, moved = taken[one], row[one], moved[one]
    fields = {
        name: pc.struct_field(items, name).take(pa.array(taken))
        for name in MM_ITEM.names
    }
    fields["start"] = pa.array((start[taken] + moved).astype(np.int32))
    fields["stop"] = pa.array((stop[taken] + moved).astype(np.int32))
    counts = np.bincount(row, minlength=n_rows)
    structs = pa.StructArray.from_arrays(list(fields.values()), fields=list(MM_ITEM))
    type_ = ROWS.field("mm_items").type
    return Ragged(structs, offsets_of(counts)).to_arrow(counts == 0, type_)

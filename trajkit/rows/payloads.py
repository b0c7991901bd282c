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


@dataclass(frozen=True, slots=True)
class Versions:
    """The entries of weight_versions of all calls, concatenated."""

    names: pa.Array
    # shape (n_pieces,): call << 32 | start, ascending
    starts: Longs
    # shape (n_pieces,)
    stops: Longs

    @classmethod
    def of(cls, calls: Sessions) -> Self:
        """The entries of the calls."""
        lists = calls.table.column("weight_versions").combine_chunks()
        pieces = lists.flatten()
        call = pc.list_parent_indices(lists).to_numpy().astype(np.int64)
        start, stop = (
            np.asarray(pc.struct_field(pieces, name).fill_null(0), np.int64)
            for name in ("start", "stop")
        )
        return cls(pc.struct_field(pieces, "version"), (call << 32) + start, stop)

    def piece_of(self, call: Longs, token: Longs) -> Longs:
        """The entry that covers each token of a call's output, or -1."""
        found = np.searchsorted(self.starts, (call << 32) + token, side="right") - 1
        at = np.maximum(found, 0)
        if not len(self.starts):
            return np.full(len(call), -1)
        inside = (self.starts[at] >> 32 == call) & (token < self.stops[at])
        return np.where((found >= 0) & inside, at, -1)


def row_versions(
    calls: Sessions, rows: Records, offsets: Longs, spans: Ints
) -> pa.StructArray:
    """The column ``weight_versions`` of rows, from the offsets and the fields of their
    spans.

    ``spans`` has the fields of `trajkit.schema.SPAN` without ``kind``, shape (5,
    n_spans).
    """
    n_rows, versions = len(rows), Versions.of(calls)
    start, stop, turn, out_start, out_stop = spans.astype(np.int64)
    row = np.repeat(np.arange(n_rows), np.diff(offsets))
    call = calls.named(rows["session"][row], turn)
    sampled = stop > start
    ends = []
    for token, order in ((out_start, 1), (out_stop - 1, -1)):
        piece = np.where(sampled, versions.piece_of(call, token), -1)
        known = np.flatnonzero(piece >= 0)[::order]
        found, first = np.unique(row[known], return_index=True)
        source = np.full(n_rows, -1)
        source[found] = piece[known[first]]
        ends.append(versions.names.take(pa.array(source, mask=source < 0)))
    return pa.StructArray.from_arrays(
        ends, fields=list(ROW_VERSIONS), mask=ends[0].is_null()
    )


def token_versions(calls: Sessions) -> pa.LargeListArray:
    """The weights that sampled each output token of each call, null if unknown."""
    n_calls, out_len = len(calls.calls), calls.calls["out_len"]
    offsets, versions = offsets_of(out_len), Versions.of(calls)
    call = np.repeat(np.arange(n_calls), out_len)
    piece = versions.piece_of(call, positions(np.zeros_like(out_len), out_len))
    names = versions.names.take(pa.array(piece, mask=piece < 0))
    return Ragged(names, offsets).to_arrow()


WEIGHT_VERSION = "weight_version"
"""The payload with the weights that sampled each token; it does not need a column."""

# Suffix of the column with the position of a payload's first element.
_START = "_start"


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
        if name in ROWS.names:
            raise ArgumentError(
                f"payloads={payloads!r}: {name!r} is the name of a column of rows"
            )
        if names.count(name) > 1:
            raise ArgumentError(f"payloads={payloads!r}: {name!r} is named twice")
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
    if isinstance(column.type, pa.FixedShapeTensorType):
        type_ = pa.large_list(element)
        column = pa.chunked_array([_as_lists(c, element) for c in column.chunks], type_)
    return column


def _as_lists(tensors: pa.FixedShapeTensorArray, element: pa.DataType) -> pa.Array:
    """Tensors as lists along their first axis."""
    n = tensors.type.shape[0]
    flat = tensors.storage.flatten()
    for size in reversed(tensors.type.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    offsets = offsets_of(np.where(np.asarray(tensors.is_valid()), n, 0))
    null = np.asarray(tensors.is_null())
    return Ragged(flat.cast(element), offsets).to_arrow(null)


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
        return cls(
            name, lists.values, lists.offsets[:-1], first, lists.lengths, partial
        )

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
        return PathRanges(
            run.row[which],
            run.place[which],
            base[which],
            run.first[which],
            length[which],
        )


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


_ITEMS = ROWS.field("mm_items").type


def row_items(calls: Sessions, n_rows: int, shown: PathRanges) -> pa.Array:
    """The items that start in ranges of the rows, with their positions in the row."""
    lists = calls.table.column("mm_items").combine_chunks()
    items = lists.flatten()
    call = pc.list_parent_indices(lists).to_numpy().astype(np.int64)
    start, stop = (
        np.asarray(pc.struct_field(items, name), np.int64) for name in ("start", "stop")
    )
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
    return Ragged(structs, offsets_of(counts)).to_arrow(counts == 0, _ITEMS)

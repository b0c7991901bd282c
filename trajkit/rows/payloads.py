"""What rows carry of their calls per token: images, weights and payloads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_names
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.schema import MM_ITEM, ROW_VERSIONS, ROWS, TURNS, TURNS_DELTA
from trajkit.schema.engine import field_of
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
from trajkit.turns.sessions import Sessions

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


def _entries(calls: Sessions, name: str) -> tuple[pa.StructArray, Longs, Longs, Longs]:
    """The entries of a column of ranges: with the call, start and stop of each."""
    lists = Ragged.of(calls.table.column(name))
    start, stop = (
        np.asarray(field_of(lists.values, bound).fill_null(0), np.int64)
        for bound in ("start", "stop")
    )
    return lists.values, lists.owner, start, stop


def _version_of(calls: Sessions, call: Longs, token: Longs) -> tuple[pa.Array, Longs]:
    """The versions of all calls, and the one that sampled each token of outputs, or -1."""
    entries, of_call, start, stop = _entries(calls, "weight_versions")
    names = field_of(entries, "version")
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
    """The column ``weight_versions`` of rows."""
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
    null = ends[0].is_null()
    return pa.StructArray.from_arrays(ends, fields=list(ROW_VERSIONS), mask=null)


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
    fields = dict(
        zip(MM_ITEM.names, items.take(pa.array(taken)).flatten(), strict=True)
    )
    fields["start"] = pa.array((start[taken] + moved).astype(np.int32))
    fields["stop"] = pa.array((stop[taken] + moved).astype(np.int32))
    counts = np.bincount(row, minlength=n_rows)
    structs = pa.StructArray.from_arrays(list(fields.values()), fields=list(MM_ITEM))
    type_ = ROWS.field("mm_items").type
    return Ragged(structs, offsets_of(counts)).to_arrow(counts == 0, type_)


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
    if pa.types.is_null(type_):
        return type_
    if not is_list(type_):
        raise SchemaError(
            f"payload {name!r} is {type_}: expected a list with an element per token"
        )
    return type_.value_type


def _read(calls: Sessions, name: str) -> tuple[Ragged, Longs]:
    """The lists of a payload, and the length of each; -1: null."""
    element = _element(calls.table.schema, name)
    if pa.types.is_null(element):
        nothing = np.zeros(calls.n_calls + 1, np.int64)
        return Ragged(pa.nulls(0), nothing), np.full(calls.n_calls, -1)
    if name not in calls.table.column_names:
        # the weights that sampled each output token
        n = calls.calls["out_len"]
        call = np.repeat(np.arange(len(n)), n)
        names, version = _version_of(calls, call, positions(np.zeros_like(n), n))
        return Ragged(names.take(pa.array(version, mask=version < 0)), offsets_of(n)), n
    column = calls.table.column(name)
    lists = Ragged.of(column)
    return lists, np.where(column.is_valid(), lists.lengths, -1)


def with_payloads(
    batch: pa.RecordBatch,
    calls: Sessions,
    planned: Records,
    names: tuple[str, ...],
    ranges: Callable[[Records], PathRanges],
) -> pa.RecordBatch:
    """Add payload columns to rows; later ``ranges`` of recorded paths take precedence."""
    spans = Ragged.of(batch.column("spans"))
    start, stop, turn, first = (
        field_of(spans.values, name).to_numpy().astype(np.int64)
        for name in ("start", "stop", "turn_index", "output_start")
    )
    call = calls.named(planned["session"][spans.owner], turn)
    first = calls.calls["prompt_len"][call] + first
    sampled = PathRanges(spans.owner, start, call, first, stop - start)
    known = (sampled, ranges(planned))
    columns = [_payload(calls, planned, name, known) for name in names]
    schema = rows_schema(calls.table.schema, names)
    return pa.RecordBatch.from_arrays([*batch.columns, *columns], schema=schema)


def _payload(
    calls: Sessions, planned: Records, name: str, known: tuple[PathRanges, ...]
) -> pa.LargeListArray:
    """The payload of every token of every row, null if unknown."""
    lists, length = _read(calls, name)
    # what each call's list covers of its path, and whether an earlier call has what is
    # before it
    first, partial = _places(calls, name, length)
    covered, forest = first + lists.lengths, calls.forest
    offsets = offsets_of(planned["n_tokens"])
    at = np.full(int(offsets[-1]), -1)
    valid = np.asarray(lists.values.is_valid())

    def lay(run: PathRanges) -> None:
        """Assign elements to tokens that have none; the last of several ranges counts."""
        low = np.maximum(run.first, first[run.call])
        high = np.minimum(run.first + run.length, covered[run.call])
        n = np.maximum(high - low, 0)
        places = positions(offsets[run.row] + run.place + low - run.first, n)
        sources = positions(lists.offsets[run.call] + low - first[run.call], n)
        new = valid[sources] & (at[places] < 0)
        at[places[new]] = sources[new]

    def before(run: PathRanges) -> PathRanges:
        """The parts of ranges that a payload leaves to an earlier call, in that call."""
        base = forest.shared_with[run.call].astype(np.int64)
        end = np.minimum(run.first + run.length, first[run.call])
        n = np.minimum(end, forest.shared[run.call]) - run.first
        which = partial[run.call] & (base >= 0) & (n > 0)
        parts = (run.row, run.place, base, run.first, n)
        return PathRanges(*(part[which] for part in parts))

    for run in known:
        lay(run)
    for run in known:
        while len((run := before(run)).row):
            lay(run)
    taken = take_values(lists.values, pa.array(at, mask=at < 0), name)
    absent = np.full(len(planned), pa.types.is_null(lists.values.type))
    return Ragged(taken, offsets).to_arrow(absent)


def _places(calls: Sessions, name: str, length: Longs) -> tuple[Longs, Bools]:
    """The position of each list's first element, and whether elements come before it.

    A list without a start has an element per output id, or per prompt and output id.
    """
    n_prompt, n_path = calls.calls["prompt_len"], calls.path_len
    n_output = calls.calls["out_len"]
    whole, of_output = length == n_path, length == n_output
    first = np.where(whole, 0, np.where(of_output, n_prompt, -1))
    given = np.zeros(len(first), np.bool_)
    column_name = name + _START
    if column_name in calls.table.column_names:
        column = calls.table.column(column_name)
        if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
            raise SchemaError(f"{column_name} is {column.type}: expected integers")
        given = np.asarray(column.is_valid())
        starts = column.cast(pa.int64()).fill_null(0).to_numpy()
        bad = given & ((starts < 0) | (starts + length > n_path))
        for call in np.flatnonzero(bad)[:1].tolist():
            raise InvalidTurnsError(
                f"{calls.place(call)}: {column_name} is {starts[call]} and {name} has "
                f"{max(length[call], 0)} elements: they must fit into the "
                f"{n_path[call]} ids of prompt and output"
            )
        first = np.where(given, starts, first)
    for call in np.flatnonzero((length >= 0) & (first < 0))[:1].tolist():
        raise InvalidTurnsError(
            f"{calls.place(call)}: payload {name!r} has {length[call]} elements: "
            f"expected {n_output[call]} (output ids) or {n_path[call]} (prompt and output "
            "ids). For another range, give the position of its first element in the "
            f"column {column_name}: 0 for routed experts of all ids but the last"
        )
    return np.maximum(first, 0), given & (first > 0) & (length >= 0)

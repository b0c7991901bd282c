"""Payloads: per-token columns of turns that are carried into rows."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Self

import numpy as np
import pyarrow as pa

from trajkit._arguments import chosen_names
from trajkit._arrow.canonical import is_list, list_parts
from trajkit._arrow.ragged import Longs, Records, offsets_of, positions
from trajkit._arrow.take import take_values
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.pipeline.weight_versions import token_versions
from trajkit.schema import ROWS, TURNS
from trajkit.turns.sessions import Forest, Sessions
from trajkit.turns.trainability import Bools

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
        others = [other for other in turns.names if other not in TURNS.names]
        close = get_close_matches(name, others, 1)
        if close:
            raise SchemaError(
                f"payload {name!r} is not a column of turns: did you mean {close[0]!r}?"
            )
        return pa.null()
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


def _column(calls: Sessions, name: str) -> list[pa.Array]:
    """The chunks of a payload; `WEIGHT_VERSION` is made from weight_versions."""
    if name in calls.table.column_names:
        chunks: list[pa.Array] = calls.table.column(name).chunks
        return chunks
    return [token_versions(calls)]


def _as_lists(tensors: pa.FixedShapeTensorArray, element: pa.DataType) -> pa.Array:
    """Tensors as lists along their first axis."""
    n = tensors.type.shape[0]
    flat = tensors.storage.flatten()
    for size in reversed(tensors.type.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    offsets = offsets_of(np.where(np.asarray(tensors.is_valid()), n, 0))
    mask = tensors.is_null() if tensors.null_count else None
    return pa.LargeListArray.from_arrays(
        pa.array(offsets), flat.cast(element), mask=mask
    )


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
        element = _element(calls.table.schema, name)
        n_calls = len(calls.calls)
        starts, lengths = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        values = [pa.array([], element)]
        known = 0
        chunks: list[pa.Array] = []
        if pa.types.is_null(element):
            starts, lengths = [np.zeros(n_calls, np.int64)], [np.full(n_calls, -1)]
        else:
            chunks = _column(calls, name)
        for chunk in chunks:
            if isinstance(chunk.type, pa.FixedShapeTensorType):
                chunk = _as_lists(chunk, element)
            offsets, flat = list_parts(chunk)
            ends = offsets.to_numpy()
            starts.append(known + ends[:-1])
            lengths.append(np.where(np.asarray(chunk.is_valid()), np.diff(ends), -1))
            values.append(flat)
            known += len(flat)
        length = np.concatenate(lengths)
        first, partial = _places(calls, name, length)
        return cls(
            name,
            pa.concat_arrays(values),
            np.concatenate(starts),
            first,
            np.maximum(length, 0),
            partial,
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
        return pa.LargeListArray.from_arrays(
            pa.array(offsets), taken, mask=pa.array(absent)
        )

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
    """The position of each list's first element, and whether the list is partial.

    If a length is ambiguous, the other lists of the session decide.
    """
    prompt, held = calls.calls["prompt_len"], calls.path_len
    own = calls.calls["own_start"]
    session = calls.session

    def style(which: Bools) -> Bools:
        found: Bools = (np.bincount(session, which, len(calls)) > 0)[session]
        return found

    output, whole = length == calls.calls["out_len"], length == held
    short = (length == held - 1) & (length >= 0)
    in_delta = (own > 0) & (length >= 0)
    new, new_short = (in_delta & (length == n) for n in (held - own, held - own - 1))
    plain = output | whole | short
    delta = style((new | new_short) & ~plain)
    lacks_last = style((short & ~whole & ~output) | (new_short & ~new & ~plain))
    if name == "routed_experts":  # never of the output ids alone if it may be of more
        delta, lacks_last = delta | new | new_short, lacks_last | short | new_short
    meanings = [
        whole,
        delta & lacks_last & new_short,
        delta & (new | (new_short & ~output)),
        lacks_last & short,
        output,
        short,
    ]
    zero = np.zeros_like(own)
    first = np.select(meanings, [zero, own, own, zero, prompt, zero], -1)
    partial = ~whole & delta & (new | new_short) & (first == own)
    first, partial = _given_starts(calls, name, length, first, partial)
    bad = np.flatnonzero((length >= 0) & (first < 0))
    if len(bad):
        call = int(bad[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: payload {name!r} has {length[call]} elements: "
            f"expected {calls.calls['out_len'][call]} (output ids), {held[call]} "
            f"(prompt and output ids), or {held[call] - 1}. For another range, give the "
            f"position of its first element in the column {name}{_START}"
        )
    return np.maximum(first, 0), partial & (length >= 0)


def _given_starts(
    calls: Sessions, name: str, length: Longs, first: Longs, partial: Bools
) -> tuple[Longs, Bools]:
    """The result of `_places`, with the starts that the turns give."""
    if name + _START not in calls.table.column_names:
        return first, partial
    column = calls.table.column(name + _START)
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise SchemaError(f"{name}{_START} is {column.type}: expected integers")
    given = column.is_valid().to_numpy()
    starts = column.cast(pa.int64()).fill_null(0).to_numpy()
    bad = np.flatnonzero(given & ((starts < 0) | (starts + length > calls.path_len)))
    if len(bad):
        call = int(bad[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: {name}{_START} is {starts[call]} and {name} has "
            f"{max(length[call], 0)} elements: they must fit into the "
            f"{calls.path_len[call]} ids of prompt and output"
        )
    return np.where(given, starts, first), np.where(given, starts > 0, partial)

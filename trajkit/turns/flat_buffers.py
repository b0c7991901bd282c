"""Turns and rows as flat buffers, for stages that compare one with the other."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import Rows
from trajkit.turns.calls import Calls, Ints, Longs
from trajkit.turns.turn_rules import Bools, flat_chunks, raw_floats

Array: TypeAlias = npt.NDArray[Any]
Index: TypeAlias = int | np.integer[Any]
Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Runs:
    """Lists of numbers, end to end."""

    # shape (n_values,)
    values: Array
    # shape (n_runs + 1,): run k is values[offsets[k]:offsets[k + 1]]
    offsets: Longs

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, k: Index) -> Array:
        return self.values[self.offsets[k] : self.offsets[k + 1]]

    @property
    def lengths(self) -> Longs:
        """Shape (n_runs,)."""
        return np.diff(self.offsets)

    @property
    def owner(self) -> Longs:
        """The run of each value, shape (n_values,)."""
        return np.repeat(np.arange(len(self)), self.lengths)


def offsets_of(lengths: Longs) -> Longs:
    """Where runs of these lengths start and stop, shape (n_runs + 1,)."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions(starts: Longs, lengths: Longs) -> Longs:
    """``start, start + 1, ...`` of every run, end to end.

    Examples
    --------
    >>> positions(np.array([5, 0]), np.array([2, 3]))
    array([5, 6, 0, 1, 2])
    """
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What the calls consumed and sampled."""

    calls: Calls
    # of each call, int32
    prompts: Sequence[Ints]
    outputs: Runs
    # one per sampled token, 0.0 where the engine gave none
    logprobs: Floats
    # where it gave one
    given: Bools
    # false where output_mask is
    unmasked: Bools

    def shared(self, ids: Ints, call: int) -> int:
        """Tokens that ``ids`` share at their start with a call's prompt and output."""
        prompt = self.prompts[call]
        n = _core.lcp(ids, prompt)
        if n < len(prompt):
            return n
        return n + _core.lcp(ids[n:], self.outputs[call])

    def held(self, call: Index) -> int:
        """Tokens of a call's prompt and output."""
        record = self.calls.calls[call]
        return int(record["prompt_len"]) + int(record["out_len"])

    def calls_of(self, session: int) -> range:
        """The calls of a session."""
        offsets = self.calls.session_offsets
        return range(int(offsets[session]), int(offsets[session + 1]))


def sessions_of(rows: pa.Table, calls: Calls) -> Rows:
    """The session of each row, -1 where it has no turns; shape (n_rows,)."""
    found = pc.index_in(rows.column("session_id"), calls.session_ids)
    return np.asarray(found.fill_null(-1), np.int64)


def flat_turns(calls: Calls) -> Sampled:
    """The calls' ids and logprobs; only prompts in delta form are copied."""
    table = calls.table
    outputs = ids_of(table.column("output_ids"))
    logprobs, given = _logprobs(calls, outputs)
    return Sampled(
        calls, _prompts(calls), outputs, logprobs, given, _unmasked(calls, outputs)
    )


def lacking_logprobs(calls: Calls) -> Longs:
    """Tokens of each call that ``output_mask`` lets train and that have no logprob."""
    outputs = ids_of(calls.table.column("output_ids"))
    lacking = _unmasked(calls, outputs) & ~_logprobs(calls, outputs)[1]
    return np.diff(np.append(0, np.cumsum(lacking))[outputs.offsets])


def _logprobs(calls: Calls, outputs: Runs) -> tuple[Floats, Bools]:
    """The logprob of each sampled token, 0.0 where there is none, and where there is."""
    logprobs = np.zeros(len(outputs.values), np.float32)
    given = np.zeros(len(outputs.values), np.bool_)
    first = 0
    for chunk in calls.table.column("output_logprobs").chunks:
        lengths = np.asarray(pc.list_value_length(chunk).fill_null(0))
        at = positions(outputs.offsets[first : first + len(chunk)], lengths)
        values = chunk.flatten()
        logprobs[at] = raw_floats(values)
        given[at] = np.asarray(values.is_valid())
        first += len(chunk)
    return logprobs, given


def _unmasked(calls: Calls, outputs: Runs) -> Bools:
    """Sampled tokens that ``output_mask`` lets train, flat as the outputs are."""
    may = np.ones(len(outputs.values), np.bool_)
    first = 0
    for chunk in calls.table.column("output_mask").chunks:
        lengths = np.asarray(pc.list_value_length(chunk).fill_null(0))
        at = positions(outputs.offsets[first : first + len(chunk)], lengths)
        may[at] = np.asarray(chunk.flatten())
        first += len(chunk)
    return may


def _prompts(calls: Calls) -> list[Ints]:
    if "suffix_ids" not in calls.table.column_names:
        return list(_views(calls.table.column("prompt_ids")))
    outputs = list(_views(calls.table.column("output_ids")))
    prompts: list[Ints] = []
    records = calls.calls
    for call, own in enumerate(_views(calls.table.column("suffix_ids"))):
        base, shared = int(records["base"][call]), int(records["own_start"][call])
        held = own[:0]
        if base >= 0:
            held = np.concatenate([prompts[base], outputs[base]])[:shared]
        prompts.append(np.concatenate([held, own]))
    return prompts


def _views(column: pa.ChunkedArray) -> Sequence[Ints]:
    views: list[Ints] = []
    for _, ends, values in flat_chunks(column):
        views.extend(np.split(values.to_numpy(), ends[:-1]) if len(ends) else [])
    return views


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Rows end to end. What is per token is as long as the ids, whatever was given."""

    table: pa.Table
    ids: Runs
    # false where the mask is null or too short
    mask: Bools
    # where it is neither
    has_mask: Bools
    # 0.0 where null or too short
    logprobs: Floats
    given: Bools
    # elements of each row's lists, as they are
    n_mask: Longs
    n_logprobs: Longs

    def text(self, name: str, row: Index) -> str | None:
        """A value of a column of strings; None where there is no column."""
        value = self._value(name, row)
        return None if value is None else str(value)

    def number(self, name: str, row: Index) -> int | None:
        """A value of a column of integers; None where there is no column."""
        value = self._value(name, row)
        return value if isinstance(value, int) else None

    def _value(self, name: str, row: Index) -> object:
        if name not in self.table.column_names:
            return None
        value: object = self.table.column(name)[int(row)].as_py()
        return value


def flat_rows(table: pa.Table, *, align_right: bool = False) -> FlatRows:
    """The per-token columns of rows.

    Parameters
    ----------
    table : Table
        With input_ids and loss_mask, and logprobs where there are any.
    align_right : bool
        Lists that are shorter than the row stand at its end, not at its start.
    """
    ids = ids_of(table.column("input_ids"))
    bits, valid_bits, n_mask = _per_token(table, "loss_mask", ids, align_right)
    values, given, n_logprobs = _per_token(table, "logprobs", ids, align_right)
    return FlatRows(
        table,
        ids,
        bits.astype(np.bool_),
        valid_bits,
        values.astype(np.float32),
        given,
        n_mask,
        n_logprobs,
    )


_EMPTY = np.empty(0, np.int64)


def ids_of(column: pa.ChunkedArray) -> Runs:
    """A column of ids; nulls stand as -1."""
    lengths, parts = [_EMPTY], []
    for chunk in column.chunks:
        lengths.append(np.asarray(pc.list_value_length(chunk).fill_null(0), np.int64))
        parts.append(chunk.flatten())
    values = pa.concat_arrays([pa.array([], pa.int32()), *parts])
    values = values.fill_null(-1) if values.null_count else values
    return Runs(values.to_numpy(), offsets_of(np.concatenate(lengths)))


def _per_token(
    table: pa.Table, name: str, ids: Runs, align_right: bool
) -> tuple[Array, Bools, Longs]:
    """Values, validity and lengths of a column, laid out as the ids are."""
    n_tokens = ids.lengths
    if name not in table.column_names:
        nothing = np.zeros(len(ids.values), np.float32)
        return nothing, nothing.astype(np.bool_), np.zeros(len(n_tokens), np.int64)
    column = table.column(name)
    n = np.asarray(pc.list_value_length(column).fill_null(0), np.int64)
    type_ = table.schema.field(name).type.value_type
    parts = [chunk.flatten() for chunk in column.chunks]
    given = pa.concat_arrays([pa.array([], type_), *parts])
    valid = np.asarray(given.is_valid())
    numbers = np.asarray(given.fill_null(False if pa.types.is_boolean(type_) else 0))
    if (n == n_tokens).all():
        return numbers, valid, n
    kept = np.minimum(n, n_tokens)
    starts = ids.offsets[:-1] + (n_tokens - kept if align_right else 0)
    at, source = positions(starts, kept), positions(np.cumsum(n) - n, kept)
    laid_out = np.zeros(len(ids.values), numbers.dtype)
    there = np.zeros(len(ids.values), np.bool_)
    laid_out[at], there[at] = numbers[source], valid[source]
    return laid_out, there, n


@dataclass(frozen=True, slots=True)
class Pieces:
    """Stretches of rows that say which turn's output they are; shape (n_pieces,)."""

    row: Longs
    start: Longs
    stop: Longs
    # the call whose output it is, -1 where there is none
    call: Longs
    out_start: Longs
    out_stop: Longs
    kind: npt.NDArray[np.object_]
    # which piece of its row
    index: Longs
    # as given
    turn_index: Longs
    # one of the fields is null
    broken: Bools

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: Rows) -> Self:
        """The pieces at these positions."""
        return type(self)(*(getattr(self, field.name)[which] for field in fields(self)))

    def tokens(self, ids: Runs) -> Longs:
        """Positions in ``ids.values`` of all tokens of all pieces."""
        return positions(ids.offsets[self.row] + self.start, self.stop - self.start)

    def sampled(self, turns: Sampled) -> Longs:
        """Positions in ``turns.outputs.values`` of all tokens of their ranges."""
        starts = turns.outputs.offsets[self.call] + self.out_start
        return positions(starts, self.out_stop - self.out_start)

    def in_context(self, ids: Runs, turns: Sampled) -> Longs:
        """Leading tokens of each piece that stand after what they were sampled after.

        A token counts if the row up to and with it is the turn's prompt and output up
        to and with it.
        """
        n_prompt = turns.calls.calls["prompt_len"][self.call]
        n = np.zeros(len(self), np.int64)
        for k in np.flatnonzero(self.start == n_prompt + self.out_start):
            row = ids[self.row[k]][: self.stop[k]]
            n[k] = turns.shared(row, int(self.call[k])) - self.start[k]
        return np.maximum(n, 0)


def pieces_of(table: pa.Table, turns: Sampled, sessions: Rows) -> Pieces:
    """The spans of rows, whose sessions are given as `sessions_of` gives them."""
    flat = [(_EMPTY, pa.array([], table.schema.field("spans").type.value_type))]
    for first, ends, values in flat_chunks(table.column("spans")):
        n = np.diff(ends, prepend=0)
        flat.append((first + np.repeat(np.arange(len(ends)), n), values))
    row = np.concatenate([rows for rows, _ in flat])
    values = pa.concat_arrays([spans for _, spans in flat])
    broken = np.asarray(values.is_null())

    def column(name: str) -> Longs:
        nonlocal broken
        numbers = pc.struct_field(values, name)
        broken = broken | np.asarray(numbers.is_null())
        return np.asarray(numbers.fill_null(-1), np.int64)

    names = ("start", "stop", "turn_index", "output_start", "output_stop")
    start, stop, turn_index, out_start, out_stop = map(column, names)
    kind = pc.struct_field(values, "kind").cast(pa.string())
    broken = broken | np.asarray(kind.is_null())
    first_of_row = np.searchsorted(row, np.arange(table.num_rows))
    return Pieces(
        row,
        start,
        stop,
        _named(turns.calls, sessions[row], turn_index),
        out_start,
        out_stop,
        kind.to_numpy(zero_copy_only=False),
        np.arange(len(row)) - first_of_row[row],
        turn_index,
        broken,
    )


def _named(calls: Calls, session: Longs, turn_index: Longs) -> Longs:
    """The call of each turn_index in each session, -1 where there is none."""
    have = (calls.session_of().astype(np.int64) << 32) + calls.turn_index
    seek = (session << 32) + turn_index
    at = np.minimum(np.searchsorted(have, seek), max(len(have) - 1, 0))
    found = (session >= 0) & (turn_index >= 0)
    if len(have):
        found &= have[at] == seek
    return np.where(found, at, -1)

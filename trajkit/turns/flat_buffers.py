"""Turns and rows as flat buffers, for stages that compare the two."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.schema.engine import Bools, flat_chunks, raw_floats
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import Rows
from trajkit.tables.ragged import Array, Index, Ints, Longs, Ragged, positions
from trajkit.turns.sessions import Sessions

Floats: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Prompts and outputs of calls."""

    calls: Sessions
    # by call
    prompts: Sequence[Ints]
    outputs: Ragged
    # one per sampled token, 0.0 if the engine gave none
    logprobs: Floats
    # whether it gave one
    given: Bools
    # false if output_mask is
    unmasked: Bools

    def shared(self, ids: Ints, call: int) -> int:
        """Length of the common prefix of ``ids`` and a call's path."""
        prompt = self.prompts[call]
        n = _core.lcp(ids, prompt)
        if n < len(prompt):
            return n
        return n + _core.lcp(ids[n:], self.outputs[call])

    def path_len(self, call: Index) -> int:
        """Length of a call's path."""
        record = self.calls.calls[call]
        return int(record["prompt_len"]) + int(record["out_len"])

    def calls_of(self, session: int) -> range:
        """The calls of a session."""
        offsets = self.calls.offsets
        return range(int(offsets[session]), int(offsets[session + 1]))


def sessions_of(rows: pa.Table, calls: Sessions) -> Rows:
    """The session of each row, -1 if it has no turns; shape (n_rows,)."""
    found = pc.index_in(rows.column("session_id"), calls.ids)
    return np.asarray(found.fill_null(-1), np.int64)


def flat_turns(calls: Sessions, *, prompts: bool = True) -> TurnTokens:
    """Ids and logprobs of calls; only prompts in delta form are copied.

    Without ``prompts`` there are none, which saves that copy.
    """
    table = calls.table
    outputs = Ragged.of(table.column("output_ids"), -1)
    logprobs, given = _logprobs(calls, outputs)
    shown = _prompts(calls) if prompts else []
    return TurnTokens(calls, shown, outputs, logprobs, given, _unmasked(calls, outputs))


def lacking_logprobs(calls: Sessions) -> Longs:
    """Tokens of each call without a logprob that ``output_mask`` does not exclude."""
    outputs = Ragged.of(calls.table.column("output_ids"), -1)
    lacking = _unmasked(calls, outputs) & ~_logprobs(calls, outputs)[1]
    return np.diff(np.append(0, np.cumsum(lacking))[outputs.offsets])


def _logprobs(calls: Sessions, outputs: Ragged) -> tuple[Floats, Bools]:
    """The logprob of each sampled token (0.0 if missing), and whether it is given."""
    logprobs = np.zeros(len(outputs.values), np.float32)
    given = np.zeros(len(outputs.values), np.bool_)
    for at, values in _per_output_id(calls, "output_logprobs", outputs):
        logprobs[at] = raw_floats(values)
        given[at] = np.asarray(values.is_valid())
    return logprobs, given


def _unmasked(calls: Sessions, outputs: Ragged) -> Bools:
    """Whether ``output_mask`` allows training, one per sampled token."""
    may = np.ones(len(outputs.values), np.bool_)
    for at, values in _per_output_id(calls, "output_mask", outputs):
        may[at] = np.asarray(values)
    return may


def _per_output_id(
    calls: Sessions, name: str, outputs: Ragged
) -> Iterator[tuple[Longs, pa.Array]]:
    """The values of each chunk of a column, and their positions in ``outputs.values``."""
    for first, ends, values in flat_chunks(calls.table.column(name)):
        starts = outputs.offsets[first : first + len(ends)]
        yield positions(starts, np.diff(ends, prepend=0)), values


def _prompts(calls: Sessions) -> list[Ints]:
    outputs = list(_views(calls.table.column("output_ids")))
    prompts: list[Ints] = []
    bases, starts = (calls.calls[name].tolist() for name in ("base", "own_start"))
    for own, base, start in zip(_views(calls.stored_ids), bases, starts, strict=True):
        if base >= 0:
            before = np.concatenate([prompts[base], outputs[base]])[:start]
            own = np.concatenate([before, own])
        prompts.append(own)
    return prompts


def _views(column: pa.ChunkedArray) -> Sequence[Ints]:
    views: list[Ints] = []
    for _, ends, values in flat_chunks(column):
        views.extend(np.split(values.to_numpy(), ends[:-1]) if len(ends) else [])
    return views


@dataclass(frozen=True, slots=True)
class FlatRows:
    """Concatenated rows. Every per-token array has the length of the ids."""

    table: pa.Table
    ids: Ragged
    # false if the mask is null or too short
    mask: Bools
    # true unless the mask is null or too short
    has_mask: Bools
    # 0.0 if null or too short
    logprobs: Floats
    given: Bools
    # original lengths of each row's lists
    n_mask: Longs
    n_logprobs: Longs

    def text(self, name: str, row: Index) -> str | None:
        """A value of a column of strings; None without the column."""
        value = self._value(name, row)
        return None if value is None else str(value)

    def number(self, name: str, row: Index) -> int | None:
        """A value of a column of integers; None without the column."""
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
        With input_ids and loss_mask, and optionally logprobs.
    align_right : bool
        Align lists that are shorter than the row with its end, not its start.
    """
    ids = Ragged.of(table.column("input_ids"), -1)
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


def _per_token(
    table: pa.Table, name: str, ids: Ragged, align_right: bool
) -> tuple[Array, Bools, Longs]:
    """Values, validity and lengths of a column, one value per id."""
    n_tokens = ids.lengths
    if name not in table.column_names:
        nothing = np.zeros(len(ids.values), np.float32)
        return nothing, nothing.astype(np.bool_), np.zeros(len(n_tokens), np.int64)
    lists = Ragged.of(table.column(name))
    n, given = lists.lengths, lists.values
    valid = np.asarray(given.is_valid())
    numbers = np.asarray(given.fill_null(False if given.type == pa.bool_() else 0))
    if (n == n_tokens).all():
        return numbers, valid, n
    kept = np.minimum(n, n_tokens)
    starts = ids.offsets[:-1] + (n_tokens - kept if align_right else 0)
    at, source = positions(starts, kept), positions(lists.offsets[:-1], kept)
    placed = np.zeros(len(ids.values), numbers.dtype)
    there = np.zeros(len(ids.values), np.bool_)
    placed[at], there[at] = numbers[source], valid[source]
    return placed, there, n


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of rows as arrays of shape (n_spans,)."""

    row: Longs
    start: Longs
    stop: Longs
    # the call whose output it is, or -1
    call: Longs
    out_start: Longs
    out_stop: Longs
    kind: npt.NDArray[np.object_]
    # its index in the row
    index: Longs
    # as given
    turn_index: Longs
    # whether one of the fields is null
    broken: Bools

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: Rows) -> Self:
        """The spans at these positions."""
        return type(self)(*(getattr(self, field.name)[which] for field in fields(self)))

    def tokens(self, ids: Ragged) -> Longs:
        """Positions in ``ids.values`` of all tokens of all spans."""
        return positions(ids.offsets[self.row] + self.start, self.stop - self.start)

    def sampled(self, turns: TurnTokens) -> Longs:
        """Positions in ``turns.outputs.values`` of all tokens of their ranges."""
        starts = turns.outputs.offsets[self.call] + self.out_start
        return positions(starts, self.out_stop - self.out_start)

    def in_context(self, ids: Ragged, turns: TurnTokens) -> Longs:
        """Number of leading tokens of each span that have the context they were sampled in.

        A token has it if the row up to this token is a prefix of the turn's path.
        """
        n_prompt = turns.calls.calls["prompt_len"][self.call]
        n = np.zeros(len(self), np.int64)
        for k in np.flatnonzero(self.start == n_prompt + self.out_start):
            row = ids[self.row[k]][: self.stop[k]]
            n[k] = turns.shared(row, int(self.call[k])) - self.start[k]
        return np.maximum(n, 0)


def spans_of(table: pa.Table, turns: TurnTokens, sessions: Rows) -> Spans:
    """The spans of rows; ``sessions`` as `sessions_of` returns them."""
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
    return Spans(
        row,
        start,
        stop,
        turns.calls.named(sessions[row], turn_index),
        out_start,
        out_stop,
        kind.to_numpy(zero_copy_only=False),
        np.arange(len(row)) - first_of_row[row],
        turn_index,
        broken,
    )

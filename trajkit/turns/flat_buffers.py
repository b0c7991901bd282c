"""Turns and rows as flat buffers, and which sampled tokens may be trained."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import STOPS
from trajkit.errors import InvalidTurnsError
from trajkit.schema.engine import SPAN_NUMBERS, field_of, fields_of, lacks
from trajkit.tables import lazy_compute as pc
from trajkit.tables.ragged import (
    Array,
    Bools,
    Floats,
    Index,
    Ints,
    Longs,
    Ragged,
    positions,
)
from trajkit.turns.sessions import Sessions, unshared


@dataclass(frozen=True, slots=True)
class TurnTokens:
    """Prompts and outputs of calls."""

    calls: Sessions
    # by call
    prompts: Sequence[Ints]
    outputs: Ragged
    # one per sampled token, 0.0 if the engine gave none
    logprobs: Floats
    has_logprob: Bools
    # false if output_mask is
    unmasked: Bools

    def shared(self, ids: Ints, call: int) -> int:
        """Length of the common prefix of ``ids`` and a call's path."""
        prompt = self.prompts[call]
        n = _core.lcp(ids, prompt)
        return n if n < len(prompt) else n + _core.lcp(ids[n:], self.outputs[call])

    def path(self, call: Index) -> Ints:
        return np.append(self.prompts[int(call)], self.outputs[call])

    def path_len(self, call: Index) -> int:
        record = self.calls.calls[call]
        return int(record["prompt_len"] + record["out_len"])

    def calls_of(self, session: int) -> range:
        return range(*self.calls.offsets[session : session + 2].tolist())


def sessions_of(rows: pa.Table, calls: Sessions) -> Longs:
    """The session of each row, -1 if it has no turns; shape (n_rows,)."""
    found = pc.index_in(rows.column("session_id"), calls.ids)
    return np.asarray(found.fill_null(-1), np.int64)


def flat_turns(calls: Sessions, *, prompts: bool = True) -> TurnTokens:
    """Ids and logprobs of calls; only prompts in delta form are copied."""
    outputs = Ragged.of(calls.table.column("output_ids"), -1)
    logprobs, given, _ = _per_token(calls.table, "output_logprobs", outputs)
    masks, masked, _ = _per_token(calls.table, "output_mask", outputs)
    bases, starts = calls.calls["base"], calls.calls["own_start"]
    shown: list[Ints] = []
    if prompts:
        shown = unshared(Ragged.of(calls.stored_ids, -1), outputs, bases, starts)
    unmasked = ~masked | masks.astype(np.bool_)
    return TurnTokens(calls, shown, outputs, logprobs, given, unmasked)


def aborted_calls(calls: Sessions) -> Bools:
    return np.asarray(calls.calls["stop"] == STOPS["abort"])


def without_aborted(calls: Sessions) -> tuple[Sessions, Longs]:
    """Mark aborted calls as context only; with the tokens of each session that this
    excludes.
    """
    now = aborted_calls(calls) & (calls.calls["trainable"] != 0)
    n_tokens = np.bincount(calls.session[now], calls.calls["out_len"][now], len(calls))
    return calls.untrained(now), n_tokens.astype(np.int64)


def check_logprobs(calls: Sessions) -> None:
    """Raise InvalidTurnsError if a token that may be trained lacks a logprob."""
    turns = flat_turns(calls, prompts=False)
    lacking = np.append(0, np.cumsum(turns.unmasked & ~turns.has_logprob))
    missing = np.diff(lacking[turns.outputs.offsets])
    bad = np.flatnonzero(missing * (calls.calls["trainable"] != 0)).tolist()
    for call in bad[:1]:
        more = f" (and {len(bad) - 1} more turns)" if len(bad) > 1 else ""
        raise InvalidTurnsError(
            f"{calls.place(call)}: {missing[call]} of {calls.calls['out_len'][call]} "
            f"sampled tokens have no logprob{more}, which missing_logprobs='raise' "
            "refuses"
        )


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
    has_logprob: Bools
    # original lengths of each row's lists
    n_mask: Longs
    n_logprobs: Longs

    def value(self, name: str, row: Index) -> Any:
        """A value of a column; None without the column."""
        known = name in self.table.column_names
        return self.table.column(name)[int(row)].as_py() if known else None


def flat_rows(table: pa.Table) -> FlatRows:
    """The per-token columns of rows: input_ids, loss_mask and, optionally, logprobs."""
    ids = Ragged.of(table.column("input_ids"), -1)
    bits, has_mask, n_mask = _per_token(table, "loss_mask", ids)
    values, given, n_logprobs = _per_token(table, "logprobs", ids)
    mask, logprobs = bits.astype(np.bool_), values.astype(np.float32)
    return FlatRows(table, ids, mask, has_mask, logprobs, given, n_mask, n_logprobs)


def _per_token(table: pa.Table, name: str, ids: Ragged) -> tuple[Array, Bools, Longs]:
    """Values, validity and lengths of a column, one value per id."""
    n_tokens, n_ids = ids.lengths, len(ids.values)
    if name not in table.column_names:
        nothing = np.zeros(n_ids, np.float32)
        return nothing, nothing.astype(np.bool_), np.zeros(len(n_tokens), np.int64)
    lists = Ragged.of(table.column(name))
    n, given = lists.lengths, lists.values
    valid = np.asarray(given.is_valid())
    numbers = np.asarray(given.fill_null(False if given.type == pa.bool_() else 0))
    if (n == n_tokens).all():
        return numbers, valid, n
    kept = np.minimum(n, n_tokens)
    at, source = (positions(one.offsets[:-1], kept) for one in (ids, lists))
    placed, there = np.zeros(n_ids, numbers.dtype), np.zeros(n_ids, np.bool_)
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
    kind: Array
    # its index in the row
    index: Longs
    # as given
    turn_index: Longs
    # whether one of the fields is null
    broken: Bools

    def __len__(self) -> int:
        return len(self.row)

    def take(self, which: Longs) -> Self:
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


def spans_of(table: pa.Table, turns: TurnTokens, sessions: Longs) -> Spans:
    """The spans of rows; ``sessions`` as `sessions_of` returns them."""
    lists = Ragged.of(table.column("spans"))
    row = lists.owner
    start, stop, turn_index, out_start, out_stop = fields_of(
        lists.values, *SPAN_NUMBERS
    )
    return Spans(
        row,
        start,
        stop,
        turns.calls.named(sessions[row], turn_index),
        out_start,
        out_stop,
        field_of(lists.values, "kind").cast(pa.string()).to_numpy(zero_copy_only=False),
        np.arange(len(row)) - lists.offsets[row],
        turn_index,
        lacks(lists.values, *SPAN_NUMBERS, "kind"),
    )

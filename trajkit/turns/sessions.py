"""Sessions in memory, as every stage has them.

`Sessions.of` reads a ``turns`` table in full or in delta form. No prompt is copied: a call
is a record with the addresses of what it stores itself, in the table's own buffers, and the
earlier call whose path supplies what comes before. Behind it, no kernel and no stage asks
which form the table had.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._kernel_names import CALL, REQUEST, members
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema.engine import checks_of
from trajkit.tables import lazy_compute as pc
from trajkit.tables import limits
from trajkit.tables.canonical import (
    canonical,
    has_old_keys,
    in_type,
    place,
    turns_schema,
)
from trajkit.tables.columns import without_views
from trajkit.tables.ragged import (
    Array,
    Bools,
    Ints,
    Keys,
    Longs,
    Ragged,
    Records,
    runs_of,
)
from trajkit.tables.threads import once

# Reading a chunk costs about 0.1 ms. Copying a chunk below this size costs less.
_MANY_CHUNKS, _CHUNK_BYTES = 16, 1 << 20

# Only the delta form has the last columns that the kernel reads (arrow.pxi); others
# have other names in it.
_DELTA_COLUMNS = ("base_turn", "shared_length", "shared_messages")
_COLUMNS = tuple(n for n in members("COL_") if n not in _DELTA_COLUMNS)
_DELTA_NAMES = {"prompt_ids": "suffix_ids", "messages": "suffix_messages"}


@dataclass(frozen=True, slots=True)
class Forest:
    """A radix tree over each session's paths (prompt ++ output)."""

    # shape (n_calls,): leading tokens shared with an earlier path of the session
    shared: Longs
    # shape (n_calls,): a call that has them, or -1
    shared_with: Ints
    # shape (n_nodes,): ranges of paths that no call leaves or ends inside
    nodes: Records
    # shape (n_calls,): the node at whose stop the call's path ends
    ends: Ints
    # the forest and the calls it was grown from, as kernels take them
    paths: _core.CallForest

    @classmethod
    def of(cls, calls: Records, offsets: Longs) -> Self:
        """The forest of records of dtype CALL, with the offsets of their sessions."""
        paths = _core.CallForest(calls, offsets)
        return cls(*paths.arrays, paths)

    def ids(self, call: int, start: int, stop: int) -> Ints:
        """A copy of a range of a call's path."""
        ids = np.empty(stop - start, np.int32)
        bounds = np.array([0, stop - start])
        _core.copy_ranges(self.paths, np.array([call]), np.array([start]), bounds, ids)
        return ids


@dataclass(frozen=True)
class Sessions:
    """The calls of complete sessions, in order."""

    # in canonical form; the records have addresses in its buffers
    table: pa.Table
    # shape (n_sessions,)
    ids: pa.Array
    # shape (n_sessions + 1,): the calls of session s are offsets[s]:offsets[s + 1]
    offsets: Longs
    # shape (n_calls,)
    turn_index: Ints
    # dtype CALL, shape (n_calls,)
    calls: Records
    # dtype REQUEST, shape (n_calls,)
    requests: Records
    # keys that are equal if the messages are (trajkit.turns.messages), unless those
    # of the table are
    keys: Longs | None = None

    @once
    def session(self) -> Ints:
        """The number of each call's session, shape (n_calls,)."""
        return np.repeat(np.arange(len(self), dtype=np.int32), np.diff(self.offsets))

    @classmethod
    def of(cls, turns: pa.Table) -> Self:
        """The sessions of a ``turns`` table.

        Values are not checked (`trajkit.validate` does); prompts and outputs may be empty.
        Raises as `canonical`, and InvalidTurnsError if the rows of a session are not
        contiguous, turn_index does not ascend, logprobs and outputs have different lengths,
        a base is not an earlier turn of its session, or an id is null.
        """
        table = with_current_keys(canonical(turns, turns_schema(turns.column_names)))
        chunks = table.column("output_ids").num_chunks
        if chunks > _MANY_CHUNKS and table.nbytes < chunks * _CHUNK_BYTES:
            table = table.combine_chunks()  # a log has one chunk per turn
        n_calls = table.num_rows
        ids, starts = _session_ids(table)
        offsets = np.append(starts, n_calls)
        turn_index = np.empty(n_calls, np.int32)
        calls, requests = np.zeros(n_calls, CALL), np.zeros(n_calls, REQUEST)
        names = [*_COLUMNS]
        if "suffix_ids" in table.column_names:
            names = [_DELTA_NAMES.get(name, name) for name in _COLUMNS]
            names += _DELTA_COLUMNS
        columns = table.select(names).__arrow_c_stream__()
        bad = _core.read_columns(columns, offsets, turn_index, calls, requests)
        if bad >= 0:
            raise refusal(table, bad)
        return cls(table, ids, offsets, turn_index, calls, requests)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_calls(self) -> int:
        return len(self.calls)

    @once
    def forest(self) -> Forest:
        """The forest of the calls' paths, one tree per session."""
        return Forest.of(self.calls, self.offsets)

    @property
    def stored_messages(self) -> pa.ChunkedArray:
        return self._stored("messages")

    @property
    def stored_ids(self) -> pa.ChunkedArray:
        return self._stored("prompt_ids")

    def _stored(self, name: str) -> pa.ChunkedArray:
        names = self.table.column_names
        return self.table.column(_DELTA_NAMES[name] if "suffix_ids" in names else name)

    @property
    def path_len(self) -> Longs:
        path_len: Longs = self.calls["prompt_len"] + self.calls["out_len"]
        return path_len

    def path(self, call: int) -> Ints:
        """A copy of a call's prompt and output."""
        return self.forest.ids(call, 0, int(self.path_len[call]))

    def prompt(self, call: int) -> Ints:
        return self.forest.ids(call, 0, int(self.calls["prompt_len"][call]))

    def named(self, session: Longs | Ints, turn_index: Longs | Ints) -> Longs:
        """The call with each turn_index of a session, or -1."""
        return Keys(self.session, self.turn_index).find(Keys(session, turn_index))

    def place(self, call: int) -> str:
        """The position of a call for error texts: ``session 'a', turn 7``."""
        session_id = self.ids[int(self.session[call])].as_py()
        return f"session {session_id!r}, turn {self.turn_index[call]}"

    def untrained(self, which: Bools) -> Self:
        """The same sessions, of which the marked calls are context only."""
        calls = self.calls.copy()
        calls["trainable"] &= ~which
        return replace(self, calls=calls)

    def part(self, start: int, stop: int) -> Self:
        """The sessions ``start:stop``; bases count within them."""
        offsets = self.offsets[start : stop + 1]
        lo, hi = int(offsets[0]), int(offsets[-1])
        if (lo, hi) == (0, len(self.calls)):
            return self
        calls = self.calls[lo:hi]
        if lo:
            calls = np.empty(hi - lo, CALL)
            # as bytes, because numpy copies records one by one
            calls.view(np.uint8)[:] = self.calls[lo:hi].view(np.uint8)
            base = calls["base"]
            np.subtract(base, lo, out=base, where=base >= 0)
        return replace(
            self,
            table=self.table.slice(lo, hi - lo),
            ids=self.ids[start:stop],
            offsets=offsets - lo,
            turn_index=self.turn_index[lo:hi],
            calls=calls,
            requests=self.requests[lo:hi],
        )

    def cut(self, n_threads: int) -> list[tuple[int, int]]:
        """Ranges of sessions to work on, of similar size if there are several threads."""
        if len(self.ids) == 1:
            return [(0, 1)]
        calls = self.calls
        stored = calls["prompt_len"] - calls["own_start"] + calls["out_len"]
        # what a base supplies is stored once, and new to each row
        finer = limits.DELTA_PART_FACTOR if (calls["base"] >= 0).any() else 1
        most, total = limits.PART_TOKENS // finer, int(stored.sum())
        if n_threads > 1:
            fair = total // n_threads
            most = min(max(fair, limits.MIN_PART_TOKENS // finer), most)
        if total <= most and len(self.ids):
            return [(0, len(self.ids))]
        sizes = np.diff(np.append(0, np.cumsum(stored))[self.offsets])
        return list(runs_of(sizes, most))

    def split(self, most: int) -> Iterator[Self]:
        """Groups of sessions whose paths have at most this many tokens, or one session."""
        ends = np.append(0, np.cumsum(self.path_len))[self.offsets]
        for start, stop in runs_of(np.diff(ends), most):
            yield self.part(start, stop)

    def by_prompt(self) -> Ints:
        """The calls of each session, shortest prompt first, then by request_id.

        ``request_id`` is an optional column of ``turns``; calls without one follow those
        that have one, in the order of turns. Raises SchemaError if its type has no order.
        """
        keys = [self._ranks("request_id"), self.calls["prompt_len"], self.session]
        return np.lexsort(keys).astype(np.int32)

    def by_creation(self) -> Ints:
        """The rank of each call by the columns started_at and request_id, if there, and
        turn.
        """
        order = np.lexsort([self._ranks("request_id"), self._ranks("started_at")])
        return np.argsort(order).astype(np.int32)

    def _ranks(self, name: str) -> Longs:
        """Number of smaller values in the column, by row; nulls come last."""
        if name not in self.table.column_names:
            return np.zeros(self.n_calls, np.int64)
        column = self.table.column(name)
        type_ = column.type
        if pa.types.is_dictionary(type_):
            type_ = type_.value_type
        plain = pa.int8() if pa.types.is_null(type_) else without_views(type_)
        try:
            ranks = pc.rank(in_type(column, plain), tiebreaker="min")
            return np.asarray(ranks, np.int64)
        except pa.ArrowNotImplementedError as error:
            raise SchemaError(
                f"column {name!r} is {column.type}, which has no order: cast it"
            ) from error


def unshared(
    own: Ragged, ends: Ragged, bases: Ints, shared: Ints | Longs
) -> list[Array]:
    """The complete list of each call: ``shared`` elements of its base's list and of the
    end that follows it there, then its own.
    """
    lists: list[Array] = []
    for call, (base, n) in enumerate(zip(bases.tolist(), shared.tolist(), strict=True)):
        if base < 0 or not n:
            lists.append(own[call])
            continue
        before = np.concatenate([lists[base], ends[base]])[:n]
        lists.append(np.concatenate([before, own[call]]))
    return lists


def with_current_keys(turns: pa.Table) -> pa.Table:
    """Turns of complete sessions, in canonical form, with keys of the current version."""
    if not has_old_keys(turns):
        return turns
    from trajkit.turns.delta import renew_keys  # which needs this module

    return renew_keys(turns)


def _session_ids(table: pa.Table) -> tuple[pa.Array, Longs]:
    """The id of each session, and the row at which it starts."""
    encoded = table.column("session_id").combine_chunks().dictionary_encode()
    ids, numbers = encoded.dictionary, np.asarray(encoded.indices, np.int64)
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    if len(starts) > len(ids):
        # numbers count up in order of first use
        at = int(np.argmax(numbers[starts] != np.arange(len(starts))))
        raise refusal(table, int(starts[at]))
    return ids, starts


def refusal(table: pa.Table, row: int) -> InvalidTurnsError:
    """The error for the first row that the door refuses, by the rule that it breaks."""
    before = table.slice(0, row + 1)
    for check in checks_of(turns_schema(table.column_names)):
        for rows, explain in check(before):
            for at in np.flatnonzero(rows == row)[:1].tolist():
                return InvalidTurnsError(f"{place(table, row)}: {explain(at)}")
    return InvalidTurnsError(
        f"{place(table, row)}: the turn does not fit the ones before"
    )

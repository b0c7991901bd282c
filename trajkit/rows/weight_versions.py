"""The weights that sampled each token, for turns and rows."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa

from trajkit.schema import ROW_VERSIONS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.ragged import Ints, Longs, Ragged, Records, offsets_of, positions
from trajkit.turns.sessions import Sessions


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

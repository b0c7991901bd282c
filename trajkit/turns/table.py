"""A ``turns`` table split into sessions."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arrow.canonical import canonical, has_old_keys, turns_schema
from trajkit.errors import InvalidTurnsError
from trajkit.turns.turn_rules import run_starts

_Longs = npt.NDArray[np.int64]

# Reading a chunk costs about 0.1 ms. Copying a chunk below this size costs less.
_MANY_CHUNKS, _CHUNK_BYTES = 16, 1 << 20


@dataclass(frozen=True, slots=True)
class Turns:
    """A table in canonical form with the offsets of its sessions."""

    table: pa.Table
    # shape (n_sessions + 1,): session s is rows offsets[s]:offsets[s + 1]
    offsets: _Longs
    # shape (n_sessions,)
    ids: pa.Array

    @property
    def is_delta(self) -> bool:
        """Whether the table is in delta form."""
        return bool(self.table.schema.get_field_index("suffix_ids") >= 0)

    @property
    def brought(self) -> _Longs:
        """Tokens stored for each session: in full form, all prompts and outputs."""
        own = "suffix_ids" if self.is_delta else "prompt_ids"
        own_sizes, output_sizes = (
            _elements(self.table[name], self.offsets) for name in (own, "output_ids")
        )
        return own_sizes + output_sizes

    def sessions(self, start: int, stop: int) -> "Turns":
        """The sessions ``start:stop``."""
        offsets = self.offsets[start : stop + 1]
        first, last = int(offsets[0]), int(offsets[-1])
        return Turns(
            self.table.slice(first, last - first),
            offsets - first,
            self.ids[start:stop],
        )


def locate(turns: pa.Table) -> Turns:
    """Find the sessions of a ``turns`` table in full or delta form.

    Raises as `canonical`, and InvalidTurnsError if the rows of a session are not
    contiguous.
    """
    table = with_current_keys(canonical(turns, turns_schema(turns.column_names)))
    chunks = table.column("output_ids").num_chunks
    if chunks > _MANY_CHUNKS and table.nbytes < chunks * _CHUNK_BYTES:
        table = table.combine_chunks()  # a log has one chunk per turn
    first = run_starts(table)
    offsets = np.append(first, table.num_rows).astype(np.int64, copy=False)
    return Turns(table, offsets, _session_ids(table.column("session_id"), first))


def with_current_keys(turns: pa.Table) -> pa.Table:
    """Turns of complete sessions, in canonical form, with keys of the current version."""
    if not has_old_keys(turns):
        return turns
    from trajkit.turns.old_keys import renew_keys  # loaded for old logs only

    return renew_keys(turns)


def runs_of(sizes: _Longs, most: int) -> Iterator[tuple[int, int]]:
    """Group consecutive sessions or rows, as pairs (start, stop).

    The sizes of a group add up to ``most`` at most, unless it has a single member.
    """
    ends = np.append(0, np.cumsum(sizes))
    start = 0
    while start < len(sizes):
        stop = int(np.searchsorted(ends, ends[start] + most, side="right")) - 1
        stop = max(stop, start + 1)
        yield start, stop
        start = stop


def _elements(lists: pa.ChunkedArray, offsets: _Longs) -> _Longs:
    """Total length of the lists of each session."""
    stops = np.zeros(len(offsets), np.int64)
    known = 0
    for chunk in lists.chunks:
        if len(chunk):
            ends = chunk.offsets.to_numpy()
            stops += ends[np.clip(offsets - known, 0, len(chunk))]
            known += len(chunk)
    return np.diff(stops)


def _session_ids(column: pa.ChunkedArray, starts: _Longs) -> pa.Array:
    """The id of each session, given the row at which it starts."""
    one = column.chunk(0) if column.num_chunks == 1 else column
    ids = one.take(pa.array(starts))
    if isinstance(ids, pa.ChunkedArray):
        ids = ids.combine_chunks()
    if isinstance(ids, pa.ChunkedArray):  # from older versions of Arrow
        ids = pa.concat_arrays(ids.chunks) if ids.num_chunks else pa.array([], ids.type)
    if len(ids.unique()) < len(ids):
        first = np.unique(
            ids.dictionary_encode().indices.to_numpy(), return_index=True
        )[1]
        again = int(np.setdiff1d(np.arange(len(starts)), first)[0])
        raise InvalidTurnsError(
            f"session {ids[again].as_py()!r} comes back in table row {starts[again]} "
            "after another session began: the rows of a session must be contiguous. Sort "
            "them first: turns.sort_by([('session_id', 'ascending'), ('turn_index', "
            "'ascending')])"
        )
    return ids

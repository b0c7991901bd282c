"""The calls of a ``turns`` table as the records that the kernels read.

Nothing per token is copied: the records hold the addresses of the table's own buffers,
and `Calls` holds the table, so that the buffers live as long as the records.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trajkit.errors import InvalidTurnsError
from trajkit.layout import CALL, REQUEST
from trajkit.schema import KEY_BYTES
from trajkit.tables import TableLike, as_table, canonical, turns_schema

Records: TypeAlias = npt.NDArray[np.void]
Longs: TypeAlias = npt.NDArray[np.int64]
Ints: TypeAlias = npt.NDArray[np.int32]

_TOKEN_BYTES = 4
_OFFSET_BYTES = 4

# Reading a chunk costs some 0.1 ms whatever it holds; copying a smaller one costs less.
_MANY_CHUNKS, _CHUNK_BYTES = 16, 1 << 20


@dataclass(frozen=True, slots=True)
class Calls:
    """Model calls of whole sessions, in order."""

    table: pa.Table
    # dtype CALL, shape (n_calls,)
    calls: Records
    # dtype REQUEST, shape (n_calls,)
    requests: Records
    # shape (n_sessions + 1,): session s is calls[offsets[s]:offsets[s + 1]]
    session_offsets: Longs
    # shape (n_sessions,)
    session_ids: pa.Array
    # shape (n_calls,)
    turn_index: Ints
    # what requests point at where that is not the table (trajkit.equality)
    keys: Longs | None = None

    @property
    def n_sessions(self) -> int:
        return len(self.session_offsets) - 1

    @property
    def held(self) -> Longs:
        """Tokens of each call's prompt and output, shape (n_calls,)."""
        held: Longs = self.calls["prompt_len"] + self.calls["out_len"]
        return held

    def session_of(self) -> Ints:
        """The number of each call's session, shape (n_calls,)."""
        sizes = np.diff(self.session_offsets)
        return np.repeat(np.arange(self.n_sessions, dtype=np.int32), sizes)

    def place(self, call: int) -> str:
        """Where a call is, in words: ``session 'a', turn 7``."""
        session = np.searchsorted(self.session_offsets, call, side="right") - 1
        session_id = self.session_ids[int(session)].as_py()
        return f"session {session_id!r}, turn {self.turn_index[call]}"

    def without_training(self, sessions: npt.NDArray[np.bool_]) -> "Calls":
        """The same calls; those of the marked sessions are context only."""
        calls = self.calls.copy()
        calls["trainable"] &= ~sessions[self.session_of()]
        return replace(self, calls=calls)

    def sessions(self, start: int, stop: int) -> "Calls":
        """The calls of the sessions ``start:stop``."""
        offsets = self.session_offsets[start : stop + 1]
        lo, hi = int(offsets[0]), int(offsets[-1])
        if (lo, hi) == (0, len(self.calls)):
            return self
        calls = self.calls[lo:hi].copy()
        calls["base"][calls["base"] >= 0] -= lo
        return replace(
            self,
            table=self.table.slice(lo, hi - lo),
            calls=calls,
            requests=self.requests[lo:hi],
            session_offsets=offsets - lo,
            session_ids=self.session_ids[start:stop],
            turn_index=self.turn_index[lo:hi],
        )

    def split(self, max_held: int) -> Iterator["Calls"]:
        """Parts of whole sessions that hold ``max_held`` tokens, or one session."""
        ends = np.concatenate([[0], np.cumsum(self.held)])[self.session_offsets]
        start = 0
        while start < self.n_sessions:
            stop = int(np.searchsorted(ends, ends[start] + max_held, side="right")) - 1
            stop = max(stop, start + 1)
            yield self.sessions(start, stop)
            start = stop


def read_calls(turns: TableLike) -> Calls:
    """The calls of a ``turns`` table, in full or in delta form.

    Parameters
    ----------
    turns : table
        Anything `trajkit.tables.canonical` takes. Values are taken as they are, empty
        prompts and outputs included: `trajkit.validate` looks at values.

    Returns
    -------
    Calls

    Raises
    ------
    SchemaError
        A column is absent or of another type.
    InvalidTurnsError
        The table is no sequence of sessions: a session in several pieces, turn_index
        not ascending, logprobs and outputs of different lengths, a base that is no
        earlier turn of its session, a null among ids.
    """
    table = as_table(turns)
    table = canonical(table, turns_schema(table.column_names))
    chunks = table.column("output_ids").num_chunks
    if chunks > _MANY_CHUNKS and table.nbytes < chunks * _CHUNK_BYTES:
        table = table.combine_chunks()  # a log has a chunk a turn
    turn_index = table.column("turn_index").to_numpy().astype(np.int32, copy=False)
    session_offsets, session_ids = _sessions(table)
    _check_order(table, turn_index, session_offsets)

    calls = np.zeros(table.num_rows, CALL)
    delta = "suffix_ids" in table.column_names
    own, own_len = _token_runs(table, "suffix_ids" if delta else "prompt_ids")
    calls["own"] = own
    if delta:
        calls["own_start"] = table.column("shared_length").to_numpy()
        calls["base"] = _bases(table, turn_index, session_offsets)
    else:
        calls["base"] = -1
    calls["prompt_len"] = calls["own_start"] + own_len
    calls["out"], calls["out_len"] = _token_runs(table, "output_ids")
    _read_logprobs(table, calls)
    calls["trainable"] = _flags(table, "trainable", absent=True)
    calls["use_tool"] = _flags(table, "use_tool", absent=False)
    calls["ill_formed"] = _flags(table, "ill_formed", absent=False)
    calls["length_stop"] = _is(table.column("finish_reason"), "length")
    result = Calls(
        table,
        calls,
        _read_requests(table, delta),
        session_offsets,
        session_ids,
        turn_index,
    )
    _check_bases(result)
    return result


def _sessions(table: pa.Table) -> tuple[Longs, pa.Array]:
    """Where each session starts, and its id."""
    ids = table.column("session_id").combine_chunks()
    if isinstance(ids, pa.ChunkedArray):  # more bytes than one array can index
        ids = ids.cast(pa.large_string()).combine_chunks()
    encoded = ids.dictionary_encode()
    codes = encoded.indices.to_numpy()
    starts = np.flatnonzero(np.diff(codes, prepend=-1))
    if len(starts) > len(encoded.dictionary):
        first = np.unique(codes[starts], return_index=True)[1]
        again = int(np.setdiff1d(np.arange(len(starts)), first)[0])
        row = int(starts[again])
        raise InvalidTurnsError(
            f"session {ids[row].as_py()!r} comes back in table row {row} after another "
            "session began: a session must be in one piece. Gather them first: "
            "turns.sort_by([('session_id', 'ascending'), ('turn_index', 'ascending')])"
        )
    offsets = np.concatenate([starts, [len(codes)]]).astype(np.int64)
    return offsets, encoded.dictionary.cast(pa.string())


def _check_order(table: pa.Table, turn_index: Ints, session_offsets: Longs) -> None:
    ascending = np.diff(turn_index) > 0
    ascending[session_offsets[1:-1] - 1] = True
    if not ascending.all():
        row = int(np.flatnonzero(~ascending)[0]) + 1
        session = table.column("session_id")[row].as_py()
        raise InvalidTurnsError(
            f"session {session!r}, turn {turn_index[row]}: follows turn "
            f"{turn_index[row - 1]}; turn_index must ascend within a session"
        )


def _token_runs(table: pa.Table, name: str) -> tuple[Longs, Longs]:
    """Address and length of each list of token ids."""
    addresses, lengths = [], []
    start = 0
    for chunk in table.column(name).chunks:
        values = chunk.values
        offsets = chunk.offsets.to_numpy()
        if values.null_count:
            _refuse_null_ids(table, name, chunk, start)
        addresses.append(
            _address(values, 1, _TOKEN_BYTES) + offsets[:-1] * _TOKEN_BYTES
        )
        lengths.append(np.diff(offsets))
        start += len(chunk)
    return _joined(addresses), _joined(lengths)


def _refuse_null_ids(table: pa.Table, name: str, chunk: pa.Array, start: int) -> None:
    counts = np.array([len(ids) - ids.null_count for ids in _lists(chunk)])
    lengths = pc.list_value_length(chunk).to_numpy()
    bad = np.flatnonzero(counts < lengths)
    if len(bad):
        row = start + int(bad[0])
        session = table.column("session_id")[row].as_py()
        turn = table.column("turn_index")[row].as_py()
        raise InvalidTurnsError(
            f"session {session!r}, turn {turn}: {name} holds a null; every id is needed"
        )


def _lists(chunk: pa.Array) -> Iterator[pa.Array]:
    offsets = chunk.offsets.to_numpy()
    for start, stop in pairwise(offsets):
        yield chunk.values.slice(start, stop - start)


def _address(values: pa.Array, buffer: int, item_bytes: int) -> int:
    """Address of an array's first item in one of its buffers; 0 if it has none."""
    data = values.buffers()[buffer]
    return 0 if data is None else data.address + values.offset * item_bytes


def _valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Where an array is not null."""
    if array.null_count == 0:  # most are; this spares Arrow's cost of a call
        return np.ones(len(array), np.bool_)
    valid: npt.NDArray[np.bool_] = array.is_valid().to_numpy(zero_copy_only=False)
    return valid


def _joined(parts: list[npt.NDArray[np.int64]]) -> Longs:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)


def _read_logprobs(table: pa.Table, calls: Records) -> None:
    start = 0
    for chunk in table.column("output_logprobs").chunks:
        part = calls[start : start + len(chunk)]
        values = chunk.values
        offsets = chunk.offsets.to_numpy()
        lengths = np.diff(offsets)
        given = _valid(chunk)
        bad = np.flatnonzero(given & (lengths != part["out_len"]))
        if len(bad):
            row = start + int(bad[0])
            session = table.column("session_id")[row].as_py()
            turn = table.column("turn_index")[row].as_py()
            raise InvalidTurnsError(
                f"session {session!r}, turn {turn}: {lengths[bad[0]]} logprobs for "
                f"{part['out_len'][bad[0]]} output ids"
            )
        given &= lengths > 0
        address = _address(values, 1, _TOKEN_BYTES) + offsets[:-1] * _TOKEN_BYTES
        part["logprobs"] = np.where(given, address, 0)
        if values.null_count:
            part["valid"] = np.where(given, _address(values, 0, 0), 0)
            part["valid_bit"] = values.offset + offsets[:-1]
        start += len(chunk)


def _flags(table: pa.Table, name: str, *, absent: bool) -> npt.NDArray[np.bool_]:
    column = table.column(name)
    if column.null_count == len(column):
        return np.full(len(column), absent)
    flags: npt.NDArray[np.bool_] = column.fill_null(absent).to_numpy()
    return flags


def _is(names: pa.ChunkedArray, name: str) -> npt.NDArray[np.bool_]:
    """Where a name is this one; a null is not."""
    same: npt.NDArray[np.bool_] = pc.equal(names, name).fill_null(False).to_numpy()
    return same


def named_calls(
    turn_index: Ints, session_offsets: Longs, wanted: pa.ChunkedArray
) -> tuple[Ints, Longs]:
    """The call that each turn_index names within the session of its row.

    Returns
    -------
    index : ndarray of int32, shape (n_calls,)
        -1 where ``wanted`` is null or names no turn of the session.
    absent : ndarray of int64
        Rows that name no turn of their session.
    """
    known = wanted.is_valid().to_numpy()
    turns = wanted.fill_null(0).to_numpy().astype(np.int64)
    span = int(turn_index.max(initial=0)) + 1
    sizes = np.diff(session_offsets)
    session = np.repeat(np.arange(len(sizes), dtype=np.int64) * span, sizes)
    # Ascending within a session and over sessions, so one search finds them all.
    ranked = session + turn_index
    found = np.searchsorted(ranked, session + turns)
    found = np.minimum(found, max(len(ranked) - 1, 0))
    hit = known & (turns >= 0) & (turns < span)
    hit &= ranked[found] == session + turns
    index = np.where(hit, found, -1).astype(np.int32)
    return index, np.flatnonzero(known & ~hit)


def _bases(table: pa.Table, turn_index: Ints, session_offsets: Longs) -> Ints:
    """The call that each base_turn names, or -1."""
    wanted = table.column("base_turn")
    bases, absent = named_calls(turn_index, session_offsets, wanted)
    late = np.flatnonzero(bases >= np.arange(len(bases)))
    bad = np.union1d(absent, late)
    if len(bad):
        row = int(bad[0])
        session = table.column("session_id")[row].as_py()
        raise InvalidTurnsError(
            f"session {session!r}, turn {turn_index[row]}: base_turn {wanted[row]} is "
            "no earlier turn of the session"
        )
    return bases


def _check_bases(calls: Calls) -> None:
    """Raise unless every call shares with its base no more than that has."""
    records = calls.calls
    base = records["base"]
    most = np.where(base >= 0, calls.held[base], 0)
    bad = np.flatnonzero((records["own_start"] < 0) | (records["own_start"] > most))
    if len(bad):
        call = int(bad[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: shared_length {records['own_start'][call]} of a "
            f"base that holds {most[call]} tokens"
        )
    requests = calls.requests
    counts = requests["shared"] + np.maximum(requests["n_keys"], 0)
    spoken = base >= 0
    spoken &= requests["n_keys"][base] >= 0
    most = np.where(spoken, counts[base] + (requests["reply_key"][base] != 0), 0)
    bad = np.flatnonzero((requests["shared"] < 0) | (requests["shared"] > most))
    if len(bad):
        call = int(bad[0])
        raise InvalidTurnsError(
            f"{calls.place(call)}: shared_messages {requests['shared'][call]} of a "
            f"base that shows {most[call]} messages"
        )


def _read_requests(table: pa.Table, delta: bool) -> Records:
    requests = np.zeros(table.num_rows, REQUEST)
    start = 0
    for chunk in table.column("suffix_messages" if delta else "messages").chunks:
        part = requests[start : start + len(chunk)]
        # field() gives the children as the offsets count them, whatever was sliced
        keys, roles = chunk.values.field("key"), chunk.values.field("role")
        if keys.null_count or chunk.values.null_count:
            _refuse_null_keys(table, keys, chunk, start)
        offsets = chunk.offsets.to_numpy()
        given = _valid(chunk)
        part["keys"] = _address(keys, 1, KEY_BYTES) + offsets[:-1] * KEY_BYTES
        part["n_keys"] = np.where(given, np.diff(offsets), -1)
        part["role_offsets"] = (
            _address(roles, 1, _OFFSET_BYTES) + offsets[:-1] * _OFFSET_BYTES
        )
        part["role_bytes"] = _address(roles, 2, 0)
        start += len(chunk)
    if delta:
        shared = table.column("shared_messages").fill_null(0).to_numpy()
        requests["shared"] = np.where(requests["n_keys"] < 0, 0, shared)
    start = 0
    said = []
    for chunk in table.column("response").chunks:
        part = requests[start : start + len(chunk)]
        keys = chunk.field("key")
        said.append(chunk.field("role"))
        address = _address(keys, 1, KEY_BYTES) + np.arange(len(chunk)) * KEY_BYTES
        part["reply_key"] = np.where(_valid(chunk) & _valid(keys), address, 0)
        start += len(chunk)
    roles = pa.chunked_array(said, pa.string())
    requests["reply_is_assistant"] = _is(roles, "assistant") & (
        requests["reply_key"] != 0
    )
    return requests


def _refuse_null_keys(
    table: pa.Table, keys: pa.Array, chunk: pa.Array, start: int
) -> None:
    # a message that is null may have a key under it
    absent = pc.or_(keys.is_null(), chunk.values.is_null())
    bad = np.flatnonzero(absent.to_numpy(zero_copy_only=False))
    owner = np.searchsorted(chunk.offsets.to_numpy(), bad, side="right") - 1
    inside = (owner >= 0) & (owner < len(chunk))
    if inside.any():
        row = start + int(owner[inside][0])
        session = table.column("session_id")[row].as_py()
        turn = table.column("turn_index")[row].as_py()
        raise InvalidTurnsError(
            f"session {session!r}, turn {turn}: a message has no key; messages "
            "route by it"
        )

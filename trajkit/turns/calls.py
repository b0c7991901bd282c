"""The calls of a ``turns`` table as the records that the kernels read.

Nothing per token is copied: the records contain addresses in the table's buffers, and
`Calls` keeps the table alive.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow.buffers import pooled, pooled_zeros
from trajkit._arrow.canonical import place
from trajkit._kernel_names import numbers
from trajkit.errors import InvalidTurnsError
from trajkit.turns.structs import CALL, REQUEST
from trajkit.turns.table import Turns, locate, runs_of

Records: TypeAlias = npt.NDArray[np.void]
Longs: TypeAlias = npt.NDArray[np.int64]
Ints: TypeAlias = npt.NDArray[np.int32]

# Only the delta form has the last columns that the kernel reads (arrow/import.pxi); others
# have other names in it.
_DELTA_COLUMNS = ("base_turn", "shared_length", "shared_messages")
_COLUMNS = tuple(n for n in _core.ENUMS["TurnColumn"] if n not in _DELTA_COLUMNS)
_DELTA_NAMES = {"prompt_ids": "suffix_ids", "messages": "suffix_messages"}
# The error texts of the faults that the kernel reports. A column's name is replaced by its
# value or, if that is a list, by its length.
_FAULTS = {
    "none": "",
    "own_null": "{own} contains a null; every id is needed",
    "out_null": "output_ids contains a null; every id is needed",
    "logprobs": "{output_logprobs} logprobs for {output_ids} output ids",
    "key": "a message has no key, which is needed to find parents",
    "order": "follows turn {before}; turn_index must ascend within a session",
    "base": "base_turn {base_turn} is not an earlier turn of the session",
    "shared": "shared_length is {shared_length}: expected 0 to {most}, tokens of the base",
    "shared_messages": "shared_messages is {shared_messages}: expected 0 to {most}, "
    "messages of the base",
    "mask_length": "{output_mask} elements of output_mask for {output_ids} output ids",
    "mask_null": "output_mask contains a null; expected true or false for every output id",
}
_TEXT_OF_FAULT = {
    number: _FAULTS[name] for name, number in numbers("TurnFault", [*_FAULTS]).items()
}


@dataclass(frozen=True, slots=True)
class Calls:
    """Model calls of complete sessions, in order."""

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
    # buffers of requests outside the table: keys that are equal if the messages are
    # (trajkit.turns.message_equality), and roles
    keys: Longs | None = None
    roles: tuple[object, ...] = ()

    @property
    def n_sessions(self) -> int:
        return len(self.session_offsets) - 1

    @property
    def is_delta(self) -> bool:
        """Whether the table is in delta form."""
        return bool(self.table.schema.get_field_index("suffix_ids") >= 0)

    @property
    def stored_messages(self) -> pa.ChunkedArray:
        """The column of messages that each turn stores."""
        return self.table.column("suffix_messages" if self.is_delta else "messages")

    @property
    def path_len(self) -> Longs:
        """Length of each call's path, shape (n_calls,)."""
        path_len: Longs = self.calls["prompt_len"] + self.calls["out_len"]
        return path_len

    def session_of(self) -> Ints:
        """The number of each call's session, shape (n_calls,)."""
        sizes = np.diff(self.session_offsets)
        return np.repeat(np.arange(self.n_sessions, dtype=np.int32), sizes)

    def named(self, session: Longs | Ints, turn_index: Longs) -> Longs:
        """The call with each turn_index of a session, or -1."""
        have = (self.session_of().astype(np.int64) << 32) + self.turn_index
        seek = (session.astype(np.int64) << 32) + turn_index
        at = np.searchsorted(have, seek)
        found = (session >= 0) & (turn_index >= 0) & (at < len(have))
        found[found] = have[at[found]] == seek[found]
        return np.where(found, at, -1)

    def turns_of(self, session: int) -> Ints:
        """The turn_index of each call of a session."""
        offsets = self.session_offsets
        return self.turn_index[int(offsets[session]) : int(offsets[session + 1])]

    def place(self, call: int) -> str:
        """The position of a call for error texts: ``session 'a', turn 7``."""
        session = np.searchsorted(self.session_offsets, call, side="right") - 1
        session_id = self.session_ids[int(session)].as_py()
        return f"session {session_id!r}, turn {self.turn_index[call]}"

    def mask_sessions(self, sessions: npt.NDArray[np.bool_]) -> "Calls":
        """The same calls, of which the marked sessions are context only."""
        calls = self.calls.copy()
        calls["trainable"] &= ~sessions[self.session_of()]
        return replace(self, calls=calls)

    def sessions(self, start: int, stop: int) -> "Calls":
        """The calls of the sessions ``start:stop``."""
        offsets = self.session_offsets[start : stop + 1]
        lo, hi = int(offsets[0]), int(offsets[-1])
        if (lo, hi) == (0, len(self.calls)):
            return self
        calls = self.calls[lo:hi]
        if lo:
            calls = pooled(hi - lo, CALL)
            # as bytes, because numpy copies records one by one
            calls.view(np.uint8)[:] = self.calls[lo:hi].view(np.uint8)
            base = calls["base"]
            np.subtract(base, lo, out=base, where=base >= 0)
        return replace(
            self,
            table=self.table.slice(lo, hi - lo),
            calls=calls,
            requests=self.requests[lo:hi],
            session_offsets=offsets - lo,
            session_ids=self.session_ids[start:stop],
            turn_index=self.turn_index[lo:hi],
        )

    def split(self, most: int) -> Iterator["Calls"]:
        """Groups of sessions whose paths have at most this many tokens, or one session."""
        ends = np.append(0, np.cumsum(self.path_len))[self.session_offsets]
        for start, stop in runs_of(np.diff(ends), most):
            yield self.sessions(start, stop)


def read_calls(turns: pa.Table | Turns) -> Calls:
    """The calls of a ``turns`` table, in full or in delta form.

    Values are not checked (`trajkit.validate` does); prompts and outputs may be empty.
    Raises as `locate`, and InvalidTurnsError if turn_index does not ascend, logprobs
    and outputs have different lengths, a base is not an earlier turn of its session, or
    an id is null.
    """
    located = turns if isinstance(turns, Turns) else locate(turns)
    table, n_calls = located.table, located.table.num_rows
    turn_index = np.empty(n_calls, np.int32)
    calls, requests = (pooled_zeros(n_calls, kind) for kind in (CALL, REQUEST))
    names: Sequence[str] = _COLUMNS
    if located.is_delta:
        names = [_DELTA_NAMES.get(name, name) for name in _COLUMNS]
        names += _DELTA_COLUMNS
    columns = table.select(names).__arrow_c_stream__()
    fault, row, most = _core.read_columns(
        columns, located.offsets, turn_index, calls, requests
    )
    if fault:
        words = _fault(table, row, fault, most)
        raise InvalidTurnsError(f"{place(table, row)}: {words}")
    return Calls(table, calls, requests, located.offsets, located.ids, turn_index)


def _fault(table: pa.Table, row: int, fault: int, most: int) -> str:
    """The error text of a fault that the kernel found."""
    text, names = _TEXT_OF_FAULT[fault], table.column_names
    values = {name: table.column(name)[row] for name in names if f"{{{name}}}" in text}
    fields = {
        name: len(value) if hasattr(value, "__len__") else value
        for name, value in values.items()
    }
    # further columns may have these names
    fields["own"] = "suffix_ids" if "suffix_ids" in names else "prompt_ids"
    fields["before"], fields["most"] = table.column("turn_index")[row - 1], most
    return text.format(**fields)

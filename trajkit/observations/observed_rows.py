"""Selection, rows and counts, shared by all observation rules."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import place
from trajkit.errors import InvalidTurnsError
from trajkit.observations.attribution import Ints, SessionCalls

Missing: TypeAlias = Literal["raise", "skip", "whole"]
Normalization: TypeAlias = Literal["flat", "all_tokens", "sft_tokens", "ratio"]
Longs: TypeAlias = npt.NDArray[np.int64]
Weights: TypeAlias = npt.NDArray[np.float32]

# tokens at the end of a prefix that are compared first
_PROBE = 64


@dataclass(frozen=True, slots=True)
class Selection:
    """The messages that get a weight, and their weights."""

    # alpha of each role that is selected
    roles: dict[str, float]
    # alpha of each tool that is selected; None: every tool, at its role's alpha
    tools: dict[str, float] | None
    normalization: Normalization
    missing: Missing


@dataclass(slots=True)
class Observed:
    """The counts of one session, as in `trajkit.schema.OBSERVATIONS`."""

    tokens_observed: int = 0
    tokens_repeated: int = 0
    messages_unnamed: int = 0
    turns_skipped: int = 0
    turns_whole: int = 0


@dataclass(frozen=True, slots=True)
class ObservedRow:
    """One row of a session."""

    # its number in the table
    number: int
    ids: Ints
    shared: int
    # start, stop, turn_index, output_start and output_stop of its spans
    spans: tuple[Ints, Ints, Ints, Ints, Ints]
    # tokens that the row trains, or would train if it were not cut
    trained: int
    where: str

    def last_call(self, calls: SessionCalls, among: Collection[int]) -> int:
        """The call whose path is the row, or begins with it."""
        turns = self.spans[2]
        first = int(np.searchsorted(calls.turn_index, turns.max(initial=-1)))
        for call in range(first, len(calls)):
            if call in among and self._begins(calls, call):
                return call
        raise InvalidTurnsError(
            f"{self.where}: no call of the session has its {len(self.ids)} tokens, so what "
            "they render is unknown"
        )

    def _begins(self, calls: SessionCalls, call: int) -> bool:
        n = len(self.ids)
        if n > calls.path_len[call]:
            return False
        prompt = calls.prompt(call)
        k = min(n, len(prompt))
        return begins(prompt, self.ids[:k]) and np.array_equal(
            calls.output(call)[: n - k], self.ids[k:]
        )


def begins(ids: Ints, prefix: Ints) -> bool:
    """Whether the ids begin with the prefix."""
    n = len(prefix)
    probe = max(n - _PROBE, 0)
    return (
        n <= len(ids)
        and np.array_equal(ids[probe:n], prefix[probe:])
        and np.array_equal(ids[:probe], prefix[:probe])
    )


def observed_rows(
    table: pa.Table, session_ids: pa.Array
) -> tuple[dict[int, list[ObservedRow]], Longs]:
    """The rows of each session, by its number, and the offsets of the rows' tokens."""
    found = pc.index_in(table.column("session_id"), session_ids)
    if found.null_count:
        row = int(np.flatnonzero(np.asarray(found.is_null()))[0])
        raise InvalidTurnsError(f"{place(table, row)}: the session has no turns")
    by_session: dict[int, list[ObservedRow]] = {}
    sizes = [0]
    for number, session in enumerate(np.asarray(found)):
        ids = table.column("input_ids")[number].values.to_numpy()
        spans = table.column("spans")[number].values
        start, stop, turn, out_start, out_stop = (
            np.asarray(pc.struct_field(spans, name))
            for name in ("start", "stop", "turn_index", "output_start", "output_stop")
        )
        kinds = pc.struct_field(spans, "kind").cast(pa.string())
        trained = np.asarray(pc.is_in(kinds, pa.array(["trained", "cut"])))
        by_session.setdefault(int(session), []).append(
            ObservedRow(
                number,
                ids,
                table.column("shared_length")[number].as_py(),
                (start, stop, turn, out_start, out_stop),
                int((out_stop - out_start)[trained].sum()),
                place(table, number),
            )
        )
        sizes.append(len(ids))
    return by_session, np.cumsum(sizes)


def factor(
    normalization: Normalization, all_tokens: int, observed: int, trained: int
) -> float:
    """The factor of alpha, for T, S and R tokens (prime-rl's four modes)."""
    if normalization == "flat" or not observed:
        return 1.0
    if normalization == "all_tokens":
        return 1.0 / all_tokens
    if normalization == "sft_tokens":
        return 1.0 / observed
    return trained / observed

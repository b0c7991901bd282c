"""Choose the sessions of a page."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain

import pyarrow as pa

from trajkit.errors import UnknownSessionError
from trajkit.policies import PRESETS, Policy
from trajkit.schema import TURNS_DELTA
from trajkit.tables import lazy_compute as pc
from trajkit.tables.session_batches import whole_sessions
from trajkit.turns.delta import compact
from trajkit.view.tables import ViewTables


@dataclass(frozen=True, slots=True)
class Selection:
    """Which sessions to show. At most one of the choices is given."""

    ids: tuple[str, ...] | None = None
    # this many, drawn by a hash of their ids: the same ones in every run of the command
    sample: int | None = None
    # this many of those that lose most tokens under the policy, have the most sampled
    # tokens after drift, or have the lowest mean logprob; each ranking in turn names one
    worst: int | None = None
    policy: Policy | None = None

    def of(self, batches: Iterable[pa.RecordBatch]) -> tuple[pa.Table, int]:
        """The turns of the chosen sessions in delta form, and the number of all sessions.

        Only the delta form of turns is in memory, and of ``sample`` and ``ids`` only the
        chosen ones.
        """
        parts: list[pa.Table] = []
        scores: dict[str, tuple[float, float, float]] = {}
        drawn: list[tuple[bytes, str]] = []
        n_sessions, schema = 0, TURNS_DELTA
        for table in whole_sessions(batches):
            names = pc.unique(table["session_id"]).to_pylist()
            n_sessions += len(names)
            kept = set(names)
            if self.ids is not None:
                kept &= set(self.ids)
            elif self.sample is not None:
                drawn = sorted([*drawn, *((_draw(name), name) for name in names)])
                drawn = drawn[: self.sample]
                kept = {name for _, name in drawn}
                parts = [one for part in parts if (one := _only(part, kept)).num_rows]
            part = compact(_only(table, kept))
            schema = part.schema
            if self.worst is not None:
                scores |= self._scores(part)
            if part.num_rows:
                parts.append(part)
        turns = pa.concat_tables(parts) if parts else schema.empty_table()
        if self.worst is not None:
            turns = _only(turns, _worst(scores, self.worst))
        if self.ids is not None:
            found = set(pc.unique(turns["session_id"]).to_pylist())
            for name in self.ids:
                if name not in found:
                    raise UnknownSessionError(f"the turns have no session {name!r}")
        return turns, n_sessions

    def _scores(self, turns: pa.Table) -> dict[str, tuple[float, float, float]]:
        """Three numbers by session, the worst being the largest."""
        lines = ViewTables(turns, [self.policy or PRESETS["faithful"]]).session_lines()
        names = ("id", "sampled", "trained", "at_stake", "logprob")
        return {
            name: (sampled - trained[0], at_stake, -(logprob or 0.0))
            for name, sampled, trained, at_stake, logprob in zip(
                *(lines[name] for name in names), strict=True
            )
        }


def _draw(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()


def _only(table: pa.Table, names: set[str]) -> pa.Table:
    chosen = pa.array(sorted(names), table.schema.field("session_id").type)
    return table.filter(pc.is_in(table["session_id"], value_set=chosen))


def _worst(scores: dict[str, tuple[float, float, float]], n: int) -> set[str]:
    """The first ``n`` names of the three rankings, taken in turn."""
    rankings = [
        sorted(scores, key=lambda name, k=k: -scores[name][k])  # type: ignore[misc]
        for k in range(3)
    ]
    in_turn = chain.from_iterable(zip(*rankings, strict=True))
    return set(list(dict.fromkeys(in_turn))[:n])

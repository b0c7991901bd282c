"""Choose the sessions of a page."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import polars as pl
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
        lines: list[pl.DataFrame] = []
        sampled: list[str] = []
        n_sessions, schema = 0, TURNS_DELTA
        for table in whole_sessions(batches):
            kept = pc.unique(table["session_id"]).to_pylist()
            n_sessions += len(kept)
            if self.ids is not None:
                kept = [*self.ids]
            elif self.sample is not None:
                kept = sampled = sorted([*sampled, *kept], key=_draw)[: self.sample]
                parts = [_only(part, kept) for part in parts]
            part = compact(_only(table, kept))
            schema = part.schema
            parts = [one for one in (*parts, part) if one.num_rows]
            if self.worst is not None:
                policies = [self.policy or PRESETS["faithful"]]
                lines.append(pl.DataFrame(ViewTables(part, policies).session_lines()))
        turns = pa.concat_tables(parts) if parts else schema.empty_table()
        if self.worst is not None and lines:
            turns = _only(
                turns, _worst(pl.concat(lines, how="vertical_relaxed"), self.worst)
            )
        found = {*pc.unique(turns["session_id"]).to_pylist()}
        for name in self.ids or ():
            if name not in found:
                raise UnknownSessionError(f"the turns have no session {name!r}")
        return turns, n_sessions


def _draw(name: str) -> bytes:
    return blake2b(name.encode(), digest_size=8).digest()


def _only(table: pa.Table, names: list[str]) -> pa.Table:
    chosen = pa.array(names, table.schema.field("session_id").type)
    return table.filter(pc.is_in(table["session_id"], value_set=chosen))


def _worst(lines: pl.DataFrame, n: int) -> list[str]:
    """The first ``n`` sessions of the three rankings, taken in turn."""
    ranked = lines.select(
        pl.col("id").sort_by(score, descending=True, maintain_order=True).alias(name)
        for name, score in {
            "loss": pl.col("sampled") - pl.col("trained").list.first(),
            "drift": pl.col("at_stake"),
            "logprob": -pl.col("logprob").cast(pl.Float64).fill_null(0.0),
        }.items()
    )
    return list(dict.fromkeys(name for line in ranked.iter_rows() for name in line))[:n]

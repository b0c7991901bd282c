"""`trajkit.linearize` inside other engines, as a step over batches.

Engines that distribute work (Spark, Ray Data) or answer queries (DuckDB, polars) take a
picklable function from an iterator of record batches to an iterator of record batches, and
a schema that is known in advance.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trajkit.files.tables import gather
from trajkit.policies import Policy
from trajkit.rows.linearize import linearize_batches
from trajkit.schema import ROWS
from trajkit.tables import limits
from trajkit.tables.columns import row_lengths
from trajkit.tables.ragged import runs_of
from trajkit.turns.session_metadata import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearizeStep:
    """Turns to rows in types that every engine knows: no large lists, no dictionaries.

    It contains only its choices, so it can be pickled. It maps an iterator of batches
    of turns, with contiguous sessions, to an iterator of batches of rows, whose ``schema``
    is known in advance. `trajkit.read_rows` restores the types of rows written this way.

    Parameters
    ----------
    policy, reward, max_row_tokens
        As for `trajkit.linearize`.
    threads : int
        1 by default, because engines distribute the work themselves.
    """

    policy: str | Policy = "faithful"
    reward: Reward = None
    max_row_tokens: int | None = None
    threads: int = 1

    @property
    def schema(self) -> pa.Schema:
        return pa.schema([(field.name, _plain(field.type)) for field in ROWS])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        schema = self.schema
        options: dict[str, Any] = {"reward": self.reward, "threads": self.threads}
        options["max_row_tokens"] = self.max_row_tokens
        for batch in linearize_batches(iter(batches), self.policy, **options):
            sizes = row_lengths(pa.Table.from_batches([batch]))
            # few enough tokens for offsets of 32 bits, but at least one row
            for lo, hi in runs_of(sizes, limits.PART_TOKENS):
                yield batch.slice(lo, hi - lo).cast(schema)

    def of_session(self, turns: pa.Table) -> pa.Table:
        """The rows of one session, whose turns come in any order."""
        batches = gather(turns, "turn_index").to_batches()
        return pa.Table.from_batches(self(iter(batches)), self.schema)


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(type_):
        return pa.list_(_plain(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([(field.name, _plain(field.type)) for field in type_])
    if pa.types.is_dictionary(type_):
        return type_.value_type
    return type_

"""`trajkit.linearize` as a step of another engine: batches in, batches out.

Engines that spread work over machines (Spark, Ray Data) and those that answer queries
(DuckDB, polars) take a function from an iterator of record batches to an iterator of
record batches, which must travel to where it runs, and a schema that is known before.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from trajkit._streams import limits
from trajkit.pipeline.rows import Layout, linearize
from trajkit.pipeline.suffix_layout import row_lengths
from trajkit.policies import Policy
from trajkit.schema import ROWS, ROWS_SUFFIX
from trajkit.turns.session_metadata import Reward


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearizeStep:
    """Turns to rows in types that every engine knows: no large lists, no dictionaries.

    It holds nothing but its choices, so it can be pickled. Called with an iterator of
    batches of turns, each session in one piece in it, it gives an iterator of batches
    of rows. `trajkit.read_rows` gives rows written so their own types again.

    Parameters
    ----------
    policy, reward, max_row_tokens, layout
        As for `trajkit.linearize`.
    threads : int
        Engines spread the work themselves: one by default.
    """

    policy: str | Policy = "faithful"
    reward: Reward = None
    max_row_tokens: int | None = None
    layout: Layout = "full"
    threads: int = 1

    @property
    def schema(self) -> pa.Schema:
        """What the batches that come out are of."""
        fields = ROWS_SUFFIX if self.layout == "suffix" else ROWS
        return pa.schema([_plain_field(field) for field in fields])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """The rows of the turns.

        Raises
        ------
        SchemaError, InvalidTurnsError, PolicyError
            As `trajkit.linearize` of a stream.
        """
        schema = self.schema
        rows = linearize(
            iter(batches),
            self.policy,
            reward=self.reward,
            max_row_tokens=self.max_row_tokens,
            threads=self.threads,
            layout=self.layout,
        )
        for batch in rows:
            for part in _split(batch):
                yield part.cast(schema)


def _split(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """The batch in runs of rows of so many tokens, or of one row."""
    ends = np.cumsum(row_lengths(pa.Table.from_batches([batch])))
    start = 0
    while start < batch.num_rows:
        before = ends[start - 1] if start else 0
        stop = int(np.searchsorted(ends, before + limits.PART_TOKENS, side="right"))
        stop = max(stop, start + 1)
        yield batch.slice(start, stop - start)
        start = stop


def _plain_field(field: pa.Field) -> pa.Field:
    return pa.field(field.name, _plain(field.type))


def _plain(type_: pa.DataType) -> pa.DataType:
    if pa.types.is_large_list(type_):
        return pa.list_(_plain(type_.value_type))
    if pa.types.is_struct(type_):
        return pa.struct([_plain_field(field) for field in type_])
    if pa.types.is_dictionary(type_):
        return type_.value_type
    return type_

"""The columns of planned rows with one value per row."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow.categories import dictionary_for
from trajkit._arrow.export import Array, Column
from trajkit._arrow.take import take_run
from trajkit.errors import SchemaError
from trajkit.policies import Policy
from trajkit.schema import ROWS, SEGMENT_KINDS
from trajkit.training.rewards import final_rows, spread
from trajkit.turns.calls import Calls, Ints, Longs, Records

# columns in the order in which the kernel fills them (_native/fill/row_scalars.pxi)
_INTS = (
    "row_index",
    "suffix_start",
    "prompt_length",
    "parent_row",
    "shared_length",
    "last_turn",
)
_FLAGS = ("truncated", "use_tool", "ill_formed")
_NULLABLE = ("parent_row", "row_weight", "segment_kind")


@dataclass(frozen=True, slots=True)
class RowScalars:
    """The columns of `trajkit.schema.ROWS_SUFFIX` that are not lists."""

    # session_id, group_id, reward, finish_reason, step
    known: dict[str, pa.Array]
    # shape (len(_INTS), n_rows)
    ints: Ints
    # shape (n_rows,)
    mask_sums: Longs
    weights: npt.NDArray[np.float64]
    segments: npt.NDArray[np.int8]
    # validity bitmaps of nullable columns, and bitmaps of the flags
    valid: dict[str, npt.NDArray[np.uint8] | None]
    flags: npt.NDArray[np.uint8]

    def columns(self, lo: int, hi: int) -> dict[str, Column | pa.Array]:
        """The columns of the rows lo:hi, by name."""
        n = hi - lo

        def column(
            name: str, values: Array, dictionary: pa.Array | None = None
        ) -> Column:
            valid = self.valid.get(name)
            nulls = 0 if valid is None else -1
            return Column(n, (valid, values), nulls, lo, (), dictionary)

        return {
            **{
                name: array if len(array) == n else array.slice(lo, n)
                for name, array in self.known.items()
            },
            **{
                name: column(name, values)
                for name, values in zip(_INTS, self.ints, strict=True)
            },
            "rollout_mask_sum": column("rollout_mask_sum", self.mask_sums),
            "row_weight": column("row_weight", self.weights),
            **{
                name: column(name, bits)
                for name, bits in zip(_FLAGS, self.flags, strict=True)
            },
            "segment_kind": column(
                "segment_kind", self.segments, dictionary_for(SEGMENT_KINDS)
            ),
        }


def row_scalars(
    calls: Calls,
    links: Records,
    policy: Policy,
    rows: Records,
    facts: pa.RecordBatch,
) -> RowScalars:
    """Compute the scalar columns. ``rows`` are all rows of the sessions of ``calls``."""
    n_rows = len(rows)
    ints = np.empty((len(_INTS), n_rows), np.int32)
    mask_sums, weights = np.empty(n_rows, np.int64), np.empty(n_rows, np.float64)
    segments = np.empty(n_rows, np.int8)
    bits = np.zeros((len(_NULLABLE) + len(_FLAGS), (n_rows + 7) // 8), np.uint8)
    nulls = _core.fill_scalars(
        rows,
        links,
        calls.turn_index,
        calls.n_sessions,
        ints,
        mask_sums,
        weights,
        segments,
        bits,
    )
    valid = {
        name: bitmap if n_nulls else None
        for name, bitmap, n_nulls in zip(_NULLABLE, bits, nulls, strict=False)
    }
    session = take_run(facts, rows["session"])
    known = {
        "session_id": session.column("session_id"),
        "group_id": session.column("group_id"),
        "reward": _rewards(session.column("reward"), policy, rows, links),
        "finish_reason": _finish_reasons(calls, rows["last"]),
        "step": _steps(calls, rows["last"]),
    }
    flags = bits[len(_NULLABLE) :]
    return RowScalars(known, ints, mask_sums, weights, segments, valid, flags)


def _rewards(
    given: pa.Array, policy: Policy, rows: Records, links: Records
) -> pa.Array:
    """Each row's reward: the session's, spread by the policy's ``rewards``."""
    if policy.rewards == "copy" or not len(rows):
        return given
    segments = links["segment"][rows["last"]]
    final = final_rows(
        rows["session"],
        rows["index"],
        segments > 0,
        segments == SEGMENT_KINDS.index("final") + 1,
    )
    whole = given.fill_null(0.0).to_numpy()
    shares = spread(whole, policy.rewards, rows["session"], final)
    return pa.array(shares, mask=given.is_null().to_numpy(zero_copy_only=False))


def _finish_reasons(calls: Calls, last: Records) -> pa.Array:
    column = calls.table.column("finish_reason")
    chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return take_run(chunk, last)


def _steps(calls: Calls, last: Records) -> pa.Array:
    """The training step of each row's last turn."""
    type_ = ROWS.field("step").type
    if calls.table.schema.get_field_index("step") < 0:
        return pa.nulls(len(last), type_)
    column = calls.table.column("step")
    if not pa.types.is_integer(column.type) and not pa.types.is_null(column.type):
        raise SchemaError(f"column 'step' of turns is {column.type}: expected integers")
    return take_run(column.combine_chunks(), last).cast(type_)


def turn_lists(calls: Calls, links: Records, rows: Records, offsets: Longs) -> Column:
    """The column ``turns`` of rows; ``offsets`` is of `_core.measure_rows`."""
    turns = np.empty(int(offsets[-1]), np.int32)
    _core.list_turns(rows, links, calls.turn_index, offsets, turns)
    child = Column(len(turns), (None, turns))
    return Column(len(rows), (None, offsets), children=(child,))

"""The columns of planned rows with one value per row."""

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit._arrow.categories import dictionary_for
from trajkit._arrow.export import Column
from trajkit._arrow.take import take_run
from trajkit._kernel_names import numbers
from trajkit.errors import SchemaError
from trajkit.learn.rewards import final_rows, spread
from trajkit.policies import Policy
from trajkit.schema import ROWS, SEGMENT_KINDS
from trajkit.turns.calls import Calls, Records

# columns in the order in which the kernel fills them (_native/fill/row_scalars.pxi)
_INTS = tuple(_core.ENUMS["RowInt"])
_NULLABLE = ("parent_row", "row_weight", "segment_kind")
_FLAGS = ("truncated", "use_tool", "ill_formed")
numbers("RowBit", _NULLABLE + _FLAGS)


def row_scalars(
    calls: Calls,
    links: Records,
    policy: Policy,
    rows: Records,
    facts: pa.RecordBatch,
) -> dict[str, Column | pa.Array]:
    """The columns that are not lists, by name, of all rows of the sessions of ``calls``."""
    n_rows = len(rows)
    ints = np.empty((len(_INTS), n_rows), np.int32)
    mask_sums, weights = np.empty(n_rows, np.int64), np.empty(n_rows, np.float64)
    segments = np.empty(n_rows, np.int8)
    bits = np.zeros((len(_NULLABLE) + len(_FLAGS), (n_rows + 7) // 8), np.uint8)
    index, n_sessions = calls.turn_index, calls.n_sessions
    filled = ints, mask_sums, weights, segments, bits
    nulls = _core.fill_scalars(rows, links, index, n_sessions, *filled)
    values = {
        **dict(zip(_INTS, ints, strict=True)),
        "rollout_mask_sum": mask_sums,
        "row_weight": weights,
        "segment_kind": segments,
        **dict(zip(_FLAGS, bits[len(_NULLABLE) :], strict=True)),
    }
    columns = {name: Column(n_rows, (None, column)) for name, column in values.items()}
    for name, valid, n in zip(_NULLABLE, bits, nulls, strict=False):
        if n:
            columns[name] = Column(n_rows, (valid, values[name]), n)
    kinds = dictionary_for(SEGMENT_KINDS)
    session = take_run(facts, rows["session"])
    return {
        **columns,
        "segment_kind": columns["segment_kind"]._replace(dictionary=kinds),
        "session_id": session.column("session_id"),
        "group_id": session.column("group_id"),
        "reward": _rewards(session.column("reward"), policy, rows, links),
        "finish_reason": _finish_reasons(calls, rows["last"]),
        "step": _steps(calls, rows["last"]),
    }


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

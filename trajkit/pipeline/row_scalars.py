"""The columns of planned rows with one value per row."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arrow.categories import dictionary_for
from trajkit._arrow.export import Column
from trajkit._arrow.take import take_run
from trajkit.errors import SchemaError
from trajkit.policies import Policy
from trajkit.schema import ROWS, SEGMENT_KINDS
from trajkit.training.rewards import final_rows, spread
from trajkit.turns.calls import Calls, Longs, Records
from trajkit.turns.trainability import Bools


def row_scalars(
    calls: Calls, links: Records, policy: Policy, rows: Records, facts: pa.RecordBatch
) -> dict[str, Column | pa.Array]:
    """The columns of `trajkit.schema.ROWS_SUFFIX` that are not lists.

    ``rows`` are all rows of the sessions of ``calls``.
    """
    session, last, n_trained = rows["session"], rows["last"], rows["n_trained"]
    trained = np.bincount(session, n_trained, calls.n_sessions)[session]
    kinds = links["segment"][last] - 1
    facts = take_run(facts, session)
    return {
        "session_id": facts.column("session_id"),
        "group_id": facts.column("group_id"),
        "reward": _rewards(facts.column("reward"), policy, rows, links),
        "finish_reason": _finish_reasons(calls, last),
        "step": _steps(calls, last),
        "row_index": _column(rows["index"], np.int32),
        "suffix_start": _column(rows["stored"], np.int32),
        "prompt_length": _column(rows["prompt_len"], np.int32),
        "parent_row": _column(rows["parent_row"], np.int32, rows["parent_row"] >= 0),
        "shared_length": _column(rows["shared"], np.int32),
        "last_turn": _column(calls.turn_index[last], np.int32),
        "rollout_mask_sum": _column(trained, np.int64),
        "row_weight": _column(
            n_trained / np.maximum(trained, 1), np.float64, trained > 0
        ),
        "segment_kind": _column(
            np.maximum(kinds, 0), np.int8, kinds >= 0, dictionary_for(SEGMENT_KINDS)
        ),
        **{
            name: Column(len(rows), (None, np.packbits(rows[name], bitorder="little")))
            for name in ("truncated", "use_tool", "ill_formed")
        },
    }


def _column(
    values: npt.NDArray[Any],
    dtype: type[np.generic],
    valid: Bools | None = None,
    dictionary: pa.Array | None = None,
) -> Column:
    bits = None
    if valid is not None and not valid.all():
        bits = np.packbits(valid, bitorder="little")
    nulls = 0 if bits is None else -1
    buffers = bits, values.astype(dtype)
    return Column(len(values), buffers, nulls, dictionary=dictionary)


def sliced(column: Column | pa.Array, start: int, length: int) -> Column | pa.Array:
    """A range of a column's values."""
    if isinstance(column, Column):
        return column._replace(length=length, offset=start)
    return column.slice(start, length)


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
    """The column ``turns`` of rows; ``offsets`` are where each row's list starts."""
    turns = np.empty(int(offsets[-1]), np.int32)
    _core.list_turns(rows, links, calls.turn_index, offsets, turns)
    child = Column(len(turns), (None, turns))
    return Column(len(rows), (None, offsets), children=(child,))

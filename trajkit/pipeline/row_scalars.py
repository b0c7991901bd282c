"""The columns of planned rows with one value per row."""

import numpy as np
import pyarrow as pa

from trajkit._arrow.categories import dictionary_for
from trajkit._arrow.take import take_run
from trajkit.errors import SchemaError
from trajkit.policies import Policy
from trajkit.schema import ROWS, SEGMENT_KINDS
from trajkit.training.rewards import final_rows, spread
from trajkit.turns.calls import Calls, Records


def row_scalars(
    calls: Calls,
    links: Records,
    policy: Policy,
    rows: Records,
    facts: pa.RecordBatch,
) -> dict[str, pa.Array]:
    """The columns that are not lists, by name, of all rows of the sessions of ``calls``."""
    last, session = rows["last"], rows["session"]
    of_session = np.bincount(session, rows["n_trained"], calls.n_sessions)
    mask_sums = of_session.astype(np.int64)[session]
    weights = rows["n_trained"] / np.maximum(mask_sums, 1)
    parents = rows["parent_row"].copy()
    segments = (links["segment"][last] - 1).astype(np.int8)
    numbers = {
        "row_index": rows["index"],
        "suffix_start": rows["stored"],
        "prompt_length": rows["prompt_len"],
        "shared_length": rows["shared"],
        "last_turn": calls.turn_index[last],
    }
    known = take_run(facts, session)
    return {
        "session_id": known.column("session_id"),
        "group_id": known.column("group_id"),
        "reward": _rewards(known.column("reward"), policy, rows, links),
        "finish_reason": _finish_reasons(calls, last),
        "step": _steps(calls, last),
        "rollout_mask_sum": pa.array(mask_sums),
        "row_weight": pa.array(weights, mask=mask_sums == 0),
        "parent_row": pa.array(parents, mask=parents < 0),
        "segment_kind": pa.DictionaryArray.from_arrays(
            pa.array(segments, mask=segments < 0), dictionary_for(SEGMENT_KINDS)
        ),
        **{name: pa.array(column.astype(np.int32)) for name, column in numbers.items()},
        **{
            name: pa.array(rows[name] != 0)
            for name in ("truncated", "use_tool", "ill_formed")
        },
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

"""The columns of planned rows that have one value a row."""

import numpy as np
import pyarrow as pa

from trajkit.calls import Calls, Ints, Longs, Records
from trajkit.kinds import names_of
from trajkit.policies import Policy
from trajkit.rewards import final_rows, spread
from trajkit.schema import SEGMENT_KINDS


def row_facts(
    calls: Calls,
    links: Records,
    policy: Policy,
    rows: Records,
    facts: pa.RecordBatch,
) -> dict[str, pa.Array]:
    """The columns of `trajkit.schema.ROWS_SUFFIX` that hold no lists, by name.

    ``rows`` are all rows of the sessions that ``facts`` and ``calls`` are of.
    """
    known, mask_sums = _of_rows(facts, rows), _mask_sums(rows)
    parent_row, last = rows["parent_row"], rows["last"]
    segments = links["segment"][last]
    flags = ("truncated", "use_tool", "ill_formed")
    return {
        "session_id": known.column("session_id"),
        "row_index": pa.array(rows["index"]),
        "group_id": known.column("group_id"),
        "suffix_start": pa.array(rows["stored"].astype(np.int32)),
        "prompt_length": pa.array(rows["prompt_len"].astype(np.int32)),
        "parent_row": pa.array(parent_row, mask=parent_row < 0),
        "shared_length": pa.array(rows["shared"].astype(np.int32)),
        "reward": _rewards(known.column("reward"), policy, rows, segments),
        "row_weight": pa.array(
            rows["n_trained"] / np.maximum(mask_sums, 1), mask=mask_sums == 0
        ),
        "rollout_mask_sum": pa.array(mask_sums),
        "finish_reason": _finish_reasons(calls, last),
        **{name: pa.array(rows[name].astype(np.bool_)) for name in flags},
        "segment_kind": pa.DictionaryArray.from_arrays(
            pa.array(segments.astype(np.int8) - 1, mask=segments == 0),
            names_of(SEGMENT_KINDS),
        ),
        "last_turn": pa.array(calls.turn_index[last]),
    }


def _of_rows(facts: pa.RecordBatch, rows: Records) -> pa.RecordBatch:
    """What is known of each row's session."""
    sessions = rows["session"]
    if len(sessions) and (np.diff(sessions) == 1).all():  # a row each
        return facts.slice(int(sessions[0]), len(sessions))
    return facts.take(pa.array(sessions))


def _mask_sums(rows: Records) -> Longs:
    """Trained tokens of all rows of each row's session, shape (n_rows,)."""
    sums = np.zeros(int(rows["session"].max(initial=-1)) + 1, np.int64)
    np.add.at(sums, rows["session"], rows["n_trained"])
    of_row: Longs = sums[rows["session"]]
    return of_row


def _rewards(
    given: pa.Array, policy: Policy, rows: Records, segments: Ints
) -> pa.Array:
    """The rollout's reward in each row, spread as the policy says."""
    if policy.rewards == "copy" or not len(rows):
        return given
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
    return chunk.take(pa.array(last))

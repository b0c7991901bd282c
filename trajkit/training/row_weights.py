"""Row weights and advantages that do not depend on the number of rows.

A rollout is one session, however many rows it has. Weights are shares of a rollout, and
averages run over rollouts.
"""

from typing import Literal, TypeAlias, overload

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike, as_table, canonical, canonical_rows
from trajkit._arrow.reshape import with_column
from trajkit._streams.lockstep import Stream, over_sessions
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema import SESSIONS
from trajkit.training._checks import (
    Longs,
    check_finite,
    check_once,
    session_codes,
    trained_tokens,
)

By: TypeAlias = Literal["token", "row", "rollout"]
Baseline: TypeAlias = Literal["none", "group_mean", "leave_one_out"]

# the columns read from a table of advantages
_ADVANTAGES = pa.schema(
    [
        pa.field("session_id", pa.string(), nullable=False),
        pa.field("advantage", pa.float64()),
    ],
    metadata=SESSIONS.metadata,
)


@overload
def add_weights(rows: Stream | pa.RecordBatchReader, by: By = ...) -> Stream: ...
@overload
def add_weights(rows: TableLike, by: By = ...) -> pa.Table: ...
def add_weights(rows: TableLike | Stream, by: By = "token") -> pa.Table | Stream:
    """Set ``row_weight`` so that every rollout has a total weight of one.

    ``n`` is the number of trained tokens of a row, ``N`` that of all rows of its
    rollout, and ``K`` the number of the rollout's rows that train:

    ========= ============== ====================================== ===================
    by        row_weight     sums to one over a rollout             for a trainer that
    ========= ============== ====================================== ===================
    token     ``n / N``      the weights of its rows                averages in a row
    row       ``1 / K``      the weights of its rows                averages in a row
    rollout   ``1 / N``      the weights of its trained tokens      sums in a row
    ========= ============== ====================================== ===================

    ``token`` and ``rollout`` give the same loss: every trained token of a rollout has
    the same weight in any row. ``row`` gives the mean of the rows' means, which depends
    on how the rollout was cut into rows.

    Parameters
    ----------
    rows : table, or iterator of record batches
        `trajkit.schema.ROWS` or ``ROWS_SUFFIX`` with all rows of each session. An
        iterator (or a RecordBatchReader) is read lazily; a session may span consecutive
        batches.
    by : {"token", "row", "rollout"}
        The definition of the weight; see the table.

    Returns
    -------
    Table
        The rows with new ``row_weight`` and ``rollout_mask_sum`` (``N``). A row that
        trains nothing has weight 0; if ``N`` is 0, the weights are null. For an
        iterator: an iterator of record batches.

    Raises
    ------
    PolicyError
        ``by`` is none of the three.

    Examples
    --------
    >>> import trajkit as tk
    >>> call = {"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}
    >>> turns = tk.from_records([call, {**call, "prompt_ids": [4]}])
    >>> add_weights(tk.linearize(turns), by="rollout")["row_weight"].to_pylist()
    [0.25, 0.25]

    References
    ----------
    ``rollout`` is slime's denominator per rollout_id (spec: segments 8).
    """
    check_choice("by", by, By)
    return over_sessions(lambda rows: _weighed(rows, by), ("rows", rows))


def _weighed(rows: pa.Table, by: By) -> pa.Table:
    table = canonical_rows(rows)
    session, n_sessions = session_codes(table)
    n_trained = trained_tokens(table)
    mask_sum = np.bincount(session, n_trained, n_sessions)[session].astype(np.int64)
    if by == "token":
        share = n_trained.astype(np.float64)
        total = mask_sum
    elif by == "row":
        share = (n_trained > 0).astype(np.float64)
        total = np.bincount(session, share, n_sessions)[session].astype(np.int64)
    else:
        share = (n_trained > 0).astype(np.float64)
        total = mask_sum
    weights = pa.array(share / np.maximum(total, 1), mask=mask_sum == 0)
    table = with_column(table, "row_weight", weights)
    return with_column(table, "rollout_mask_sum", pa.array(mask_sum))


def advantages(sessions: TableLike, baseline: Baseline = "group_mean") -> pa.Table:
    """The baseline and the advantage of each rollout, within its group.

    Over the ``n`` rollouts of a group that have a reward ``R``, each counted once,
    however many rows it made:

    ============== ========================================= =========================
    baseline       b of rollout i                            advantage
    ============== ========================================= =========================
    none           0                                         ``R_i``
    group_mean     ``sum(R) / n``                            ``R_i - b_i``
    leave_one_out  ``(sum(R) - R_i) / (n - 1)``              ``R_i - b_i``
    ============== ========================================= =========================

    Parameters
    ----------
    sessions : table
        The report of `trajkit.linearize`, which has a line for every session, also for
        those without rows; or `trajkit.schema.SESSIONS`. A session with a null group_id
        is a group of its own.
    baseline : {"none", "group_mean", "leave_one_out"}

    Returns
    -------
    Table
        The sessions with these columns behind, each in place of one of its name:

        scored : bool
            It has a reward. One without is in no baseline and has none of its own.
        trained : bool
            Some row trains it. One that is scored and not trained still shifts the
            baseline of its group. Null where ``sessions`` has no ``tokens_trained``.
        baseline, advantage : float64
            Null where there is no reward, or (leave_one_out) nobody else's.

    Raises
    ------
    PolicyError
        The baseline is none of the three.
    InvalidTurnsError
        A session has two lines, or a reward that is not finite.

    References
    ----------
    group_mean is GRPO's without the division by the deviation; leave_one_out is RLOO's.
    """
    check_choice("baseline", baseline, Baseline)
    source = as_table(sessions)
    # a report is a table of sessions with more columns
    table = canonical(source.replace_schema_metadata(None), SESSIONS)
    check_once(table, ["session_id"])
    check_finite(table)
    scored = np.asarray(table.column("reward").is_valid())
    rewards = table.column("reward").fill_null(0.0).to_numpy()
    group = _groups(table)
    n = np.bincount(group, scored)[group]
    total = np.bincount(group, rewards)[group]
    if baseline == "none":
        base, known = np.zeros(len(rewards)), scored
    elif baseline == "group_mean":
        base, known = total / np.maximum(n, 1), scored
    else:
        base, known = (total - rewards) / np.maximum(n - 1, 1), scored & (n > 1)
    trained = pa.nulls(len(rewards), pa.bool_())
    if "tokens_trained" in table.column_names:
        trained = pc.greater(table.column("tokens_trained"), 0)
    out = table.replace_schema_metadata(source.schema.metadata)
    for name, column in (
        ("scored", pa.array(scored)),
        ("trained", trained),
        ("baseline", pa.array(base, mask=~known)),
        ("advantage", pa.array(rewards - base, mask=~known)),
    ):
        out = with_column(out, name, column)
    return out


@overload
def add_advantages(
    rows: Stream | pa.RecordBatchReader, sessions: TableLike
) -> Stream: ...
@overload
def add_advantages(rows: TableLike, sessions: TableLike) -> pa.Table: ...
def add_advantages(rows: TableLike | Stream, sessions: TableLike) -> pa.Table | Stream:
    """Add the column ``advantage`` (float64): the advantage of each row's session.

    Parameters
    ----------
    rows : table, or iterator of record batches
        `trajkit.schema.ROWS` or ``ROWS_SUFFIX``. An iterator (or a RecordBatchReader)
        is read lazily.
    sessions : table
        A table with ``session_id`` and ``advantage``, from
        `trajkit.training.advantages`.

    Returns
    -------
    Table
        The rows; the advantage is null if the session's is. For an iterator: an
        iterator of record batches.

    Raises
    ------
    SchemaError
        A column of ``sessions`` is missing or has the wrong type.
    InvalidTurnsError
        A session of the rows has no line in ``sessions``, or two; an advantage is NaN
        or infinite.
    """
    # a report is a table of sessions with more columns
    given = as_table(sessions).replace_schema_metadata(None)
    if "advantage" not in given.column_names:
        raise SchemaError("column 'advantage' of sessions is absent")
    facts = canonical(given, _ADVANTAGES).select(_ADVANTAGES.names)
    check_once(facts, ["session_id"])
    check_finite(facts, "advantage")
    return over_sessions(lambda rows: _with_advantages(rows, facts), ("rows", rows))


def _with_advantages(rows: pa.Table, facts: pa.Table) -> pa.Table:
    table = canonical_rows(rows)
    found = pc.index_in(table.column("session_id"), facts.column("session_id"))
    if found.null_count:
        missing = table.column("session_id").filter(found.is_null())[0]
        raise InvalidTurnsError(
            f"session {missing.as_py()!r} has rows, but no line in sessions"
        )
    return with_column(table, "advantage", facts.column("advantage").take(found))


def _groups(table: pa.Table) -> Longs:
    """The number of each session's group; a null group_id is a group of its own."""
    ids = table.column("group_id")
    names = pc.unique(ids.drop_null())
    codes = np.asarray(pc.index_in(ids, names).fill_null(-1)).astype(np.int64)
    alone = np.asarray(ids.is_null())
    codes[alone] = len(names) + np.arange(np.count_nonzero(alone))
    return codes

"""Advantages of the steps of rollouts: of turns, or of segments."""

from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import TableLike, as_table, canonical
from trajkit._arrow.reshape import with_column
from trajkit.errors import InvalidTurnsError
from trajkit.schema import SEGMENT_REWARDS, SESSIONS, TURN_REWARDS
from trajkit.training._checks import (
    check_finite,
    check_number,
    check_once,
    constant_groups,
    warn_without_signal,
)
from trajkit.training.baselines import group_codes, scaled

Credit: TypeAlias = Literal["to_go", "step"]
StepScale: TypeAlias = Literal["none", "group_std"]


def step_advantages(
    rewards: TableLike,
    sessions: TableLike,
    *,
    credit: Credit = "to_go",
    scale: StepScale = "group_std",
    epsilon: float = 1e-6,
) -> pa.Table:
    """The advantage of each turn or segment, from rewards of turns or segments.

    With ``r`` the reward of a step and the mean and sample deviation over all steps of
    the rollouts of a group, ``r' = r - mean``, or ``(r - mean) / (std + epsilon)`` with
    scale "group_std". A step counts once, however many rows train it.

    Parameters
    ----------
    rewards : table
        `trajkit.schema.TURN_REWARDS` or ``SEGMENT_REWARDS``: the steps are turns if it
        has the column ``turn_index``.
    sessions : table
        `trajkit.schema.SESSIONS` or the report of `trajkit.linearize`; its ``group_id``
        counts. A session with a null group_id is a group of its own.
    credit : {"to_go", "step"}
        to_go
            A step has the sum of ``r'`` of its own and the later steps of the session.
        step
            A step has its own ``r'``.
    scale : {"none", "group_std"}
    epsilon : float
        Added to the standard deviation; 0 or more.

    Returns
    -------
    Table
        The rewards with the column ``advantage`` (float64), for
        `trajkit.add_advantages`. A null reward is in no mean and no sum, and its own
        advantage is null. With "group_std" the advantages of a group with one reward
        are null.

    Raises
    ------
    ArgumentError
        ``credit``, ``scale`` or ``epsilon`` is not allowed.
    InvalidTurnsError
        A step has two lines or a reward that is not finite; its session has no line in
        ``sessions``, or two.

    Warns
    -----
    NoSignalWarning
        There are advantages, and all are 0.

    References
    ----------
    GRPO with process supervision (arXiv 2402.03300, 4.1.3): credit "to_go", scale
    "group_std".
    """
    check_choice("credit", credit, Credit)
    check_choice("scale", scale, StepScale)
    check_number("epsilon", epsilon, 0)
    given = as_table(rewards).replace_schema_metadata(None)
    by_turn = "turn_index" in given.column_names
    table = canonical(given, TURN_REWARDS if by_turn else SEGMENT_REWARDS)
    check_once(table, table.column_names[:2])
    check_finite(table)
    facts = canonical(as_table(sessions).replace_schema_metadata(None), SESSIONS)
    check_once(facts, ["session_id"])
    at = pc.index_in(table.column("session_id"), facts.column("session_id"))
    if at.null_count:
        name = table.column("session_id").filter(at.is_null())[0]
        raise InvalidTurnsError(
            f"session {name.as_py()!r} has rewards, but no line in sessions"
        )
    session = np.asarray(at, np.int64)
    group = group_codes(facts)[session]
    known = np.asarray(table.column("reward").is_valid())
    reward = table.column("reward").fill_null(0.0).to_numpy()
    n = np.bincount(group, known)[group]
    mean = np.bincount(group, reward)[group] / np.maximum(n, 1)
    constant = constant_groups(given, group, reward, known)
    gain = np.where(known & ~constant, reward - mean, 0.0)
    valid = known
    if scale == "group_std":
        variance = np.bincount(group, gain**2)[group] / np.maximum(n - 1, 1)
        gain = scaled(gain, np.sqrt(variance), epsilon)
        valid = known & (n > 1)
    if credit == "to_go":
        index = table.column(1).to_numpy()
        order = np.lexsort((-index.astype(np.int64), session))
        sums = np.cumsum(gain[order])
        first = np.diff(session[order], prepend=-1) != 0
        before = np.where(first, sums - gain[order], 0.0)
        starts = np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
        to_go = np.empty_like(gain)
        to_go[order] = sums - before[starts]
        gain = to_go
    warn_without_signal(gain[valid], reward[valid], group[valid])
    return with_column(table, "advantage", pa.array(gain, mask=~valid))

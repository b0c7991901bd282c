"""Advantages of rollouts: baselines, scaling and clipping, always over rollouts."""

from typing import Literal, TypeAlias, overload

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, check_flag
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import (
    TableLike,
    as_table,
    canonical,
    canonical_rows,
    place,
)
from trajkit._arrow.reshape import with_column
from trajkit._arrow.take import row_lengths
from trajkit._streams.lockstep import Stream, map_sessions
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema import SESSIONS
from trajkit.training._checks import (
    Floats,
    Longs,
    check_finite,
    check_number,
    check_once,
    constant_groups,
    warn_without_signal,
)
from trajkit.training.rewards import segment_lines, trained_turns

Baseline: TypeAlias = Literal["none", "group_mean", "leave_one_out"]
Scale: TypeAlias = Literal["none", "group_std", "batch_std"]

# the columns read from a table of advantages
_ADVANTAGES = pa.schema(
    [
        pa.field("session_id", pa.string(), nullable=False),
        pa.field("advantage", pa.float64()),
    ],
    metadata=SESSIONS.metadata,
)


def advantages(
    sessions: TableLike,
    baseline: Baseline = "group_mean",
    *,
    scale: Scale = "none",
    epsilon: float = 1e-6,
    clip: float | None = None,
    drop_constant: bool = False,
) -> pa.Table:
    """The baseline and the advantage of each rollout.

    Each rollout counts once, however many rows it has. With the ``n`` rollouts of a
    group that have a reward ``R``:

    ============== ================================ ==============
    baseline       b of rollout i                   advantage A
    ============== ================================ ==============
    none           0                                ``R_i``
    group_mean     ``sum(R) / n``                   ``R_i - b_i``
    leave_one_out  ``(sum(R) - R_i) / (n - 1)``     ``R_i - b_i``
    ============== ================================ ==============

    ========== ========================================================================
    scale      advantage
    ========== ========================================================================
    none       ``A``
    group_std  ``A / (std(R) + epsilon)``, over the group
    batch_std  ``(A - mean(A)) / (std(A) + epsilon)``, over all advantages of the table
    ========== ========================================================================

    ``std`` is the sample standard deviation (divided by ``n - 1``).

    Parameters
    ----------
    sessions : table
        The report of `trajkit.linearize`, which has a line for every session, also for
        those without rows; or `trajkit.schema.SESSIONS`. A session with a null group_id
        is a group of its own.
    baseline : {"none", "group_mean", "leave_one_out"}
        See the first table.
    scale : {"none", "group_std", "batch_std"}
        See the second table.
    epsilon : float
        Added to the standard deviation; 0 or more.
    clip : float, optional
        Limit advantages to ``-clip`` and ``clip``; above 0.
    drop_constant : bool
        Make the advantages of constant groups null, so that they are in no loss.

    Returns
    -------
    Table
        The sessions followed by these columns, which replace columns of their name:

        scored : bool
            It has a reward. A rollout without one enters no baseline.
        trained : bool
            Some row trains it. A scored rollout that is not trained still shifts the
            baseline of its group. Null if ``sessions`` has no ``tokens_trained``.
        constant : bool
            All rewards of its group are equal but for rounding, and there are two or
            more: the group has no variance. Null without a reward.
        baseline, advantage : float64
            Null without a reward, and if a mean or a deviation needs another rollout.

    Raises
    ------
    ArgumentError
        ``baseline``, ``scale``, ``epsilon`` or ``clip`` is not allowed.
    InvalidTurnsError
        A session has two lines, or a reward that is not finite.

    Warns
    -----
    NoSignalWarning
        There are advantages, and all are 0.

    References
    ----------
    GRPO (arXiv 2402.03300, 4.1.2): group_mean with group_std; TRL, verl and slime take
    the sample deviation and add 1e-4 or 1e-6. A group of one rollout has no deviation,
    so its advantage is null here; verl (1dda039) takes its reward.
    RLOO (arXiv 2402.14740): leave_one_out. Dr. GRPO (arXiv 2503.20783): group_mean
    alone, see `trajkit.add_weights` for its lengths. REINFORCE++ (arXiv 2501.03262):
    batch_std, there over tokens. DAPO (arXiv 2503.14476): ``drop_constant``.
    """
    check_choice("baseline", baseline, Baseline)
    check_choice("scale", scale, Scale)
    check_flag("drop_constant", drop_constant)
    check_number("epsilon", epsilon, 0)
    if clip is not None:
        check_number("clip", clip, 0, above=True)
    source = as_table(sessions)
    # a report is a table of sessions with more columns
    table = canonical(source.replace_schema_metadata(None), SESSIONS)
    check_once(table, ["session_id"])
    check_finite(table)
    scored = np.asarray(table.column("reward").is_valid())
    rewards = table.column("reward").fill_null(0.0).to_numpy()
    group = group_codes(table)
    n = np.bincount(group, scored)[group]
    mean = np.bincount(group, rewards)[group] / np.maximum(n, 1)
    constant = constant_groups(source, group, rewards, scored)
    base, known = np.zeros(len(rewards)), scored
    if baseline == "group_mean":
        base = np.where(constant, rewards, mean)
    elif baseline == "leave_one_out":
        others = (np.bincount(group, rewards)[group] - rewards) / np.maximum(n - 1, 1)
        base, known = np.where(constant, rewards, others), scored & (n > 1)
    gain = rewards - base
    valid = known & ~constant if drop_constant else known
    if scale == "group_std":
        squares = np.where(scored, (rewards - mean) ** 2, 0.0)
        variance = np.bincount(group, squares)[group] / np.maximum(n - 1, 1)
        gain = scaled(gain, np.where(constant, 0.0, np.sqrt(variance)), epsilon)
        valid = valid & (n > 1)
    elif scale == "batch_std":
        if np.count_nonzero(valid) < 2:
            valid = np.zeros_like(valid)
        else:
            gain = scaled(gain - gain[valid].mean(), gain[valid].std(ddof=1), epsilon)
    if clip is not None:
        gain = np.clip(gain, -clip, clip)
    warn_without_signal(gain[valid], rewards[valid], group[valid])
    trained = pa.nulls(len(rewards), pa.bool_())
    if "tokens_trained" in table.column_names:
        trained = pc.greater(table.column("tokens_trained"), 0)
    out = table.replace_schema_metadata(source.schema.metadata)
    for name, column in (
        ("scored", pa.array(scored)),
        ("trained", trained),
        ("constant", pa.array(constant, mask=~scored)),
        ("baseline", pa.array(base, mask=~known)),
        ("advantage", pa.array(gain, mask=~valid)),
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
    """Add the column ``advantage``: that of each row's session, segment or turns.

    Parameters
    ----------
    rows : table, or iterator of record batches
        `trajkit.schema.ROWS` or ``ROWS_SUFFIX``. Iterators as for `trajkit.linearize`.
    sessions : table
        A table with ``session_id`` and ``advantage``, from
        `trajkit.training.advantages`. If it also has ``turn_index`` or ``row_index``
        (from `trajkit.training.step_advantages`), it has a line per turn or segment.

    Returns
    -------
    Table
        The rows. ``advantage`` is a float64, null if the session's or the segment's is.
        For advantages of turns it is a list of float64 per row: for each trained token
        that of the turn that sampled it, 0 for other tokens. For an iterator: an
        iterator of record batches.

    Raises
    ------
    SchemaError
        A column of ``sessions`` is missing or has the wrong type.
    InvalidTurnsError
        A session, segment or trained turn of the rows has no line in ``sessions``, or
        two; an advantage is NaN or infinite; that of a trained turn is null.
    """
    # a report is a table of sessions with more columns
    given = as_table(sessions).replace_schema_metadata(None)
    if "advantage" not in given.column_names:
        raise SchemaError("column 'advantage' of sessions is absent")
    steps = [name for name in ("turn_index", "row_index") if name in given.column_names]
    schema = _ADVANTAGES
    for name in steps:
        schema = schema.insert(1, pa.field(name, pa.int32(), nullable=False))
    facts = canonical(given, schema).select(schema.names)
    check_once(facts, ["session_id", *steps])
    check_finite(facts, "advantage")
    return map_sessions(lambda rows: _with_advantages(rows, facts), ("rows", rows))


def _with_advantages(rows: pa.Table, facts: pa.Table) -> pa.Table:
    table = canonical_rows(rows)
    if "turn_index" in facts.column_names:
        return with_column(table, "advantage", _of_tokens(table, facts))
    if "row_index" in facts.column_names:
        found = pa.array(segment_lines(table, facts, "sessions"))
    else:
        found = pc.index_in(table.column("session_id"), facts.column("session_id"))
    if found.null_count:
        missing = table.column("session_id").filter(found.is_null())[0]
        raise InvalidTurnsError(
            f"session {missing.as_py()!r} has rows, but no line in sessions"
        )
    return with_column(table, "advantage", facts.column("advantage").take(found))


def _of_tokens(table: pa.Table, facts: pa.Table) -> pa.LargeListArray:
    """Per row a list: the advantage of the turn of each trained token, else 0."""
    row, start, stop, line = trained_turns(table, facts, "sessions")
    unknown = np.flatnonzero(np.asarray(facts.column("advantage").is_null())[line])
    if len(unknown):
        at = int(line[unknown[0]])
        raise InvalidTurnsError(
            f"{place(facts, at)}: advantage is null, but row "
            f"{table.column('row_index')[int(row[unknown[0]])]} trains the turn. Give it "
            "a reward, or leave the session out"
        )
    offsets = np.append(0, np.cumsum(row_lengths(table)))
    values = np.zeros(int(offsets[-1]))
    first, n = offsets[row] + start, stop - start
    within = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
    gains = facts.column("advantage").to_numpy()[line]
    values[np.repeat(first, n) + within] = np.repeat(gains, n)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def group_codes(table: pa.Table) -> Longs:
    """The number of each session's group; a null group_id is a group of its own."""
    ids = table.column("group_id")
    names = pc.unique(ids.drop_null())
    codes = np.asarray(pc.index_in(ids, names).fill_null(-1)).astype(np.int64)
    alone = np.asarray(ids.is_null())
    codes[alone] = len(names) + np.arange(np.count_nonzero(alone))
    return codes


def scaled(gain: Floats, deviation: Floats | np.float64, epsilon: float) -> Floats:
    """Gains divided by deviations; 0 if there is no deviation at all."""
    divisor = deviation + epsilon
    return np.divide(gain, divisor, out=np.zeros_like(gain), where=divisor > 0)

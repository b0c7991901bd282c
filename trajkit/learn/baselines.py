"""Advantages of rollouts, and of their turns or segments."""

from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, check_flag
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.learn._checks import (
    Bools,
    Floats,
    Longs,
    check_finite,
    check_number,
    check_once,
    constant_groups,
    warn_without_signal,
)
from trajkit.learn.rewards import segment_lines, trained_turns
from trajkit.schema import LINKS, SEGMENT_REWARDS, SESSIONS, TURN_REWARDS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import (
    TableLike,
    as_table,
    canonical,
    canonical_rows,
    place,
)
from trajkit.tables.reshape import with_column
from trajkit.tables.stages import apply, stage
from trajkit.tables.take import row_lengths, tuples

Baseline: TypeAlias = Literal["none", "group_mean", "leave_one_out"]
Scale: TypeAlias = Literal["none", "group_std", "batch_std"]
Credit: TypeAlias = Literal["to_go", "step"]
StepBaseline: TypeAlias = Literal["none", "group_mean"]
StepScale: TypeAlias = Literal["none", "group_std"]

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
        ``baseline``, ``scale`` or ``epsilon`` is not allowed.
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
    source = as_table(sessions)
    # a report is a table of sessions with more columns
    table = canonical(source.replace_schema_metadata(None), SESSIONS)
    check_once(table, ["session_id"])
    scored, rewards, group, n, mean, constant = _in_groups(
        table, _groups(table), source
    )
    base, known = np.zeros(len(rewards)), scored
    if baseline == "group_mean":
        base = np.where(constant, rewards, mean)
    elif baseline == "leave_one_out":
        others = (np.bincount(group, rewards)[group] - rewards) / np.maximum(n - 1, 1)
        base, known = np.where(constant, rewards, others), scored & (n > 1)
    gain = rewards - base
    valid = known & ~constant if drop_constant else known
    if scale == "group_std":
        gain = _by_deviation(
            gain, rewards - mean, scored & ~constant, group, n, epsilon
        )
        valid = valid & (n > 1)
    elif scale == "batch_std":
        if np.count_nonzero(valid) < 2:
            valid = np.zeros_like(valid)
        else:
            gain = _scaled(gain - gain[valid].mean(), gain[valid].std(ddof=1), epsilon)
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


@stage
def add_advantages(rows: TableLike, sessions: TableLike) -> pa.Table:
    """Add the column ``advantage``: that of each row's session, segment or turns.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS`.
    sessions : table
        A table with ``session_id`` and ``advantage``, from
        `trajkit.learn.advantages`. If it also has ``turn_index`` or ``row_index``
        (from `trajkit.learn.step_advantages`), it has a line per turn or segment.

    Returns
    -------
    Table
        The rows. ``advantage`` is a float64, null if the session's or the segment's is.
        For advantages of turns it is a list of float64 per row: for each trained token
        that of the turn that sampled it, 0 for other tokens.

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
    return apply(lambda rows: _with_advantages(rows, facts), rows)


add_advantages_batches = add_advantages.batches


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


def _groups(table: pa.Table) -> Longs:
    """The number of each session's group; a null group_id is a group of its own."""
    ids = table.column("group_id")
    names = pc.unique(ids.drop_null())
    codes = np.asarray(pc.index_in(ids, names).fill_null(-1)).astype(np.int64)
    alone = np.asarray(ids.is_null())
    codes[alone] = len(names) + np.arange(np.count_nonzero(alone))
    return codes


def _in_groups(
    table: pa.Table, group: Longs, source: pa.Table
) -> tuple[Bools, Floats, Longs, Longs, Floats, Bools]:
    """Of each reward: whether it is known, itself, its group, how many known rewards that
    has, their mean, and whether they are all equal but for rounding.
    """
    check_finite(table)
    known = np.asarray(table.column("reward").is_valid())
    reward = table.column("reward").fill_null(0.0).to_numpy()
    n = np.bincount(group, known)[group]
    mean = np.bincount(group, reward)[group] / np.maximum(n, 1)
    return known, reward, group, n, mean, constant_groups(source, group, reward, known)


def _by_deviation(
    gain: Floats,
    centred: Floats,
    counted: Bools,
    group: Longs,
    n: Longs,
    epsilon: float,
) -> Floats:
    """Gains divided by the sample deviation of their group."""
    squares = np.bincount(group, np.where(counted, centred**2, 0.0))[group]
    return _scaled(gain, np.sqrt(squares / np.maximum(n - 1, 1)), epsilon)


def _scaled(gain: Floats, deviation: Floats | np.float64, epsilon: float) -> Floats:
    """Gains divided by deviations; 0 if there is no deviation at all."""
    divisor = deviation + epsilon
    return np.divide(gain, divisor, out=np.zeros_like(gain), where=divisor > 0)


def step_advantages(
    rewards: TableLike,
    sessions: TableLike,
    *,
    credit: Credit = "to_go",
    baseline: StepBaseline = "group_mean",
    scale: StepScale = "group_std",
    epsilon: float = 1e-6,
    discount: float = 1.0,
    links: TableLike | None = None,
) -> pa.Table:
    """The advantage of each turn or segment, from rewards of turns or segments.

    With ``r`` the reward of a step and the mean and sample deviation over all steps of
    the rollouts of a group, ``r' = r - mean``, or ``(r - mean) / (std + epsilon)`` with
    scale "group_std". A step counts once, however many rows train it.

    With credit "to_go" the steps of a session are the steps of an episode, and the
    advantage is that of generalized advantage estimation without a critic, where
    ``discount`` is the product of its gamma and lambda.

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
            A step has the sum of ``r'`` of its own and the later steps of the session, each
            times ``discount`` to the power of its distance in steps.
        step
            A step has its own ``r'``.
    baseline : {"none", "group_mean"}
        "none": no mean is subtracted.
    scale : {"none", "group_std"}
    epsilon : float
        Added to the standard deviation; 0 or more.
    discount : float
        From 0 to 1.
    links : table, optional
        `trajkit.schema.LINKS` of the turns (`trajkit.link`): the later steps of a turn are
        then those of the calls that continue it, so that a branch or a sub-agent does not
        count for turns that it does not continue. None: all later turns of the session.

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
        ``credit``, ``baseline``, ``scale``, ``epsilon`` or ``discount`` is not allowed, or
        there are ``links`` with rewards of segments.
    InvalidTurnsError
        A step has two lines or a reward that is not finite; its session has no line in
        ``sessions``, or two; a turn has no line in ``links``.

    Warns
    -----
    NoSignalWarning
        There are advantages, and all are 0.

    References
    ----------
    GRPO with process supervision (arXiv 2402.03300, 4.1.3): credit "to_go", scale
    "group_std". Turn-level GAE: AReaL's ``gae_timestep_unit="turn"``
    (https://github.com/areal-project/AReaL/blob/cbff54d/areal/trainer/ppo/gae.py), with
    baseline and scale "none".
    """
    check_choice("credit", credit, Credit)
    check_choice("baseline", baseline, StepBaseline)
    check_choice("scale", scale, StepScale)
    check_number("epsilon", epsilon, 0)
    check_number("discount", discount, 0)
    if discount > 1:
        raise ArgumentError(f"discount={discount!r}: expected a number from 0 to 1")
    given = as_table(rewards).replace_schema_metadata(None)
    by_turn = "turn_index" in given.column_names
    table = canonical(given, TURN_REWARDS if by_turn else SEGMENT_REWARDS)
    check_once(table, table.column_names[:2])
    facts = canonical(as_table(sessions).replace_schema_metadata(None), SESSIONS)
    check_once(facts, ["session_id"])
    at = pc.index_in(table.column("session_id"), facts.column("session_id"))
    if at.null_count:
        name = table.column("session_id").filter(at.is_null())[0]
        raise InvalidTurnsError(
            f"session {name.as_py()!r} has rewards, but no line in sessions"
        )
    session = np.asarray(at, np.int64)
    known, reward, group, n, mean, constant = _in_groups(
        table, _groups(facts)[session], given
    )
    centred = np.where(known & ~constant, reward - mean, 0.0)
    gain = centred if baseline == "group_mean" else reward
    valid = known
    if scale == "group_std":
        gain = _by_deviation(gain, centred, known, group, n, epsilon)
        valid = known & (n > 1)
    if credit == "to_go":
        gain = _to_go(table, session, gain, discount, links)
    warn_without_signal(gain[valid], reward[valid], group[valid])
    return with_column(table, "advantage", pa.array(gain, mask=~valid))


def _to_go(
    table: pa.Table,
    session: Longs,
    gain: Floats,
    discount: float,
    links: TableLike | None,
) -> Floats:
    """The sum of each step's gain and those of its later steps, discounted."""
    index = table.column(1).to_numpy().astype(np.int64)
    if links is None:
        order = np.lexsort((index, session))
        before = np.full(len(order), -1)
        before[order[1:]] = np.where(np.diff(session[order]) == 0, order[:-1], -1)
    elif table.column_names[1] != "turn_index":
        raise ArgumentError("links are of turns, but the rewards are of segments")
    else:
        before = _parents(table, index, canonical(as_table(links), LINKS))
    found = gain.copy()
    for step in np.argsort(-index, kind="stable"):
        if before[step] >= 0:
            found[before[step]] += discount * found[step]
    return found


def _parents(table: pa.Table, index: Longs, links: pa.Table) -> Longs:
    """The line of the turn that each turn continues, or -1."""
    parents = {
        (name, turn): parent
        for name, turn, parent in tuples(links, "session_id", "turn_index", "parent")
    }
    keys = zip(table.column("session_id").to_pylist(), index.tolist(), strict=True)
    own = {key: line for line, key in enumerate(keys)}
    found = np.full(len(index), -1)
    for (name, turn), line in own.items():
        where = f"session {name!r}, turn {turn}"
        if (name, turn) not in parents:
            raise InvalidTurnsError(f"{where}: has a reward, but no line in links")
        parent = parents[name, turn]
        if parent is not None and (name, parent) not in own:
            raise InvalidTurnsError(
                f"{where}: continues turn {parent}, which has no line in rewards: give it "
                "0 or null"
            )
        if parent is not None:
            found[line] = own[name, parent]
    return found

"""Advantages of rollouts, and of their turns."""

import warnings
from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice, check_flag, check_number
from trajkit.errors import (
    ArgumentError,
    InvalidTurnsError,
    NoSignalWarning,
    SchemaError,
)
from trajkit.learn.rewards import Floats, facts, trained_turns
from trajkit.schema import LINKS, SESSIONS, TURN_REWARDS
from trajkit.tables import canonical as tables
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, place
from trajkit.tables.columns import row_lengths, with_column
from trajkit.tables.ragged import Bools, Keys, Longs, codes, offsets_of, positions
from trajkit.tables.stages import apply, stage

Baseline: TypeAlias = Literal["none", "group_mean", "leave_one_out"]
Scale: TypeAlias = Literal["none", "group_std"]
StepBaseline: TypeAlias = Literal["none", "group_mean"]


def advantages(
    sessions: TableLike,
    baseline: Baseline = "group_mean",
    *,
    scale: Scale = "none",
    epsilon: float = 1e-6,
    drop_constant: bool = False,
) -> pa.Table:
    """The baseline and the advantage of each rollout.

    With the ``n`` rollouts of a group that have a reward ``R``, however many rows each
    has:

    ============== ==============================================================
    baseline       ``b`` of rollout i; its advantage is ``A_i = R_i - b_i``
    ============== ==============================================================
    none           0
    group_mean     ``sum(R) / n``
    leave_one_out  ``(sum(R) - R_i) / (n - 1)``
    ============== ==============================================================

    With scale "group_std" the advantage is ``A / (std(R) + epsilon)`` over the group, where
    ``std`` is the sample standard deviation (divided by ``n - 1``).

    Parameters
    ----------
    sessions : table
        The report of `trajkit.linearize`, which has a line for every session, also for
        those without rows; or `trajkit.schema.SESSIONS`. A session with a null group_id
        is a group of its own.
    baseline : {"none", "group_mean", "leave_one_out"}
    scale : {"none", "group_std"}
    epsilon : float
        Added to the standard deviation; 0 or more.
    drop_constant : bool
        Make the advantages of constant groups null, so that they are in no loss.

    Returns
    -------
    Table
        The sessions followed by these columns, which replace columns of their name:

        - scored (bool): it has a reward; a rollout without one enters no baseline.
        - trained (bool): some row trains it; a scored rollout that is not trained still
          shifts the baseline of its group. Null without a column ``tokens_trained``.
        - constant (bool): its group has two or more rewards, all equal but for rounding.
          Null without a reward.
        - baseline, advantage (float64): null without a reward, and if a mean or a
          deviation needs another rollout.

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
    alone, see `trajkit.add_weights` for its lengths. DAPO (arXiv 2503.14476):
    ``drop_constant``.
    """
    check_choice("baseline", baseline, Baseline)
    check_choice("scale", scale, Scale)
    check_flag("drop_constant", drop_constant)
    check_number("epsilon", epsilon, 0)
    source = tables.as_table(sessions)
    table = facts(source, SESSIONS, 1, "reward")
    group = _groups(table)
    scored, reward, n, mean, constant = _in_groups(source, table, group)
    base, valid = np.zeros(len(reward)), scored
    if baseline == "group_mean":
        base = np.where(constant, reward, mean)
    elif baseline == "leave_one_out":
        others = (np.bincount(group, reward)[group] - reward) / np.maximum(n - 1, 1)
        base, valid = np.where(constant, reward, others), scored & (n > 1)
    has_base = valid
    gain = reward - base
    if drop_constant:
        valid = valid & ~constant
    if scale == "group_std":
        centred = np.where(scored & ~constant, reward - mean, 0.0)
        gain = _by_deviation(gain, centred, group, n, epsilon)
        valid = valid & (n > 1)
    _warn_without_signal(gain[valid], reward[valid], group[valid])
    trained = pa.nulls(len(reward), pa.bool_())
    if "tokens_trained" in table.column_names:
        trained = pc.greater(table.column("tokens_trained"), 0)
    out = table.replace_schema_metadata(source.schema.metadata)
    for name, column in {
        "scored": pa.array(scored),
        "trained": trained,
        "constant": pa.array(constant, mask=~scored),
        "baseline": pa.array(base, mask=~has_base),
        "advantage": pa.array(gain, mask=~valid),
    }.items():
        out = with_column(out, name, column)
    return out


@stage
def add_advantages(rows: TableLike, sessions: TableLike) -> pa.Table:
    """Add the column ``advantage``: that of each row's session or turns.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS`.
    sessions : table
        A table with ``session_id`` and ``advantage``, from
        `trajkit.learn.advantages`. If it also has ``turn_index`` (from
        `trajkit.learn.step_advantages`), it has a line per turn.

    Returns
    -------
    Table
        The rows. ``advantage`` is a float64, null if the session's is.
        For advantages of turns it is a list of float64 per row: for each trained token
        that of the turn that sampled it, 0 for other tokens.

    Raises
    ------
    SchemaError
        A column of ``sessions`` is missing or has the wrong type.
    InvalidTurnsError
        A session or trained turn of the rows has no line in ``sessions``, or two; an
        advantage is NaN or infinite; that of a trained turn is null.
    """
    names = tables.as_table(sessions).column_names
    if "advantage" not in names:
        raise SchemaError("column 'advantage' of sessions is absent")
    keys = ["session_id", *(["turn_index"] if "turn_index" in names else [])]
    fields = [*map(TURN_REWARDS.field, keys), pa.field("advantage", pa.float64())]
    schema = pa.schema(fields, metadata=SESSIONS.metadata)
    given = facts(sessions, schema, len(keys), "advantage").select(schema.names)
    return apply(lambda rows: _with_advantages(rows, given), rows)


add_advantages_batches = add_advantages.batches


def _with_advantages(rows: pa.Table, given: pa.Table) -> pa.Table:
    table = tables.canonical_rows(rows)
    if "turn_index" in given.column_names:
        return with_column(table, "advantage", _of_tokens(table, given))
    found = pc.index_in(table.column("session_id"), given.column("session_id"))
    _check_known(table, found, "rows")
    return with_column(table, "advantage", given.column("advantage").take(found))


def _check_known(table: pa.Table, found: pa.Array, what: str) -> None:
    if found.null_count:
        name = table.column("session_id").filter(found.is_null())[0].as_py()
        raise InvalidTurnsError(f"session {name!r} has {what}, but no line in sessions")


def _of_tokens(table: pa.Table, given: pa.Table) -> pa.LargeListArray:
    """Per row a list: the advantage of the turn of each trained token, else 0."""
    row, start, stop, line = trained_turns(table, given, "sessions")
    gains = given.column("advantage").to_numpy()[line]
    for k in np.flatnonzero(np.isnan(gains))[:1]:
        raise InvalidTurnsError(
            f"{place(given, int(line[k]))}: advantage is null, but row "
            f"{table.column('row_index')[int(row[k])]} trains the turn. Give it "
            "a reward, or leave the session out"
        )
    offsets = offsets_of(row_lengths(table))
    values = np.zeros(int(offsets[-1]))
    values[positions(offsets[row] + start, stop - start)] = gains.repeat(stop - start)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values))


def _groups(table: pa.Table) -> Longs:
    """The number of each session's group; a null group_id is a group of its own."""
    group = codes(table.column("group_id"))
    alone = np.asarray(table.column("group_id").is_null())
    return np.where(alone, len(group) + np.arange(len(group)), group)


def _in_groups(
    source: pa.Table, table: pa.Table, group: Longs
) -> tuple[Bools, Floats, Longs, Floats, Bools]:
    """Of each reward: whether it is known, itself, how many known ones its group has,
    their mean, and whether these are several and all equal but for rounding.

    ``source`` is the table before its rewards became float64.
    """
    known = np.asarray(table.column("reward").is_valid())
    reward = table.column("reward").fill_null(0.0).to_numpy()
    n = np.bincount(group, known)[group]
    mean = np.bincount(group, reward)[group] / np.maximum(n, 1)
    top, bottom = np.full((2, int(group.max(initial=-1)) + 1), [[-np.inf], [np.inf]])
    np.maximum.at(top, group[known], reward[known])
    np.minimum.at(bottom, group[known], reward[known])
    types = [field.type for field in source.schema if field.name == "reward"]
    single = any(pa.types.is_floating(t) and t.bit_width <= 32 for t in types)
    size = np.maximum(1.0, np.maximum(np.abs(top), np.abs(bottom)))
    with np.errstate(invalid="ignore"):  # groups without a reward
        close = top - bottom <= (1e-5 if single else 1e-9) * size
    return known, reward, n, mean, close[group] & (n > 1)


def _by_deviation(
    gain: Floats, centred: Floats, group: Longs, n: Longs, epsilon: float
) -> Floats:
    """Gains divided by the sample deviation of their group; 0 if there is none at all."""
    squares = np.bincount(group, centred**2)[group]
    divisor = np.sqrt(squares / np.maximum(n - 1, 1)) + epsilon
    return np.divide(gain, divisor, out=np.zeros_like(gain), where=divisor > 0)


def _warn_without_signal(gain: Floats, reward: Floats, group: Longs) -> None:
    if not len(gain) or gain.any():
        return
    why = "in every group all rewards are equal"
    if not reward.any():
        why = "every reward is 0"
    elif len(np.unique(group)) == len(group):
        why = (
            "every group has one rollout with a reward. Set group_id, so that the "
            "rollouts of a task share a group"
        )
    warnings.warn(
        f"all {len(gain)} advantages are 0, so a training step changes nothing: {why}",
        NoSignalWarning,
        stacklevel=3,
    )


def step_advantages(
    rewards: TableLike,
    sessions: TableLike,
    *,
    baseline: StepBaseline = "group_mean",
    scale: Scale = "group_std",
    epsilon: float = 1e-6,
    discount: float = 1.0,
    links: TableLike | None = None,
) -> pa.Table:
    """The advantage of each turn, from rewards of turns.

    With ``r`` the reward of a turn and the mean and sample deviation over all turns of
    the rollouts of a group, ``r' = r - mean``, or ``(r - mean) / (std + epsilon)`` with
    scale "group_std". A turn counts once, however many rows train it.

    A turn's advantage is the sum of ``r'`` of its own and of the later turns of the
    session, each times ``discount`` to the power of its distance in turns: generalized
    advantage estimation without a critic, where ``discount`` is the product of its gamma
    and lambda.

    Parameters
    ----------
    rewards : table
        `trajkit.schema.TURN_REWARDS`.
    sessions : table
        `trajkit.schema.SESSIONS` or the report of `trajkit.linearize`; its ``group_id``
        counts. A session with a null group_id is a group of its own.
    baseline : {"none", "group_mean"}
        "none": no mean is subtracted.
    scale : {"none", "group_std"}
    epsilon : float
        As for `advantages`.
    discount : float
        From 0, where a turn has its own ``r'``, to 1.
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
        ``baseline``, ``scale``, ``epsilon`` or ``discount`` is not allowed.
    InvalidTurnsError
        A turn has two lines or a reward that is not finite; its session has no line in
        ``sessions``, or two; a turn has no line in ``links``.

    Warns
    -----
    NoSignalWarning
        There are advantages, and all are 0.

    References
    ----------
    GRPO with process supervision (arXiv 2402.03300, 4.1.3): the defaults. Turn-level
    GAE: AReaL's ``gae_timestep_unit="turn"``
    (https://github.com/areal-project/AReaL/blob/cbff54d/areal/trainer/ppo/gae.py), with
    baseline and scale "none".
    """
    check_choice("baseline", baseline, StepBaseline)
    check_choice("scale", scale, Scale)
    check_number("epsilon", epsilon, 0)
    check_number("discount", discount, 0)
    if discount > 1:
        raise ArgumentError(f"discount={discount!r}: expected a number from 0 to 1")
    source = tables.as_table(rewards)
    table = facts(source, TURN_REWARDS, 2, "reward")
    about = facts(sessions, SESSIONS, 1, "reward")
    at = pc.index_in(table.column("session_id"), about.column("session_id"))
    _check_known(table, at, "rewards")
    group = _groups(about)[np.asarray(at, np.int64)]
    valid, reward, n, mean, constant = _in_groups(source, table, group)
    centred = np.where(valid & ~constant, reward - mean, 0.0)
    gain = centred if baseline == "group_mean" else reward
    if scale == "group_std":
        gain = _by_deviation(gain, centred, group, n, epsilon)
    gain = _to_go(table, gain, discount, links)
    if scale == "group_std":
        valid = valid & (n > 1)
    _warn_without_signal(gain[valid], reward[valid], group[valid])
    return with_column(table, "advantage", pa.array(gain, mask=~valid))


def _to_go(
    table: pa.Table, gain: Floats, discount: float, links: TableLike | None
) -> Floats:
    """The sum of each step's gain and those of its later steps, discounted."""
    index = table.column(1).to_numpy().astype(np.int64)
    if links is None:
        session = codes(table.column("session_id"))
        order = np.lexsort((index, session))
        before = np.full(len(order), -1)
        before[order[1:]] = np.where(np.diff(session[order]) == 0, order[:-1], -1)
    else:
        before = _parents(table, index, tables.canonical(tables.as_table(links), LINKS))
    found = gain.copy()
    for step in np.argsort(-index, kind="stable"):
        if before[step] >= 0:
            found[before[step]] += discount * found[step]
    return found


def _parents(table: pa.Table, index: Longs, links: pa.Table) -> Longs:
    """The line of the turn that each turn continues, or -1."""
    session = codes(links.column("session_id"), table.column("session_id"))
    own = Keys(session[len(links) :], index)
    line = Keys(session[: len(links)], links.column("turn_index").to_numpy()).find(own)
    parent = np.append(links["parent"].fill_null(-1).to_numpy(), -1)[line]
    found = own.find(Keys(own.session, parent))
    for k in np.flatnonzero((line < 0) | ((parent >= 0) & (found < 0)))[:1]:
        fault = "has a reward, but no line in links"
        if line[k] >= 0:
            fault = (
                f"continues turn {parent[k]}, which has no line in rewards: give it "
                "0 or null"
            )
        raise InvalidTurnsError(f"{place(table, int(k))}: {fault}")
    return found

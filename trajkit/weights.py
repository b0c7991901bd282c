"""Rewards, row weights and advantages, so that the number of rows is neutral.

A rollout is one session, however many rows a policy makes of it. What is shared out
here is shared out per rollout, and what is averaged over is rollouts.
"""

from typing import Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from trajkit.errors import InvalidTurnsError, PolicyError
from trajkit.schema import ROWS, SESSIONS, TURN_REWARDS
from trajkit.tables import TableLike, as_table, canonical, place

By: TypeAlias = Literal["token", "row", "rollout"]
Spread: TypeAlias = Literal["copy", "uniform", "final_only", "per_turn"]
Baseline: TypeAlias = Literal["none", "group_mean", "leave_one_out"]

_Floats: TypeAlias = npt.NDArray[np.float64]
_Longs: TypeAlias = npt.NDArray[np.int64]
_Bools: TypeAlias = npt.NDArray[np.bool_]


def weigh(rows: TableLike, by: By = "token") -> pa.Table:
    """The rows with ``row_weight`` shared out so that a rollout weighs one.

    With ``n`` the trained tokens of a row, ``N`` those of all rows of its rollout, and
    ``K`` the rows of the rollout that train something:

    ========= ============== ====================================== ===================
    by        row_weight     what sums to one over a rollout        for a trainer that
    ========= ============== ====================================== ===================
    token     ``n / N``      the weights of its rows                averages in a row
    row       ``1 / K``      the weights of its rows                averages in a row
    rollout   ``1 / N``      the weights of its trained tokens      sums in a row
    ========= ============== ====================================== ===================

    ``token`` and ``rollout`` give one loss: every trained token of a rollout counts the
    same, whichever row it is in, so the loss is that of the rollout as it was sampled.
    ``row`` gives the mean of the rows' means, which depends on where rows begin.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS`, with all rows of each session that is in it.
    by : {"token", "row", "rollout"}
        What each weight is a share of.

    Returns
    -------
    Table
        The rows with ``row_weight`` and ``rollout_mask_sum`` (``N``) made anew. A row
        that trains nothing weighs 0; where ``N`` is 0, the weights are null.

    Raises
    ------
    PolicyError
        ``by`` is none of the three.

    Examples
    --------
    >>> import trajkit as tk
    >>> call = {"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}
    >>> turns = tk.from_records([call, {**call, "prompt_ids": [4]}])
    >>> weigh(tk.linearize(turns), by="rollout")["row_weight"].to_pylist()
    [0.25, 0.25]

    References
    ----------
    ``rollout`` is slime's denominator per rollout_id (spec: segments 8).
    """
    _check_choice("by", by, By)
    table = canonical(rows, ROWS)
    session, n_sessions = _sessions(table)
    n_trained = _trained(table)
    mask_sum = np.bincount(session, n_trained, n_sessions)[session].astype(np.int64)
    if by == "token":
        share = n_trained.astype(np.float64)
        whole = mask_sum
    elif by == "row":
        share = (n_trained > 0).astype(np.float64)
        whole = np.bincount(session, share, n_sessions)[session].astype(np.int64)
    else:
        share = (n_trained > 0).astype(np.float64)
        whole = mask_sum
    weights = pa.array(share / np.maximum(whole, 1), mask=mask_sum == 0)
    table = _with(table, "row_weight", weights)
    return _with(table, "rollout_mask_sum", pa.array(mask_sum))


def spread_rewards(
    rows: TableLike,
    mode: Spread = "copy",
    *,
    turn_rewards: TableLike | None = None,
) -> pa.Table:
    """The rows with the reward of each rollout spread over its rows.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS`, with all rows of each session that is in it, and in each
        the reward of its whole rollout, as `trajkit.linearize` gives it.
    mode : {"copy", "uniform", "final_only", "per_turn"}
        copy
            Every row has the reward of the rollout.
        uniform
            Every row has the reward divided by the rollout's number of rows, those
            without a trained token among them.
        final_only
            The final row has the reward, every other row 0. Where the rows have a
            column ``segment_kind``, final rows are those of kind ``final``, and a
            rollout without one has 0 throughout; else it is the last row of the
            session.
        per_turn
            A row has the sum of the rewards of the turns that it trains. A turn
            that several rows train in pieces is shared out by trained tokens.
    turn_rewards : table, for per_turn
        `trajkit.schema.TURN_REWARDS`, at most one line per turn.

    Returns
    -------
    Table
        The rows with ``reward`` made anew. A null reward stays null in all rows of its
        rollout; in mode per_turn, in the rows that train such a turn.

    Raises
    ------
    PolicyError
        The mode is none of the four, or ``turn_rewards`` is given with another one or
        missing.
    InvalidTurnsError
        A turn has two rewards, or one that is not finite; a turn that is trained has no
        line; a turn has a reward other than 0, and no row trains it.

    References
    ----------
    copy, uniform and final_only: spec, segments 8 (slime's reward modes).
    """
    _check_choice("mode", mode, Spread)
    if (turn_rewards is not None) != (mode == "per_turn"):
        raise PolicyError(
            "turn_rewards goes with mode='per_turn', and that mode with turn_rewards: "
            f"mode is {mode!r}, turn_rewards is "
            f"{'not given' if turn_rewards is None else 'given'}"
        )
    table = canonical(rows, ROWS)
    if turn_rewards is not None:
        given = as_table(turn_rewards).replace_schema_metadata(None)
        reward = _per_turn(table, canonical(given, TURN_REWARDS))
        return _with(table, "reward", reward)
    known = np.asarray(table.column("reward").is_valid())
    whole = table.column("reward").fill_null(0.0).to_numpy()
    if mode == "uniform":
        session, n_sessions = _sessions(table)
        whole = whole / np.bincount(session, minlength=n_sessions)[session]
    elif mode == "final_only":
        whole = np.where(_final(table), whole, 0.0)
    return _with(table, "reward", pa.array(whole, mask=~known))


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
    _check_choice("baseline", baseline, Baseline)
    source = as_table(sessions)
    # a report is a table of sessions with more columns
    table = canonical(source.replace_schema_metadata(None), SESSIONS)
    _check_once(table, ["session_id"])
    _check_finite(table)
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
        out = _with(out, name, column)
    return out


def add_advantages(rows: TableLike, sessions: TableLike) -> pa.Table:
    """The rows with a column ``advantage`` (float64): that of their session.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS`.
    sessions : table
        With ``session_id`` and ``advantage``, as `trajkit.advantages` gives it.

    Returns
    -------
    Table
        Null where the session's advantage is.

    Raises
    ------
    InvalidTurnsError
        A session of the rows has no line in ``sessions``, or two.
    """
    table = canonical(rows, ROWS)
    facts = as_table(sessions).select(["session_id", "advantage"])
    _check_once(facts, ["session_id"])
    found = pc.index_in(
        table.column("session_id"), facts.column("session_id").cast(pa.string())
    )
    if found.null_count:
        missing = table.column("session_id").filter(found.is_null())[0]
        raise InvalidTurnsError(
            f"session {missing.as_py()!r} has rows, but no line in sessions"
        )
    return _with(table, "advantage", facts.column("advantage").take(found))


def _per_turn(table: pa.Table, given: pa.Table) -> pa.Array:
    """The sum of each row's turn rewards."""
    _check_once(given, ["session_id", "turn_index"])
    _check_finite(given)
    names = pc.unique(table.column("session_id"))
    spans = pa.concat_arrays(
        [pa.array([], ROWS.field("spans").type.value_type)]
        + [chunk.flatten() for chunk in table.column("spans").chunks]
    )
    row = np.repeat(
        np.arange(len(table)), pc.list_value_length(table.column("spans")).to_numpy()
    )
    trained = np.asarray(pc.equal(pc.struct_field(spans, "kind"), "trained"))
    stop, start, turn = (
        np.asarray(pc.struct_field(spans, name))[trained]
        for name in ("stop", "start", "turn_index")
    )
    row = row[trained]
    session = np.asarray(pc.index_in(table.column("session_id"), names))[row]
    ours = given.filter(pc.is_in(given.column("session_id"), names))
    wanted = _ranks(session, turn)
    there = _ranks(
        np.asarray(pc.index_in(ours.column("session_id"), names)),
        ours.column("turn_index").to_numpy(),
    )
    order = np.argsort(there)
    at = np.searchsorted(there, wanted, sorter=order)
    hit = np.append(there[order], -1)[at] == wanted
    if not hit.all():
        k = int(np.flatnonzero(~hit)[0])
        raise InvalidTurnsError(
            f"{place(table, int(row[k]))}: trains turn {turn[k]}, which has no line "
            "in turn_rewards"
        )
    line = order[at]
    n_tokens = (stop - start).astype(np.float64)
    n_trained = np.bincount(line, n_tokens, len(ours))
    known = np.asarray(ours.column("reward").is_valid())
    rewards = ours.column("reward").fill_null(0.0).to_numpy()
    lost = np.flatnonzero((n_trained == 0) & (rewards != 0))
    if len(lost):
        k = int(lost[0])
        raise InvalidTurnsError(
            f"{place(ours, k)}: reward {rewards[k]}, but no row trains the turn"
        )
    shares = rewards[line] * n_tokens / np.maximum(n_trained[line], 1)
    unknown = np.bincount(row, ~known[line], len(table)) > 0
    return pa.array(np.bincount(row, shares, len(table)), mask=unknown)


def _ranks(session: _Longs, turn: _Longs) -> _Longs:
    """One number for a turn of a session."""
    return session.astype(np.int64) << 32 | turn.astype(np.int64)


def _final(table: pa.Table) -> _Bools:
    if "segment_kind" in table.column_names:
        kinds = table.column("segment_kind").cast(pa.string())
        return np.asarray(pc.equal(kinds, "final").fill_null(False))
    session, n_sessions = _sessions(table)
    index = table.column("row_index").to_numpy()
    last = np.full(n_sessions, -1, np.int64)
    np.maximum.at(last, session, index)
    final: _Bools = index == last[session]
    return final


def _trained(table: pa.Table) -> _Longs:
    """Trained tokens of each row."""
    parts = [np.empty(0, np.int64)]
    for chunk in table.column("loss_mask").chunks:
        mask = chunk.flatten().to_numpy(zero_copy_only=False)
        sums = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
        ends = np.cumsum(pc.list_value_length(chunk).to_numpy(zero_copy_only=False))
        parts.append(np.diff(sums[ends], prepend=0))
    return np.concatenate(parts)


def _sessions(table: pa.Table) -> tuple[_Longs, int]:
    """The number of each row's session, and how many there are."""
    names = pc.unique(table.column("session_id"))
    codes = pc.index_in(table.column("session_id"), names)
    return np.asarray(codes).astype(np.int64), len(names)


def _groups(table: pa.Table) -> _Longs:
    """The number of each session's group; a null group_id is a group of its own."""
    ids = table.column("group_id")
    names = pc.unique(ids.drop_null())
    codes = np.asarray(pc.index_in(ids, names).fill_null(-1)).astype(np.int64)
    alone = np.asarray(ids.is_null())
    codes[alone] = len(names) + np.arange(np.count_nonzero(alone))
    return codes


def _check_choice(name: str, value: object, expected: object) -> None:
    known = get_args(expected)
    if value not in known:
        raise PolicyError(
            f"{name}={value!r}: expected one of {', '.join(map(repr, known))}"
        )


def _check_once(table: pa.Table, names: list[str]) -> None:
    counts = table.group_by(names).aggregate([([], "count_all")])
    again = counts.filter(pc.greater(counts.column("count_all"), 1))
    if len(again):
        raise InvalidTurnsError(
            f"{place(again, 0)}: {again.column('count_all')[0]} lines: expected one"
        )


def _check_finite(table: pa.Table) -> None:
    bad = table.filter(pc.invert(pc.is_finite(table.column("reward"))).fill_null(False))
    if len(bad):
        raise InvalidTurnsError(
            f"{place(bad, 0)}: reward {bad.column('reward')[0]}: expected a finite "
            "number or null"
        )


def _with(table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray) -> pa.Table:
    """The table with a column put in place of the one of that name, or behind."""
    if name in table.column_names:
        at = table.column_names.index(name)
        return table.set_column(at, table.field(at).with_type(column.type), column)
    return table.append_column(name, column)

"""The reward of a rollout, spread over its rows."""

from typing import Literal, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from trajkit.errors import InvalidTurnsError, PolicyError
from trajkit.rollouts import (
    Bools,
    Longs,
    check_choice,
    check_finite,
    check_once,
    session_codes,
    with_column,
)
from trajkit.schema import ROWS, TURN_REWARDS
from trajkit.tables import TableLike, as_table, canonical, canonical_rows, place

Spread: TypeAlias = Literal["copy", "uniform", "final_only", "per_turn"]


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
        `trajkit.schema.ROWS`, or ``ROWS_SUFFIX``, with all rows of each session in it,
        and in each the reward of its whole rollout, as `trajkit.linearize` gives it.
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
    check_choice("mode", mode, Spread)
    if (turn_rewards is not None) != (mode == "per_turn"):
        raise PolicyError(
            "turn_rewards goes with mode='per_turn', and that mode with turn_rewards: "
            f"mode is {mode!r}, turn_rewards is "
            f"{'not given' if turn_rewards is None else 'given'}"
        )
    table = canonical_rows(rows)
    if turn_rewards is not None:
        given = as_table(turn_rewards).replace_schema_metadata(None)
        reward = _per_turn(table, canonical(given, TURN_REWARDS))
        return with_column(table, "reward", reward)
    known = np.asarray(table.column("reward").is_valid())
    whole = table.column("reward").fill_null(0.0).to_numpy()
    if mode == "uniform":
        session, n_sessions = session_codes(table)
        whole = whole / np.bincount(session, minlength=n_sessions)[session]
    elif mode == "final_only":
        whole = np.where(_final(table), whole, 0.0)
    return with_column(table, "reward", pa.array(whole, mask=~known))


def _per_turn(table: pa.Table, given: pa.Table) -> pa.Array:
    """The sum of each row's turn rewards."""
    check_once(given, ["session_id", "turn_index"])
    check_finite(given)
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


def _ranks(session: Longs, turn: Longs) -> Longs:
    """One number for a turn of a session."""
    return session.astype(np.int64) << 32 | turn.astype(np.int64)


def _final(table: pa.Table) -> Bools:
    if "segment_kind" in table.column_names:
        kinds = table.column("segment_kind").cast(pa.string())
        return np.asarray(pc.equal(kinds, "final").fill_null(False))
    session, n_sessions = session_codes(table)
    index = table.column("row_index").to_numpy()
    last = np.full(n_sessions, -1, np.int64)
    np.maximum.at(last, session, index)
    final: Bools = index == last[session]
    return final

"""Spread the reward of a rollout over its rows."""

from typing import Literal, TypeAlias, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import (
    TableLike,
    as_table,
    canonical,
    canonical_rows,
    place,
)
from trajkit._arrow.reshape import with_column
from trajkit._streams.lockstep import Stream, map_sessions
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema import ROWS, TURN_REWARDS
from trajkit.training._checks import (
    Bools,
    Longs,
    check_finite,
    check_once,
    session_codes,
)

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Spread: TypeAlias = Literal["copy", "uniform", "final_only", "per_turn", "last_turn"]


@overload
def spread_rewards(
    rows: Stream | pa.RecordBatchReader,
    mode: Spread = ...,
    *,
    turn_rewards: TableLike | None = ...,
) -> Stream: ...
@overload
def spread_rewards(
    rows: TableLike, mode: Spread = ..., *, turn_rewards: TableLike | None = ...
) -> pa.Table: ...
def spread_rewards(
    rows: TableLike | Stream,
    mode: Spread = "copy",
    *,
    turn_rewards: TableLike | None = None,
) -> pa.Table | Stream:
    """Spread the reward of each rollout over its rows.

    Parameters
    ----------
    rows : table, or iterator of record batches
        `trajkit.schema.ROWS` or ``ROWS_SUFFIX`` with all rows of each session. Each row
        has the reward of its rollout, as `trajkit.linearize` writes it. An iterator (or
        a RecordBatchReader) is read lazily; a session may span consecutive batches.
    mode : {"copy", "uniform", "final_only", "per_turn", "last_turn"}
        copy
            Every row has the reward of the rollout.
        uniform
            Every row has the reward divided by the rollout's number of rows, including
            rows without a trained token.
        final_only
            Final rows have the reward, all others 0. Rows of ``segment_kind`` ``final``
            are final; in a rollout without kinds it is the last row. A rollout with
            kinds but no final row has 0 everywhere.
        per_turn
            A row has the sum of the rewards of the turns that it trains. If several
            rows train parts of a turn, each has a share by trained tokens.
        last_turn
            A row has the reward of its last turn. Rewards of its earlier turns do not
            count.
    turn_rewards : table, for per_turn and last_turn
        `trajkit.schema.TURN_REWARDS`, at most one line per turn.

    Returns
    -------
    Table
        The rows with new rewards. A null reward gives null in all rows of the rollout;
        with per_turn in the rows that train the turn; with last_turn in the rows that
        end with it. For an iterator: an iterator of record batches.

    Raises
    ------
    ArgumentError
        The mode does not exist, or it does not go with ``turn_rewards``.
    InvalidTurnsError
        A turn has two rewards or one that is not finite; a turn that the mode needs has
        no line; with per_turn, no row trains a turn whose reward is not 0.

    References
    ----------
    copy, uniform and final_only: spec, segments 8 (slime's reward modes). last_turn:
    SkyRL's merge of scalar rewards (spec, SkyRL 6).
    """
    check_choice("mode", mode, Spread)
    if (turn_rewards is not None) != (mode in ("per_turn", "last_turn")):
        raise ArgumentError(
            "mode='per_turn' and mode='last_turn' need turn_rewards, other modes do not "
            f"take it: mode is {mode!r}, turn_rewards is "
            f"{'not given' if turn_rewards is None else 'given'}"
        )
    given = None
    if turn_rewards is not None:
        given = as_table(turn_rewards).replace_schema_metadata(None)
        given = canonical(given, TURN_REWARDS)
        check_once(given, ["session_id", "turn_index"])
        check_finite(given)
    return map_sessions(lambda rows: _spread_over(rows, mode, given), ("rows", rows))


def _spread_over(rows: pa.Table, mode: Spread, given: pa.Table | None) -> pa.Table:
    table = canonical_rows(rows)
    if given is not None:
        of_turn = _per_turn if mode == "per_turn" else _last_turn
        return with_column(table, "reward", of_turn(table, given))
    known = np.asarray(table.column("reward").is_valid())
    reward = table.column("reward").fill_null(0.0).to_numpy()
    if len(table):
        session, _ = session_codes(table)
        reward = spread(reward, mode, session, _final(table, session))
    return with_column(table, "reward", pa.array(reward, mask=~known))


def spread(
    reward: Floats,
    mode: Spread,
    session: Ints,
    final: Bools,
) -> Floats:
    """Each row's share of the reward of its rollout.

    Parameters
    ----------
    reward : ndarray of float64, shape (n_rows,)
        The reward of each row's rollout.
    mode : {"copy", "uniform", "final_only"}
        As for `spread_rewards`.
    session : ndarray of int, shape (n_rows,)
        The number of each row's rollout.
    final : ndarray of bool, shape (n_rows,)
        The result of `final_rows`.
    """
    if mode == "uniform":
        return reward / np.bincount(session)[session]
    if mode == "final_only":
        return np.where(final, reward, 0.0)
    return reward


def final_rows(session: Ints, index: Ints, of_kind: Bools, final: Bools) -> Bools:
    """Mark final rows: those of kind final, or a rollout's last row if it has no kinds.

    Parameters
    ----------
    session, index : ndarray of int, shape (n_rows,), n_rows >= 1
        The number of each row's rollout, and the row's index in it.
    of_kind, final : ndarray of bool, shape (n_rows,)
        Whether rows have a kind, and whether it is final.
    """
    kinds = np.bincount(session, of_kind)[session] > 0
    last = np.full(int(session.max()) + 1, -1, np.int64)
    np.maximum.at(last, session, index)
    result: Bools = np.where(kinds, final, index == last[session])
    return result


def _per_turn(table: pa.Table, given: pa.Table) -> pa.Array:
    """The sum of each row's turn rewards."""
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


def _last_turn(table: pa.Table, given: pa.Table) -> pa.Array:
    """The reward of each row's last turn."""
    last = table.column("last_turn")
    if last.null_count:
        row = int(np.flatnonzero(np.asarray(last.is_null()))[0])
        raise InvalidTurnsError(f"{place(table, row)}: last_turn is null")
    names = pc.unique(table.column("session_id"))
    ours = given.filter(pc.is_in(given.column("session_id"), names))
    wanted, there = (
        _ranks(
            np.asarray(pc.index_in(one.column("session_id"), names)),
            one.column(turn).to_numpy(),
        )
        for one, turn in ((table, "last_turn"), (ours, "turn_index"))
    )
    line = pc.index_in(pa.array(wanted), pa.array(there))
    if line.null_count:
        row = int(np.flatnonzero(np.asarray(line.is_null()))[0])
        raise InvalidTurnsError(
            f"{place(table, row)}: ends with turn {last[row]}, which has no line in "
            "turn_rewards"
        )
    return ours.column("reward").combine_chunks().take(line)


def _ranks(session: Longs, turn: Longs) -> Longs:
    """One number per turn of a session."""
    return session.astype(np.int64) << 32 | turn.astype(np.int64)


def _final(table: pa.Table, session: Longs) -> Bools:
    kinds = table.column("segment_kind").cast(pa.string())
    return final_rows(
        session,
        table.column("row_index").to_numpy(),
        np.asarray(kinds.is_valid()),
        np.asarray(pc.equal(kinds, "final").fill_null(False)),
    )

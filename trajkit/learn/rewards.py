"""Spread the reward of a rollout over its rows."""

from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.schema import SEGMENT_KINDS, TURN_REWARDS
from trajkit.tables import canonical as tables
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, place
from trajkit.tables.columns import with_column
from trajkit.tables.ragged import Keys, Longs, Ragged, codes
from trajkit.tables.stages import apply, stage

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int32] | npt.NDArray[np.int64]
Spread: TypeAlias = Literal["copy", "uniform", "final_only", "per_turn", "last_turn"]

_FINAL = SEGMENT_KINDS.index("final")


@stage
def spread_rewards(
    rows: TableLike,
    mode: Spread = "copy",
    *,
    turn_rewards: TableLike | None = None,
) -> pa.Table:
    """Spread the reward of each rollout over its rows.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS` with all rows of each session and rewards of `linearize`.
    mode : {"copy", "uniform", "final_only", "per_turn", "last_turn"}
        - copy: every row has the reward of the rollout.
        - uniform: the reward divided by the rollout's number of rows, including rows
          without a trained token.
        - final_only: final rows have the reward, all others 0. Rows of ``segment_kind``
          ``final`` are final; in a rollout without kinds the last row is.
        - per_turn: the sum of the rewards of the turns that the row trains. If several
          rows train parts of a turn, each has a share by trained tokens.
        - last_turn: the reward of the row's last turn; others do not count.
    turn_rewards : table, for per_turn and last_turn
        `trajkit.schema.TURN_REWARDS`, at most one line per turn.

    Returns
    -------
    Table
        The rows with new rewards. A null reward gives null in all rows of the rollout, or
        in those that train the turn (per_turn) or end with it (last_turn).

    Raises
    ------
    ArgumentError
        The mode does not exist, or it does not go with ``turn_rewards``.
    InvalidTurnsError
        A turn has two rewards or one that is not finite; one that the mode needs has no
        line; with per_turn, no row trains a turn whose reward is not 0.

    References
    ----------
    copy, uniform and final_only: the reward modes of slime's
    https://github.com/THUDM/slime/blob/b6764131d/examples/coding_agent_rl/generate.py;
    last_turn: the merge of scalar rewards in SkyRL's
    https://github.com/NovaSky-AI/SkyRL/blob/a956457/skyrl/train/generators/utils.py
    """
    check_choice("mode", mode, Spread)
    if (turn_rewards is not None) != (mode in ("per_turn", "last_turn")):
        word = "not " if turn_rewards is None else ""
        raise ArgumentError(
            f"mode={mode!r} with turn_rewards {word}given: per_turn and last_turn need "
            "turn_rewards, and no other mode takes it"
        )
    given = None
    if turn_rewards is not None:
        given = facts(turn_rewards, TURN_REWARDS, 2, "reward")
    return apply(lambda rows: _spread_over(rows, mode, given), rows)


spread_rewards_batches = spread_rewards.batches


def _spread_over(rows: pa.Table, mode: Spread, given: pa.Table | None) -> pa.Table:
    table = tables.canonical_rows(rows)
    if given is None:
        known = np.asarray(table.column("reward").is_valid())
        reward = table.column("reward").fill_null(0.0).to_numpy()
        session = codes(table.column("session_id"))
        index = table.column("row_index").to_numpy()
        kinds = table.column("segment_kind").cast(pa.string())
        number = pc.index_in(kinds, pa.array(SEGMENT_KINDS)).fill_null(-1)
        shares = spread(reward, mode, session, index, np.asarray(number))
        shared = pa.array(shares, mask=~known)
    elif mode == "per_turn":
        shared = _per_turn(table, given)
    else:
        last = table.column("last_turn")
        for row in np.flatnonzero(np.asarray(last.is_null()))[:1]:
            raise InvalidTurnsError(f"{place(table, int(row))}: last_turn is null")
        words = "ends with turn {}, which has no line in turn_rewards"
        line = _lines(table, np.arange(len(table)), last.to_numpy(), given, words)
        shared = given.column("reward").take(pa.array(line))
    return with_column(table, "reward", shared)


def spread(
    reward: Floats, mode: Spread, session: Ints, index: Ints, kind: Ints
) -> Floats:
    """Each row's share of the reward of its rollout.

    ``kind`` is the number in `SEGMENT_KINDS`; -1: none.
    """
    if mode == "uniform":
        return reward / np.bincount(session)[session]
    if mode != "final_only":
        return reward
    has_kinds = np.bincount(session, kind >= 0)[session] > 0
    last = np.full(int(session.max(initial=-1)) + 1, -1, np.int64)
    np.maximum.at(last, session, index)
    final = np.where(has_kinds, kind == _FINAL, index == last[session])
    return np.where(final, reward, 0.0)


def _per_turn(table: pa.Table, given: pa.Table) -> pa.Array:
    names = pc.unique(table.column("session_id"))
    ours = given.filter(pc.is_in(given.column("session_id"), names))
    row, start, stop, line = trained_turns(table, ours, "turn_rewards")
    n_tokens = (stop - start).astype(np.float64)
    n_trained = np.bincount(line, n_tokens, len(ours))
    known = np.asarray(ours.column("reward").is_valid())
    rewards = ours.column("reward").fill_null(0.0).to_numpy()
    for k in np.flatnonzero((n_trained == 0) & (rewards != 0))[:1]:
        raise InvalidTurnsError(
            f"{place(ours, int(k))}: reward {rewards[k]}, but no row trains the turn"
        )
    shares = rewards[line] * n_tokens / np.maximum(n_trained[line], 1)
    unknown = np.bincount(row, ~known[line], len(table)) > 0
    return pa.array(np.bincount(row, shares, len(table)), mask=unknown)


def trained_turns(
    table: pa.Table, given: pa.Table, what: str
) -> tuple[Longs, Longs, Longs, Longs]:
    """Row, start and stop of trained spans, and the line of their turn in ``given``.

    Raises `InvalidTurnsError` if a trained turn has no line; ``what`` names the table.
    """
    spans = Ragged.of(table.column("spans"))
    trained = np.asarray(pc.equal(pc.struct_field(spans.values, "kind"), "trained"))
    start, stop, turn = (
        np.asarray(pc.struct_field(spans.values, name))[trained]
        for name in ("start", "stop", "turn_index")
    )
    row = spans.owner[trained]
    words = f"trains turn {{}}, which has no line in {what}"
    return row, start, stop, _lines(table, row, turn, given, words)


def _lines(
    table: pa.Table, row: Longs, index: Ints, given: pa.Table, words: str
) -> Longs:
    """The line of ``given`` for the session of each row and an index.

    Raises `InvalidTurnsError` if there is none; ``words`` say what the row does.
    """
    session = codes(given.column("session_id"), table.column("session_id"))
    have = Keys(session[: len(given)], given.column(1).to_numpy())
    lines = have.find(Keys(session[len(given) :][row], index))
    for k in np.flatnonzero(lines < 0)[:1]:
        where = place(table, int(row[k]))
        raise InvalidTurnsError(f"{where}: {words.format(index[k])}")
    return lines


def facts(table: TableLike, schema: pa.Schema, n_keys: int, value: str) -> pa.Table:
    """A table of another schema with more columns, such as a report, as ``schema``.

    Raises InvalidTurnsError if two lines have the same first ``n_keys`` columns, or one
    has a ``value`` that is not finite.
    """
    plain = tables.as_table(table).replace_schema_metadata(None)
    found = tables.canonical(plain, schema)
    counts = found.group_by(schema.names[:n_keys]).aggregate([([], "count_all")])
    again = counts.filter(pc.greater(counts.column("count_all"), 1))
    if len(again):
        raise InvalidTurnsError(
            f"{place(again, 0)}: {again.column('count_all')[0]} lines: expected one"
        )
    bad = found.filter(pc.invert(pc.is_finite(found.column(value))).fill_null(False))
    if len(bad):
        raise InvalidTurnsError(
            f"{place(bad, 0)}: {value} {bad.column(value)[0]}: expected a finite number "
            "or null"
        )
    return found

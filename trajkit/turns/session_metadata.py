"""Reward, group and error of sessions."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import arrow_source
from trajkit.errors import ArgumentError, InvalidTurnsError, SchemaError
from trajkit.schema import SESSIONS
from trajkit.schema.engine import checks_of
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, canonical
from trajkit.tables.columns import take_rows
from trajkit.tables.ragged import Bools, codes, combined
from trajkit.turns.sessions import Sessions
from trajkit.turns.validation import check_all, check_table

Reward: TypeAlias = float | Mapping[str, float | None] | TableLike | None
"""One reward for all sessions, one by session_id, or a ``sessions`` table."""

# columns of sessions that turns may have
OF_TURNS = ("reward", "group_id")
# what to do if one differs within a session
_ADVICE = {
    "reward": "For a reward per turn, linearize turns.drop_columns('reward'), and give "
    "turns.select(['session_id', 'turn_index', 'reward']) to "
    "trajkit.learn.spread_rewards(rows, 'per_turn', turn_rewards=...)",
    "group_id": "Tasks have sessions of their own: trajkit import FILE -o log.parquet "
    "--map session_id=session_id+group_id makes a session of each",
}


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """Reward, group and error by session, or one reward for all."""

    # the reward of every session, if there is no table
    reward: float | None
    # SESSIONS, or None
    table: pa.Table | None
    # which of reward and group_id the caller gave
    stated: tuple[str, ...] = ()

    def of_sessions(self, calls: Sessions) -> pa.RecordBatch:
        """SESSIONS of these, with reward and group_id from columns of the turns."""
        facts = self.of(calls.ids)
        for name in OF_TURNS:
            if calls.table.schema.get_field_index(name) < 0:
                continue
            own, given = _of_turns(calls, name), facts.column(name)
            if name in self.stated:
                same = pc.equal(own, given).fill_null(False)
                for at in np.flatnonzero(pc.and_not(own.is_valid(), same))[:1].tolist():
                    stated = given[at].as_py()
                    raise InvalidTurnsError(
                        f"session {calls.ids[at].as_py()!r}: {name} "
                        f"{'null' if stated is None else stated} was given, and its turns "
                        f"have {name} {own[at]}: leave one of them out"
                    )
                own = given
            at = SESSIONS.names.index(name)
            facts = facts.set_column(at, SESSIONS.field(name), own)
        return facts

    def of(self, session_ids: pa.Array) -> pa.RecordBatch:
        """SESSIONS for these sessions, in this order.

        Raises InvalidTurnsError if one has no row.
        """
        if self.table is None:
            rewards = pa.repeat(pa.scalar(self.reward, pa.float64()), len(session_ids))
            return _sessions(session_ids, rewards)
        found = pc.index_in(session_ids, self.table.column("session_id"))
        if found.null_count:
            missing = session_ids.filter(found.is_null())[0]
            raise InvalidTurnsError(
                f"session {missing.as_py()!r} has turns, but no line in sessions (or "
                "no reward): a session that can't be scored has a null reward"
            )
        return self.table.take(found).combine_chunks().to_batches()[0]


def session_facts(reward: Reward, sessions: TableLike | None) -> SessionFacts:
    """Read the arguments ``reward`` and ``sessions``."""
    if _is_table(reward) and sessions is None:
        reward, sessions = None, reward
    if sessions is not None:
        if reward is not None:
            shown = " is a table" if _is_table(reward) else f"={reward!r}"
            raise ArgumentError(
                f"reward{shown}, and sessions is given as well: expected one, with the "
                "rewards in sessions"
            )
        given = as_table(sessions)
        if "output_ids" in given.column_names:
            raise SchemaError(
                "sessions is a table of turns (it has output_ids): expected one row per "
                "session. The columns reward and group_id of turns count without it"
            )
        # extra columns are not carried into the report
        table = check_table(
            canonical(given, SESSIONS).select(SESSIONS.names), "sessions"
        )
        stated = [n for n in OF_TURNS if table.column(n).null_count < len(table)]
        return SessionFacts(None, table, tuple(stated))
    if not isinstance(reward, Mapping):
        number = _number(reward, "")
        return SessionFacts(number, None, () if number is None else ("reward",))
    for name in reward:
        if not isinstance(name, str):
            raise ArgumentError(f"reward has the key {name!r}: expected session ids")
    rewards = [_number(r, f"session {name!r}: ") for name, r in reward.items()]
    batch = _sessions(pa.array([*reward], pa.string()), pa.array(rewards, pa.float64()))
    return SessionFacts(None, pa.Table.from_batches([batch]), ("reward",))


def _is_table(reward: object) -> bool:
    return not isinstance(reward, Mapping | None) and arrow_source(reward) is not None


def _sessions(ids: pa.Array, rewards: pa.Array) -> pa.RecordBatch:
    null = pa.nulls(len(ids), pa.string())
    return pa.RecordBatch.from_arrays([ids, rewards, null, null], schema=SESSIONS)


def _of_turns(calls: Sessions, name: str) -> pa.Array:
    """The value of a column in the turns of each session; null if all are null."""
    fields = [SESSIONS.field("session_id"), SESSIONS.field(name)]
    schema = pa.schema(fields, SESSIONS.metadata)
    lines = calls.table.select(["session_id", "turn_index", name])
    lines = canonical(lines.replace_schema_metadata(None), schema)
    check_all(lines, checks_of(SESSIONS, (name,)))
    values = combined(lines.column(name))
    given = np.flatnonzero(values.is_valid())
    found, first = np.unique(calls.session[given], return_index=True)
    source = np.full(len(calls.ids), -1)
    source[found] = given[first]
    own = values.take(pa.array(source, mask=source < 0))
    due = own.take(pa.array(calls.session[given]))
    for at in np.flatnonzero(pc.not_equal(values.take(pa.array(given)), due))[:1]:
        other = int(given[at])
        one = int(source[calls.session[other]])
        raise InvalidTurnsError(
            f"{calls.place(other)}: {name} is {values[other]}, and {values[one]} in turn "
            f"{calls.turn_index[one]}: a session has one {name}. {_ADVICE[name]}"
        )
    return own


def _number(reward: object, where: str) -> float | None:
    """A finite reward, or None."""
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, (int, float, np.number)):
        raise ArgumentError(
            f"{where}reward is of type {type(reward).__name__}: expected a number"
            + ("" if where else ", a mapping by session_id, or a table")
        )
    try:
        number = float(reward)
    except OverflowError:  # an int that exceeds every float
        number = float("inf")
    if not np.isfinite(number):
        raise ArgumentError(f"{where}reward={number}: expected a finite number or None")
    return number


def last_lines(table: pa.Table) -> pa.Table:
    """The last row of each session, in order of the sessions' first rows."""
    numbers = codes(table.column("session_id"))
    last = len(numbers) - 1 - np.unique(numbers[::-1], return_index=True)[1]
    return take_rows(table, pa.array(last))


def errored(facts: pa.RecordBatch) -> Bools:
    return np.asarray(facts.column("error").is_valid())

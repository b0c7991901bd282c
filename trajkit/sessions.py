"""What the caller knows of each session: reward, group, error."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import compute as pc
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.picked import picked
from trajkit.schema import SESSIONS
from trajkit.tables import ArrowStream, TableLike, canonical

Reward: TypeAlias = float | Mapping[str, float | None] | TableLike | None
"""One reward for all sessions, one by session_id, or a ``sessions`` table."""


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """Reward, group and error by session, or one reward for all."""

    # the same for every session; read where there is no table
    reward: float | None
    # SESSIONS, or None
    table: pa.Table | None

    def of(self, session_ids: pa.Array) -> pa.RecordBatch:
        """SESSIONS for these sessions, in this order.

        Raises
        ------
        InvalidTurnsError
            The facts have no line for one of them.
        """
        n = len(session_ids)
        if self.table is None:
            return pa.RecordBatch.from_arrays(
                [
                    session_ids,
                    pa.repeat(pa.scalar(self.reward, pa.float64()), n),
                    pa.nulls(n, pa.string()),
                    pa.nulls(n, pa.string()),
                ],
                schema=SESSIONS,
            )
        found = pc.index_in(session_ids, self.table.column("session_id"))
        if found.null_count:
            missing = session_ids.filter(found.is_null())[0]
            raise InvalidTurnsError(
                f"session {missing.as_py()!r} has turns, but no line in sessions (or "
                "no reward): a session that can't be scored has a null reward"
            )
        return self.table.take(found).combine_chunks().to_batches()[0]


def session_facts(reward: Reward, sessions: TableLike | None) -> SessionFacts:
    """The facts that ``reward`` and ``sessions`` state.

    Raises
    ------
    SchemaError
        Both state them, or neither way that `Reward` names.
    InvalidTurnsError
        A session has two lines, or a reward that is not finite.
    """
    if isinstance(reward, (pa.Table, pa.RecordBatch, ArrowStream)):
        if sessions is not None:
            raise SchemaError("reward is a table and sessions is given: expected one")
        reward, sessions = None, reward
    if sessions is not None:
        if reward is not None:
            raise SchemaError(
                "reward and sessions are both given: put the rewards into sessions"
            )
        # what else the caller knows is in no report
        table = canonical(sessions, SESSIONS).select(SESSIONS.names)
        return SessionFacts(None, _checked(table))
    if isinstance(reward, Mapping):
        n = len(reward)
        for name in reward:
            if not isinstance(name, str):
                raise SchemaError(f"reward has the key {name!r}: expected session ids")
        rewards = [_number(r, f"session {name!r}: ") for name, r in reward.items()]
        table = pa.Table.from_arrays(
            [
                pa.array(list(reward), pa.string()),
                pa.array(rewards, pa.float64()),
                pa.nulls(n, pa.string()),
                pa.nulls(n, pa.string()),
            ],
            schema=SESSIONS,
        )
        return SessionFacts(None, _checked(table))
    return SessionFacts(_number(reward, ""), None)


def _number(reward: object, where: str) -> float | None:
    """A finite reward, or None."""
    if reward is None:
        return None
    if isinstance(reward, bool) or not isinstance(reward, (int, float, np.number)):
        raise SchemaError(
            f"{where}reward is of type {type(reward).__name__}: expected a number"
            + ("" if where else ", a mapping by session_id, or a table")
        )
    try:
        number = float(reward)
    except OverflowError:  # an int beyond every float
        number = float("inf")
    if not np.isfinite(number):
        raise InvalidTurnsError(
            f"{where}reward {number}: expected a finite number or None"
        )
    return number


def last_lines(table: pa.Table) -> pa.Table:
    """The last line of each session, in order of the sessions' first lines."""
    if not len(table):
        return table
    ids = table.column("session_id").combine_chunks().dictionary_encode().indices
    codes = ids.to_numpy()
    last = len(codes) - 1 - np.unique(codes[::-1], return_index=True)[1]
    return picked(table, pa.array(last))


def errored(facts: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Which sessions ended in an error."""
    result: npt.NDArray[np.bool_] = (
        facts.column("error").is_valid().to_numpy(zero_copy_only=False)
    )
    return result


def _checked(table: pa.Table) -> pa.Table:
    ids = table.column("session_id")
    counts = pc.value_counts(ids)
    again = counts.filter(pc.greater(counts.field("counts"), 1))
    if len(again):
        raise InvalidTurnsError(
            f"session {again[0]['values'].as_py()!r} has {again[0]['counts']} lines in "
            "sessions: expected one"
        )
    rewards = table.column("reward")
    bad = table.filter(pc.invert(pc.is_finite(rewards)).fill_null(False))
    if bad.num_rows:
        raise InvalidTurnsError(
            f"session {bad.column('session_id')[0].as_py()!r}: reward "
            f"{bad.column('reward')[0]}: expected a finite number or null"
        )
    return table

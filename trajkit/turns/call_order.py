"""Orders of a session's calls other than the order of recording."""

import numpy as np
import pyarrow as pa

from trajkit.errors import SchemaError
from trajkit.tables import lazy_compute as pc
from trajkit.tables.ragged import Ints, Longs
from trajkit.turns.sessions import Sessions


def by_prompt(calls: Sessions) -> Ints:
    """The calls of each session, shortest prompt first, then by request_id.

    ``request_id`` is an optional column of ``turns``; calls without one follow those
    that have one, in the order of turns. Raises SchemaError if its type has no order.
    """
    keys = [_ranks(calls, "request_id"), calls.calls["prompt_len"], calls.session]
    return np.lexsort(keys).astype(np.int32)


def by_creation(calls: Sessions) -> Ints:
    """The rank of each call by ``started_at``, then ``request_id``, then turn.

    Both are optional columns of ``turns``. Ranks are over all sessions. Raises
    SchemaError if a column's type has no order.
    """
    n = len(calls.calls)
    keys = [_ranks(calls, "request_id"), _ranks(calls, "started_at")]
    ranks = np.empty(n, np.int32)
    ranks[np.lexsort(keys)] = np.arange(n, dtype=np.int32)
    return ranks


def _ranks(calls: Sessions, name: str) -> Longs:
    """Number of smaller values in the column, by row; nulls come last."""
    if name not in calls.table.column_names:
        return np.zeros(len(calls.calls), np.int64)
    column = calls.table.column(name)
    if pa.types.is_null(column.type):
        return np.zeros(len(calls.calls), np.int64)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    try:
        ranks = pc.rank(column, tiebreaker="min")
    except pa.ArrowNotImplementedError as error:
        raise SchemaError(
            f"column {name!r} is {column.type}, which has no order: cast it"
        ) from error
    return np.asarray(ranks, np.int64)

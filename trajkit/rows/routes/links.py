"""The records of links that a route fills."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np
import pyarrow as pa

from trajkit._kernel_names import numbers
from trajkit.errors import SchemaError
from trajkit.schema import LINK_REASONS
from trajkit.tables.ragged import Longs, Records
from trajkit.turns.sessions import Sessions
from trajkit.turns.structs import LINK

REASONS: Mapping[str, int] = numbers("LinkReason", LINK_REASONS)
"""The number of each link reason in a record."""


def empty_links(calls: Sessions) -> Records:
    """A link of every call: a root, in no order."""
    links = np.zeros(len(calls.calls), LINK)
    for name in ("parent", "order", "rewritten_by"):
        links[name] = -1
    links["link_reason"] = REASONS["root"]
    return links


def first_of_session(calls: Sessions) -> Longs:
    """The first call of each call's session, shape (n_calls,)."""
    offsets = calls.offsets
    return np.repeat(offsets[:-1], np.diff(offsets))


def sessions_of(calls: Sessions) -> Iterator[range]:
    """The calls of each session."""
    offsets = calls.offsets.tolist()
    for start, stop in pairwise(offsets):
        yield range(start, stop)


def optional_column(calls: Sessions, name: str, type_: pa.DataType) -> list[object]:
    """The values of an optional column; empty where there is none."""
    if name not in calls.table.column_names:
        return []
    column = calls.table.column(name)
    if pa.types.is_null(column.type):
        return []
    try:
        values: list[object] = column.cast(type_).to_pylist()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise SchemaError(
            f"column {name!r} is {column.type}: expected {type_}"
        ) from error
    return values

"""The generated message nearest above a request in the message tree."""

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.policies import TIE_BREAKS, Policy
from trajkit.rows.routes.links import empty_links, optional_column
from trajkit.tables.ragged import Ints, Records
from trajkit.turns.message_equality import with_equality
from trajkit.turns.sessions import Forest, Sessions


def by_messages(calls: Sessions, forest: Forest, policy: Policy) -> Records:
    """Each call continues the nearest reply above its messages, as slime routes them.

    Tokens choose among equal replies (``tie_break``), and where a call has no messages.
    """
    links = empty_links(calls)
    keyed = with_equality(calls, policy.message_equality)
    _core.route_messages(
        forest.paths,
        keyed.requests,
        _tools_of(calls) if policy.compare_tools else None,
        policy.merge_threshold,
        TIE_BREAKS[policy.tie_break],
        links,
    )
    return links


def _tools_of(calls: Sessions) -> Ints | None:
    """A number for the tools of each call, the same for equal ``tools_key``; or None.

    Shape (n_calls,); without the column, all calls have the same tools.
    """
    keys = optional_column(calls, "tools_key", pa.string())
    if not keys:
        return None
    numbers: dict[object, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int32)

"""The records of links that a route fills."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from trajkit._arrow.ragged import Longs, Records
from trajkit._kernel_names import numbers
from trajkit.schema import LINK_REASONS
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

"""The records of links that a route fills."""

from collections.abc import Iterator, Mapping
from itertools import pairwise

import numpy as np

from trajkit._kernel_names import numbers
from trajkit.schema import LINK_REASONS
from trajkit.turns.calls import Calls, Longs, Records
from trajkit.turns.structs import LINK

REASONS: Mapping[str, int] = numbers("LinkReason", LINK_REASONS)
"""The number of each link reason in a record."""


def empty_links(calls: Calls) -> Records:
    """A link of every call: a root, in no order."""
    links = np.zeros(len(calls.calls), LINK)
    for name in ("parent", "order", "rewritten_by"):
        links[name] = -1
    links["link_reason"] = REASONS["root"]
    return links


def first_of_session(calls: Calls) -> Longs:
    """The first call of each call's session, shape (n_calls,)."""
    offsets = calls.session_offsets
    return np.repeat(offsets[:-1], np.diff(offsets))


def sessions_of(calls: Calls) -> Iterator[range]:
    """The calls of each session."""
    offsets = calls.session_offsets.tolist()
    for start, stop in pairwise(offsets):
        yield range(start, stop)

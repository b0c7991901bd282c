"""The token paths of calls, grown into a forest (the kernels' _native/forest.pxi)."""

from dataclasses import dataclass

import numpy as np

from trajkit import _core
from trajkit.calls import Calls, Ints, Longs, Records
from trajkit.layout import NODE


@dataclass(frozen=True, slots=True)
class Forest:
    """A radix tree over each session's paths (prompt ++ output)."""

    # dtype NODE, shape (n_nodes,)
    nodes: Records
    # shape (n_calls,): the node at whose stop the call's path ends
    ends: Ints
    # shape (n_calls,): leading tokens that an earlier path of the session had
    shared: Longs
    # shape (n_calls,): a call that had them, or -1
    shared_with: Ints


def grow(calls: Calls) -> Forest:
    """The forest of all calls, each session by itself."""
    n_calls = len(calls.calls)
    sizes = np.diff(calls.session_offsets)
    nodes = np.empty(2 * n_calls + calls.n_sessions, NODE)
    ends = np.empty(n_calls, np.int32)
    shared = np.empty(n_calls, np.int64)
    shared_with = np.empty(n_calls, np.int32)
    state = np.zeros(3, np.int64)
    _core.grow_forest(
        calls.calls,
        calls.session_offsets,
        np.empty(int(calls.held.max(initial=0)), np.int32),
        np.empty(2 * int(sizes.max(initial=0)) + 1, np.int32),
        nodes,
        ends,
        shared,
        shared_with,
        state,
        0,
    )
    return Forest(nodes[: int(state[0])], ends, shared, shared_with)

"""The token paths of calls, grown into a forest (the kernels' _native/forest.pxi)."""

from dataclasses import dataclass

import numpy as np

from trajkit import _core
from trajkit.calls import Calls, Ints, Longs, Records
from trajkit.layout import NODE
from trajkit.pooled import pooled


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
    return grow_paths(calls.calls, calls.session_offsets)


def grow_paths(paths: Records, session_offsets: Longs) -> Forest:
    """The forest of records of dtype CALL.

    ``session_offsets`` has shape (n_sessions + 1,).
    """
    n_calls = len(paths)
    sizes = np.diff(session_offsets)
    room = 0
    # calls that say what they share are not compared with the path of the call before
    if not (paths["base"] >= 0).any():
        room = int((paths["prompt_len"] + paths["out_len"]).max(initial=0))
    nodes = pooled(2 * n_calls + len(sizes), NODE)
    ends = np.empty(n_calls, np.int32)
    shared = np.empty(n_calls, np.int64)
    shared_with = np.empty(n_calls, np.int32)
    state = np.zeros(3, np.int64)
    _core.grow_forest(
        paths,
        session_offsets,
        np.empty(room, np.int32),
        np.empty(2 * int(sizes.max(initial=0)) + 1, np.int32),
        nodes,
        ends,
        shared,
        shared_with,
        state,
        0,
    )
    return Forest(nodes[: int(state[0])], ends, shared, shared_with)

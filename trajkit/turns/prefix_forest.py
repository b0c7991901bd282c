"""The token paths of calls as a forest (kernels: _native/forest/forest.pxi)."""

from dataclasses import dataclass

import numpy as np

from trajkit import _core
from trajkit._arrow.buffers import pooled
from trajkit.turns.calls import Calls, Ints, Longs, Records
from trajkit.turns.structs import NODE


@dataclass(frozen=True, slots=True)
class Forest:
    """A radix tree over each session's paths (prompt ++ output)."""

    # shape (n_calls,): leading tokens shared with an earlier path of the session
    shared: Longs
    # shape (n_calls,): a call that has them, or -1
    shared_with: Ints
    # dtype NODE, shape (n_nodes,): ranges of paths that no call leaves or ends inside
    nodes: Records
    # shape (n_calls,): the node at whose stop the call's path ends
    ends: Ints
    # the forest and the calls it was grown from, as kernels take them
    paths: _core.CallForest


def grow(calls: Calls) -> Forest:
    """Build the forest of all calls, one tree per session."""
    return grow_paths(calls.calls, calls.session_offsets)


def grow_paths(paths: Records, session_offsets: Longs) -> Forest:
    """Build the forest of records of dtype CALL.

    ``session_offsets`` has shape (n_sessions + 1,).
    """
    n_calls = len(paths)
    nodes = pooled(2 * n_calls + len(session_offsets) - 1, NODE)
    ends = np.empty(n_calls, np.int32)
    shared = np.empty(n_calls, np.int64)
    shared_with = np.empty(n_calls, np.int32)
    n_nodes = _core.grow_forest(
        paths,
        session_offsets,
        nodes,
        ends,
        shared,
        shared_with,
    )
    nodes = nodes[:n_nodes]
    grown = _core.CallForest(paths, session_offsets, nodes, ends)
    return Forest(shared, shared_with, nodes, ends, grown)


class Paths:
    """Prompts and outputs of calls, copied on request."""

    def __init__(self, calls: Calls, forest: Forest) -> None:
        self._calls = calls
        self._forest = forest.paths

    def path(self, call: int) -> Ints:
        """Prompt, then output."""
        return self._ids(call, 0, int(self._calls.path_len[call]))

    def prompt(self, call: int) -> Ints:
        """The prompt ids."""
        return self._ids(call, 0, int(self._calls.calls["prompt_len"][call]))

    def output(self, call: int) -> Ints:
        """The output ids."""
        start = int(self._calls.calls["prompt_len"][call])
        return self._ids(call, start, int(self._calls.path_len[call]))

    def _ids(self, call: int, start: int, stop: int) -> Ints:
        ids = np.empty(stop - start, np.int32)
        _core.copy_path(self._forest, call, start, ids)
        return ids

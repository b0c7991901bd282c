"""The calls of a table with the forest of their paths, as most kernels take them.

Checks the layout of the four arrays once, in O(calls); kernels then read them unchecked.
"""


@cython.auto_pickle(False)
@cython.final
cdef class CallForest:
    """Calls, their sessions, and the forest that `grow_forest` made of their paths."""
    cdef const Call[::1] calls
    cdef const int64_t[::1] session_offsets
    cdef const Node[::1] nodes
    cdef const int32_t[::1] ends
    cdef int64_t n_calls, n_sessions, n_nodes

    def __cinit__(
        self,
        const Call[::1] calls not None,
        const int64_t[::1] session_offsets not None,
        const Node[::1] nodes not None,
        const int32_t[::1] ends not None,
    ):
        _check_sessions(session_offsets, calls.shape[0])
        _check_length("ends", ends.shape[0], calls.shape[0])
        _check_forest(nodes, ends)
        self.calls, self.session_offsets = calls, session_offsets
        self.nodes, self.ends = nodes, ends
        self.n_calls, self.n_nodes = calls.shape[0], nodes.shape[0]
        self.n_sessions = session_offsets.shape[0] - 1


cdef struct Paths:            # the arrays of a CallForest with at least one call
    const Call* calls
    const int64_t* session_offsets
    const Node* nodes
    const int32_t* ends
    int64_t n_calls
    int64_t n_sessions
    int64_t n_nodes


cdef Paths _paths(CallForest forest):
    cdef Paths paths
    paths.calls = &forest.calls[0]
    paths.session_offsets = &forest.session_offsets[0]
    paths.nodes = &forest.nodes[0]
    paths.ends = &forest.ends[0]
    paths.n_calls, paths.n_nodes = forest.n_calls, forest.n_nodes
    paths.n_sessions = forest.n_sessions
    return paths

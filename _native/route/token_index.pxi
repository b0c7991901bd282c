"""Which earlier call a call without messages continues, by its tokens.

Its prompt begins with that call's prompt and is longer, or with that call's path. Of several, it is
the call whose path the prompt repeats for longest; of equals, one that it repeats entirely, or else
the first with the shortest prompt.

Calls are indexed by the nodes of their path, from the one where their prompt ends to its own end.
Who looks for a call climbs from the node where its prompt ends, and takes the first call it meets.
O(nodes climbed), usually one: the prompt that is looked for begins with the path of the last call.
"""


@cython.auto_pickle(False)
@cython.final
cdef class TokenIndex:
    """The calls that a later call of their session may continue, in the order of the table."""
    cdef CallForest forest
    # per node: the first call whose path ends at its stop, or -1
    cdef int32_t[::1] ended
    # per node: of the calls with a prompt that end there or above and a path that ends there
    # or below, the first with the shortest prompt
    cdef int32_t[::1] replied

    def __cinit__(self, CallForest forest not None):
        self.forest = forest
        self.ended = full(forest.n_nodes, -1, "i4")
        self.replied = full(forest.n_nodes, -1, "i4")

    cdef void _add(self, int32_t call) noexcept nogil:
        cdef const Call* calls = &self.forest.calls[0]
        cdef const Node* nodes = &self.forest.nodes[0]
        cdef int32_t node = self.forest.ends[call], other
        cdef pos_t prompt_len = calls[call].prompt_len
        if self.ended[node] < 0:
            self.ended[node] = call
        if prompt_len == 0:  # every prompt begins with it
            return
        while nodes[node].stop >= prompt_len:
            other = self.replied[node]
            if other >= 0 and calls[other].prompt_len <= prompt_len:
                return  # the nodes above have that call, too, or a better one
            self.replied[node] = call
            node = nodes[node].parent

    cdef void _clear(self, int32_t call) noexcept nogil:
        """Take every call from the nodes at which this call may be indexed."""
        cdef const Node* nodes = &self.forest.nodes[0]
        cdef int32_t node = self.forest.ends[call]
        self.ended[node] = -1
        while node >= 0 and nodes[node].stop >= self.forest.calls[call].prompt_len:
            self.replied[node] = -1
            node = nodes[node].parent

    cdef int32_t _find(self, int32_t call) noexcept nogil:
        cdef const Call* calls = &self.forest.calls[0]
        cdef const Node* nodes = &self.forest.nodes[0]
        cdef pos_t prompt_len = calls[call].prompt_len
        cdef int32_t node = self.forest.ends[call], other
        while nodes[node].start >= prompt_len:
            node = nodes[node].parent
        while node >= 0:
            if nodes[node].stop <= prompt_len and self.ended[node] >= 0:
                return self.ended[node]
            other = self.replied[node]
            if other >= 0 and calls[other].prompt_len < prompt_len:
                return other
            node = nodes[node].parent
        return -1

    def add(self, int32_t call):
        """Index a call. Those of a session are added in the order of the table."""
        _check_call(self.forest, call)
        self._add(call)

    def find(self, int32_t call):
        """The call that a call continues, or -1."""
        _check_call(self.forest, call)
        return self._find(call)

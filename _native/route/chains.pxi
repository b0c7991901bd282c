"""Which chain of calls a call continues, by the chains' ends: the longest that begins its prompt.

A chain ends with the path of its last call, or only with that call's prompt: then outputs are never
compared. Every call has one child at most, and replaces its parent as the end of its chain. Ends
are listed at the node of the forest where they are; a call climbs from the node where its prompt
ends. O(nodes climbed), usually one.
"""


@cython.auto_pickle(False)
@cython.final
cdef class ChainEnds:
    """The ends of the chains of a session."""
    cdef CallForest forest
    cdef bint of_prompts      # chains end with prompts
    cdef int32_t[::1] last    # per node: the last call that is a chain's end there, or -1
    cdef int32_t[::1] before  # per call: the next one in the list of its node, or -1
    cdef int32_t[::1] first   # per call: the first call of its chain

    def __cinit__(self, CallForest forest not None, bint of_prompts, int32_t[::1] first not None):
        self.forest, self.of_prompts, self.first = forest, of_prompts, first
        self.last = full(forest.n_nodes, -1, "i4")
        self.before = empty(forest.n_calls, "i4")

    cdef pos_t _length(self, int32_t call) noexcept nogil:
        cdef const Call* last = &self.forest.calls[call]
        return last.prompt_len if self.of_prompts else _held_len(last)

    cdef int32_t _take(self, int32_t node, pos_t prompt_len) noexcept nogil:
        """Remove the longest end at a node that fits a prompt, of equals of the oldest chain."""
        cdef int32_t call = self.last[node], best = -1, after = -1, after_best = -1
        cdef pos_t length, longest = -1
        while call >= 0:
            length = self._length(call)
            if length <= prompt_len and (
                length > longest or length == longest and self.first[call] < self.first[best]
            ):
                best, after_best, longest = call, after, length
            after = call
            call = self.before[call]
        if best >= 0 and after_best < 0:
            self.last[node] = self.before[best]
        elif best >= 0:
            self.before[after_best] = self.before[best]
        return best

    cdef int32_t _route(self, const Paths* paths, int32_t call) noexcept nogil:
        """The end that a call replaces, or -1."""
        cdef pos_t prompt_len = paths.calls[call].prompt_len
        cdef int32_t node = _prompt_node(paths, call), parent = -1
        self.first[call] = call
        if self.of_prompts and prompt_len == 0:
            return -1
        while node >= 0 and parent < 0:
            parent = self._take(node, prompt_len)
            node = paths.nodes[node].parent
        if parent >= 0:
            self.first[call] = self.first[parent]
        node = _prompt_node(paths, call) if self.of_prompts else paths.ends[call]
        self.before[call] = self.last[node]
        self.last[node] = call
        return parent


def route_chains(
    CallForest forest not None,
    bint of_prompts,
    int32_t[::1] first not None,
    Link[::1] links not None,
):
    """Fill ``parent`` of every link, and ``first`` with the first call of each call's chain.

    A call's parent ends the chain whose end is the longest prefix of its prompt; of equal ends, the
    chain that began first wins. Chains end with paths, or with prompts: then a call with an empty
    prompt has neither parent nor child.
    """
    cdef ChainEnds ends
    cdef Paths paths
    cdef int64_t i
    _check_length("links", links.shape[0], forest.n_calls)
    _check_length("first", first.shape[0], forest.n_calls)
    if forest.n_calls == 0:
        return
    ends = ChainEnds(forest, of_prompts, first)
    paths = _paths(forest)
    with nogil:
        for i in range(paths.n_calls):
            links[i].parent = ends._route(&paths, <int32_t>i)

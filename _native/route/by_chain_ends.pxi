"""Which chain of calls a call continues, by the chains' ends: the longest that begins its prompt.

Fills links from the forest of token paths, in O(calls + nodes of the forest). The end of a chain is
the path of its last call, or only that call's prompt: then outputs are never compared. Every call
has one child at most, and replaces its parent as the end of its chain. Ends are at
places. Paths end at nodes of the forest, so for these the nodes are the places. Prompts end inside
nodes, so the positions where they end form a tree of their own: a place in it is named by one call
whose prompt ends there, and the place above it is the next one towards the root.
"""


cdef struct ChainEnds:        # scratch
    int32_t* up               # per place: as in TokenIndex
    int32_t* left             # per place: calls that end there and are not continued, less one
    int32_t* active           # per place: the last chain end there, or -1
    int32_t* next_active      # per call: the next chain end at its place, or -1
    int32_t* first_of         # per call: the first call of its chain
    int32_t* sought           # per call: the lowest place where its parent may end, or -1
    const int32_t* place      # per call: the place where it ends, or -1 if nothing continues it


cdef int32_t _take_chain_end(ChainEnds* ends, int32_t place) noexcept nogil:
    """Remove and return the end of the oldest chain that ends at the place."""
    cdef int32_t end = ends.active[place], before = -1, best = -1, best_before = -1
    while end >= 0:
        if best < 0 or ends.first_of[end] < ends.first_of[best]:
            best = end
            best_before = before
        before = end
        end = ends.next_active[end]
    if best_before < 0:
        ends.active[place] = ends.next_active[best]
    else:
        ends.next_active[best_before] = ends.next_active[best]
    ends.left[place] -= 1
    return best


cdef void _rank_chains(Link* links, int32_t* next_call, int32_t lo, int32_t hi) noexcept nogil:
    """Rank the calls chain by chain, in order of their first calls.

    ``next_call`` becomes the child of each call, or -1.
    """
    cdef int32_t i, call, rank = 0
    for i in range(lo, hi):
        next_call[i] = -1
    for i in range(lo, hi):
        if links[i].parent >= 0:
            next_call[links[i].parent] = i
    for i in range(lo, hi):
        call = i if links[i].parent < 0 else -1
        while call >= 0:
            links[call].order = rank
            rank += 1
            call = next_call[call]


cdef void _route_session_by_ends(
    ChainEnds* ends, Link* links, int32_t reason, int32_t lo, int32_t hi
) noexcept nogil:
    """The links of one session."""
    cdef int32_t i, place
    for i in range(lo, hi):
        links[i].rewritten_by = links[i].parent = -1
        links[i].link_reason = REASON_ROOT
        ends.first_of[i] = i
        place = _next_alive(ends.up, ends.left, ends.sought[i])
        while place >= 0 and ends.active[place] < 0:
            place = _next_alive(ends.up, ends.left, ends.up[place])
        if place >= 0:
            links[i].parent = _take_chain_end(ends, place)
            links[i].link_reason = reason
            ends.first_of[i] = ends.first_of[links[i].parent]
        place = ends.place[i]
        if place >= 0:
            ends.next_active[i] = ends.active[place]
            ends.active[place] = i
    _rank_chains(links, ends.next_active, lo, hi)


cdef void _end_at_paths(const Paths* paths, ChainEnds* ends) noexcept nogil:
    """Fill up, left and sought where chains end with paths."""
    cdef const Node* nodes = paths.nodes
    cdef int64_t i
    cdef int32_t node
    for i in range(paths.n_nodes):
        ends.up[i] = nodes[i].parent
    for i in range(paths.n_calls):
        node = paths.ends[i]
        ends.left[node] += 1
        while nodes[node].stop > paths.calls[i].prompt_len:
            node = nodes[node].parent
        ends.sought[i] = node


cdef void _end_at_prompts(
    const Paths* paths, const int32_t* by_prompt, int32_t* node_up, int32_t* lowest, ChainEnds* ends
) noexcept nogil:
    """Fill up, left and sought where chains end with prompts; scratch per node of the forest.

    ``lowest`` is initially -1.
    """
    cdef const Call* calls = paths.calls
    cdef int64_t i
    cdef int32_t call, node, above
    for i in range(paths.n_nodes):
        node_up[i] = paths.nodes[i].parent
    for i in range(paths.n_calls):
        call = by_prompt[i]
        ends.sought[call] = -1
        if calls[call].prompt_len == 0:
            continue
        node = _prompt_node(paths, call)
        above = lowest[node]  # prompts that end in one node come one length after another
        if above < 0 or calls[above].prompt_len < calls[call].prompt_len:
            ends.up[call] = above
            lowest[node] = call
        ends.sought[call] = lowest[node]
        ends.left[lowest[node]] += 1
    for i in range(paths.n_calls):
        if ends.sought[i] == i and ends.up[i] < 0:  # the first in its node
            node = paths.nodes[_prompt_node(paths, <int32_t>i)].parent
            node = _next_alive(node_up, lowest, node)
            if node >= 0:
                ends.up[i] = lowest[node]


def route_chains(
    CallForest forest not None, const int32_t[::1] by_prompt, Link[::1] links not None
):
    """Fill every call's link: its parent ends the chain whose end is its longest prefix.

    Of equal ends, the chain that began first wins. Chains end with paths; with ``by_prompt``, as
    `route_prefix` takes it, they end with prompts, and a call with an empty prompt has neither
    parent nor child.
    """
    cdef int64_t n_calls = forest.n_calls, n_nodes = forest.n_nodes, s
    cdef int32_t reason = REASON_TOKENS if by_prompt is None else REASON_PROMPTS
    cdef Paths paths
    cdef ChainEnds ends

    _check_length("links", links.shape[0], n_calls)
    if by_prompt is not None:
        _check_length("by_prompt", by_prompt.shape[0], n_calls)
    if n_calls == 0:
        return
    cdef int32_t[:, ::1] of_nodes = full((2, n_nodes), -1, "i4")
    cdef int32_t[:, ::1] of_places = full((3, n_nodes if by_prompt is None else n_calls), -1, "i4")
    cdef int32_t[:, ::1] of_calls = empty((3, n_calls), "i4")
    paths = _paths(forest)
    ends.up, ends.left, ends.active = &of_places[0, 0], &of_places[1, 0], &of_places[2, 0]
    ends.next_active, ends.first_of = &of_calls[0, 0], &of_calls[1, 0]
    ends.sought = ends.place = &of_calls[2, 0]
    if by_prompt is not None:
        _check_by_prompt(by_prompt, &paths, ends.first_of)
    with nogil:
        if reason == REASON_TOKENS:
            ends.place = paths.ends
            _end_at_paths(&paths, &ends)
        else:
            _end_at_prompts(&paths, &by_prompt[0], &of_nodes[0, 0], &of_nodes[1, 0], &ends)
        for s in range(paths.n_sessions):
            _route_session_by_ends(
                &ends, &links[0], reason, <int32_t>paths.session_offsets[s],
                <int32_t>paths.session_offsets[s + 1],
            )

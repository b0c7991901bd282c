"""Which chain of calls a call continues, by prompts alone: outputs are never compared.

Fills links from the forest of token paths and the calls by where their prompts end, in
O(calls + nodes of the forest). Only the last prompt of a chain is compared, and the longest
that is a prefix wins. Prompts end inside the nodes of the forest, so the positions where they
end form a tree of their own. A place in it is named by the first call whose prompt ends there;
the place above it is the next one towards the root. One prompt is a prefix of another if its
place is at or above the other's. No two chains have the same last prompt: a call with that
prompt would have continued the first of them.
"""


def find_prompt_ends(CallForest forest not None, int32_t[::1] inside not None):
    """Fill the node of the forest in which each call's prompt ends; the root if it is empty."""
    cdef int64_t i
    cdef Paths paths
    _check_length("inside", inside.shape[0], forest.n_calls)
    if forest.n_calls == 0:
        return
    paths = _paths(forest)
    with nogil:
        for i in range(paths.n_calls):
            inside[i] = _prompt_node(&paths, <int32_t>i)


cdef int64_t _first_unsorted(
    const Paths* paths, const int32_t* inside, const int32_t[::1] by_place
) noexcept nogil:
    """First index at which by_place does not order the calls by node, prompt and number."""
    cdef const Call* calls = paths.calls
    cdef int64_t k
    cdef int32_t i, before = -1
    for k in range(paths.n_calls):
        i = by_place[k]
        if not (0 <= i < paths.n_calls and 0 <= inside[i] < paths.n_nodes):
            return k
        if before >= 0:
            if inside[i] < inside[before]:
                return k
            if inside[i] == inside[before]:
                if calls[i].prompt_len < calls[before].prompt_len:
                    return k
                if calls[i].prompt_len == calls[before].prompt_len and i <= before:
                    return k
        before = i
    return -1


cdef struct Places:           # scratch
    int32_t* node_up          # per node: as in TokenIndex
    int32_t* lowest           # per node: the place furthest down in it, or -1
    int32_t* place            # per call: the place where its prompt ends, or -1
    int32_t* up               # per place: the next one above, or -1
    int32_t* left             # per place: calls that are not continued yet, less one
    int32_t* active           # per place: the call that ends a chain there, or -1
    int32_t* next_call        # per call: the call that continues it, or -1


cdef void _build_places(
    const Paths* paths, const int32_t* inside, const int32_t* by_place, Places* places
) noexcept nogil:
    """Fill the tree of the places where prompts end."""
    cdef const Call* calls = paths.calls
    cdef int64_t i, k
    cdef int32_t call, node, before = -1
    for i in range(paths.n_nodes):
        places.node_up[i] = paths.nodes[i].parent
        places.lowest[i] = -1
    for k in range(paths.n_calls):
        call = by_place[k]
        places.place[call] = places.up[call] = places.left[call] = places.active[call] = -1
        if calls[call].prompt_len == 0:
            continue
        places.place[call] = call
        if before >= 0 and inside[before] == inside[call]:
            if calls[before].prompt_len == calls[call].prompt_len:
                places.place[call] = places.place[before]
            else:
                places.up[call] = places.place[before]
        places.left[places.place[call]] += 1
        places.lowest[inside[call]] = places.place[call]
        before = call
    for i in range(paths.n_calls):
        if places.place[i] == i and places.up[i] < 0:  # the first in its node
            node = _next_alive(places.node_up, places.lowest, paths.nodes[inside[i]].parent)
            if node >= 0:
                places.up[i] = places.lowest[node]


cdef void _route_session_by_prompts(
    Places* places, Link* links, int32_t lo, int32_t hi
) noexcept nogil:
    """The links of one session."""
    cdef int32_t i, place
    for i in range(lo, hi):
        links[i].rewritten_by = links[i].parent = -1
        links[i].reason = REASON_ROOT
        if places.place[i] < 0:
            continue
        place = _next_alive(places.up, places.left, places.place[i])
        while place >= 0 and places.active[place] < 0:
            place = _next_alive(places.up, places.left, places.up[place])
        if place >= 0:
            links[i].parent = places.active[place]
            links[i].reason = REASON_PROMPTS
            places.active[place] = -1
            places.left[place] -= 1
        places.active[places.place[i]] = i
    _rank_chains(links, places.next_call, lo, hi)


def route_prompts(
    CallForest forest not None,
    const int32_t[::1] inside not None,
    const int32_t[::1] by_place not None,
    Link[::1] links not None,
):
    """Fill every call's link: its parent ends the chain whose last prompt is its longest prefix.

    Every call has one child at most; a call with an empty prompt has neither parent nor child.
    ``inside`` is of `find_prompt_ends`; ``by_place`` orders the calls by it, by the length of
    their prompt and by their number.
    """
    cdef int64_t n_calls = forest.n_calls, s, bad
    cdef Paths paths
    cdef Places places

    for name, n in (
        ("inside", inside.shape[0]), ("by_place", by_place.shape[0]), ("links", links.shape[0]),
    ):
        _check_length(name, n, n_calls)
    if n_calls == 0:
        return
    paths = _paths(forest)
    bad = _first_unsorted(&paths, &inside[0], by_place)
    if bad >= 0:
        raise LayoutError(f"by_place[{bad}] is {by_place[bad]}: no order of the calls by place")
    cdef int32_t[:, ::1] of_nodes = empty((2, forest.n_nodes), "i4")
    cdef int32_t[:, ::1] of_calls = empty((5, n_calls), "i4")
    places.node_up, places.lowest = &of_nodes[0, 0], &of_nodes[1, 0]
    places.place, places.up, places.left = &of_calls[0, 0], &of_calls[1, 0], &of_calls[2, 0]
    places.active, places.next_call = &of_calls[3, 0], &of_calls[4, 0]
    with nogil:
        _build_places(&paths, &inside[0], &by_place[0], &places)
        for s in range(paths.n_sessions):
            _route_session_by_prompts(
                &places, &links[0], <int32_t>paths.session_offsets[s],
                <int32_t>paths.session_offsets[s + 1],
            )

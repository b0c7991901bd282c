"""Which chain of calls a call goes on, by prompts alone: outputs are never compared.

Only the last prompt of a chain is compared, and the longest that is a prefix wins. Prompts
end inside the nodes of the forest, so the places where they end make a tree of their own: a
place is named by the first call whose prompt ends there, and the place above it is the next
one on the way to the root. One prompt is a prefix of another where its place is at or above
the other's. No two chains have the same last prompt: a call with that prompt would have gone
on the first of them.
"""


def find_prompt_ends(
    const Call[::1] calls not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    int32_t[::1] inside not None,
):
    """Fill the node of the forest in which each call's prompt ends; the root if it is empty."""
    cdef int64_t i
    cdef int32_t node
    _check_length("ends", ends.shape[0], calls.shape[0])
    _check_length("inside", inside.shape[0], calls.shape[0])
    _check_forest(nodes, ends)
    with nogil:
        for i in range(calls.shape[0]):
            node = ends[i]
            while nodes[node].start >= calls[i].prompt_len:
                node = nodes[node].parent
            inside[i] = node


cdef int64_t _first_unsorted(
    const Call[::1] calls, const Node[::1] nodes, const int32_t[::1] inside,
    const int32_t[::1] by_place,
) noexcept nogil:
    """First index at which by_place does not order the calls by node, prompt and number."""
    cdef int64_t k
    cdef int32_t i, before = -1
    for k in range(by_place.shape[0]):
        i = by_place[k]
        if not (0 <= i < calls.shape[0] and 0 <= inside[i] < nodes.shape[0]):
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


def route_prompts(
    const Call[::1] calls not None,
    const int64_t[::1] session_offsets not None,
    const Node[::1] nodes not None,
    const int32_t[::1] inside not None,
    const int32_t[::1] by_place not None,
    int32_t[:, ::1] of_node not None,
    int32_t[:, ::1] of_call not None,
    Link[::1] links not None,
):
    """Fill every call's link: its parent ends the chain whose last prompt is its longest prefix.

    Every call has one child at most; a call with an empty prompt has neither parent nor child.
    ``inside`` is of `find_prompt_ends`, ``by_place`` orders the calls by it, by the length of
    their prompt and by their number. ``of_node`` is scratch of 2 by the nodes of the forest,
    ``of_call`` of 5 by the calls.
    """
    cdef:
        int64_t n_calls = calls.shape[0], n_sessions = session_offsets.shape[0] - 1
        int64_t n_nodes = nodes.shape[0], s, i, k, bad
        int32_t call, before, node, rank
        int32_t* node_up
        int32_t* lowest       # per node: the place furthest down in it, or -1
        int32_t* places       # per call: the place where its prompt ends, or -1
        int32_t* up           # per place: the next one above, or -1
        int32_t* left         # per place: calls that none has gone on from yet, less one
        int32_t* active       # per place: the call that ends a chain there, or -1
        int32_t* next_call    # per call: the one that goes on from it, or -1

    _check_sessions(session_offsets, n_calls)
    for name, n in (
        ("inside", inside.shape[0]), ("by_place", by_place.shape[0]),
        ("of_call", of_call.shape[1]), ("links", links.shape[0]),
    ):
        _check_length(name, n, n_calls)
    _check_length("of_node", of_node.shape[0], 2)
    _check_length("of_node", of_node.shape[1], n_nodes)
    _check_length("of_call", of_call.shape[0], 5)
    bad = _first_unsorted(calls, nodes, inside, by_place[:n_calls])
    if bad >= 0:
        raise LayoutError(f"by_place[{bad}] is {by_place[bad]}: no order of the calls by place")
    if n_calls == 0:
        return
    node_up = &of_node[0, 0]
    lowest = &of_node[1, 0]
    places = &of_call[0, 0]
    up = &of_call[1, 0]
    left = &of_call[2, 0]
    active = &of_call[3, 0]
    next_call = &of_call[4, 0]
    with nogil:
        for i in range(n_nodes):
            node_up[i] = nodes[i].parent
            lowest[i] = -1
        before = -1
        for k in range(n_calls):
            call = by_place[k]
            places[call] = up[call] = left[call] = active[call] = -1
            if calls[call].prompt_len == 0:
                continue
            places[call] = call
            if before >= 0 and inside[before] == inside[call]:
                if calls[before].prompt_len == calls[call].prompt_len:
                    places[call] = places[before]
                else:
                    up[call] = places[before]
            left[places[call]] += 1
            lowest[inside[call]] = places[call]
            before = call
        for i in range(n_calls):
            if places[i] == i and up[i] < 0:  # the first in its node
                node = _next_alive(node_up, lowest, nodes[inside[i]].parent)
                if node >= 0:
                    up[i] = lowest[node]
        for s in range(n_sessions):
            for i in range(session_offsets[s], session_offsets[s + 1]):
                call = <int32_t>i
                next_call[i] = -1
                links[i].rewritten_by = links[i].parent = -1
                links[i].why = WHY_ROOT
                if places[i] < 0:
                    continue
                node = _next_alive(up, left, places[i])
                while node >= 0 and active[node] < 0:
                    node = _next_alive(up, left, up[node])
                if node >= 0:
                    links[i].parent = active[node]
                    links[i].why = WHY_PROMPTS
                    next_call[active[node]] = call
                    active[node] = -1
                    left[node] -= 1
                active[places[i]] = call
            rank = 0
            for i in range(session_offsets[s], session_offsets[s + 1]):
                if links[i].parent >= 0:
                    continue
                call = <int32_t>i
                while call >= 0:
                    links[call].order = rank
                    rank += 1
                    call = next_call[call]

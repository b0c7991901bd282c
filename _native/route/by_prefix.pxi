"""Which call a call continues, whatever order they were recorded in: by longest prefix.

The parent of a call is the one whose path is the longest prefix of its prompt. Where several
calls have that same path nothing tells them apart, and where several calls have one prompt
(retries) only what continues them does; so some calls are set aside, and with them every
chain that they stand in (spec: peers, NeMo Gym 5).

Calls without output are none that can be continued or trained: every other parent is shorter
than its child's prompt, so by length of prompt parents come first.
"""

cdef enum:
    STATE_PARENT = 1          # a call was given it for its parent
    STATE_EXTENDED = 2        # so, and it alone could be
    STATE_GROUP_EXTENDED = 4  # a call with the same prompt was extended; read off the first
    STATE_SOUND = 8           # no call from its root to it is set aside
    STATE_IN_CHAIN = 16


cdef int32_t _prompt_node(
    const Call* calls, const Node* nodes, const int32_t* ends, int32_t call
) noexcept nogil:
    """The node in which the call's prompt ends: calls with that prompt have the same one."""
    cdef int32_t node = ends[call]
    while nodes[node].start >= calls[call].prompt_len:
        node = nodes[node].parent
    return node


cdef void _route_session_by_prefix(
    const Call* calls, const Node* nodes, const int32_t* ends, const int32_t* places,
    int32_t lo, int32_t hi, int32_t* up, int32_t* first, int32_t* several, int32_t* asked,
    int32_t* group, int32_t* size, uint8_t* state, Link* links,
) noexcept nogil:
    """Links of one session; ``places[lo:hi]`` are its calls by length of prompt."""
    cdef int32_t k, i, node, head, rank = 0
    cdef bint retried, set_aside

    for k in range(lo, hi):
        i = places[k]
        links[i].parent = links[i].order = links[i].rewritten_by = -1
        links[i].why = WHY_ROOT
        group[i] = i
        size[i] = state[i] = 0
        if calls[i].out_len == 0:
            links[i].why = WHY_EMPTY
        elif first[ends[i]] < 0:
            first[ends[i]] = i
        else:
            several[ends[i]] = 1

    for k in range(lo, hi):
        i = places[k]
        if calls[i].out_len == 0:
            continue
        node = _prompt_node(calls, nodes, ends, i)
        # Prompts that end in one node come one length after another.
        head = asked[node]
        if head >= 0 and calls[head].prompt_len == calls[i].prompt_len:
            group[i] = head
        else:
            asked[node] = i
        size[group[i]] += 1
        if nodes[node].stop > calls[i].prompt_len:
            node = nodes[node].parent
        node = _next_alive(up, first, node)
        if node < 0:
            continue
        links[i].parent = first[node]
        state[first[node]] |= STATE_PARENT
        if several[node]:
            links[i].why = WHY_AMBIGUOUS
        else:
            links[i].why = WHY_TOKENS
            state[first[node]] |= STATE_EXTENDED
            state[group[first[node]]] |= STATE_GROUP_EXTENDED

    for k in range(lo, hi):
        i = places[k]
        if calls[i].out_len == 0:
            continue
        set_aside = links[i].why == WHY_AMBIGUOUS
        retried = size[group[i]] > 1
        if retried and state[group[i]] & STATE_GROUP_EXTENDED:
            if not set_aside and not state[i] & STATE_EXTENDED:
                links[i].why = WHY_SUPERSEDED
                set_aside = True
        elif retried:
            if set_aside:
                links[i].why = WHY_UNRESOLVED_AMBIGUOUS
            elif group[i] == i:
                links[i].why = WHY_UNRESOLVED_KEPT
            else:
                links[i].why = WHY_UNRESOLVED
                set_aside = True
        if not set_aside and (links[i].parent < 0 or state[links[i].parent] & STATE_SOUND):
            state[i] |= STATE_SOUND

    # A chain is a way from a root to a call that none continues, with nothing set aside on it.
    for k in range(hi - 1, lo - 1, -1):
        i = places[k]
        if not state[i] & STATE_SOUND:
            continue
        if not state[i] & STATE_PARENT:
            state[i] |= STATE_IN_CHAIN
        if state[i] & STATE_IN_CHAIN and links[i].parent >= 0:
            state[links[i].parent] |= STATE_IN_CHAIN
    for k in range(lo, hi):
        i = places[k]
        if state[i] & STATE_IN_CHAIN:
            links[i].order = rank
            rank += 1
        elif links[i].why == WHY_ROOT or links[i].why == WHY_TOKENS:
            links[i].why = WHY_STRANDED


cdef int64_t _first_bad_place(
    const int32_t[::1] places, const int64_t[::1] session_offsets, const Call[::1] calls,
    int32_t[::1] seen,
) noexcept nogil:
    """Index of the first entry that does not rank the calls of its session, or -1."""
    cdef int64_t s, k
    for k in range(places.shape[0]):
        seen[k] = 0
    for s in range(session_offsets.shape[0] - 1):
        for k in range(session_offsets[s], session_offsets[s + 1]):
            if not session_offsets[s] <= places[k] < session_offsets[s + 1]:
                return k
            if seen[places[k]]:
                return k
            seen[places[k]] = 1
            if k > session_offsets[s] and (
                calls[places[k]].prompt_len < calls[places[k - 1]].prompt_len
            ):
                return k
    return -1


def route_prefix(
    const Call[::1] calls not None,
    const int64_t[::1] session_offsets not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    const int32_t[::1] places not None,
    int32_t[:, ::1] of_nodes not None,
    int32_t[:, ::1] of_calls not None,
    uint8_t[::1] state not None,
    Link[::1] links not None,
):
    """Fill every call's link: its parent is the longest path that is a prefix of its prompt.

    ``places`` are the calls of each session, shortest prompt first; of equals the earlier one
    counts as the first. ``of_nodes`` is 4 by the nodes of the forest, ``of_calls`` 2 by
    n_calls, ``state`` has an entry a call. A call in no chain has no order.
    """
    cdef:
        int64_t n_calls = calls.shape[0], n_sessions = session_offsets.shape[0] - 1, s, i, bad

    _check_sessions(session_offsets, n_calls)
    for name, n in (
        ("ends", ends.shape[0]), ("places", places.shape[0]), ("state", state.shape[0]),
        ("links", links.shape[0]), ("of_calls", of_calls.shape[1]),
    ):
        _check_length(name, n, n_calls)
    _check_length("of_nodes", of_nodes.shape[0], 4)
    _check_length("of_nodes", of_nodes.shape[1], nodes.shape[0])
    _check_length("of_calls", of_calls.shape[0], 2)
    if n_calls == 0:
        return
    _check_forest(nodes, ends)
    bad = _first_bad_place(places[:n_calls], session_offsets, calls, of_calls[0])
    if bad >= 0:
        raise LayoutError(
            f"places[{bad}] = {places[bad]}: expected each call of the session once, the "
            "shortest prompt first"
        )
    with nogil:
        for i in range(nodes.shape[0]):
            of_nodes[0, i] = nodes[i].parent
            of_nodes[1, i] = of_nodes[3, i] = -1
            of_nodes[2, i] = 0
        for s in range(n_sessions):
            _route_session_by_prefix(
                &calls[0], &nodes[0], &ends[0], &places[0], <int32_t>session_offsets[s],
                <int32_t>session_offsets[s + 1], &of_nodes[0, 0], &of_nodes[1, 0],
                &of_nodes[2, 0], &of_nodes[3, 0], &of_calls[0, 0], &of_calls[1, 0], &state[0],
                &links[0],
            )

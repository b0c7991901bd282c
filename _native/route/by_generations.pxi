"""Which generation a call continues: a forest of generations, by messages, checked by tokens.

Fills links from requests and the forest of token paths, in the same order of growth as
route.pxi. A call attaches to the deepest generation, the latest of equals, whose messages and
reply are the first messages of its request; without one it is a root. Then its tokens are
compared: it is refused if they lack more of the generation's path than may be trimmed, or if
that generation was stopped for its length. A refused call is no generation. A leaf with a later
sibling is a retry, and dropped (policy ``miles``).

The message tree is that of route.pxi, with one node for equal replies; a node's ``call`` is the
latest generation that ends there. Refused calls leave their messages in it, which match no
call.
"""


cdef struct Generations:      # scratch, one entry per call
    int32_t* depths           # generations from the root on, 0: no generation
    int32_t* heads            # per depth: the last call of that depth
    int32_t* nexts            # the next call of the same depth
    int32_t* last_child       # the last generation that continues it, or -1


cdef int32_t _generation_at(const Tree* tree, int32_t node) noexcept nogil:
    """The latest generation that ends at the node or nearest above it, or -1."""
    while node >= 0 and tree.nodes[node].call < 0:
        node = tree.nodes[node].parent
    return -1 if node < 0 else tree.nodes[node].call


cdef int32_t _reply_node(Tree* tree, int32_t node, const Request* request) noexcept nogil:
    """The node of the call's reply below the node of its last message."""
    cdef int32_t reply
    if request.reply_key == 0:
        return _hang(tree, node, 0, -1, True)
    reply = _find(tree, node, request.reply_key)
    if reply < 0:
        reply = _hang(tree, node, request.reply_key, -1, True)
        _remember(tree, reply)
    return reply


cdef int32_t _refusal_reason(
    const Paths* paths, int32_t parent, int32_t index, int64_t threshold
) noexcept nogil:
    """REASON_REFUSED_*, or -1 if the call may continue its parent."""
    cdef const Call* calls = paths.calls
    cdef pos_t shared, drift
    if calls[parent].stop == STOP_LENGTH:
        return REASON_REFUSED_TRUNCATED
    shared = _shared_of(paths, parent, index)
    drift = _held_len(&calls[parent]) - shared
    if drift > 0 and (shared < calls[parent].prompt_len or drift >= threshold):
        return REASON_REFUSED_TOKENS
    return -1


cdef void _rank_generations(
    const Generations* generations, Link* links, int32_t lo, int32_t hi
) noexcept nogil:
    """Drop retries and rank the rest: chains by depth, then the latest first."""
    cdef const int32_t* depths = generations.depths
    cdef int32_t* heads = generations.heads
    cdef int32_t* last_child = generations.last_child
    cdef int32_t i, k, deepest = 0, rank = 0, count
    for i in range(lo, hi):
        last_child[i] = -1
        heads[i] = -1
    for i in range(lo, hi):
        if depths[i] and links[i].parent >= 0:
            last_child[links[i].parent] = i
    for i in range(lo, hi):
        if depths[i] == 0 or last_child[i] >= 0:
            continue
        if links[i].parent >= 0 and last_child[links[i].parent] != i:
            links[i].link_reason = REASON_RETRIED
            continue
        # a depth is at most the number of calls: bucket d is at lo + d - 1
        check_write("heads", depths[i] - 1, 1, hi - lo)
        generations.nexts[i] = heads[lo + depths[i] - 1]
        heads[lo + depths[i] - 1] = i
        deepest = max(deepest, depths[i])
    for k in range(lo + deepest - 1, lo - 1, -1):
        i = heads[k]
        while i >= 0:
            count = _unranked_above(links, i)
            _rank_up(links, i, rank + count - 1)
            rank += count
            i = generations.nexts[i]


cdef int32_t _unranked_above(const Link* links, int32_t call) noexcept nogil:
    cdef int32_t n = 0
    while call >= 0 and links[call].order < 0:
        n += 1
        call = links[call].parent
    return n


cdef void _rank_up(Link* links, int32_t call, int32_t rank) noexcept nogil:
    """Give the ranks ``rank, rank - 1, ...`` from the call upwards to all without a rank."""
    while call >= 0 and links[call].order < 0:
        links[call].order = rank
        rank -= 1
        call = links[call].parent


cdef void _route_session_by_generations(
    Router* router, Generations* generations, int32_t lo, int32_t hi, int64_t threshold
) noexcept nogil:
    """The links of one session; its tree is empty."""
    cdef const Request* request
    cdef Tree* tree = &router.tree
    cdef Link* link
    cdef int32_t i, node, parent, refusal, before = -1
    for i in range(lo, hi):
        request = &router.requests[i]
        link = &router.links[i]
        if request.n_keys < 0:
            parent = _nearest_of_tokens(router, lo, i)
            link.link_reason = REASON_TOKENS
            node = tree.places[parent] if parent >= 0 else 0
            tree.places[i] = _hang(tree, node, 0, -1, True)
        elif request.shared + request.n_keys == 0:
            link.link_reason = REASON_UNROUTED
            continue
        else:
            node = _route_call(
                tree, router.paths.calls, router.requests, router.links, i, before, 0
            )
            parent = _generation_at(tree, node)
            link.link_reason = REASON_MESSAGES
            tree.places[i] = _reply_node(tree, node, request)
            before = i
        link.parent = parent
        if parent < 0:
            link.link_reason = REASON_ROOT
        else:
            refusal = _refusal_reason(router.paths, parent, i, threshold)
            if refusal >= 0:
                link.link_reason = refusal
                continue
        router.accepted[i] = i
        _open_reply(router.paths, router.index.replies, i)
        generations.depths[i] = 1 if parent < 0 else generations.depths[parent] + 1
        tree.nodes[tree.places[i]].call = i
    _rank_generations(generations, router.links, lo, hi)


def route_generations(
    CallForest forest not None,
    const Request[::1] requests not None,
    int64_t threshold,
    Link[::1] links not None,
):
    """Fill every call's link: the generation that it continues, or that refuses it.

    A call is refused if ``threshold`` tokens or more of its parent's path are not in its
    prompt. Tokens decide which generation a call without a list of messages continues, see
    `_nearest_of_tokens`. Calls in no chain have no order.
    """
    cdef int64_t i, s
    cdef Paths paths
    cdef Router router
    cdef Generations generations

    _check_requests(forest, requests, links)
    if forest.n_calls == 0:
        return
    cdef int32_t[:, ::1] of_calls = empty((5, forest.n_calls), "i4")
    memory = _begin_router(&router, &paths, forest, requests, links)
    router.accepted = &of_calls[0, 0]
    generations.depths, generations.heads = &of_calls[1, 0], &of_calls[2, 0]
    generations.nexts, generations.last_child = &of_calls[3, 0], &of_calls[4, 0]
    with nogil:
        for i in range(paths.n_calls):
            router.accepted[i] = -1
            generations.depths[i] = 0
        for s in range(paths.n_sessions):
            _begin_tree(
                &router.tree, requests, paths.session_offsets[s], paths.session_offsets[s + 1]
            )
            _route_session_by_generations(
                &router, &generations, <int32_t>paths.session_offsets[s],
                <int32_t>paths.session_offsets[s + 1], threshold,
            )

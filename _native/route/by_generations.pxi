"""Which generation a call goes on from: a forest of generations, by messages, checked by tokens.

A call attaches to the deepest generation, the latest of equals, whose messages and reply are
the first messages of its request; where there is none it is a root. Then its tokens are
compared: it is refused where they lack more of what the generation held than may be trimmed,
and where that generation was stopped for its length. A refused call is no generation. A leaf
with a later sibling is a retry, and dropped (spec: miles 1.2, 1.5).

The message tree is that of route.pxi, with one node for equal replies; a node's ``call`` is
the latest generation that ends there. Refused calls leave their messages in it, which match
no one.
"""


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


cdef int32_t _why_refused(
    const Call* calls, const Node* nodes, const int32_t* ends, int32_t parent, int32_t index,
    int64_t threshold,
) noexcept nogil:
    """WHY_REFUSED_*, or -1 where the call may go on from its parent."""
    cdef pos_t shared, drift
    if calls[parent].length_stop:
        return WHY_REFUSED_TRUNCATED
    shared = _shared_by(calls, nodes, ends, parent, index)
    drift = _held_len(&calls[parent]) - shared
    if drift > 0 and (shared < calls[parent].prompt_len or drift >= threshold):
        return WHY_REFUSED_TOKENS
    return -1


cdef void _rank_generations(
    int32_t lo, int32_t hi, const int32_t* depths, int32_t* heads, int32_t* nexts,
    int32_t* last_child, Link* links,
) noexcept nogil:
    """Drop retries and rank the rest: chains by depth, then the latest first.

    ``depths`` counts the generations from the root, 0 for a call that is none.
    """
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
            links[i].why = WHY_RETRIED
            continue
        # a depth is at most the number of calls: bucket d stands at lo + d - 1
        check_write("heads", depths[i] - 1, 1, hi - lo)
        nexts[i] = heads[lo + depths[i] - 1]
        heads[lo + depths[i] - 1] = i
        deepest = max(deepest, depths[i])
    for k in range(lo + deepest - 1, lo - 1, -1):
        i = heads[k]
        while i >= 0:
            count = _unranked_above(links, i)
            _rank_up(links, i, rank + count - 1)
            rank += count
            i = nexts[i]


cdef int32_t _unranked_above(const Link* links, int32_t call) noexcept nogil:
    cdef int32_t n = 0
    while call >= 0 and links[call].order < 0:
        n += 1
        call = links[call].parent
    return n


cdef void _rank_up(Link* links, int32_t call, int32_t rank) noexcept nogil:
    """Give the ranks ``rank, rank - 1, ...`` from the call upwards to all that have none."""
    while call >= 0 and links[call].order < 0:
        links[call].order = rank
        rank -= 1
        call = links[call].parent


def route_generations(
    const Call[::1] calls not None,
    const Request[::1] requests not None,
    const int64_t[::1] session_offsets not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    int64_t threshold,
    Message[::1] tree_nodes not None,
    int32_t[::1] table not None,
    int32_t[:, ::1] of_nodes not None,
    int32_t[:, ::1] of_calls not None,
    Link[::1] links not None,
):
    """Fill every call's link: the generation that it goes on from, or that refuses it.

    A call is refused where ``threshold`` tokens or more of what was held are not in its
    prompt. Tokens tell which generation a call without a list of messages continues, see
    `_nearest_of_tokens`. ``tree_nodes`` and ``table`` are of `tree_size`, ``of_nodes``
    is 5 by the nodes of the forest, ``of_calls`` 7 by n_calls. Calls in no chain have no
    order.
    """
    cdef:
        int64_t n_calls = calls.shape[0], n_sessions = session_offsets.shape[0] - 1
        int64_t s, i, n_table, bad
        int32_t before, node, call, parent, why
        int32_t* up
        int32_t* ended
        int32_t* replies
        int32_t* reply_up
        int32_t* last
        int32_t* next_ended
        int32_t* depths
        int32_t* accepted
        Tree tree

    _check_sessions(session_offsets, n_calls)
    for name, n in (
        ("requests", requests.shape[0]), ("ends", ends.shape[0]), ("links", links.shape[0]),
        ("of_calls", of_calls.shape[1]),
    ):
        _check_length(name, n, n_calls)
    _check_length("of_calls", of_calls.shape[0], 7)
    _check_length("of_nodes", of_nodes.shape[0], 5)
    _check_length("of_nodes", of_nodes.shape[1], nodes.shape[0])
    most, wanted = tree_size(requests, session_offsets)
    _check_length("tree_nodes", tree_nodes.shape[0], most)
    _check_length("table", table.shape[0], wanted)
    bad = _first_bad_request(calls, requests)
    if bad >= 0:
        raise LayoutError(
            f"requests[{bad}] is no list of messages: {requests[bad].n_keys} of its own "
            f"after {requests[bad].shared} of call {calls[bad].base}"
        )
    if n_calls == 0:
        return
    _check_forest(nodes, ends)
    tree.nodes = &tree_nodes[0]
    tree.node_room = tree_nodes.shape[0]
    tree.table = &table[0]
    tree.places = &of_calls[0, 0]
    next_ended = &of_calls[1, 0]
    depths = &of_calls[2, 0]
    accepted = &of_calls[3, 0]
    up = &of_nodes[0, 0]
    ended = &of_nodes[1, 0]
    replies = &of_nodes[2, 0]
    reply_up = &of_nodes[3, 0]
    last = &of_nodes[4, 0]
    with nogil:
        for i in range(nodes.shape[0]):
            ended[i] = -1
            up[i] = nodes[i].parent
        _expect_replies(calls, nodes, ends, replies, reply_up, last)
        for i in range(n_calls):
            links[i].order = links[i].rewritten_by = links[i].parent = -1
            tree.places[i] = accepted[i] = -1
            depths[i] = 0
            next_ended[i] = ended[ends[i]]
            ended[ends[i]] = <int32_t>i
        for s in range(n_sessions):
            n_table = _table_entries(
                _tree_nodes(requests, session_offsets[s], session_offsets[s + 1])
            )
            memset(tree.table, 0xFF, n_table * sizeof(int32_t))
            tree.mask = n_table - 1
            tree.n_nodes = 0
            _hang(&tree, -1, 0, -1, False)
            before = -1
            for i in range(session_offsets[s], session_offsets[s + 1]):
                call = <int32_t>i
                if requests[i].n_keys < 0:
                    parent = _nearest_of_tokens(
                        &calls[0], &nodes[0], &ends[0], up, ended, next_ended, replies,
                        reply_up, last, &links[0], accepted, <int32_t>session_offsets[s],
                        call,
                    )
                    why = WHY_TOKENS
                    node = tree.places[parent] if parent >= 0 else 0
                    tree.places[i] = _hang(&tree, node, 0, -1, True)
                elif requests[i].shared + requests[i].n_keys == 0:
                    links[i].why = WHY_UNROUTED
                    continue
                else:
                    node = _route_call(
                        &tree, &calls[0], &requests[0], &links[0], call, before, 0
                    )
                    parent = _generation_at(&tree, node)
                    why = WHY_MESSAGES
                    tree.places[i] = _reply_node(&tree, node, &requests[i])
                    before = call
                links[i].parent = parent
                links[i].why = why if parent >= 0 else WHY_ROOT
                if parent >= 0:
                    why = _why_refused(
                        &calls[0], &nodes[0], &ends[0], parent, call, threshold
                    )
                    if why >= 0:
                        links[i].why = why
                        continue
                accepted[i] = call
                _open_reply(&calls[0], &nodes[0], &ends[0], replies, call)
                depths[i] = 1 if parent < 0 else depths[parent] + 1
                tree.nodes[tree.places[i]].call = call
            _rank_generations(
                <int32_t>session_offsets[s], <int32_t>session_offsets[s + 1], depths,
                &of_calls[4, 0], &of_calls[5, 0], &of_calls[6, 0], &links[0],
            )

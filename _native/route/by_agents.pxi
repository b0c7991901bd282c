"""Which agent a call belongs to: one main chain, and at most one chain of a sub-agent.

The lists of messages are paths of a message tree without replies, so a list continues
another one where its node stands below the other's. A chain that goes on with other messages
is frozen: its calls so far are a segment. Segments are ranked in the order of freezing.
"""

cdef enum:  # in the order of trajkit.schema.SEGMENT_KINDS, from 1 on; 0: no segment
    SEGMENT_NONE, SEGMENT_WIPE, SEGMENT_SUBAGENT, SEGMENT_FINAL


cdef struct Agents:
    const Call* calls
    const Node* nodes
    const int32_t* ends
    const int64_t* answer_offsets
    const int32_t* answers
    int32_t* searched         # per node of the message tree: the search that came by last
    int32_t n_searches        # one more with each tool call that is watched
    int32_t rank              # calls frozen so far


cdef inline int64_t _class_at(int64_t key) noexcept nogil:
    cdef int64_t message
    memcpy(&message, <const void*><intptr_t>key, sizeof(message))
    return message


cdef bint _continues(
    const Agents* agents, const Tree* tree, int32_t last, int32_t index
) noexcept nogil:
    """Whether the call goes on where a chain's last call stood.

    By messages where both have them. Else its prompt begins with all tokens of that call, or
    with its prompt and is longer.
    """
    cdef const Call* before = &agents.calls[last]
    cdef int32_t node = tree.places[index], seen = tree.places[last]
    cdef pos_t shared
    if node >= 0 and seen >= 0:
        if tree.nodes[node].depth < tree.nodes[seen].depth:
            return False
        return _at_depth(tree, node, tree.nodes[seen].depth) == seen
    shared = _shared_by(agents.calls, agents.nodes, agents.ends, last, index)
    if shared == _held_len(before):
        return True
    return 0 < before.prompt_len <= shared and before.prompt_len < agents.calls[index].prompt_len


cdef bint _answered(Agents* agents, const Tree* tree, int32_t node, int32_t watched) noexcept nogil:
    """Whether a message at or above the node answers the tool call.

    Nodes that an earlier search for the same call came by are not looked at again.
    """
    cdef int64_t message, k
    while node > 0 and agents.searched[node] != agents.n_searches:
        agents.searched[node] = agents.n_searches
        message = _class_at(tree.nodes[node].key)
        for k in range(agents.answer_offsets[message], agents.answer_offsets[message + 1]):
            if agents.answers[k] == watched:
                return True
        node = tree.nodes[node].parent
    return False


cdef void _freeze(Agents* agents, Link* links, int32_t last, int32_t kind) noexcept nogil:
    """Make the calls of a chain, from its last one upwards, a segment."""
    cdef int32_t call = last, rank
    while call >= 0:
        agents.rank += 1
        call = links[call].parent
    rank = agents.rank
    call = last
    while call >= 0:
        rank -= 1
        links[call].order = rank
        links[call].segment = kind
        call = links[call].parent


cdef void _route_agents(
    Agents* agents, Tree* tree, const Request* requests, const int32_t* dispatches,
    Link* links, int32_t lo, int32_t hi,
) noexcept nogil:
    """The links of one session (spec: segments 2, 3 and 7)."""
    cdef int32_t i, node, before = -1, main = -1, sub = -1, watched = -1
    cdef bint armed = False, to_main
    cdef int32_t* chain
    agents.rank = 0
    for i in range(lo, hi):
        node = tree.places[i] = -1
        if requests[i].n_keys >= 0:
            if requests[i].shared + requests[i].n_keys == 0:
                links[i].why = WHY_UNROUTED
                continue
            node = _route_call(tree, agents.calls, requests, links, i, before, 0)
            tree.places[i] = node
            before = i
            if armed and _answered(agents, tree, node, watched):
                if sub >= 0:
                    _freeze(agents, links, sub, SEGMENT_SUBAGENT)
                sub = -1
                armed = False
        to_main = not armed or (main >= 0 and _continues(agents, tree, main, i))
        chain = &main if to_main else &sub
        if chain[0] < 0:
            links[i].why = WHY_ROOT
        elif _continues(agents, tree, chain[0], i):
            links[i].parent = chain[0]
            if node < 0 or tree.places[chain[0]] < 0:
                links[i].why = WHY_TOKENS
            else:
                links[i].why = WHY_MESSAGES
        else:
            _freeze(agents, links, chain[0], SEGMENT_WIPE)
            links[i].why = WHY_WIPE
        chain[0] = i
        if to_main and dispatches[i] >= 0:
            watched = dispatches[i]
            agents.n_searches += 1
            armed = True
    if sub >= 0:
        _freeze(agents, links, sub, SEGMENT_SUBAGENT)
    if main >= 0:
        _freeze(agents, links, main, SEGMENT_FINAL)


cdef int64_t _first_bad_class(const Request[::1] requests, int64_t n_classes) noexcept nogil:
    """Index of the first call with a key that says no class, or -1."""
    cdef int64_t i, k, message
    for i in range(requests.shape[0]):
        for k in range(requests[i].n_keys):
            message = _class_at(requests[i].keys + KEY_BYTES * k)
            if message < 0 or message >= n_classes:
                return i
        if requests[i].reply_key != 0:
            message = _class_at(requests[i].reply_key)
            if message < 0 or message >= n_classes:
                return i
    return -1


def route_agents(
    const Call[::1] calls not None,
    const Request[::1] requests not None,
    const int64_t[::1] session_offsets not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    const int32_t[::1] dispatches not None,
    const int64_t[::1] answer_offsets not None,
    const int32_t[::1] answers not None,
    Message[::1] tree_nodes not None,
    int32_t[::1] table not None,
    int32_t[::1] places not None,
    int32_t[::1] searched not None,
    Link[::1] links not None,
):
    """Fill ``parent``, ``order``, ``rewritten_by``, ``why`` and ``segment`` of every link.

    The first 8 bytes of a message's key say its class; ``answers[offsets[c]:offsets[c + 1]]``
    are the tool calls that a message of class c answers. ``dispatches`` is, per call, the
    tool call by which its reply sends out a sub-agent, or -1. ``tree_nodes`` and ``table`` are
    of `tree_size`, ``searched`` has an entry a node of that tree, ``places`` one a call.
    """
    cdef:
        int64_t n_calls = calls.shape[0], s, i, n_table, bad, n_classes
        Tree tree
        Agents agents

    _check_sessions(session_offsets, n_calls)
    for name, n in (
        ("requests", requests.shape[0]), ("ends", ends.shape[0]), ("links", links.shape[0]),
        ("places", places.shape[0]), ("dispatches", dispatches.shape[0]),
    ):
        _check_length(name, n, n_calls)
    most, wanted = tree_size(requests, session_offsets)
    _check_length("tree_nodes", tree_nodes.shape[0], most)
    _check_length("searched", searched.shape[0], most)
    _check_length("table", table.shape[0], wanted)
    _check_length("answer_offsets", answer_offsets.shape[0], 1)
    n_classes = answer_offsets.shape[0] - 1
    if answer_offsets[n_classes] != answers.shape[0]:
        raise LayoutError(
            f"answer_offsets ends at {answer_offsets[n_classes]}: {answers.shape[0]} is due"
        )
    bad = _first_bad_request(calls, requests)
    if bad >= 0:
        raise LayoutError(
            f"requests[{bad}] is no list of messages: {requests[bad].n_keys} of its own "
            f"after {requests[bad].shared} of call {calls[bad].base}"
        )
    bad = _first_bad_class(requests, n_classes)
    if bad >= 0:
        raise LayoutError(f"requests[{bad}] shows a class that is none of {n_classes}")
    if n_calls == 0:
        return
    _check_forest(nodes, ends)
    tree.nodes = &tree_nodes[0]
    tree.node_room = tree_nodes.shape[0]
    tree.table = &table[0]
    tree.places = &places[0]
    agents.calls = &calls[0]
    agents.nodes = &nodes[0]
    agents.ends = &ends[0]
    agents.answer_offsets = &answer_offsets[0]
    agents.answers = &answers[0] if answers.shape[0] else NULL
    agents.searched = &searched[0]
    agents.n_searches = 0
    with nogil:
        memset(agents.searched, 0, searched.shape[0] * sizeof(int32_t))
        for i in range(n_calls):
            links[i].order = links[i].rewritten_by = links[i].parent = -1
            links[i].segment = SEGMENT_NONE
        for s in range(session_offsets.shape[0] - 1):
            # as large as this session needs: clearing costs what the session holds
            n_table = _table_entries(
                _tree_nodes(requests, session_offsets[s], session_offsets[s + 1])
            )
            memset(tree.table, 0xFF, n_table * sizeof(int32_t))
            tree.mask = n_table - 1
            tree.n_nodes = 0
            _hang(&tree, -1, 0, -1, False)
            _route_agents(
                &agents, &tree, &requests[0], &dispatches[0], &links[0],
                <int32_t>session_offsets[s], <int32_t>session_offsets[s + 1],
            )

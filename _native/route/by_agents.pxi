"""Which agent a call belongs to: one main chain, and at most one chain of a sub-agent.

Fills links and segments from requests, the forest of token paths and the tool calls that
messages answer. Lists of messages are paths of a message tree without replies, so a list
continues another one if its node is below the other's. A chain whose next call has other
messages is frozen: its calls so far are a segment. Segments are ranked in the order of
freezing. O(new messages + depth of each list + nodes of the tree per dispatch).
"""

cdef enum:  # trajkit.schema.SEGMENT_KINDS, from 1 on; 0: no segment
    SEGMENT_NONE, SEGMENT_HISTORY_REPLACED, SEGMENT_SUBAGENT, SEGMENT_FINAL

ENUMS["SegmentKind"] = {
    "none": SEGMENT_NONE, "history_replaced": SEGMENT_HISTORY_REPLACED,
    "subagent": SEGMENT_SUBAGENT, "final": SEGMENT_FINAL,
}


cdef struct Agents:
    const Paths* paths
    const int64_t* answer_offsets
    const int32_t* answers
    int32_t* searched         # per node of the message tree: the last search that visited it
    int32_t n_searches        # one more with each tool call that is watched
    int32_t rank              # calls frozen so far


cdef inline int64_t _class_at(int64_t key) noexcept nogil:
    cdef int64_t message
    memcpy(&message, <const void*><intptr_t>key, sizeof(message))
    return message


cdef bint _continues(
    const Agents* agents, const Tree* tree, int32_t last, int32_t index
) noexcept nogil:
    """Whether the call continues a chain's last call.

    By messages if both have them. Otherwise its prompt begins with that call's path, or with
    that call's prompt and is longer.
    """
    cdef const Call* calls = agents.paths.calls
    cdef const Call* before = &calls[last]
    cdef int32_t node = tree.places[index], seen = tree.places[last]
    cdef pos_t shared
    if node >= 0 and seen >= 0:
        if tree.nodes[node].depth < tree.nodes[seen].depth:
            return False
        return _at_depth(tree, node, tree.nodes[seen].depth) == seen
    shared = _shared_of(agents.paths, last, index)
    if shared == _held_len(before):
        return True
    return 0 < before.prompt_len <= shared and before.prompt_len < calls[index].prompt_len


cdef bint _answered(Agents* agents, const Tree* tree, int32_t node, int32_t watched) noexcept nogil:
    """Whether a message at or above the node answers the tool call.

    Nodes that an earlier search for the same call visited are skipped.
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
    """The links of one session, as policy ``segments`` has them."""
    cdef int32_t i, node, before = -1, main = -1, sub = -1, watched = -1
    cdef bint armed = False, to_main
    cdef int32_t* chain
    agents.rank = 0
    for i in range(lo, hi):
        node = tree.places[i] = -1
        if requests[i].n_keys >= 0:
            if requests[i].shared + requests[i].n_keys == 0:
                links[i].link_reason = REASON_UNROUTED
                continue
            node = _route_call(
                tree, agents.paths.calls, requests, links, i, before, 0
            )
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
            links[i].link_reason = REASON_ROOT
        elif _continues(agents, tree, chain[0], i):
            links[i].parent = chain[0]
            if node < 0 or tree.places[chain[0]] < 0:
                links[i].link_reason = REASON_TOKENS
            else:
                links[i].link_reason = REASON_MESSAGES
        else:
            _freeze(agents, links, chain[0], SEGMENT_HISTORY_REPLACED)
            links[i].link_reason = REASON_HISTORY_REPLACED
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
    """Index of the first call with a key that contains no class, or -1."""
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
    CallForest forest not None,
    const Request[::1] requests not None,
    const int32_t[::1] dispatches not None,
    const int64_t[::1] answer_offsets not None,
    const int32_t[::1] answers not None,
    Link[::1] links not None,
):
    """Fill ``parent``, ``order``, ``rewritten_by``, ``reason`` and ``segment`` of every link.

    The first 8 bytes of a message's key are its class; ``answers[offsets[c]:offsets[c + 1]]``
    are the tool calls that a message of class c answers. ``dispatches`` is, per call, the
    tool call by which its reply starts a sub-agent, or -1.
    """
    cdef int64_t s, i, bad, n_classes
    cdef Paths paths
    cdef Tree tree
    cdef Agents agents

    _check_requests(forest, requests, links)
    _check_length("dispatches", dispatches.shape[0], forest.n_calls)
    _check_length("answer_offsets", answer_offsets.shape[0], 1)
    n_classes = answer_offsets.shape[0] - 1
    if answer_offsets[n_classes] != answers.shape[0]:
        raise LayoutError(
            f"answer_offsets ends at {answer_offsets[n_classes]}: expected {answers.shape[0]}"
        )
    bad = _first_bad_class(requests, n_classes)
    if bad >= 0:
        raise LayoutError(f"requests[{bad}] shows a class outside of 0 to {n_classes - 1}")
    if forest.n_calls == 0:
        return
    paths = _paths(forest)
    memory = _allocate_tree(&tree, forest, requests)
    cdef int32_t[::1] searched = zeros(tree.node_room, "i4")
    agents.paths, agents.searched, agents.n_searches = &paths, &searched[0], 0
    agents.answer_offsets = &answer_offsets[0]
    agents.answers = &answers[0] if answers.shape[0] else NULL
    with nogil:
        for i in range(paths.n_calls):
            links[i].order = links[i].rewritten_by = links[i].parent = -1
            links[i].segment = SEGMENT_NONE
        for s in range(paths.n_sessions):
            _begin_tree(
                &tree, requests, paths.session_offsets[s], paths.session_offsets[s + 1]
            )
            _route_agents(
                &agents, &tree, &requests[0], &dispatches[0], &links[0],
                <int32_t>paths.session_offsets[s], <int32_t>paths.session_offsets[s + 1],
            )

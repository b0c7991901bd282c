"""Which call a call continues: by its chat messages.

Fills links from requests and the forest of token paths. The message tree has one node per
message. A message that is sent again descends into the first child that equals it, so of equal
siblings only the first can be found: a hash table over (parent, key) contains those, and a
list the others, for a rule by which tokens choose among them. Messages that a request shares
with the previous call, or with its base, are not looked up one by one: equal runs of keys are
compared as bytes, and the node is reached by climbing from that call. O(new messages + bytes
of keys compared + nodes of the forest); a call without messages that only a rewritten call
precedes costs O(calls of the session).
"""

cdef enum:  # trajkit.schema.LINK_REASONS
    REASON_ROOT, REASON_MESSAGES, REASON_REWRITE, REASON_TOKENS, REASON_PREVIOUS
    REASON_UNROUTED, REASON_HISTORY_REPLACED, REASON_PROMPTS
    REASON_AMBIGUOUS, REASON_SUPERSEDED, REASON_UNRESOLVED_KEPT, REASON_UNRESOLVED
    REASON_UNRESOLVED_AMBIGUOUS, REASON_CHAIN_QUARANTINED, REASON_EMPTY
    REASON_REFUSED_TOKENS, REASON_REFUSED_TRUNCATED, REASON_RETRIED

cdef enum:  # trajkit.policies.TieBreak
    TIE_BREAK_FIRST, TIE_BREAK_TOKENS, TIE_BREAK_FULL_PATH

ENUMS["LinkReason"] = {
    "root": REASON_ROOT, "messages": REASON_MESSAGES, "rewrite": REASON_REWRITE,
    "tokens": REASON_TOKENS, "previous": REASON_PREVIOUS, "unrouted": REASON_UNROUTED,
    "history_replaced": REASON_HISTORY_REPLACED, "prompts": REASON_PROMPTS,
    "ambiguous": REASON_AMBIGUOUS, "superseded": REASON_SUPERSEDED,
    "unresolved_kept": REASON_UNRESOLVED_KEPT, "unresolved": REASON_UNRESOLVED,
    "unresolved_ambiguous": REASON_UNRESOLVED_AMBIGUOUS,
    "chain_quarantined": REASON_CHAIN_QUARANTINED, "empty": REASON_EMPTY,
    "refused_tokens": REASON_REFUSED_TOKENS, "refused_truncated": REASON_REFUSED_TRUNCATED,
    "retried": REASON_RETRIED,
}
ENUMS["TieBreak"] = {
    "first": TIE_BREAK_FIRST, "tokens": TIE_BREAK_TOKENS, "full_path": TIE_BREAK_FULL_PATH,
}

cdef enum:
    KEY_BYTES = 16
    NOT_YET = 0x7FFFFFFF      # a later call; larger than every call


cdef struct Tree:
    Message* nodes
    int64_t node_room
    int32_t n_nodes           # the next unused node
    int32_t* table            # open addressing; -1: free
    int64_t mask
    int32_t* places           # per call: the node that it generated, or -1


cdef struct TokenIndex:       # which calls a prompt without messages may continue
    int32_t* up               # per node: skip pointer (union-find with path compression)
    int32_t* ended            # per node: the last call whose path ends at its stop, or -1
    int32_t* next_ended       # per call: the call before it that ends at the same node, or -1
    int32_t* replies          # per node: see _open_reply
    int32_t* reply_up         # per node: as up, for replies
    int32_t* last_reply       # per node: the last call that _open_reply may record there


cdef struct Router:           # what routing by messages reads, its scratch, and the links
    const Paths* paths
    const Request* requests
    Tree tree
    TokenIndex index
    int32_t* accepted         # per call: >= 0 if later calls may continue it by tokens
    Link* links


cdef inline int64_t _slot(const Tree* tree, int32_t parent, int64_t key) noexcept nogil:
    cdef uint64_t mixed
    memcpy(&mixed, <const void*><intptr_t>key, sizeof(mixed))
    mixed ^= <uint64_t>parent * <uint64_t>0x9E3779B97F4A7C15
    return <int64_t>(mixed ^ (mixed >> 32)) & tree.mask


cdef int32_t _find(const Tree* tree, int32_t parent, int64_t key) noexcept nogil:
    """The first child of parent with this key, or -1."""
    cdef int64_t slot = _slot(tree, parent, key)
    cdef const Message* node
    while tree.table[slot] >= 0:
        node = &tree.nodes[tree.table[slot]]
        # Compare with the node's current key: a rewritten node keeps its old table entry.
        if node.parent == parent and node.key != 0 and memcmp(
            <const void*><intptr_t>node.key, <const void*><intptr_t>key, KEY_BYTES
        ) == 0:
            return tree.table[slot]
        slot = (slot + 1) & tree.mask
    return -1


cdef void _remember(Tree* tree, int32_t node) noexcept nogil:
    cdef int64_t slot = _slot(tree, tree.nodes[node].parent, tree.nodes[node].key)
    while tree.table[slot] >= 0:
        slot = (slot + 1) & tree.mask
    tree.table[slot] = node


cdef int32_t _hang(
    Tree* tree, int32_t parent, int64_t key, int32_t call, bint assistant
) noexcept nogil:
    """A new last child of parent.

    `_tree_nodes` counts what may be added: a call's own messages, the reply of its base and its
    own reply. The table has twice as many entries as nodes and changed keys, so `_remember`
    and `_find` reach a free one.
    """
    cdef int32_t index = tree.n_nodes
    cdef Message* node = &tree.nodes[index]
    cdef Message* above
    check_write("tree_nodes", index, 1, tree.node_room)
    tree.n_nodes += 1
    node.key = key
    node.parent = parent
    node.call = call
    node.child = node.last_child = node.sibling = node.assistant = node.equal = -1
    node.n_assistants = 0
    if parent < 0:
        node.above = -1
        node.depth = 0
        return index
    above = &tree.nodes[parent]
    node.above = call if call >= 0 else above.above
    node.depth = above.depth + 1
    if above.last_child < 0:
        above.child = index
    else:
        tree.nodes[above.last_child].sibling = index
    above.last_child = index
    if assistant:
        above.n_assistants += 1
        above.assistant = index
    return index


cdef inline bint _is_assistant(const Request* request, int64_t own) noexcept nogil:
    """Whether the role of the call's own message number ``own`` is assistant."""
    cdef const int32_t* offsets = <const int32_t*><intptr_t>request.role_offsets
    if offsets[own + 1] - offsets[own] != 9:
        return False
    return memcmp(
        <const char*><intptr_t>request.role_bytes + offsets[own], b"assistant", 9
    ) == 0


cdef int32_t _at_depth(const Tree* tree, int32_t node, int64_t depth) noexcept nogil:
    while tree.nodes[node].depth > depth:
        node = tree.nodes[node].parent
    return node


cdef int64_t _repeated(const Request* request, const Request* before) noexcept nogil:
    """Messages that two calls, neither with a base, have in common at their start."""
    cdef int64_t n = min(request.n_keys, before.n_keys)
    if n <= 0:
        return 0
    # A key is four tokens long.
    return _lcp(
        <const token_t*><intptr_t>request.keys, <const token_t*><intptr_t>before.keys, 4 * n
    ) // 4


cdef int32_t _route_call(
    Tree* tree, const Call* calls, const Request* requests, Link* links, int32_t index,
    int32_t before, int64_t merge_threshold,
) noexcept nogil:
    """Add the messages of a call's prompt, if it has any; return the node of the last one.

    ``before`` is the previous call with messages, or -1.
    """
    cdef:
        const Request* request = &requests[index]
        const Request* other
        int64_t total = request.shared + request.n_keys, depth = 0, n
        int64_t of_base = 0, reply = 0
        int32_t node = 0, child, call, base = calls[index].base
        int64_t key = 0
        bint merged = False, assistant

    if request.shared > 0:
        other = &requests[base]
        of_base = other.shared + other.n_keys
        depth = min(<int64_t>request.shared, of_base)
        if depth > 0:
            node = _at_depth(tree, tree.places[base], depth)
        if request.shared > of_base:
            reply = other.reply_key
    elif before >= 0 and requests[before].shared == 0:
        depth = _repeated(request, &requests[before])
        if depth > 0:
            node = _at_depth(tree, tree.places[before], depth)

    while depth < total:
        key = reply if depth < request.shared else (
            request.keys + KEY_BYTES * (depth - request.shared)
        )
        child = _find(tree, node, key)
        if child < 0:
            break
        node = child
        depth += 1

    # As slime's TrajectoryManager does: a changed reply replaces a short one.
    if depth < total and merge_threshold > 0 and tree.nodes[node].n_assistants == 1:
        assistant = (
            requests[base].reply_is_assistant != 0 if depth < request.shared
            else _is_assistant(request, depth - request.shared)
        )
        child = tree.nodes[node].assistant
        call = tree.nodes[child].call
        if (
            assistant and call >= 0 and tree.nodes[child].child < 0
            and calls[call].out_len < merge_threshold
        ):
            links[call].rewritten_by = index
            tree.nodes[child].call = -1
            tree.nodes[child].above = tree.nodes[node].above
            tree.nodes[child].key = key
            _remember(tree, child)
            node = child
            depth += 1
            merged = True

    while depth < total:
        if depth < request.shared:
            node = _hang(tree, node, reply, -1, requests[base].reply_is_assistant != 0)
        else:
            n = depth - request.shared
            node = _hang(
                tree, node, request.keys + KEY_BYTES * n, -1, _is_assistant(request, n)
            )
        _remember(tree, node)
        depth += 1
    links[index].link_reason = REASON_REWRITE if merged else REASON_MESSAGES
    return node


cdef void _rank(const Tree* tree, Link* links) noexcept nogil:
    """Rank the calls of the tree in depth-first pre-order, children in order of arrival."""
    cdef int32_t node = 0, rank = 0
    while True:
        if tree.nodes[node].call >= 0:
            links[tree.nodes[node].call].order = rank
            rank += 1
        if tree.nodes[node].child >= 0:
            node = tree.nodes[node].child
            continue
        while node > 0 and tree.nodes[node].sibling < 0:
            node = tree.nodes[node].parent
        if node == 0:
            return
        node = tree.nodes[node].sibling


cdef inline pos_t _shared_of(const Paths* paths, int32_t call, int32_t other) noexcept nogil:
    """Tokens that the path of a call and the prompt of another share."""
    return _shared_by(paths.calls, paths.nodes, paths.ends, call, other)


cdef int32_t _nearest_by_tokens(
    const Tree* tree, const Paths* paths, int32_t node, int32_t index, bint full_path
) noexcept nogil:
    """Of the nearest call above and its equal siblings, the one that the prompt continues; or -1.

    That is the one whose path the prompt repeats for longest; of equals, the one with the
    shortest path (so one that it repeats entirely), then the first. With ``full_path``, it is
    the last of those whose path the prompt repeats entirely.
    """
    cdef int32_t other, call, best
    cdef pos_t shared, most, size, least = 0
    cdef bint better
    while node > 0:
        best = -1
        most = -1
        other = node
        while other >= 0:
            call = tree.nodes[other].call
            if call >= 0:
                shared = _shared_of(paths, call, index)
                size = _held_len(&paths.calls[call])
                if full_path:
                    better = shared == size and call > best
                else:
                    better = shared > most or shared == most and (
                        size < least or size == least and call < best
                    )
                if better:
                    most = shared
                    least = size
                    best = call
            other = tree.nodes[other].equal
        if best >= 0:
            return best
        node = tree.nodes[node].parent
    return -1


cdef int32_t _next_alive(int32_t* up, const int32_t* alive, int32_t node) noexcept nogil:
    """The nearest node at or above with ``alive[node] >= 0``, or -1; shortens the path there.

    ``up`` starts as the parents. A dead node stays dead, so the paths over dead nodes can
    be compressed.
    """
    cdef int32_t above
    while node >= 0 and alive[node] < 0:
        above = up[node]
        if above >= 0 and alive[above] < 0:
            up[node] = up[above]
        node = up[node]
    return node


cdef int32_t _longest_path(Router* router, int32_t call) noexcept nogil:
    """The earlier accepted call whose path is the longest prefix of the prompt, or -1.

    A node whose calls have all come and are not accepted is not visited again.
    """
    cdef const Call* calls = router.paths.calls
    cdef const Node* nodes = router.paths.nodes
    cdef TokenIndex* index = &router.index
    cdef int32_t node = router.paths.ends[call], other, oldest
    cdef bint more
    while nodes[node].stop > calls[call].prompt_len:
        node = nodes[node].parent
    node = _next_alive(index.up, index.ended, node)
    while node >= 0:
        oldest = -1
        more = False
        other = index.ended[node]
        while other >= 0:
            if other >= call:
                more = True
            elif router.accepted[other] >= 0 and router.links[other].rewritten_by < 0:
                if oldest < 0 or other < oldest:
                    oldest = other
            other = index.next_ended[other]
        if oldest >= 0:
            return oldest
        if not more:
            index.ended[node] = -1
        node = _next_alive(index.up, index.ended, index.up[node])
    return -1


cdef void _open_reply(const Paths* paths, int32_t* replies, int32_t call) noexcept nogil:
    """Index the call at every node from its prompt's end to its output's end.

    Of several calls, a node keeps the one with the shortest prompt, the first of equals.
    """
    cdef const Call* calls = paths.calls
    cdef const Node* nodes = paths.nodes
    cdef int32_t node = paths.ends[call], other
    if calls[call].prompt_len == 0:  # every prompt begins with it
        return
    while nodes[node].parent >= 0 and nodes[node].stop >= calls[call].prompt_len:
        other = replies[node]
        if 0 <= other < NOT_YET and calls[other].prompt_len <= calls[call].prompt_len:
            return  # the nodes above have that call, too, or a better one
        replies[node] = call
        node = nodes[node].parent


cdef void _begin_index(const Paths* paths, TokenIndex* index) noexcept nogil:
    """Fill the index; ``replies`` becomes NOT_YET if `_open_reply` may record a call, else -1.

    Calls are visited from the last one on: a node belongs to the last call that may be
    recorded there, and the calls before skip it.
    """
    cdef const Node* nodes = paths.nodes
    cdef int64_t i
    cdef int32_t node
    for i in range(paths.n_nodes):
        index.ended[i] = -1
        index.replies[i] = 0
        index.up[i] = index.reply_up[i] = nodes[i].parent
    for i in range(paths.n_calls):
        index.next_ended[i] = index.ended[paths.ends[i]]
        index.ended[paths.ends[i]] = <int32_t>i
    for i in range(paths.n_calls - 1, -1, -1):
        if paths.calls[i].prompt_len == 0:
            continue
        node = _next_alive(index.reply_up, index.replies, paths.ends[i])
        while nodes[node].parent >= 0 and nodes[node].stop >= paths.calls[i].prompt_len:
            index.replies[node] = -1
            index.last_reply[node] = <int32_t>i
            node = _next_alive(index.reply_up, index.replies, node)
    for i in range(paths.n_nodes):
        index.replies[i] = NOT_YET if index.replies[i] < 0 else -1
        index.reply_up[i] = nodes[i].parent


cdef int32_t _longest_repeated(Router* router, int32_t first, int32_t index) noexcept nogil:
    """What `_nearest_of_tokens` looks for in ``replies``, found call by call."""
    cdef const Call* calls = router.paths.calls
    cdef int32_t call, best = -1
    cdef pos_t shared, longest = 0
    for call in range(first, index):
        if router.accepted[call] < 0 or router.links[call].rewritten_by >= 0:
            continue
        if not 0 < calls[call].prompt_len < calls[index].prompt_len:
            continue
        shared = _shared_of(router.paths, call, index)
        if shared < calls[call].prompt_len or shared < longest:
            continue
        if shared > longest or calls[call].prompt_len < calls[best].prompt_len:
            best = call
            longest = shared
    return best


cdef int32_t _nearest_of_tokens(Router* router, int32_t first, int32_t index) noexcept nogil:
    """The earlier accepted call that a call without messages continues, or -1.

    Its prompt begins with that call's prompt and is longer, or with that call's path. Of
    several, it is the call whose path the prompt repeats for longest; of equals, one that it
    repeats entirely, or else the first with the shortest prompt. ``first`` is the session's
    first call.
    """
    cdef const Call* calls = router.paths.calls
    cdef const Node* nodes = router.paths.nodes
    cdef int32_t* replies = router.index.replies
    cdef int32_t* up = router.index.reply_up
    cdef int32_t node = router.paths.ends[index], call
    cdef int32_t complete = _longest_path(router, index)
    cdef pos_t covered = _held_len(&calls[complete]) if complete >= 0 else 0
    while nodes[node].start >= calls[index].prompt_len:
        node = nodes[node].parent
    node = _next_alive(up, replies, node)
    while node >= 0 and min(nodes[node].stop, calls[index].prompt_len) > covered:
        call = replies[node]
        if call < NOT_YET and calls[call].prompt_len < calls[index].prompt_len:
            if router.links[call].rewritten_by < 0:
                return call
            call = _longest_repeated(router, first, index)
            if call >= 0 and _shared_of(router.paths, call, index) > covered:
                return call
            return complete
        if call == NOT_YET and router.index.last_reply[node] < index:
            replies[node] = -1
        node = _next_alive(up, replies, up[node])
    return complete


cdef int64_t _first_bad_request(
    const Call[::1] calls, const Request[::1] requests
) noexcept nogil:
    """Index of the first call whose messages do not describe a list, or -1."""
    cdef int64_t i, most
    cdef const Request* other
    for i in range(calls.shape[0]):
        if requests[i].shared < 0 or requests[i].n_keys < -1:
            return i
        if requests[i].shared > 0:
            if requests[i].n_keys < 0 or calls[i].base < 0 or calls[i].base >= i:
                return i
            other = &requests[calls[i].base]
            most = 0 if other.n_keys < 0 else other.shared + other.n_keys
            most += other.reply_key != 0
            if requests[i].shared > most or (other.n_keys < 0):
                return i
    return -1


cdef int64_t _tree_nodes(const Request[::1] requests, int64_t start, int64_t stop) noexcept nogil:
    """Nodes that the message tree of the calls start:stop may need."""
    cdef int64_t i, n = 1, before = -1
    for i in range(start, stop):
        n += 2  # the base's reply and the call's own
        if requests[i].n_keys < 0 or requests[i].shared + requests[i].n_keys == 0:
            continue
        n += requests[i].n_keys
        if requests[i].shared == 0 and before >= 0 and requests[before].shared == 0:
            n -= _repeated(&requests[i], &requests[before])
        before = i
    return n


cdef int64_t _table_entries(int64_t n_nodes) noexcept nogil:
    """Entries for each node and one for each changed key; the table is at most half full."""
    cdef int64_t n_table = 2
    while n_table < 4 * n_nodes:
        n_table *= 2
    return n_table


cdef list _allocate_tree(
    Tree* tree, CallForest forest, const Request[::1] requests
):
    """Set up a tree with room for the largest session; the result owns its memory."""
    cdef int64_t s, largest = 1
    for s in range(forest.n_sessions):
        largest = max(
            largest,
            _tree_nodes(requests, forest.session_offsets[s], forest.session_offsets[s + 1]),
        )
    cdef uint8_t[::1] nodes = empty(largest * sizeof(Message), "u1")
    cdef int32_t[::1] table = empty(_table_entries(largest), "i4")
    cdef int32_t[::1] places = full(forest.n_calls, -1, "i4")
    tree.nodes, tree.node_room = <Message*>&nodes[0], largest
    tree.table, tree.places = &table[0], &places[0]
    return [nodes, table, places]


cdef void _begin_tree(
    Tree* tree, const Request[::1] requests, int64_t lo, int64_t hi
) noexcept nogil:
    """Empty the tree but for its root; the cleared table is as large as the session needs."""
    cdef int64_t n_table = _table_entries(_tree_nodes(requests, lo, hi))
    memset(tree.table, 0xFF, n_table * sizeof(int32_t))
    tree.mask = n_table - 1
    tree.n_nodes = 0
    _hang(tree, -1, 0, -1, False)


cdef list _begin_router(
    Router* router, Paths* paths, CallForest forest, const Request[::1] requests, Link[::1] links
):
    """Set up a router without links, all but ``accepted``; the result owns its memory."""
    cdef int64_t i
    cdef TokenIndex* index = &router.index
    cdef int32_t[:, ::1] of_nodes = empty((5, forest.n_nodes), "i4")
    cdef int32_t[::1] next_ended = empty(forest.n_calls, "i4")
    paths[0] = _paths(forest)
    router.paths, router.requests, router.links = paths, &requests[0], &links[0]
    index.up, index.ended = &of_nodes[0, 0], &of_nodes[1, 0]
    index.replies, index.reply_up = &of_nodes[2, 0], &of_nodes[3, 0]
    index.last_reply, index.next_ended = &of_nodes[4, 0], &next_ended[0]
    with nogil:
        _begin_index(paths, index)
        for i in range(paths.n_calls):
            links[i].order = links[i].rewritten_by = links[i].parent = -1
    return [of_nodes, next_ended, *_allocate_tree(&router.tree, forest, requests)]


cdef _check_requests(CallForest forest, const Request[::1] requests, const Link[::1] links):
    """Raise unless every call has a link and a request that describes a list of messages."""
    cdef int64_t bad
    _check_length("requests", requests.shape[0], forest.n_calls)
    _check_length("links", links.shape[0], forest.n_calls)
    bad = _first_bad_request(forest.calls, requests)
    if bad >= 0:
        raise LayoutError(
            f"requests[{bad}] is no list of messages: {requests[bad].n_keys} of its own "
            f"after {requests[bad].shared} of call {forest.calls[bad].base}"
        )


cdef void _place_reply(
    Tree* tree, const Request* request, int32_t node, int32_t call
) noexcept nogil:
    """Add the node that a call generates below the node of its last message."""
    cdef int32_t first
    if request.reply_key == 0 or not request.reply_is_assistant:
        tree.places[call] = _hang(tree, node, 0, call, True)
        return
    first = _find(tree, node, request.reply_key)
    node = tree.places[call] = _hang(tree, node, request.reply_key, call, True)
    if first < 0:
        _remember(tree, node)
    else:
        tree.nodes[node].equal = tree.nodes[first].equal
        tree.nodes[first].equal = node


cdef void _route_session_by_messages(
    Router* router, int32_t lo, int32_t hi, int64_t merge_threshold, int32_t tie_break
) noexcept nogil:
    """The links of one session; its tree is empty."""
    cdef const Paths* paths = router.paths
    cdef const Request* request
    cdef Tree* tree = &router.tree
    cdef Link* link
    cdef int32_t i, node, before = -1
    cdef bint empty_list
    for i in range(lo, hi):
        request = &router.requests[i]
        link = &router.links[i]
        empty_list = request.n_keys >= 0 and request.shared + request.n_keys == 0
        if request.n_keys < 0 or (empty_list and tie_break == TIE_BREAK_TOKENS):
            link.parent = _nearest_of_tokens(router, lo, i)
            link.link_reason = REASON_TOKENS if link.parent >= 0 else REASON_ROOT
            node = tree.places[link.parent] if link.parent >= 0 else 0
            tree.places[i] = _hang(tree, node, 0, i, True)
        elif empty_list:
            link.link_reason = REASON_UNROUTED
            continue
        else:
            node = _route_call(
                tree, paths.calls, router.requests, router.links, i, before, merge_threshold
            )
            if tie_break == TIE_BREAK_FIRST:
                link.parent = tree.nodes[node].above
            else:
                link.parent = _nearest_by_tokens(
                    tree, paths, node, i, tie_break == TIE_BREAK_FULL_PATH
                )
            if link.parent < 0 and link.link_reason == REASON_MESSAGES:
                link.link_reason = REASON_ROOT
            _place_reply(tree, request, node, i)
            before = i
        _open_reply(paths, router.index.replies, i)
    _rank(tree, router.links)


def route_messages(
    CallForest forest not None,
    const Request[::1] requests not None,
    int64_t merge_threshold,
    int32_t tie_break,
    Link[::1] links not None,
):
    """Fill ``parent``, ``order``, ``rewritten_by`` and ``reason`` of every call's link.

    Messages are routed as slime does; tokens decide which call a call without a list of
    messages continues, see `_nearest_of_tokens`. With TIE_BREAK_TOKENS, of equal replies to
    the same messages the parent is that of `_nearest_by_tokens`, not the first; with
    TIE_BREAK_FULL_PATH the parent is the nearest whose path the prompt repeats entirely.
    """
    cdef int64_t s
    cdef Paths paths
    cdef Router router

    _check_requests(forest, requests, links)
    if forest.n_calls == 0:
        return
    memory = _begin_router(&router, &paths, forest, requests, links)
    router.accepted = router.tree.places
    with nogil:
        for s in range(paths.n_sessions):
            _begin_tree(
                &router.tree, requests, paths.session_offsets[s], paths.session_offsets[s + 1]
            )
            _route_session_by_messages(
                &router, <int32_t>paths.session_offsets[s],
                <int32_t>paths.session_offsets[s + 1], merge_threshold, tie_break,
            )


cdef _check_parents(CallForest forest, const Link[::1] links):
    """Raise unless every parent is another call of the session; they may still be a circle.

    Paths of two sessions have no node in common to climb to.
    """
    cdef int64_t s, i, lo, hi
    cdef int32_t parent
    for s in range(forest.n_sessions):
        lo, hi = forest.session_offsets[s], forest.session_offsets[s + 1]
        for i in range(lo, hi):
            parent = links[i].parent
            if parent == i or (parent >= 0 and not lo <= parent < hi):
                raise LayoutError(
                    f"links[{i}]: parent {parent} is no other call of its session, which has "
                    f"the calls {lo} to {hi - 1}"
                )


def measure_links(CallForest forest not None, Link[::1] links not None):
    """Fill ``lcp`` of every link: -1 for a call without a parent."""
    cdef int64_t i
    cdef Paths paths
    _check_length("links", links.shape[0], forest.n_calls)
    _check_parents(forest, links)
    if forest.n_calls == 0:
        return
    paths = _paths(forest)
    with nogil:
        for i in range(paths.n_calls):
            links[i].lcp = -1
            if links[i].parent >= 0:
                links[i].lcp = _shared_of(&paths, links[i].parent, <int32_t>i)

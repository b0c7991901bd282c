"""Which call a call continues: by its chat messages, or by its tokens.

The message tree has one node a message. A replayed message descends into the first child
that equals it, so of equal siblings only the first can be found: a hash table over (parent,
key) holds those, and a list the others, for a rule that lets tokens choose among them.
Messages that a request shares with the call before, or with its base, are not looked up one
by one: equal runs of keys are compared as bytes, and the node is reached by climbing from
that call.
"""

cdef enum:  # in the order of trajkit.schema.LINK_REASONS
    WHY_ROOT, WHY_MESSAGES, WHY_REWRITE, WHY_TOKENS, WHY_PREVIOUS, WHY_UNROUTED, WHY_WIPE
    WHY_PROMPTS
    WHY_AMBIGUOUS, WHY_SUPERSEDED, WHY_UNRESOLVED_KEPT, WHY_UNRESOLVED
    WHY_UNRESOLVED_AMBIGUOUS, WHY_STRANDED, WHY_EMPTY
    WHY_REFUSED_TOKENS, WHY_REFUSED_TRUNCATED, WHY_RETRIED

cdef enum:  # in the order of trajkit.policies.EQUALS
    EQUALS_FIRST, EQUALS_TOKENS, EQUALS_WHOLE

cdef enum:
    KEY_BYTES = 16
    NOT_YET = 0x7FFFFFFF      # a call that is to come; beyond every call


cdef struct Tree:
    Message* nodes
    int64_t node_room         # of `tree_size`
    int32_t n_nodes           # the next unused node
    int32_t* table            # open addressing; -1: free
    int64_t mask
    int32_t* places           # per call: the node that it generated, or -1


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
        # The key is read from the node: an entry under a key that it lost matches nothing.
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

    `tree_size` counts what may be added: a call's own messages, the reply of its base and its
    own reply. Its table has twice as many entries as nodes and changed keys, so that
    `_remember` and `_find` come to a free one.
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
    """Whether the role of the message that the call brings as number ``own`` is assistant."""
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
    """The node below which a call that has messages belongs; its prompt's messages are added.

    ``before`` is the call with messages that was placed before it, or -1.
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

    # Rewrite-merge (spec: slime R-5): a reply shown otherwise takes the place of a short one.
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
    links[index].why = WHY_REWRITE if merged else WHY_MESSAGES
    return node


cdef void _rank(const Tree* tree, Link* links) noexcept nogil:
    """Depth-first pre-order over the calls in the tree, children as they came."""
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


cdef int32_t _nearest_by_tokens(
    const Tree* tree, const Call* calls, const Node* nodes, const int32_t* ends, int32_t node,
    int32_t index,
) noexcept nogil:
    """Of the nearest call above and its equal siblings, the one that the prompt continues.

    That is the one whose path the prompt repeats for longest; of equals, the one with the
    shortest path (so one that it repeats entirely), then the first. -1: there is none above.
    """
    cdef int32_t other, call, best
    cdef pos_t shared, most, size, least = 0
    while node > 0:
        best = -1
        most = -1
        other = node
        while other >= 0:
            call = tree.nodes[other].call
            if call >= 0:
                shared = _shared_by(calls, nodes, ends, call, index)
                size = _held_len(&calls[call])
                if shared > most or shared == most and (
                    size < least or size == least and call < best
                ):
                    most = shared
                    least = size
                    best = call
            other = tree.nodes[other].equal
        if best >= 0:
            return best
        node = tree.nodes[node].parent
    return -1


cdef int32_t _nearest_whole(
    const Tree* tree, const Call* calls, const Node* nodes, const int32_t* ends, int32_t node,
    int32_t index,
) noexcept nogil:
    """The nearest call above whose whole path the prompt repeats, the last of equals; or -1."""
    cdef int32_t other, call, best
    while node > 0:
        best = -1
        other = node
        while other >= 0:
            call = tree.nodes[other].call
            if call > best and _held_len(&calls[call]) <= calls[index].prompt_len:
                if _shared_by(calls, nodes, ends, call, index) == _held_len(&calls[call]):
                    best = call
            other = tree.nodes[other].equal
        if best >= 0:
            return best
        node = tree.nodes[node].parent
    return -1


cdef int32_t _next_alive(int32_t* up, const int32_t* alive, int32_t node) noexcept nogil:
    """The nearest node at or above with ``alive[node] >= 0``, or -1; shortens the way there.

    ``up`` starts as the parents. A node that is not alive never becomes so again: hence a
    long path of such nodes, as a chain of drifting turns leaves it, is climbed once.
    """
    cdef int32_t above
    while node >= 0 and alive[node] < 0:
        above = up[node]
        if above >= 0 and alive[above] < 0:
            up[node] = up[above]
        node = up[node]
    return node


cdef int32_t _longest_held(
    const Call* calls, const Node* nodes, const int32_t* ends, int32_t* up,
    int32_t* ended, const int32_t* next_ended, const Link* links,
    const int32_t* places, int32_t index,
) noexcept nogil:
    """The earlier placed call whose path is the longest prefix of the prompt, or -1.

    A node whose calls have all come and are not placed is not visited again.
    """
    cdef int32_t node = ends[index], call, oldest
    cdef bint more
    while nodes[node].stop > calls[index].prompt_len:
        node = nodes[node].parent
    node = _next_alive(up, ended, node)
    while node >= 0:
        oldest = -1
        more = False
        call = ended[node]
        while call >= 0:
            if call >= index:
                more = True
            elif places[call] >= 0 and links[call].rewritten_by < 0:
                if oldest < 0 or call < oldest:
                    oldest = call
            call = next_ended[call]
        if oldest >= 0:
            return oldest
        if not more:
            ended[node] = -1
        node = _next_alive(up, ended, up[node])
    return -1


cdef void _open_reply(
    const Call* calls, const Node* nodes, const int32_t* ends, int32_t* replies, int32_t index
) noexcept nogil:
    """Note a call in every node of its output, and in the one where its prompt ends.

    Of several calls, a node keeps the one with the shortest prompt, the first of equals.
    """
    cdef int32_t node = ends[index], other
    if calls[index].prompt_len == 0:  # every prompt begins with it
        return
    while nodes[node].parent >= 0 and nodes[node].stop >= calls[index].prompt_len:
        other = replies[node]
        if 0 <= other < NOT_YET and calls[other].prompt_len <= calls[index].prompt_len:
            return  # the nodes above have that one, too, or a better one
        replies[node] = index
        node = nodes[node].parent


cdef void _expect_replies(
    const Call[::1] calls, const Node[::1] nodes, const int32_t[::1] ends, int32_t* replies,
    int32_t* up, int32_t* last,
) noexcept nogil:
    """Prepare what `_open_reply` fills: NOT_YET where it may note a call, else -1.

    ``last`` becomes the last call that it may note there, ``up`` the parents. From the last
    call on: what it has is the last call's, and is passed over by the calls before.
    """
    cdef int64_t i
    cdef int32_t node
    for i in range(nodes.shape[0]):
        replies[i] = 0
        up[i] = nodes[i].parent
    for i in range(calls.shape[0] - 1, -1, -1):
        if calls[i].prompt_len == 0:
            continue
        node = _next_alive(up, replies, ends[i])
        while nodes[node].parent >= 0 and nodes[node].stop >= calls[i].prompt_len:
            replies[node] = -1
            last[node] = <int32_t>i
            node = _next_alive(up, replies, node)
    for i in range(nodes.shape[0]):
        replies[i] = NOT_YET if replies[i] < 0 else -1
        up[i] = nodes[i].parent


cdef int32_t _longest_repeated(
    const Call* calls, const Node* nodes, const int32_t* ends, const Link* links,
    const int32_t* places, int32_t first, int32_t index,
) noexcept nogil:
    """What `_nearest_of_tokens` looks for in ``replies``, found call by call."""
    cdef int32_t call, best = -1
    cdef pos_t shared, most = 0
    for call in range(first, index):
        if places[call] < 0 or links[call].rewritten_by >= 0:
            continue
        if not 0 < calls[call].prompt_len < calls[index].prompt_len:
            continue
        shared = _shared_by(calls, nodes, ends, call, index)
        if shared < calls[call].prompt_len or shared < most:
            continue
        if shared > most or calls[call].prompt_len < calls[best].prompt_len:
            best = call
            most = shared
    return best


cdef int32_t _nearest_of_tokens(
    const Call* calls, const Node* nodes, const int32_t* ends, int32_t* up,
    int32_t* ended, const int32_t* next_ended, int32_t* replies, int32_t* reply_up,
    const int32_t* last, const Link* links, const int32_t* places, int32_t first,
    int32_t index,
) noexcept nogil:
    """The earlier placed call that a call without messages continues, or -1.

    Its prompt begins with that call's prompt and is longer, or with its whole path. Of
    several, it repeats that call's path for longest; of equals, it repeats a whole path, or
    else that call has the shortest prompt and is the first. ``first`` is the session's
    first call, ``replies`` is of `_open_reply`, ``reply_up`` and ``last`` of
    `_expect_replies`.
    """
    cdef int32_t node = ends[index], call
    cdef int32_t whole = _longest_held(
        calls, nodes, ends, up, ended, next_ended, links, places, index
    )
    cdef pos_t least = _held_len(&calls[whole]) if whole >= 0 else 0
    while nodes[node].start >= calls[index].prompt_len:
        node = nodes[node].parent
    node = _next_alive(reply_up, replies, node)
    while node >= 0 and min(nodes[node].stop, calls[index].prompt_len) > least:
        call = replies[node]
        if call < NOT_YET and calls[call].prompt_len < calls[index].prompt_len:
            if links[call].rewritten_by < 0:
                return call
            call = _longest_repeated(calls, nodes, ends, links, places, first, index)
            if call >= 0 and _shared_by(calls, nodes, ends, call, index) > least:
                return call
            return whole
        if call == NOT_YET and last[node] < index:
            replies[node] = -1
        node = _next_alive(reply_up, replies, reply_up[node])
    return whole


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
        n += 2  # the reply of its base, its own reply
        if requests[i].n_keys < 0 or requests[i].shared + requests[i].n_keys == 0:
            continue
        n += requests[i].n_keys
        if requests[i].shared == 0 and before >= 0 and requests[before].shared == 0:
            n -= _repeated(&requests[i], &requests[before])
        before = i
    return n


cdef int64_t _table_entries(int64_t n_nodes) noexcept nogil:
    # An entry a node and one for each that changed its key; never more than half full.
    cdef int64_t n_table = 2
    while n_table < 4 * n_nodes:
        n_table *= 2
    return n_table


def tree_size(const Request[::1] requests not None, const int64_t[::1] session_offsets not None):
    """(nodes, table entries) that route_messages needs for its largest session."""
    cdef int64_t s, most = 0
    _check_sessions(session_offsets, requests.shape[0])
    for s in range(session_offsets.shape[0] - 1):
        most = max(most, _tree_nodes(requests, session_offsets[s], session_offsets[s + 1]))
    return most, _table_entries(most)


def route_messages(
    const Call[::1] calls not None,
    const Request[::1] requests not None,
    const int64_t[::1] session_offsets not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    int64_t merge_threshold,
    int32_t equals,
    Message[::1] tree_nodes not None,
    int32_t[::1] table not None,
    int32_t[::1] places not None,
    int32_t[::1] up not None,
    int32_t[::1] ended not None,
    int32_t[:, ::1] replies not None,
    int32_t[::1] next_ended not None,
    Link[::1] links not None,
):
    """Fill ``parent``, ``order``, ``rewritten_by`` and ``why`` of every call's link.

    Message routing as slime has it; tokens tell which call a call without a list of messages
    continues, see `_nearest_of_tokens`. With EQUALS_TOKENS, of equal replies to
    the same messages the parent is that of `_nearest_by_tokens`, not the first;
    with EQUALS_WHOLE the parent is the nearest whose whole path the prompt repeats.
    ``tree_nodes`` and ``table`` are of `tree_size`, ``up`` and ``ended`` have an entry a node
    of the forest, ``replies`` three, the rest one a call.
    """
    cdef:
        int64_t n_calls = calls.shape[0], n_sessions = session_offsets.shape[0] - 1
        int64_t s, i, n_table, bad
        int32_t before, node, call, first
        bint empty
        Tree tree

    _check_sessions(session_offsets, n_calls)
    for name, n in (
        ("requests", requests.shape[0]), ("ends", ends.shape[0]), ("links", links.shape[0]),
        ("places", places.shape[0]), ("next_ended", next_ended.shape[0]),
    ):
        _check_length(name, n, n_calls)
    _check_length("up", up.shape[0], nodes.shape[0])
    _check_length("ended", ended.shape[0], nodes.shape[0])
    _check_length("replies", replies.shape[0], 3)
    _check_length("replies", replies.shape[1], nodes.shape[0])
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
    tree.places = &places[0]
    with nogil:
        for i in range(nodes.shape[0]):
            ended[i] = -1
            up[i] = nodes[i].parent
        _expect_replies(calls, nodes, ends, &replies[0, 0], &replies[1, 0], &replies[2, 0])
        for i in range(n_calls):
            links[i].order = links[i].rewritten_by = links[i].parent = places[i] = -1
            next_ended[i] = ended[ends[i]]
            ended[ends[i]] = <int32_t>i
        for s in range(n_sessions):
            # as large as this session needs: clearing costs what the session holds
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
                empty = requests[i].n_keys >= 0 and requests[i].shared + requests[i].n_keys == 0
                if requests[i].n_keys < 0 or (empty and equals == EQUALS_TOKENS):
                    links[i].parent = _nearest_of_tokens(
                        &calls[0], &nodes[0], &ends[0], &up[0], &ended[0], &next_ended[0],
                        &replies[0, 0], &replies[1, 0], &replies[2, 0], &links[0],
                        tree.places, <int32_t>session_offsets[s], call,
                    )
                    links[i].why = WHY_TOKENS if links[i].parent >= 0 else WHY_ROOT
                    node = tree.places[links[i].parent] if links[i].parent >= 0 else 0
                    places[i] = _hang(&tree, node, 0, call, True)
                    _open_reply(&calls[0], &nodes[0], &ends[0], &replies[0, 0], call)
                    continue
                if empty:
                    links[i].why = WHY_UNROUTED
                    continue
                node = _route_call(
                    &tree, &calls[0], &requests[0], &links[0], call, before, merge_threshold
                )
                if equals == EQUALS_WHOLE:
                    links[i].parent = _nearest_whole(
                        &tree, &calls[0], &nodes[0], &ends[0], node, call
                    )
                elif equals == EQUALS_TOKENS:
                    links[i].parent = _nearest_by_tokens(
                        &tree, &calls[0], &nodes[0], &ends[0], node, call
                    )
                else:
                    links[i].parent = tree.nodes[node].above
                if links[i].parent < 0 and links[i].why == WHY_MESSAGES:
                    links[i].why = WHY_ROOT
                if requests[i].reply_key != 0 and requests[i].reply_is_assistant:
                    first = _find(&tree, node, requests[i].reply_key)
                    places[i] = _hang(&tree, node, requests[i].reply_key, call, True)
                    if first < 0:
                        _remember(&tree, places[i])
                    else:
                        tree_nodes[places[i]].equal = tree_nodes[first].equal
                        tree_nodes[first].equal = places[i]
                else:
                    places[i] = _hang(&tree, node, 0, call, True)
                _open_reply(&calls[0], &nodes[0], &ends[0], &replies[0, 0], call)
                before = call
            _rank(&tree, &links[0])


def route_tokens(
    const Call[::1] calls not None,
    const int64_t[::1] session_offsets not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    int32_t[::1] up not None,
    int32_t[::1] left not None,
    int32_t[::1] active not None,
    int32_t[::1] next_active not None,
    int32_t[::1] row_of not None,
    Link[::1] links not None,
):
    """Fill every call's link: its parent is the longest row end that is a prefix of its prompt.

    Ties go to the oldest row. A call takes the place of its parent as the row's end, so every
    call has one child at most. ``up``, ``left`` and ``active`` have an entry a node of the
    forest, the rest one a call.
    """
    cdef:
        int64_t n_calls = calls.shape[0], n_sessions = session_offsets.shape[0] - 1, s, i
        int32_t node, end, best, before, best_before, rank, call

    _check_sessions(session_offsets, n_calls)
    for name, n in (
        ("ends", ends.shape[0]), ("next_active", next_active.shape[0]),
        ("row_of", row_of.shape[0]), ("links", links.shape[0]),
    ):
        _check_length(name, n, n_calls)
    for name, n in (
        ("up", up.shape[0]), ("left", left.shape[0]), ("active", active.shape[0]),
    ):
        _check_length(name, n, nodes.shape[0])
    _check_forest(nodes, ends)
    with nogil:
        for i in range(nodes.shape[0]):
            active[i] = left[i] = -1
            up[i] = nodes[i].parent
        # One less than the calls that end at a node and that none continues: -1, it has none
        # left and never will.
        for i in range(n_calls):
            left[ends[i]] += 1
        for s in range(n_sessions):
            for i in range(session_offsets[s], session_offsets[s + 1]):
                call = <int32_t>i
                links[i].rewritten_by = -1
                node = ends[i]
                while nodes[node].stop > calls[i].prompt_len:
                    node = nodes[node].parent
                node = _next_alive(&up[0], &left[0], node)
                while node >= 0 and active[node] < 0:
                    node = _next_alive(&up[0], &left[0], up[node])
                if node < 0:
                    links[i].parent = -1
                    links[i].why = WHY_ROOT
                    row_of[i] = call
                else:
                    best = best_before = before = -1
                    end = active[node]
                    while end >= 0:
                        if best < 0 or row_of[end] < row_of[best]:
                            best = end
                            best_before = before
                        before = end
                        end = next_active[end]
                    if best_before < 0:
                        active[node] = next_active[best]
                    else:
                        next_active[best_before] = next_active[best]
                    left[node] -= 1
                    links[i].parent = best
                    links[i].why = WHY_TOKENS
                    row_of[i] = row_of[best]
                next_active[i] = active[ends[i]]
                active[ends[i]] = call
            # From here next_active is the call that continues this one.
            for i in range(session_offsets[s], session_offsets[s + 1]):
                next_active[i] = -1
                if links[i].parent >= 0:
                    next_active[links[i].parent] = <int32_t>i
            rank = 0
            for i in range(session_offsets[s], session_offsets[s + 1]):
                if links[i].parent >= 0:
                    continue
                call = <int32_t>i
                while call >= 0:
                    links[call].order = rank
                    rank += 1
                    call = next_active[call]


cdef _check_parents(const Link[::1] links, int64_t n_calls):
    cdef int64_t i
    for i in range(n_calls):
        if links[i].parent >= n_calls or links[i].parent == i:
            raise LayoutError(f"links[{i}]: parent {links[i].parent} is no other call")


def measure_links(
    const Call[::1] calls not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    Link[::1] links not None,
):
    """Fill ``lcp`` of every link that has a parent, and -1 where there is none."""
    cdef int64_t i
    _check_length("ends", ends.shape[0], calls.shape[0])
    _check_length("links", links.shape[0], calls.shape[0])
    _check_parents(links, calls.shape[0])
    _check_forest(nodes, ends)
    with nogil:
        for i in range(calls.shape[0]):
            links[i].lcp = -1
            if links[i].parent >= 0:
                links[i].lcp = _shared_by(
                    &calls[0], &nodes[0], &ends[0], links[i].parent, <int32_t>i
                )

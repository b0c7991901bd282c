"""The calls of a session as a forest of token paths (a radix tree).

Fills nodes, the end of each call's path and what it shares with earlier ones, from call
records. Every call is a path: its prompt followed by its output. A node is a range of a path
that no call leaves or ends inside: it covers the positions ``start:stop``, and its tokens are
those of its ``source`` at these positions. Every path ends at the stop of a node. Calls are
inserted in order, each compared with the previous path, of which the cursor keeps a contiguous
copy. So comparing prompts costs O(prompt tokens) at the speed of memory, and everything else
O(new tokens + depth of the tree). In delta form there is little to compare, and the cursor
keeps no copy.
"""


cdef enum:
    MAX_CALLS = (1 << 30) - 1  # of one table: two nodes each are numbered by int32


cdef struct Cursor:
    token_t* path             # tokens of the call inserted last, or NULL
    pos_t path_len
    pos_t path_room           # at least the length of every inserted call
    int32_t* stack            # nodes from the root to the end of that path
    int32_t depth
    int32_t n_nodes           # the next unused node
    int64_t node_room
    int64_t stack_room


cdef inline pos_t _held_len(const Call* call) noexcept nogil:
    return call.prompt_len + call.out_len


cdef inline const token_t* _tokens_at(const Call* call, pos_t position, pos_t* n) noexcept nogil:
    """The call's tokens from position on, as far as they are contiguous (n of them)."""
    if position < call.prompt_len:
        n[0] = call.prompt_len - position
        return <const token_t*><intptr_t>call.own + (position - call.own_start)
    n[0] = call.prompt_len + call.out_len - position
    return <const token_t*><intptr_t>call.out + (position - call.prompt_len)


cdef inline token_t _token(const Call* call, pos_t position) noexcept nogil:
    cdef pos_t n
    return _tokens_at(call, position, &n)[0]


cdef pos_t _match_run(
    const Call* call, const token_t* run, pos_t start, pos_t stop
) noexcept nogil:
    """First position in [start, stop) where call departs from run; stop if it does not.

    ``run[0]`` is at position ``start``.
    """
    cdef pos_t position = start, n, same
    cdef const token_t* own
    while position < stop:
        own = _tokens_at(call, position, &n)
        n = min(n, stop - position)
        same = _lcp(run + (position - start), own, n)
        position += same
        if same < n:
            break
    return position


cdef pos_t _match(const Call* call, const Call* other, pos_t start, pos_t stop) noexcept nogil:
    """First position in [start, stop) where the two paths differ; stop if they do not."""
    cdef pos_t position = start, n, reached
    cdef const token_t* run
    while position < stop:
        run = _tokens_at(other, position, &n)
        n = min(position + n, stop)
        reached = _match_run(call, run, position, n)
        if reached < n:
            return reached
        position = n
    return stop


cdef void _copy(
    const Call* call, token_t* target, pos_t start, pos_t stop, bint uncached=False
) noexcept nogil:
    """Tokens start:stop of the call's path, written to target."""
    cdef pos_t n
    cdef const token_t* own
    while start < stop:
        own = _tokens_at(call, start, &n)
        n = min(n, stop - start)
        _put(target, own, n * sizeof(token_t), uncached)
        target += n
        start += n


cdef void _push(Node* nodes, Cursor* cursor, int32_t node) noexcept nogil:
    check_write("stack", cursor.depth, 1, cursor.stack_room)
    nodes[node].slot = cursor.depth
    cursor.stack[cursor.depth] = node
    cursor.depth += 1


cdef bint _on_stack(const Node* nodes, const Cursor* cursor, int32_t node) noexcept nogil:
    cdef int32_t slot = nodes[node].slot
    return 0 <= slot < cursor.depth and cursor.stack[slot] == node


cdef int32_t _add_node(
    Node* nodes, Cursor* cursor, int32_t parent, pos_t start, pos_t stop, int32_t source,
    token_t first,
) noexcept nogil:
    cdef int32_t node = cursor.n_nodes
    check_write("nodes", node, 1, cursor.node_room)
    cursor.n_nodes += 1
    nodes[node].start = start
    nodes[node].stop = stop
    nodes[node].parent = parent
    nodes[node].source = source
    nodes[node].first = first
    nodes[node].child = -1
    nodes[node].sibling = -1
    nodes[node].slot = -1
    return node


cdef void _plant(Node* nodes, Cursor* cursor) noexcept nogil:
    """Start a session: a root that ends at 0 and starts before it, the cursor on it."""
    cursor.depth = 0
    cursor.path_len = 0
    _push(nodes, cursor, _add_node(nodes, cursor, -1, -1, 0, -1, -1))


cdef void _move(
    const Call* calls, Node* nodes, Cursor* cursor, int32_t end, pos_t length
) noexcept nogil:
    """Move the cursor to the first tokens of the path that ends at the stop of the node.

    The path may be longer than the cursor has room for, ``length`` may not.
    """
    cdef int32_t meet, node, slot, n = 0
    while nodes[end].start >= length:
        end = nodes[end].parent
    meet = node = end
    while not _on_stack(nodes, cursor, meet):  # the root always is
        meet = nodes[meet].parent
        n += 1
    slot = nodes[meet].slot + n
    cursor.depth = slot + 1
    check_write("stack", 0, cursor.depth, cursor.stack_room)
    while node != meet:
        cursor.stack[slot] = node
        nodes[node].slot = slot
        slot -= 1
        if cursor.path != NULL:
            check_write("path", 0, min(nodes[node].stop, length), cursor.path_room)
            _copy(
                &calls[nodes[node].source], cursor.path + nodes[node].start,
                nodes[node].start, min(nodes[node].stop, length),
            )
        node = nodes[node].parent
    cursor.path_len = length


cdef int32_t _split(
    const Call* calls, Node* nodes, Cursor* cursor, int32_t node, pos_t position
) noexcept nogil:
    """Cut the node on top of the stack at position; the new node above takes its place.

    The lower part keeps its number, so that paths that end at its stop still do.
    """
    cdef int32_t above = nodes[node].parent, child = nodes[above].child, upper
    upper = _add_node(
        nodes, cursor, above, nodes[node].start, position, nodes[node].source,
        nodes[node].first,
    )
    nodes[upper].sibling = nodes[node].sibling
    if child == node:
        nodes[above].child = upper
    else:
        while nodes[child].sibling != node:
            child = nodes[child].sibling
        nodes[child].sibling = upper
    nodes[upper].child = node
    nodes[node].parent = upper
    nodes[node].sibling = -1
    nodes[node].start = position
    nodes[node].first = _token(&calls[nodes[node].source], position)
    cursor.depth -= 1
    _push(nodes, cursor, upper)
    return upper


cdef void _insert(
    const Call* calls, Node* nodes, Cursor* cursor, int32_t* ends, int32_t index,
    pos_t* shared, int32_t* shared_with,
) noexcept nogil:
    """Add one call to the forest.

    ``ends[index]`` becomes the node at whose stop its path ends, ``shared`` the number of its
    first tokens that an earlier path has, ``shared_with`` a call with these (-1: none). Adds
    two nodes at most. The cursor has room for the call's path, which the caller checks.
    """
    cdef const Call* call = &calls[index]
    cdef pos_t held_len = _held_len(call), position = 0, kept, stop
    cdef int32_t node, child, leaf
    cdef token_t token

    if call.base >= 0:
        position = call.own_start
        _move(calls, nodes, cursor, ends[call.base], position)
    elif cursor.path != NULL:
        position = _match_run(
            call, cursor.path + position, position, min(cursor.path_len, held_len)
        )
    kept = position
    while cursor.depth > 1 and nodes[cursor.stack[cursor.depth - 1]].start >= position:
        cursor.depth -= 1
    node = cursor.stack[cursor.depth - 1]
    if position < nodes[node].stop:
        position = _match(
            call, &calls[nodes[node].source], position, min(nodes[node].stop, held_len)
        )

    # The cursor's path ends or departs here; another path may match the call further.
    while position == nodes[node].stop and position < held_len:
        token = _token(call, position)
        child = nodes[node].child
        while child >= 0 and nodes[child].first != token:
            child = nodes[child].sibling
        if child < 0:
            break
        stop = min(nodes[child].stop, held_len)
        position = _match(call, &calls[nodes[child].source], position, stop)
        _push(nodes, cursor, child)
        node = child

    if position < nodes[node].stop:
        node = _split(calls, nodes, cursor, node, position)
    shared[0] = position
    shared_with[0] = nodes[node].source
    if position < held_len:
        leaf = _add_node(
            nodes, cursor, node, position, held_len, index, _token(call, position)
        )
        nodes[leaf].sibling = nodes[node].child
        nodes[node].child = leaf
        _push(nodes, cursor, leaf)
        node = leaf
    ends[index] = node
    if cursor.path != NULL:
        check_write("path", kept, held_len - kept, cursor.path_room)
        _copy(call, cursor.path + kept, kept, held_len)
    cursor.path_len = held_len


cdef int64_t _first_bad_call(
    const Call[::1] calls, const int64_t[::1] session_offsets, pos_t longest
) noexcept nogil:
    """Index of the first call whose lengths describe no path, or one beyond longest; or -1."""
    cdef int64_t s, i
    cdef int32_t base
    for s in range(session_offsets.shape[0] - 1):
        for i in range(session_offsets[s], session_offsets[s + 1]):
            if calls[i].out_len < 0 or calls[i].own_start < 0:
                return i
            if calls[i].prompt_len < calls[i].own_start:
                return i
            if calls[i].out_len > longest - calls[i].prompt_len:
                return i
            base = calls[i].base
            if base < 0:
                if calls[i].own_start != 0:
                    return i
            elif base < session_offsets[s] or base >= i:
                return i
            elif calls[i].own_start > calls[base].prompt_len + calls[base].out_len:
                return i
    return -1


cdef int64_t _first_bad_session(
    const int64_t[::1] session_offsets, int64_t n_calls
) noexcept nogil:
    """Index of the first offset that breaks ``0 = o[0] <= ... = n_calls``, or -1."""
    cdef int64_t s, last = session_offsets.shape[0] - 1
    if session_offsets[0] != 0:
        return 0
    for s in range(1, last + 1):
        if session_offsets[s] < session_offsets[s - 1]:
            return s
    return -1 if session_offsets[last] == n_calls else last


cdef _check_sessions(const int64_t[::1] session_offsets, int64_t n_calls):
    cdef int64_t bad
    if n_calls > MAX_CALLS:
        raise LayoutError(f"{n_calls} calls in one table: at most {<int64_t>MAX_CALLS} are read")
    if session_offsets.shape[0] == 0:
        raise LayoutError("session_offsets is empty: it needs one more entry than sessions")
    bad = _first_bad_session(session_offsets, n_calls)
    if bad >= 0:
        raise LayoutError(
            f"session_offsets[{bad}] = {session_offsets[bad]} does not tile {n_calls} calls"
        )


cdef _check_length(name, int64_t n, int64_t expected):
    if n < expected:
        raise LayoutError(f"{name} has {n} entries, {expected} are needed")


def grow_forest(
    const Call[::1] calls not None,
    const int64_t[::1] session_offsets not None,
    Node[::1] nodes not None,
    int32_t[::1] ends not None,
    pos_t[::1] shared not None,
    int32_t[::1] shared_with not None,
):
    """Insert the calls in order; return how many nodes are used.

    ``ends[i]`` is the node where call i's path ends, ``shared[i]`` how many tokens earlier
    paths had, ``shared_with[i]`` a call that had them or -1. Needs 2 nodes per call and one
    per session. Do not write to any buffer, or to what the addresses in ``calls`` point to,
    during the call.
    """
    cdef:
        int64_t n_calls = calls.shape[0], n_sessions = session_offsets.shape[0] - 1
        int64_t bad, s, i, deepest = 1
        pos_t longest = 0
        bint delta = False
        Cursor cursor

    _check_sessions(session_offsets, n_calls)
    for s in range(n_sessions):
        deepest = max(deepest, 2 * (session_offsets[s + 1] - session_offsets[s]) + 1)
    _check_length("nodes", nodes.shape[0], 2 * n_calls + n_sessions)
    _check_length("ends", ends.shape[0], n_calls)
    _check_length("shared", shared.shape[0], n_calls)
    _check_length("shared_with", shared_with.shape[0], n_calls)
    bad = _first_bad_call(calls, session_offsets, INT32_MAX)
    if bad >= 0:
        raise LayoutError(
            f"calls[{bad}] is no path: prompt_len {calls[bad].prompt_len}, out_len "
            f"{calls[bad].out_len}, own_start {calls[bad].own_start}, base {calls[bad].base}; "
            f"a path has at most {INT32_MAX} tokens"  # positions of rows and spans are int32
        )
    memset(&cursor, 0, sizeof(Cursor))
    if n_calls == 0:
        return 0
    for i in range(n_calls):
        longest = max(longest, _held_len(&calls[i]))
        delta = delta or calls[i].base >= 0
    # In delta form calls are not compared with the previous path, so no copy of it is needed.
    cdef token_t[::1] path = empty(0 if delta else longest, "i4")
    cdef int32_t[::1] stack = empty(deepest, "i4")
    cursor.path = &path[0] if path.shape[0] else NULL
    cursor.path_room = longest
    cursor.stack, cursor.stack_room = &stack[0], deepest
    cursor.node_room = nodes.shape[0]
    with nogil:
        for s in range(n_sessions):
            _plant(&nodes[0], &cursor)
            for i in range(session_offsets[s], session_offsets[s + 1]):
                _insert(
                    &calls[0], &nodes[0], &cursor, &ends[0], <int32_t>i, &shared[i],
                    &shared_with[i],
                )
    return cursor.n_nodes


cdef pos_t _shared_by(
    const Call* calls, const Node* nodes, const int32_t* ends, int32_t held, int32_t call
) noexcept nogil:
    """Longest common prefix of one call's path and another's prompt, found in the forest."""
    cdef int32_t a = ends[held], b = ends[call]
    cdef pos_t limit = min(_held_len(&calls[held]), calls[call].prompt_len)
    while a != b:
        # A node starts where its parent stops, so the one that starts later is no ancestor.
        if nodes[a].start >= nodes[b].start:
            a = nodes[a].parent
        else:
            b = nodes[b].parent
    return min(nodes[a].stop, limit)

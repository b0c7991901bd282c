"""Longest common prefix of two arrays of token ids, in O(its length)."""

cdef enum:  # in tokens
    NEAR = 256  # compared first: most arrays that differ do so at their start


cdef pos_t _lcp(const token_t* a, const token_t* b, pos_t n) noexcept nogil:
    """First index in [0, n) where a and b differ; n when they agree throughout."""
    cdef pos_t i = 0, block = min(n, NEAR), half
    if memcmp(a, b, block * sizeof(token_t)) == 0:
        i = block
        block = n - i
        if memcmp(a + i, b + i, block * sizeof(token_t)) == 0:
            return n
    # a[i:i + block] differs somewhere: halve it until the position is found
    while block > 16:
        half = block // 2
        if memcmp(a + i, b + i, half * sizeof(token_t)) == 0:
            i += half
            block -= half
        else:
            block = half
    while a[i] == b[i]:
        i += 1
    return i


def lcp(const token_t[::1] a not None, const token_t[::1] b not None):
    """Tokens that a and b share at their start. Do not write to them during the call."""
    cdef pos_t n = min(a.shape[0], b.shape[0])
    if n == 0:
        return 0
    with nogil:
        n = _lcp(&a[0], &b[0], n)
    return n


# ---
# The calls of a session as a forest of token paths (a radix tree).
#
# Fills nodes, the end of each call's path and what it shares with earlier ones, from call
# records. Every call is a path: its prompt followed by its output. A node is a range of a path
# that no call leaves or ends inside: it covers the positions ``start:stop``, and its tokens are
# those of its ``source`` at these positions. Every path ends at the stop of a node. Calls are
# inserted in order, each compared with the previous path, of which the cursor keeps a contiguous
# copy. So comparing prompts costs O(prompt tokens) at the speed of memory, and everything else
# O(new tokens + depth of the tree). In delta form there is little to compare, and the cursor
# keeps no copy.

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


cdef int32_t _slot_of(const Node* nodes, const Cursor* cursor, pos_t position) noexcept nogil:
    """The slot of the node of the cursor's path that contains a position, or ends there."""
    cdef int32_t low = 0, high = cursor.depth - 1, middle
    while low < high:
        middle = (low + high) // 2
        if nodes[cursor.stack[middle]].stop < position:
            low = middle + 1
        else:
            high = middle
    return low


cdef pos_t _follow(
    const Call* calls, const Node* nodes, const Cursor* cursor, const Call* call,
    pos_t position, int32_t* end,
) noexcept nogil:
    """How many of a call's first tokens an earlier path has; ``end`` is the last node with one.

    The first ``position`` of them are those of the cursor's path.
    """
    cdef pos_t held_len = _held_len(call)
    cdef int32_t slot = _slot_of(nodes, cursor, position), depth = cursor.depth
    cdef int32_t node = cursor.stack[slot], child
    cdef token_t token
    if position < nodes[node].stop:
        position = _match(
            call, &calls[nodes[node].source], position, min(nodes[node].stop, held_len)
        )
    while position == nodes[node].stop and position < held_len:
        token = _token(call, position)
        slot += 1
        child = cursor.stack[slot] if slot < depth else -1  # most calls continue that path
        if child < 0 or nodes[child].first != token:
            depth = 0
            child = nodes[node].child
            while child >= 0 and nodes[child].first != token:
                child = nodes[child].sibling
            if child < 0:
                break
        position = _match(
            call, &calls[nodes[child].source], position, min(nodes[child].stop, held_len)
        )
        node = child
    end[0] = node
    return position


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
    cdef pos_t held_len = _held_len(call), position = 0, kept
    cdef int32_t node, leaf

    if call.base >= 0:
        position = call.own_start
        _move(calls, nodes, cursor, ends[call.base], position)
    elif cursor.path != NULL:
        position = _match_run(call, cursor.path, 0, min(cursor.path_len, held_len))
    kept = position  # the cursor's path has the tokens before it, and maybe none after it
    position = _follow(calls, nodes, cursor, call, position, &node)
    _move(calls, nodes, cursor, node, position)
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


cdef _check_sessions(const int64_t[::1] session_offsets, int64_t n_calls):
    cdef int64_t s, last = session_offsets.shape[0] - 1
    if n_calls > MAX_CALLS:
        raise LayoutError(f"{n_calls} calls in one table: at most {<int64_t>MAX_CALLS} are read")
    if last < 0:
        raise LayoutError("session_offsets is empty: it needs one more entry than sessions")
    for s in range(last + 1):
        if (
            session_offsets[s] < (session_offsets[s - 1] if s else 0)
            or s == 0 and session_offsets[0] != 0
            or s == last and session_offsets[last] != n_calls
        ):
            raise LayoutError(
                f"session_offsets[{s}] = {session_offsets[s]} does not tile {n_calls} calls"
            )


@cython.auto_pickle(False)
@cython.final
cdef class CallForest:
    """The calls of sessions, and the forest of their paths.

    ``arrays`` are shared (of each path, the tokens that an earlier one has), shared_with (a call
    that has them, or -1), nodes, and ends (the node where each path ends). Do not write to them,
    to the arguments, or to what the addresses in ``calls`` point to, while this object is used.
    """
    cdef const Call* calls
    cdef const int64_t* session_offsets
    cdef const Node* nodes
    cdef const int32_t* ends
    cdef int64_t n_calls, n_sessions, n_nodes
    cdef readonly tuple arrays
    cdef tuple _held

    def __cinit__(
        self, const Call[::1] calls not None, const int64_t[::1] session_offsets not None
    ):
        cdef int64_t n_calls = calls.shape[0], bad
        _check_sessions(session_offsets, n_calls)
        bad = _first_bad_call(calls, session_offsets, INT32_MAX)
        if bad >= 0:
            raise LayoutError(
                f"calls[{bad}] is no path: prompt_len {calls[bad].prompt_len}, out_len "
                f"{calls[bad].out_len}, own_start {calls[bad].own_start}, base "
                f"{calls[bad].base}; a path has at most {INT32_MAX} tokens"
            )  # positions of rows and spans are int32
        self.n_calls, self.n_sessions = n_calls, session_offsets.shape[0] - 1
        self._held = calls, session_offsets
        self.session_offsets = &session_offsets[0]
        self.calls = &calls[0] if n_calls else NULL
        self._grow()

    cdef _grow(self):
        """Insert the calls, in order."""
        cdef:
            int64_t n_calls = self.n_calls, s, i, deepest = 1
            pos_t longest = 0
            bint delta = False
            Cursor cursor
        cdef Node[::1] nodes = empty(2 * n_calls + self.n_sessions, DTYPES["Node"])
        cdef int32_t[::1] ends = empty(n_calls, "i4"), shared_with = empty(n_calls, "i4")
        cdef pos_t[::1] shared = empty(n_calls, "i8")
        for s in range(self.n_sessions):
            deepest = max(
                deepest, 2 * (self.session_offsets[s + 1] - self.session_offsets[s]) + 1
            )
        for i in range(n_calls):
            longest = max(longest, _held_len(&self.calls[i]))
            delta = delta or self.calls[i].base >= 0
        # In delta form calls are not compared with the previous path, so no copy is needed.
        cdef token_t[::1] path = empty(0 if delta else longest, "i4")
        cdef int32_t[::1] stack = empty(deepest, "i4")
        memset(&cursor, 0, sizeof(Cursor))
        cursor.path = &path[0] if path.shape[0] else NULL
        cursor.path_room = longest
        cursor.stack, cursor.stack_room = &stack[0], deepest
        cursor.node_room = nodes.shape[0]
        if n_calls:
            with nogil:
                for s in range(self.n_sessions):
                    _plant(&nodes[0], &cursor)
                    for i in range(self.session_offsets[s], self.session_offsets[s + 1]):
                        _insert(
                            self.calls, &nodes[0], &cursor, &ends[0], <int32_t>i, &shared[i],
                            &shared_with[i],
                        )
            self.nodes, self.ends = &nodes[0], &ends[0]
        self.n_nodes = cursor.n_nodes
        self.arrays = shared.base, shared_with.base, nodes.base[: cursor.n_nodes], ends.base


cdef pos_t _shared(CallForest forest, int32_t held, int32_t call) noexcept nogil:
    """Tokens that one call's path and another's prompt share; 0 if of two sessions."""
    cdef const Node* nodes = forest.nodes
    cdef int32_t a = forest.ends[held], b = forest.ends[call]
    while a != b:
        # A node starts where its parent stops, so the one that starts later is no ancestor.
        if nodes[a].start >= nodes[b].start:
            a = nodes[a].parent
        else:
            b = nodes[b].parent
        if a < 0:
            return 0
    return min(nodes[a].stop, min(_held_len(&forest.calls[held]), forest.calls[call].prompt_len))


# ---
# A session that grows call by call: where a prompt leaves its paths, and what is new.
#
# Each call costs O(tokens of its prompt compared at the speed of memory + new tokens +
# log(nodes on the path)).

cdef object _longer(object array, int64_t size):
    """A copy with room for more: it begins as the array does, and the rest is undefined."""
    copy = empty(size, array.dtype)
    copy[: len(array)] = array
    return copy


@cython.auto_pickle(False)
@cython.final
cdef class Growth:
    """The forest of a session's paths, grown call by call.

    A call is taken and then inserted; between the two nothing has changed, and it may be
    refused. If calls have at most ``short`` tokens on average, a contiguous copy of the last
    path costs less memory than their records and is compared in one pass.
    """
    cdef Call[::1] records
    cdef Node[::1] nodes
    cdef int32_t[::1] stack
    cdef int32_t[::1] ends
    cdef token_t[::1] path
    cdef readonly int64_t n_calls
    cdef int64_t short
    cdef Cursor cursor
    # the call that was taken and not inserted, if there is one
    cdef bytes taken
    cdef Call call            # addresses and lengths of what the caller gave
    cdef pos_t found, n_logprobs
    cdef readonly int32_t base  # see `insert`
    cdef readonly object fault  # see `take`

    def __cinit__(self, int64_t short):
        self.n_calls, self.short = 0, short
        memset(&self.cursor, 0, sizeof(Cursor))
        self.records, self.nodes = empty(0, DTYPES["Call"]), empty(0, DTYPES["Node"])
        self.stack, self.ends = empty(0, "i4"), empty(0, "i4")

    @property
    def calls(self):
        """The records of the calls, dtype Call."""
        return self.records.base[: self.n_calls]

    cdef _make_room(self):
        """Make room for the call that was taken."""
        cdef int64_t n = self.records.shape[0], wanted = _held_len(&self.call)
        if self.n_calls < n:
            if self.cursor.path != NULL and self.path.shape[0] < wanted:
                self._hold_path(wanted)
            return
        n += n // 8 + 16
        # all or nothing, where memory is short
        records, nodes = _longer(self.records.base, n), _longer(self.nodes.base, 2 * n + 1)
        stack, ends = _longer(self.stack.base, 2 * n + 1), _longer(self.ends.base, n)
        self.records, self.nodes, self.stack, self.ends = records, nodes, stack, ends
        self.cursor.node_room = self.cursor.stack_room = 2 * n + 1
        self.cursor.stack = &self.stack[0]
        self._hold_path(max(wanted, self.cursor.path_len))

    cdef _hold_path(self, pos_t length):
        """Keep a copy of the last path, with room for this length, or none if it is long."""
        cdef int32_t end
        self.cursor.path, self.cursor.path_room = NULL, 0
        self.path = None
        if length > self.short * self.records.shape[0]:
            return
        self.path = empty(length + length // 8 + 16, "i4")
        self.cursor.path, self.cursor.path_room = &self.path[0], self.path.shape[0]
        if self.n_calls:
            end, self.cursor.depth = self.stack[self.cursor.depth - 1], 1  # only the root
            _move(
                &self.records[0], &self.nodes[0], &self.cursor, end, self.cursor.path_len
            )

    cdef pos_t _find(self) except -1:
        """How many of the call's prompt ids a path starts with; `base` is the first with them.

        Of calls that have the complete prompt, it is the first of those that share the longest
        prefix of the output; -1: none shares a token.
        """
        cdef pos_t position = 0
        cdef int32_t node
        self.base = -1
        if self.n_calls == 0 or self.call.prompt_len == 0:
            return 0
        with nogil:
            if self.cursor.path != NULL:
                position = _match_run(
                    &self.call, self.cursor.path, 0,
                    min(self.cursor.path_len, self.call.prompt_len),
                )
            position = _follow(
                &self.records[0], &self.nodes[0], &self.cursor, &self.call, position, &node
            )
        self.base = self.nodes[node].source
        return min(position, self.call.prompt_len)

    cdef _give(self, const token_t[::1] prompt, const token_t[::1] output):
        memset(&self.call, 0, sizeof(Call))
        self.taken, self.call.base = None, -1
        self.call.prompt_len = prompt.shape[0]
        self.call.own = <int64_t><intptr_t>&prompt[0] if prompt.shape[0] else 0
        if output is not None and output.shape[0]:
            self.call.out_len, self.call.out = output.shape[0], <int64_t><intptr_t>&output[0]

    def take(
        self, const token_t[::1] prompt not None, const token_t[::1] output not None,
        const float[::1] logprobs, float low, float high,
    ):
        """Find where a prompt departs from the paths, and copy what the call brings.

        Returns the ids of the prompt that no path has, those of the output, and logprobs (one
        per output id, or None): four bytes each. `fault` becomes the first value that breaks a
        rule (ids are not negative, a logprob is above low and at most high), or None: 0 of the
        prompt, 1 of the output, 2 of logprobs; its place there; its place in the bytes, in
        values. Do not write to the arguments during the call.
        """
        cdef:
            pos_t n_logprobs = 0 if logprobs is None else logprobs.shape[0], n_new, n_out
            int64_t[3] faulty
            token_t* copy
        self._give(prompt, output)
        n_out = self.call.out_len
        if _held_len(&self.call) > INT32_MAX:  # positions of rows are int32
            raise InvalidTurnsError(
                f"the call has {self.call.prompt_len} prompt ids and {n_out} output ids: "
                f"together at most {<int64_t>INT32_MAX}"
            )
        self.found, self.n_logprobs = self._find(), n_logprobs
        n_new = self.call.prompt_len - self.found
        cdef bytes taken = PyBytes_FromStringAndSize(
            NULL, (n_new + n_out + n_logprobs) * <pos_t>sizeof(token_t)
        )
        copy = <token_t*>PyBytes_AS_STRING(taken)
        with nogil:
            faulty[0] = _take_ids(
                <const token_t*><intptr_t>self.call.own + self.found, copy, n_new
            )
            faulty[1] = _take_ids(<const token_t*><intptr_t>self.call.out, copy + n_new, n_out)
            faulty[2] = _take_logprobs(
                &logprobs[0] if n_logprobs else NULL, <float*>(copy + n_new + n_out),
                n_logprobs, low, high,
            )
        self.fault = None
        if faulty[0] >= 0:
            self.fault = 0, self.found + faulty[0], faulty[0]
        elif faulty[1] >= 0:
            self.fault = 1, faulty[1], n_new + faulty[1]
        elif faulty[2] >= 0:
            self.fault = 2, faulty[2], n_new + n_out + faulty[2]
        self.taken = taken
        return taken

    def insert(self, bint trainable, bint use_tool, bint ill_formed, uint8_t stop):
        """Add the call that was taken. Its bytes must stay for as long as this object is used.

        Returns the call that had the prompt's first ``shared`` tokens and the longest prefix of
        the output after them (-1: no call), ``shared``, and whether these are all tokens of that
        call. Without such a call the last is true.
        """
        cdef:
            Call* call = &self.call
            int64_t index = self.n_calls
            pos_t reached = 0
            int32_t had = -1
        if self.taken is None:
            raise LayoutError("no call was taken")
        self._make_room()
        call.own = <int64_t><intptr_t>PyBytes_AS_STRING(self.taken)
        call.own_start, call.base = self.found, self.base
        call.out = call.own + (call.prompt_len - self.found) * <int64_t>sizeof(token_t)
        if self.n_logprobs:
            call.logprobs = call.out + call.out_len * <int64_t>sizeof(token_t)
        call.trainable, call.stop = trainable, stop
        call.use_tool, call.ill_formed = use_tool, ill_formed
        self.records[index] = call[0]
        with nogil:
            if index == 0:
                _plant(&self.nodes[0], &self.cursor)
            _insert(
                &self.records[0], &self.nodes[0], &self.cursor, &self.ends[0],
                <int32_t>index, &reached, &had,
            )
        self.taken = None
        self.n_calls = index + 1
        return (
            self.base,
            self.found,
            self.base < 0 or self.found == _held_len(&self.records[self.base]),
        )


cdef int64_t _take_ids(const token_t* ids, token_t* copy, pos_t n) noexcept nogil:
    """Copy token ids; the index of the first negative one of the copy, or -1."""
    cdef pos_t i
    cdef token_t bits = 0
    for i in range(n):
        copy[i] = ids[i]
        bits |= copy[i]
    if bits >= 0:
        return -1
    i = 0
    while copy[i] >= 0:
        i += 1
    return i


cdef int64_t _take_logprobs(
    const float* numbers, float* copy, pos_t n, float low, float high
) noexcept nogil:
    """Copy logprobs; the index of the first of the copy not in (low, high], or -1."""
    cdef pos_t i
    cdef bint within = True
    for i in range(n):
        copy[i] = numbers[i]
        within &= (copy[i] > low) & (copy[i] <= high)
    if within:
        return -1
    i = 0
    while low < copy[i] <= high:
        i += 1
    return i


# ---
# Ranges of paths, copied from the forest, in O(tokens written + nodes of the paths).
#
# Lists of messages and rows of the suffix layout are copied in the same way, as such paths.

cdef void _copy_path(
    CallForest forest, int32_t end, pos_t start, pos_t stop, token_t* ids, int32_t* chain,
    bint uncached,
) noexcept nogil:
    """Write tokens start:stop of the path that ends at the stop of ``end``, first to last.

    Writing from last to first takes a fifth longer. ``chain`` is scratch with an entry per
    node of the forest.
    """
    cdef const Node* nodes = forest.nodes
    cdef int64_t n = 0
    cdef pos_t low, high
    while nodes[end].parent >= 0 and nodes[end].stop > start:
        chain[n] = end
        n += 1
        end = nodes[end].parent
    while n > 0:
        n -= 1
        end = chain[n]
        low = max(nodes[end].start, start)
        high = min(nodes[end].stop, stop)
        if low < high:
            _copy(&forest.calls[nodes[end].source], ids + (low - start), low, high, uncached)


def copy_path(
    CallForest forest not None, int64_t call, int64_t start, token_t[::1] out not None
):
    """Copy as many tokens of a call's path (prompt, then output) from start on as fit ``out``."""
    cdef int64_t n = out.shape[0], depth = 0
    cdef int32_t node
    if not 0 <= call < forest.n_calls:
        raise LayoutError(f"call is {call}: expected one of {forest.n_calls}")
    if not 0 <= start <= _held_len(&forest.calls[call]) - n:
        raise LayoutError(
            f"{n} tokens from {start} on: the path has {_held_len(&forest.calls[call])}"
        )
    node = forest.ends[call]
    while node >= 0:
        node = forest.nodes[node].parent
        depth += 1
    cdef int32_t[::1] chain = empty(depth, "i4")
    if n:
        with nogil:
            _copy_path(
                forest, forest.ends[call], start, start + n, &out[0], &chain[0], False
            )


def copy_prompts(
    CallForest forest not None,
    const pos_t[::1] starts not None,
    const pos_t[::1] offsets not None,
    token_t[::1] out not None,
):
    """Write ``starts[i]:`` of each call's prompt to ``out[offsets[i]:offsets[i + 1]]``."""
    cdef int64_t n_calls = forest.n_calls, i
    cdef pos_t n
    _check_length("starts", starts.shape[0], n_calls)
    _check_length("offsets", offsets.shape[0], n_calls + 1)
    if offsets[0] != 0 or offsets[n_calls] > out.shape[0]:
        raise LayoutError(f"offsets leave no room: {out.shape[0]} entries in all")
    for i in range(n_calls):
        n = forest.calls[i].prompt_len
        if not 0 <= starts[i] <= n or offsets[i + 1] - offsets[i] != n - starts[i]:
            raise LayoutError(f"offsets[{i}] does not fit the prompt of {n} from {starts[i]} on")
    cdef int32_t[::1] chain = empty(forest.n_nodes, "i4")
    with nogil:
        for i in range(n_calls):
            n = forest.calls[i].prompt_len
            if starts[i] < n:
                _copy_path(
                    forest, forest.ends[i], starts[i], n, &out[offsets[i]], &chain[0], False
                )

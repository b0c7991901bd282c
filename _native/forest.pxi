"""Longest common prefix of two arrays of token ids, in O(its length).

Comparing four pages at a time is kept for data in RAM, where it is 1.0 to 1.4 times as fast as
memcmp, depending on the machine (docs/benchmarks.md, prefix compare).
"""

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>

    #define TRAJKIT_PAGE 4096
    #define TRAJKIT_PAGES 4
    #define TRAJKIT_PAGES_BYTES (TRAJKIT_PAGES * TRAJKIT_PAGE)

    #if defined(__GNUC__)
    typedef uint64_t trajkit_lanes __attribute__((vector_size(16), aligned(1), may_alias));

    /* Whether two blocks of TRAJKIT_PAGES_BYTES are equal: a line of each page in turn. */
    static int trajkit_same_pages(const char *a, const char *b) {
        trajkit_lanes differ = {0, 0};
        for (size_t line = 0; line < TRAJKIT_PAGE; line += 64) {
            for (size_t page = 0; page < TRAJKIT_PAGES_BYTES; page += TRAJKIT_PAGE) {
                const char *p = a + page + line, *q = b + page + line;
                __builtin_prefetch(p + TRAJKIT_PAGES_BYTES);
                __builtin_prefetch(q + TRAJKIT_PAGES_BYTES);
                for (size_t k = 0; k < 64; k += sizeof(trajkit_lanes))
                    differ |= *(const trajkit_lanes *)(p + k) ^ *(const trajkit_lanes *)(q + k);
            }
        }
        return (differ[0] | differ[1]) == 0;
    }
    #else
    static int trajkit_same_pages(const char *a, const char *b) {
        return memcmp(a, b, TRAJKIT_PAGES_BYTES) == 0;
    }
    #endif
    """
    enum:
        TRAJKIT_PAGES_BYTES
    void __builtin_prefetch(const void* address) nogil
    bint trajkit_same_pages(const char* a, const char* b) noexcept nogil

cdef enum:  # in tokens
    PAGES = TRAJKIT_PAGES_BYTES // 4
    NEAR = 256  # compared before pages: most arrays that differ do so at their start


cdef pos_t _lcp(const token_t* a, const token_t* b, pos_t n) noexcept nogil:
    """First index in [0, n) where a and b differ; n when they agree throughout."""
    # The processor's prefetcher stops at the end of each page. Comparing four pages at a time
    # keeps it busy and more of memory in flight than one run of addresses does
    # (benchmarks/compare.py compares it with memcmp). A block that differs is halved until the
    # position is found.
    cdef pos_t i = 0, block = min(n, NEAR), half
    if memcmp(a, b, block * sizeof(token_t)) == 0:
        i = block
        block = PAGES
        while n - i >= block and trajkit_same_pages(<const char*>(a + i), <const char*>(b + i)):
            i += block
        if n - i < block:
            block = n - i
            if memcmp(a + i, b + i, block * sizeof(token_t)) == 0:
                return n
    # a[i:i + block] differs somewhere
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


# ---
# The calls of a table with the forest of their paths, as most kernels take them.
#
# Checks the layout of the four arrays once, in O(calls); kernels then read them unchecked.

@cython.auto_pickle(False)
@cython.final
cdef class CallForest:
    """Calls, their sessions, and the forest that `grow_forest` made of their paths."""
    cdef const Call[::1] calls
    cdef const int64_t[::1] session_offsets
    cdef const Node[::1] nodes
    cdef const int32_t[::1] ends
    cdef int64_t n_calls, n_sessions, n_nodes

    def __cinit__(
        self,
        const Call[::1] calls not None,
        const int64_t[::1] session_offsets not None,
        const Node[::1] nodes not None,
        const int32_t[::1] ends not None,
    ):
        _check_sessions(session_offsets, calls.shape[0])
        _check_length("ends", ends.shape[0], calls.shape[0])
        _check_forest(nodes, ends)
        self.calls, self.session_offsets = calls, session_offsets
        self.nodes, self.ends = nodes, ends
        self.n_calls, self.n_nodes = calls.shape[0], nodes.shape[0]
        self.n_sessions = session_offsets.shape[0] - 1


cdef struct Paths:            # the arrays of a CallForest with at least one call
    const Call* calls
    const int64_t* session_offsets
    const Node* nodes
    const int32_t* ends
    int64_t n_calls
    int64_t n_sessions
    int64_t n_nodes


cdef Paths _paths(CallForest forest):
    cdef Paths paths
    paths.calls = &forest.calls[0]
    paths.session_offsets = &forest.session_offsets[0]
    paths.nodes = &forest.nodes[0]
    paths.ends = &forest.ends[0]
    paths.n_calls, paths.n_nodes = forest.n_calls, forest.n_nodes
    paths.n_sessions = forest.n_sessions
    return paths


# ---
# A session that grows call by call: where a prompt leaves its paths, and what is new.
#
# Fills call records and nodes of the forest, one call at a time. Each call costs O(tokens of its
# prompt compared at the speed of memory + new tokens + log(nodes on the path)).

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
    cdef pos_t found, prompt_len, n_new, out_len, n_logprobs
    cdef readonly int32_t base  # of the call that was taken: see `insert`
    cdef int64_t[3] faulty

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
        cdef int64_t n = self.records.shape[0], wanted = self.prompt_len + self.out_len
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
        cdef int32_t slot, node
        self.cursor.path, self.cursor.path_room = NULL, 0
        self.path = None
        if length > self.short * self.records.shape[0]:
            return
        self.path = empty(length + length // 8 + 16, "i4")
        self.cursor.path, self.cursor.path_room = &self.path[0], self.path.shape[0]
        for slot in range(1, self.cursor.depth):
            node = self.stack[slot]
            check_write("path", 0, self.nodes[node].stop, self.path.shape[0])
            _copy(
                &self.records[self.nodes[node].source], &self.path[self.nodes[node].start],
                self.nodes[node].start, self.nodes[node].stop,
            )

    cdef int32_t _slot_of(self, pos_t position) noexcept nogil:
        """The slot of the node that contains a position, or ends there."""
        cdef int32_t low = 0, high = self.cursor.depth - 1, middle
        while low < high:
            middle = (low + high) // 2
            if self.nodes[self.stack[middle]].stop < position:
                low = middle + 1
            else:
                high = middle
        return low

    def take(
        self, const token_t[::1] prompt not None, const token_t[::1] output not None,
        const float[::1] logprobs, float low, float high,
    ):
        """Find where a prompt departs from the paths, and copy what the call brings.

        Returns the ids of the prompt that no path has, those of the output, and logprobs (one
        per output id, or None): four bytes each. `fault` tells whether they keep the rules:
        ids are not negative, a logprob is above low and at most high. Do not write to the
        arguments during the call.
        """
        cdef:
            pos_t n_logprobs = 0 if logprobs is None else logprobs.shape[0]
            const token_t* at = &prompt[0] if prompt.shape[0] else NULL
            const token_t* said = &output[0] if output.shape[0] else NULL
            const float* numbers = &logprobs[0] if n_logprobs else NULL
            token_t* copy
            bytes taken
        self.taken, self.n_logprobs = None, n_logprobs
        self.prompt_len, self.out_len = prompt.shape[0], output.shape[0]
        if self.prompt_len + self.out_len > INT32_MAX:  # positions of rows are int32
            raise InvalidTurnsError(
                f"the call has {self.prompt_len} prompt ids and {self.out_len} output ids: "
                f"together at most {<int64_t>INT32_MAX}"
            )
        self.found = self._find(at, self.prompt_len, said, self.out_len)
        self.n_new = self.prompt_len - self.found
        taken = PyBytes_FromStringAndSize(
            NULL, (self.n_new + self.out_len + n_logprobs) * <pos_t>sizeof(token_t)
        )
        copy = <token_t*>PyBytes_AS_STRING(taken)
        self.faulty[0] = self.faulty[1] = self.faulty[2] = -1
        with nogil:
            if self.n_new:
                self.faulty[0] = _take_ids(at + self.found, copy, self.n_new)
            if self.out_len:
                self.faulty[1] = _take_ids(said, copy + self.n_new, self.out_len)
            if n_logprobs:
                self.faulty[2] = _take_logprobs(
                    numbers, <float*>(copy + self.n_new + self.out_len), n_logprobs, low, high
                )
        self.taken = taken
        return taken

    @property
    def fault(self):
        """The first value of the call that was taken which breaks its rule, or None.

        0: of the prompt, 1: of the output, 2: of logprobs; its place there; and its place in
        the bytes, in values.
        """
        if self.faulty[0] >= 0:
            return 0, self.found + self.faulty[0], self.faulty[0]
        if self.faulty[1] >= 0:
            return 1, self.faulty[1], self.n_new + self.faulty[1]
        if self.faulty[2] >= 0:
            return 2, self.faulty[2], self.n_new + self.out_len + self.faulty[2]
        return None

    cdef pos_t _find(
        self, const token_t* prompt, pos_t n, const token_t* output, pos_t n_output
    ) except -1:
        """How many tokens of a prompt start like a path; `base` is the first call with them.

        Of calls that have the complete prompt, it is the first of those that share the longest
        prefix of the output; -1: none shares a token.
        """
        cdef:
            pos_t position = 0
            int32_t node, slot
        self.base = -1
        if self.n_calls == 0 or n == 0:
            return 0
        with nogil:
            if self.cursor.path != NULL:
                position = _lcp(self.cursor.path, prompt, min(self.cursor.path_len, n))
            else:
                position = self._surely(prompt, n)
            slot = self._slot_of(position)
            node = self.stack[slot]
            position = self._descend(&node, slot, position, prompt, n)
            if position == n and n_output:
                self._descend(&node, self.cursor.depth, n, output - n, n + n_output)
        self.base = self.nodes[node].source
        return position

    cdef pos_t _descend(
        self, int32_t* node, int32_t slot, pos_t position, const token_t* tokens, pos_t n
    ) noexcept nogil:
        """How far tokens repeat a path that contains them up to a position in a node.

        ``node`` becomes the last one of which they have a token; ``slot`` is its place on the
        stack, if it is there.
        """
        cdef:
            int32_t child, depth = self.cursor.depth
            const Node* nodes = &self.nodes[0]
        if position < nodes[node[0]].stop:
            position += self._match_node(node[0], position, tokens, n)
        while position < n and position == nodes[node[0]].stop:
            # most prompts continue the previous path
            slot += 1
            child = self.stack[slot] if slot < depth else -1
            if child < 0 or nodes[child].first != tokens[position]:
                depth = 0
                child = nodes[node[0]].child
                while child >= 0 and nodes[child].first != tokens[position]:
                    child = nodes[child].sibling
                if child < 0:
                    break
            position += self._match_node(child, position, tokens, n)
            node[0] = child
        return position

    cdef const token_t* _run(self, int32_t node) noexcept nogil:
        """A node's tokens. The output directly follows the ids of the prompt."""
        cdef const Call* call = &self.records[self.nodes[node].source]
        return <const token_t*><intptr_t>call.own + (self.nodes[node].start - call.own_start)

    cdef pos_t _match_node(
        self, int32_t node, pos_t position, const token_t* prompt, pos_t n
    ) noexcept nogil:
        """How many tokens from a position on, within a node, the prompt has as well."""
        return _lcp(
            self._run(node) + (position - self.nodes[node].start), prompt + position,
            min(self.nodes[node].stop, n) - position,
        )

    cdef pos_t _surely(self, const token_t* prompt, pos_t n) noexcept nogil:
        """Lower bound of the common prefix with the previous path, rounded down to a node."""
        cdef:
            pos_t position = 0
            int32_t slot, node, depth = self.cursor.depth
        for slot in range(1, depth):
            node = self.stack[slot]
            # nodes and records are scattered: prefetch them
            if slot + 8 < depth:
                __builtin_prefetch(&self.nodes[self.stack[slot + 8]])
            if slot + 4 < depth:
                __builtin_prefetch(&self.records[self.nodes[self.stack[slot + 4]].source])
            if self.nodes[node].stop > n or memcmp(
                self._run(node), prompt + position,
                (self.nodes[node].stop - position) * sizeof(token_t),
            ) != 0:
                break
            position = self.nodes[node].stop
        return position

    def insert(self, bint trainable, bint use_tool, bint ill_formed, uint8_t stop):
        """Add the call that was taken. Its bytes must stay for as long as this object is used.

        Returns the call that had the prompt's first ``shared`` tokens and the longest prefix of
        the output after them (-1: no call), ``shared``, and whether these are all tokens of that
        call. Without such a call the last is true.
        """
        cdef:
            Call* call
            int64_t index = self.n_calls
            pos_t reached = 0
            int32_t had = -1
        if self.taken is None:
            raise LayoutError("no call was taken")
        self._make_room()
        call = &self.records[index]
        memset(call, 0, sizeof(Call))
        call.own = <int64_t><intptr_t>PyBytes_AS_STRING(self.taken)
        call.own_start = self.found
        call.prompt_len = self.prompt_len
        call.out = call.own + self.n_new * <int64_t>sizeof(token_t)
        call.out_len = self.out_len
        if self.n_logprobs:
            call.logprobs = call.out + self.out_len * <int64_t>sizeof(token_t)
        call.base = self.base
        call.trainable, call.stop = trainable, stop
        call.use_tool, call.ill_formed = use_tool, ill_formed
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
# Prompts of calls, from the forest of token paths, in O(tokens written + nodes of the paths).
#
# Lists of messages and rows of the suffix layout are copied in the same way, as such paths.

cdef void _copy_path(
    const Paths* paths, int32_t end, pos_t start, pos_t stop, token_t* ids, int32_t* chain,
    bint uncached,
) noexcept nogil:
    """Write tokens start:stop of the path that ends at the stop of ``end``, first to last.

    Writing from last to first takes a fifth longer. ``chain`` is scratch with an entry per
    node of the forest.
    """
    cdef const Node* nodes = paths.nodes
    cdef int32_t node = end
    cdef int64_t n = 0
    cdef pos_t low, high
    while nodes[node].parent >= 0 and nodes[node].stop > start:
        chain[n] = node
        n += 1
        node = nodes[node].parent
    while n > 0:
        n -= 1
        node = chain[n]
        low = max(nodes[node].start, start)
        high = min(nodes[node].stop, stop)
        if low < high:
            _copy(&paths.calls[nodes[node].source], ids + (low - start), low, high, uncached)


def copy_prompts(
    CallForest forest not None,
    const pos_t[::1] starts not None,
    const pos_t[::1] offsets not None,
    token_t[::1] out not None,
):
    """Write ``starts[i]:`` of each call's prompt to ``out[offsets[i]:offsets[i + 1]]``."""
    cdef int64_t n_calls = forest.n_calls, i
    cdef Paths paths
    cdef const Call* call

    _check_length("starts", starts.shape[0], n_calls)
    _check_length("offsets", offsets.shape[0], n_calls + 1)
    if offsets[0] != 0 or offsets[n_calls] > out.shape[0]:
        raise LayoutError(f"offsets leave no room: {out.shape[0]} entries in all")
    if n_calls == 0:
        return
    paths = _paths(forest)
    for i in range(n_calls):
        call = &paths.calls[i]
        if not 0 <= starts[i] <= call.prompt_len:
            raise LayoutError(f"starts[{i}] = {starts[i]}: the prompt has {call.prompt_len} tokens")
        if offsets[i + 1] - offsets[i] != call.prompt_len - starts[i]:
            raise LayoutError(f"offsets[{i}] does not fit the prompt from {starts[i]} on")
    cdef int32_t[::1] chain = empty(forest.n_nodes, "i4")
    with nogil:
        for i in range(n_calls):
            call = &paths.calls[i]
            if starts[i] < call.prompt_len:
                _copy_path(
                    &paths, paths.ends[i], starts[i], call.prompt_len, &out[offsets[i]],
                    &chain[0], False,
                )

"""Longest common prefix of two arrays, in O(its length)."""

cdef enum:  # in bytes
    NEAR = 1024  # compared first: most arrays that differ do so at their start


cdef pos_t _same_bytes(const char* a, const char* b, pos_t n) noexcept nogil:
    """First index in [0, n) where a and b differ; n when they agree throughout."""
    cdef pos_t i = 0, block = min(n, NEAR), half
    if memcmp(a, b, block) == 0:
        i = block
        block = n - i
        if memcmp(a + i, b + i, block) == 0:
            return n
    # a[i:i + block] differs somewhere: halve it until the position is found
    while block > 16:
        half = block // 2
        if memcmp(a + i, b + i, half) == 0:
            i += half
            block -= half
        else:
            block = half
    while a[i] == b[i]:
        i += 1
    return i


cdef inline pos_t _lcp(const token_t* a, const token_t* b, pos_t n) noexcept nogil:
    """First index in [0, n) where the tokens of a and b differ; n when they agree."""
    cdef pos_t size = sizeof(token_t)
    return _same_bytes(<const char*>a, <const char*>b, n * size) // size


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
# inserted in order, each from where it leaves the path of its base or, where all of its prompt
# is stored, that of the call before it. So comparing prompts costs O(prompt tokens) at the speed
# of memory, and everything else O(new tokens + nodes between the two ends).

cdef enum:
    MAX_CALLS = (1 << 30) - 1  # of one table: two nodes each are numbered by int32


cdef struct Tree:             # the forest while it grows
    const Call* calls
    int32_t* ends             # per call: the node at whose stop its path ends
    Node* nodes
    int64_t node_room
    int32_t n_nodes           # the next unused node


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


cdef pos_t _match(
    const Call* call, const Call* other, pos_t position, pos_t stop
) noexcept nogil:
    """First position, from this one up to stop, where the two paths differ; stop if none."""
    cdef pos_t n, m, same
    cdef const token_t* a
    cdef const token_t* b
    while position < stop:
        a = _tokens_at(call, position, &n)
        b = _tokens_at(other, position, &m)
        n = min(min(n, m), stop - position)
        same = _lcp(a, b, n)
        position += same
        if same < n:
            break
    return position


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


cdef int32_t _add_node(
    Tree* tree, int32_t parent, pos_t start, pos_t stop, int32_t source, token_t first
) noexcept nogil:
    cdef int32_t index = tree.n_nodes
    cdef Node* node = &tree.nodes[index]
    check_write("nodes", index, 1, tree.node_room)
    tree.n_nodes += 1
    node.start = start
    node.stop = stop
    node.parent = parent
    node.source = source
    node.first = first
    node.child = -1
    node.sibling = -1
    return index


cdef int32_t _plant(Tree* tree) noexcept nogil:
    """Start a session: a root that ends at 0 and starts before it."""
    return _add_node(tree, -1, -1, 0, -1, -1)


cdef int32_t _split(Tree* tree, int32_t node, pos_t position) noexcept nogil:
    """Cut a node at position; returns the new node above.

    The lower part keeps its number, so that paths that end at its stop still do.
    """
    cdef Node* nodes = tree.nodes
    cdef int32_t above = nodes[node].parent, child = nodes[above].child, upper
    upper = _add_node(
        tree, above, nodes[node].start, position, nodes[node].source, nodes[node].first
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
    nodes[node].first = _token(&tree.calls[nodes[node].source], position)
    return upper


cdef pos_t _follow(
    const Tree* tree, const Call* call, pos_t position, int32_t* end
) noexcept nogil:
    """How many of a call's first tokens an earlier path has; ``end`` is the last node with one.

    The first ``position`` of them are those of the path to ``end``, as it comes.
    """
    cdef const Node* nodes = tree.nodes
    cdef pos_t held_len = _held_len(call)
    cdef int32_t node = end[0]
    cdef token_t token
    while nodes[node].start >= position:
        node = nodes[node].parent
    while True:
        end[0] = node
        position = _match(
            call, &tree.calls[nodes[node].source], position, min(nodes[node].stop, held_len)
        )
        if position < nodes[node].stop or position == held_len:
            return position
        token = _token(call, position)
        node = nodes[node].child
        while node >= 0 and nodes[node].first != token:
            node = nodes[node].sibling
        if node < 0:
            return position


cdef void _insert(
    Tree* tree, int32_t index, int32_t before, int32_t root, pos_t* shared, int32_t* shared_with
) noexcept nogil:
    """Add one call to the forest. ``before`` is the one before it in its session, or -1.

    ``shared`` becomes the number of its first tokens that an earlier path has, and
    ``shared_with`` a call with these (-1: none). Adds two nodes at most.
    """
    cdef const Call* call = &tree.calls[index]
    cdef const Call* previous = &tree.calls[before] if before >= 0 else NULL
    cdef pos_t held_len = _held_len(call), position = 0
    cdef int32_t node = root, leaf

    if call.base >= 0:
        position = call.own_start
        node = tree.ends[call.base]
    elif previous != NULL and previous.base < 0:
        position = _match(call, previous, 0, min(held_len, _held_len(previous)))
        node = tree.ends[before]
    position = _follow(tree, call, position, &node)
    if position < tree.nodes[node].stop:
        node = _split(tree, node, position)
    shared[0] = position
    shared_with[0] = tree.nodes[node].source
    if position < held_len:
        leaf = _add_node(tree, node, position, held_len, index, _token(call, position))
        tree.nodes[leaf].sibling = tree.nodes[node].child
        tree.nodes[node].child = leaf
        node = leaf
    tree.ends[index] = node


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
        cdef int64_t n_calls = self.n_calls, s, i
        cdef int32_t root, before
        cdef Tree tree
        cdef Node[::1] nodes = empty(2 * n_calls + self.n_sessions, DTYPES["Node"])
        cdef int32_t[::1] ends = empty(n_calls, "i4"), shared_with = empty(n_calls, "i4")
        cdef pos_t[::1] shared = empty(n_calls, "i8")
        tree.n_nodes, tree.node_room = 0, nodes.shape[0]
        if n_calls:
            tree.calls, tree.ends, tree.nodes = self.calls, &ends[0], &nodes[0]
            self.ends, self.nodes = tree.ends, tree.nodes
            with nogil:
                for s in range(self.n_sessions):
                    root, before = _plant(&tree), -1
                    for i in range(self.session_offsets[s], self.session_offsets[s + 1]):
                        _insert(&tree, <int32_t>i, before, root, &shared[i], &shared_with[i])
                        before = <int32_t>i
        self.n_nodes = tree.n_nodes
        self.arrays = shared.base, shared_with.base, nodes.base[: tree.n_nodes], ends.base


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
# Each call costs O(tokens of its prompt compared at the speed of memory + new tokens + nodes on
# the path).

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
    refused.
    """
    cdef Call[::1] records
    cdef Node[::1] nodes
    cdef int32_t[::1] ends
    cdef readonly int64_t n_calls
    cdef Tree tree
    # the call that was taken and not inserted, if there is one
    cdef bytes taken
    cdef Call call            # addresses and lengths of what the caller gave
    cdef pos_t found, n_logprobs
    cdef readonly int32_t base  # see `insert`
    cdef readonly object fault  # see `take`

    def __cinit__(self):
        memset(&self.tree, 0, sizeof(Tree))
        self.records, self.nodes = empty(0, DTYPES["Call"]), empty(0, DTYPES["Node"])
        self.ends = empty(0, "i4")

    @property
    def calls(self):
        """The records of the calls, dtype Call."""
        return self.records.base[: self.n_calls]

    cdef _make_room(self):
        """Make room for the call that was taken."""
        cdef int64_t n = self.records.shape[0]
        if self.n_calls < n:
            return
        n += n // 8 + 16
        # all or nothing, where memory is short
        records, nodes = _longer(self.records.base, n), _longer(self.nodes.base, 2 * n + 1)
        ends = _longer(self.ends.base, n)
        self.records, self.nodes, self.ends = records, nodes, ends
        self.tree.calls, self.tree.ends = &self.records[0], &self.ends[0]
        self.tree.nodes, self.tree.node_room = &self.nodes[0], 2 * n + 1

    cdef pos_t _find(self) except -1:
        """How many of the call's prompt ids a path starts with; `base` is the first with them.

        Of calls that have the complete prompt, it is the first of those that share the longest
        prefix of the output; -1: none shares a token.
        """
        cdef pos_t position
        cdef int32_t node = 0  # the root
        self.base = -1
        if self.n_calls == 0 or self.call.prompt_len == 0:
            return 0
        with nogil:
            position = _follow(&self.tree, &self.call, 0, &node)
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
                _plant(&self.tree)
            _insert(&self.tree, <int32_t>index, -1, 0, &reached, &had)
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
# Lists of messages are copied in the same way, as such paths.

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


def copy_ranges(
    CallForest forest not None,
    const int64_t[::1] calls not None,
    const pos_t[::1] starts not None,
    const pos_t[::1] offsets not None,
    token_t[::1] out not None,
):
    """Write the ids of each call's path, from ``starts[i]`` on, to ``out`` at ``offsets[i]``."""
    cdef int64_t n_ranges = calls.shape[0], i
    cdef pos_t n
    _check_length("starts", starts.shape[0], n_ranges)
    _check_length("offsets", offsets.shape[0], n_ranges + 1)
    if offsets[0] != 0 or offsets[n_ranges] > out.shape[0]:
        raise LayoutError(f"offsets leave no room: {out.shape[0]} entries in all")
    for i in range(n_ranges):
        if not 0 <= calls[i] < forest.n_calls:
            raise LayoutError(f"call is {calls[i]}: expected one of {forest.n_calls}")
        n = offsets[i + 1] - offsets[i]
        if n < 0 or not 0 <= starts[i] <= _held_len(&forest.calls[calls[i]]) - n:
            raise LayoutError(
                f"{n} tokens from {starts[i]} on: the path has "
                f"{_held_len(&forest.calls[calls[i]])}"
            )
    cdef int32_t[::1] chain = empty(forest.n_nodes, "i4")
    with nogil:
        for i in range(n_ranges):
            n = offsets[i + 1] - offsets[i]
            if n > 0:
                _copy_path(
                    forest, forest.ends[calls[i]], starts[i], starts[i] + n, &out[offsets[i]],
                    &chain[0], False,
                )

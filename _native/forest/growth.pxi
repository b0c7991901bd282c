"""A session that grows call by call: where a prompt leaves its paths, and what is new.

Fills call records and nodes of the forest, one call at a time. Each call costs O(tokens of its
prompt compared at the speed of memory + new tokens + log(nodes on the path)).
"""


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

    def match(self, const token_t[::1] prompt not None):
        """The first call with the longest prefix of a prompt (-1: none), and its length."""
        cdef pos_t n = prompt.shape[0]
        cdef pos_t shared = self._find(&prompt[0] if n else NULL, n, NULL, 0)
        return self.base, shared

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

"""A session that grows call by call: where a prompt leaves its paths, and what is new.

Fills call records and nodes of the forest, one call at a time. Each call costs O(tokens of its
prompt compared at the speed of memory + new tokens + log(nodes on the path)).
"""


@cython.auto_pickle(False)
@cython.final
cdef class Growth:
    """The forest of a session's paths, grown call by call.

    It keeps the arrays that Python made (`attach`), whose layout is checked once. A call is
    taken and then inserted; between the two nothing has changed, and it may be refused.
    """
    cdef Call[::1] calls
    cdef Node[::1] nodes
    cdef int32_t[::1] stack
    cdef int32_t[::1] ends
    cdef token_t[::1] path
    cdef int64_t n_calls
    cdef int64_t n_room
    cdef Cursor cursor
    # the call that was taken and not inserted, if there is one
    cdef bytes taken
    cdef pos_t found, prompt_len, n_new, out_len, n_logprobs
    cdef int32_t base
    cdef int64_t[3] faulty

    def __cinit__(self):
        self.n_calls = self.n_room = 0
        memset(&self.cursor, 0, sizeof(Cursor))

    def attach(
        self,
        Call[::1] calls not None,
        Node[::1] nodes not None,
        int32_t[::1] stack not None,
        int32_t[::1] ends not None,
    ):
        """Use these arrays from now on; they begin with the contents of the previous ones.

        For n calls, nodes and stack have 2 * n + 1 entries. ``ends`` is as for `grow_forest`.
        """
        cdef int64_t n = calls.shape[0]
        _check_length("calls", n, self.n_calls)
        _check_length("nodes", nodes.shape[0], 2 * n + 1)
        _check_length("stack", stack.shape[0], 2 * n + 1)
        _check_length("ends", ends.shape[0], n)
        self.calls, self.nodes, self.stack, self.ends = calls, nodes, stack, ends
        self.n_room = n
        self.cursor.node_room = nodes.shape[0]
        self.cursor.stack_room = stack.shape[0]
        if n:
            self.cursor.stack = &stack[0]

    @property
    def room(self):
        """Calls for which there is room."""
        return self.n_room

    @property
    def length(self):
        """Tokens of the call inserted last."""
        return self.cursor.path_len

    def hold_path(self, token_t[::1] path not None):
        """Keep a contiguous copy of the last inserted path, or (empty) keep none.

        It is compared in one pass; without it, calls with few new tokens are compared one by one.
        It needs room for every call that is inserted later: `insert` refuses one that is longer.
        """
        cdef int32_t slot, node
        if path.shape[0]:
            _check_length("path", path.shape[0], self.cursor.path_len)
        self.path = path
        self.cursor.path_room = path.shape[0]
        self.cursor.path = &path[0] if path.shape[0] else NULL
        if self.cursor.path == NULL:
            return
        for slot in range(1, self.cursor.depth):
            node = self.stack[slot]
            check_write("path", 0, self.nodes[node].stop, path.shape[0])
            _copy(
                &self.calls[self.nodes[node].source], &path[self.nodes[node].start],
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

    cpdef bytes take(
        self, const token_t[::1] prompt, const token_t[::1] output,
        const float[::1] logprobs, float low, float high,
    ):
        """Find where a prompt departs from the paths, and copy what the call brings.

        Nothing counts until `insert`. Returns the ids of the prompt that no path has, those of the
        output, and its logprobs, four bytes each; `fault` tells whether they keep the rules: a
        logprob is above low and at most high. Do not write to the arguments during the call.
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
        self.found = self._find(at, self.prompt_len)
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

        0 of the prompt, 1 of the output, 2 of logprobs; its place there; its place in the bytes.
        """
        if self.faulty[0] >= 0:
            return 0, self.found + self.faulty[0], self.faulty[0]
        if self.faulty[1] >= 0:
            return 1, self.faulty[1], self.n_new + self.faulty[1]
        if self.faulty[2] >= 0:
            return 2, self.faulty[2], self.n_new + self.out_len + self.faulty[2]
        return None

    def match(self, const token_t[::1] prompt not None):
        """The first call (-1: none) that has the longest prefix of a prompt, and its length."""
        cdef pos_t n = prompt.shape[0]
        cdef pos_t shared = self._find(&prompt[0] if n else NULL, n)
        return self.base, shared

    cdef bint any_fault(self) noexcept:
        return self.faulty[0] >= 0 or self.faulty[1] >= 0 or self.faulty[2] >= 0

    cdef bint lacks_room(self) noexcept:
        """Whether the call that was taken has no room."""
        return self.n_calls >= self.n_room or (
            self.cursor.path != NULL
            and self.path.shape[0] < self.prompt_len + self.out_len
        )

    cdef pos_t _find(self, const token_t* prompt, pos_t n) except -1:
        """How many tokens of a prompt start like a path; `base` is a call that has them.

        It is the call that had them first; -1: none shares a token.
        """
        cdef:
            pos_t position = 0
            int32_t node, child, slot = 0, depth = self.cursor.depth
            const Node* nodes
        self.base = -1
        if self.n_calls == 0 or n == 0:
            return 0
        nodes = &self.nodes[0]
        node = self.stack[0]
        with nogil:
            if self.cursor.path != NULL:
                position = _lcp(self.cursor.path, prompt, min(self.cursor.path_len, n))
            else:
                position = self._surely(prompt, n)
            slot = self._slot_of(position)
            node = self.stack[slot]
            if position < nodes[node].stop:
                position += self._match_node(node, position, prompt, n)
            while position < n and position == nodes[node].stop:
                # most prompts continue the previous path
                slot += 1
                child = self.stack[slot] if slot < depth else -1
                if child < 0 or nodes[child].first != prompt[position]:
                    depth = 0
                    child = nodes[node].child
                    while child >= 0 and nodes[child].first != prompt[position]:
                        child = nodes[child].sibling
                    if child < 0:
                        break
                position += self._match_node(child, position, prompt, n)
                node = child
        self.base = nodes[node].source
        return position

    cdef const token_t* _run(self, int32_t node) noexcept nogil:
        """A node's tokens. The output directly follows the ids of the prompt."""
        cdef const Call* call = &self.calls[self.nodes[node].source]
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
        """How far the prompt repeats the previous path, by complete nodes.

        It may repeat more than this.
        """
        cdef:
            pos_t position = 0
            int32_t slot, node, depth = self.cursor.depth
        for slot in range(1, depth):
            node = self.stack[slot]
            # they lie elsewhere than those before them: nothing else would have them ready
            if slot + 8 < depth:
                __builtin_prefetch(&self.nodes[self.stack[slot + 8]])
            if slot + 4 < depth:
                __builtin_prefetch(&self.calls[self.nodes[self.stack[slot + 4]].source])
            if self.nodes[node].stop > n or memcmp(
                self._run(node), prompt + position,
                (self.nodes[node].stop - position) * sizeof(token_t),
            ) != 0:
                break
            position = self.nodes[node].stop
        return position

    def insert(self):
        """Add the call that was taken. Its bytes must stay for as long as this object is used.

        Returns its base: the call that had the longest prefix of the prompt and then of the
        output, or -1; how many tokens of the prompt were there before; and whether these are all
        of the base's prompt and output, or there is no base.
        """
        cdef:
            Call* call
            int64_t index = self.n_calls
            pos_t reached = 0
            int32_t had = -1
        if self.taken is None:
            raise LayoutError("no call was taken")
        if index >= self.n_room:
            raise LayoutError(f"there is room for {self.n_room} calls, and they are there")
        if self.cursor.path != NULL:
            _check_length("path", self.path.shape[0], self.prompt_len + self.out_len)
        call = &self.calls[index]
        memset(call, 0, sizeof(Call))
        call.own = <int64_t><intptr_t>PyBytes_AS_STRING(self.taken)
        call.own_start = self.found
        call.prompt_len = self.prompt_len
        call.out = call.own + self.n_new * <int64_t>sizeof(token_t)
        call.out_len = self.out_len
        if self.n_logprobs:
            call.logprobs = call.out + self.out_len * <int64_t>sizeof(token_t)
        call.base = self.base
        with nogil:
            if index == 0:
                _plant(&self.nodes[0], &self.cursor)
            _insert(
                &self.calls[0], &self.nodes[0], &self.cursor, &self.ends[0],
                <int32_t>index, &reached, &had,
            )
        if self.found:
            call.base = self.base = had
        self.taken = None
        self.n_calls = index + 1
        return (
            self.base,
            self.found,
            self.base < 0 or self.found == _held_len(&self.calls[self.base]),
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

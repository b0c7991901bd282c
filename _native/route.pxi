"""Links between calls: why a call has its parent, and what its prompt shares with that call."""

cpdef enum:  # trajkit.schema.LINK_REASONS
    REASON_ROOT, REASON_MESSAGES, REASON_REWRITE, REASON_TOKENS, REASON_PREVIOUS
    REASON_UNROUTED, REASON_HISTORY_REPLACED, REASON_PROMPTS
    REASON_AMBIGUOUS, REASON_SUPERSEDED, REASON_UNRESOLVED_KEPT, REASON_UNRESOLVED
    REASON_UNRESOLVED_AMBIGUOUS, REASON_CHAIN_QUARANTINED, REASON_EMPTY
    REASON_RECORDED, REASON_NO_PARENT
    REASON_REFUSED_TOKENS, REASON_REFUSED_TRUNCATED, REASON_RETRIED


cdef int32_t _prompt_node(CallForest forest, int32_t call) noexcept nogil:
    """The node in which the call's prompt ends; equal prompts end in the same one."""
    cdef int32_t node = forest.ends[call]
    while forest.nodes[node].start >= forest.calls[call].prompt_len:
        node = forest.nodes[node].parent
    return node


cdef _check_call(CallForest forest, int64_t call):
    if not 0 <= call < forest.n_calls:
        raise LayoutError(f"call is {call}: expected one of {forest.n_calls}")


def shared_length(CallForest forest not None, int32_t call, int32_t other):
    """Tokens that the path of a call and the prompt of another one share; 0 if of two sessions."""
    _check_call(forest, call)
    _check_call(forest, other)
    return _shared(forest, call, other)


cdef _check_parents(CallForest forest, const Link[::1] links):
    """Raise unless every parent is another call of the session; they may still be a circle."""
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
    _check_length("links", links.shape[0], forest.n_calls)
    _check_parents(forest, links)
    with nogil:
        for i in range(forest.n_calls):
            links[i].lcp = -1
            if links[i].parent >= 0:
                links[i].lcp = _shared(forest, links[i].parent, <int32_t>i)


# ---
# Which earlier call a call without messages continues, by its tokens.
#
# Its prompt begins with that call's prompt and is longer, or with that call's path. Of several,
# it is the call whose path the prompt repeats for longest; of equals, one that it repeats
# entirely, or else the first with the shortest prompt.
#
# Calls are indexed by the nodes of their path, from the one where their prompt ends to its own
# end. Who looks for a call climbs from the node where its prompt ends, and takes the first call
# it meets. O(nodes climbed), usually one: the prompt begins with the path of the last call.

@cython.auto_pickle(False)
@cython.final
cdef class TokenIndex:
    """The calls that a later call of their session may continue, in the order of the table."""
    cdef CallForest forest
    # per node: the first call whose path ends at its stop, or -1
    cdef int32_t[::1] ended
    # per node: of the calls with a prompt that end there or above and a path that ends there
    # or below, the first with the shortest prompt
    cdef int32_t[::1] replied

    def __cinit__(self, CallForest forest not None):
        self.forest = forest
        self.ended = full(forest.n_nodes, -1, "i4")
        self.replied = full(forest.n_nodes, -1, "i4")

    cdef void _add(self, int32_t call) noexcept nogil:
        cdef const Call* calls = self.forest.calls
        cdef const Node* nodes = self.forest.nodes
        cdef int32_t node = self.forest.ends[call], other
        cdef pos_t prompt_len = calls[call].prompt_len
        if self.ended[node] < 0:
            self.ended[node] = call
        if prompt_len == 0:  # every prompt begins with it
            return
        while nodes[node].stop >= prompt_len:
            other = self.replied[node]
            if other >= 0 and calls[other].prompt_len <= prompt_len:
                return  # the nodes above have that call, too, or a better one
            self.replied[node] = call
            node = nodes[node].parent

    cdef void _clear(self, int32_t call) noexcept nogil:
        """Take every call from the nodes at which this call may be indexed."""
        cdef const Node* nodes = self.forest.nodes
        cdef int32_t node = self.forest.ends[call]
        self.ended[node] = -1
        while node >= 0 and nodes[node].stop >= self.forest.calls[call].prompt_len:
            self.replied[node] = -1
            node = nodes[node].parent

    cdef int32_t _find(self, int32_t call) noexcept nogil:
        cdef const Call* calls = self.forest.calls
        cdef const Node* nodes = self.forest.nodes
        cdef pos_t prompt_len = calls[call].prompt_len
        cdef int32_t node = _prompt_node(self.forest, call), other
        while node >= 0:
            if nodes[node].stop <= prompt_len and self.ended[node] >= 0:
                return self.ended[node]
            other = self.replied[node]
            if other >= 0 and calls[other].prompt_len < prompt_len:
                return other
            node = nodes[node].parent
        return -1

    def add(self, int32_t call):
        """Index a call. Those of a session are added in the order of the table."""
        _check_call(self.forest, call)
        self._add(call)

    def find(self, int32_t call):
        """The call that a call continues, or -1."""
        _check_call(self.forest, call)
        return self._find(call)


# ---
# Which call a call continues: by its chat messages.
#
# Fills links from requests and the forest of token paths. The message tree has one node per
# message. A message that is sent again descends into the first child that equals it, so of equal
# siblings only the first can be found: a hash table over (parent, key) contains those, and a
# list the others, for a rule by which tokens choose among them. Messages that a request shares
# with the previous call, or with its base, are not looked up one by one: equal runs of keys are
# compared as bytes, and the node is reached by climbing from that call. O(new messages + bytes
# of keys compared + nodes of the forest); where calls have no messages, as above,
# and O(calls of the session) after a rewritten call.

cpdef enum:  # trajkit.policies.TieBreak
    TIE_BREAK_FIRST, TIE_BREAK_TOKENS, TIE_BREAK_FULL_PATH

cdef enum:
    KEY_BYTES = 16


cdef inline bint _is_assistant(const Request* request, int64_t own) noexcept nogil:
    """Whether the role of the call's own message number ``own`` is assistant."""
    cdef const int32_t* offsets = <const int32_t*><intptr_t>request.role_offsets
    if offsets[own + 1] - offsets[own] != 9:
        return False
    return memcmp(
        <const char*><intptr_t>request.role_bytes + offsets[own], b"assistant", 9
    ) == 0


cdef int64_t _repeated(const Request* request, const Request* before) noexcept nogil:
    """Messages that two calls, neither with a base, have in common at their start."""
    cdef int64_t n = min(request.n_keys, before.n_keys)
    if n <= 0:
        return 0
    # A key is four tokens long.
    return _lcp(
        <const token_t*><intptr_t>request.keys, <const token_t*><intptr_t>before.keys, 4 * n
    ) // 4


@cython.auto_pickle(False)
@cython.final
cdef class MessageRouter:
    """The message tree of a session, and the links that follow from it.

    Room for the largest session; `_begin` empties the tree.
    """
    cdef CallForest forest
    cdef const Request[::1] requests
    cdef const int32_t[::1] tools  # per call: the number of its tools, if they are compared
    cdef bint compare_tools
    cdef Link[::1] links
    cdef int64_t merge_threshold
    cdef int32_t tie_break
    cdef Message[::1] nodes
    cdef int32_t n_nodes      # the next unused node
    cdef int32_t[::1] table   # open addressing; -1: free
    cdef int64_t mask         # the entries in use, less one
    cdef int32_t[::1] node_of  # per call: the node that it generated, or -1
    cdef TokenIndex index
    cdef int32_t n_indexed    # calls before this one are indexed, if they may be continued
    cdef bint rewrote_indexed  # and one of them was rewritten since

    def __cinit__(
        self, CallForest forest, const Request[::1] requests, const int32_t[::1] tools,
        int64_t merge_threshold, int32_t tie_break, Link[::1] links,
    ):
        cdef int64_t s, largest = 1
        self.forest, self.requests, self.links = forest, requests, links
        self.tools, self.compare_tools = tools, tools is not None
        self.index = TokenIndex(forest)
        for s in range(forest.n_sessions):
            largest = max(
                largest,
                self._tree_nodes(forest.session_offsets[s], forest.session_offsets[s + 1]),
            )
        self.merge_threshold, self.tie_break = merge_threshold, tie_break
        self.nodes = empty(largest, DTYPES["Message"])
        self.table = empty(_table_entries(largest), "i4")
        self.node_of = full(forest.n_calls, -1, "i4")

    cdef void _begin(self, int64_t lo, int64_t hi) noexcept nogil:
        """Empty the tree but for a root; the cleared table is as large as the session needs."""
        cdef int64_t n_table = _table_entries(self._tree_nodes(lo, hi))
        memset(&self.table[0], 0xFF, n_table * sizeof(int32_t))
        self.mask = n_table - 1
        self.n_nodes = 0
        self._add_node(-1, 0, -1, False)
        self.nodes[0].tools = self._tools_of(lo) if lo < hi else 0
        self.n_indexed = <int32_t>lo
        self.rewrote_indexed = False

    cdef int64_t _slot(self, int32_t parent, int64_t key) noexcept nogil:
        cdef uint64_t mixed
        memcpy(&mixed, <const void*><intptr_t>key, sizeof(mixed))
        mixed ^= <uint64_t>parent * <uint64_t>0x9E3779B97F4A7C15
        return <int64_t>(mixed ^ (mixed >> 32)) & self.mask

    cdef int32_t _child(self, int32_t parent, int64_t key) noexcept nogil:
        """The first child of parent with this key, or -1."""
        cdef int64_t slot = self._slot(parent, key)
        cdef const Message* node
        while self.table[slot] >= 0:
            node = &self.nodes[self.table[slot]]
            # Compare with the node's current key: a rewritten node keeps its old table entry.
            if node.parent == parent and node.key != 0 and memcmp(
                <const void*><intptr_t>node.key, <const void*><intptr_t>key, KEY_BYTES
            ) == 0:
                return self.table[slot]
            slot = (slot + 1) & self.mask
        return -1

    cdef void _enter(self, int32_t node) noexcept nogil:
        """Enter a node in the table, by its parent and key."""
        cdef int64_t slot = self._slot(self.nodes[node].parent, self.nodes[node].key)
        while self.table[slot] >= 0:
            slot = (slot + 1) & self.mask
        self.table[slot] = node

    cdef int32_t _add_node(
        self, int32_t parent, int64_t key, int32_t call, bint assistant
    ) noexcept nogil:
        """A new last child of parent.

        `_tree_nodes` counts what may be added: a call's own messages, the reply of its base and
        its own reply. The table has twice as many entries as nodes and changed keys, so `_enter`
        and `_child` reach a free one.
        """
        cdef int32_t index = self.n_nodes
        cdef Message* node = &self.nodes[index]
        cdef Message* above
        self.n_nodes += 1
        node.key = key
        node.parent = parent
        node.call = call
        node.child = node.last_child = node.sibling = node.assistant = node.equal = -1
        node.n_assistants = 0
        if parent < 0:
            node.above = -1
            node.depth = 0
            return index
        above = &self.nodes[parent]
        node.above = call if call >= 0 else above.above
        node.depth = above.depth + 1
        if above.last_child < 0:
            above.child = index
        else:
            self.nodes[above.last_child].sibling = index
        above.last_child = index
        if assistant:
            above.n_assistants += 1
            above.assistant = index
        return index

    cdef int32_t _tools_of(self, int64_t call) noexcept nogil:
        return self.tools[call] if self.compare_tools else 0

    cdef int64_t _tree_nodes(self, int64_t start, int64_t stop) noexcept nogil:
        """Nodes that the message tree of the calls start:stop may need."""
        cdef int64_t i, n = 1, before = -1
        cdef const Request* request
        cdef bint same
        for i in range(start, stop):
            request = &self.requests[i]
            n += 2  # the base's reply and the call's own
            if request.n_keys < 0 or request.shared + request.n_keys == 0:
                continue
            n += request.n_keys
            same = before >= 0 and self._tools_of(before) == self._tools_of(i)
            n += not same  # another root
            if request.shared > 0:
                if self._tools_of(self.forest.calls[i].base) != self._tools_of(i):
                    n += request.shared
            elif same and self.requests[before].shared == 0:
                n -= _repeated(request, &self.requests[before])
            before = i
        return n

    cdef int32_t _root(self, int32_t tools) noexcept nogil:
        """The root of the requests that offer these tools."""
        cdef int32_t root = 0
        while self.nodes[root].tools != tools:
            if self.nodes[root].sibling < 0:
                self.nodes[root].sibling = self._add_node(-1, 0, -1, False)
                self.nodes[self.nodes[root].sibling].tools = tools
            root = self.nodes[root].sibling
        return root

    cdef int64_t _message(self, int32_t call, int64_t depth, bint* assistant) noexcept nogil:
        """The key of a message of a call's prompt, and whether its role is assistant."""
        cdef const Request* request = &self.requests[call]
        cdef const Request* base
        while depth < request.shared:
            call = self.forest.calls[call].base
            base = &self.requests[call]
            if depth == base.shared + base.n_keys:
                assistant[0] = base.reply_is_assistant != 0
                return base.reply_key
            request = base
        assistant[0] = _is_assistant(request, depth - request.shared)
        return request.keys + KEY_BYTES * (depth - request.shared)

    cdef int32_t _at_depth(self, int32_t node, int64_t depth) noexcept nogil:
        while self.nodes[node].depth > depth:
            node = self.nodes[node].parent
        return node

    cdef int32_t _place(self, int32_t call, int32_t before) noexcept nogil:
        """Add the messages of a call's prompt; return the node of the last one.

        ``before`` is the previous call with messages, or -1. What the base supplies is all in
        the tree but for the base's reply, unless the base offers other tools.
        """
        cdef:
            const Request* request = &self.requests[call]
            int32_t base = self.forest.calls[call].base, child, tools = self._tools_of(call)
            int32_t node = self._root(tools)
            int64_t total = request.shared + request.n_keys, depth = 0, of_base
            int64_t key
            bint assistant = False, merged = False, exists = True

        if request.shared > 0 and self._tools_of(base) == tools:
            of_base = self.requests[base].shared + self.requests[base].n_keys
            depth = min(<int64_t>request.shared, of_base)
            if depth > 0:
                node = self._at_depth(self.node_of[base], depth)
        elif (
            request.shared == 0 and before >= 0 and self.requests[before].shared == 0
            and self._tools_of(before) == tools
        ):
            depth = _repeated(request, &self.requests[before])
            if depth > 0:
                node = self._at_depth(self.node_of[before], depth)

        for depth in range(depth, total):
            key = self._message(call, depth, &assistant)
            if exists:
                child = self._child(node, key)
                if child >= 0:
                    node = child
                    continue
                exists = False
                if assistant and self._merge(node, key, call):
                    node = self.nodes[node].assistant
                    merged = True
                    continue
            node = self._add_node(node, key, -1, assistant)
            self._enter(node)
        self.links[call].link_reason = REASON_REWRITE if merged else REASON_MESSAGES
        return node

    cdef bint _merge(self, int32_t node, int64_t key, int32_t call) noexcept nogil:
        """Replace the only reply below a node if it is short, as slime's TrajectoryManager does."""
        cdef Message* reply
        if self.merge_threshold <= 0 or self.nodes[node].n_assistants != 1:
            return False
        reply = &self.nodes[self.nodes[node].assistant]
        if (
            reply.call < 0 or reply.child >= 0
            or self.forest.calls[reply.call].out_len >= self.merge_threshold
        ):
            return False
        self.links[reply.call].rewritten_by = call
        if reply.call < self.n_indexed:
            self.rewrote_indexed = True
        reply.call = -1
        reply.above = self.nodes[node].above
        reply.key = key
        self._enter(self.nodes[node].assistant)
        return True

    cdef void _place_reply(self, int32_t node, int32_t call) noexcept nogil:
        """Add the node that a call generates below the node of its last message."""
        cdef const Request* request = &self.requests[call]
        cdef int32_t first
        if request.reply_key == 0 or not request.reply_is_assistant:
            self.node_of[call] = self._add_node(node, 0, call, True)
            return
        first = self._child(node, request.reply_key)
        node = self.node_of[call] = self._add_node(node, request.reply_key, call, True)
        if first < 0:
            self._enter(node)
        else:
            self.nodes[node].equal = self.nodes[first].equal
            self.nodes[first].equal = node

    cdef int32_t _parent_by_messages(self, int32_t node, int32_t index) noexcept nogil:
        """The call that a request whose last message is at a node continues, or -1.

        By TIE_BREAK_FIRST the nearest call above. By TIE_BREAK_TOKENS, of that call and its equal
        siblings, the one whose path the prompt repeats for longest, of equals the one with the
        shortest path (so one that it repeats entirely), then the first. By TIE_BREAK_FULL_PATH
        the nearest whose path the prompt repeats entirely, the last of equals.
        """
        cdef int32_t other, call, best
        cdef pos_t shared, most, size, least = 0
        cdef bint better
        if self.tie_break == TIE_BREAK_FIRST:
            return self.nodes[node].above
        while self.nodes[node].parent >= 0:
            best = -1
            most = -1
            other = node
            while other >= 0:
                call = self.nodes[other].call
                if call >= 0:
                    shared = _shared(self.forest, call, index)
                    size = _held_len(&self.forest.calls[call])
                    if self.tie_break == TIE_BREAK_FULL_PATH:
                        better = shared == size and call > best
                    else:
                        better = shared > most or shared == most and (
                            size < least or size == least and call < best
                        )
                    if better:
                        most = shared
                        least = size
                        best = call
                other = self.nodes[other].equal
            if best >= 0:
                return best
            node = self.nodes[node].parent
        return -1

    cdef int32_t _parent_by_tokens(self, int32_t first, int32_t index) noexcept nogil:
        """The call that a call without messages continues, or -1.

        The index is brought up to date where it is needed: few sessions have such calls.
        ``first`` is the session's first call.
        """
        cdef int32_t call
        if self.rewrote_indexed:
            for call in range(first, self.n_indexed):
                self.index._clear(call)
            self.n_indexed = first
            self.rewrote_indexed = False
        for call in range(self.n_indexed, index):
            if self.node_of[call] >= 0 and self.links[call].rewritten_by < 0:
                self.index._add(call)
        self.n_indexed = index
        return self.index._find(index)

    cdef void _route_session(self, int32_t lo, int32_t hi) noexcept nogil:
        """The links of one session."""
        cdef const Request* request
        cdef Link* link
        cdef int32_t i, node, before = -1
        cdef bint empty_list
        self._begin(lo, hi)
        for i in range(lo, hi):
            request = &self.requests[i]
            link = &self.links[i]
            empty_list = request.n_keys >= 0 and request.shared + request.n_keys == 0
            if request.n_keys < 0 or (empty_list and self.tie_break == TIE_BREAK_TOKENS):
                link.parent = self._parent_by_tokens(lo, i)
                link.link_reason = REASON_TOKENS if link.parent >= 0 else REASON_ROOT
                node = self.node_of[link.parent] if link.parent >= 0 else 0
                self.node_of[i] = self._add_node(node, 0, i, True)
            elif empty_list:
                link.link_reason = REASON_UNROUTED
            else:
                node = self._place(i, before)
                link.parent = self._parent_by_messages(node, i)
                if link.parent < 0 and link.link_reason == REASON_MESSAGES:
                    link.link_reason = REASON_ROOT
                self._place_reply(node, i)
                before = i
        self._rank()

    cdef void _rank(self) noexcept nogil:
        """Rank the calls of the tree in depth-first pre-order, children in order of arrival."""
        cdef int32_t node = 0, rank = 0
        while True:
            if self.nodes[node].call >= 0:
                self.links[self.nodes[node].call].order = rank
                rank += 1
            if self.nodes[node].child >= 0:
                node = self.nodes[node].child
                continue
            while self.nodes[node].sibling < 0:
                node = self.nodes[node].parent
                if node < 0:  # the last root
                    return
            node = self.nodes[node].sibling


cdef int64_t _table_entries(int64_t n_nodes) noexcept nogil:
    """Entries for each node and one for each changed key; the table is at most half full."""
    cdef int64_t n_table = 2
    while n_table < 4 * n_nodes:
        n_table *= 2
    return n_table


def route_messages(
    CallForest forest not None,
    const Request[::1] requests not None,
    const int32_t[::1] tools,
    int64_t merge_threshold,
    int32_t tie_break,
    Link[::1] links not None,
):
    """Fill ``parent``, ``order``, ``rewritten_by`` and ``link_reason`` of links that are empty.

    Messages are routed as slime does; tokens decide which call a call without a list of messages
    continues. With TIE_BREAK_TOKENS this holds for an empty list, too. Calls
    with another number in ``tools`` have no messages in common; None: all have the same.
    """
    cdef int64_t s
    cdef MessageRouter router
    _check_length("requests", requests.shape[0], forest.n_calls)
    _check_length("links", links.shape[0], forest.n_calls)
    if tools is not None:
        _check_length("tools", tools.shape[0], forest.n_calls)
    if forest.n_calls == 0:
        return
    router = MessageRouter(forest, requests, tools, merge_threshold, tie_break, links)
    with nogil:
        for s in range(forest.n_sessions):
            router._route_session(
                <int32_t>forest.session_offsets[s], <int32_t>forest.session_offsets[s + 1]
            )


# ---
# Which chain of calls a call continues, by the chains' ends: the longest that begins its prompt.
#
# A chain ends with the path of its last call, or only with that call's prompt: then outputs are
# never compared. Every call has one child at most, and replaces its parent as the end of its
# chain. Ends are listed at the node of the forest where they are; a call climbs from the node
# where its prompt ends. O(nodes climbed), usually one.

cdef int32_t _take_end(
    CallForest forest, bint of_prompts, const int32_t* first, int32_t* head, int32_t* before,
    pos_t prompt_len,
) noexcept nogil:
    """Remove the longest end of a list that fits a prompt, of equals of the oldest chain; or -1."""
    cdef int32_t* best = NULL
    cdef int32_t call
    cdef pos_t length, longest = -1
    while head[0] >= 0:
        call = head[0]
        length = forest.calls[call].prompt_len
        if not of_prompts:
            length = _held_len(&forest.calls[call])
        if length <= prompt_len and (
            length > longest or length == longest and first[call] < first[best[0]]
        ):
            best, longest = head, length
        head = &before[call]
    if best == NULL:
        return -1
    call = best[0]
    best[0] = before[call]
    return call


def route_chains(CallForest forest not None, bint of_prompts, Link[::1] links not None):
    """Fill ``parent`` of every link; return the first call of each call's chain.

    A call's parent ends the chain whose end is the longest prefix of its prompt; of equal ends, the
    chain that began first wins. Chains end with paths, or with prompts: then a call with an empty
    prompt has neither parent nor child.
    """
    cdef int32_t[::1] first = empty(forest.n_calls, "i4"), before = empty(forest.n_calls, "i4")
    cdef int32_t[::1] ends = full(forest.n_nodes, -1, "i4")  # per node: the last one there
    cdef int32_t call, node, parent, n_calls = <int32_t>forest.n_calls
    cdef pos_t prompt_len
    _check_length("links", links.shape[0], n_calls)
    with nogil:
        for call in range(n_calls):
            prompt_len = forest.calls[call].prompt_len
            parent = links[call].parent = -1
            first[call] = call
            if of_prompts and prompt_len == 0:
                continue
            node = _prompt_node(forest, call)
            while node >= 0 and parent < 0:
                parent = _take_end(
                    forest, of_prompts, &first[0], &ends[node], &before[0], prompt_len
                )
                node = forest.nodes[node].parent
            if parent >= 0:
                first[call] = first[parent]
                links[call].parent = parent
            node = _prompt_node(forest, call) if of_prompts else forest.ends[call]
            before[call] = ends[node]
            ends[node] = call
    return first.base

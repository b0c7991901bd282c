"""Which call a call continues, in any recording order: by longest prefix.

Fills links from the forest of token paths and the calls by length of prompt, in O(calls +
nodes of the forest). The parent of a call is the one whose path is the longest prefix of its
prompt. If several calls have that path, the parent is ambiguous; if several calls have one
prompt (retries), only what continues them decides between them. So some calls are
quarantined, and with them every chain that contains one (policy ``nemo``).

Calls without output can neither be continued nor trained. Every other parent is shorter than
its child's prompt, so parents come first in order of prompt length.
"""

cdef enum:
    STATE_PARENT = 1          # the call is some call's parent
    STATE_EXTENDED = 2        # the call is some call's only possible parent
    STATE_GROUP_EXTENDED = 4  # some call with the same prompt is; kept at the group's first
    STATE_SOUND = 8           # no call from the root to this one is quarantined
    STATE_IN_CHAIN = 16


cdef struct PrefixRouter:
    const Paths* paths
    const int32_t* by_prompt  # each session's calls by length of prompt
    Link* links
    # scratch, one entry per node of the forest
    int32_t* up               # as in TokenIndex
    int32_t* first            # the first call whose path ends there, or -1
    int32_t* several          # whether more than one does
    int32_t* prompted         # the last group whose prompt ends there, or -1
    # scratch, one entry per call
    int32_t* group            # the first call with the same prompt
    int32_t* size             # calls of the group, kept at its first
    uint8_t* state            # STATE_*


cdef int32_t _prompt_node(const Paths* paths, int32_t call) noexcept nogil:
    """The node in which the call's prompt ends; equal prompts end in the same one."""
    cdef int32_t node = paths.ends[call]
    while paths.nodes[node].start >= paths.calls[call].prompt_len:
        node = paths.nodes[node].parent
    return node


cdef void _find_prefix_parents(PrefixRouter* router, int32_t lo, int32_t hi) noexcept nogil:
    """Fill the parents, groups and states of one session's calls."""
    cdef const Call* calls = router.paths.calls
    cdef uint8_t* state = router.state
    cdef Link* links = router.links
    cdef int32_t k, i, node, head, parent
    for k in range(lo, hi):
        i = router.by_prompt[k]
        node = router.paths.ends[i]
        links[i].parent = links[i].order = links[i].rewritten_by = -1
        links[i].link_reason = REASON_ROOT
        router.group[i] = i
        router.size[i] = state[i] = 0
        if calls[i].out_len == 0:
            links[i].link_reason = REASON_EMPTY
        elif router.first[node] < 0:
            router.first[node] = i
        else:
            router.several[node] = True
    for k in range(lo, hi):
        i = router.by_prompt[k]
        if calls[i].out_len == 0:
            continue
        node = _prompt_node(router.paths, i)
        # Prompts that end in one node come one length after another.
        head = router.prompted[node]
        if head >= 0 and calls[head].prompt_len == calls[i].prompt_len:
            router.group[i] = head
        else:
            router.prompted[node] = i
        router.size[router.group[i]] += 1
        if router.paths.nodes[node].stop > calls[i].prompt_len:
            node = router.paths.nodes[node].parent
        node = _next_alive(router.up, router.first, node)
        if node < 0:
            continue
        parent = links[i].parent = router.first[node]
        state[parent] |= STATE_PARENT
        if router.several[node]:
            links[i].link_reason = REASON_AMBIGUOUS
        else:
            links[i].link_reason = REASON_TOKENS
            state[parent] |= STATE_EXTENDED
            state[router.group[parent]] |= STATE_GROUP_EXTENDED


cdef bint _is_quarantined(PrefixRouter* router, int32_t call) noexcept nogil:
    """Whether the call itself is ambiguous or a rejected retry; its reason is completed."""
    cdef Link* link = &router.links[call]
    cdef bint ambiguous = link.link_reason == REASON_AMBIGUOUS
    cdef int32_t head = router.group[call]
    if router.size[head] == 1:  # no retry
        return ambiguous
    if router.state[head] & STATE_GROUP_EXTENDED:
        if ambiguous or router.state[call] & STATE_EXTENDED:
            return ambiguous
        link.link_reason = REASON_SUPERSEDED
        return True
    if ambiguous:
        link.link_reason = REASON_UNRESOLVED_AMBIGUOUS
        return True
    link.link_reason = REASON_UNRESOLVED_KEPT if head == call else REASON_UNRESOLVED
    return head != call


cdef void _route_session_by_prefix(PrefixRouter* router, int32_t lo, int32_t hi) noexcept nogil:
    """The links of one session."""
    cdef uint8_t* state = router.state
    cdef Link* links = router.links
    cdef int32_t k, i, rank = 0
    _find_prefix_parents(router, lo, hi)
    for k in range(lo, hi):
        i = router.by_prompt[k]
        if router.paths.calls[i].out_len == 0 or _is_quarantined(router, i):
            continue
        if links[i].parent < 0 or state[links[i].parent] & STATE_SOUND:
            state[i] |= STATE_SOUND
    # A chain runs from a root to a call without children; none of its calls is quarantined.
    for k in range(hi - 1, lo - 1, -1):
        i = router.by_prompt[k]
        if not state[i] & STATE_SOUND:
            continue
        if not state[i] & STATE_PARENT:
            state[i] |= STATE_IN_CHAIN
        if state[i] & STATE_IN_CHAIN and links[i].parent >= 0:
            state[links[i].parent] |= STATE_IN_CHAIN
    for k in range(lo, hi):
        i = router.by_prompt[k]
        if state[i] & STATE_IN_CHAIN:
            links[i].order = rank
            rank += 1
        elif links[i].link_reason == REASON_ROOT or links[i].link_reason == REASON_TOKENS:
            links[i].link_reason = REASON_CHAIN_QUARANTINED


cdef int64_t _first_bad_rank(
    const int32_t[::1] by_prompt, const Paths* paths, int32_t* seen
) noexcept nogil:
    """Index of the first entry that does not rank the calls of its session, or -1."""
    cdef int64_t s, k
    memset(seen, 0, paths.n_calls * sizeof(int32_t))
    for s in range(paths.n_sessions):
        for k in range(paths.session_offsets[s], paths.session_offsets[s + 1]):
            if not paths.session_offsets[s] <= by_prompt[k] < paths.session_offsets[s + 1]:
                return k
            if seen[by_prompt[k]]:
                return k
            seen[by_prompt[k]] = 1
            if k > paths.session_offsets[s] and (
                paths.calls[by_prompt[k]].prompt_len < paths.calls[by_prompt[k - 1]].prompt_len
            ):
                return k
    return -1


cdef _check_by_prompt(const int32_t[::1] by_prompt, const Paths* paths, int32_t* seen):
    """Raise unless ``by_prompt`` ranks each session's calls; ``seen`` is scratch per call."""
    cdef int64_t bad = _first_bad_rank(by_prompt, paths, seen)
    if bad >= 0:
        raise LayoutError(
            f"by_prompt[{bad}] = {by_prompt[bad]}: expected each call of the session once, the "
            "shortest prompt first"
        )


def route_prefix(
    CallForest forest not None, const int32_t[::1] by_prompt not None, Link[::1] links not None
):
    """Fill every call's link: its parent is the longest path that is a prefix of its prompt.

    ``by_prompt`` lists the calls of each session, shortest prompt first; of equals the earlier
    one counts as the first. A call in no chain has no order.
    """
    cdef int64_t n_calls = forest.n_calls, n_nodes = forest.n_nodes, s, i
    cdef Paths paths
    cdef PrefixRouter router

    _check_length("by_prompt", by_prompt.shape[0], n_calls)
    _check_length("links", links.shape[0], n_calls)
    if n_calls == 0:
        return
    cdef int32_t[:, ::1] of_nodes = full((4, n_nodes), -1, "i4")
    cdef int32_t[:, ::1] of_calls = empty((2, n_calls), "i4")
    cdef uint8_t[::1] state = empty(n_calls, "u1")
    paths = _paths(forest)
    router.paths, router.by_prompt, router.links = &paths, &by_prompt[0], &links[0]
    router.up, router.first = &of_nodes[0, 0], &of_nodes[1, 0]
    router.several, router.prompted = &of_nodes[2, 0], &of_nodes[3, 0]
    router.group, router.size, router.state = &of_calls[0, 0], &of_calls[1, 0], &state[0]
    _check_by_prompt(by_prompt, &paths, router.group)
    with nogil:
        for i in range(n_nodes):
            router.up[i] = paths.nodes[i].parent
            router.several[i] = False
        for s in range(paths.n_sessions):
            _route_session_by_prefix(
                &router, <int32_t>paths.session_offsets[s],
                <int32_t>paths.session_offsets[s + 1],
            )

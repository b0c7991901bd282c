"""Links between calls: why a call has its parent, and what its prompt shares with that call."""

cdef enum:  # trajkit.schema.LINK_REASONS
    REASON_ROOT, REASON_MESSAGES, REASON_REWRITE, REASON_TOKENS, REASON_PREVIOUS
    REASON_UNROUTED, REASON_HISTORY_REPLACED, REASON_PROMPTS
    REASON_AMBIGUOUS, REASON_SUPERSEDED, REASON_UNRESOLVED_KEPT, REASON_UNRESOLVED
    REASON_UNRESOLVED_AMBIGUOUS, REASON_CHAIN_QUARANTINED, REASON_EMPTY
    REASON_REFUSED_TOKENS, REASON_REFUSED_TRUNCATED, REASON_RETRIED

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


cdef inline pos_t _shared_of(const Paths* paths, int32_t call, int32_t other) noexcept nogil:
    """Tokens that the path of a call and the prompt of another one of its session share."""
    return _shared_by(paths.calls, paths.nodes, paths.ends, call, other)


cdef int32_t _prompt_node(const Paths* paths, int32_t call) noexcept nogil:
    """The node in which the call's prompt ends; equal prompts end in the same one."""
    cdef int32_t node = paths.ends[call]
    while paths.nodes[node].start >= paths.calls[call].prompt_len:
        node = paths.nodes[node].parent
    return node


cdef bint _are_of_one_session(CallForest forest, int64_t call, int64_t other) noexcept nogil:
    cdef int64_t low = 0, high = forest.n_sessions, middle
    while high - low > 1:  # the session of call is one of low:high
        middle = (low + high) // 2
        if forest.session_offsets[middle] <= call:
            low = middle
        else:
            high = middle
    return forest.session_offsets[low] <= other < forest.session_offsets[low + 1]


cdef _check_call(CallForest forest, int64_t call):
    if not 0 <= call < forest.n_calls:
        raise LayoutError(f"call is {call}: expected one of {forest.n_calls}")


def shared_length(CallForest forest not None, int32_t call, int32_t other):
    """Tokens that the path of a call and the prompt of another one of its session share."""
    cdef Paths paths
    _check_call(forest, call)
    _check_call(forest, other)
    # Paths of two sessions have no node in common to climb to.
    if not _are_of_one_session(forest, call, other):
        raise LayoutError(f"call {other} is not in the session of call {call}")
    paths = _paths(forest)
    return _shared_of(&paths, call, other)


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

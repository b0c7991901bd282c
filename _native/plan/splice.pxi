"""Spliced rows: outputs as sampled, joined by suffixes of later prompts (policy ``polar``).

Fills calls and links, from which plan.pxi and fill.pxi make such rows as any others, and the tokens
of these calls. A chain of calls, each of whose prompts begins with the previous prompt, becomes one
row: the first prompt, the first output, then for each next call the suffix of its prompt after the
first end of turn beyond the previous prompt, and its output. So an output stays as it was sampled,
and later outputs may have been sampled after another rendering of it. The prompt of a call is here
what the row has before its output. Where a prompt has no end of turn there, the row ends: that call
and all that continue it are dropped. O(tokens of the rows + tokens of the chains' prompts beyond
the previous ones + calls).
"""


cdef struct Splicer:          # what splice_calls reads, its scratch and its outputs
    const Paths* paths
    const Link* links
    const uint8_t* ended      # per call: the engine reported that the output ended its turn
    int64_t end_of_turn       # -1: that of each chain
    int32_t* by_order         # scratch: each session's calls in order, then -1
    int32_t* next_call        # scratch: the call that continues it in its chain, or -1
    pos_t* starts             # position in its prompt from which the row has it; -1: not in a row
    pos_t* places             # scratch: position in the tokens where the chain begins
    Call* calls
    Link* spliced


cdef pos_t _find_id(
    const Call* call, pos_t start, pos_t stop, token_t wanted
) noexcept nogil:
    """First position in [start, stop) of the call's path with this id; -1: none."""
    cdef pos_t n, i
    cdef const token_t* run
    while start < stop:
        run = _tokens_at(call, start, &n)
        n = min(n, stop - start)
        for i in range(n):
            if run[i] == wanted:
                return start + i
        start += n
    return -1


cdef pos_t _first_of_path(
    const Call* calls, const Node* nodes, int32_t node, pos_t start, pos_t stop, token_t wanted
) noexcept nogil:
    """As `_find_id`, on the path that ends at the node's stop."""
    cdef pos_t low, high, at, found = -1
    while nodes[node].parent >= 0 and nodes[node].stop > start:
        low = max(nodes[node].start, start)
        high = min(nodes[node].stop, stop)
        at = _find_id(&calls[nodes[node].source], low, high, wanted)
        if at >= 0:
            found = at
        node = nodes[node].parent
    return found


cdef pos_t _suffix_start(
    const Paths* paths, int32_t before, int32_t call, int64_t end_of_turn
) noexcept nogil:
    """Position in the call's prompt from which the row continues after the output of ``before``.

    After the first end of turn beyond the prompt of ``before``, or at it where that output did
    not end its turn; -1 without one.
    """
    cdef const Call* last = &paths.calls[before]
    cdef pos_t at
    if end_of_turn < 0:
        return -1
    at = _first_of_path(
        paths.calls, paths.nodes, paths.ends[call], last.prompt_len,
        paths.calls[call].prompt_len, <token_t>end_of_turn,
    )
    if at >= 0 and last.out_len > 0:
        if (<const token_t*><intptr_t>last.out)[last.out_len - 1] == end_of_turn:
            at += 1
    return at


cdef int64_t _end_of_turn(const Splicer* splicer, int32_t call) noexcept nogil:
    """The last token of the first output in the chain that ended its turn; -1: none did."""
    cdef const Call* calls = splicer.paths.calls
    while call >= 0:
        if splicer.ended[call] and calls[call].out_len > 0:
            return (<const token_t*><intptr_t>calls[call].out)[calls[call].out_len - 1]
        call = splicer.next_call[call]
    return -1


cdef int32_t _splice_chain(
    const Splicer* splicer, int32_t opener, int32_t rank, pos_t* n_tokens
) noexcept nogil:
    """Fill links, starts and lengths of a chain, ranked from ``rank`` on; return the next rank.

    ``n_tokens`` is how many tokens the chains before have, and is increased.
    """
    cdef const Call* calls = splicer.paths.calls
    cdef int64_t end_of_turn = splicer.end_of_turn
    cdef int32_t call = opener, before = -1
    cdef pos_t start = 0, length = 0
    cdef Link* link
    if end_of_turn < 0:
        end_of_turn = _end_of_turn(splicer, opener)
    while call >= 0:
        if before >= 0 and start >= 0:
            start = _suffix_start(splicer.paths, before, call, end_of_turn)
        link = &splicer.spliced[call]
        if before < 0:
            link.splice = SPLICE_NONE if link.parent < 0 else SPLICE_OPENS
        else:
            link.splice = SPLICE_NONE if start >= 0 else SPLICE_DROPPED
        link.parent = before
        link.lcp = length
        link.order = rank
        rank += 1
        splicer.starts[call] = start
        splicer.places[call] = n_tokens[0]
        if start >= 0:
            length += calls[call].prompt_len - start
        splicer.calls[call].prompt_len = length
        length += calls[call].out_len
        before = call
        call = splicer.next_call[call]
    n_tokens[0] += length
    return rank


cdef inline bint _extends_parent(
    const Call* calls, const Link* links, int32_t call
) noexcept nogil:
    """Whether the call's prompt begins with its parent's entire prompt."""
    cdef int32_t parent = links[call].parent
    return parent >= 0 and links[call].lcp >= calls[parent].prompt_len


cdef void _splice_session(
    Splicer* splicer, int32_t lo, int32_t hi, pos_t* n_tokens
) noexcept nogil:
    """Fill the links and the lengths of one session's calls."""
    cdef const Call* calls = splicer.paths.calls
    cdef const Link* links = splicer.links
    cdef int32_t i, k, parent, rank = 0
    for i in range(lo, hi):
        splicer.next_call[i] = -1
        splicer.starts[i] = -1
        splicer.calls[i] = calls[i]
        splicer.calls[i].own = splicer.calls[i].own_start = splicer.calls[i].prompt_len = 0
        splicer.calls[i].base = -1
        splicer.spliced[i] = links[i]
        splicer.spliced[i].lcp = 0
    # Of several calls that continue one, the first in the policy's order is in its row.
    for k in range(lo, hi):
        i = splicer.by_order[k]
        if i >= 0 and _extends_parent(calls, links, i):
            if splicer.next_call[links[i].parent] < 0:
                splicer.next_call[links[i].parent] = i
    for k in range(lo, hi):
        i = splicer.by_order[k]
        if i >= 0:
            parent = links[i].parent
            if parent < 0 or splicer.next_call[parent] != i:
                rank = _splice_chain(splicer, i, rank, n_tokens)


cdef void _write_spliced(
    const Splicer* splicer, int32_t index, token_t* ids, pos_t n_ids
) noexcept nogil:
    """Write the tokens that a call of a chain adds, and set where its own begin."""
    cdef const Call* call = &splicer.paths.calls[index]
    cdef Call* spliced = &splicer.calls[index]
    cdef int32_t parent = splicer.spliced[index].parent
    cdef pos_t start = splicer.starts[index]
    cdef pos_t n = call.prompt_len - start if start >= 0 else 0
    cdef token_t* row = ids + splicer.places[index]
    check_write("ids", splicer.places[index], _held_len(spliced), n_ids)
    if n:
        _copy_range(
            splicer.paths.calls, splicer.paths.nodes, splicer.paths.ends[index], start,
            call.prompt_len, row + spliced.prompt_len - n,
        )
    if call.out_len:
        memcpy(
            row + spliced.prompt_len, <const token_t*><intptr_t>call.out,
            call.out_len * sizeof(token_t),
        )
    if 0 <= parent < index:  # a base comes before
        spliced.base = parent
        spliced.own_start = spliced.prompt_len - n
    spliced.own = <int64_t><intptr_t>(row + spliced.own_start)


def splice_calls(
    CallForest forest not None,
    const Link[::1] links not None,
    int64_t end_of_turn,
    const uint8_t[::1] ended not None,
    pos_t[::1] starts not None,
    Call[::1] calls not None,
    Link[::1] spliced not None,
):
    """Fill the calls of spliced rows and their links; return the tokens that ``calls`` refer to.

    The rows of a plan of these are the spliced rows, in the order of the calls that open them.
    A call's prompt is in its row from ``starts`` on (-1: in no row). ``ended`` is whether the
    engine reported that the output ended its turn; ``end_of_turn`` is a token id, or -1 for the
    last token of each chain's first output that ended its turn.
    """
    cdef int64_t n_calls = forest.n_calls, s, i, bad
    cdef pos_t n_tokens = 0
    cdef Paths paths
    cdef Splicer splicer

    for name, n in (
        ("links", links.shape[0]), ("ended", ended.shape[0]), ("starts", starts.shape[0]),
        ("calls", calls.shape[0]), ("spliced", spliced.shape[0]),
    ):
        _check_length(name, n, n_calls)
    if not -1 <= end_of_turn < 2**31:
        raise LayoutError(f"end_of_turn is {end_of_turn}: no token id")
    if n_calls == 0:
        return empty(0, "i4")
    cdef int32_t[:, ::1] of_calls = empty((2, n_calls), "i4")
    cdef pos_t[::1] places = empty(n_calls, "i8")
    paths = _paths(forest)
    splicer.paths, splicer.links, splicer.ended = &paths, &links[0], &ended[0]
    splicer.end_of_turn = end_of_turn
    splicer.by_order, splicer.next_call = &of_calls[0, 0], &of_calls[1, 0]
    splicer.starts, splicer.places = &starts[0], &places[0]
    splicer.calls, splicer.spliced = &calls[0], &spliced[0]
    with nogil:
        bad = _order_calls(&paths, splicer.links, splicer.by_order)
        if bad < 0:
            for s in range(paths.n_sessions):
                _splice_session(
                    &splicer, <int32_t>paths.session_offsets[s],
                    <int32_t>paths.session_offsets[s + 1], &n_tokens,
                )
    if bad >= 0:
        raise _bad_link(links, bad)
    cdef token_t[::1] ids = empty(n_tokens, "i4")
    if n_tokens:
        with nogil:
            for i in range(n_calls):
                if spliced[i].order >= 0:
                    _write_spliced(&splicer, <int32_t>i, &ids[0], n_tokens)
    return ids.base

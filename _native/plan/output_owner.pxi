"""Who trains a claim that several rows hold, where that is not the first chain.

A row is named by its last call: a leaf, or the parent of a call that drift cuts off. Every
row that holds a call starts where the call's own row starts, so rows that hold it differ in
what follows the call, and one pass from the last call to the first finds the best for all.
"""

cdef enum:  # lines of Claims, one entry a call
    CLAIM_VALUE               # of the row that ends at the call; -1: none ends there
    CLAIM_GAIN                # tokens that a row would train up to the call, or -1
    CLAIM_LEAF                # the rank of the first leaf at or below the call
    CLAIM_CHAIN               # the rank of the first chain in which a row ends at the call
    CLAIM_BEST                # the best row that holds the call
    CLAIM_KEPT                # tokens of the call's output that its owner keeps
    CLAIM_WIDTH

cdef enum:
    NO_RANK = 0x7FFFFFFF      # beyond every rank of links.order


cdef inline int64_t* _claim(const Claims* claims, int line, int64_t call) noexcept nogil:
    check_write("claims", call, 1, claims.n_calls)
    return claims.lines + line * claims.n_calls + call


cdef inline pos_t _trains(const Call* call, pos_t kept, const Rule* rule) noexcept nogil:
    """Tokens of the first ``kept`` of a call's output that a row could train."""
    if not call.trainable:
        return 0
    kept = max(min(kept, rule.max_tokens - call.prompt_len), 0)
    return kept - _n_barred(call, kept, rule.by_token)


cdef inline pos_t _kept(
    const Call* calls, const Link* links, const uint8_t* kinds, int32_t below, const Rule* rule
) noexcept nogil:
    """Tokens of its parent's output that a row keeps when the call below is taken in."""
    cdef const Call* parent = &calls[links[below].parent]
    if kinds[below] != KIND_ABSORB:
        return parent.out_len
    return links[below].lcp - parent.prompt_len if rule.keep_head else 0


cdef inline bint _better(const Claims* claims, int64_t row, int64_t other) noexcept nogil:
    """Whether a claim goes to the row rather than to the other (-1: none)."""
    cdef int64_t mine, its
    if other < 0:
        return True
    mine = _claim(claims, CLAIM_VALUE, row)[0]
    its = _claim(claims, CLAIM_VALUE, other)[0]
    if mine != its:
        return mine > its
    return _claim(claims, CLAIM_CHAIN, row)[0] < _claim(claims, CLAIM_CHAIN, other)[0]


cdef void _offer(
    const Claims* claims, int32_t call, int64_t row, pos_t kept, int32_t* owners
) noexcept nogil:
    """Let the row have the call's claim if it keeps more of it, or as much and is better."""
    cdef int64_t most = _claim(claims, CLAIM_KEPT, call)[0]
    if kept > most or (kept == most and _better(claims, row, owners[call])):
        owners[call] = <int32_t>row
        _claim(claims, CLAIM_KEPT, call)[0] = kept
    if _better(claims, row, _claim(claims, CLAIM_BEST, call)[0]):
        _claim(claims, CLAIM_BEST, call)[0] = row


cdef void _find_owners(
    const Call* calls, int32_t lo, int32_t hi, const Link* links, const Rule* rule,
    const uint8_t* kinds, const int32_t* by_order, const Claims* claims, int32_t* owners,
) noexcept nogil:
    """Set ``owners`` to the last call of the row that trains each call's claim, or -1.

    ``by_order`` lists the calls with parents first, -1 where it has none; NULL: they are so.
    """
    cdef int32_t i, k, parent
    cdef int64_t rank, gain
    for i in range(lo, hi):
        owners[i] = -1
        _claim(claims, CLAIM_VALUE, i)[0] = -1
        _claim(claims, CLAIM_LEAF, i)[0] = NO_RANK
        _claim(claims, CLAIM_CHAIN, i)[0] = NO_RANK
        _claim(claims, CLAIM_BEST, i)[0] = -1
        _claim(claims, CLAIM_KEPT, i)[0] = -1
    for k in range(lo, hi):
        i = k if by_order == NULL else by_order[k]
        if i < 0 or links[i].order < 0:
            continue
        gain = _trains(&calls[i], calls[i].out_len, rule)
        parent = links[i].parent
        if kinds[i] != KIND_FORK:
            gain += _claim(claims, CLAIM_GAIN, parent)[0]
            gain -= _trains(&calls[parent], calls[parent].out_len, rule)
            gain += _trains(&calls[parent], _kept(calls, links, kinds, i, rule), rule)
        _claim(claims, CLAIM_GAIN, i)[0] = gain

    # A parent comes before its children, so from the last call on all below it is known.
    for k in range(hi - 1, lo - 1, -1):
        i = k if by_order == NULL else by_order[k]
        if i < 0 or links[i].order < 0:
            continue
        rank = _claim(claims, CLAIM_LEAF, i)[0]
        if rank == NO_RANK:  # nothing continues it
            rank = links[i].order
            _claim(claims, CLAIM_LEAF, i)[0] = rank
            _claim(claims, CLAIM_CHAIN, i)[0] = rank
        if _claim(claims, CLAIM_CHAIN, i)[0] != NO_RANK:
            if rule.own == OWN_LONGEST:
                gain = min(_held_len(&calls[i]), rule.max_tokens)
            else:
                gain = _claim(claims, CLAIM_GAIN, i)[0]
            _claim(claims, CLAIM_VALUE, i)[0] = gain
            _offer(claims, i, i, calls[i].out_len, owners)
        parent = links[i].parent
        if parent < 0:
            continue
        _claim(claims, CLAIM_LEAF, parent)[0] = min(
            _claim(claims, CLAIM_LEAF, parent)[0], rank
        )
        if kinds[i] == KIND_FORK:
            _claim(claims, CLAIM_CHAIN, parent)[0] = min(
                _claim(claims, CLAIM_CHAIN, parent)[0], rank
            )
        else:
            _offer(
                claims, parent, _claim(claims, CLAIM_BEST, i)[0],
                _kept(calls, links, kinds, i, rule), owners,
            )

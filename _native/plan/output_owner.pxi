"""Which row trains an output that several rows contain, where that is not the first chain.

Fills ``owners`` from the links and how each call meets its parent's row, in O(calls). A row is
named by its last call: a leaf, or the parent of a call that forks. All rows that contain a
call begin where the call's own row begins, so they differ only in what follows it, and one
pass from the last call to the first finds the best row of every call.
"""

cdef struct Candidate:        # what is known of one call
    int64_t value             # of the row that ends at the call; -1: none ends there
    int64_t gain              # tokens that a row trains up to and with the call
    int64_t leaf_rank         # rank of the first leaf at or below the call
    int64_t chain_rank        # rank of the first chain in which a row ends at the call
    int64_t best_row          # the best row that contains the call; -1: none yet
    int64_t kept              # tokens of the call's output that its owner keeps; -1: no owner

cdef enum:
    NO_RANK = 0x7FFFFFFF      # larger than every rank of links.order


cdef inline pos_t _trainable(const Call* call, pos_t kept, const Choices* choices) noexcept nogil:
    """Tokens of the first ``kept`` of a call's output that a row could train."""
    if not call.trainable:
        return 0
    kept = max(min(kept, choices.max_tokens - call.prompt_len), 0)
    return kept - _n_barred(call, kept, choices.need_logprob)


cdef inline pos_t _kept(const Plan* plan, int32_t below) noexcept nogil:
    """Tokens of its parent's output that a row keeps when it takes in the call ``below``."""
    cdef const Call* parent = &plan.paths.calls[plan.links[below].parent]
    if plan.meets[below] != MEET_ABSORB:
        return parent.out_len
    return plan.links[below].lcp - parent.prompt_len if plan.choices.keep_prefix else 0


cdef inline bint _better(
    const Candidate* candidates, int64_t row, int64_t other
) noexcept nogil:
    """Whether ``row`` rather than ``other`` (-1: no row) trains an output of both."""
    if other < 0:
        return True
    if candidates[row].value != candidates[other].value:
        return candidates[row].value > candidates[other].value
    return candidates[row].chain_rank < candidates[other].chain_rank


cdef void _offer(
    Candidate* candidates, int32_t call, int64_t row, pos_t kept, int32_t* owners
) noexcept nogil:
    """Make the row the call's owner if it keeps more of it, or as much and is better."""
    cdef Candidate* candidate = &candidates[call]
    if kept > candidate.kept or (
        kept == candidate.kept and _better(candidates, row, owners[call])
    ):
        owners[call] = <int32_t>row
        candidate.kept = kept
    if _better(candidates, row, candidate.best_row):
        candidate.best_row = row


cdef void _measure_gains(const Plan* plan, int32_t lo, int32_t hi, bint late) noexcept nogil:
    """Fill ``gain`` of the session's calls, parents first; the rest becomes unknown."""
    cdef const Call* calls = plan.paths.calls
    cdef Candidate* candidate
    cdef int32_t i, k, parent
    for i in range(lo, hi):
        candidate = &plan.candidates[i]
        plan.owners[i] = -1
        candidate.value = candidate.best_row = candidate.kept = -1
        candidate.leaf_rank = candidate.chain_rank = NO_RANK
    for k in range(lo, hi):
        i = plan.by_order[k] if late else k
        if i < 0 or plan.links[i].order < 0:
            continue
        candidate = &plan.candidates[i]
        candidate.gain = _trainable(&calls[i], calls[i].out_len, plan.choices)
        parent = plan.links[i].parent
        if plan.meets[i] != MEET_FORK:
            candidate.gain += plan.candidates[parent].gain
            candidate.gain -= _trainable(&calls[parent], calls[parent].out_len, plan.choices)
            candidate.gain += _trainable(&calls[parent], _kept(plan, i), plan.choices)


cdef void _find_owners(const Plan* plan, int32_t lo, int32_t hi, bint late) noexcept nogil:
    """Set ``owners`` to the last call of the row that trains each call's output, or -1.

    ``late``: parents come first in ``by_order``, not in the turns.
    """
    cdef const Call* calls = plan.paths.calls
    cdef Candidate* candidates = plan.candidates
    cdef Candidate* candidate
    cdef int32_t i, k, parent
    _measure_gains(plan, lo, hi, late)
    # Parents come first, so on the way back everything below a call is known.
    for k in range(hi - 1, lo - 1, -1):
        i = plan.by_order[k] if late else k
        if i < 0 or plan.links[i].order < 0:
            continue
        candidate = &candidates[i]
        if candidate.leaf_rank == NO_RANK:  # nothing continues the call
            candidate.leaf_rank = candidate.chain_rank = plan.links[i].order
        if candidate.chain_rank != NO_RANK:
            if plan.choices.train_in == TRAIN_IN_LONGEST:
                candidate.value = min(_held_len(&calls[i]), plan.choices.max_tokens)
            else:
                candidate.value = candidate.gain
            _offer(candidates, i, i, calls[i].out_len, plan.owners)
        parent = plan.links[i].parent
        if parent < 0:
            continue
        candidates[parent].leaf_rank = min(candidates[parent].leaf_rank, candidate.leaf_rank)
        if plan.meets[i] == MEET_FORK:
            candidates[parent].chain_rank = min(
                candidates[parent].chain_rank, candidate.leaf_rank
            )
        else:
            _offer(candidates, parent, candidate.best_row, _kept(plan, i), plan.owners)

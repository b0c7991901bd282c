"""The rows that a policy makes of linked calls, and what becomes of every output.

Fills rows, owners and the report from the links, whose ``lcp`` is known. After a call a row
holds exactly that call's path, so a row is a maximal run of linked calls that no drift cuts,
and everything about it follows from pairs of calls: no row is built to find out. A call's
output is trained in the first chain that contains the call, in the order that ``train_in``
names, or in each of them. O(calls + nodes of the forest) per session, plus, for a policy that
decides token by token, O(output tokens).
"""

cdef enum:  # what drift does to the row that the parent ended
    DRIFT_CONTINUES, DRIFT_ABSORBS
    DRIFT_FORKS
    DRIFT_RESTARTS              # the row starts over; its earlier outputs are lost

cpdef enum:  # trajkit.policies.OnDrift, but "splice" (trajkit.rows.splice)
    ON_DRIFT_FORK, ON_DRIFT_ABSORB_SHORT_REPLY, ON_DRIFT_ABSORB_SHORT_DRIFT
    ON_DRIFT_ABSORB_ANY

cdef enum:
    NEVER = 0x7FFFFFFFFFFFFFFF  # a position beyond every row

cpdef enum:  # trajkit.policies.TrainIn
    TRAIN_IN_FIRST, TRAIN_IN_EARLIEST, TRAIN_IN_EVERY

cpdef enum:  # trajkit.schema.SPAN_KINDS, but the last
    SPAN_TRAINED, SPAN_DUPLICATE, SPAN_ABSORBED, SPAN_CUT, SPAN_UNTRAINABLE

cpdef enum:  # the columns of trajkit.schema.REPORT from turns on
    REPORT_TURNS, REPORT_ROWS, REPORT_ROWS_UNTRAINED, REPORT_ROWS_CUT
    REPORT_ROWS_OVER_MAX_ROWS
    REPORT_TOKENS_SAMPLED, REPORT_TOKENS_TRAINED, REPORT_TOKENS_DUPLICATED
    REPORT_TOKENS_FORWARD, REPORT_TOKENS_FORWARD_SHARED
    REPORT_LOST_ABSORBED, REPORT_LOST_REWRITTEN, REPORT_LOST_CUT
    REPORT_LOST_UNTRAINABLE, REPORT_LOST_UNROUTED, REPORT_LOST_RESTARTED
    REPORT_LOST_OVER_MAX_ROWS
    REPORT_LOST_ABORTED       # filled by the caller, who knows which calls were aborted
    REPORT_LOST_MASKED, REPORT_LOST_NO_LOGPROB
    REPORT_LOST_NO_SPLICE_POINT  # these are filled by trajkit.rows.splice
    REPORT_LOST_QUARANTINED, REPORT_LOST_NOT_SELECTED, REPORT_LOST_REFUSED
    REPORT_LOST_RETRIED
    REPORT_ROWS_NO_SPLICE_POINT, REPORT_TURNS_NO_SPLICE_POINT
    REPORT_TURNS_BY_TOKENS    # filled by the caller, who knows the route
    REPORT_ROOTS, REPORT_TURNS_QUARANTINED, REPORT_TURNS_UNRESOLVED

cdef enum:
    N_SPAN_KINDS = SPAN_UNTRAINABLE + 1
    N_COUNTS = REPORT_TURNS_UNRESOLVED + 1

cdef enum:  # bits of Plan.flags
    CALL_USE_TOOL = 1         # the call or one above it in its chain
    CALL_ILL_FORMED = 2       # likewise
    CALL_CONTINUED = 4        # the call is no leaf
    CALL_CHAIN_FLAGS = CALL_USE_TOOL | CALL_ILL_FORMED


@cython.auto_pickle(False)
@cython.final
cdef class Plan:
    """What one `plan_rows` reads, its scratch and its outputs."""
    cdef CallForest forest
    cdef const Link[::1] links
    cdef const Choices* choices
    cdef const int32_t[::1] created_rank  # per call: its rank by creation, if main_only
    cdef int32_t[::1] by_order  # each session's calls in order, then -1
    # scratch, one entry per call
    cdef uint8_t[::1] drift_actions  # DRIFT_*
    cdef uint8_t[::1] flags   # CALL_*
    cdef int32_t[::1] forks   # forks between the call and the first of its chain
    cdef int32_t[::1] openers  # the first call of the call's row
    cdef int32_t[::1] roots   # the first call of the call's chain
    cdef int32_t[::1] first_row_of_node  # per node: the first row that covers it, or -1
    # outputs
    cdef int32_t[::1] owners  # per call: the chain that trains its output, or -1
    cdef Row[::1] rows
    cdef int64_t n_rows


cdef struct Span:             # a range of a row that comes from one output
    pos_t start
    pos_t stop
    pos_t out_start
    pos_t out_stop
    int8_t kind


cdef inline int _drift_action(
    const Call* calls, const Link* link, int32_t call, pos_t opened, const Choices* choices
) noexcept nogil:
    """Decide what drift does to the row (DRIFT_*): continue, absorb, fork or restart.

    ``opened`` is the length of the prompt that opened the row.
    """
    cdef const Call* parent = &calls[link.parent]
    cdef pos_t drift = parent.prompt_len + parent.out_len - link.lcp
    if drift == 0:
        return DRIFT_CONTINUES
    if choices.on_drift == ON_DRIFT_ABSORB_ANY:
        return DRIFT_ABSORBS if link.lcp >= opened else DRIFT_RESTARTS
    if link.lcp < parent.prompt_len:
        return DRIFT_FORKS
    if choices.on_drift == ON_DRIFT_ABSORB_SHORT_REPLY:
        return DRIFT_ABSORBS if calls[call].out_len < choices.fork_threshold else DRIFT_FORKS
    if choices.on_drift == ON_DRIFT_ABSORB_SHORT_DRIFT and drift < choices.fork_threshold:
        return DRIFT_ABSORBS
    return DRIFT_FORKS


cdef int _output_spans(
    const Call* call, pos_t replaced, bint owned, const Choices* choices, Span* spans
) noexcept nogil:
    """Write what becomes of one call's output in a row: at most three spans, ascending.

    ``replaced`` is the first position at which a later call of the row has other tokens.
    """
    cdef pos_t start = call.prompt_len, kept = call.out_len, inside
    cdef int n = 0
    if call.out_len == 0:
        return 0
    if replaced < start + call.out_len:
        kept = max(replaced - start, 0) if choices.keep_prefix else 0
    inside = max(min(kept, choices.max_tokens - start), 0)
    if inside > 0:
        spans[0].start = start
        spans[0].stop = start + inside
        spans[0].out_start = 0
        spans[0].out_stop = inside
        if not call.trainable:
            spans[0].kind = SPAN_UNTRAINABLE
        else:
            spans[0].kind = SPAN_TRAINED if owned else SPAN_DUPLICATE
        n = 1
    if not owned or not call.trainable:
        return n
    if inside < kept:
        spans[n].start = spans[n].stop = choices.max_tokens
        spans[n].out_start = inside
        spans[n].out_stop = kept
        spans[n].kind = SPAN_CUT
        n += 1
    if kept < call.out_len:
        spans[n].start = spans[n].stop = min(min(start + kept, replaced), choices.max_tokens)
        spans[n].out_start = kept
        spans[n].out_stop = call.out_len
        spans[n].kind = SPAN_ABSORBED
        n += 1
    return n


cdef inline bint _has_logprob(const Call* call, pos_t k) noexcept nogil:
    """Whether the k-th token of the output has a logprob."""
    cdef const uint8_t* bits = <const uint8_t*><intptr_t>call.valid
    cdef pos_t bit = call.valid_bit + k
    if call.logprobs == 0:
        return False
    return bits == NULL or bits[bit >> 3] >> (bit & 7) & 1


cdef inline bint _may_train(const Call* call, pos_t k, bint need_logprob) noexcept nogil:
    """Whether the k-th token of a trainable output may be trained."""
    cdef const uint8_t* bits = <const uint8_t*><intptr_t>call.mask
    cdef pos_t bit = call.mask_bit + k
    if bits != NULL and not bits[bit >> 3] >> (bit & 7) & 1:
        return False
    return not need_logprob or _has_logprob(call, k)


cdef pos_t _n_barred(const Call* call, pos_t n, bint need_logprob) noexcept nogil:
    """How many of the first n tokens of a trainable output may not be trained."""
    cdef pos_t k, barred = 0
    if call.mask == 0 and (not need_logprob or call.logprobs != 0 and call.valid == 0):
        return 0
    for k in range(n):
        barred += not _may_train(call, k, need_logprob)
    return barred


cdef bint _next_span(
    const Call* call, const Span* span, bint need_logprob, pos_t* at, Span* part
) noexcept nogil:
    """Write the part of a span that begins at ``at[0]`` of the output or later; 0: none left.

    A span has one part, unless output_mask or missing logprobs decide token by token whether
    it may be trained. Then a span inside the row is split wherever that changes; of a span outside
    the row, only the parts that might have been trained are returned, all at the span's own
    position.
    """
    cdef pos_t start, stop
    cdef bint given, empty = span.start == span.stop
    while at[0] < span.out_stop:
        part[0] = span[0]
        if not (need_logprob or call.mask) or span.kind == SPAN_UNTRAINABLE:
            at[0] = span.out_stop
            return True
        start = at[0]
        given = _may_train(call, start, need_logprob)
        stop = start + 1
        while stop < span.out_stop and _may_train(call, stop, need_logprob) == given:
            stop += 1
        at[0] = stop
        if empty and not given:
            continue
        part.out_start = start
        part.out_stop = stop
        if not empty:
            part.start = span.start + (start - span.out_start)
            part.stop = part.start + (stop - start)
        if not given:
            part.kind = SPAN_UNTRAINABLE
        return True
    return False


cdef inline pos_t _row_len(const Call* calls, const Row* row) noexcept nogil:
    """Tokens of a row that max_tokens does not cut."""
    return min(_held_len(&calls[row.last]), row.end)


cdef void _measure_row(Plan plan, Row* row, int64_t* totals) noexcept nogil:
    """Complete a row whose last, end, n_calls and owner are known; ``totals`` by span kind."""
    cdef const Call* calls = plan.forest.calls
    cdef const Choices* choices = plan.choices
    cdef int32_t call = row.last, n_left = row.n_calls
    cdef pos_t replaced = row.end
    cdef int n, k
    cdef bint owned
    cdef pos_t at, size
    cdef Span[3] spans
    cdef Span part
    for k in range(N_SPAN_KINDS):
        totals[k] = 0
    row.n_spans = 0
    row.n_trained = 0
    row.use_tool = row.ill_formed = 0
    row.truncated = calls[row.last].stop == STOP_LENGTH
    row.n_tokens = min(_row_len(calls, row), choices.max_tokens)
    while n_left > 0:
        owned = plan.owners[call] == row.owner
        n = _output_spans(
            &calls[call], replaced, owned or choices.train_in == TRAIN_IN_EVERY, choices, spans
        )
        for k in range(n):
            at = spans[k].out_start
            while _next_span(&calls[call], &spans[k], choices.need_logprob, &at, &part):
                row.n_spans += 1
                size = part.out_stop - part.out_start
                if part.kind == SPAN_TRAINED:
                    row.n_trained += size
                # an output that is trained again counts as a duplicate
                if owned or part.kind in (SPAN_DUPLICATE, SPAN_UNTRAINABLE):
                    totals[part.kind] += size
                elif part.kind == SPAN_TRAINED:
                    totals[SPAN_DUPLICATE] += size
        row.use_tool |= calls[call].use_tool
        row.ill_formed |= calls[call].ill_formed
        row.prompt_len = calls[call].prompt_len
        n_left -= 1
        replaced = min(replaced, plan.links[call].lcp)
        call = plan.links[call].parent


cdef void _cut_at_calls(Plan plan, Row* row, int64_t* totals) noexcept nogil:
    """End a row that max_tokens truncates inside a prompt with the call before.

    ``totals`` stay complete. With ``keep_prefix``, an output loses what the next call replaced
    even if that call is removed (as miles, which trims replies before it cuts rows).
    """
    cdef const Call* calls = plan.forest.calls
    cdef int64_t before
    cdef pos_t lcp
    cdef bint shorter = False
    while (
        row.n_calls > 1 and calls[row.last].prompt_len >= plan.choices.max_tokens
        and _row_len(calls, row) > plan.choices.max_tokens
    ):
        lcp = plan.links[row.last].lcp
        row.last = plan.links[row.last].parent
        row.end = NEVER
        if plan.choices.keep_prefix and lcp >= calls[row.last].prompt_len:
            row.end = lcp
        row.n_calls -= 1
        shorter = True
    if not shorter:
        return
    before = totals[SPAN_TRAINED] + totals[SPAN_CUT] + totals[SPAN_ABSORBED]
    _measure_row(plan, row, totals)
    totals[SPAN_CUT] = before - totals[SPAN_TRAINED] - totals[SPAN_ABSORBED]


cdef void _find_parent_row(Plan plan, Row* row, int32_t index) noexcept nogil:
    """Set parent_row and shared, and mark the nodes that this row is the first to cover.

    A truncated row covers its last node in part. All rows are truncated at one position, so no
    later row covers more of that node than the first one.
    """
    cdef const Node* nodes = plan.forest.nodes
    cdef int32_t node = plan.forest.ends[row.last], by
    row.parent_row = -1
    row.shared = 0
    while nodes[node].start >= row.n_tokens:
        node = nodes[node].parent
    while nodes[node].parent >= 0:
        by = plan.first_row_of_node[node]
        if by >= 0:
            row.parent_row = plan.rows[by].index
            row.shared = min(min(nodes[node].stop, row.n_tokens), plan.rows[by].n_tokens)
            return
        plan.first_row_of_node[node] = index
        node = nodes[node].parent


cdef int _lost_column(const Link* link) noexcept nogil:
    """The report's column for the output of a call in no chain."""
    if link.rewritten_by >= 0:
        return REPORT_LOST_REWRITTEN
    if link.link_reason in (
        REASON_AMBIGUOUS, REASON_SUPERSEDED, REASON_UNRESOLVED, REASON_UNRESOLVED_AMBIGUOUS,
        REASON_UNRESOLVED_KEPT, REASON_CHAIN_QUARANTINED,
    ):
        return REPORT_LOST_QUARANTINED
    if link.link_reason == REASON_REFUSED_TOKENS or link.link_reason == REASON_REFUSED_TRUNCATED:
        return REPORT_LOST_REFUSED
    if link.link_reason == REASON_RETRIED:
        return REPORT_LOST_RETRIED
    return REPORT_LOST_UNROUTED


cdef void _count_call(
    const Call* call, const Link* link, bint need_logprob, int64_t* report
) noexcept nogil:
    """Count the call, its sampled tokens, and those that no row may train."""
    cdef int64_t due = call.out_len, masked
    report[REPORT_TURNS] += 1
    report[REPORT_TOKENS_SAMPLED] += due
    if not call.trainable:
        report[REPORT_LOST_UNTRAINABLE] += due
        due = 0
    else:
        masked = _n_barred(call, due, False)
        due -= _n_barred(call, due, need_logprob)
        report[REPORT_LOST_MASKED] += masked
        report[REPORT_LOST_NO_LOGPROB] += call.out_len - masked - due
    if link.order < 0:
        report[_lost_column(link)] += due
    report[REPORT_ROOTS] += (
        link.parent < 0
        and link.link_reason != REASON_UNROUTED and link.link_reason != REASON_EMPTY
    )
    report[REPORT_TURNS_QUARANTINED] += link.link_reason in (
        REASON_AMBIGUOUS, REASON_SUPERSEDED, REASON_UNRESOLVED, REASON_UNRESOLVED_AMBIGUOUS,
    )
    report[REPORT_TURNS_UNRESOLVED] += link.link_reason in (
        REASON_UNRESOLVED, REASON_UNRESOLVED_AMBIGUOUS, REASON_UNRESOLVED_KEPT,
    )


cdef bint _keep_row(
    const Choices* choices, const Row* row, pos_t full, const int64_t* totals, int below,
    int64_t* report,
) noexcept nogil:
    """Whether the policy keeps a measured row; its tokens are counted either way.

    ``full`` is its length without max_tokens; ``below`` is what drift does to the row
    at the next call of the chain.
    """
    report[REPORT_LOST_ABSORBED] += totals[SPAN_ABSORBED]
    if below == DRIFT_RESTARTS:
        report[REPORT_LOST_RESTARTED] += totals[SPAN_TRAINED] + totals[SPAN_CUT]
        return False
    if not choices.keep_empty and full == row.prompt_len:
        report[REPORT_ROWS_UNTRAINED] += 1
        report[REPORT_LOST_CUT] += totals[SPAN_CUT]  # if it was cut to a call
        return False
    if not choices.keep_untrained and row.n_trained + totals[SPAN_CUT] == 0:
        report[REPORT_ROWS_UNTRAINED] += 1
        return False
    if row.n_tokens < full and row.n_tokens <= row.prompt_len:
        report[REPORT_ROWS_CUT] += 1
        report[REPORT_LOST_CUT] += totals[SPAN_TRAINED] + totals[SPAN_CUT]
        return False
    report[REPORT_LOST_CUT] += totals[SPAN_CUT]
    report[REPORT_TOKENS_TRAINED] += totals[SPAN_TRAINED]
    report[REPORT_TOKENS_DUPLICATED] += totals[SPAN_DUPLICATE]
    return True


cdef void _apply_max_rows(Plan plan, int64_t first, int64_t* report) noexcept nogil:
    """Remove the rows of rows[first:n_rows] beyond ``max_rows``, which is 1 at least.

    The last row takes the position of the first that is removed.
    """
    cdef int64_t excess = plan.n_rows - first - plan.choices.max_rows, j
    cdef int64_t[N_SPAN_KINDS] totals
    if excess <= 0:
        return
    for j in range(plan.n_rows - 1 - excess, plan.n_rows - 1):
        _measure_row(plan, &plan.rows[j], totals)
        report[REPORT_ROWS_OVER_MAX_ROWS] += 1
        report[REPORT_TOKENS_TRAINED] -= totals[SPAN_TRAINED]
        report[REPORT_LOST_OVER_MAX_ROWS] += totals[SPAN_TRAINED]
        report[REPORT_TOKENS_DUPLICATED] -= totals[SPAN_DUPLICATE]
    plan.rows[plan.n_rows - 1 - excess] = plan.rows[plan.n_rows - 1]
    plan.n_rows -= excess


cdef bint _has_late_parent(const Link[::1] links, int64_t lo, int64_t hi) noexcept nogil:
    """Whether a call of the session was recorded before its parent.

    If so, calls are visited by ``order``; otherwise turn order already puts parents first.
    """
    cdef int64_t i
    for i in range(lo, hi):
        if links[i].order >= 0 and links[i].parent > i:
            return True
    return False


cdef int32_t _main_chain(Plan plan, int32_t lo, int32_t hi) noexcept nogil:
    """The leaf of the first chain of the root that was created first, or -1."""
    cdef int32_t k, leaf, best = -1
    for k in range(lo, hi):
        leaf = plan.by_order[k]
        if leaf < 0 or plan.flags[leaf] & CALL_CONTINUED:
            continue
        if best < 0 or plan.created_rank[plan.roots[leaf]] < plan.created_rank[plan.roots[best]]:
            best = leaf
    return best


cdef void _decide_calls(Plan plan, int32_t lo, int32_t hi, bint late) noexcept nogil:
    """Fill drift_actions, flags, forks, openers and roots of a session's calls, parents first."""
    cdef const Call* calls = plan.forest.calls
    cdef int32_t i, k, parent
    cdef int action
    for k in range(lo, hi):
        i = plan.by_order[k] if late else k
        if i < 0 or plan.links[i].order < 0:
            continue
        parent = plan.links[i].parent
        plan.openers[i] = plan.roots[i] = i
        plan.forks[i] = 0
        plan.flags[i] = CALL_USE_TOOL if calls[i].use_tool else 0
        if calls[i].ill_formed:
            plan.flags[i] |= CALL_ILL_FORMED
        if parent < 0:
            continue
        action = _drift_action(
            calls, &plan.links[i], i, calls[plan.openers[parent]].prompt_len, plan.choices
        )
        plan.drift_actions[i] = <uint8_t>action
        if action < DRIFT_FORKS:
            plan.openers[i] = plan.openers[parent]
        plan.forks[i] = plan.forks[parent] + (action == DRIFT_FORKS)
        plan.roots[i] = plan.roots[parent]
        plan.flags[i] |= plan.flags[parent] & CALL_CHAIN_FLAGS
        plan.flags[parent] |= CALL_CONTINUED


cdef inline bint _is_selected(Plan plan, int32_t call, int32_t only) noexcept nogil:
    """Whether the call is a leaf whose chain becomes rows."""
    if plan.flags[call] & CALL_CONTINUED:
        return False
    return not plan.choices.main_only or call == only


cdef int32_t _first_new_call(Plan plan, int32_t leaf, int64_t* report) noexcept nogil:
    """The call that opens the topmost row of a chain with something new.

    Makes the chain the owner of its outputs without an owner.
    """
    cdef int32_t call = leaf, top = leaf
    while call >= 0 and (plan.owners[call] < 0 or plan.owners[call] == leaf):
        plan.owners[call] = leaf
        top = call
        call = plan.links[call].parent
    # start at the first call of the row that contains the first unowned output
    top = plan.openers[top]
    report[REPORT_ROWS_UNTRAINED] += plan.forks[top]
    return top


cdef void _plan_chain(
    Plan plan, int32_t leaf, int32_t session, int64_t* report
) noexcept nogil:
    """Append the rows of one chain, from its first call to the leaf."""
    cdef int32_t top = _first_new_call(plan, leaf, report), call = leaf
    cdef int64_t low = plan.n_rows, high
    cdef int below = DRIFT_FORKS  # how the next row of the chain begins
    cdef pos_t full
    cdef int64_t[N_SPAN_KINDS] totals
    cdef Row row
    while True:
        row.last = call
        row.end = NEVER
        row.owner = leaf
        row.session = session
        row.reserved = 0
        row.n_calls = 1
        while plan.drift_actions[call] < DRIFT_FORKS:
            call = plan.links[call].parent
            row.n_calls += 1
        _measure_row(plan, &row, totals)
        if plan.choices.cut_at_calls:
            _cut_at_calls(plan, &row, totals)
        if plan.choices.chain_flags:
            row.truncated = plan.forest.calls[leaf].stop == STOP_LENGTH
            row.use_tool = plan.flags[leaf] & CALL_USE_TOOL != 0
            row.ill_formed = plan.flags[leaf] & CALL_ILL_FORMED != 0
        full = _row_len(plan.forest.calls, &row)
        if _keep_row(plan.choices, &row, full, totals, below, report):
            plan.rows[plan.n_rows] = row
            plan.n_rows += 1
        if call == top:
            break
        below = plan.drift_actions[call]
        call = plan.links[call].parent
    # They were found from the leaf upwards.
    high = plan.n_rows - 1
    while low < high:
        row = plan.rows[low]
        plan.rows[low] = plan.rows[high]
        plan.rows[high] = row
        low += 1
        high -= 1


cdef void _plan_session(Plan plan, int32_t session, int64_t* report) noexcept nogil:
    """Append the rows of one session.

    Every row adds at least one call, so there are at most as many rows as calls.
    """
    cdef:
        const Call* calls = plan.forest.calls
        const Choices* choices = plan.choices
        int32_t lo = <int32_t>plan.forest.session_offsets[session]
        int32_t hi = <int32_t>plan.forest.session_offsets[session + 1]
        int32_t i, k, call, only = -1
        int64_t j, first = plan.n_rows
        Row* row

    for i in range(lo, hi):
        plan.owners[i] = -1
        _count_call(&calls[i], &plan.links[i], choices.need_logprob, report)
        plan.drift_actions[i] = DRIFT_FORKS
    _decide_calls(plan, lo, hi, _has_late_parent(plan.links, lo, hi))
    if choices.main_only:
        only = _main_chain(plan, lo, hi)
    if choices.train_in == TRAIN_IN_EARLIEST:
        for i in range(lo, hi):
            call = i if plan.links[i].order >= 0 and _is_selected(plan, i, only) else -1
            while call >= 0 and plan.owners[call] < 0:
                plan.owners[call] = i
                call = plan.links[call].parent
    for k in range(lo, hi):
        i = plan.by_order[k]
        if i >= 0 and _is_selected(plan, i, only):
            _plan_chain(plan, i, session, report)
    if choices.main_only:
        for i in range(lo, hi):
            if plan.links[i].order >= 0 and plan.owners[i] < 0 and calls[i].trainable:
                report[REPORT_LOST_NOT_SELECTED] += calls[i].out_len - _n_barred(
                    &calls[i], calls[i].out_len, choices.need_logprob
                )
    _apply_max_rows(plan, first, report)
    for j in range(first, plan.n_rows):
        row = &plan.rows[j]
        row.index = <int32_t>(j - first)
        _find_parent_row(plan, row, <int32_t>j)
        report[REPORT_ROWS] += 1
        report[REPORT_TOKENS_FORWARD] += row.n_tokens
        report[REPORT_TOKENS_FORWARD_SHARED] += row.n_tokens - row.shared


cdef int64_t _order_calls(
    CallForest forest, const Link[::1] links, int32_t[::1] by_order
) noexcept nogil:
    """Fill each session's calls in order, then -1; return the first bad link, or -1.

    A session's parents all come before their children, in the turns or in order, so no chain
    is a circle; no two calls have one order.
    """
    cdef bint late
    cdef int64_t s, i, lo, hi
    cdef int32_t parent, order
    for s in range(forest.n_sessions):
        lo = forest.session_offsets[s]
        hi = forest.session_offsets[s + 1]
        late = _has_late_parent(links, lo, hi)
        for i in range(lo, hi):
            by_order[i] = -1
        for i in range(lo, hi):
            parent, order = links[i].parent, links[i].order
            if order >= hi - lo or (order >= 0 and by_order[lo + order] >= 0):
                return i
            if order >= 0:
                by_order[lo + order] = <int32_t>i
            if parent < 0:
                continue
            if parent < lo or parent >= hi:
                return i
            if order >= 0 and (parent == i or links[parent].order < 0):
                return i
            if order >= 0 and late and links[parent].order >= order:
                return i
            if not 0 <= links[i].lcp <= forest.calls[i].prompt_len:
                return i
            if links[i].lcp > _held_len(&forest.calls[parent]):
                return i
    return -1


cdef int32_t[::1] _ordered(CallForest forest, const Link[::1] links):
    """Each session's calls in the policy's order, then -1; raises unless the links have one."""
    cdef int32_t[::1] by_order = empty(forest.n_calls, "i4")
    _check_length("links", links.shape[0], forest.n_calls)
    cdef int64_t bad = _order_calls(forest, links, by_order)
    if bad >= 0:
        raise LayoutError(
            f"links[{bad}] is no link: parent {links[bad].parent}, lcp {links[bad].lcp}, order "
            f"{links[bad].order}"
        )
    return by_order


def order_calls(CallForest forest not None, const Link[::1] links not None):
    """The calls that are in the policy's order, session by session, in that order."""
    by_order = _ordered(forest, links).base
    return by_order[by_order >= 0]


def plan_rows(
    CallForest forest not None,
    const Link[::1] links not None,
    const Choices[::1] choices not None,
    const int32_t[::1] created_rank not None,
):
    """The rows in the policy's order, the owners of outputs, and the report.

    Owners name the chain that trains each call's output, by its last call, or -1. The report
    has a line per session with the columns of `trajkit.schema.REPORT` from ``turns`` on.
    ``created_rank`` ranks the calls by when they were created (``main_only``).
    """
    cdef int64_t n_calls = forest.n_calls, s
    cdef Plan plan = Plan()
    _check_length("choices", choices.shape[0], 1)
    _check_length("created_rank", created_rank.shape[0], n_calls if choices[0].main_only else 0)
    if choices[0].max_tokens < 0 or choices[0].max_rows < 1:
        raise LayoutError(
            f"max_tokens is {choices[0].max_tokens} and max_rows {choices[0].max_rows}: at "
            "least 0 and 1 are needed"
        )
    plan.forest, plan.links, plan.choices = forest, links, &choices[0]
    plan.created_rank, plan.by_order = created_rank, _ordered(forest, links)
    plan.forks, plan.openers, plan.roots, plan.owners = (empty(n_calls, "i4") for _ in range(4))
    plan.drift_actions, plan.flags = empty(n_calls, "u1"), empty(n_calls, "u1")
    plan.first_row_of_node = full(forest.n_nodes, -1, "i4")
    plan.rows, plan.n_rows = empty(n_calls, DTYPES["Row"]), 0
    cdef int64_t[:, ::1] report = zeros((forest.n_sessions, <int>N_COUNTS), "i8")
    with nogil:
        for s in range(forest.n_sessions):
            _plan_session(plan, <int32_t>s, &report[s, 0])
    return plan.rows.base[: plan.n_rows], plan.owners.base, report.base


# ---
# The columns of planned rows that have a value per token, and their spans.
#
# Fills tokens, mask, logprobs, validity and spans from the calls' paths and the plan, in
# O(tokens and spans written + calls in the rows).

cpdef enum:  # the lines of spans: the fields of trajkit.schema.SPAN but kind
    LINE_START, LINE_STOP, LINE_TURN_INDEX, LINE_OUTPUT_START, LINE_OUTPUT_STOP

cdef enum:
    N_LINES = LINE_OUTPUT_STOP + 1


cdef struct Columns:          # of rows, as far as they are written
    token_t* ids
    float* logprobs
    uint8_t* mask             # bitmaps, least significant bit first
    uint8_t* valid
    int32_t* spans            # N_LINES lines of n_spans
    int8_t* kinds
    int64_t n_spans
    bint uncached             # write tokens and logprobs past the caches
    pos_t at                  # where the next row's tokens begin
    int64_t span              # the next span
    pos_t missing             # trained tokens without a logprob


cdef void _set_bits(uint8_t* bits, pos_t start, pos_t stop) noexcept nogil:
    """Set bits[start:stop], least significant bit first (the Arrow order)."""
    while start < stop and start & 7:
        bits[start >> 3] |= <uint8_t>(1 << (start & 7))
        start += 1
    if stop - start >= 8:
        memset(bits + (start >> 3), 0xFF, (stop - start) >> 3)
        start += (stop - start) & ~<pos_t>7
    while start < stop:
        bits[start >> 3] |= <uint8_t>(1 << (start & 7))
        start += 1


cdef void _put_logprobs(
    const Call* call, const Span* span, Columns* columns, pos_t at
) noexcept nogil:
    """Write the logprobs of a trained span, which is at ``at``: 0.0 for missing ones."""
    cdef const float* values = <const float*><intptr_t>call.logprobs
    cdef pos_t i, n = span.stop - span.start
    if values == NULL:
        _put(&columns.logprobs[at], NULL, n * sizeof(float), columns.uncached)
        columns.missing += n
        return
    values += span.out_start
    if call.valid == 0:
        _put(&columns.logprobs[at], values, n * sizeof(float), columns.uncached)
        _set_bits(columns.valid, at, at + n)
        return
    for i in range(n):
        if _has_logprob(call, span.out_start + i):
            columns.logprobs[at + i] = values[i]
            _set_bits(columns.valid, at + i, at + i + 1)
        else:
            columns.logprobs[at + i] = 0.0
            columns.missing += 1


cdef void _put_span(Columns* columns, const Span* span, int32_t turn) noexcept nogil:
    cdef int32_t* spans = columns.spans + columns.span
    cdef int64_t n = columns.n_spans
    spans[LINE_START * n] = <int32_t>span.start
    spans[LINE_STOP * n] = <int32_t>span.stop
    spans[LINE_TURN_INDEX * n] = turn
    spans[LINE_OUTPUT_START * n] = <int32_t>span.out_start
    spans[LINE_OUTPUT_STOP * n] = <int32_t>span.out_stop
    columns.kinds[columns.span] = span.kind
    columns.span += 1


cdef bint _fill_row(
    Plan plan, const Row* row, const int32_t* calls, const int32_t[::1] turn_index,
    pos_t* replaced, Columns* columns,
) noexcept nogil:
    """Write all of a row but its tokens; return whether it has the spans that it claims.

    Every logprob is written once, in the order of memory: 0.0 where no token is trained. A byte
    of a bitmap is cleared by the row of its first bit. ``replaced`` is scratch, see
    `_output_spans`.
    """
    cdef const Call* call
    cdef pos_t start = columns.at, stop = start + row.n_tokens, written = start, begin
    cdef pos_t after = row.end
    cdef int64_t k, byte = (start + 7) >> 3, n_bytes = ((stop + 7) >> 3) - byte
    cdef int64_t last_span = columns.span + row.n_spans
    cdef int n, j
    cdef bint owned
    cdef Span[3] spans
    cdef Span part
    if n_bytes > 0:
        memset(columns.mask + byte, 0, n_bytes)
        memset(columns.valid + byte, 0, n_bytes)
    for k in range(row.n_calls - 1, -1, -1):
        replaced[k] = after
        after = min(after, plan.links[calls[k]].lcp)
    for k in range(row.n_calls):
        call = &plan.forest.calls[calls[k]]
        owned = plan.choices.train_in == TRAIN_IN_EVERY or plan.owners[calls[k]] == row.owner
        n = _output_spans(call, replaced[k], owned, plan.choices, spans)
        for j in range(n):
            begin = spans[j].out_start
            while _next_span(call, &spans[j], plan.choices.need_logprob, &begin, &part):
                if columns.span == last_span:
                    return False
                _put_span(columns, &part, turn_index[calls[k]])
                if part.kind != SPAN_TRAINED:
                    continue
                if not written <= start + part.start <= start + part.stop <= stop:
                    return False
                _put(
                    &columns.logprobs[written], NULL,
                    (start + part.start - written) * sizeof(float), columns.uncached,
                )
                _set_bits(columns.mask, start + part.start, start + part.stop)
                _put_logprobs(call, &part, columns, start + part.start)
                written = start + part.stop
    _put(&columns.logprobs[written], NULL, (stop - written) * sizeof(float), columns.uncached)
    columns.at = stop
    return columns.span == last_span


def list_calls(const Row[::1] rows not None, const Link[::1] links not None):
    """The calls of each row, first to last, row after row."""
    cdef int64_t n_rows = rows.shape[0], n_calls = links.shape[0], r, i, n = 0, bad = -1
    cdef int32_t call
    for r in range(n_rows):
        if rows[r].n_calls < 0:
            raise LayoutError(f"rows[{r}] has {rows[r].n_calls} calls")
        n += rows[r].n_calls
    cdef int32_t[::1] calls = empty(n, "i4")
    n = 0
    with nogil:
        for r in range(n_rows):
            call = rows[r].last
            n += rows[r].n_calls
            for i in range(rows[r].n_calls):
                if not 0 <= call < n_calls:
                    bad = r
                    break
                calls[n - 1 - i] = call
                call = links[call].parent
    if bad >= 0:
        raise LayoutError(f"rows[{bad}] has {rows[bad].n_calls} calls: links has fewer")
    return calls.base


def fill_rows(
    CallForest forest not None,
    const Link[::1] links not None,
    const Choices[::1] choices not None,
    int32_t[::1] owners not None,
    const int32_t[::1] turn_index not None,
    const Row[::1] rows not None,
    token_t[::1] input_ids not None,
    uint8_t[::1] loss_mask not None,
    float[::1] logprobs not None,
    uint8_t[::1] valid not None,
    bint uncached,
):
    """Write the columns of planned rows with a value per token, and make their spans.

    ``links`` and ``owners`` are those of `plan_rows`, ``rows`` some of its result; ``loss_mask``
    and ``valid`` are bitmaps. Tokens and logprobs are written past the caches if ``uncached``.
    Returns how many logprobs are missing, the calls of the rows (`list_calls`), the spans as
    lines LINE_*, and their kinds, indices into `trajkit.schema.SPAN_KINDS`.
    """
    cdef int64_t n_rows = rows.shape[0], r, k = 0, bad = -1
    cdef pos_t n_tokens = 0, longest = 0, n_spans = 0
    cdef Plan plan = Plan()
    cdef Columns columns
    cdef const int32_t[::1] calls = list_calls(rows, links)
    for name, m in (
        ("links", links.shape[0]), ("owners", owners.shape[0]),
        ("turn_index", turn_index.shape[0]),
    ):
        _check_length(name, m, forest.n_calls)
    _check_length("choices", choices.shape[0], 1)
    for r in range(n_rows):
        if not (
            rows[r].n_calls > 0 and rows[r].n_spans >= 0 and rows[r].last < forest.n_calls
            and 0 <= rows[r].n_tokens <= _held_len(&forest.calls[rows[r].last])
        ):
            bad = r
        n_tokens += rows[r].n_tokens
        n_spans += rows[r].n_spans
        longest = max(longest, rows[r].n_calls)
    for name, m, needed in (
        ("input_ids", input_ids.shape[0], n_tokens), ("logprobs", logprobs.shape[0], n_tokens),
        ("loss_mask", loss_mask.shape[0], (n_tokens + 7) // 8),
        ("valid", valid.shape[0], (n_tokens + 7) // 8),
    ):
        _check_length(name, m, needed)
    # one entry more than are filled, so that there is a first one
    cdef int32_t[::1] chain = empty(forest.n_nodes + 1, "i4")
    cdef int32_t[:, ::1] spans = empty((<int>N_LINES, n_spans), "i4")
    cdef int8_t[::1] kinds = empty(n_spans, "i1")
    cdef pos_t[::1] replaced = empty(longest + 1, "i8")
    plan.forest, plan.links, plan.choices, plan.owners = forest, links, &choices[0], owners
    memset(&columns, 0, sizeof(Columns))
    columns.n_spans, columns.uncached = n_spans, uncached
    if n_tokens > 0:
        columns.ids, columns.logprobs = &input_ids[0], &logprobs[0]
        columns.mask, columns.valid = &loss_mask[0], &valid[0]
    if n_spans > 0:
        columns.spans, columns.kinds = &spans[0, 0], &kinds[0]
    if bad < 0:
        with nogil:
            for r in range(n_rows):
                if rows[r].n_tokens > 0:
                    _copy_path(
                        forest, forest.ends[rows[r].last], 0, rows[r].n_tokens,
                        &columns.ids[columns.at], &chain[0], uncached,
                    )
                if not _fill_row(plan, &rows[r], &calls[k], turn_index, &replaced[0], &columns):
                    bad = r
                    break
                k += rows[r].n_calls
            if uncached:
                trajkit_end_uncached()
    if bad >= 0:
        raise LayoutError(
            f"rows[{bad}] is no row of {rows[bad].n_calls} calls up to {rows[bad].last} with "
            f"{rows[bad].n_tokens} tokens and {rows[bad].n_spans} spans"
        )
    return columns.missing, calls.base, spans.base, kinds.base

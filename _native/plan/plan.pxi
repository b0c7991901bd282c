"""Which rows a policy makes of linked calls, and what becomes of every claim.

The path of a call is what a row holds once the call has been taken into it, so a row is a
maximal run of linked calls that no drift cuts, and all that is said of it follows from the
pairs: no row is built to find out. A claim is a call's output; the first chain in the
policy's order that contains a call owns its claim, or one of the rows that hold it does
(own.pxi).
"""

cdef enum:  # how a call meets the row that its parent ended
    # a fork that leaves nothing of that row: the row begins anew
    KIND_CLEAN, KIND_ABSORB, KIND_FORK, KIND_RESTART

cdef enum:  # what is compared with the threshold when the last reply came back changed
    ABSORB_NEVER, ABSORB_SHORT_REPLY, ABSORB_SHORT_DRIFT
    ABSORB_ANY  # nothing is: drift is taken in from the row's opening prompt on

cdef enum:
    NEVER = 0x7FFFFFFFFFFFFFFF  # a position beyond every row

cdef enum:  # who trains a claim that several rows hold; in the order of policies.OWNS
    OWN_FIRST, OWN_LONGEST, OWN_MOST_TRAINED, OWN_EARLIEST, OWN_EVERY

cdef enum:  # in the order of trajkit.schema.SPAN_KINDS
    SPAN_TRAINED, SPAN_DUPLICATE, SPAN_ABSORBED, SPAN_CUT, SPAN_UNTRAINABLE, SPAN_UNSPLICED
    N_SPAN_KINDS

cdef enum:  # in the order of trajkit.schema.REPORT, from turns on
    REPORT_TURNS, REPORT_ROWS, REPORT_ROWS_UNTRAINED, REPORT_ROWS_CUT, REPORT_ROWS_UNEMITTED
    REPORT_SAMPLED, REPORT_TRAINED, REPORT_DUPLICATED, REPORT_FORWARD, REPORT_FORWARD_SHARED
    REPORT_LOST_ABSORBED, REPORT_LOST_DEMOTED, REPORT_LOST_CUT
    REPORT_LOST_UNTRAINABLE, REPORT_LOST_UNROUTED, REPORT_LOST_RESTARTED
    REPORT_LOST_UNEMITTED
    REPORT_LOST_ABORTED       # left to the caller, who knows which calls were aborted
    REPORT_LOST_MASKED, REPORT_LOST_NO_LOGPROB, REPORT_LOST_UNSPLICED
    REPORT_LOST_QUARANTINED, REPORT_LOST_UNDELIVERED, REPORT_LOST_REFUSED
    REPORT_LOST_RETRIED
    REPORT_ROWS_UNSPLICED, REPORT_TURNS_UNSPLICED
    REPORT_BY_TOKENS          # left to the caller, who knows the route
    REPORT_ROOTS, REPORT_QUARANTINED, REPORT_UNRESOLVED
    REPORT_WIDTH


cdef struct Rule:
    int32_t absorb            # ABSORB_*: what is compared with the threshold
    int64_t threshold
    bint keep_head            # an absorbed reply stays trained up to where drift starts
    bint drop_untrained
    bint drop_empty           # rows without a response
    bint chain_flags          # flags of the whole chain, not of the row
    bint main_only            # rows of one chain: the first of the root that was created first
    bint cut_calls            # a row that max_tokens cuts in a prompt ends with the call before
    pos_t max_tokens
    int64_t max_rows          # of a session: the first ones and the last
    int32_t own               # OWN_*: who trains a claim that several rows hold
    bint by_token             # a token without a logprob is not trained


cdef struct Claims:           # scratch of own.pxi
    int64_t* lines            # CLAIM_WIDTH by n_calls
    int64_t n_calls


cdef struct Piece:
    pos_t start
    pos_t stop
    pos_t out_start
    pos_t out_stop
    int8_t kind


cdef inline bint _by_chain(int32_t own, bint main_only) noexcept nogil:
    """Whether a claim's owner is a chain rather than a row; of one chain, no matter which."""
    return main_only or (own != OWN_LONGEST and own != OWN_MOST_TRAINED)


cdef inline int _kind(
    const Call* calls, const Link* links, int32_t call, pos_t opened, const Rule* rule
) noexcept nogil:
    """What becomes of the row that holds the call's parent when the call comes.

    ``opened`` is the length of the prompt that opened the row.
    """
    cdef const Link* link = &links[call]
    cdef const Call* parent = &calls[link.parent]
    cdef pos_t drift = parent.prompt_len + parent.out_len - link.lcp
    if drift == 0:
        return KIND_CLEAN
    if rule.absorb == ABSORB_ANY:
        return KIND_ABSORB if link.lcp >= opened else KIND_RESTART
    if link.lcp < parent.prompt_len:
        return KIND_FORK
    if rule.absorb == ABSORB_SHORT_REPLY and calls[call].out_len < rule.threshold:
        return KIND_ABSORB
    if rule.absorb == ABSORB_SHORT_DRIFT and drift < rule.threshold:
        return KIND_ABSORB
    return KIND_FORK


cdef int _pieces(
    const Call* call, pos_t replaced, bint owned, const Rule* rule, Piece* pieces
) noexcept nogil:
    """What a row says of one call's output: up to three pieces, ascending.

    ``replaced`` is where, at the earliest, later calls of the row have put something else.
    """
    cdef pos_t start = call.prompt_len, kept = call.out_len, inside
    cdef int n = 0
    if call.out_len == 0:
        return 0
    if replaced < start + call.out_len:
        kept = max(replaced - start, 0) if rule.keep_head else 0
    inside = max(min(kept, rule.max_tokens - start), 0)
    if inside > 0:
        pieces[0].start = start
        pieces[0].stop = start + inside
        pieces[0].out_start = 0
        pieces[0].out_stop = inside
        if not call.trainable:
            pieces[0].kind = SPAN_UNTRAINABLE
        else:
            pieces[0].kind = SPAN_TRAINED if owned else SPAN_DUPLICATE
        n = 1
    if not owned or not call.trainable:
        return n
    if inside < kept:
        pieces[n].start = pieces[n].stop = rule.max_tokens
        pieces[n].out_start = inside
        pieces[n].out_stop = kept
        pieces[n].kind = SPAN_CUT
        n += 1
    if kept < call.out_len:
        pieces[n].start = pieces[n].stop = min(min(start + kept, replaced), rule.max_tokens)
        pieces[n].out_start = kept
        pieces[n].out_stop = call.out_len
        pieces[n].kind = SPAN_ABSORBED
        n += 1
    return n


cdef inline bint _has_logprob(const Call* call, pos_t k) noexcept nogil:
    """Whether the engine gave one for the k-th token of the output."""
    cdef const uint8_t* bits = <const uint8_t*><intptr_t>call.valid
    cdef pos_t bit = call.valid_bit + k
    if call.logprobs == 0:
        return False
    return bits == NULL or bits[bit >> 3] >> (bit & 7) & 1


cdef pos_t _n_without(const Call* call, pos_t n) noexcept nogil:
    """How many of the first n tokens of an output have no logprob."""
    cdef pos_t k, missing = 0
    if call.logprobs == 0:
        return n
    if call.valid == 0:
        return 0
    for k in range(n):
        missing += not _has_logprob(call, k)
    return missing


cdef inline bint _may_train(const Call* call, pos_t k, bint by_token) noexcept nogil:
    """Whether the k-th token of a trainable output may be trained."""
    cdef const uint8_t* bits = <const uint8_t*><intptr_t>call.mask
    cdef pos_t bit = call.mask_bit + k
    if bits != NULL and not bits[bit >> 3] >> (bit & 7) & 1:
        return False
    return not by_token or _has_logprob(call, k)


cdef pos_t _n_barred(const Call* call, pos_t n, bint by_token) noexcept nogil:
    """How many of the first n tokens of a trainable output may not be trained."""
    cdef pos_t k, barred = 0
    if call.mask == 0:
        return _n_without(call, n) if by_token else 0
    for k in range(n):
        barred += not _may_train(call, k, by_token)
    return barred


cdef bint _next_part(
    const Call* call, const Piece* piece, bint by_token, pos_t* at, Piece* part
) noexcept nogil:
    """The part of a piece that begins at ``at[0]`` of the output, or beyond; 0: none left.

    A piece has one part, unless it is decided token by token what may be trained. Then what
    stands in the row is parted where that changes; of what was lost, only the parts that
    might have been trained count, and they all stand where the piece does.
    """
    cdef pos_t start, stop
    cdef bint given, empty = piece.start == piece.stop
    while at[0] < piece.out_stop:
        part[0] = piece[0]
        if not (by_token or call.mask) or piece.kind == SPAN_UNTRAINABLE:
            at[0] = piece.out_stop
            return True
        start = at[0]
        given = _may_train(call, start, by_token)
        stop = start + 1
        while stop < piece.out_stop and _may_train(call, stop, by_token) == given:
            stop += 1
        at[0] = stop
        if empty and not given:
            continue
        part.out_start = start
        part.out_stop = stop
        if not empty:
            part.start = piece.start + (start - piece.out_start)
            part.stop = part.start + (stop - start)
        if not given:
            part.kind = SPAN_UNTRAINABLE
        return True
    return False


cdef inline pos_t _row_len(const Call* calls, const Row* row) noexcept nogil:
    """Tokens of a row that max_tokens does not cut."""
    return min(_held_len(&calls[row.last]), row.end)


cdef void _survey(
    const Call* calls, const Link* links, const int32_t* owners, const Rule* rule, Row* row,
    int64_t* totals,
) noexcept nogil:
    """Complete a row of which last, end, n_calls and owner are known; totals by span kind."""
    cdef int32_t call = row.last
    cdef int64_t i
    cdef pos_t replaced = row.end
    cdef int n, k
    cdef bint mine
    cdef pos_t at, size
    cdef Piece[3] pieces
    cdef Piece part
    for k in range(N_SPAN_KINDS):
        totals[k] = 0
    row.n_spans = 0
    row.n_trained = 0
    row.use_tool = row.ill_formed = 0
    row.truncated = calls[row.last].length_stop
    row.n_tokens = row.stored = min(_row_len(calls, row), rule.max_tokens)
    for i in range(row.n_calls):
        mine = owners[call] == row.owner
        n = _pieces(&calls[call], replaced, mine or rule.own == OWN_EVERY, rule, pieces)
        for k in range(n):
            at = pieces[k].out_start
            while _next_part(&calls[call], &pieces[k], rule.by_token, &at, &part):
                row.n_spans += 1
                size = part.out_stop - part.out_start
                if part.kind == SPAN_TRAINED:
                    row.n_trained += size
                    row.stored = min(row.stored, part.start)
                # What trains again is counted as what stands there again.
                if mine or part.kind in (SPAN_DUPLICATE, SPAN_UNTRAINABLE):
                    totals[part.kind] += size
                elif part.kind == SPAN_TRAINED:
                    totals[SPAN_DUPLICATE] += size
        row.use_tool |= calls[call].use_tool
        row.ill_formed |= calls[call].ill_formed
        row.prompt_len = calls[call].prompt_len
        replaced = min(replaced, links[call].lcp)
        call = links[call].parent


cdef void _cut_to_calls(
    const Call* calls, const Link* links, const int32_t* owners, const Rule* rule, Row* row,
    int64_t* totals,
) noexcept nogil:
    """Let a row that is cut inside a prompt end with the call before; totals stay complete.

    Where the head of a reply is kept, the reply loses what the call after it replaced, though
    that call is left out (spec: miles 1.2, which trims replies before it cuts rows).
    """
    cdef int64_t before
    cdef pos_t lcp
    cdef bint shorter = False
    while (
        row.n_calls > 1 and calls[row.last].prompt_len >= rule.max_tokens
        and _row_len(calls, row) > rule.max_tokens
    ):
        lcp = links[row.last].lcp
        row.last = links[row.last].parent
        row.end = lcp if rule.keep_head and lcp >= calls[row.last].prompt_len else NEVER
        row.n_calls -= 1
        shorter = True
    if not shorter:
        return
    before = totals[SPAN_TRAINED] + totals[SPAN_CUT] + totals[SPAN_ABSORBED]
    _survey(calls, links, owners, rule, row, totals)
    totals[SPAN_CUT] = before - totals[SPAN_TRAINED] - totals[SPAN_ABSORBED]


cdef void _find_parent_row(
    const Node* nodes, const int32_t* ends, int32_t* marks, const Row* rows, Row* row,
    int32_t index,
) noexcept nogil:
    """Set parent_row and shared, and mark the nodes that this row is the first to cover.

    A row that is cut covers its last node in part. All cuts fall at one position, so a row
    that covers more of that node than the first one does not exist.
    """
    cdef int32_t node = ends[row.last], by
    row.parent_row = -1
    row.shared = 0
    while nodes[node].start >= row.n_tokens:
        node = nodes[node].parent
    while nodes[node].parent >= 0:
        by = marks[node]
        if by >= 0:
            row.parent_row = rows[by].index
            row.shared = min(min(nodes[node].stop, row.n_tokens), rows[by].n_tokens)
            return
        marks[node] = index
        node = nodes[node].parent


cdef void _count_call(
    const Call* call, const Link* link, bint by_token, int64_t* report
) noexcept nogil:
    """Count a call, and what no row can claim of it."""
    cdef int64_t due = call.out_len, masked
    report[REPORT_TURNS] += 1
    report[REPORT_SAMPLED] += due
    if not call.trainable:
        report[REPORT_LOST_UNTRAINABLE] += due
        due = 0
    else:
        masked = _n_barred(call, due, False)
        due -= _n_barred(call, due, by_token)
        report[REPORT_LOST_MASKED] += masked
        report[REPORT_LOST_NO_LOGPROB] += call.out_len - masked - due
    if link.order < 0:
        report[_loss(link)] += due
    report[REPORT_ROOTS] += (
        link.parent < 0 and link.why != WHY_UNROUTED and link.why != WHY_EMPTY
    )
    report[REPORT_QUARANTINED] += link.why in (
        WHY_AMBIGUOUS, WHY_SUPERSEDED, WHY_UNRESOLVED, WHY_UNRESOLVED_AMBIGUOUS,
    )
    report[REPORT_UNRESOLVED] += link.why in (
        WHY_UNRESOLVED, WHY_UNRESOLVED_AMBIGUOUS, WHY_UNRESOLVED_KEPT,
    )


cdef int64_t _withdraw(
    const Call* calls, const Link* links, const int32_t* owners, const Rule* rule, Row* rows,
    int64_t first, int64_t n_rows, int64_t* report,
) noexcept nogil:
    """Of rows[first:n_rows], leave as many as may be emitted; return n_rows as it is then.

    One at least may be: the last row takes the place of the first that is left out.
    """
    cdef int64_t excess = n_rows - first - rule.max_rows, j
    cdef int64_t[N_SPAN_KINDS] totals
    if excess <= 0:
        return n_rows
    for j in range(n_rows - 1 - excess, n_rows - 1):
        _survey(calls, links, owners, rule, &rows[j], totals)
        report[REPORT_ROWS_UNEMITTED] += 1
        report[REPORT_TRAINED] -= totals[SPAN_TRAINED]
        report[REPORT_LOST_UNEMITTED] += totals[SPAN_TRAINED]
        report[REPORT_DUPLICATED] -= totals[SPAN_DUPLICATE]
    rows[n_rows - 1 - excess] = rows[n_rows - 1]
    return n_rows - excess


cdef bint _has_late_parent(const Link* links, int64_t lo, int64_t hi) noexcept nogil:
    """Whether a call of the session was recorded before its parent.

    Then parents come before their children in order; else they do in the turns.
    """
    cdef int64_t i
    for i in range(lo, hi):
        if links[i].order >= 0 and links[i].parent > i:
            return True
    return False


cdef int _loss(const Link* link) noexcept nogil:
    """Under which reason of the report a call is lost that is in no chain."""
    if link.rewritten_by >= 0:
        return REPORT_LOST_DEMOTED
    if link.why in (
        WHY_AMBIGUOUS, WHY_SUPERSEDED, WHY_UNRESOLVED, WHY_UNRESOLVED_AMBIGUOUS,
        WHY_UNRESOLVED_KEPT, WHY_STRANDED,
    ):
        return REPORT_LOST_QUARANTINED
    if link.why == WHY_REFUSED_TOKENS or link.why == WHY_REFUSED_TRUNCATED:
        return REPORT_LOST_REFUSED
    if link.why == WHY_RETRIED:
        return REPORT_LOST_RETRIED
    return REPORT_LOST_UNROUTED


cdef int32_t _main_chain(
    const int32_t* by_order, const uint8_t* flags, const int32_t* roots, const int32_t* births,
    int32_t lo, int32_t hi,
) noexcept nogil:
    """The leaf of the first chain of the root that was created first, or -1."""
    cdef int32_t k, leaf, best = -1
    for k in range(lo, hi):
        leaf = by_order[k]
        if leaf < 0 or flags[leaf] & 4:
            continue
        if best < 0 or births[roots[leaf]] < births[roots[best]]:
            best = leaf
    return best


cdef int64_t _plan_session(
    const Call* calls, int32_t lo, int32_t hi, int32_t session, const Node* nodes,
    const int32_t* ends, const Link* links, const Rule* rule, uint8_t* kinds,
    const int32_t* by_order, int32_t* forks, uint8_t* flags, int32_t* openers, int32_t* roots,
    const int32_t* births, int32_t* owners, int32_t* marks, const Claims* claims, Row* rows,
    int64_t n_rows, int64_t* report,
) noexcept nogil:
    """Append the rows of one session to rows[:n_rows]; return how many there are then.

    Each row has a call that no row before it ends with or owns: they are no more than calls.
    ``by_order`` comes filled.
    """
    cdef int32_t i, k, parent, leaf, top, call, only = -1, first_of_session = <int32_t>n_rows
    cdef int64_t low, high, chain_start, j, due
    cdef int below
    cdef bint late, by_chain = _by_chain(rule.own, rule.main_only)
    cdef int64_t[N_SPAN_KINDS] totals
    cdef Row row
    cdef Row* emitted

    for i in range(lo, hi):
        owners[i] = -1
        _count_call(&calls[i], &links[i], rule.by_token, report)
        kinds[i] = KIND_FORK
    late = _has_late_parent(links, lo, hi)
    for k in range(lo, hi):
        i = by_order[k] if late else k
        if i < 0 or links[i].order < 0:
            continue
        flags[i] = calls[i].use_tool | (calls[i].ill_formed << 1)
        forks[i] = 0
        openers[i] = roots[i] = i
        parent = links[i].parent
        if parent >= 0:
            kinds[i] = _kind(calls, links, i, calls[openers[parent]].prompt_len, rule)
            if kinds[i] < KIND_FORK:
                openers[i] = openers[parent]
            forks[i] = forks[parent] + (kinds[i] == KIND_FORK)
            roots[i] = roots[parent]
            flags[i] |= flags[parent] & 3
            flags[parent] |= 4  # something continues it: no leaf
    if rule.main_only:
        only = _main_chain(by_order, flags, roots, births, lo, hi)
    if not by_chain:
        _find_owners(
            calls, lo, hi, links, rule, kinds, by_order if late else NULL, claims, owners
        )
    elif rule.own == OWN_EARLIEST:
        for i in range(lo, hi):
            if links[i].order < 0 or flags[i] & 4 or (rule.main_only and i != only):
                continue
            call = i
            while call >= 0 and owners[call] < 0:
                owners[call] = i
                call = links[call].parent

    for k in range(lo, hi):
        leaf = by_order[k]
        if leaf < 0 or flags[leaf] & 4 or (rule.main_only and leaf != only):
            continue
        top = call = leaf
        if by_chain:
            while call >= 0 and (owners[call] < 0 or owners[call] == leaf):
                owners[call] = leaf
                top = call
                call = links[call].parent
            # The topmost row with something new may start above it.
            top = openers[top]
            report[REPORT_ROWS_UNTRAINED] += forks[top]
        else:
            # Every row comes once, in the first chain that has it.
            while call >= 0 and not flags[call] & 8:
                flags[call] |= 8
                top = openers[call]
                call = links[top].parent

        chain_start = n_rows
        call = leaf
        below = KIND_FORK  # how the row that follows in the chain begins
        while True:
            row.last = call
            row.end = NEVER
            row.owner = leaf if by_chain else call
            row.session = session
            row.reserved = 0
            row.n_calls = 1
            while kinds[call] < KIND_FORK:
                call = links[call].parent
                row.n_calls += 1
            _survey(calls, links, owners, rule, &row, totals)
            if rule.cut_calls:
                _cut_to_calls(calls, links, owners, rule, &row, totals)
            if rule.chain_flags:
                row.truncated = calls[leaf].length_stop
                row.use_tool = flags[leaf] & 1
                row.ill_formed = (flags[leaf] >> 1) & 1
            report[REPORT_LOST_ABSORBED] += totals[SPAN_ABSORBED]
            if below == KIND_RESTART:
                report[REPORT_LOST_RESTARTED] += totals[SPAN_TRAINED] + totals[SPAN_CUT]
            elif rule.drop_empty and _row_len(calls, &row) == row.prompt_len:
                report[REPORT_ROWS_UNTRAINED] += 1
                report[REPORT_LOST_CUT] += totals[SPAN_CUT]  # if it was cut to a call
            elif rule.drop_untrained and row.n_trained + totals[SPAN_CUT] == 0:
                report[REPORT_ROWS_UNTRAINED] += 1
            elif row.n_tokens < _row_len(calls, &row) and row.n_tokens <= row.prompt_len:
                report[REPORT_ROWS_CUT] += 1
                report[REPORT_LOST_CUT] += totals[SPAN_TRAINED] + totals[SPAN_CUT]
            else:
                report[REPORT_LOST_CUT] += totals[SPAN_CUT]
                report[REPORT_TRAINED] += totals[SPAN_TRAINED]
                report[REPORT_DUPLICATED] += totals[SPAN_DUPLICATE]
                check_write("rows", n_rows, 1, hi)  # a call each, of all sessions so far
                rows[n_rows] = row
                n_rows += 1
            if call == top:
                break
            below = kinds[call]
            call = links[call].parent

        # They were found from the leaf upwards; a chain's rows come from the root downwards.
        low = chain_start
        high = n_rows - 1
        while low < high:
            row = rows[low]
            rows[low] = rows[high]
            rows[high] = row
            low += 1
            high -= 1

    if rule.main_only:
        for i in range(lo, hi):
            if links[i].order >= 0 and owners[i] < 0 and calls[i].trainable:
                due = calls[i].out_len
                due -= _n_barred(&calls[i], due, rule.by_token)
                report[REPORT_LOST_UNDELIVERED] += due
    n_rows = _withdraw(calls, links, owners, rule, rows, first_of_session, n_rows, report)
    for j in range(first_of_session, n_rows):
        emitted = &rows[j]
        emitted.index = <int32_t>j - first_of_session
        _find_parent_row(nodes, ends, marks, rows, emitted, <int32_t>j)
        report[REPORT_ROWS] += 1
        report[REPORT_FORWARD] += emitted.n_tokens
        report[REPORT_FORWARD_SHARED] += emitted.n_tokens - emitted.shared
    return n_rows


cdef int64_t _first_bad_link(
    const Call[::1] calls, const int64_t[::1] session_offsets, const Link[::1] links,
    int32_t* by_order,
) noexcept nogil:
    """Index of the first link that is none, or -1.

    A session's parents all come before their children, in the turns or in order, so that
    no chain runs in a circle. ``by_order`` becomes the calls of each session in order, with
    -1 behind them: no two have one order.
    """
    cdef bint late
    cdef int64_t s, i, lo, hi
    cdef int32_t parent
    for s in range(session_offsets.shape[0] - 1):
        lo = session_offsets[s]
        hi = session_offsets[s + 1]
        if lo == hi:
            continue
        late = _has_late_parent(&links[0], lo, hi)
        for i in range(lo, hi):
            by_order[i] = -1
        for i in range(lo, hi):
            parent = links[i].parent
            if links[i].order >= hi - lo:
                return i
            if links[i].order >= 0:
                if by_order[lo + links[i].order] >= 0:
                    return i
                by_order[lo + links[i].order] = <int32_t>i
            if parent < 0:
                continue
            if parent < lo or parent >= hi:
                return i
            if links[i].order >= 0:
                if parent == i or links[parent].order < 0:
                    return i
                if late and links[parent].order >= links[i].order:
                    return i
            if links[i].lcp < 0 or links[i].lcp > calls[i].prompt_len:
                return i
            if links[i].lcp > calls[parent].prompt_len + calls[parent].out_len:
                return i
    return -1


cdef _check_limits(int64_t max_tokens, int64_t max_rows):
    if max_tokens < 0 or max_rows < 1:
        raise LayoutError(
            f"max_tokens is {max_tokens} and max_rows {max_rows}: at least 0 and 1 are needed"
        )


def plan_rows(
    const Call[::1] calls not None,
    const int64_t[::1] session_offsets not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    const Link[::1] links not None,
    int32_t absorb,
    int64_t threshold,
    bint keep_head,
    bint drop_untrained,
    bint drop_empty,
    bint chain_flags,
    bint main_only,
    bint cut_calls,
    const int32_t[::1] births not None,
    int64_t max_tokens,
    int64_t max_rows,
    int32_t own,
    bint by_token,
    uint8_t[::1] kinds not None,
    int32_t[:, ::1] scratch not None,
    int64_t[:, ::1] claims not None,
    int32_t[::1] owners not None,
    int32_t[::1] marks not None,
    Row[::1] rows not None,
    int64_t[:, ::1] report not None,
):
    """Fill ``rows`` in the policy's order, ``kinds``, ``owners`` and ``report``; return n_rows.

    ``kinds`` tells how each call met its parent's row, ``owners`` names the chain (its last
    call; the last call of the row, if ``own`` is OWN_LONGEST or OWN_MOST_TRAINED, and not
    ``main_only``) that owns each call's claim, or -1. ``claims``, read then, is 6 by n_calls,
    ``births``, read with ``main_only``, ranks the calls by when they were created. ``report``
    has a line a session, of the columns of `trajkit.schema.REPORT` from ``turns`` on; it must come
    as zeros. ``scratch`` is 5 by n_calls, ``marks`` has an entry a node of the forest.
    """
    cdef:
        int64_t n_calls = calls.shape[0], n_sessions = session_offsets.shape[0] - 1
        int64_t s, i, bad, n_rows = 0
        Rule rule
        Claims held_by

    _check_sessions(session_offsets, n_calls)
    for name, n in (
        ("ends", ends.shape[0]), ("links", links.shape[0]), ("kinds", kinds.shape[0]),
        ("owners", owners.shape[0]), ("rows", rows.shape[0]), ("scratch", scratch.shape[1]),
    ):
        _check_length(name, n, n_calls)
    _check_length("scratch", scratch.shape[0], 5)
    _check_length("births", births.shape[0], n_calls if main_only else 0)
    if not _by_chain(own, main_only):
        _check_length("claims", claims.shape[0], CLAIM_WIDTH)
        _check_length("claims", claims.shape[1], n_calls)
    _check_length("marks", marks.shape[0], nodes.shape[0])
    _check_length("report", report.shape[0], n_sessions)
    if report.shape[1] != REPORT_WIDTH:
        raise LayoutError(f"report is {report.shape[1]} wide, {<int>REPORT_WIDTH} are needed")
    _check_limits(max_tokens, max_rows)
    _check_forest(nodes, ends)
    if n_calls == 0:
        return 0
    bad = _first_bad_link(calls, session_offsets, links, &scratch[0, 0])
    if bad >= 0:
        raise LayoutError(
            f"links[{bad}] is no link: parent {links[bad].parent}, lcp {links[bad].lcp}, "
            f"order {links[bad].order}"
        )
    rule.absorb = absorb
    rule.threshold = threshold
    rule.keep_head = keep_head
    rule.drop_untrained = drop_untrained
    rule.drop_empty = drop_empty
    rule.chain_flags = chain_flags
    rule.main_only = main_only
    rule.cut_calls = cut_calls
    rule.max_tokens = max_tokens
    rule.max_rows = max_rows
    rule.own = own
    rule.by_token = by_token
    held_by.lines = NULL if _by_chain(own, main_only) else &claims[0, 0]
    held_by.n_calls = claims.shape[1]
    with nogil:
        for i in range(nodes.shape[0]):
            marks[i] = -1
        for s in range(n_sessions):
            n_rows = _plan_session(
                &calls[0], <int32_t>session_offsets[s], <int32_t>session_offsets[s + 1],
                <int32_t>s, &nodes[0], &ends[0], &links[0], &rule, &kinds[0], &scratch[0, 0],
                &scratch[1, 0], <uint8_t*>&scratch[2, 0], &scratch[3, 0], &scratch[4, 0],
                &births[0] if births.shape[0] else NULL, &owners[0], &marks[0], &held_by,
                &rows[0], n_rows, &report[s, 0],
            )
    return n_rows

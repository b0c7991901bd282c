"""Rows in which raw outputs stand between stretches of later prompts.

A chain of calls, each of whose prompts begins with the one before, becomes one row: the first
prompt, the first output as it was sampled, then of each next call what its prompt has after
the first end of turn that follows the prompt before, and its output. So the row is no path of
the forest: an output stays as it was sampled, and what follows may have been sampled after
another rendering of it. Where a prompt has no end of turn there, the row ends; the call and
all that go on from it are in no row.
"""


cdef struct SpliceRule:
    int64_t end_of_turn       # -1: that of each chain
    bint drop_untrained
    bint drop_empty           # rows without a response
    bint chain_flags          # flags of the calls that the row dropped, too
    pos_t max_tokens
    int64_t max_rows          # of a session: the first ones and the last
    bint by_token             # a token without a logprob is not trained


cdef struct Splice:           # what is known of each call of the rows
    int32_t* next_call        # the call that goes on from it in its chain, or -1
    pos_t* starts             # where in its prompt the stretch begins that the row has
    pos_t* places             # where its output stands in the row; -1: in no row


cdef pos_t _find_id(
    const Call* call, pos_t start, pos_t stop, token_t wanted
) noexcept nogil:
    """First position in [start, stop) of the call's path that holds the id; -1: none."""
    cdef pos_t n, i, k
    cdef const token_t* run
    cdef int hit
    while start < stop:
        run = _tokens_at(call, start, &n)
        n = min(n, stop - start)
        i = 0
        while i + 16 <= n:  # whole blocks, which the compiler compares at once
            hit = 0
            for k in range(16):
                hit |= run[i + k] == wanted
            if hit:
                break
            i += 16
        while i < n:
            if run[i] == wanted:
                return start + i
            i += 1
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


cdef pos_t _stretch_start(
    const Call* calls, const Node* nodes, const int32_t* ends, int32_t before, int32_t call,
    int64_t end_of_turn,
) noexcept nogil:
    """Where in the call's prompt the stretch begins that follows the output of ``before``.

    After the first end of turn beyond the prompt of ``before``, or at it where that output did
    not end its turn; -1: there is none.
    """
    cdef const Call* last = &calls[before]
    cdef pos_t at
    if end_of_turn < 0:
        return -1
    at = _first_of_path(
        calls, nodes, ends[call], last.prompt_len, calls[call].prompt_len,
        <token_t>end_of_turn,
    )
    if at >= 0 and last.out_len > 0:
        if (<const token_t*><intptr_t>last.out)[last.out_len - 1] == end_of_turn:
            at += 1
    return at


cdef int64_t _end_of_turn(
    const Call* calls, const uint8_t* ended, const int32_t* next_call, int32_t call
) noexcept nogil:
    """The last token of the first output in the chain that ended its turn; -1: none did."""
    while call >= 0:
        if ended[call] and calls[call].out_len > 0:
            return (<const token_t*><intptr_t>calls[call].out)[calls[call].out_len - 1]
        call = next_call[call]
    return -1


cdef int _spliced_pieces(
    const Call* call, pos_t place, pos_t max_tokens, Piece* pieces
) noexcept nogil:
    """What a row says of an output that stands at ``place``: one or two pieces, or none."""
    cdef Call moved = call[0]
    cdef Rule rule
    rule.keep_head = False
    rule.max_tokens = max_tokens
    moved.prompt_len = place
    return _pieces(&moved, NEVER, True, &rule, pieces)


cdef int _dropped_piece(const Call* call, pos_t place, Piece* piece) noexcept nogil:
    """What a row that ends at ``place`` says of an output that it dropped: a piece, or none."""
    piece.start = piece.stop = place
    piece.out_start = 0
    piece.out_stop = call.out_len
    piece.kind = SPAN_UNSPLICED
    return call.trainable and call.out_len > 0


cdef void _splice_chain(
    const Call* calls, const Node* nodes, const int32_t* ends, const uint8_t* ended,
    const SpliceRule* rule, const Splice* splice, Row* row, int64_t* totals, int64_t* report,
) noexcept nogil:
    """Complete a row of which owner, the call that opens it, is known; totals by span kind."""
    cdef int32_t call = row.owner
    cdef int64_t end_of_turn = rule.end_of_turn
    cdef pos_t start = 0, n_tokens = 0, at
    cdef int n, k
    cdef Piece[3] pieces
    cdef Piece part
    if end_of_turn < 0:
        end_of_turn = _end_of_turn(calls, ended, splice.next_call, call)
    row.n_calls = row.n_spans = 0
    row.use_tool = row.ill_formed = 0
    row.prompt_len = calls[call].prompt_len
    row.last = call
    row.end = NEVER
    while call >= 0:
        if row.n_calls > 0:
            start = _stretch_start(calls, nodes, ends, row.last, call, end_of_turn)
            if start < 0:
                break
        splice.starts[call] = start
        splice.places[call] = n_tokens + calls[call].prompt_len - start
        n = _spliced_pieces(&calls[call], splice.places[call], rule.max_tokens, pieces)
        for k in range(n):
            at = pieces[k].out_start
            while _next_part(&calls[call], &pieces[k], rule.by_token, &at, &part):
                row.n_spans += 1
                totals[part.kind] += part.out_stop - part.out_start
        row.use_tool |= calls[call].use_tool
        row.ill_formed |= calls[call].ill_formed
        row.truncated = calls[call].length_stop
        row.n_calls += 1
        row.last = call
        n_tokens = splice.places[call] + calls[call].out_len
        call = splice.next_call[call]
    if call >= 0:
        report[REPORT_ROWS_UNSPLICED] += 1
    while call >= 0:
        report[REPORT_TURNS_UNSPLICED] += 1
        n = _dropped_piece(&calls[call], 0, pieces)
        at = 0
        while n > 0 and _next_part(&calls[call], pieces, rule.by_token, &at, &part):
            row.n_spans += 1
            report[REPORT_LOST_UNSPLICED] += part.out_stop - part.out_start
        if rule.chain_flags:
            row.use_tool |= calls[call].use_tool
            row.ill_formed |= calls[call].ill_formed
            row.truncated = calls[call].length_stop
        call = splice.next_call[call]
    row.n_trained = totals[SPAN_TRAINED]
    row.n_tokens = n_tokens


cdef int64_t _splice_session(
    const Call* calls, int32_t lo, int32_t hi, int32_t session, const Node* nodes,
    const int32_t* ends, const Link* links, const uint8_t* ended, const SpliceRule* rule,
    const Splice* splice, const int32_t* by_order, Row* rows, int64_t n_rows, int64_t* report,
) noexcept nogil:
    """Append the rows of one session to rows[:n_rows]; return how many there are then.

    A call opens one row at most. ``by_order`` comes filled.
    """
    cdef int32_t i, k, parent, first_of_session = <int32_t>n_rows
    cdef int64_t j, excess
    cdef pos_t whole
    cdef int64_t[N_SPAN_KINDS] totals
    cdef Row row
    for i in range(lo, hi):
        splice.next_call[i] = -1
        splice.starts[i] = splice.places[i] = -1
        _count_call(&calls[i], &links[i], rule.by_token, report)
    # Of several calls that go on from one, the first in the policy's order is in its row.
    for k in range(lo, hi):
        i = by_order[k]
        if i >= 0 and _goes_on(calls, links, i) and splice.next_call[links[i].parent] < 0:
            splice.next_call[links[i].parent] = i
    for k in range(lo, hi):
        i = by_order[k]
        if i < 0:
            continue
        parent = links[i].parent
        if parent >= 0 and splice.next_call[parent] == i:
            continue
        for j in range(N_SPAN_KINDS):
            totals[j] = 0
        row.owner = i
        row.session = session
        row.reserved = 0
        row.shared = 0
        row.parent_row = -1
        _splice_chain(calls, nodes, ends, ended, rule, splice, &row, totals, report)
        whole = row.n_tokens
        row.n_tokens = min(whole, rule.max_tokens)
        if rule.drop_empty and whole == row.prompt_len:
            report[REPORT_ROWS_UNTRAINED] += 1
        elif rule.drop_untrained and totals[SPAN_TRAINED] + totals[SPAN_CUT] == 0:
            report[REPORT_ROWS_UNTRAINED] += 1
        elif row.n_tokens < whole and row.n_tokens <= row.prompt_len:
            report[REPORT_ROWS_CUT] += 1
            report[REPORT_LOST_CUT] += totals[SPAN_TRAINED] + totals[SPAN_CUT]
        else:
            report[REPORT_LOST_CUT] += totals[SPAN_CUT]
            report[REPORT_TRAINED] += totals[SPAN_TRAINED]
            check_write("rows", n_rows, 1, hi)  # a call each, of all sessions so far
            rows[n_rows] = row
            n_rows += 1
    excess = max(n_rows - first_of_session - rule.max_rows, 0)
    for j in range(n_rows - 1 - excess, n_rows - 1):
        report[REPORT_ROWS_UNEMITTED] += 1
        report[REPORT_TRAINED] -= rows[j].n_trained
        report[REPORT_LOST_UNEMITTED] += rows[j].n_trained
    if excess:
        rows[n_rows - 1 - excess] = rows[n_rows - 1]
        n_rows -= excess
    for j in range(first_of_session, n_rows):
        rows[j].index = <int32_t>(j - first_of_session)
        report[REPORT_ROWS] += 1
        report[REPORT_FORWARD] += rows[j].n_tokens
    return n_rows


cdef inline bint _goes_on(const Call* calls, const Link* links, int32_t call) noexcept nogil:
    """Whether the call's prompt begins with all of its parent's."""
    cdef int32_t parent = links[call].parent
    return parent >= 0 and links[call].lcp >= calls[parent].prompt_len


def plan_splices(
    const Call[::1] calls not None,
    const int64_t[::1] session_offsets not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    const Link[::1] links not None,
    const uint8_t[::1] ended not None,
    int64_t end_of_turn,
    bint drop_untrained,
    bint drop_empty,
    bint chain_flags,
    int64_t max_tokens,
    int64_t max_rows,
    bint by_token,
    int32_t[::1] by_order not None,
    int32_t[::1] next_call not None,
    pos_t[::1] starts not None,
    pos_t[::1] places not None,
    Row[::1] rows not None,
    int64_t[:, ::1] report not None,
):
    """Fill ``rows`` in the order of the calls that open them; return n_rows.

    Of a row, ``owner`` is the call that opens it, and ``n_calls`` are in it, from there along
    ``next_call``; what follows on that way was dropped. A call's prompt is in its row from
    ``starts`` on, its output stands at ``places`` (-1: in no row). ``ended`` tells whether the
    engine said that the output ended its turn; ``end_of_turn`` is -1 where each chain's own
    counts. ``parent_row`` and ``shared`` are those of a row that shares nothing. ``report`` is
    as in `plan_rows`, but for tokens_forward_shared.
    """
    cdef:
        int64_t n_calls = calls.shape[0], n_sessions = session_offsets.shape[0] - 1
        int64_t s, bad, n_rows = 0
        SpliceRule rule
        Splice splice

    _check_sessions(session_offsets, n_calls)
    for name, n in (
        ("ends", ends.shape[0]), ("links", links.shape[0]), ("ended", ended.shape[0]),
        ("by_order", by_order.shape[0]), ("next_call", next_call.shape[0]),
        ("starts", starts.shape[0]), ("places", places.shape[0]), ("rows", rows.shape[0]),
    ):
        _check_length(name, n, n_calls)
    _check_length("report", report.shape[0], n_sessions)
    if report.shape[1] != REPORT_WIDTH:
        raise LayoutError(f"report is {report.shape[1]} wide, {<int>REPORT_WIDTH} are needed")
    if not -1 <= end_of_turn < 2**31:
        raise LayoutError(f"end_of_turn is {end_of_turn}: no token id")
    _check_limits(max_tokens, max_rows)
    _check_forest(nodes, ends)
    if n_calls == 0:
        return 0
    bad = _first_bad_link(calls, session_offsets, links, &by_order[0])
    if bad >= 0:
        raise LayoutError(
            f"links[{bad}] is no link: parent {links[bad].parent}, lcp {links[bad].lcp}, "
            f"order {links[bad].order}"
        )
    rule.end_of_turn = end_of_turn
    rule.drop_untrained = drop_untrained
    rule.drop_empty = drop_empty
    rule.chain_flags = chain_flags
    rule.max_tokens = max_tokens
    rule.max_rows = max_rows
    rule.by_token = by_token
    splice.next_call = &next_call[0]
    splice.starts = &starts[0]
    splice.places = &places[0]
    with nogil:
        for s in range(n_sessions):
            n_rows = _splice_session(
                &calls[0], <int32_t>session_offsets[s], <int32_t>session_offsets[s + 1],
                <int32_t>s, &nodes[0], &ends[0], &links[0], &ended[0], &rule, &splice,
                &by_order[0], &rows[0], n_rows, &report[s, 0],
            )
    return n_rows


cdef int64_t _first_bad_splice(
    const Call[::1] calls, const Row[::1] rows, const int32_t[::1] next_call,
    const pos_t[::1] starts, const pos_t[::1] places,
) noexcept nogil:
    """Index of the first row whose calls do not fill it, or -1."""
    cdef int64_t r
    cdef int32_t call, i
    cdef pos_t held
    for r in range(rows.shape[0]):
        call = rows[r].owner
        held = 0
        for i in range(rows[r].n_calls):
            if not 0 <= call < calls.shape[0]:
                return r
            if not 0 <= starts[call] <= calls[call].prompt_len:
                return r
            held += calls[call].prompt_len - starts[call]
            if places[call] != held:
                return r
            held += calls[call].out_len
            call = next_call[call]
        if rows[r].n_tokens > held:
            return r
    return -1


def fill_splices(
    const Call[::1] calls not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    const int32_t[::1] next_call not None,
    const pos_t[::1] starts not None,
    const pos_t[::1] places not None,
    const int32_t[::1] turn_index not None,
    bint by_token,
    int64_t max_tokens,
    const Row[::1] rows not None,
    const pos_t[::1] token_offsets not None,
    const pos_t[::1] span_offsets not None,
    token_t[::1] input_ids not None,
    uint8_t[::1] loss_mask not None,
    float[::1] logprobs not None,
    uint8_t[::1] valid not None,
    int32_t[:, ::1] spans not None,
    int8_t[::1] span_kinds not None,
):
    """As `fill_rows`, of the rows that `plan_splices` planned."""
    cdef:
        int64_t n_rows = rows.shape[0], n_calls = calls.shape[0], r, at, bad
        pos_t n_tokens, n_spans, missing = 0, given_not, offset, n, where, begin
        int32_t call, i
        int m, k
        Piece[3] pieces
        Piece part
        token_t* target
        token_t* tokens = NULL
        float* values = NULL
        uint8_t* mask = NULL
        uint8_t* given = NULL

    for name, length in (
        ("ends", ends.shape[0]), ("next_call", next_call.shape[0]),
        ("starts", starts.shape[0]), ("places", places.shape[0]),
        ("turn_index", turn_index.shape[0]),
    ):
        _check_length(name, length, n_calls)
    _check_forest(nodes, ends)
    _check_row_columns(
        calls, rows, token_offsets, span_offsets, input_ids, loss_mask, logprobs, valid, spans,
        span_kinds,
    )
    if n_rows == 0:
        return 0
    if token_offsets[n_rows] < sum([rows[r].n_tokens for r in range(n_rows)]):
        raise LayoutError("rows of raw outputs are written whole")
    bad = _first_bad_splice(calls, rows, next_call, starts, places)
    if bad >= 0:
        raise _no_row(rows, bad)
    if token_offsets[n_rows]:
        tokens = &input_ids[0]
        mask = &loss_mask[0]
        values = &logprobs[0]
        given = &valid[0]
    with nogil:
        for r in range(n_rows):
            offset = token_offsets[r]
            n_tokens = rows[r].n_tokens
            at = span_offsets[r]
            n_spans = span_offsets[r + 1]
            call = rows[r].owner
            for i in range(rows[r].n_calls):
                n = calls[call].prompt_len - starts[call]
                where = places[call] - n
                n = min(n, n_tokens - where)
                if n > 0:
                    _copy_stretch(
                        &calls[0], &nodes[0], ends[call], starts[call], starts[call] + n,
                        tokens + offset + where,
                    )
                n = min(calls[call].out_len, n_tokens - places[call])
                if n > 0:
                    target = tokens + offset + places[call]
                    memcpy(
                        target, <const token_t*><intptr_t>calls[call].out, n * sizeof(token_t)
                    )
                m = _spliced_pieces(&calls[call], places[call], max_tokens, pieces)
                for k in range(m):
                    begin = pieces[k].out_start
                    while _next_part(&calls[call], &pieces[k], by_token, &begin, &part):
                        _write_span(spans, span_kinds, &span_offsets[r], at, &part, call)
                        at += 1
                call = next_call[call]
            while at < n_spans and 0 <= call < n_calls:
                m = _dropped_piece(&calls[call], n_tokens, pieces)
                begin = 0
                while m > 0 and _next_part(&calls[call], pieces, by_token, &begin, &part):
                    _write_span(spans, span_kinds, &span_offsets[r], at, &part, call)
                    at += 1
                call = next_call[call]
            given_not = -1 if at != n_spans else _fill_trained(
                &calls[0], &turn_index[0], spans, span_kinds, span_offsets[r],
                span_offsets[r + 1], offset, token_offsets[r + 1], offset, mask, values,
                given, False,
            )
            if given_not < 0:
                bad = r
                break
            missing += given_not
    if bad >= 0:
        raise _no_row(rows, bad)
    return missing

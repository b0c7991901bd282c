"""Rows of outputs as sampled, joined by suffixes of later prompts (policy ``polar``).

Fills rows and report, and then the rows' columns, from links whose ``lcp`` is known. A chain of
calls, each of whose prompts begins with the previous prompt, becomes one row: the first
prompt, the first output, then for each next call the suffix of its prompt after the first end
of turn beyond the previous prompt, and its output. So the row is no path of the forest: an
output stays as it was sampled, and later outputs may have been sampled after another
rendering of it. Where a prompt has no end of turn there, the row ends; that call and all that
continue it are in no row. O(tokens of the chains' prompts beyond the previous ones + calls).
"""


cdef struct Splice:           # the position of each call in the rows
    int32_t* next_call        # the call that continues it in its chain, or -1
    pos_t* starts             # position in its prompt from which the row has it
    pos_t* places             # position of its output in the row; -1: in no row


cdef struct SplicePlan:       # what one plan_splices reads and fills
    const Paths* paths
    const Link* links
    const Choices* choices
    const uint8_t* ended      # per call: the engine reported that the output ended its turn
    int32_t* by_order         # scratch: each session's calls in order, then -1
    Splice splice
    Row* rows
    int64_t n_rows


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


cdef int64_t _end_of_turn(const SplicePlan* plan, int32_t call) noexcept nogil:
    """The last token of the first output in the chain that ended its turn; -1: none did."""
    cdef const Call* calls = plan.paths.calls
    while call >= 0:
        if plan.ended[call] and calls[call].out_len > 0:
            return (<const token_t*><intptr_t>calls[call].out)[calls[call].out_len - 1]
        call = plan.splice.next_call[call]
    return -1


cdef int _spliced_spans(
    const Call* call, pos_t place, const Choices* choices, Span* spans
) noexcept nogil:
    """Write what becomes of an output at ``place`` of a row: at most two spans."""
    cdef Call moved = call[0]
    moved.prompt_len = place
    return _output_spans(&moved, NEVER, True, choices, spans)


cdef int _dropped_span(const Call* call, pos_t place, Span* span) noexcept nogil:
    """Write the span of an output that a row ending at ``place`` dropped; 0 without one."""
    span.start = span.stop = place
    span.out_start = 0
    span.out_stop = call.out_len
    span.kind = SPAN_NO_SPLICE_POINT
    return call.trainable and call.out_len > 0


cdef void _splice_chain(
    const SplicePlan* plan, Row* row, int64_t* totals, int64_t* report
) noexcept nogil:
    """Complete a row of which owner, the call that opens it, is known; totals by span kind."""
    cdef const Call* calls = plan.paths.calls
    cdef const Splice* splice = &plan.splice
    cdef bint need_logprob = plan.choices.need_logprob
    cdef int32_t call = row.owner
    cdef int64_t end_of_turn = plan.choices.end_of_turn
    cdef pos_t start = 0, n_tokens = 0, at
    cdef int n, k
    cdef Span[3] spans
    cdef Span part
    if end_of_turn < 0:
        end_of_turn = _end_of_turn(plan, call)
    row.n_calls = row.n_spans = 0
    row.use_tool = row.ill_formed = 0
    row.prompt_len = calls[call].prompt_len
    row.last = call
    row.end = NEVER
    while call >= 0:
        if row.n_calls > 0:
            start = _suffix_start(plan.paths, row.last, call, end_of_turn)
            if start < 0:
                break
        splice.starts[call] = start
        splice.places[call] = n_tokens + calls[call].prompt_len - start
        n = _spliced_spans(&calls[call], splice.places[call], plan.choices, spans)
        for k in range(n):
            at = spans[k].out_start
            while _next_span(&calls[call], &spans[k], need_logprob, &at, &part):
                row.n_spans += 1
                totals[part.kind] += part.out_stop - part.out_start
        row.use_tool |= calls[call].use_tool
        row.ill_formed |= calls[call].ill_formed
        row.truncated = calls[call].stop == STOP_LENGTH
        row.n_calls += 1
        row.last = call
        n_tokens = splice.places[call] + calls[call].out_len
        call = splice.next_call[call]
    if call >= 0:
        report[REPORT_ROWS_NO_SPLICE_POINT] += 1
    while call >= 0:
        report[REPORT_TURNS_NO_SPLICE_POINT] += 1
        n = _dropped_span(&calls[call], 0, spans)
        at = 0
        while n > 0 and _next_span(&calls[call], spans, need_logprob, &at, &part):
            row.n_spans += 1
            report[REPORT_LOST_NO_SPLICE_POINT] += part.out_stop - part.out_start
        if plan.choices.chain_flags:
            row.use_tool |= calls[call].use_tool
            row.ill_formed |= calls[call].ill_formed
            row.truncated = calls[call].stop == STOP_LENGTH
        call = splice.next_call[call]
    row.n_trained = totals[SPAN_TRAINED]
    row.n_tokens = n_tokens


cdef inline bint _extends_parent(
    const Call* calls, const Link* links, int32_t call
) noexcept nogil:
    """Whether the call's prompt begins with its parent's entire prompt."""
    cdef int32_t parent = links[call].parent
    return parent >= 0 and links[call].lcp >= calls[parent].prompt_len


cdef void _splice_session(SplicePlan* plan, int32_t session, int64_t* report) noexcept nogil:
    """Append the rows of one session; a call opens one row at most."""
    cdef:
        const Call* calls = plan.paths.calls
        const Link* links = plan.links
        Splice* splice = &plan.splice
        int32_t lo = <int32_t>plan.paths.session_offsets[session]
        int32_t hi = <int32_t>plan.paths.session_offsets[session + 1]
        int32_t i, k, parent
        int64_t j, excess, first = plan.n_rows
        pos_t full
        int64_t[N_SPAN_KINDS] totals
        Row row
    for i in range(lo, hi):
        splice.next_call[i] = -1
        splice.starts[i] = splice.places[i] = -1
        _count_call(&calls[i], &links[i], plan.choices.need_logprob, report)
    # Of several calls that continue one, the first in the policy's order is in its row.
    for k in range(lo, hi):
        i = plan.by_order[k]
        if i >= 0 and _extends_parent(calls, links, i):
            if splice.next_call[links[i].parent] < 0:
                splice.next_call[links[i].parent] = i
    for k in range(lo, hi):
        i = plan.by_order[k]
        if i < 0:
            continue
        parent = links[i].parent
        if parent >= 0 and splice.next_call[parent] == i:
            continue
        memset(&row, 0, sizeof(Row))
        for j in range(N_SPAN_KINDS):
            totals[j] = 0
        row.owner = i
        row.session = session
        row.parent_row = -1
        _splice_chain(plan, &row, totals, report)
        full = row.n_tokens
        row.n_tokens = min(full, plan.choices.max_tokens)
        if _keep_row(plan.choices, &row, full, totals, MEET_FORK, report):
            check_write("rows", plan.n_rows, 1, hi)  # one per call of the sessions so far
            plan.rows[plan.n_rows] = row
            plan.n_rows += 1
    excess = max(plan.n_rows - first - plan.choices.max_rows, 0)
    for j in range(plan.n_rows - 1 - excess, plan.n_rows - 1):
        report[REPORT_ROWS_OVER_MAX_ROWS] += 1
        report[REPORT_TOKENS_TRAINED] -= plan.rows[j].n_trained
        report[REPORT_LOST_OVER_MAX_ROWS] += plan.rows[j].n_trained
    if excess:
        plan.rows[plan.n_rows - 1 - excess] = plan.rows[plan.n_rows - 1]
        plan.n_rows -= excess
    for j in range(first, plan.n_rows):
        plan.rows[j].index = <int32_t>(j - first)
        report[REPORT_ROWS] += 1
        report[REPORT_TOKENS_FORWARD] += plan.rows[j].n_tokens


def plan_splices(
    CallForest forest not None,
    const Link[::1] links not None,
    const Choices[::1] choices not None,
    const uint8_t[::1] ended not None,
    int32_t[::1] next_call not None,
    pos_t[::1] starts not None,
    pos_t[::1] places not None,
    Row[::1] rows not None,
    int64_t[:, ::1] report not None,
):
    """Fill ``rows`` in the order of the calls that open them; return the number of rows.

    A row's ``owner`` is the call that opens it; its ``n_calls`` calls follow along
    ``next_call``, and those after them were dropped. A call's prompt is in its row from
    ``starts`` on, its output at ``places`` (-1: in no row). ``ended`` is whether the engine
    reported that the output ended its turn. ``parent_row`` and ``shared`` are those of a row
    that shares nothing. ``report`` is as in `plan_rows`, without tokens_forward_shared.
    """
    cdef int64_t n_calls = forest.n_calls, s, bad
    cdef Paths paths
    cdef SplicePlan plan

    _check_plan(forest, links, choices, rows, report)
    for name, n in (
        ("ended", ended.shape[0]), ("next_call", next_call.shape[0]),
        ("starts", starts.shape[0]), ("places", places.shape[0]),
    ):
        _check_length(name, n, n_calls)
    if not -1 <= choices[0].end_of_turn < 2**31:
        raise LayoutError(f"end_of_turn is {choices[0].end_of_turn}: no token id")
    if n_calls == 0:
        return 0
    cdef int32_t[::1] by_order = empty(n_calls, "i4")
    paths = _paths(forest)
    plan.paths, plan.links, plan.choices = &paths, &links[0], &choices[0]
    plan.ended, plan.by_order = &ended[0], &by_order[0]
    plan.splice.next_call = &next_call[0]
    plan.splice.starts, plan.splice.places = &starts[0], &places[0]
    plan.rows, plan.n_rows = &rows[0], 0
    with nogil:
        bad = _order_calls(&paths, plan.links, plan.by_order)
        if bad < 0:
            for s in range(paths.n_sessions):
                _splice_session(&plan, <int32_t>s, &report[s, 0])
    if bad >= 0:
        raise _bad_link(links, bad)
    return plan.n_rows


cdef int64_t _first_bad_splice(
    const Paths* paths, const Row[::1] rows, const Splice* splice
) noexcept nogil:
    """Index of the first row whose calls do not fill it, or -1."""
    cdef int64_t r
    cdef int32_t call, i
    cdef pos_t n_tokens
    for r in range(rows.shape[0]):
        call = rows[r].owner
        n_tokens = 0
        for i in range(rows[r].n_calls):
            if not 0 <= call < paths.n_calls:
                return r
            if not 0 <= splice.starts[call] <= paths.calls[call].prompt_len:
                return r
            n_tokens += paths.calls[call].prompt_len - splice.starts[call]
            if splice.places[call] != n_tokens:
                return r
            n_tokens += paths.calls[call].out_len
            call = splice.next_call[call]
        if rows[r].n_tokens > n_tokens:
            return r
    return -1


cdef bint _fill_spliced_row(
    const Paths* paths, const Splice* splice, const Choices* choices, const Row* rows,
    int64_t r, const Target* target,
) noexcept nogil:
    """Write the tokens and spans of a row; return whether there are as many as it claims."""
    cdef const Call* calls = paths.calls
    cdef token_t* ids = target.input_ids + target.token_offsets[r]
    cdef int64_t at = target.span_offsets[r], n_spans = target.span_offsets[r + 1]
    cdef pos_t n_tokens = rows[r].n_tokens, n, place
    cdef int32_t call = rows[r].owner, i
    cdef int m
    cdef Span[3] spans
    for i in range(rows[r].n_calls):
        n = calls[call].prompt_len - splice.starts[call]
        place = splice.places[call] - n
        n = min(n, n_tokens - place)
        if n > 0:
            _copy_range(
                calls, paths.nodes, paths.ends[call], splice.starts[call],
                splice.starts[call] + n, ids + place,
            )
        n = min(calls[call].out_len, n_tokens - splice.places[call])
        if n > 0:
            memcpy(
                ids + splice.places[call], <const token_t*><intptr_t>calls[call].out,
                n * sizeof(token_t),
            )
        m = _spliced_spans(&calls[call], splice.places[call], choices, spans)
        at = _write_spans(target, r, at, &calls[call], call, spans, m, choices.need_logprob)
        call = splice.next_call[call]
    while at < n_spans and 0 <= call < paths.n_calls:
        m = _dropped_span(&calls[call], n_tokens, spans)
        at = _write_spans(target, r, at, &calls[call], call, spans, m, choices.need_logprob)
        call = splice.next_call[call]
    return at == n_spans


def fill_splices(
    CallForest forest not None,
    const Choices[::1] choices not None,
    int32_t[::1] next_call not None,
    pos_t[::1] starts not None,
    pos_t[::1] places not None,
    const int32_t[::1] turn_index not None,
    const Row[::1] rows not None,
    RowColumns columns not None,
):
    """Write the columns of the rows that `plan_splices` planned, as `fill_rows` does."""
    cdef:
        int64_t n_rows = rows.shape[0], r, bad
        pos_t n_tokens = 0, missing = 0, row_missing
        Paths paths
        Splice splice
        Target target

    for name, length in (
        ("next_call", next_call.shape[0]), ("starts", starts.shape[0]),
        ("places", places.shape[0]), ("turn_index", turn_index.shape[0]),
    ):
        _check_length(name, length, forest.n_calls)
    _check_length("choices", choices.shape[0], 1)
    _check_row_columns(forest, rows, columns)
    if n_rows == 0:
        return 0
    for r in range(n_rows):
        n_tokens += rows[r].n_tokens
    if columns.token_offsets[n_rows] < n_tokens:
        raise LayoutError("a spliced row has stored > 0: all its tokens must be written")
    paths = _paths(forest)
    splice.next_call, splice.starts, splice.places = &next_call[0], &starts[0], &places[0]
    bad = _first_bad_splice(&paths, rows, &splice)
    if bad >= 0:
        raise _no_row(rows, bad)
    target = _target(columns, False)
    with nogil:
        for r in range(n_rows):
            row_missing = -1
            if _fill_spliced_row(&paths, &splice, &choices[0], &rows[0], r, &target):
                row_missing = _fill_trained(
                    paths.calls, &turn_index[0], &target, r, target.token_offsets[r]
                )
            if row_missing < 0:
                bad = r
                break
            missing += row_missing
    if bad >= 0:
        raise _no_row(rows, bad)
    return missing

"""The columns of planned rows that have a value per token, and their spans.

Fills tokens, mask, logprobs, validity, spans and turns from the calls' paths and the plan, in
O(tokens and spans written + calls in the rows).
"""

cdef enum:  # the lines of RowColumns.spans: the fields of trajkit.schema.SPAN but kind
    LINE_START, LINE_STOP, LINE_TURN_INDEX, LINE_OUTPUT_START, LINE_OUTPUT_STOP
    N_LINES

ENUMS["SpanLine"] = {
    "start": LINE_START, "stop": LINE_STOP, "turn_index": LINE_TURN_INDEX,
    "output_start": LINE_OUTPUT_START, "output_stop": LINE_OUTPUT_STOP,
}


@cython.auto_pickle(False)
@cython.final
cdef class RowColumns:
    """The columns that `fill_rows` writes.

    ``loss_mask`` and ``valid`` are bitmaps, least significant bit first; ``spans`` has the lines
    LINE_*, ``span_kinds`` indices into `trajkit.schema.SPAN_KINDS`.
    """
    cdef const pos_t[::1] token_offsets
    cdef const pos_t[::1] span_offsets
    cdef token_t[::1] input_ids
    cdef uint8_t[::1] loss_mask
    cdef uint8_t[::1] valid
    cdef float[::1] logprobs
    cdef int32_t[:, ::1] spans
    cdef int8_t[::1] span_kinds
    cdef bint uncached        # write tokens and logprobs past the caches

    def __cinit__(
        self,
        const pos_t[::1] token_offsets not None,
        const pos_t[::1] span_offsets not None,
        token_t[::1] input_ids not None,
        uint8_t[::1] loss_mask not None,
        float[::1] logprobs not None,
        uint8_t[::1] valid not None,
        int32_t[:, ::1] spans not None,
        int8_t[::1] span_kinds not None,
    ):
        self.token_offsets, self.span_offsets = token_offsets, span_offsets
        self.input_ids, self.logprobs = input_ids, logprobs
        self.loss_mask, self.valid = loss_mask, valid
        self.spans, self.span_kinds = spans, span_kinds
        self.uncached = False


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


cdef pos_t _copy_logprobs(
    const Call* call, const Span* span, RowColumns target, pos_t offset
) noexcept nogil:
    """Write the logprobs of a trained span, 0.0 for missing ones; return how many are missing.

    ``offset`` is the index of the row's token 0 in the columns.
    """
    cdef const float* values = <const float*><intptr_t>call.logprobs
    cdef const uint8_t* bits = <const uint8_t*><intptr_t>call.valid
    cdef float* logprobs = &target.logprobs[offset + span.start]
    cdef pos_t i, n = span.stop - span.start, missing = 0, bit
    if values == NULL:
        _put_zeros(logprobs, n * sizeof(float), target.uncached)
        return n
    values += span.out_start
    if bits == NULL:
        _put(logprobs, values, n * sizeof(float), target.uncached)
        _set_bits(&target.valid[0], offset + span.start, offset + span.stop)
        return 0
    for i in range(n):
        bit = call.valid_bit + span.out_start + i
        if bits[bit >> 3] >> (bit & 7) & 1:
            logprobs[i] = values[i]
            _set_bits(&target.valid[0], offset + span.start + i, offset + span.start + i + 1)
        else:
            logprobs[i] = 0.0
            missing += 1
    return missing


cdef pos_t _fill_trained(
    const Call* calls, const int32_t* turn_index, RowColumns target, int64_t row
) noexcept nogil:
    """Write the mask and the logprobs of a row from its spans; return how many are missing.

    -1: a trained span is outside of the row or starts before the end of the previous one.

    The spans are ascending. Their turn_index is a call's number and becomes its turn. Every logprob is written once, in the order of
    memory: 0.0 where no token is trained. A byte of a bitmap is cleared by the row of its
    first bit.
    """
    cdef pos_t start = target.token_offsets[row], stop = target.token_offsets[row + 1]
    cdef pos_t offset = start
    cdef int64_t k, byte = (start + 7) >> 3, n_bytes = ((stop + 7) >> 3) - byte
    cdef int32_t call
    cdef pos_t missing = 0
    cdef Span span
    if n_bytes > 0:
        memset(&target.loss_mask[byte], 0, n_bytes)
        memset(&target.valid[byte], 0, n_bytes)
    for k in range(target.span_offsets[row], target.span_offsets[row + 1]):
        call = target.spans[LINE_TURN_INDEX, k]
        target.spans[LINE_TURN_INDEX, k] = turn_index[call]
        if target.span_kinds[k] != SPAN_TRAINED:
            continue
        span.start = target.spans[LINE_START, k]
        span.stop = target.spans[LINE_STOP, k]
        span.out_start = target.spans[LINE_OUTPUT_START, k]
        if not start <= offset + span.start <= offset + span.stop <= stop:
            return -1
        if offset + span.start > start:
            _put_zeros(
                &target.logprobs[start], (offset + span.start - start) * sizeof(float),
                target.uncached,
            )
        _set_bits(&target.loss_mask[0], offset + span.start, offset + span.stop)
        missing += _copy_logprobs(&calls[call], &span, target, offset)
        start = offset + span.stop
    if stop > start:
        _put_zeros(&target.logprobs[start], (stop - start) * sizeof(float), target.uncached)
    return missing


cdef void _copy_path(
    const Paths* paths, int32_t end, pos_t start, pos_t stop, token_t* ids, int32_t* chain,
    bint uncached,
) noexcept nogil:
    """Write tokens start:stop of the path that ends at the stop of ``end``, first to last.

    Writing from last to first takes a fifth longer. ``chain`` is scratch with an entry per
    node of the forest.
    """
    cdef const Node* nodes = paths.nodes
    cdef int32_t node = end
    cdef int64_t n = 0
    cdef pos_t low, high
    while nodes[node].parent >= 0 and nodes[node].stop > start:
        chain[n] = node
        n += 1
        node = nodes[node].parent
    while n > 0:
        n -= 1
        node = chain[n]
        low = max(nodes[node].start, start)
        high = min(nodes[node].stop, stop)
        if low < high:
            _copy(&paths.calls[nodes[node].source], ids + (low - start), low, high, uncached)


cdef int64_t _write_spans(
    RowColumns target, int64_t row, int64_t at, const Call* call, int32_t index,
    const Span* spans, int n, bint need_logprob,
) noexcept nogil:
    """Write the parts of n spans of a call from ``at`` on; return the position after them.

    The call's number is written for its turn, see `_fill_trained`. Nothing is written outside
    of the row's spans, of which there may be fewer than the row claims.
    """
    cdef pos_t begin
    cdef Span part
    cdef int k
    for k in range(n):
        begin = spans[k].out_start
        while _next_span(call, &spans[k], need_logprob, &begin, &part):
            if target.span_offsets[row] <= at < target.span_offsets[row + 1]:
                target.spans[LINE_START, at] = <int32_t>part.start
                target.spans[LINE_STOP, at] = <int32_t>part.stop
                target.spans[LINE_TURN_INDEX, at] = index
                target.spans[LINE_OUTPUT_START, at] = <int32_t>part.out_start
                target.spans[LINE_OUTPUT_STOP, at] = <int32_t>part.out_stop
                target.span_kinds[at] = part.kind
            at += 1
    return at


cdef _check_row_columns(CallForest forest, const Row[::1] rows, RowColumns columns):
    """Raise unless the columns have room for the rows, at these offsets from 0 on."""
    cdef int64_t n_rows = rows.shape[0], r
    cdef pos_t n_tokens, n_spans
    cdef const pos_t[::1] token_offsets = columns.token_offsets
    cdef const pos_t[::1] span_offsets = columns.span_offsets
    _check_length("token_offsets", token_offsets.shape[0], n_rows + 1)
    _check_length("span_offsets", span_offsets.shape[0], n_rows + 1)
    if token_offsets[0] != 0 or span_offsets[0] != 0:
        raise LayoutError(
            f"token_offsets begin with {token_offsets[0]}, span_offsets with "
            f"{span_offsets[0]}: expected 0"
        )
    for r in range(n_rows):
        if not 0 <= rows[r].last < forest.n_calls:
            raise LayoutError(f"rows[{r}] ends with call {rows[r].last} of {forest.n_calls}")
        if not 0 <= rows[r].owner < forest.n_calls:
            raise LayoutError(f"rows[{r}] is of chain {rows[r].owner} of {forest.n_calls}")
        if rows[r].n_tokens < 0 or token_offsets[r + 1] - token_offsets[r] != rows[r].n_tokens:
            raise LayoutError(f"token_offsets[{r}] leaves no room for {rows[r].n_tokens} tokens")
        if rows[r].n_spans < 0 or span_offsets[r + 1] - span_offsets[r] != rows[r].n_spans:
            raise LayoutError(f"span_offsets[{r}] leaves no room for {rows[r].n_spans} spans")
    n_tokens = token_offsets[n_rows]
    n_spans = span_offsets[n_rows]
    for name, n, needed in (
        ("input_ids", columns.input_ids.shape[0], n_tokens),
        ("loss_mask", columns.loss_mask.shape[0], (n_tokens + 7) // 8),
        ("logprobs", columns.logprobs.shape[0], n_tokens),
        ("valid", columns.valid.shape[0], (n_tokens + 7) // 8),
        ("spans", columns.spans.shape[0], N_LINES), ("spans", columns.spans.shape[1], n_spans),
        ("span_kinds", columns.span_kinds.shape[0], n_spans),
    ):
        _check_length(name, n, needed)


cdef _no_row(const Row[::1] rows, int64_t r):
    return LayoutError(
        f"rows[{r}] is no row of {rows[r].n_calls} calls up to {rows[r].last} with "
        f"{rows[r].n_tokens} tokens and {rows[r].n_spans} spans"
    )


cdef bint _fill_spans(
    const Paths* paths, const Link* links, const Choices* choices, const int32_t* owners,
    const Row* rows, int64_t r, RowColumns target,
) noexcept nogil:
    """Write the spans of a row; return whether there are as many as it claims."""
    cdef int64_t at = target.span_offsets[r + 1], n_parts
    cdef int32_t call = rows[r].last, n_left = rows[r].n_calls
    cdef pos_t replaced = rows[r].end, begin
    cdef int n, k
    cdef bint owned
    cdef Span[3] spans
    cdef Span part
    # upwards, so the spans are written from the end
    while n_left > 0 and 0 <= call < paths.n_calls:
        owned = choices.train_in == TRAIN_IN_EVERY or owners[call] == rows[r].owner
        n = _output_spans(&paths.calls[call], replaced, owned, choices, spans)
        n_parts = 0
        for k in range(n):
            begin = spans[k].out_start
            while _next_span(
                &paths.calls[call], &spans[k], choices.need_logprob, &begin, &part
            ):
                n_parts += 1
        at -= n_parts
        _write_spans(
            target, r, at, &paths.calls[call], call, spans, n, choices.need_logprob
        )
        replaced = min(replaced, links[call].lcp)
        n_left -= 1
        call = links[call].parent
    return at == target.span_offsets[r]


def fill_rows(
    CallForest forest not None,
    const Link[::1] links not None,
    const Choices[::1] choices not None,
    const int32_t[::1] owners not None,
    const int32_t[::1] turn_index not None,
    const Row[::1] rows not None,
    RowColumns columns not None,
    bint uncached,
):
    """Write the per-token columns and the spans of planned rows; return missing logprobs.

    ``links`` and ``owners`` are those of `plan_rows`, ``rows`` its result. Tokens and logprobs
    are written past the caches if ``uncached``.
    """
    cdef:
        int64_t n_rows = rows.shape[0], r, bad = -1
        pos_t missing = 0, row_missing
        Paths paths

    for name, m in (
        ("links", links.shape[0]), ("owners", owners.shape[0]),
        ("turn_index", turn_index.shape[0]),
    ):
        _check_length(name, m, forest.n_calls)
    _check_length("choices", choices.shape[0], 1)
    _check_row_columns(forest, rows, columns)
    if n_rows == 0:
        return 0
    cdef int32_t[::1] chain = empty(forest.n_nodes, "i4")
    paths = _paths(forest)
    columns.uncached = uncached
    with nogil:
        for r in range(n_rows):
            row_missing = -1
            if rows[r].n_tokens <= _held_len(&paths.calls[rows[r].last]):
                if rows[r].n_tokens > 0:
                    _copy_path(
                        &paths, paths.ends[rows[r].last], 0, rows[r].n_tokens,
                        &columns.input_ids[columns.token_offsets[r]], &chain[0], uncached,
                    )
                if _fill_spans(
                    &paths, &links[0], &choices[0], &owners[0], &rows[0], r, columns
                ):
                    row_missing = _fill_trained(paths.calls, &turn_index[0], columns, r)
            if row_missing < 0:
                bad = r
                break
            missing += row_missing
        if uncached:
            trajkit_end_uncached()
    if bad >= 0:
        raise _no_row(rows, bad)
    return missing


def list_turns(
    const Row[::1] rows not None,
    const Link[::1] links not None,
    const int32_t[::1] turn_index not None,
    const pos_t[::1] offsets not None,
    int32_t[::1] turns not None,
):
    """Fill the turns of each row's calls, first to last: ``turns[offsets[r]:offsets[r + 1]]``."""
    cdef:
        int64_t n_rows = rows.shape[0], n_calls = links.shape[0], r, i, bad = -1
        int32_t call
    _check_length("turn_index", turn_index.shape[0], n_calls)
    _check_length("offsets", offsets.shape[0], n_rows + 1)
    for r in range(n_rows):
        if offsets[r + 1] - offsets[r] != rows[r].n_calls:
            raise LayoutError(f"offsets[{r}] leaves no room for {rows[r].n_calls} turns")
    _check_length("turns", turns.shape[0], offsets[n_rows])
    with nogil:
        for r in range(n_rows):
            call = rows[r].last
            for i in range(offsets[r + 1] - 1, offsets[r] - 1, -1):
                if not 0 <= call < n_calls:
                    bad = r
                    break
                turns[i] = turn_index[call]
                call = links[call].parent
    if bad >= 0:
        raise LayoutError(f"rows[{bad}] has {rows[bad].n_calls} calls: links has fewer")

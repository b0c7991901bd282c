"""The columns of planned rows: tokens, mask, logprobs, spans."""


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
    const Call* call, const Piece* piece, float* target, uint8_t* valid, pos_t offset,
    bint uncached,
) noexcept nogil:
    """Logprobs of one trained piece; how many of them the engine did not give (0.0)."""
    cdef const float* values = <const float*><intptr_t>call.logprobs
    cdef const uint8_t* bits = <const uint8_t*><intptr_t>call.valid
    cdef pos_t i, n = piece.stop - piece.start, missing = 0, bit
    target += offset + piece.start
    if values == NULL:
        _put_zeros(target, n * sizeof(float), uncached)
        return n
    values += piece.out_start
    if bits == NULL:
        _put(target, values, n * sizeof(float), uncached)
        _set_bits(valid, offset + piece.start, offset + piece.stop)
        return 0
    for i in range(n):
        bit = call.valid_bit + piece.out_start + i
        if bits[bit >> 3] >> (bit & 7) & 1:
            target[i] = values[i]
            _set_bits(valid, offset + piece.start + i, offset + piece.start + i + 1)
        else:
            target[i] = 0.0
            missing += 1
    return missing


cdef pos_t _fill_trained(
    const Call* calls, const int32_t* turn_index, int32_t[:, ::1] spans,
    const int8_t[::1] kinds, int64_t first, int64_t last, pos_t start, pos_t stop,
    pos_t offset, uint8_t* mask, float* values, uint8_t* valid, bint uncached,
) noexcept nogil:
    """The mask and the logprobs of one row from its spans, first <= k < last; how many are missing.

    -1: a trained span does not lie within the row, behind the one before it.

    The spans ascend, and name a call, which becomes its turn. The row's tokens are
    start:stop of the columns; its position 0 stands, or would, at ``offset``. Every
    logprob is written once, in the order of memory: 0.0 where none is trained. A byte of a
    bitmap is cleared by the row of its first bit.
    """
    cdef int64_t k, byte = (start + 7) >> 3, n_bytes = ((stop + 7) >> 3) - byte
    cdef int32_t call
    cdef pos_t missing = 0
    cdef Piece piece
    if n_bytes > 0:
        memset(mask + byte, 0, n_bytes)
        memset(valid + byte, 0, n_bytes)
    for k in range(first, last):
        call = spans[2, k]
        spans[2, k] = turn_index[call]
        if kinds[k] != SPAN_TRAINED:
            continue
        piece.start = spans[0, k]
        piece.stop = spans[1, k]
        piece.out_start = spans[3, k]
        if not start <= offset + piece.start <= offset + piece.stop <= stop:
            return -1
        if offset + piece.start > start:
            _put_zeros(
                values + start, (offset + piece.start - start) * sizeof(float), uncached
            )
        _set_bits(mask, offset + piece.start, offset + piece.stop)
        missing += _copy_logprobs(&calls[call], &piece, values, valid, offset, uncached)
        start = offset + piece.stop
    if stop > start:
        _put_zeros(values + start, (stop - start) * sizeof(float), uncached)
    return missing


cdef void _copy_path(
    const Call* calls, const Node* nodes, int32_t end, pos_t start, pos_t stop,
    token_t* target, int32_t* chain, bint uncached,
) noexcept nogil:
    """Tokens start:stop of the path that ends at the stop of ``end``, first to last.

    Against the order of memory it takes a fifth longer. ``chain`` has room for as many nodes
    as there are, and a path has no more; ``target`` has room for ``stop - start`` tokens.
    """
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
            _copy(&calls[nodes[node].source], target + (low - start), low, high, uncached)


cdef inline void _write_span(
    int32_t[:, ::1] spans, int8_t[::1] kinds, const pos_t* bounds, int64_t at,
    const Piece* piece, int32_t call
) noexcept nogil:
    """One span of a call, whose turn `_fill_trained` puts in the place of its number.

    Nothing is written outside of ``bounds``, a row's spans: it has fewer than it said then.
    """
    if not bounds[0] <= at < bounds[1]:
        return
    spans[0, at] = <int32_t>piece.start
    spans[1, at] = <int32_t>piece.stop
    spans[2, at] = call
    spans[3, at] = <int32_t>piece.out_start
    spans[4, at] = <int32_t>piece.out_stop
    kinds[at] = piece.kind


cdef _check_row_columns(
    const Call[::1] calls, const Row[::1] rows,
    const pos_t[::1] token_offsets, const pos_t[::1] span_offsets,
    const token_t[::1] input_ids, const uint8_t[::1] loss_mask, const float[::1] logprobs,
    const uint8_t[::1] valid, const int32_t[:, ::1] spans, const int8_t[::1] span_kinds,
):
    """Raise unless the columns have room for the rows, at these offsets from 0 on."""
    cdef int64_t n_rows = rows.shape[0], r
    cdef pos_t n_tokens, n_spans
    _check_length("token_offsets", token_offsets.shape[0], n_rows + 1)
    _check_length("span_offsets", span_offsets.shape[0], n_rows + 1)
    if token_offsets[0] != 0 or span_offsets[0] != 0:
        raise LayoutError(
            f"token_offsets begin with {token_offsets[0]}, span_offsets with "
            f"{span_offsets[0]}: expected 0"
        )
    for r in range(n_rows):
        if not 0 <= rows[r].last < calls.shape[0]:
            raise LayoutError(f"rows[{r}] ends with call {rows[r].last} of {calls.shape[0]}")
        if not 0 <= rows[r].stored <= rows[r].n_tokens:
            raise LayoutError(
                f"rows[{r}] is stored from {rows[r].stored} on: it has {rows[r].n_tokens} tokens"
            )
        if token_offsets[r + 1] - token_offsets[r] != rows[r].n_tokens - rows[r].stored:
            raise LayoutError(f"token_offsets[{r}] leaves no room for {rows[r].n_tokens} tokens")
        if rows[r].n_spans < 0 or span_offsets[r + 1] - span_offsets[r] != rows[r].n_spans:
            raise LayoutError(f"span_offsets[{r}] leaves no room for {rows[r].n_spans} spans")
    n_tokens = token_offsets[n_rows]
    n_spans = span_offsets[n_rows]
    _check_length("input_ids", input_ids.shape[0], n_tokens)
    _check_length("loss_mask", loss_mask.shape[0], (n_tokens + 7) // 8)
    _check_length("logprobs", logprobs.shape[0], n_tokens)
    _check_length("valid", valid.shape[0], (n_tokens + 7) // 8)
    _check_length("spans", spans.shape[0], 5)
    _check_length("spans", spans.shape[1], n_spans)
    _check_length("span_kinds", span_kinds.shape[0], n_spans)


cdef _no_row(const Row[::1] rows, int64_t r):
    return LayoutError(
        f"rows[{r}] is no row of {rows[r].n_calls} calls up to {rows[r].last} with "
        f"{rows[r].n_tokens} tokens from {rows[r].stored} on and {rows[r].n_spans} spans"
    )


def fill_rows(
    const Call[::1] calls not None,
    const Node[::1] nodes not None,
    const int32_t[::1] ends not None,
    const Link[::1] links not None,
    const int32_t[::1] owners not None,
    const int32_t[::1] turn_index not None,
    int32_t[::1] chain not None,
    bint keep_head,
    bint own_every,
    bint by_token,
    int64_t max_tokens,
    bint uncached,
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
    """Write the per-token columns and the spans of planned rows; return missing logprobs.

    ``loss_mask`` and ``valid`` are bitmaps.
    ``spans`` is 5 by n_spans: start, stop, turn_index, output_start, output_stop. The first
    five arguments are those that `plan_rows` filled or read, ``rows`` its result; ``chain``
    is scratch with an entry a node. Tokens and logprobs are written past the caches if
    ``uncached``.
    Tokens before a row's ``stored``, of which it trains none, are left out.
    """
    cdef:
        int64_t n_rows = rows.shape[0], n_calls = calls.shape[0], r, i, at, next_span, bad = -1
        pos_t missing = 0, given_not, offset
        int32_t call
        pos_t replaced
        int n, k
        pos_t begin
        Piece[3] pieces
        Piece part
        Rule rule
        const Call* item
        token_t* tokens = NULL
        float* values = NULL
        uint8_t* mask = NULL
        uint8_t* given = NULL

    for name, m in (
        ("ends", ends.shape[0]), ("links", links.shape[0]),
        ("owners", owners.shape[0]), ("turn_index", turn_index.shape[0]),
    ):
        _check_length(name, m, n_calls)
    _check_length("chain", chain.shape[0], nodes.shape[0])
    _check_forest(nodes, ends)
    _check_row_columns(
        calls, rows, token_offsets, span_offsets, input_ids, loss_mask, logprobs, valid, spans,
        span_kinds,
    )
    if n_rows == 0:
        return 0
    if token_offsets[n_rows]:
        tokens = &input_ids[0]
        mask = &loss_mask[0]
        values = &logprobs[0]
        given = &valid[0]
    rule.keep_head = keep_head
    rule.max_tokens = max_tokens
    with nogil:
        for r in range(n_rows):
            offset = token_offsets[r] - rows[r].stored
            at = span_offsets[r + 1]
            call = rows[r].last
            replaced = rows[r].end
            if rows[r].n_tokens > _held_len(&calls[call]):
                bad = r
                break
            _copy_path(
                &calls[0], &nodes[0], ends[rows[r].last], rows[r].stored, rows[r].n_tokens,
                tokens + token_offsets[r], &chain[0], uncached,
            )
            # From the last call upwards, so the spans are written from the end.
            for i in range(rows[r].n_calls):
                if call < 0:
                    break
                item = &calls[call]
                n = _pieces(
                    item, replaced, own_every or owners[call] == rows[r].owner, &rule, pieces
                )
                for k in range(n):
                    begin = pieces[k].out_start
                    while _next_part(item, &pieces[k], by_token, &begin, &part):
                        at -= 1
                next_span = at
                for k in range(n):
                    begin = pieces[k].out_start
                    while _next_part(item, &pieces[k], by_token, &begin, &part):
                        _write_span(
                            spans, span_kinds, &span_offsets[r], next_span, &part, call
                        )
                        next_span += 1
                replaced = min(replaced, links[call].lcp)
                call = links[call].parent
            given_not = -1 if at != span_offsets[r] else _fill_trained(
                &calls[0], &turn_index[0], spans, span_kinds, span_offsets[r],
                span_offsets[r + 1], token_offsets[r], token_offsets[r + 1], offset, mask,
                values, given, uncached,
            )
            if given_not < 0:
                bad = r
                break
            missing += given_not
        if uncached:
            trajkit_end_uncached()
    if bad >= 0:
        raise _no_row(rows, bad)
    return missing

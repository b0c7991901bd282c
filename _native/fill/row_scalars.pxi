"""The columns of planned rows that have one value a row."""

cdef enum:  # the rows of `ints`, in the order of trajkit.pipeline.row_scalars
    INT_INDEX, INT_STORED, INT_PROMPT, INT_PARENT, INT_SHARED, INT_TURN
    N_INTS

cdef enum:  # the bitmaps
    BIT_PARENT, BIT_WEIGHT, BIT_SEGMENT, BIT_TRUNCATED, BIT_TOOL, BIT_FORMED
    N_BITS


cdef inline void _put_bit(uint8_t[:, ::1] bits, int which, int64_t i, bint value) noexcept nogil:
    """Set one bit, which comes as zero."""
    bits[which, i >> 3] |= <uint8_t>(value << (i & 7))


def list_turns(
    const Row[::1] rows not None,
    const Link[::1] links not None,
    const int32_t[::1] turn_index not None,
    const pos_t[::1] offsets not None,
    int32_t[::1] turns not None,
):
    """Fill the turns of the calls of each row, first to last.

    Those of row r stand at ``turns[offsets[r]:offsets[r + 1]]``.
    """
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


def fill_facts(
    const Row[::1] rows not None,
    const Link[::1] links not None,
    const int32_t[::1] turn_index not None,
    pos_t[::1] sums not None,
    int32_t[:, ::1] ints not None,
    pos_t[::1] mask_sums not None,
    double[::1] weights not None,
    int8_t[::1] segments not None,
    uint8_t[:, ::1] bits not None,
):
    """Fill what a row says of itself; return the nulls of parents, weights and segments.

    ``ints`` is 6 by n_rows: index, stored, prompt_len, parent_row, shared, turn of the last
    call. ``mask_sums`` are the trained tokens of all rows of the row's session, ``weights``
    the row's share of them, ``segments`` indices into trajkit.schema.SEGMENT_KINDS. ``bits``
    is 6 by the bytes of a bitmap, and comes as zeros: whether the row has a parent, a weight,
    a segment, and truncated, use_tool, ill_formed. ``sums`` is scratch with an entry a
    session, and comes as zeros, too.
    """
    cdef:
        int64_t n_rows = rows.shape[0], n_sessions = sums.shape[0], n_calls = links.shape[0], r
        int64_t no_parent = 0, no_weight = 0, no_segment = 0, bad = -1
        int32_t segment
        pos_t whole

    _check_length("turn_index", turn_index.shape[0], n_calls)
    for name, n, needed in (
        ("ints", ints.shape[0], N_INTS), ("ints", ints.shape[1], n_rows),
        ("mask_sums", mask_sums.shape[0], n_rows), ("weights", weights.shape[0], n_rows),
        ("segments", segments.shape[0], n_rows), ("bits", bits.shape[0], N_BITS),
        ("bits", bits.shape[1], (n_rows + 7) // 8),
    ):
        _check_length(name, n, needed)
    with nogil:
        for r in range(n_rows):
            if not (0 <= rows[r].session < n_sessions and 0 <= rows[r].last < n_calls):
                bad = r
                break
            sums[rows[r].session] += rows[r].n_trained
        if bad < 0:
            for r in range(n_rows):
                ints[INT_INDEX, r] = rows[r].index
                ints[INT_STORED, r] = <int32_t>rows[r].stored
                ints[INT_PROMPT, r] = <int32_t>rows[r].prompt_len
                ints[INT_PARENT, r] = rows[r].parent_row
                ints[INT_SHARED, r] = <int32_t>rows[r].shared
                ints[INT_TURN, r] = turn_index[rows[r].last]
                whole = sums[rows[r].session]
                mask_sums[r] = whole
                weights[r] = <double>rows[r].n_trained / <double>max(whole, 1)
                segment = links[rows[r].last].segment - 1
                segments[r] = <int8_t>max(segment, 0)
                no_parent += rows[r].parent_row < 0
                no_weight += whole == 0
                no_segment += segment < 0
                _put_bit(bits, BIT_PARENT, r, rows[r].parent_row >= 0)
                _put_bit(bits, BIT_WEIGHT, r, whole != 0)
                _put_bit(bits, BIT_SEGMENT, r, segment >= 0)
                _put_bit(bits, BIT_TRUNCATED, r, rows[r].truncated != 0)
                _put_bit(bits, BIT_TOOL, r, rows[r].use_tool != 0)
                _put_bit(bits, BIT_FORMED, r, rows[r].ill_formed != 0)
    if bad >= 0:
        raise LayoutError(
            f"rows[{bad}] is of session {rows[bad].session}, its last call {rows[bad].last}: "
            f"there are {n_sessions} and {n_calls}"
        )
    return no_parent, no_weight, no_segment

"""The columns of planned rows that have one value per row.

Fills them from rows, links and turn numbers, in O(rows). With numpy, the many small arrays of a
short session would take a tenth of the time of its rows (`python -m benchmarks.recorder`).
"""

cdef enum:  # trajkit.rows.row_scalars._INTS
    INT_ROW_INDEX, INT_PROMPT_LENGTH, INT_PARENT_ROW, INT_SHARED_LENGTH, INT_LAST_TURN
    N_INTS

cdef enum:  # trajkit.rows.row_scalars._NULLABLE, then _FLAGS
    BIT_PARENT_ROW, BIT_ROW_WEIGHT, BIT_SEGMENT_KIND, BIT_TRUNCATED, BIT_USE_TOOL
    BIT_ILL_FORMED
    N_BITS

ENUMS["RowInt"] = {
    "row_index": INT_ROW_INDEX, "prompt_length": INT_PROMPT_LENGTH,
    "parent_row": INT_PARENT_ROW,
    "shared_length": INT_SHARED_LENGTH, "last_turn": INT_LAST_TURN,
}
ENUMS["RowBit"] = {
    "parent_row": BIT_PARENT_ROW, "row_weight": BIT_ROW_WEIGHT, "segment_kind": BIT_SEGMENT_KIND,
    "truncated": BIT_TRUNCATED, "use_tool": BIT_USE_TOOL, "ill_formed": BIT_ILL_FORMED,
}


cdef inline void _put_bit(uint8_t[:, ::1] bits, int which, int64_t i, bint value) noexcept nogil:
    """Set one bit, which is initially 0."""
    bits[which, i >> 3] |= <uint8_t>(value << (i & 7))


def fill_scalars(
    const Row[::1] rows not None,
    const Link[::1] links not None,
    const int32_t[::1] turn_index not None,
    int64_t n_sessions,
    int32_t[:, ::1] ints not None,
    pos_t[::1] mask_sums not None,
    double[::1] weights not None,
    int8_t[::1] segments not None,
    uint8_t[:, ::1] bits not None,
):
    """Fill the columns; return the number of nulls of parent_row, row_weight and segment_kind.

    ``ints`` has the lines INT_*. ``mask_sums`` are the trained tokens of all rows of the row's
    session, ``weights`` the row's share of them, ``segments`` indices into
    `trajkit.schema.SEGMENT_KINDS`. ``bits`` has the bitmaps BIT_*, initially 0: whether the
    row has a parent, a weight, a segment, and its flags.
    """
    cdef:
        int64_t n_rows = rows.shape[0], n_calls = links.shape[0], r
        int64_t no_parent = 0, no_weight = 0, no_segment = 0, bad = -1
        int32_t segment
        pos_t session_trained

    _check_length("turn_index", turn_index.shape[0], n_calls)
    for name, n, needed in (
        ("ints", ints.shape[0], N_INTS), ("ints", ints.shape[1], n_rows),
        ("mask_sums", mask_sums.shape[0], n_rows), ("weights", weights.shape[0], n_rows),
        ("segments", segments.shape[0], n_rows), ("bits", bits.shape[0], N_BITS),
        ("bits", bits.shape[1], (n_rows + 7) // 8),
    ):
        _check_length(name, n, needed)
    cdef pos_t[::1] sums = zeros(max(n_sessions, 1), "i8")
    with nogil:
        for r in range(n_rows):
            if not (0 <= rows[r].session < n_sessions and 0 <= rows[r].last < n_calls):
                bad = r
                break
            sums[rows[r].session] += rows[r].n_trained
        if bad < 0:
            for r in range(n_rows):
                ints[INT_ROW_INDEX, r] = rows[r].index
                ints[INT_PROMPT_LENGTH, r] = <int32_t>rows[r].prompt_len
                ints[INT_PARENT_ROW, r] = rows[r].parent_row
                ints[INT_SHARED_LENGTH, r] = <int32_t>rows[r].shared
                ints[INT_LAST_TURN, r] = turn_index[rows[r].last]
                session_trained = sums[rows[r].session]
                mask_sums[r] = session_trained
                weights[r] = <double>rows[r].n_trained / <double>max(session_trained, 1)
                segment = links[rows[r].last].segment - 1
                segments[r] = <int8_t>max(segment, 0)
                no_parent += rows[r].parent_row < 0
                no_weight += session_trained == 0
                no_segment += segment < 0
                _put_bit(bits, BIT_PARENT_ROW, r, rows[r].parent_row >= 0)
                _put_bit(bits, BIT_ROW_WEIGHT, r, session_trained != 0)
                _put_bit(bits, BIT_SEGMENT_KIND, r, segment >= 0)
                _put_bit(bits, BIT_TRUNCATED, r, rows[r].truncated != 0)
                _put_bit(bits, BIT_USE_TOOL, r, rows[r].use_tool != 0)
                _put_bit(bits, BIT_ILL_FORMED, r, rows[r].ill_formed != 0)
    if bad >= 0:
        raise LayoutError(
            f"rows[{bad}] is of session {rows[bad].session}, its last call {rows[bad].last}: "
            f"there are {n_sessions} and {n_calls}"
        )
    return no_parent, no_weight, no_segment

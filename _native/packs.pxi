"""The tokens, the edges and the segments of packs, of rows that have their places.

A row's own tokens are those from ``shared`` on. In pre-order, with the row's own tokens first and
then its branches from the deepest to the shallowest, they are contiguous, so a forest of tokens is
laid out as a forest of rows (trajkit.packs.packing).
"""

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    /* The number of ones in bits[start:stop], least significant bit first. */
    static int64_t trajkit_ones(const uint8_t *bits, int64_t start, int64_t stop) {
        int64_t n = 0;
        uint64_t word;
        for (; start < stop && (start & 7); start++)
            n += bits[start >> 3] >> (start & 7) & 1;
        for (; stop - start >= 64; start += 64) {
            memcpy(&word, bits + (start >> 3), 8);
            n += __builtin_popcountll(word);
        }
        for (; start < stop; start++)
            n += bits[start >> 3] >> (start & 7) & 1;
        return n;
    }

    /* The place after the last bit in bits[start:stop] that has a value, or start. */
    static int64_t trajkit_after_last(
        const uint8_t *bits, int64_t start, int64_t stop, uint64_t value
    ) {
        const uint64_t other = value ? 0 : ~UINT64_C(0);
        uint64_t word;
        for (; stop > start && (stop & 7); stop--)
            if ((bits[(stop - 1) >> 3] >> ((stop - 1) & 7) & 1) == value)
                return stop;
        for (; stop - start >= 64; stop -= 64) {
            memcpy(&word, bits + ((stop - 64) >> 3), 8);
            if (word != other)
                break;
        }
        for (; stop > start; stop--)
            if ((bits[(stop - 1) >> 3] >> ((stop - 1) & 7) & 1) == value)
                return stop;
        return start;
    }
    """
    int64_t _ones "trajkit_ones" (const uint8_t* bits, int64_t start, int64_t stop) noexcept nogil
    int64_t _after_last "trajkit_after_last" (
        const uint8_t* bits, int64_t start, int64_t stop, uint64_t value
    ) noexcept nogil


cdef void _close(PackRow* row, pos_t depth, pos_t end, int32_t* ends) noexcept nogil:
    """The subtrees of a row's own tokens from a depth on, if still open, end at ``end``."""
    cdef pos_t i
    cdef int32_t value = <int32_t>(end - row.base)
    depth = max(depth, row.shared)
    for i in range(row.start + depth - row.shared, row.start + row.open - row.shared):
        ends[i] = value
    row.open = min(row.open, depth)


cdef void _fill_tokens(
    PackRow* rows, int64_t n, token_t* ids, int32_t* positions, int32_t* ends, pos_t n_tokens
) noexcept nogil:
    cdef int64_t r, k, p
    cdef pos_t i, stop, start
    for r in range(n):
        start = rows[r].start
        stop = start + rows[r].length - rows[r].shared
        check_write("packs", start, stop - start, n_tokens)
        memcpy(
            ids + start, <const token_t*><intptr_t>rows[r].ids + rows[r].shared,
            (stop - start) * sizeof(token_t),
        )
        for i in range(start, stop):
            positions[i] = <int32_t>(rows[r].shared + i - start)
        rows[r].open = rows[r].length
        # the rows from the one before up to the parent have no further branch below this one
        k = r - 1
        p = rows[r].parent
        while k > p and k >= 0:
            _close(&rows[k], rows[k].shared, start, ends)
            k = rows[k].parent
        if p >= 0:
            _close(&rows[p], rows[r].shared, start, ends)
        if r + 1 == n or rows[r + 1].parent < 0:
            k = r
            while k >= 0:
                _close(&rows[k], rows[k].shared, stop, ends)
                k = rows[k].parent


cdef int64_t _first_misplaced(const PackRow* rows, int64_t n, pos_t n_tokens) noexcept nogil:
    """The first row that is not where a tree in pre-order has it, or -1.

    If there is none, the tokens of all rows lie in the buffers.
    """
    cdef int64_t r
    cdef int32_t p
    cdef pos_t stop
    for r in range(n):
        p = rows[r].parent
        stop = rows[r].start + rows[r].length - rows[r].shared
        if not 0 <= rows[r].shared <= rows[r].length or rows[r].base < 0:
            return r
        if not rows[r].base <= rows[r].start <= stop <= n_tokens:
            return r
        if rows[r].length > INT32_MAX or stop - rows[r].base > INT32_MAX:
            return r
        if not -1 <= p < r or (p < 0 and rows[r].shared != 0):
            return r
        if p >= 0 and not rows[p].shared < rows[r].shared <= rows[p].length:
            return r
        if p >= 0 and rows[r - 1].start + rows[r - 1].length - rows[r - 1].shared != rows[r].start:
            return r
    return -1


cdef bint _fill_edges(
    const PackRow* rows, int64_t r, const token_t* ids, int64_t start, int64_t stop,
    int32_t* source, token_t* target, int32_t* position, float* logprob, uint8_t* given,
) noexcept nogil:
    """Write the edges of a row, which are start:stop, from the last one to the first.

    So the rows that have the tokens are passed once. Return whether the row has as many
    edges, and none at position 0.
    """
    cdef const uint8_t* mask = <const uint8_t*><intptr_t>rows[r].mask
    cdef const uint8_t* valid = <const uint8_t*><intptr_t>rows[r].valid
    cdef const float* logprobs = <const float*><intptr_t>rows[r].logprobs
    cdef int64_t bit = rows[r].mask_bit, end, first, k = r
    cdef int64_t valid_bit = rows[r].valid_bit
    cdef pos_t i, j, n, shift, e
    end = bit + rows[r].length
    while True:
        # the last trained tokens in front of end, as far as one row has them
        end = _after_last(mask, bit, end, 1)
        if end == bit:
            return stop == start
        first = _after_last(mask, bit, end, 0)
        while end > first:
            j = end - 1 - bit
            while j < rows[k].shared:
                k = rows[k].parent
            n = min(end - first, j + 1 - rows[k].shared)
            end -= n
            stop -= n
            i = j = end - bit
            if stop < start or j == 0:
                return False
            shift = rows[k].start - rows[k].shared
            memcpy(target + stop, ids + shift + j, n * sizeof(token_t))
            memcpy(logprob + stop, logprobs + i, n * sizeof(float))
            memset(given + stop, 1, n)
            for e in range(n):
                position[stop + e] = <int32_t>(j + e)
                source[stop + e] = <int32_t>(shift + j + e - 1 - rows[k].base)
            if valid != NULL and _ones(valid, valid_bit + i, valid_bit + i + n) < n:
                for e in range(n):
                    if not valid[valid_bit + i + e >> 3] >> (valid_bit + i + e & 7) & 1:
                        given[stop + e] = 0
                        logprob[stop + e] = 0
            # the token before these may be in a row further up
            while j - 1 < rows[k].shared:
                k = rows[k].parent
            source[stop] = <int32_t>(rows[k].start + j - 1 - rows[k].shared - rows[k].base)


def fill_packs(
    PackRow[::1] rows not None,
    token_t[::1] input_ids not None,
    int32_t[::1] position_ids not None,
    int32_t[::1] subtree_end not None,
):
    """Write the tokens of rows that have their places.

    Rows are in pre-order, tree after tree; ``shared`` and ``parent`` are those within the tree.
    Tokens that belong to no row (padding) are left as they are. Ends count from the first token
    of the pack.
    """
    cdef int64_t n = rows.shape[0], bad
    cdef pos_t n_tokens = input_ids.shape[0]
    _check_length("position_ids", position_ids.shape[0], n_tokens)
    _check_length("subtree_end", subtree_end.shape[0], n_tokens)
    if n == 0 or n_tokens == 0:
        return
    with nogil:
        bad = _first_misplaced(&rows[0], n, n_tokens)
        if bad < 0:
            _fill_tokens(
                &rows[0], n, &input_ids[0], &position_ids[0], &subtree_end[0], n_tokens
            )
    if bad >= 0:
        raise LayoutError(f"rows[{bad}] is not where a tree in pre-order has it")


def count_edges(const PackRow[::1] rows not None):
    """The first row with an edge at position 0, or -1; and how many edges each row has.

    That token is predicted from nothing.
    """
    cdef int64_t n = rows.shape[0], r, bad = -1
    cdef const uint8_t* mask
    cdef int64_t[::1] counts = empty(n, "i8")
    with nogil:
        for r in range(n):
            mask = <const uint8_t*><intptr_t>rows[r].mask
            counts[r] = _ones(mask, rows[r].mask_bit, rows[r].mask_bit + rows[r].length)
            if bad < 0 and counts[r]:
                if mask[rows[r].mask_bit >> 3] >> (rows[r].mask_bit & 7) & 1:
                    bad = r
    return bad, counts.base


def fill_edges(
    const PackRow[::1] rows not None,
    const token_t[::1] input_ids not None,
    const int64_t[::1] offsets not None,
    int32_t[::1] source not None,
    token_t[::1] target not None,
    int32_t[::1] position not None,
    float[::1] logprob not None,
    uint8_t[::1] given not None,
):
    """Write the edges of rows whose tokens `fill_packs` wrote.

    Edges ``offsets[r]:offsets[r + 1]`` are those of row r, by position; none is at position 0
    (`count_edges`). Of each: the token of the pack, the id that follows it in the row, its
    position there, its logprob (0 where the row has none), and whether the row has it.
    """
    cdef int64_t n = rows.shape[0], r, bad = -1
    cdef int64_t n_edges = source.shape[0]
    for name, size in (
        ("target", target.shape[0]), ("position", position.shape[0]),
        ("logprob", logprob.shape[0]), ("given", given.shape[0]),
    ):
        _check_length(name, size, n_edges)
    _check_length("offsets", offsets.shape[0], n + 1)
    if n == 0 or n_edges == 0:
        return
    with nogil:
        bad = _first_misplaced(&rows[0], n, input_ids.shape[0])
        if bad < 0:
            for r in range(n):
                if not 0 <= offsets[r] <= offsets[r + 1] <= n_edges or not _fill_edges(
                    &rows[0], r, &input_ids[0], offsets[r], offsets[r + 1],
                    &source[0], &target[0], &position[0], &logprob[0], &given[0],
                ):
                    bad = r
                    break
    if bad >= 0:
        raise LayoutError(f"rows[{bad}] has other edges than the offsets, or one at position 0")

"""Rows with missing logprobs: all their logprobs become null.

Changes logprobs and validity from the loss mask, in O(tokens / 8 + tokens of such rows).
"""


cdef bint _same_bits(
    const uint8_t* a, const uint8_t* b, pos_t start, pos_t stop
) noexcept nogil:
    """Whether two bitmaps agree in start:stop."""
    cdef pos_t n
    while start < stop and start & 7:
        if (a[start >> 3] ^ b[start >> 3]) >> (start & 7) & 1:
            return False
        start += 1
    n = (stop - start) >> 3
    if n > 0 and memcmp(a + (start >> 3), b + (start >> 3), n) != 0:
        return False
    start += max(n, 0) * 8
    while start < stop:
        if (a[start >> 3] ^ b[start >> 3]) >> (start & 7) & 1:
            return False
        start += 1
    return True


cdef void _clear_bits(uint8_t* bits, pos_t start, pos_t stop) noexcept nogil:
    """Clear bits[start:stop], least significant bit first (the Arrow order)."""
    while start < stop and start & 7:
        bits[start >> 3] &= <uint8_t>~(1 << (start & 7))
        start += 1
    if stop - start >= 8:
        memset(bits + (start >> 3), 0, (stop - start) >> 3)
        start += (stop - start) & ~<pos_t>7
    while start < stop:
        bits[start >> 3] &= <uint8_t>~(1 << (start & 7))
        start += 1


def drop_partial_logprobs(
    const pos_t[::1] token_offsets not None,
    const uint8_t[::1] loss_mask not None,
    float[::1] logprobs not None,
    uint8_t[::1] valid not None,
):
    """Leave a row no logprob where ``valid`` lacks one that ``loss_mask`` trains."""
    cdef int64_t n_rows = token_offsets.shape[0] - 1, r
    cdef pos_t start, stop, n_tokens
    if n_rows < 1:
        return
    n_tokens = token_offsets[n_rows]
    for r in range(n_rows):
        if not 0 <= token_offsets[r] <= token_offsets[r + 1]:
            raise LayoutError(f"token_offsets[{r}] is {token_offsets[r]}: it must ascend")
    _check_length("loss_mask", loss_mask.shape[0], (n_tokens + 7) // 8)
    _check_length("logprobs", logprobs.shape[0], n_tokens)
    _check_length("valid", valid.shape[0], (n_tokens + 7) // 8)
    if n_tokens == 0:
        return
    with nogil:
        for r in range(n_rows):
            start = token_offsets[r]
            stop = token_offsets[r + 1]
            if not _same_bits(&loss_mask[0], &valid[0], start, stop):
                memset(&logprobs[0] + start, 0, (stop - start) * sizeof(float))
                _clear_bits(&valid[0], start, stop)

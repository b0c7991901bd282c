"""Longest common prefix of two arrays of token ids, in O(its length)."""

cdef extern from *:
    void __builtin_prefetch(const void* address) nogil

cdef enum:  # in tokens
    BLOCK = 32768  # compared at once; one that differs is halved until the position is found
    NEAR = 256  # compared first: most arrays that differ do so at their start


cdef pos_t _lcp(const token_t* a, const token_t* b, pos_t n) noexcept nogil:
    """First index in [0, n) where a and b differ; n when they agree throughout."""
    cdef pos_t i = 0, block = min(n, NEAR), half
    while memcmp(a + i, b + i, block * sizeof(token_t)) == 0:
        i += block
        if i == n:
            return n
        block = min(n - i, BLOCK)
    while block > 16:
        half = block // 2
        if memcmp(a + i, b + i, half * sizeof(token_t)) == 0:
            i += half
            block -= half
        else:
            block = half
    while a[i] == b[i]:
        i += 1
    return i


def lcp(const token_t[::1] a not None, const token_t[::1] b not None):
    """Tokens that a and b share at their start. Do not write to them during the call."""
    cdef pos_t n = min(a.shape[0], b.shape[0])
    if n == 0:
        return 0
    with nogil:
        n = _lcp(&a[0], &b[0], n)
    return n

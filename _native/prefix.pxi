"""Longest common prefix of two runs of token ids."""


cdef extern from *:
    void __builtin_prefetch(const void* address) nogil

cdef enum:  # in tokens
    AHEAD = 2048
    LINE = 64  # one line in four: the neighbours come with it
    N_LINES = 4


cdef pos_t _lcp(const token_t* a, const token_t* b, pos_t n) noexcept nogil:
    """First index in [0, n) where a and b differ; n when they agree throughout."""
    # memcmp runs at the speed of memory but does not say where it stopped: blocks bound what
    # is read again, and halving finds the place within one. The processor's own prefetcher
    # stops at the end of a page; asking for lines two pages ahead keeps the next page's
    # address translation and first lines off the path (benchmarks/compare.py measures it).
    cdef pos_t i = 0, block = N_LINES * LINE, half
    cdef int k
    while n - i >= block:
        for k in range(N_LINES):
            __builtin_prefetch(b + i + AHEAD + k * LINE)
        if memcmp(a + i, b + i, block * sizeof(token_t)) != 0:
            break
        i += block
    if n - i < block:
        block = n - i
        if memcmp(a + i, b + i, block * sizeof(token_t)) == 0:
            return n
    # a[i:i + block] differs somewhere
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

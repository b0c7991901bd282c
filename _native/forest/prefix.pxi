"""Longest common prefix of two arrays of token ids, in O(its length).

Comparing four pages at a time is kept for data in RAM, where it is 1.0 to 1.4 times as fast as
memcmp, depending on the machine (docs/benchmarks.md, prefix compare).
"""


cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>

    #define TRAJKIT_PAGE 4096
    #define TRAJKIT_PAGES 4
    #define TRAJKIT_PAGES_BYTES (TRAJKIT_PAGES * TRAJKIT_PAGE)

    #if defined(__GNUC__)
    typedef uint64_t trajkit_lanes __attribute__((vector_size(16), aligned(1), may_alias));

    /* Whether two blocks of TRAJKIT_PAGES_BYTES are equal: a line of each page in turn. */
    static int trajkit_same_pages(const char *a, const char *b) {
        trajkit_lanes differ = {0, 0};
        for (size_t line = 0; line < TRAJKIT_PAGE; line += 64) {
            for (size_t page = 0; page < TRAJKIT_PAGES_BYTES; page += TRAJKIT_PAGE) {
                const char *p = a + page + line, *q = b + page + line;
                __builtin_prefetch(p + TRAJKIT_PAGES_BYTES);
                __builtin_prefetch(q + TRAJKIT_PAGES_BYTES);
                for (size_t k = 0; k < 64; k += sizeof(trajkit_lanes))
                    differ |= *(const trajkit_lanes *)(p + k) ^ *(const trajkit_lanes *)(q + k);
            }
        }
        return (differ[0] | differ[1]) == 0;
    }
    #else
    static int trajkit_same_pages(const char *a, const char *b) {
        return memcmp(a, b, TRAJKIT_PAGES_BYTES) == 0;
    }
    #endif
    """
    enum:
        TRAJKIT_PAGES_BYTES
    void __builtin_prefetch(const void* address) nogil
    bint trajkit_same_pages(const char* a, const char* b) noexcept nogil

cdef enum:  # in tokens
    PAGES = TRAJKIT_PAGES_BYTES // 4
    NEAR = 256  # compared before pages: most arrays that differ do so at their start


cdef pos_t _lcp(const token_t* a, const token_t* b, pos_t n) noexcept nogil:
    """First index in [0, n) where a and b differ; n when they agree throughout."""
    # The processor's prefetcher stops at the end of each page. Comparing four pages at a time
    # keeps it busy and more of memory in flight than one run of addresses does
    # (benchmarks/compare.py compares it with memcmp). A block that differs is halved until the
    # position is found.
    cdef pos_t i = 0, block = min(n, NEAR), half
    if memcmp(a, b, block * sizeof(token_t)) == 0:
        i = block
        block = PAGES
        while n - i >= block and trajkit_same_pages(<const char*>(a + i), <const char*>(b + i)):
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

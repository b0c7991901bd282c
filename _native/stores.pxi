"""Copies that write past the caches.

By default a processor reads a line of the target before it writes to it, and keeps it in place
of others. For a target larger than the caches that is a third of all traffic, for nothing.
Used for batches of 2**20 tokens or more (trajkit.tables.limits.STREAMING_STORE_TOKENS): rows of
``faithful`` from delta form take 1.4 to 1.9 times as long without. Elsewhere than on x86-64 these
are memcpy and memset.
"""

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    static void trajkit_put_cached(void *to, const void *from, size_t n) {
        if (n == 0)
            return; /* of no bytes the addresses may be NULL, which memcpy must not get */
        if (from)
            memcpy(to, from, n);
        else
            memset(to, 0, n);
    }

    #if defined(__SSE2__) || defined(_M_X64)
    #include <emmintrin.h>

    /* Copy n bytes, or clear them if from is NULL. */
    static void trajkit_put(void *target, const void *source, size_t n, int uncached) {
        char *to = target;
        const char *from = source;
        size_t before = -(uintptr_t)to & 63; /* before the first complete line */
        if (!uncached || n < before + 64) {
            trajkit_put_cached(to, from, n);
            return;
        }
        trajkit_put_cached(to, from, before);
        for (to += before, from += from ? before : 0, n -= before; n >= 64; to += 64, n -= 64) {
            __m128i part[4] = {0};
            if (from) {
                for (int k = 0; k < 4; k++)
                    part[k] = _mm_loadu_si128((const __m128i *)from + k);
                _mm_prefetch(from + 1024, _MM_HINT_T0);
                from += 64;
            }
            for (int k = 0; k < 4; k++)
                _mm_stream_si128((__m128i *)to + k, part[k]);
        }
        trajkit_put_cached(to, from, n);
    }

    /* other threads see what was written */
    #define trajkit_end_uncached() _mm_sfence()
    #else
    #define trajkit_put(to, from, n, uncached) trajkit_put_cached(to, from, n)
    #define trajkit_end_uncached()
    #endif
    """
    void _put "trajkit_put" (void* to, const void* source, size_t n, bint uncached) noexcept nogil
    void trajkit_end_uncached() noexcept nogil

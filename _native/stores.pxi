"""Copies that write past the caches.

By default a processor reads a line of the target before it writes to it, and keeps it in place
of others. For a target larger than the caches that is a third of all traffic, for nothing.
Used for batches of 2**20 tokens or more (trajkit.tables.limits.STREAMING_STORE_TOKENS).
Without x86-64 these are memcpy and memset.
"""

cdef extern from *:
    """
    #if defined(__SSE2__) || defined(_M_X64)
    #include <emmintrin.h>
    #include <stdint.h>
    #include <string.h>

    #define TRAJKIT_LINE 64
    #define TRAJKIT_AHEAD 1024

    /* bytes of a run of n at address before its first complete line */
    static size_t trajkit_before_line(const void *address, size_t n) {
        size_t before = -(uintptr_t)address & (TRAJKIT_LINE - 1);
        return before < n ? before : n;
    }

    static void trajkit_copy_uncached(void *target, const void *source, size_t n) {
        char *to = (char *)target;
        const char *from = (const char *)source;
        size_t before = trajkit_before_line(to, n);
        memcpy(to, from, before);
        to += before;
        from += before;
        for (n -= before; n >= TRAJKIT_LINE; n -= TRAJKIT_LINE) {
            const __m128i *line = (const __m128i *)from;
            __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
            __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
            _mm_prefetch(from + TRAJKIT_AHEAD, _MM_HINT_T0);
            _mm_stream_si128((__m128i *)to, a);
            _mm_stream_si128((__m128i *)to + 1, b);
            _mm_stream_si128((__m128i *)to + 2, c);
            _mm_stream_si128((__m128i *)to + 3, d);
            to += TRAJKIT_LINE;
            from += TRAJKIT_LINE;
        }
        memcpy(to, from, n);
    }

    static void trajkit_zero_uncached(void *target, size_t n) {
        char *to = (char *)target;
        size_t before = trajkit_before_line(to, n);
        const __m128i zero = _mm_setzero_si128();
        memset(to, 0, before);
        to += before;
        for (n -= before; n >= TRAJKIT_LINE; n -= TRAJKIT_LINE) {
            _mm_stream_si128((__m128i *)to, zero);
            _mm_stream_si128((__m128i *)to + 1, zero);
            _mm_stream_si128((__m128i *)to + 2, zero);
            _mm_stream_si128((__m128i *)to + 3, zero);
            to += TRAJKIT_LINE;
        }
        memset(to, 0, n);
    }

    /* other threads see what was written */
    #define trajkit_end_uncached() _mm_sfence()
    #else
    #define trajkit_copy_uncached memcpy
    #define trajkit_zero_uncached(target, n) memset(target, 0, n)
    #define trajkit_end_uncached()
    #endif
    """
    void trajkit_copy_uncached(void* target, const void* source, size_t n) noexcept nogil
    void trajkit_zero_uncached(void* target, size_t n) noexcept nogil
    void trajkit_end_uncached() noexcept nogil


cdef inline void _put(void* target, const void* source, size_t n, bint uncached) noexcept nogil:
    """Copy n bytes."""
    if uncached:
        trajkit_copy_uncached(target, source, n)
    else:
        memcpy(target, source, n)


cdef inline void _put_zeros(void* target, size_t n, bint uncached) noexcept nogil:
    """Clear n bytes."""
    if uncached:
        trajkit_zero_uncached(target, n)
    else:
        memset(target, 0, n)

"""Pages of memory that should be equal, compared four at a time at any addresses.

Reports whether pairs of pages are equal, in O(bytes). A new call is compared with many
separate buffers: nodes of a path, texts of messages. Pages are added one by one and compared
once the next four are known, so prefetching continues from buffer to buffer, as it does within
one array in prefix.pxi. The Recorder's cost per turn is nearly all comparison
(docs/benchmarks.md, "record, per turn").
"""

cdef extern from *:
    """
    /* two ranges of TRAJKIT_PAGE bytes each, and a tag */
    typedef struct { const char *a, *b; int64_t tag; } trajkit_pair;

    /* Whether four pairs of pages are equal; four others are asked for meanwhile. */
    #if defined(__GNUC__)
    static int trajkit_same_pairs(const trajkit_pair *now, const trajkit_pair *next) {
        trajkit_lanes differ = {0, 0};
        for (size_t line = 0; line < TRAJKIT_PAGE; line += 64) {
            for (int i = 0; i < TRAJKIT_PAGES; i++) {
                const char *p = now[i].a + line, *q = now[i].b + line;
                __builtin_prefetch(next[i].a + line);
                __builtin_prefetch(next[i].b + line);
                for (size_t k = 0; k < 64; k += sizeof(trajkit_lanes))
                    differ |= *(const trajkit_lanes *)(p + k) ^ *(const trajkit_lanes *)(q + k);
            }
        }
        return (differ[0] | differ[1]) == 0;
    }
    #else
    static int trajkit_same_pairs(const trajkit_pair *now, const trajkit_pair *next) {
        for (int i = 0; i < TRAJKIT_PAGES; i++)
            if (memcmp(now[i].a, now[i].b, TRAJKIT_PAGE) != 0)
                return 0;
        return 1;
    }
    #endif
    """
    enum:
        TRAJKIT_PAGE
        TRAJKIT_PAGES
    ctypedef struct Pair "trajkit_pair":
        const char* a
        const char* b
        int64_t tag
    bint trajkit_same_pairs(const Pair* now, const Pair* next) noexcept nogil


cdef struct Pages:
    Pair[2 * TRAJKIT_PAGES] pair
    int n
    bint differ      # a pair of pages does
    int64_t differs  # the tag of the first that does


cdef inline void _begin_pages(Pages* pages) noexcept nogil:
    memset(pages, 0, sizeof(Pages))


cdef bint _add_pages(
    Pages* pages, const char* a, const char* b, int64_t n, int64_t tag, int64_t step
) noexcept nogil:
    """Compare n bytes of a and b, at least a page, now or later.

    The first page has the tag, and each one after it a tag that is greater by ``step``. The
    last ends where the bytes do, and begins within the one before it.

    Returns
    -------
    bool
        False: a pair of pages differs, this one or an earlier one, and `differs` is the tag
        of the first. Nothing more may be added then.
    """
    cdef int64_t at = 0
    while at < n:
        if n - at < TRAJKIT_PAGE:
            at = n - TRAJKIT_PAGE
        # four at least are free: they are compared as soon as all are taken
        check_write("pages", pages.n, 1, 2 * TRAJKIT_PAGES)
        pages.pair[pages.n].a = a + at
        pages.pair[pages.n].b = b + at
        pages.pair[pages.n].tag = tag
        pages.n += 1
        if pages.n == 2 * TRAJKIT_PAGES and not _compare_four(pages):
            return False
        at += TRAJKIT_PAGE
        tag += step
    return True


cdef bint _compare_four(Pages* pages) noexcept nogil:
    """Compare the first four pairs, with the others on their way; those become the first."""
    if not trajkit_same_pairs(pages.pair, pages.pair + TRAJKIT_PAGES):
        return _compare_each(pages)
    pages.n -= TRAJKIT_PAGES
    memcpy(pages.pair, pages.pair + TRAJKIT_PAGES, TRAJKIT_PAGES * sizeof(Pair))
    return True


cdef bint _compare_each(Pages* pages) noexcept nogil:
    """Compare the pairs one by one, and forget them."""
    cdef int i, n = pages.n
    pages.n = 0
    for i in range(n):
        if memcmp(pages.pair[i].a, pages.pair[i].b, TRAJKIT_PAGE) != 0:
            pages.differ, pages.differs = True, pages.pair[i].tag
            return False
    return True


cdef bint _end_pages(Pages* pages) noexcept nogil:
    """Compare what was added and not compared yet; what it returns is as of `_add_pages`."""
    if pages.differ:
        return False
    if pages.n >= TRAJKIT_PAGES and not _compare_four(pages):
        return False
    return _compare_each(pages)

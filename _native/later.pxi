"""Texts of messages that are compared some messages behind the rest of them.

A text is asked for when its message is compared with a form, and is compared itself when
others were asked for: nothing waits for memory. Until then it seems to be the same.
"""

cdef enum:
    WAITING = 4  # texts of less than a page that are under way
    LINE = 64    # bytes: what memory brings at a time


cdef struct TextPair:
    const char* a
    const char* b
    int64_t n      # bytes
    int64_t place


cdef struct Later:
    Pages pages                # of long texts, tagged by the place of their message
    TextPair[WAITING] waiting  # shorter ones; a ring
    uint32_t first, last
    int64_t differs            # the place of the first message of which one of these does
    int64_t place              # of the message that is compared now
    bint any                   # some text was compared at all


cdef inline void _begin_later(Later* later) noexcept nogil:
    _begin_pages(&later.pages)
    later.first = later.last = 0
    later.differs = INT64_MAX
    later.any = False


cdef bint _seems_same(PyObject* a, PyObject* b, Later* later) noexcept nogil:
    """Whether two texts may be equal, as far as is known now.

    False: they are not, or those of an earlier message are not.
    """
    cdef Py_ssize_t n = text_length(a), at = 0
    cdef int kind = text_kind(a)
    cdef TextPair* pair
    later.any = True
    if text_length(b) != n or text_kind(b) != kind:
        return False
    n *= kind
    if n >= TRAJKIT_PAGE:
        return _add_pages(&later.pages, text_data(a), text_data(b), n, later.place, 0)
    if n <= LINE:
        return memcmp(text_data(a), text_data(b), n) == 0
    if later.last - later.first == WAITING and not _compare_waiting(later):
        return False
    pair = &later.waiting[later.last % WAITING]
    pair.a, pair.b, pair.n, pair.place = text_data(a), text_data(b), n, later.place
    later.last += 1
    while at < n:
        __builtin_prefetch(pair.a + at)
        __builtin_prefetch(pair.b + at)
        at += LINE
    return True


cdef bint _compare_waiting(Later* later) noexcept nogil:
    cdef TextPair* pair = &later.waiting[later.first % WAITING]
    later.first += 1
    if memcmp(pair.a, pair.b, pair.n) == 0:
        return True
    later.differs = pair.place
    later.first = later.last
    return False


cdef int64_t _end_later(Later* later) noexcept nogil:
    """Compare what is left.

    Returns
    -------
    int64
        The place of the first message that only seemed to be the same, or INT64_MAX.
    """
    while later.first != later.last and _compare_waiting(later):
        pass
    if not _end_pages(&later.pages):
        later.differs = min(later.differs, later.pages.differs)
    return later.differs

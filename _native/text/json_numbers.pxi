"""Token ids of a JSON text into flat buffers, and the positions of its keys and values.

Fills arrays of ids from the text, in O(bytes). A text is one ``bytes`` object, whose
last byte Python follows with a 0: a loop that stops at every unexpected byte cannot run past
it. Nothing here checks that a text is JSON: what is not cut out of it goes to Python's own
parser afterwards. Kept for speed: reading turns takes a tenth of the time of ``json.loads``
(docs/benchmarks.md, import).
"""

cdef inline bint _is_space(char c) noexcept nogil:
    return c == 32 or c == 10 or c == 13 or c == 9


cdef inline const char* _past_space(const char* s) noexcept nogil:
    while _is_space(s[0]):
        s += 1
    return s


cdef const char* _past_string(const char* s, const char* stop) noexcept nogil:
    """The byte after the string that begins at s, or NULL if it does not end."""
    cdef const char* quote = s
    cdef const char* slash
    while True:
        quote = <const char*>memchr(quote + 1, 34, stop - quote - 1) if quote < stop else NULL
        if quote == NULL:
            return NULL
        slash = quote
        while (slash - 1)[0] == 92:  # s itself is no backslash
            slash -= 1
        if (quote - slash) % 2 == 0:
            return quote + 1


cdef const char* _past_value(const char* s, const char* stop) noexcept nogil:
    """The byte after the value that begins at s, or NULL if it does not end."""
    cdef pos_t depth = 0
    while s < stop:
        if s[0] == 34:
            s = _past_string(s, stop)
            if s == NULL or depth == 0:
                return s
        elif s[0] == 91 or s[0] == 123:
            depth += 1
            s += 1
        elif s[0] == 93 or s[0] == 125:
            if depth <= 1:
                return s if depth == 0 else s + 1
            depth -= 1
            s += 1
        elif depth == 0 and (s[0] == 44 or s[0] == 58 or _is_space(s[0])):
            return s
        else:
            s += 1
    return s if depth == 0 else NULL


def json_value_end(bytes text not None, Py_ssize_t at):
    """The end of the value that begins at `at`; -1 if the text ends first."""
    if not 0 <= at <= len(text):
        raise LayoutError(f"{at} is outside of a text of {len(text)} bytes")
    cdef const char* s = PyBytes_AS_STRING(text)
    cdef const char* end
    cdef Py_ssize_t n = len(text)
    with nogil:
        end = _past_value(s + at, s + n)
    return -1 if end == NULL else end - s


def json_shared(bytes text not None, Py_ssize_t at, bytes before not None, Py_ssize_t start,
                Py_ssize_t stop):
    """Bytes that ``text[at:]`` and ``before[start:stop]`` share at their start."""
    if not (0 <= at <= len(text) and 0 <= start <= stop <= len(before)):
        raise LayoutError("a position is outside of its text")
    cdef const char* a = PyBytes_AS_STRING(text) + at
    cdef const char* b = PyBytes_AS_STRING(before) + start
    cdef pos_t i = 0, block = 4096, n = min(stop - start, <Py_ssize_t>len(text) - at)
    with nogil:
        while i < n:
            block = min(block, n - i)
            if memcmp(a + i, b + i, block) == 0:
                i += block
            elif block <= 16:
                while a[i] == b[i]:
                    i += 1
                break
            else:
                block //= 2
    return i


def json_ids(bytes text not None, Py_ssize_t at, token_t[::1] out not None):
    """Read integers in [0, 2**31) with commas between them, up to a closing bracket.

    The first of them, or white space before it, is at ``at``. Returns whether there are exactly
    as many as ``out`` has places, and nothing else, before the bracket.
    """
    if not 0 <= at <= len(text):
        raise LayoutError(f"{at} is outside of a text of {len(text)} bytes")
    cdef const char* s = PyBytes_AS_STRING(text) + at
    cdef Py_ssize_t i = 0, n = out.shape[0]
    cdef const char* start
    cdef uint64_t value
    cdef uint8_t digit
    with nogil:
        s = _past_space(s)
        while i < n:
            start = s
            value = 0
            while True:
                digit = <uint8_t>(s[0] - 48)
                if digit > 9:
                    break
                value = value * 10 + digit
                s += 1
            # up to ten digits, none before the first but in 0 itself
            if s == start or s - start > 10 or value > 0x7FFFFFFF:
                break
            if start[0] == 48 and s - start > 1:
                break
            out[i] = <token_t>value
            i += 1
            s = _past_space(s)
            if i < n:
                if s[0] != 44:
                    i = 0
                    break
                s = _past_space(s + 1)
    return i == n and n > 0 and s[0] == 93

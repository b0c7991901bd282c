"""Numbers of a JSON text into flat buffers, and the positions of its keys and values.

Fills arrays of ids or floats from the text, in O(bytes). A text is one ``bytes`` object, whose
last byte Python follows with a 0: a loop that stops at every unexpected byte cannot run past
it. Nothing here checks that a text is JSON: what is not cut out of it goes to Python's own
parser afterwards. Kept for speed: reading turns takes a tenth of the time of ``json.loads``
(docs/benchmarks.md, import).
"""

cdef extern from "Python.h":
    double PyOS_string_to_double(const char*, char**, PyObject*) except? -1.0

cdef extern from *:
    """
    #include <math.h>
    /* w / 10**k rounded once, half to even, for w > 0 and 0 < k <= 27: all in integers, as
       5**27 has less than 64 bits. */
    #ifdef __SIZEOF_INT128__
    #define TRAJKIT_WIDE 1
    static double trajkit_ratio(unsigned long long w, int k) {
        unsigned long long p = 1, q, m, low, half;
        unsigned __int128 top;
        int a, b, shift, i;
        for (i = 0; i < k; i++) p *= 5;
        a = __builtin_clzll(w), b = __builtin_clzll(p);
        top = (unsigned __int128)(w << a) << 62;
        p <<= b;
        q = (unsigned long long)(top / p);
        shift = 64 - __builtin_clzll(q) - 53;
        m = q >> shift, low = q & ((1ULL << shift) - 1), half = 1ULL << (shift - 1);
        if (low > half || (low == half && (q * (unsigned __int128)p != top || (m & 1)))) m++;
        return ldexp((double)m, shift - 62 + b - a - k);
    }
    #else
    #define TRAJKIT_WIDE 0
    static double trajkit_ratio(unsigned long long w, int k) { return 0; }
    #endif
    """
    const bint TRAJKIT_WIDE
    double trajkit_ratio(uint64_t w, int k) noexcept nogil

# powers of ten that a double holds exactly
cdef double[23] _TENS
cdef int _power
for _power in range(23):
    _TENS[_power] = 10.0 ** _power


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


def json_space_end(bytes text not None, Py_ssize_t at):
    """The first position from `at` on without white space."""
    if not 0 <= at <= len(text):
        raise LayoutError(f"{at} is outside of a text of {len(text)} bytes")
    cdef const char* s = PyBytes_AS_STRING(text)
    return _past_space(s + at) - s


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


def json_key(bytes text not None, Py_ssize_t at):
    """The key at `at`, and the position of its value.

    Returns
    -------
    tuple of (bytes, int), or None
        The key as written; None if there is no key, or one with an escape.
    """
    if not 0 <= at <= len(text):
        raise LayoutError(f"{at} is outside of a text of {len(text)} bytes")
    cdef const char* s = PyBytes_AS_STRING(text)
    cdef const char* key = _past_space(s + at)
    cdef const char* end
    if key[0] != 34:
        return None
    end = _past_string(key, s + len(text))
    if end == NULL or memchr(key, 92, end - key) != NULL:
        return None
    name = key[1 : end - key - 1]
    end = _past_space(end)
    if end[0] != 58:
        return None
    return name, _past_space(end + 1) - s


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


def json_array_end(bytes text not None, Py_ssize_t at):
    """The position of the first closing bracket from `at` on, or -1."""
    if not 0 <= at <= len(text):
        raise LayoutError(f"{at} is outside of a text of {len(text)} bytes")
    cdef const char* s = PyBytes_AS_STRING(text)
    cdef const char* end
    cdef Py_ssize_t n = len(text)
    with nogil:
        end = <const char*>memchr(s + at, 93, n - at)
    return -1 if end == NULL else end - s


def json_commas(bytes text not None, Py_ssize_t start, Py_ssize_t stop):
    """The number of commas in ``text[start:stop]``."""
    if not 0 <= start <= stop <= len(text):
        raise LayoutError(f"{start}:{stop} is no part of a text of {len(text)} bytes")
    cdef const char* s = PyBytes_AS_STRING(text)
    cdef Py_ssize_t i
    cdef pos_t n = 0
    with nogil:
        for i in range(start, stop):
            n += s[i] == 44
    return n


def json_ids(bytes text not None, Py_ssize_t at, token_t[::1] out not None):
    """Read integers in [0, 2**31) with commas between them, up to a closing bracket.

    Parameters
    ----------
    text : bytes
    at : int
        Position of the first of them, or of white space before it.
    out : buffer of int32, shape (n_ids,)
        Filled, if there are exactly as many and no other.

    Returns
    -------
    bool
        Whether only such integers come before the bracket.
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


cdef const char* _past_number(const char* s, double* value, bint* slow) noexcept nogil:
    """The byte after the number at s, or NULL if no number is read here.

    `slow`: its value is still to be found.
    """
    cdef bint negative = s[0] == 45, whole = True
    cdef uint64_t digits = 0
    cdef pos_t n_digits = 0, scale = 0, power = 0
    cdef bint down = False
    cdef const char* start
    slow[0] = False
    if negative:
        s += 1
    start = s
    while 48 <= s[0] <= 57:
        if n_digits or s[0] != 48:
            n_digits += 1
        digits = digits * 10 + (s[0] - 48)
        s += 1
    if s == start or (start[0] == 48 and s - start > 1):
        return NULL
    if s[0] == 46:
        whole = False
        s += 1
        start = s
        while 48 <= s[0] <= 57:
            if n_digits or s[0] != 48:
                n_digits += 1
            digits = digits * 10 + (s[0] - 48)
            s += 1
        if s == start:
            return NULL
        scale = s - start
    if s[0] == 101 or s[0] == 69:
        whole = False
        s += 1
        if s[0] == 43 or s[0] == 45:
            down = s[0] == 45
            s += 1
        start = s
        while 48 <= s[0] <= 57:
            if power < 100000:
                power = power * 10 + (s[0] - 48)
            s += 1
        if s == start:
            return NULL
        scale -= -power if down else power
    if whole:
        if n_digits > 15:
            return NULL
        # the integer that it is has no negative zero
        value[0] = -<double>digits if negative and digits else <double>digits
        return s
    if n_digits > 19:
        slow[0] = True
        return s
    if digits == 0:
        value[0] = 0.0
    elif digits < <uint64_t>1 << 53 and 0 <= scale <= 22:
        value[0] = <double>digits / _TENS[scale]
    elif digits < <uint64_t>1 << 53 and -22 <= scale < 0:
        value[0] = <double>digits * _TENS[-scale]
    elif TRAJKIT_WIDE and 0 < scale <= 27:
        value[0] = trajkit_ratio(digits, <int>scale)
    else:
        slow[0] = True
    if negative:
        value[0] = -value[0]
    return s


def json_numbers(bytes text not None, Py_ssize_t at, double[::1] out not None):
    """Read numbers with commas between them, up to a closing bracket.

    Parameters and result as for `json_ids`; a float is the one that Python reads. An
    integer of more than 15 digits, and a value beyond every float, are no such numbers.
    """
    if not 0 <= at <= len(text):
        raise LayoutError(f"{at} is outside of a text of {len(text)} bytes")
    cdef const char* s = _past_space(PyBytes_AS_STRING(text) + at)
    cdef const char* start
    cdef char* end
    cdef Py_ssize_t i, n = out.shape[0]
    cdef double value = 0
    cdef bint slow = False
    for i in range(n):
        if i:
            if s[0] != 44:
                return False
            s = _past_space(s + 1)
        start = s
        s = _past_number(s, &value, &slow)
        if s == NULL:
            return False
        if slow:  # Python's own, for which the interpreter must not be let go of
            value = PyOS_string_to_double(start, &end, NULL)
            if end != s or value - value != 0:
                return False
        out[i] = value
        s = _past_space(s)
    return n > 0 and s[0] == 93

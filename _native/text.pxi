"""Python lists of numbers into flat buffers, in O(their length)."""


def unbox_ids(list values not None, token_t[::1] out not None):
    """Copy Python ints in [0, 2**31) into `out`; return the index of the first other value.

    True and False are other values. Without one, ``len(values)``.
    """
    cdef Py_ssize_t i, n = len(values)
    cdef pos_t value
    cdef PyObject* item
    if out.shape[0] != n:
        raise LayoutError(f"out has {out.shape[0]} places for {n} values")
    i = 0
    try:
        while i < n:
            # nothing below runs Python code, so the list keeps its length
            item = PyList_GET_ITEM(values, i)
            if not PyLong_CheckExact(<object>item):
                return i
            value = <object>item
            if value < 0 or value > 0x7FFFFFFF:
                return i
            out[i] = <token_t>value
            i += 1
    except OverflowError:  # beyond 64 bits
        return i
    return n


def unbox_logprobs(list values not None, float[::1] out not None, uint8_t[::1] valid not None):
    """Copy Python floats, ints and None into `out`; return the index of the first other value.

    True and False are other values. Without one, ``len(values)``. None is 0.0, and 0 in ``valid``.
    """
    cdef Py_ssize_t i, n = len(values)
    cdef PyObject* item
    cdef double value
    if out.shape[0] != n or valid.shape[0] != n:
        raise LayoutError(f"out and valid need {n} places")
    for i in range(n):
        item = PyList_GET_ITEM(values, i)
        valid[i] = 1
        if PyFloat_CheckExact(<object>item):
            value = PyFloat_AS_DOUBLE(<object>item)
        elif <object>item is None:
            value = 0.0
            valid[i] = 0
        elif PyLong_CheckExact(<object>item):
            try:
                value = PyLong_AsDouble(<object>item)
            except OverflowError:
                return i
        else:
            return i
        out[i] = <float>value
    return n


# ---
# Token ids of a JSON text into flat buffers, and the positions of its keys and values.
#
# Fills arrays of ids from the text, in O(bytes). A text is one ``bytes`` object, whose
# last byte Python follows with a 0: a loop that stops at every unexpected byte cannot run past
# it. Nothing here checks that a text is JSON: what is not cut out of it goes to Python's own
# parser afterwards. Kept for speed: reading turns takes a tenth of the time of ``json.loads``
# (docs/benchmarks.md, import).

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
    cdef pos_t n = min(stop - start, <Py_ssize_t>len(text) - at)
    with nogil:
        n = _same_bytes(a, b, n)
    return n


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


# ---
# Which stored body each message refers to.
#
# Fills the place of a body per message, from keys and from where bodies are stored. A session
# stores a body when its key has no body yet, or last had another one; elsewhere the key refers
# to its last body. O(messages).

cdef inline int64_t* _body_slot(int64_t* table, int64_t mask, int64_t key) noexcept nogil:
    """The entry (address of the key, place of its body) of a key, or the free one for it."""
    cdef uint64_t[2] words  # equal messages differ in the second alone
    cdef int64_t slot
    memcpy(words, <const void*><intptr_t>key, KEY_BYTES)
    slot = <int64_t>(words[0] ^ (words[0] >> 32) ^ (words[1] >> 32)) & mask
    while table[2 * slot] != 0 and memcmp(
        <const void*><intptr_t>table[2 * slot], <const void*><intptr_t>key, KEY_BYTES
    ) != 0:
        slot = (slot + 1) & mask
    return &table[2 * slot]


cdef inline int64_t _body_of(
    int64_t* table, int64_t mask, int64_t key, bint has_body, int64_t place, bint* replaced
) noexcept nogil:
    """The place whose body the key refers to from here on, or -1."""
    cdef int64_t* entry = _body_slot(table, mask, key)
    if has_body:
        replaced[0] |= entry[0] != 0
        entry[0] = key
        entry[1] = place
    elif entry[0] == 0:
        return -1
    return entry[1]


def find_bodies(
    const Request[::1] requests not None,
    const int64_t[::1] session_offsets not None,
    const uint8_t[::1] has_body not None,
    const uint8_t[::1] reply_has_body not None,
    int64_t[::1] places not None,
    int64_t[::1] replies not None,
):
    """Fill the place whose body each message refers to, -1 if no body was stored.

    Places count the messages that the requests bring themselves, in order, and then the
    replies, one per call. ``has_body`` and ``places`` have an entry per message,
    ``reply_has_body`` and ``replies`` one per call.
    """
    cdef:
        int64_t n_calls = requests.shape[0], n_places = has_body.shape[0], s, i, k, n = 0
        int64_t place = 0, before, n_before, n_table = 2, n_bodies, mask, key
        bint replaced

    _check_sessions(session_offsets, n_calls)
    for i in range(n_calls):
        n += max(requests[i].n_keys, 0)
    if n != n_places:
        raise LayoutError(f"has_body has {n_places} entries, {n} are needed")
    _check_length("places", places.shape[0], n_places)
    _check_length("reply_has_body", reply_has_body.shape[0], n_calls)
    _check_length("replies", replies.shape[0], n_calls)
    for s in range(session_offsets.shape[0] - 1):  # the table is at most half full
        n_bodies = session_offsets[s + 1] - session_offsets[s]
        for i in range(session_offsets[s], session_offsets[s + 1]):
            for k in range(max(requests[i].n_keys, 0)):
                n_bodies += has_body[place]
                place += 1
        while n_table < 2 * n_bodies + 2:
            n_table *= 2
    cdef int64_t[::1] table = empty(2 * n_table, "i8")
    mask = n_table - 1
    place = 0
    with nogil:
        for s in range(session_offsets.shape[0] - 1):
            memset(&table[0], 0, 2 * n_table * sizeof(int64_t))
            replaced = False
            before = n_before = 0
            for i in range(session_offsets[s], session_offsets[s + 1]):
                n = max(requests[i].n_keys, 0)
                for k in range(n):
                    key = requests[i].keys + KEY_BYTES * k
                    # Most of a request repeats the previous one.
                    if (
                        k < n_before and not replaced and not has_body[place + k]
                        and memcmp(
                            <const void*><intptr_t>(requests[i - 1].keys + KEY_BYTES * k),
                            <const void*><intptr_t>key, KEY_BYTES,
                        ) == 0
                    ):
                        places[place + k] = places[before + k]
                        continue
                    places[place + k] = _body_of(
                        &table[0], mask, key, has_body[place + k], place + k, &replaced
                    )
                replies[i] = -1
                if requests[i].reply_key != 0:
                    replies[i] = _body_of(
                        &table[0], mask, requests[i].reply_key, reply_has_body[i],
                        n_places + i, &replaced,
                    )
                before = place
                n_before = n
                place += n

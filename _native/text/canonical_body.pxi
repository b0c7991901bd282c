"""Which message bodies contain only given fields, in their only possible spelling.

Fills a flag per body, in O(bytes). Such a body is its own identity under an equality that
compares those fields: it need not be parsed and written again.
"""

cdef enum:
    DEEPEST = 32  # a body that is nested deeper is skipped


cdef inline bint _all_common(const uint8_t* text) noexcept nogil:
    """Whether none of eight bytes ends a string, escapes, or is a control character."""
    cdef uint64_t word, quote, slash, control, high = 0x8080808080808080u
    cdef uint64_t ones = 0x0101010101010101u
    memcpy(&word, text, 8)
    quote = word ^ (ones * c'"')
    slash = word ^ (ones * c'\\')
    # a byte of zero in x sets its high bit in (x - ones) & ~x; so does one below 0x20
    control = (word - ones * 0x20) & ~word
    return not (((quote - ones) & ~quote | (slash - ones) & ~slash | control) & high)


cdef int64_t _end_of_text(
    const uint8_t* text, int64_t at, int64_t n, bint* escapes
) noexcept nogil:
    """The position after the closing quote of the string whose first byte is at `at`, or -1.

    -1 as well for an escape that canonical JSON spells in another way, or may.
    """
    cdef uint8_t c
    escapes[0] = False
    while at < n:
        while n - at >= 8 and _all_common(text + at):
            at += 8
        if at == n:
            break
        c = text[at]
        at += 1
        if c == c'"':
            return at
        if c < 0x20:
            return -1
        if c == c'\\':
            escapes[0] = True
            if at == n or text[at] not in (
                c'"', c'\\', c'n', c'r', c't', c'b', c'f'
            ):
                return -1
            at += 1
    return -1


cdef inline int _place_of(
    const uint8_t* key, int64_t n_key, const uint8_t* names, int64_t n_names
) noexcept nogil:
    """Which of the names a key is, or -1; each name ends with a zero byte."""
    cdef int64_t at = 0, start
    cdef int place = 0
    while at < n_names:
        start = at
        while names[at] != 0:
            at += 1
        if at - start == n_key and memcmp(names + start, key, n_key) == 0:
            return place
        at += 1
        place += 1
    return -1


cdef inline bint _has_role(
    const uint8_t* role, int64_t n_role, const uint8_t* roles, uint64_t which
) noexcept nogil:
    """Whether a role is the one that every name of `which`, a bit each, asks for.

    An empty role: the name requires no role.
    """
    cdef int64_t at = 0, start
    while which:
        start = at
        while roles[at] != 0:
            at += 1
        if which & 1 and at > start and not (
            at - start == n_role and memcmp(roles + start, role, n_role) == 0
        ):
            return False
        at += 1
        which >>= 1
    return True


cdef inline bint _before(
    const uint8_t* a, int64_t n_a, const uint8_t* b, int64_t n_b
) noexcept nogil:
    """Whether a comes before b, byte by byte."""
    cdef int order = memcmp(a, b, min(n_a, n_b))
    return order < 0 or (order == 0 and n_a < n_b)


cdef inline int64_t _end_of_leaf(
    const uint8_t* text, int64_t at, int64_t n, bint is_field
) noexcept nogil:
    """The position after a string or a null, or -1; a field is neither "" nor null."""
    cdef bint escapes
    cdef int64_t end = -1
    if text[at] == c'"':
        end = _end_of_text(text, at + 1, n, &escapes)
        if is_field and end == at + 2:
            end = -1
    elif not is_field and n - at >= 4 and memcmp(text + at, b"null", 4) == 0:
        end = at + 4
    return end


cdef bint _is_plain(
    const uint8_t* text, int64_t n, const uint8_t* names, int64_t n_names,
    const uint8_t* roles
) noexcept nogil:
    """Whether a body is canonical JSON of the named fields alone, none of them empty.

    No number and no truth value may stand in it, which have several spellings, and no key
    "index" at any depth. A name with a role may stand only where "role" is that text.
    False is no promise.
    """
    cdef:
        int64_t last_key[DEEPEST + 1]  # where the last key of each open object starts
        int64_t last_size[DEEPEST + 1]  # -1: it has none yet; -2: the container is a list
        int64_t at = 1, start, size, depth = 1
        int64_t role = 0, role_size = 0  # "role", if it is a string
        uint64_t seen = 0  # a bit for each name
        int place
        bint escapes, is_role = False
        uint8_t closing
    if n < 2 or text[0] != c'{':
        return False
    last_size[1] = -1
    if text[1] == c'}':
        return n == 2
    while True:
        if last_size[depth] != -2:  # a key
            if at == n or text[at] != c'"':
                return False
            start = at + 1
            at = _end_of_text(text, start, n, &escapes)
            if at < 0 or escapes or at == n or text[at] != c':':
                return False
            size = at - 1 - start
            if last_size[depth] >= 0 and not _before(
                text + last_key[depth], last_size[depth], text + start, size
            ):
                return False
            if depth == 1:
                place = _place_of(text + start, size, names, n_names)
                if place < 0:
                    return False
                seen |= <uint64_t>1 << place
                is_role = size == 4 and memcmp(text + start, b"role", 4) == 0
            if size == 5 and memcmp(text + start, b"index", 5) == 0:
                return False
            check_write("last_key", depth, 1, DEEPEST + 1)
            last_key[depth] = start
            last_size[depth] = size
            at += 1
        # a value
        if at == n:
            return False
        if text[at] == c'{' or text[at] == c'[':
            closing = c'}' if text[at] == c'{' else c']'
            at += 1
            if at == n:
                return False
            if text[at] == closing:
                if depth == 1 and closing == c']':
                    return False
                at += 1
            else:
                if depth == DEEPEST:
                    return False
                depth += 1
                last_size[depth] = -1 if closing == c'}' else -2
                continue
        else:
            start = at
            at = _end_of_leaf(text, at, n, depth == 1)
            if at < 0:
                return False
            if depth == 1 and is_role:
                role = start + 1
                role_size = at - start - 2
        # what is complete, closed
        while True:
            if at == n:
                return False
            if text[at] == c',':
                at += 1
                break
            if text[at] != (c']' if last_size[depth] == -2 else c'}'):
                return False
            at += 1
            depth -= 1
            if depth == 0:
                return at == n and _has_role(text + role, role_size, roles, seen)


cdef int64_t _count_ends(const uint8_t[::1] names) except -1:
    """The number of names, each followed by a zero byte."""
    cdef int64_t i, n = 0
    for i in range(names.shape[0]):
        n += names[i] == 0
    if names.shape[0] and names[names.shape[0] - 1] != 0:
        raise LayoutError("a name has no zero byte behind it")
    return n


def find_plain(
    const int32_t[::1] offsets not None,
    const uint8_t[::1] bodies not None,
    const uint8_t[::1] names not None,
    const uint8_t[::1] roles not None,
    uint8_t[::1] plain not None,
):
    """Fill 1 for each body that is canonical JSON of the named fields alone.

    Body i is the UTF-8 bytes ``bodies[offsets[i]:offsets[i + 1]]``; ``offsets`` has one entry
    more than ``plain``. Each name ends with a zero byte, and there are at most 64; so do the
    ``roles``, one per name: the role of the messages that may have such a field, or empty. No
    field may be null, "" or [], no number and no truth value stand anywhere, and no key
    "index". What is 0 may be so too.
    """
    cdef int64_t i, n = plain.shape[0], n_names = _count_ends(names)
    _check_length("offsets", offsets.shape[0], n + 1)
    for i in range(n):
        if not 0 <= offsets[i] <= offsets[i + 1] <= bodies.shape[0]:
            raise LayoutError(
                f"body {i} is {offsets[i]}:{offsets[i + 1]} of {bodies.shape[0]} bytes"
            )
    if n_names > 64 or _count_ends(roles) != n_names:
        raise LayoutError(
            f"{_count_ends(roles)} roles for {n_names} names: one each, at most 64"
        )
    if n == 0 or bodies.shape[0] == 0:
        plain[:] = 0
        return
    with nogil:
        for i in range(n):
            plain[i] = _is_plain(
                &bodies[0] + offsets[i], offsets[i + 1] - offsets[i],
                &names[0] if n_names else NULL, names.shape[0],
                &roles[0] if n_names else NULL,
            )

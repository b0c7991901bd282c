"""What is stored of a message that is a dict: a copy that the caller cannot change.

A copy shares the message's texts. Two messages have copies that are the same (`_same`) exactly
if their canonical JSON is. Making or comparing one takes O(size of the message).
"""

cdef extern from *:
    """
    #define TK_MIX 0x9E3779B97F4A7C15ull  /* 2**64 by the golden ratio: odd, no pattern */
    """
    const uint64_t TK_MIX


cdef inline uint64_t _joined(uint64_t a, uint64_t b) noexcept nogil:
    a = (a ^ (b * TK_MIX)) * TK_MIX
    return a ^ (a >> 32)


cdef object _copied(object value, int depth, uint64_t* digest):
    """A copy of a value, with exactly the types of JSON, and its hash.

    The hash does not depend on the order of keys.

    Returns
    -------
    object
        NotImplemented for what is not JSON, nested deeper than `DEPTH` levels, or an integer
        beyond 64 bits.
    """
    cdef object key, copy, one
    cdef uint64_t inner = 0
    if isinstance(value, str):
        copy = value if type(value) is str else PyUnicode_FromObject(value)
    elif value is None or isinstance(value, bool):
        copy = value
    elif isinstance(value, int):
        copy = value if type(value) is int else int.__pos__(value)
        if not -0x8000000000000000 <= copy <= 0x7FFFFFFFFFFFFFFF:
            return NotImplemented  # its text may have too many digits
    elif isinstance(value, float):
        copy = <double>value
        if copy != copy:  # Python hashes each NaN by itself
            digest[0] = 1
            return copy
    elif not isinstance(value, (dict, list)) or depth == DEPTH:
        return NotImplemented
    elif isinstance(value, dict):
        copy, digest[0] = {}, 2
        for key in value:
            if not isinstance(key, str):
                return NotImplemented
            one = _copied(value[key], depth + 1, &inner)
            if one is NotImplemented:
                return one
            key = PyUnicode_FromObject(key)
            copy[key] = one
            digest[0] += _joined(<uint64_t><Py_ssize_t>hash(key), inner)
        return copy
    else:
        copy, digest[0] = [], 3
        for item in value:
            one = _copied(item, depth + 1, &inner)
            if one is NotImplemented:
                return one
            copy.append(one)
            digest[0] = _joined(digest[0], inner)
        return copy
    digest[0] = <uint64_t><Py_ssize_t>hash(copy)
    return copy

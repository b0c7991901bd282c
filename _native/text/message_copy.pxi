"""What a session stores of a message: a copy that the caller cannot change.

A copy shares the message's texts. Two messages have copies that are the same exactly if their
canonical JSON is. Making or comparing one takes O(size of the message).
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

    The hash does not depend on the order of keys. NotImplemented for what is not JSON, nested
    deeper than `DEPTH` levels, or an integer beyond 64 bits.
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


def copy_message(object message):
    """The hash of a message and a copy; None for a message that can have no copy."""
    cdef object role = message.get("role") if isinstance(message, dict) else None, copy
    cdef uint64_t digest = 0
    if not isinstance(role, str) or not str.isascii(role):
        return None
    copy = _copied(message, 0, &digest)
    return None if copy is NotImplemented else (digest, copy)


def same_message(object a, object b):
    """Whether two copies are of the same message."""
    return _same(a, b, 0)


def fill_requests(
    const int32_t[:, ::1] counts not None, const int32_t[::1] numbers not None,
    list keys not None, list roles not None, Request[::1] requests not None,
):
    """Fill the requests of calls, with keys that are equal if the messages are ``==``.

    ``counts`` has, for each call, the messages that its base supplies, the number of the others
    (-1: no list) and its reply (-1: none); ``numbers`` are the others, end to end. ``keys`` (of
    bytes) and ``roles`` are by message. Returns the buffers that requests refer to.
    """
    cdef Py_ssize_t n_calls = requests.shape[0], n = numbers.shape[0], i, k = 0, stop
    cdef int64_t[:, ::1] own = zeros((n + n_calls, KEY_BYTES // 8), "i8")
    cdef int32_t[::1] ends = zeros(n + 1, "i4")
    cdef list texts = [(<str>roles[numbers[k]]).encode() for k in range(n)]
    cdef bytes text = b"".join(texts)
    cdef int32_t reply
    cdef Request* request
    cdef int64_t first = <int64_t><intptr_t>&own[0, 0] if n_calls else 0
    _check_length("counts", counts.shape[0], n_calls)
    if n_calls and counts.shape[1] != 3:
        raise LayoutError(f"counts has {counts.shape[1]} columns: expected 3")
    for k in range(n):
        ends[k + 1] = ends[k] + <int32_t>len(<bytes>texts[k])
        _put_key(keys, numbers[k], own[k])
    k = 0
    for i in range(n_calls):
        request = &requests[i]
        stop = k + max(counts[i, 1], 0)
        if stop > n:
            raise LayoutError(f"numbers has {n} entries, {stop} are needed")
        request.shared, request.n_keys, reply = counts[i, 0], counts[i, 1], counts[i, 2]
        request.keys = first + k * KEY_BYTES
        request.role_offsets = <int64_t><intptr_t>&ends[k]
        request.role_bytes = <int64_t><intptr_t>PyBytes_AS_STRING(text)
        request.reply_key = request.reply_is_assistant = 0
        if reply >= 0:
            _put_key(keys, reply, own[n + i])
            request.reply_key = <int64_t><intptr_t>&own[n + i, 0]
            request.reply_is_assistant = <str>roles[reply] == "assistant"
        k = stop
    return own.base, ends.base, text


cdef int _put_key(list keys, int32_t number, int64_t[::1] own) except -1:
    """The part of a message's key that is equal for messages that are ``==``."""
    cdef bytes key = keys[number]
    _check_length("key", len(key), KEY_BYTES)
    memcpy(&own[0], PyBytes_AS_STRING(key), VALUE_BYTES)
    return 0

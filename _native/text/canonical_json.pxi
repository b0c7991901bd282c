"""Chat messages as canonical JSON, and whether two messages are identical.

Returns texts and numbers of equal messages, in O(size of the messages). Nothing here recurses:
a message nested 100,000 levels deep costs a longer list, no stack.
"""


cdef object _refusal(list frames, tuple here, str reason):
    """The error for a value, naming its path: the containers around it, then `here`."""
    cdef list path = []
    for keys, _, place, _ in (frames + [here])[1:]:  # the first holds the message itself
        path.append(f"[{place}]" if keys is None else f"[{keys[place]!r}]")
    if len(path) > 12:  # a path of 100,000 steps helps nobody
        path = path[:6] + [f"... {len(path) - 12} levels ..."] + path[len(path) - 6 :]
    return InvalidTurnsError("".join(path) + (" " if path else "") + reason)


cdef str _leaf(object value, bint simplest, bint* simpler):
    """The JSON of a value that is no container; None for what JSON does not know.

    ``simpler`` becomes true if it is a number that has a simpler type.
    """
    cdef double number
    if isinstance(value, str):
        return encode_basestring(value)
    if value is None:
        return "null"
    if value is True or value is False:
        simpler[0] = True
        if simplest:
            return "1" if value else "0"
        return "true" if value else "false"
    if isinstance(value, int):
        return int.__repr__(value)
    if not isinstance(value, float):
        return None
    number = value
    if number != number:
        return "NaN"
    if number - number != 0:
        return "Infinity" if number > 0 else "-Infinity"
    if number == floor(number):
        simpler[0] = True
        if simplest:
            return int.__repr__(int(number))
    return float.__repr__(value)


cdef tuple _opened(object value, list frames, tuple here, set open_ids):
    """The sorted keys of a container (None: it is a list), and its values."""
    if len(frames) >= 1000:
        # whatever holds itself gets here; sooner, the set would only cost time
        if id(value) in open_ids:
            raise _refusal(frames, here, "holds itself")
        open_ids.add(id(value))
    if not isinstance(value, dict):
        return None, list(value)
    for key in value:
        if not isinstance(key, str):
            raise _refusal(frames, here, f"has the key {key!r}: JSON keys are strings")
    keys = sorted(value)
    return keys, [value[key] for key in keys]


cdef str _encoded(object message, bint simplest, bint* simpler):
    """Canonical JSON of a message; ``simplest``: with each number in its simplest type."""
    cdef list parts = [], frames = [], keys, values
    cdef set open_ids = set()  # containers on the path, looked at once it is long
    cdef Py_ssize_t i = 0, n = 0
    cdef object value = message, container
    cdef tuple here
    cdef str text
    # the container being written: its sorted keys (None: a list), values, place and itself
    keys = values = None
    container = None
    while True:
        # write `value`: a leaf entirely, a container's opening bracket
        if isinstance(value, (dict, list)):
            here = (keys, values, i, container)
            keys, values = _opened(value, frames, here, open_ids)
            frames.append(here)
            container, n, i = value, len(values), -1
            text = "[" if keys is None else "{"
        else:
            try:
                text = _leaf(value, simplest, simpler)
            except ValueError:  # the interpreter's limit on digits
                raise _refusal(
                    frames, (keys, values, i, container), "is an integer of too many digits"
                ) from None
            if text is None:
                raise _refusal(
                    frames,
                    (keys, values, i, container),
                    f"is of type {type(value).__name__}: no JSON value",
                )
        parts.append(text)
        # on to the next value, closing what is complete
        i += 1
        while i == n:
            parts.append("]" if keys is None else "}")
            if open_ids:
                open_ids.discard(id(container))
            keys, values, i, container = frames.pop()
            if not frames:
                return _valid_utf8("".join(parts))
            n = len(values)
            i += 1
        if i:
            parts.append(",")
        if keys is not None:
            parts.append(encode_basestring(keys[i]))
            parts.append(":")
        value = values[i]


def encode_message(object message not None):
    """Canonical JSON of a message, and the text of its values.

    Canonical JSON has its keys sorted by code point, no white space, numbers as they are (NaN and
    the infinities as Python's json spells them), and lone surrogates escaped. The text of values
    has each number in its simplest type: the texts of two messages are equal exactly when the
    messages are, under Python's ``==`` with NaN equal to NaN. Raises InvalidTurnsError, with the
    path, for a value that JSON does not know or a container that holds itself.
    """
    cdef bint simpler = False
    cdef str body = _encoded(message, False, &simpler)
    return body, (_encoded(message, True, &simpler) if simpler else body)


cdef str _valid_utf8(str text):
    # a surrogate occurs only within a JSON string, where its escape means the same
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return _SURROGATE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return text


cdef bint _same(object a, object b, int depth) except -1:
    """Whether a and b are written the same in canonical JSON, by type and value.

    False is no promise: types that are not exactly JSON's own always differ, and so does what
    is nested deeper than `DEPTH` levels.
    """
    cdef Py_ssize_t i = 0, k = 0
    cdef double p, q
    cdef PyObject* key = NULL
    cdef PyObject* other = NULL
    cdef PyObject* x = NULL
    cdef PyObject* y = NULL
    cdef object name, one, two
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is str:
        return <str>a == <str>b
    if type(a) is dict:
        if len(<dict>a) != len(<dict>b) or depth == DEPTH:
            return False
        # owned, because to compare keys may run code that changes either dict
        while PyDict_Next(a, &i, &key, &x):
            name, one = <object>key, <object>x
            # keys of both usually come in one order
            if not PyDict_Next(b, &k, &other, &y) or other != key:
                y = PyDict_GetItemWithError(b, name)
                if y is NULL:
                    return False
            two = <object>y
            if one is not two and not _same(one, two, depth + 1):
                return False
        return True
    if type(a) is list:
        if len(<list>a) != len(<list>b) or depth == DEPTH:
            return False
        while i < len(<list>a):
            if i >= len(<list>b) or not _same((<list>a)[i], (<list>b)[i], depth + 1):
                return False
            i += 1
        return True
    if type(a) is int:
        return a == b
    if type(a) is float:
        p, q = a, b
        # -0.0 is written unlike 0.0, and every NaN the same
        return memcmp(&p, &q, sizeof(double)) == 0 or (p != p and q != q)
    if type(a) is tuple and len(<tuple>a) == 2 == len(<tuple>b):  # a message's key and role
        one, two = (<tuple>a)[1], (<tuple>b)[1]
        return (
            type((<tuple>a)[0]) is bytes is type((<tuple>b)[0])
            and (<tuple>a)[0] == (<tuple>b)[0]
            and type(one) is str is type(two)
            and one == two
        )
    return False


def match_messages(
    list messages not None,
    list known not None,
    const token_t[::1] numbers not None,
    token_t[::1] found not None,
):
    """Find the messages that are the same as those of another list, place by place.

    That list has the message ``known[numbers[i]]`` at place i. Fills ``found`` with this number,
    or -1 for a message that is not the same.
    """
    cdef Py_ssize_t i
    cdef token_t number
    _check_length("found", found.shape[0], len(messages))
    for i in range(found.shape[0]):
        found[i] = -1
        # the lengths of now: to compare keys may run code that changes the lists
        if i < min(numbers.shape[0], len(messages)):
            number = numbers[i]
            if 0 <= number < len(known) and _same(known[number], messages[i], 0):
                found[i] = number

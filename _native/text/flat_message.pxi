"""What is stored of a message that is a dict: its form.

A form is a tuple: the message's dicts and lists, flattened, with their strings, so another
message is compared with it in one pass. Nothing in a form can change. Two messages have equal
forms exactly if their canonical JSON is the same. Making or comparing a form takes O(size of
the message).
"""

cdef enum:
    WORD = 16   # characters
    WORDS = 256
    DEPTH = 32  # so far the C stack

# borrowed references throughout: nothing in a comparison runs code that could drop one
cdef extern from "Python.h":
    bint is_dict "PyDict_CheckExact"(PyObject* op) nogil
    bint is_list "PyList_CheckExact"(PyObject* op) nogil
    bint is_tuple "PyTuple_CheckExact"(PyObject* op) nogil
    bint is_text "PyUnicode_CheckExact"(PyObject* op) nogil
    bint is_whole "PyLong_CheckExact"(PyObject* op) nogil
    bint is_real "PyFloat_CheckExact"(PyObject* op) nogil
    bint next_pair "PyDict_Next"(
        PyObject* op, Py_ssize_t* at, PyObject** key, PyObject** value
    )
    Py_ssize_t dict_size "PyDict_GET_SIZE"(PyObject* op) nogil
    Py_ssize_t list_size "PyList_GET_SIZE"(PyObject* op) nogil
    PyObject* list_item "PyList_GET_ITEM"(PyObject* op, Py_ssize_t i) nogil
    Py_ssize_t tuple_size "PyTuple_GET_SIZE"(PyObject* op) nogil
    PyObject** tuple_cells "&PyTuple_GET_ITEM"(PyObject* op, Py_ssize_t i) nogil
    Py_ssize_t as_size "PyLong_AsSsize_t"(PyObject* op)
    int compare_bool "PyObject_RichCompareBool"(PyObject* a, PyObject* b, int op) except -1
    Py_ssize_t text_length "PyUnicode_GET_LENGTH"(PyObject* op) nogil
    int text_kind "PyUnicode_KIND"(PyObject* op) nogil
    const char* text_data "PyUnicode_DATA"(PyObject* op) nogil
    double real "PyFloat_AS_DOUBLE"(PyObject* op) nogil
    int Py_EQ

cdef extern from *:
    """
    #define TK_MIX 0x9E3779B97F4A7C15ull  /* 2**64 by the golden ratio: odd, no pattern */
    """
    const uint64_t TK_MIX
    # in a form, what a dict and a list begin with: no value of JSON
    PyObject* A_DICT "Py_Ellipsis"
    PyObject* A_LIST "Py_NotImplemented"


cdef bint _lay_out(object value, list form, int depth, uint64_t* digest) except -1:
    """Append the form of a value to ``form``, and compute its hash.

    A dict is `A_DICT`, its length, and its keys and values in their order; a list `A_LIST`, its
    length and its values; anything else is itself, with exactly the type of JSON. The hash
    does not depend on the order of keys.

    Returns
    -------
    bool
        Whether there is a form: none for what is no JSON, nested deeper than `DEPTH` levels,
        or an integer beyond 64 bits.
    """
    cdef double number
    if isinstance(value, str):
        if type(value) is not str:
            value = PyUnicode_FromObject(value)
        digest[0] = _hash_text(<PyObject*>value)
        form.append(_shared_word(value))
    elif isinstance(value, dict):
        return depth < DEPTH and _lay_out_dict(value, form, depth + 1, digest)
    elif isinstance(value, list):
        return depth < DEPTH and _lay_out_list(value, form, depth + 1, digest)
    elif value is None:
        digest[0] = 1
        form.append(value)
    elif isinstance(value, bool):
        digest[0] = 2 + <bint>value
        form.append(value)
    elif isinstance(value, int):
        if type(value) is not int:
            value = int.__pos__(value)
        try:
            digest[0] = _joined(<uint64_t><int64_t>value, 4)
        except OverflowError:
            return False
        form.append(value)
    elif isinstance(value, float):
        number = value
        digest[0] = 5
        if number == number:  # every NaN is written the same
            memcpy(digest, &number, sizeof(double))
            digest[0] = _joined(digest[0], 6)
        form.append(number)
    else:
        return False
    return True


cdef bint _lay_out_dict(object pairs, list form, int depth, uint64_t* digest) except -1:
    cdef object key, value
    cdef Py_ssize_t n = 0, at = len(form) + 1
    form.append(<object>A_DICT)
    form.append(None)
    digest[0] = 0
    if type(pairs) is dict:
        for key, value in (<dict>pairs).items():
            n += 1
            if not _lay_out_pair(key, value, form, depth, digest):
                return False
    else:
        for key in pairs:
            n += 1
            if not _lay_out_pair(key, pairs[key], form, depth, digest):
                return False
    form[at] = n
    digest[0] = _joined(digest[0], 7 + n)
    return True


cdef bint _lay_out_pair(
    object key, object value, list form, int depth, uint64_t* digest
) except -1:
    cdef uint64_t of_key = 0, of_value = 0
    if not isinstance(key, str):
        return False
    _lay_out(key, form, depth, &of_key)
    if not _lay_out(value, form, depth, &of_value):
        return False
    digest[0] += _joined(of_key, of_value)  # a sum: in any order
    return True


cdef bint _lay_out_list(object values, list form, int depth, uint64_t* digest) except -1:
    cdef object value
    cdef Py_ssize_t n = 0, at = len(form) + 1
    cdef uint64_t of_value = 0
    form.append(<object>A_LIST)
    form.append(None)
    digest[0] = 0
    for value in values:
        n += 1
        if not _lay_out(value, form, depth, &of_value):
            return False
        digest[0] = _joined(digest[0], of_value)
    form[at] = n
    digest[0] = _joined(digest[0], ~n)
    return True


cdef inline uint64_t _joined(uint64_t a, uint64_t b) noexcept nogil:
    a = (a ^ (b * TK_MIX)) * TK_MIX
    return a ^ (a >> 32)


cdef uint64_t _hash_text(PyObject* text) noexcept nogil:
    """A hash of a text's characters: four lanes of eight bytes, so that none waits."""
    cdef Py_ssize_t n = text_length(text) * text_kind(text), i = 0
    cdef const char* data = text_data(text)
    cdef uint64_t[4] lane
    cdef uint64_t[4] word
    cdef int k
    for k in range(4):
        lane[k] = <uint64_t>(n + k)
    while n - i >= 32:
        memcpy(word, data + i, 32)
        for k in range(4):
            lane[k] = (((lane[k] << 29) | (lane[k] >> 35)) ^ word[k]) * TK_MIX
        i += 32
    if i < n:
        memset(word, 0, 32)
        memcpy(word, data + i, n - i)
        for k in range(4):
            lane[k] = (((lane[k] << 29) | (lane[k] >> 35)) ^ word[k]) * TK_MIX
    return _joined(_joined(lane[0], lane[1]), _joined(lane[2], lane[3]))


# the first short words that come: keys, roles and types are among them
cdef dict _WORDS = {}


cdef object _shared_word(str value):
    """The one object for a common short word, so that keys and roles stay in the caches.

    Not `sys.intern`: messages hold any words, and what is interned may never go.
    """
    cdef object known
    if len(value) > WORD:
        return value
    known = _WORDS.get(value)
    if known is None:
        if len(_WORDS) < WORDS:
            _WORDS[value] = value
        return value
    return known


def message_of(tuple form not None):
    """The message that has a form: the same dicts, lists and values, in new dicts and lists."""
    cdef Py_ssize_t at = 0
    return _rebuilt(form, &at)


cdef object _cell(tuple form, Py_ssize_t at):
    if at >= len(form):
        raise LayoutError(f"a form of {len(form)} cells ends too early")
    return form[at]


cdef object _rebuilt(tuple form, Py_ssize_t* at):
    cdef object head = _cell(form, at[0])
    cdef object key
    cdef Py_ssize_t n
    cdef dict pairs
    cdef list values
    at[0] += 1
    if <PyObject*>head == A_DICT:
        n = _cell(form, at[0])
        at[0] += 1
        pairs = {}
        for _ in range(n):
            key = _cell(form, at[0])
            at[0] += 1
            pairs[key] = _rebuilt(form, at)
        return pairs
    if <PyObject*>head == A_LIST:
        n = _cell(form, at[0])
        at[0] += 1
        values = []
        for _ in range(n):
            values.append(_rebuilt(form, at))
        return values
    return head


cdef tuple _ordered(tuple form):
    """The form of the same message with the keys of every dict sorted."""
    cdef list ordered = []
    cdef Py_ssize_t at = 0
    _lay_in_order(form, &at, ordered)
    return tuple(ordered)


cdef _lay_in_order(tuple form, Py_ssize_t* at, list ordered):
    cdef object head = form[at[0]], n, key
    cdef dict parts
    at[0] += 1
    ordered.append(head)
    if <PyObject*>head == A_DICT:
        n = form[at[0]]
        at[0] += 1
        ordered.append(n)
        parts = {}
        for _ in range(n):
            key = form[at[0]]
            at[0] += 1
            parts[key] = []
            _lay_in_order(form, at, parts[key])
        for key in sorted(parts):
            ordered.append(key)
            ordered.extend(parts[key])
    elif <PyObject*>head == A_LIST:
        n = form[at[0]]
        at[0] += 1
        ordered.append(n)
        for _ in range(n):
            _lay_in_order(form, at, ordered)


cdef bint _equal_forms(tuple a, tuple b):
    cdef Py_ssize_t i
    if len(a) != len(b):
        return False
    for i in range(len(a)):
        if not _same_leaf(PyTuple_GET_ITEM(a, i), PyTuple_GET_ITEM(b, i)):
            return False
    return True


cdef bint _same_form(PyObject*** cell, PyObject* value) except -1:
    """Whether the canonical JSON of a value is that of the form that begins at the cell.

    A false answer may be wrong: keys in another order and subclasses of JSON's types always
    differ. The comparison is as deep as the form.
    """
    cdef PyObject* held = cell[0][0]
    cdef PyObject* key
    cdef PyObject* inner
    cdef Py_ssize_t n, i, place = 0
    cell[0] += 1
    if held == A_DICT:
        if not is_dict(value):
            return False
        n = as_size(cell[0][0])
        cell[0] += 1
        if dict_size(value) != n:
            return False
        for i in range(n):
            if not next_pair(value, &place, &key, &inner) or not _same_leaf(cell[0][0], key):
                return False
            cell[0] += 1
            if not _same_form(cell, inner):
                return False
        return True
    if held == A_LIST:
        if not is_list(value):
            return False
        n = as_size(cell[0][0])
        cell[0] += 1
        if list_size(value) != n:
            return False
        for i in range(n):
            if not _same_form(cell, list_item(value, i)):
                return False
        return True
    return _same_leaf(held, value)


cdef inline bint _same_leaf(PyObject* a, PyObject* b) except -1:
    cdef double p, q
    if a == b:
        return True
    if is_text(a):
        return is_text(b) and _same_text(a, b)
    if is_whole(a):
        return is_whole(b) and compare_bool(a, b, Py_EQ)
    if is_real(a) and is_real(b):
        p, q = real(a), real(b)
        # -0.0 is written unlike 0.0, and every NaN the same
        return memcmp(&p, &q, sizeof(double)) == 0 or (p != p and q != q)
    return False


cdef bint _same_text(PyObject* a, PyObject* b) noexcept nogil:
    """Whether two texts are equal; long ones are read ahead of, as runs of token ids are."""
    cdef Py_ssize_t n = text_length(a), whole = 0
    cdef int kind = text_kind(a)
    cdef const char* at
    cdef const char* other
    if text_length(b) != n or text_kind(b) != kind:
        return False
    n *= kind
    at, other = text_data(a), text_data(b)
    if n >= TRAJKIT_PAGE:
        whole = n // <Py_ssize_t>sizeof(token_t)
        if _lcp(<const token_t*>at, <const token_t*>other, whole) < whole:
            return False
        whole *= sizeof(token_t)
    return memcmp(at + whole, other + whole, n - whole) == 0

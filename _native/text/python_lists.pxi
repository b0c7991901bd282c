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

"""Columns exported to Arrow through its C data interface, a batch per call.

Fills one ArrowArray per column, in O(columns). Arrow gets the addresses of Python's buffers
and a reference to each, which it releases when it frees the column. One call per array would
take longer than filling small batches does.
"""
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.ref cimport Py_DECREF, Py_INCREF, Py_XDECREF
from libc.stdlib cimport calloc, free

cdef extern from "Python.h":
    bint Py_IsInitialized() nogil


cdef void _release_exported(ArrowArray* array) noexcept nogil:
    """What Arrow calls when it is done with an array: from any thread, without the GIL."""
    cdef int64_t i
    for i in range(array.n_children):
        if array.children[i].release != NULL:  # a child may have been taken out
            array.children[i].release(array.children[i])
        free(array.children[i])
    if array.dictionary != NULL:
        if array.dictionary.release != NULL:
            array.dictionary.release(array.dictionary)
        free(array.dictionary)
    free(array.children)
    free(array.buffers)
    if array.private_data != NULL and Py_IsInitialized():
        with gil:
            Py_DECREF(<object>array.private_data)
    array.release = NULL


cdef const void* _address(object buffer) except? NULL:
    """Where an object has its bytes. They must stay there as long as the object lives."""
    cdef Py_buffer view
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    cdef const void* address = view.buf
    PyBuffer_Release(&view)
    return address


cdef _export(object column, ArrowArray* array):
    """Describe a column to Arrow; ``array`` comes as zeros."""
    cdef int64_t i, n_buffers, n_children
    cdef tuple buffers, children
    if not isinstance(column, tuple):
        column._export_to_c(<intptr_t>array)
        return
    array.length, buffers, array.null_count, array.offset, children, dictionary = column
    n_buffers, n_children = len(buffers), len(children)
    array.release = _release_exported
    try:
        array.buffers = <const void**>_cleared(n_buffers, sizeof(void*))
        array.n_buffers = n_buffers
        for i in range(n_buffers):
            if buffers[i] is not None:
                array.buffers[i] = _address(buffers[i])
        Py_INCREF(buffers)
        array.private_data = <void*>buffers
        array.children = <ArrowArray**>_cleared(n_children, sizeof(void*))
        for i in range(n_children):
            array.children[i] = <ArrowArray*>_cleared(1, sizeof(ArrowArray))
            array.n_children = i + 1
            _export(children[i], array.children[i])
        if dictionary is not None:
            array.dictionary = <ArrowArray*>_cleared(1, sizeof(ArrowArray))
            _export(dictionary, array.dictionary)
    except BaseException:
        _release_exported(array)
        raise


cdef void* _cleared(size_t n, size_t size) except NULL:
    """Memory for Arrow to have, which `_release_exported` frees."""
    cdef void* memory = calloc(n if n else 1, size)
    if memory == NULL:
        raise MemoryError()
    return memory


def hand_over(int64_t length, tuple columns not None, object schema, object take not None):
    """What ``take``, given the address of an ``ArrowArray`` and the schema, makes of a batch.

    A column is an Arrow array, or a tuple (length, buffers, null_count, offset, children,
    dictionary) in the terms of Arrow's format: buffers are objects that have one, or None;
    children are columns, the dictionary is one or None. Nothing is copied, and nothing checked:
    buffers must be as long as the schema's types and the lengths say.
    """
    cdef ArrowArray array
    memset(&array, 0, sizeof(ArrowArray))
    _export((length, (None,), 0, 0, columns, None), &array)
    try:
        return take(<intptr_t>&array, schema)
    finally:
        if array.release != NULL:  # it was not taken
            array.release(&array)

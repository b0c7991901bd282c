"""trajkit._core: the compiled kernels, one extension module.

Each included file is one idea; README.md lists them. A kernel allocates what it returns and
its scratch as numpy arrays, unless the caller passes the arrays to fill.
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.list cimport PyList_GET_ITEM
from cpython.long cimport PyLong_AsDouble, PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from libc.stdint cimport (
    INT32_MAX, int8_t, int32_t, int64_t, intptr_t, uint8_t, uint64_t
)
from libc.string cimport memchr, memcmp, memcpy, memset

from structs cimport (
    Call, Choices, Link, Message, Node, PackRow, Request, Row, pos_t, token_t
)

from numpy import asarray, dtype, empty, full, zeros

from trajkit.errors import InvalidTurnsError, LayoutError

cdef extern from *:
    """
    #include <stdint.h>
    #include <stdio.h>
    #include <stdlib.h>

    /* Abort unless n entries from start on lie within a buffer of size entries. */
    static inline void trajkit_check_write(
        const char *buffer, int64_t start, int64_t n, int64_t size
    ) {
        if (TRAJKIT_BUILD[0] == 'r' || n <= 0 || (start >= 0 && start <= size - n))
            return; /* the release build compiles all of it to nothing */
        fprintf(
            stderr, "trajkit: a write of %lld entries at %lld does not fit %s, which has %lld\\n",
            (long long)n, (long long)start, buffer, (long long)size
        );
        abort();
    }
    """
    const char* TRAJKIT_BUILD  # defined in setup.py
    void check_write "trajkit_check_write" (
        const char* buffer, int64_t start, int64_t n, int64_t size
    ) noexcept nogil

BUILD = TRAJKIT_BUILD.decode("ascii")

cpdef enum:  # why an output ended
    STOP_OTHER, STOP_LENGTH, STOP_ABORT


cdef Call _call
cdef Request _request
cdef Message _message
cdef Node _node
cdef Link _link
cdef Row _row
cdef PackRow _pack_row
cdef Choices _choices

# By struct: a numpy dtype of the same layout.
DTYPES = {
    name: dtype([(field, one[field]) for field in one.names], align=True)
    for name, record in (
        ("Call", <Call[:1]>&_call),
        ("Request", <Request[:1]>&_request),
        ("Message", <Message[:1]>&_message),
        ("Node", <Node[:1]>&_node),
        ("Link", <Link[:1]>&_link),
        ("Row", <Row[:1]>&_row),
        ("PackRow", <PackRow[:1]>&_pack_row),
        ("Choices", <Choices[:1]>&_choices),
    )
    for one in [asarray(record).dtype]
}


cdef _check_length(name, int64_t n, int64_t expected):
    if n < expected:
        raise LayoutError(f"{name} has {n} entries, {expected} are needed")


include "stores.pxi"
include "forest.pxi"
include "route.pxi"
include "text.pxi"
include "drift.pxi"
include "rows.pxi"
include "packs.pxi"
include "arrow.pxi"

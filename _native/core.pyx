"""trajkit._core: the compiled kernels, one extension module.

Each included file is one idea; README.md lists them.

The caller passes the arrays that a kernel fills; a kernel allocates its scratch as numpy
arrays. What goes to Arrow is freed by Arrow (arrow.pxi).
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
    STOP_ABORT, STOP_LENGTH, STOP_OTHER,
    Call, Choices, Link, Message, Node, PackRow, Request, Row, pos_t, token_t
)

from numpy import empty, full, zeros

from trajkit.errors import InvalidTurnsError, LayoutError

cdef extern from *:
    const char* TRAJKIT_BUILD  # defined in setup.py

BUILD = TRAJKIT_BUILD.decode("ascii")

# By enum: the number of each name. Python looks them up by name (trajkit/_kernel_names.py).
ENUMS = {}
ENUMS["Stop"] = {
    "other": STOP_OTHER, "length": STOP_LENGTH, "abort": STOP_ABORT,
}

include "bounds.pxi"
include "dtypes.pxi"
include "stores.pxi"
include "forest.pxi"
include "route.pxi"
include "text.pxi"
include "drift.pxi"
include "rows.pxi"
include "packs.pxi"
include "arrow.pxi"

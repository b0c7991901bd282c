"""trajkit._core: the compiled kernels, one extension module.

README.md lists the files. Each folder is one idea:

    text/    Python lists and JSON into flat buffers, and the bodies of messages
    arrow/   record batches in and out, through Arrow's C data interface
    forest/  the calls of a session as a forest of token paths
    route/   which call a call continues
    drift/   how a prompt departs from its parent's path
    plan/    which rows a policy makes, and which row trains an output
    fill/    the columns of planned rows
    pack/    rows as trees of tokens, cut and written into packs

The caller passes the arrays that a kernel fills; a kernel allocates its scratch as numpy
arrays. What goes to Arrow is freed by Arrow (arrow/export.pxi).
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
include "forest/prefix.pxi"
include "text/python_lists.pxi"
include "text/json_numbers.pxi"
include "fill/streaming_store.pxi"
include "forest/forest.pxi"
include "forest/call_forest.pxi"
include "forest/growth.pxi"
include "route/links.pxi"
include "route/token_index.pxi"
include "route/messages.pxi"
include "route/chains.pxi"
include "text/message_equality.pxi"
include "drift/drift.pxi"
include "drift/align.pxi"
include "plan/plan.pxi"
include "fill/fill.pxi"
include "fill/row_scalars.pxi"
include "forest/delta.pxi"
include "pack/row_forest.pxi"
include "pack/fill_packs.pxi"
include "arrow/import.pxi"
include "arrow/export.pxi"

"""trajkit._core: the compiled kernels, one extension module.

    rows.pxd     integer widths                          (no Python objects)
    prefix.pxi   longest common prefix
    unbox.pxi    Python lists of numbers into flat buffers
    message.pxi  chat messages as canonical JSON

Kernels never allocate: the caller passes every output buffer.
"""
from cpython.dict cimport PyDict_GetItemWithError
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.list cimport PyList_GET_ITEM
from cpython.long cimport PyLong_AsDouble, PyLong_CheckExact
from cpython.object cimport PyObject
from libc.math cimport floor
from libc.stdint cimport uint8_t
from libc.string cimport memcmp

from rows cimport pos_t, token_t

import re
from json.encoder import encode_basestring as _quoted

from trajkit.errors import InvalidTurnsError, LayoutError

_SURROGATE = re.compile("[\ud800-\udfff]")

include "prefix.pxi"
include "unbox.pxi"
include "message.pxi"

"""trajkit._core: the compiled kernels, one extension module.

    rows.pxd     integer widths                          (no Python objects)
    prefix.pxi   longest common prefix

Kernels never allocate: the caller passes every output buffer.
"""
from libc.string cimport memcmp

from rows cimport pos_t, token_t

from trajkit.errors import LayoutError

cdef extern from *:
    const char* TRAJKIT_BUILD  # defined in setup.py

BUILD = TRAJKIT_BUILD.decode("ascii")

include "prefix.pxi"

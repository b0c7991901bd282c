"""trajkit._core: the compiled kernels, one extension module.

    rows.pxd     integer widths and shared records       (no Python objects)
    prefix.pxi   longest common prefix
    unbox.pxi    Python lists of numbers into flat buffers
    message.pxi  chat messages as canonical JSON
    json.pxi     numbers of a JSON text into flat buffers
    columns.pxi  the columns of a turns table, through Arrow's C interface
    uncached.pxi copies whose target goes to memory past the caches
    forest.pxi   the calls of a session as a forest of token paths
    bodies.pxi   which stored body a message means
    plain.pxi    which bodies say nothing but some fields
    record.pxi   a session that grows: where a prompt leaves it, what a call brings
    form.pxi     messages laid out flat, to be compared with others
    talk.pxi     the lists of messages of a session, each message and common head held once
    intake.pxi   a call as it comes, into both
    route.pxi    which call a call continues: by messages, by tokens
    route_prefix.pxi  the same, whatever the order of calls
    route_generations.pxi  a forest of generations, by messages and checked by tokens
    agents.pxi   which call a call continues: of the main agent or of a sub-agent
    prompts.pxi  which chain a call goes on, by prompts alone
    drift.pxi    how a prompt departs from what was held
    align.pxi    where two runs of tokens differ
    plan.pxi     which rows a policy makes, who owns a claim, what is lost
    own.pxi      which of the rows that hold a claim trains it
    fill.pxi     the columns of planned rows
    facts.pxi    the columns of planned rows that have one value a row
    logprobs.pxi rows of which the engine did not give every logprob
    splice.pxi   rows of raw outputs between stretches of later prompts: plan and columns
    delta.pxi    prompts said as what they share with an earlier one, and back
    batch.pxi    columns handed to Arrow, a batch in one call

Kernels never allocate: the caller passes every output buffer. What is handed to Arrow has
descriptions of its own, which Arrow frees (batch.pxi).
"""
cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.dict cimport PyDict_GetItemWithError
from cpython.float cimport PyFloat_AS_DOUBLE, PyFloat_CheckExact
from cpython.list cimport PyList_GET_ITEM
from cpython.long cimport PyLong_AsDouble, PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.pycapsule cimport PyCapsule_GetPointer
from cpython.tuple cimport PyTuple_GET_ITEM
from cpython.unicode cimport (
    PyUnicode_DATA, PyUnicode_FromObject, PyUnicode_KIND, PyUnicode_New
)
from libc.math cimport floor
from libc.stdint cimport INT64_MAX, int8_t, int32_t, int64_t, intptr_t, uint8_t, uint64_t
from libc.string cimport memchr, memcmp, memcpy, memset

from rows cimport (
    Call, Heard, Link, Message, Node, Place, Request, Row, pos_t, token_t
)

import re
from json.encoder import encode_basestring

from numpy import ndarray

from trajkit.errors import InvalidTurnsError, LayoutError

_SURROGATE = re.compile("[\ud800-\udfff]")

cdef extern from *:
    const char* TRAJKIT_BUILD  # defined in setup.py

BUILD = TRAJKIT_BUILD.decode("ascii")

include "prefix.pxi"
include "unbox.pxi"
include "message.pxi"
include "json.pxi"
include "uncached.pxi"
include "forest.pxi"
include "record.pxi"
include "form.pxi"
include "talk.pxi"
include "intake.pxi"
include "route.pxi"
include "route_prefix.pxi"
include "route_generations.pxi"
include "bodies.pxi"
include "plain.pxi"
include "agents.pxi"
include "prompts.pxi"
include "drift.pxi"
include "align.pxi"
include "plan.pxi"
include "own.pxi"
include "fill.pxi"
include "facts.pxi"
include "logprobs.pxi"
include "splice.pxi"
include "delta.pxi"
include "columns.pxi"
include "batch.pxi"

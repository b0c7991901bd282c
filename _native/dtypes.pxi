"""The numpy dtypes of the records that kernels share.

Made from the structs, so that arrays have the layout that kernels read.
"""
from numpy import asarray, dtype

cdef Call _call
cdef Request _request
cdef Message _message
cdef Node _node
cdef Link _link
cdef Row _row
cdef PackRow _pack_row
cdef Choices _choices


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

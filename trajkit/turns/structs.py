"""The numpy dtypes of the records that the kernels share (_native/structs.pxd)."""

from trajkit._core import DTYPES

CALL, REQUEST, NODE = DTYPES["Call"], DTYPES["Request"], DTYPES["Node"]
LINK, ROW, CHOICES = DTYPES["Link"], DTYPES["Row"], DTYPES["Choices"]
PACK_ROW = DTYPES["PackRow"]
# as the column of LINKS
LINK.names = tuple("link_reason" if n == "reason" else n for n in LINK.names or ())

STOPS = ("other", "length", "abort")
"""The finish reasons that decide something: ``stop`` of a call is an index in them."""

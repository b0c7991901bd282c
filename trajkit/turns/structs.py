"""The numpy dtypes of the records that the kernels share (_native/structs.pxd)."""

from trajkit._core import DTYPES, ENUMS

CALL, REQUEST = DTYPES["Call"], DTYPES["Request"]
LINK, ROW, CHOICES = DTYPES["Link"], DTYPES["Row"], DTYPES["Choices"]
PACK_ROW = DTYPES["PackRow"]

STOPS = ENUMS["Stop"]
"""The finish reasons that decide something, and ``stop`` of a call that ended so."""

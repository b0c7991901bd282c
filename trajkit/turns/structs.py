"""The numpy dtypes of the records that the kernels share (_native/structs.pxd)."""

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from trajkit._core import DTYPES

_Item = TypeVar("_Item", bound=np.generic)

CALL, REQUEST, NODE = DTYPES["Call"], DTYPES["Request"], DTYPES["Node"]
PLACE, HEARD = DTYPES["Place"], DTYPES["Heard"]
LINK, ROW, CHOICES = DTYPES["Link"], DTYPES["Row"], DTYPES["Choices"]
PACK_ROW = DTYPES["PackRow"]
# as the column of LINKS
LINK.names = tuple("link_reason" if n == "reason" else n for n in LINK.names or ())

STOPS = ("other", "length", "abort")
"""The finish reasons that decide something: ``stop`` of a call is an index in them."""


def longer(array: npt.NDArray[_Item], size: int) -> npt.NDArray[_Item]:
    """A copy with room for more: it begins as the array does, and the rest is undefined."""
    copy = np.empty(size, array.dtype)
    copy[: len(array)] = array
    return copy

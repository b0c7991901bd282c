"""Arrays in Arrow's memory pool.

The pool keeps what is freed, so the next array goes to pages that are there; pages from the
system are cleared and mapped one by one, which for large records takes as long as filling
them.
"""

from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_Item = TypeVar("_Item", bound=np.generic)


def pooled(size: int, dtype: type[_Item] | np.dtype[_Item]) -> npt.NDArray[_Item]:
    """An array of shape (size,), its values undefined."""
    n_bytes = size * np.dtype(dtype).itemsize
    return np.frombuffer(pa.allocate_buffer(n_bytes), dtype)


def pooled_zeros(size: int, dtype: type[_Item] | np.dtype[_Item]) -> npt.NDArray[_Item]:
    """An array of shape (size,), every byte zero."""
    n_bytes = size * np.dtype(dtype).itemsize
    cleared = pooled(n_bytes, np.uint8)
    cleared.fill(0)
    return cleared.view(dtype)

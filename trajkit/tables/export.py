"""A record batch over numpy buffers, handed to Arrow in one call.

A batch of rows has some forty arrays. Making each of them by itself takes longer than
filling a small batch.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.tables.ragged import Array as Array

_Item = TypeVar("_Item", bound=np.generic)


def pooled(size: int, dtype: type[_Item] | np.dtype[_Item]) -> npt.NDArray[_Item]:
    """An array of shape (size,) in Arrow's memory pool, its values undefined.

    The pool keeps what is freed, so the next array goes to pages that are there; pages
    from the system are cleared and mapped one by one, which takes as long as filling them.
    """
    n_bytes = size * np.dtype(dtype).itemsize
    return np.frombuffer(pa.allocate_buffer(n_bytes), dtype)


class Column(NamedTuple):
    """An array in Arrow's columnar format over numpy buffers.

    The buffers are contiguous, as long as type and length require, and must not be
    written to any more.
    """

    length: int
    # validity first, which may be None
    buffers: tuple[Array | None, ...]
    # -1: not counted
    nulls: int = 0
    # first element of the buffers that belongs to the array
    offset: int = 0
    children: tuple["Column | pa.Array", ...] = ()
    dictionary: pa.Array | None = None

    def slice(self, offset: int, length: int) -> "Column":
        """Some elements of a column without children."""
        nulls = -1 if self.nulls else 0
        return self._replace(length=length, offset=self.offset + offset, nulls=nulls)


def record_batch(
    schema: pa.Schema, length: int, columns: Sequence[Column | pa.Array]
) -> pa.RecordBatch:
    """A batch over the buffers of columns, whose types are the schema's."""
    return _core.hand_over(
        length, tuple(columns), schema, pa.RecordBatch._import_from_c
    )

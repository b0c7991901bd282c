"""Arrays handed to Arrow as the columns of a batch, all of them in one call.

A batch of rows has some forty arrays, and making each by itself takes longer than filling
a small batch.
"""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core

Array: TypeAlias = npt.NDArray[np.generic]


class Column(NamedTuple):
    """An array in the terms of Arrow's columnar format, over buffers of numpy.

    The buffers are contiguous, as long as the type and the length say, and must not be
    written to any more.
    """

    length: int
    # validity first, which may be None
    buffers: tuple[Array | None, ...]
    # -1: not counted
    nulls: int = 0
    # where in the buffers it begins, in elements
    offset: int = 0
    children: tuple["Column | pa.Array", ...] = ()
    dictionary: pa.Array | None = None


def record_batch(
    schema: pa.Schema, length: int, columns: Sequence[Column | pa.Array]
) -> pa.RecordBatch:
    """A batch over the buffers of columns, which are of the schema's types."""
    return _core.hand_over(
        length, tuple(columns), schema, pa.RecordBatch._import_from_c
    )

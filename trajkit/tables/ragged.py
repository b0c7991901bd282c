"""Ragged columns: the elements of many lists, one after another, and where each begins."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.schema.engine import Bools as Bools
from trajkit.schema.engine import Keys as Keys
from trajkit.schema.engine import Longs as Longs
from trajkit.schema.engine import codes as codes
from trajkit.schema.engine import filled
from trajkit.schema.engine import lengths as lengths

Array: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[np.int32]
Floats: TypeAlias = npt.NDArray[np.float32]
Records: TypeAlias = npt.NDArray[np.void]
Index: TypeAlias = int | np.integer[Any]
_Item = TypeVar("_Item", bound=np.generic)


@dataclass(frozen=True, slots=True)
class Ragged:
    """Lists, concatenated."""

    # an array of numpy or of Arrow, shape (n_values,)
    values: Any
    # shape (n_lists + 1,): list k is values[offsets[k]:offsets[k + 1]]
    offsets: Longs

    @classmethod
    def of(cls, column: pa.ChunkedArray | pa.Array, fill: object = None) -> Self:
        """The lists of a column; a null list is empty.

        Values are an Arrow array, or with ``fill``, which replaces null, one of numpy.
        """
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        parts = [chunk.flatten() for chunk in chunks]
        values = combined(pa.chunked_array(parts, column.type.value_type))
        if fill is not None:
            values = filled(values, fill)
        return cls(values, offsets_of(lengths(column)))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, k: Index) -> Any:
        return self.values[self.offsets[k] : self.offsets[k + 1]]

    @property
    def lengths(self) -> Longs:
        """Shape (n_lists,)."""
        return np.diff(self.offsets)

    @property
    def owner(self) -> Longs:
        """The list of each value, shape (n_values,)."""
        return np.repeat(np.arange(len(self)), self.lengths)

    def take(self, starts: Longs, lengths: Longs) -> Self:
        """A list for each of these ranges of the values."""
        at = positions(starts, lengths)
        if isinstance(self.values, pa.Array):
            at = pa.array(at)
        return type(self)(self.values.take(at), offsets_of(lengths))

    def to_arrow(
        self, null: Bools | None = None, type: pa.DataType | None = None
    ) -> pa.LargeListArray:
        """The column; ``null`` are the lists that are null, which must be empty."""
        values = self.values
        if not isinstance(values, pa.Array):
            values = pa.array(values)
        mask = None if null is None or not null.any() else pa.array(null)
        return pa.LargeListArray.from_arrays(
            pa.array(self.offsets, pa.int64()), values, type=type, mask=mask
        )


def combined(column: pa.ChunkedArray) -> pa.Array:
    if column.num_chunks == 1:
        return column.chunk(0)
    return pa.concat_arrays([pa.nulls(0, column.type), *column.chunks])


def offsets_of(lengths: npt.ArrayLike) -> Longs:
    """The offsets of lists of these lengths, shape (n_lists + 1,)."""
    lengths = np.asarray(lengths)
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def positions(starts: Longs, lengths: Longs) -> Longs:
    """``start, start + 1, ...`` of every range, concatenated: 5, 6 and 0, 1, 2 for starts
    of 5 and 0 with lengths of 2 and 3."""
    offsets = offsets_of(lengths)
    return np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], lengths)


def runs_of(sizes: Longs, most: int) -> Iterator[tuple[int, int]]:
    """Group consecutive sessions or rows, as pairs (start, stop).

    The sizes of a group add up to ``most`` at most, unless it has a single member.
    """
    ends = offsets_of(sizes)
    start = 0
    while start < len(sizes):
        stop = int(np.searchsorted(ends, ends[start] + most, side="right")) - 1
        stop = max(stop, start + 1)
        yield start, stop
        start = stop


def pooled(size: int, dtype: type[_Item] | np.dtype[_Item]) -> npt.NDArray[_Item]:
    """An array of shape (size,) in Arrow's memory pool, its values undefined.

    The pool keeps what is freed, so the next array goes to pages that are there; pages from
    the system are cleared and mapped one by one, which takes as long as filling them.
    """
    n_bytes = size * np.dtype(dtype).itemsize
    return np.frombuffer(pa.allocate_buffer(n_bytes), dtype)

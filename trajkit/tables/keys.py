"""Keys of two parts: a session, and an index in it."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.tables.ragged import Bools, Longs


@dataclass(frozen=True, slots=True)
class Keys:
    """A session and an index for each of many things; a negative part is of no key."""

    # shape (n_keys,)
    session: npt.NDArray[np.integer]
    index: npt.NDArray[np.integer]

    def __len__(self) -> int:
        return len(self.session)

    def packed(self) -> Longs:
        """The keys as numbers, in the order of sessions and then of indices."""
        packed: Longs = (self.session.astype(np.int64) << 32) + self.index
        return packed

    def is_key(self) -> Bools:
        """Which of them are keys."""
        either: Bools = (self.session >= 0) & (self.index >= 0)
        return either

    def find(self, others: "Keys") -> Longs:
        """The position here of each other key, or -1; the first of equal ones."""
        have, seek = self.packed(), others.packed()
        order = None
        if (have[1:] < have[:-1]).any():
            order = np.argsort(have, kind="stable")
            have = have[order]
        at = np.searchsorted(have, seek)
        found = others.is_key() & (at < len(have))
        found[found] = have[at[found]] == seek[found]
        if order is not None:
            at[found] = order[at[found]]
        return np.where(found, at, -1)


def codes(*columns: pa.Array | pa.ChunkedArray) -> Longs:
    """A number for each distinct value, counted up from 0 in the order of first use.

    Of several columns, one after another, equal values have one number. Null is a value.
    """
    chunks = [
        chunk
        for column in columns
        for chunk in (
            column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        )
    ]
    if not chunks:
        return np.zeros(0, np.int64)
    values = pa.chunked_array(chunks).combine_chunks()
    if isinstance(values, pa.ChunkedArray):  # from older versions of Arrow
        values = pa.concat_arrays(values.chunks or [pa.array([], values.type)])
    indices = values.dictionary_encode("encode").indices
    return np.asarray(indices.to_numpy(zero_copy_only=False), np.int64)

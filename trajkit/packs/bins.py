"""Which parts of trees go into one pack."""

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np

from trajkit.tables.ragged import Longs


@dataclass(frozen=True, slots=True)
class Bins:
    """Parts in packs. A part larger than a pack continues in the packs after it."""

    # shape (n_parts,): the pack in which each part begins ...
    first: Longs
    # ... and ends
    last: Longs
    n_packs: int


def fill_bins(sizes: Longs, max_tokens: int) -> Bins:
    """Best-fit decreasing: each part goes to the fullest pack that has room for it.

    A part of more than ``max_tokens`` fills whole packs; its rest begins another.
    """
    first, last = np.empty((2, len(sizes)), np.int64)
    # room and number of each pack that is not full, by room
    rooms: list[tuple[int, int]] = []
    n_packs = 0
    for part in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[part])
        k = bisect_left(rooms, (size, -1))
        if size > max_tokens or k == len(rooms):
            first[part] = n_packs
            n_packs += -(-size // max_tokens)
            last[part] = n_packs - 1
            room = -size % max_tokens
        else:
            room, pack = rooms.pop(k)
            first[part] = last[part] = pack
            room -= size
        if room:
            insort(rooms, (room, int(last[part])))
    return Bins(first, last, n_packs)

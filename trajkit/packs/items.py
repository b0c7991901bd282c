"""The images of packs."""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from trajkit.errors import InvalidTurnsError
from trajkit.tables import lazy_compute as pc
from trajkit.tables.ragged import Ints, Longs
from trajkit.turns.images import (
    FIRST_CONTENT_ID,
    Item,
    has_items,
    item_ids,
    same_image,
)


def pack_items(
    rows: pa.Table, ids: Ints, offsets: Longs
) -> Sequence[list[Item] | None]:
    """The column ``mm_items`` of packs, whose ids are ``ids``, pack after pack.

    Raises `InvalidTurnsError` if a pack has a part of an image.
    """
    found: list[list[Item] | None] = [None] * (len(offsets) - 1)
    if not has_items(rows):
        return found
    items = pc.list_flatten(rows.column("mm_items")).to_pylist()
    known: dict[int, list[Item]] = {}
    for item in items:
        alike = known.setdefault(int(item_ids(item)[0]), [])
        if all(same_image(item) != same_image(other) for other in alike):
            alike.append(item)
    token = 0
    for place in np.flatnonzero(ids >= FIRST_CONTENT_ID).tolist():
        if place < token:
            continue
        pack = int(np.searchsorted(offsets, place, side="right")) - 1
        first, end = int(offsets[pack]), int(offsets[pack + 1])
        for item in known.get(int(ids[place]), ()):
            due = item_ids(item)
            token = place + len(due)
            if token <= end and np.array_equal(ids[place:token], due):
                break
        else:
            raise InvalidTurnsError(
                f"token {place - first} of pack {pack} is of an image of which the pack "
                "has a part: make rows without max_row_tokens or with another one, or "
                "pack with oversize='repeat'"
            )
        at = {"start": place - first, "stop": token - first}
        found[pack] = [*(found[pack] or ()), {**item, **at}]
    return found

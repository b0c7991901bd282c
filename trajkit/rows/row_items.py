"""The column ``mm_items`` of rows: the images that a row has from its calls' prompts."""

import numpy as np
import pyarrow as pa

from trajkit.rows.payloads import PathRanges
from trajkit.schema import MM_ITEM, ROWS
from trajkit.tables import lazy_compute as pc
from trajkit.tables.ragged import Ragged, offsets_of, positions
from trajkit.turns.sessions import Sessions

_TYPE = ROWS.field("mm_items").type


def row_items(calls: Sessions, n_rows: int, shown: PathRanges) -> pa.Array:
    """The items that start in ranges of the rows, with their positions in the row."""
    lists = calls.table.column("mm_items").combine_chunks()
    items = lists.flatten()
    call = pc.list_parent_indices(lists).to_numpy().astype(np.int64)
    start, stop = (
        np.asarray(pc.struct_field(items, name), np.int64) for name in ("start", "stop")
    )
    keys = (call << 32) + start
    first = (shown.call << 32) + shown.first
    low, high = (np.searchsorted(keys, first + n) for n in (0, shown.length))
    taken = positions(low, high - low)
    of_range = np.repeat(np.arange(len(shown.row)), high - low)
    row = shown.row[of_range]
    moved = (shown.place - shown.first)[of_range]
    # ranges may overlap, where they have the same tokens
    _, one = np.unique((row << 32) + start[taken] + moved, return_index=True)
    taken, row, moved = taken[one], row[one], moved[one]
    fields = {
        name: pc.struct_field(items, name).take(pa.array(taken))
        for name in MM_ITEM.names
    }
    fields["start"] = pa.array((start[taken] + moved).astype(np.int32))
    fields["stop"] = pa.array((stop[taken] + moved).astype(np.int32))
    counts = np.bincount(row, minlength=n_rows)
    structs = pa.StructArray.from_arrays(list(fields.values()), fields=list(MM_ITEM))
    return Ragged(structs, offsets_of(counts)).to_arrow(counts == 0, _TYPE)

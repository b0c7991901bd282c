"""Rows as `write_rows` with ``dedup`` stores them: without what their parent row has."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa

from trajkit.schema import ROWS
from trajkit.schema.engine import (
    Fault,
    as_long_as,
    broken,
    checks_of,
    lookup,
    no_null,
    required,
    run_starts,
    table,
)
from trajkit.tables import limits
from trajkit.tables.canonical import canonical
from trajkit.tables.columns import Columns, check_no_clash, replace_columns, row_lengths
from trajkit.tables.ragged import Ragged, offsets_of, positions, runs_of
from trajkit.turns.validation import check_all

_SUFFIXES = {
    "input_ids": "suffix_ids",
    "loss_mask": "suffix_mask",
    "logprobs": "suffix_logprobs",
}
STORED_ROWS = table(
    "rows",
    # the first of the row's tokens that is stored: its shared_length, or its first token
    # that is trained, has a logprob, or differs from the parent row's, if that is earlier
    required("suffix_start", pa.int32()),
    required("suffix_ids", ROWS.field("input_ids").type, no_null),
    required("suffix_mask", ROWS.field("loss_mask").type, no_null),
    required("suffix_logprobs", ROWS.field("logprobs").type),
    *(one for one in ROWS if one.name not in _SUFFIXES),
)
"""`trajkit.schema.ROWS` whose lists per token begin at ``suffix_start``."""


def stored_schema(names: list[str]) -> pa.Schema:
    """The schema of rows in a file with these columns."""
    return STORED_ROWS if "suffix_mask" in names else ROWS


def encoded(rows: pa.Table) -> pa.Table:
    """Rows in canonical form as `STORED_ROWS`.

    A row whose parent is not earlier in the table is stored whole. Nothing is lost, also
    where ``shared_length`` is wrong.
    """
    check_no_clash(rows, ROWS, STORED_ROWS, "form of rows")
    ids, mask = (Ragged.of(rows.column(n), 0) for n in ("input_ids", "loss_mask"))
    logprobs = Ragged.of(rows.column("logprobs")).values
    # the places of tokens that only the row itself can give
    own = np.flatnonzero(
        mask.values | logprobs.is_valid().to_numpy(zero_copy_only=False)
    )
    own = np.append(own, len(mask.values))
    first = own[np.searchsorted(own, mask.offsets[:-1])] - mask.offsets[:-1]
    parent, found = lookup(rows, "row_index", rows.column("parent_row"))
    found &= parent < np.arange(len(parent))
    most = np.minimum(
        np.minimum(first, ids.lengths), np.where(found, ids.lengths[parent], 0)
    )
    start = np.minimum(rows.column("shared_length").to_numpy().astype(np.int64), most)
    here, there = (
        positions(at, start) for at in (ids.offsets[:-1], ids.offsets[parent])
    )
    differs = np.flatnonzero(ids.values[here] != ids.values[there])
    # the first of each row: later ones are overwritten by earlier ones
    row = np.repeat(np.arange(len(start)), start)[differs[::-1]]
    start[row] = here[differs[::-1]] - ids.offsets[row]
    columns = {"suffix_start": pa.array(start.astype(np.int32))}
    for old, new in _SUFFIXES.items():
        lists = Ragged.of(rows.column(old))
        n = np.maximum(lists.lengths - start, 0)
        columns[new] = lists.take(lists.offsets[:-1] + start, n).to_arrow()
    return replace_columns(rows, ROWS, STORED_ROWS, [columns])


def decoded(rows: pa.Table) -> pa.Table:
    """`STORED_ROWS` with all rows of each session, in order, as `ROWS`.

    Raises `InvalidTurnsError` if the parent of a row is missing.
    """
    rows = canonical(rows, STORED_ROWS)
    check_no_clash(rows, STORED_ROWS, ROWS, "form of rows")
    check_all(rows, (*checks_of(STORED_ROWS), _can_be_decoded))
    starts = np.append(run_starts(rows), rows.num_rows)
    sizes = np.diff(offsets_of(row_lengths(rows))[starts])
    parts = [
        _full_columns(rows.slice(starts[lo], starts[hi] - starts[lo]))
        for lo, hi in runs_of(sizes, limits.PART_TOKENS)
    ]
    return replace_columns(rows, STORED_ROWS, ROWS, parts)


def _can_be_decoded(rows: pa.Table) -> Iterator[Fault]:
    """What a row does not store, an earlier row has."""
    for name in ("suffix_mask", "suffix_logprobs"):
        yield from as_long_as("suffix_ids", name, "{} " + name, rows)
    start = rows.column("suffix_start").to_numpy()
    parent, found = lookup(rows, "row_index", rows.column("parent_row"))
    found &= parent < np.arange(len(parent))
    most = np.where(found, row_lengths(rows)[parent], 0)
    rule = "suffix_start is {}, but the parent row in the file has {} tokens"
    yield broken((start < 0) | (start > most), rule, start, most)


def _full_columns(rows: pa.Table) -> Columns:
    """The columns that only `ROWS` has."""
    ids = Ragged.of(rows.column("suffix_ids"))
    start = rows.column("suffix_start").to_numpy().astype(np.int64)
    offsets = offsets_of(start + ids.lengths)
    parents = lookup(rows, "row_index", rows.column("parent_row"))[0]
    # of each token of the full rows: which stored one it is, and whether the row stores it
    at = np.zeros(offsets[-1], np.int64)
    for row, (parent, n) in enumerate(zip(parents, start, strict=True)):
        first, stop = offsets[row], offsets[row + 1]
        at[first : first + n] = at[offsets[parent] : offsets[parent] + n]
        at[first + n : stop] = np.arange(*ids.offsets[row : row + 2])
    own = np.zeros(len(at), np.bool_)
    own[positions(offsets[:-1] + start, ids.lengths)] = True
    columns: Columns = {}
    for old, new in _SUFFIXES.items():
        which = pa.array(at) if old == "input_ids" else pa.array(at, mask=~own)
        values = Ragged.of(rows.column(new)).values.take(which)
        if old == "loss_mask":
            values = values.fill_null(False)
        columns[old] = Ragged(values, offsets).to_arrow()
    return columns

"""`unpack`: values per edge back to rows and tokens."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trajkit._arguments import plain_array
from trajkit.errors import InvalidTurnsError
from trajkit.schema import PACKS
from trajkit.tables.canonical import (
    TableLike,
    as_table,
    canonical,
    canonical_rows,
    place,
)
from trajkit.tables.ragged import offsets_of
from trajkit.tables.take import list_values, row_lengths


def unpack(packs: TableLike, values: Any, rows: TableLike) -> pa.LargeListArray:
    """Values of edges as a list per row with a value per token.

    Parameters
    ----------
    packs : table
        `trajkit.schema.PACKS`.
    values : array or torch tensor, or sequence of these
        A number for each edge of all packs (logprobs, entropies), in their order; or
        such an array for each pack.
    rows : table
        `trajkit.schema.ROWS`: those that were packed.

    Returns
    -------
    LargeListArray
        Of the values' type, as long as the rows. Tokens without an edge are null.

    Raises
    ------
    SchemaError
        A column is absent, or has a type that cannot be taken for its own.
    InvalidTurnsError
        There is another number of values than of edges; an edge is of no token of the
        rows, or of one that has two.

    Examples
    --------
    >>> import trajkit as tk
    >>> turns = tk.from_records(
    ...     [{"session_id": "a", "prompt_ids": [1], "output_ids": [2, 3]}]
    ... )
    >>> rows = tk.linearize(turns)
    >>> packs = tk.pack(rows, 4)
    >>> tk.unpack(packs, [[-0.5, -0.25]], rows).to_pylist()
    [[None, -0.5, -0.25]]
    """
    given = canonical(as_table(packs), PACKS)
    table = canonical_rows(as_table(rows))
    row, position = (
        list_values(given.column(name)).to_numpy().astype(np.int64)
        for name in ("edge_row", "edge_position")
    )
    numbers = _flat(values)
    if numbers.shape != row.shape:
        raise InvalidTurnsError(
            f"values are of shape {numbers.shape}: the packs have {len(row)} edges"
        )
    n_tokens = row_lengths(table)
    ends = offsets_of(n_tokens)
    known = (row >= 0) & (row < len(table))
    known &= (position >= 0) & (
        position < np.append(n_tokens, 0)[np.where(known, row, -1)]
    )
    if not known.all():
        edge = int(np.argmin(known))
        raise InvalidTurnsError(
            f"edge {edge} is token {position[edge]} of row {row[edge]}, which the rows "
            "do not have: pass the rows that were packed"
        )
    at = ends[row] + position
    there = np.zeros(int(ends[-1]), np.bool_)
    there[at] = True
    if np.count_nonzero(there) != len(at):
        again = int(np.argmax(np.bincount(at, minlength=len(there))))
        line = int(np.searchsorted(ends, again, side="right")) - 1
        raise InvalidTurnsError(
            f"{place(table, line)}: token {again - ends[line]} has two edges"
        )
    out = np.zeros(len(there), numbers.dtype)
    out[at] = numbers
    return pa.LargeListArray.from_arrays(pa.array(ends), pa.array(out, mask=~there))


def _flat(values: Any) -> Any:
    """An array for all edges, of one or of an array per pack."""
    values = plain_array(values)
    if isinstance(values, Sequence):
        parts = [np.asarray(plain_array(part)) for part in values]
        if any(part.ndim for part in parts):
            return np.concatenate(parts)
    return np.asarray(values)

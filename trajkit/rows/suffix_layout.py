"""Convert rows between the full and the suffix layout."""

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit.schema import ROWS, ROWS_SUFFIX
from trajkit.schema.engine import lookup, nulls
from trajkit.tables import limits
from trajkit.tables.canonical import TableLike, canonical_rows, rows_schema
from trajkit.tables.ragged import (
    Ints,
    Longs,
    Ragged,
    offsets_of,
    positions,
    runs_of,
)
from trajkit.tables.reshape import Columns, check_no_clash, replace_columns
from trajkit.tables.stages import apply, stage
from trajkit.tables.take import list_values, row_lengths
from trajkit.turns.sessions import Forest, run_starts
from trajkit.turns.structs import CALL
from trajkit.turns.validation import check_layout


@stage
def full_rows(rows: TableLike) -> pa.Table:
    """Convert rows from the suffix layout to the full layout.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS_SUFFIX` with all rows of each session. Full rows are
        returned unchanged.

    Returns
    -------
    Table
        `trajkit.schema.ROWS`, followed by the extra columns, unchanged.

    Raises
    ------
    SchemaError
        A column is missing or cannot be cast to its type, or an extra column has the
        name of a column of the other layout.
    InvalidTurnsError
        A row's parent_row does not exist or is too short; the suffixes of a row differ
        in length; the rows of a session are not contiguous.
    """
    return _convert(rows, ROWS, _full_columns)


full_rows_batches = full_rows.batches


@stage
def suffix_rows(rows: TableLike) -> pa.Table:
    """Convert rows from the full layout to the suffix layout.

    The inverse of `full_rows`. `trajkit.linearize` with ``layout="suffix"`` makes such
    rows directly.

    Parameters
    ----------
    rows : table
        `trajkit.schema.ROWS` with all rows of each session.

    Returns
    -------
    Table
        `trajkit.schema.ROWS_SUFFIX`, followed by the extra columns, unchanged.

    Raises
    ------
    SchemaError, InvalidTurnsError
        As `full_rows`.
    """
    return _convert(rows, ROWS_SUFFIX, _suffix_columns)


suffix_rows_batches = suffix_rows.batches


def _convert(
    rows: TableLike, schema: pa.Schema, columns: Callable[[pa.Table], Columns]
) -> pa.Table:
    def one(rows: pa.Table) -> pa.Table:
        table = canonical_rows(rows)
        layout = rows_schema(table.column_names)
        if layout is schema:
            return table
        check_no_clash(table, layout, schema, "layout of rows")
        check_layout(table)
        return replace_columns(
            table, layout, schema, [columns(part) for part in _parts(table)]
        )

    return apply(one, rows)


def _parts(table: pa.Table) -> Iterator[pa.Table]:
    """Split at sessions into parts of at most `limits.PART_TOKENS`, or of one session."""
    starts = np.append(run_starts(table), table.num_rows)
    sizes = np.diff(offsets_of(row_lengths(table))[starts])
    for lo, hi in runs_of(sizes, limits.PART_TOKENS):
        yield table.slice(starts[lo], starts[hi] - starts[lo])


def _full_columns(table: pa.Table) -> Columns:
    """The columns that only `ROWS` has."""
    sizes, paths, _suffixes = _paths(table)
    offsets = offsets_of(sizes)
    ids = np.frombuffer(pa.allocate_buffer(4 * int(offsets[-1])), np.int32)
    _core.copy_prompts(paths, np.zeros(len(sizes), np.int64), offsets, ids)
    return _per_token(table, offsets, ids)


def _paths(rows: pa.Table) -> tuple[Longs, _core.CallForest, Ragged]:
    """Lengths of rows in the suffix layout, the rows as paths, and what these refer to."""
    suffixes = Ragged.of(rows.column("suffix_ids"), -1)
    start = rows.column("suffix_start").to_numpy().astype(np.int64)
    paths = np.zeros(rows.num_rows, CALL)
    paths["own"] = suffixes.values.ctypes.data + 4 * suffixes.offsets[:-1]
    paths["own_start"] = start
    paths["prompt_len"] = start + suffixes.lengths
    parents = lookup(rows, "row_index", rows.column("parent_row"))[0]
    paths["base"] = np.where(start > 0, parents, -1)
    sessions = np.append(run_starts(rows), rows.num_rows).astype(np.int64)
    return start + suffixes.lengths, Forest.of(paths, sessions).paths, suffixes


def _per_token(table: pa.Table, offsets: Longs, ids: Ints) -> Columns:
    """The per-token columns of `ROWS`, for suffix rows with known full ids."""
    n_tokens = int(offsets[-1])
    start = table.column("suffix_start").to_numpy().astype(np.int64)
    at = positions(offsets[:-1] + start, np.diff(offsets) - start)
    mask, given = np.zeros((2, n_tokens), np.bool_)
    logprobs = np.zeros(n_tokens, np.float32)
    mask[at] = _marks(table.column("suffix_mask"))
    logprobs[at] = _numbers(table.column("suffix_logprobs"))
    given[at] = _given(table.column("suffix_logprobs"))
    return {
        "input_ids": Ragged(pa.array(ids), offsets).to_arrow(),
        "loss_mask": Ragged(pa.array(mask), offsets).to_arrow(),
        "logprobs": Ragged(pa.array(logprobs, mask=~given), offsets).to_arrow(),
    }


def _suffix_columns(table: pa.Table) -> Columns:
    """The columns that only `ROWS_SUFFIX` has."""
    ids = Ragged.of(table.column("input_ids"), -1)
    mask = _marks(table.column("loss_mask"))
    # position of each row's first trained token, or its end
    trained = np.append(np.flatnonzero(mask), len(mask))
    first = trained[np.searchsorted(trained, ids.offsets[:-1])]
    first = np.minimum(first, ids.offsets[1:]) - ids.offsets[:-1]
    shared = table.column("shared_length").to_numpy()
    start = np.where(nulls(table.column("parent_row")), 0, np.minimum(shared, first))
    n = ids.lengths - start
    at, offsets = positions(ids.offsets[:-1] + start, n), offsets_of(n)
    logprobs = _numbers(table.column("logprobs"))[at]
    given = _given(table.column("logprobs"))[at]
    return {
        "suffix_start": pa.array(start.astype(np.int32)),
        "suffix_ids": Ragged(pa.array(ids.values[at]), offsets).to_arrow(),
        "suffix_mask": Ragged(pa.array(mask[at]), offsets).to_arrow(),
        "suffix_logprobs": Ragged(pa.array(logprobs, mask=~given), offsets).to_arrow(),
    }


def _marks(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return np.asarray(list_values(column).to_numpy(zero_copy_only=False))


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[np.float32]:
    return np.asarray(list_values(column).fill_null(0.0).to_numpy())


def _given(column: pa.ChunkedArray) -> npt.NDArray[np.bool_]:
    return np.asarray(list_values(column).is_valid().to_numpy(zero_copy_only=False))

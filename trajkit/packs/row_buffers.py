"""Rows as the records that the kernels read."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arguments import did_you_mean
from trajkit.errors import InvalidTurnsError, SchemaError
from trajkit.schema.engine import lookup, nulls
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import is_list, place
from trajkit.tables.ragged import Longs, offsets_of, positions
from trajkit.tables.take import list_values
from trajkit.turns.structs import PACK_ROW

OBSERVED = "observation_weight"

Records = npt.NDArray[np.void]
Bools = npt.NDArray[np.bool_]


def row_records(table: pa.Table) -> tuple[Records, list[Any]]:
    """Rows, which passed `check_layout`, as PACK_ROW records, and what these point into.

    ``parent`` and ``line`` are lines of the table. Raises `InvalidTurnsError`
    if the parent of a row is not in the table.
    """
    records = np.zeros(table.num_rows, PACK_ROW)
    records["line"] = np.arange(table.num_rows)
    data, _, first, records["length"] = _lists(table.column("input_ids"))
    records["ids"] = data + 4 * first
    mask = table.column("loss_mask")
    records["mask"], _, records["mask_bit"], _ = _lists(mask)
    logprobs = table.column("logprobs")
    data, valid, first, _ = _lists(logprobs)
    records["logprobs"] = data + 4 * first
    records["valid"], records["valid_bit"] = valid, first

    parent, found = lookup(table, "row_index", table.column("parent_row"))
    shared = table.column("shared_length").to_numpy()
    lost = np.flatnonzero(~found & ~nulls(table.column("parent_row")) & (shared > 0))
    if len(lost):
        row = int(lost[0])
        raise InvalidTurnsError(
            f"{place(table, row)}: its parent_row {table.column('parent_row')[row]} is "
            "not in the table. Pass all rows of a session; to leave some out of the "
            "loss, clear their loss_mask"
        )
    shares = found & (shared > 0)
    records["parent"] = np.where(shares, parent, -1)
    records["shared"] = np.where(shares, shared, 0)
    return records, [table, mask, logprobs]


def _lists(column: pa.ChunkedArray) -> tuple[Longs, Longs, Longs, Longs]:
    """Of each list: addresses of values and of their validity, first value, length."""
    parts = [np.empty((4, 0), np.int64)]
    for chunk in column.chunks:
        ends = chunk.offsets.to_numpy()
        valid, data = chunk.values.buffers()
        part = np.empty((4, len(chunk)), np.int64)
        part[0] = 0 if data is None else data.address
        part[1] = 0 if valid is None else valid.address
        part[2] = chunk.values.offset + ends[:-1]
        part[3] = np.diff(ends)
        parts.append(part)
    data, valid, first, n = np.concatenate(parts, axis=1)
    return data, valid, first, n


def column_of(table: pa.Table, name: str, argument: str) -> pa.ChunkedArray:
    """A column of rows that an argument names; `SchemaError` if rows lack it."""
    if name not in table.column_names:
        hint = did_you_mean(name, table.column_names)
        raise SchemaError(f"{argument} has {name!r}: rows have no such column{hint}")
    return table.column(name)


def per_token(table: pa.Table, name: str, n_tokens: Longs) -> bool:
    """Whether a column is a list that has, in each row, a value per token.

    Raises `InvalidTurnsError` if that is so in some rows only.
    """
    column = table.column(name)
    if not is_list(column.type):
        return False
    n = np.asarray(pc.list_value_length(column).fill_null(-1), np.int64)
    wrong = np.flatnonzero((n >= 0) & (n != n_tokens))
    if len(wrong) and (n == n_tokens).any():
        row = int(wrong[0])
        raise InvalidTurnsError(
            f"{place(table, row)}: {name} has {n[row]} values for {n_tokens[row]} "
            "tokens: expected one per token, as in other rows"
        )
    return not len(wrong)


def add_observed(table: pa.Table, records: Records) -> tuple[Bools, list[Any]]:
    """Give the records of rows an edge for each observed token, too.

    Return the loss masks of the rows, end to end, and what the records point into.
    Raises `SchemaError` if the column of weights is absent or has no weight per token.
    """
    offsets = offsets_of(records["length"])
    column = column_of(table, OBSERVED, "columns")
    if not per_token(table, OBSERVED, records["length"]):
        raise SchemaError(f"{OBSERVED} is {column.type}: expected a weight per token")
    trained = np.asarray(list_values(table.column("loss_mask")))
    observed = np.zeros(len(trained), np.bool_)
    at = positions(offsets[:-1], pc.list_value_length(column).fill_null(0).to_numpy())
    observed[at] = np.asarray(list_values(column).fill_null(0)) != 0
    bits = np.packbits(trained | observed, bitorder="little")
    records["mask"], records["mask_bit"] = bits.ctypes.data, offsets[:-1]
    return trained, [bits]

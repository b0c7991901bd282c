"""Tables with lines about turns."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.tables.ragged import Longs
from trajkit.turns.sessions import Sessions


def turn_lines(
    schema: pa.Schema,
    calls: Sessions,
    which: Longs | Sequence[int],
    *columns: Sequence[Any] | npt.NDArray[Any] | pa.Array,
) -> pa.Table:
    """A table of the session and turn of some calls, and further columns.

    ``schema`` begins with session_id and turn_index; ``which`` are indices of calls;
    the columns that follow are given as their types or as `codes`.
    """
    rows = pa.array(np.asarray(which, np.int64))
    taken = calls.table.select(["session_id", "turn_index"]).take(rows)
    arrays = []
    for field, values in zip(list(schema)[2:], columns, strict=True):
        if isinstance(values, np.ndarray):  # numpy casts faster than Arrow
            values = values.astype(field.type.to_pandas_dtype(), copy=False)
        known = isinstance(values, pa.Array)
        arrays.append(values if known else pa.array(values, field.type))
    return pa.Table.from_arrays([*taken.columns, *arrays], schema=schema)


def codes(values: Sequence[int] | npt.NDArray[Any], names: tuple[str, ...]) -> pa.Array:
    """Names by their number, with all of the names as categories."""
    numbers = pa.array(np.asarray(values, np.int8))
    return pa.DictionaryArray.from_arrays(numbers, pa.array(names))

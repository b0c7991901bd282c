"""What `trajkit.weights` and `trajkit.rewards` share: columns and checks of tables."""

from typing import TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import compute as pc
from trajkit.errors import InvalidTurnsError, PolicyError
from trajkit.tables import place

Longs: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]


def trained_tokens(table: pa.Table) -> Longs:
    """Trained tokens of each row, in either layout."""
    parts = [np.empty(0, np.int64)]
    name = "loss_mask" if "loss_mask" in table.column_names else "suffix_mask"
    for chunk in table.column(name).chunks:
        mask = chunk.flatten().to_numpy(zero_copy_only=False)
        ends = np.cumsum(pc.list_value_length(chunk).to_numpy(zero_copy_only=False))
        parts.append(np.diff(np.searchsorted(np.flatnonzero(mask), ends), prepend=0))
    return np.concatenate(parts)


def session_codes(table: pa.Table) -> tuple[Longs, int]:
    """The number of each row's session, and how many there are."""
    names = pc.unique(table.column("session_id"))
    codes = pc.index_in(table.column("session_id"), names)
    return np.asarray(codes).astype(np.int64), len(names)


def check_choice(name: str, value: object, expected: object) -> None:
    known = get_args(expected)
    if value not in known:
        raise PolicyError(
            f"{name}={value!r}: expected one of {', '.join(map(repr, known))}"
        )


def check_once(table: pa.Table, names: list[str]) -> None:
    counts = table.group_by(names).aggregate([([], "count_all")])
    again = counts.filter(pc.greater(counts.column("count_all"), 1))
    if len(again):
        raise InvalidTurnsError(
            f"{place(again, 0)}: {again.column('count_all')[0]} lines: expected one"
        )


def check_finite(table: pa.Table, name: str = "reward") -> None:
    bad = table.filter(pc.invert(pc.is_finite(table.column(name))).fill_null(False))
    if len(bad):
        raise InvalidTurnsError(
            f"{place(bad, 0)}: {name} {bad.column(name)[0]}: expected a finite number "
            "or null"
        )


def with_column(
    table: pa.Table, name: str, column: pa.Array | pa.ChunkedArray
) -> pa.Table:
    """The table with a column put in place of the one of that name, or behind."""
    if name in table.column_names:
        at = table.column_names.index(name)
        return table.set_column(at, table.field(at).with_type(column.type), column)
    return table.append_column(name, column)

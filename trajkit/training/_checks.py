"""Checks of columns and tables that weights and rewards share."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit._arrow.canonical import place
from trajkit.errors import InvalidTurnsError

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

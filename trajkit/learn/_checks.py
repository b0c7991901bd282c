"""Checks of tables and numbers that rewards, advantages and weights share."""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import TableLike, as_table, canonical, place
from trajkit.tables.keys import codes
from trajkit.tables.ragged import Ragged

Longs: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]


def trained_tokens(table: pa.Table) -> Longs:
    """Trained tokens of each row."""
    mask = Ragged.of(table.column("loss_mask"), fill=False)
    return np.diff(np.searchsorted(np.flatnonzero(mask.values), mask.offsets))


def session_codes(table: pa.Table) -> tuple[Longs, int]:
    """The number of each row's session, and how many there are."""
    found = codes(table.column("session_id"))
    return found, int(found.max(initial=-1)) + 1


def facts(table: TableLike, schema: pa.Schema, n_keys: int, value: str) -> pa.Table:
    """A table of another schema with more columns, such as a report, as ``schema``.

    Raises InvalidTurnsError if two lines have the same first ``n_keys`` columns, or one
    has a ``value`` that is not finite.
    """
    found = canonical(as_table(table).replace_schema_metadata(None), schema)
    counts = found.group_by(schema.names[:n_keys]).aggregate([([], "count_all")])
    again = counts.filter(pc.greater(counts.column("count_all"), 1))
    if len(again):
        raise InvalidTurnsError(
            f"{place(again, 0)}: {again.column('count_all')[0]} lines: expected one"
        )
    bad = found.filter(pc.invert(pc.is_finite(found.column(value))).fill_null(False))
    if len(bad):
        raise InvalidTurnsError(
            f"{place(bad, 0)}: {value} {bad.column(value)[0]}: expected a finite number "
            "or null"
        )
    return found


def check_number(
    name: str, value: object, least: float, *, above: bool = False
) -> None:
    """Raise ArgumentError unless a number is finite and ``least`` or more.

    ``above``: it has to be more.
    """
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if (
        not number
        or not least <= value < float("inf")  # type: ignore[operator]
        or (above and value == least)
    ):
        rule = f"above {least}" if above else f"of {least} or more"
        raise ArgumentError(f"{name}={value!r}: expected a finite number {rule}")

"""Checks of columns and tables that weights and rewards share."""

import warnings
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit.errors import ArgumentError, InvalidTurnsError, NoSignalWarning
from trajkit.tables import lazy_compute as pc
from trajkit.tables.canonical import place

Longs: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
Floats: TypeAlias = npt.NDArray[np.float64]


def trained_tokens(table: pa.Table) -> Longs:
    """Trained tokens of each row."""
    parts = [np.empty(0, np.int64)]
    for chunk in table.column("loss_mask").chunks:
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


def constant_groups(
    given: pa.Table, group: Longs, rewards: Floats, scored: Bools
) -> Bools:
    """Whether all rewards of each rollout's group are equal, up to rounding.

    ``given`` is the table that has them, before they became float64.
    """
    n = int(group.max(initial=-1)) + 1
    top, bottom = np.full(n, -np.inf), np.full(n, np.inf)
    np.maximum.at(top, group[scored], rewards[scored])
    np.minimum.at(bottom, group[scored], rewards[scored])
    types = [field.type for field in given.schema if field.name == "reward"]
    single = any(pa.types.is_floating(t) and t.bit_width <= 32 for t in types)
    tolerance = 1e-5 if single else 1e-9
    size = np.maximum(1.0, np.maximum(np.abs(top), np.abs(bottom)))
    several = np.bincount(group, scored, n) > 1
    with np.errstate(invalid="ignore"):  # groups without a reward
        constant = several & (top - bottom <= tolerance * size)
    found: Bools = constant[group]
    return found


def warn_without_signal(
    gains: Floats, rewards: Floats, group: Longs, stacklevel: int = 3
) -> None:
    """Warn if there are advantages and all are 0.

    ``rewards`` and ``group`` are those of each.
    """
    if not len(gains) or gains.any():
        return
    why = "in every group all rewards are equal"
    if not rewards.any():
        why = "every reward is 0"
    elif len(np.unique(group)) == len(group):
        why = (
            "every group has one rollout with a reward. Set group_id, so that the "
            "rollouts of a task share a group"
        )
    warnings.warn(
        f"all {len(gains)} advantages are 0, so a training step changes nothing: {why}",
        NoSignalWarning,
        stacklevel=stacklevel,
    )

"""``trajkit stats``: the columns of a file of any table, and its totals."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from trajkit._arrow import lazy_compute as pc
from trajkit.cli.head import TABLE, stored_tables
from trajkit.cli.options import command
from trajkit.cli.terminal import Screen, shortened, visible
from trajkit.cli.text import share

_HEAD = ("column", "type", "nulls", "min", "mean", "max", "of")
_MOST_NAMES = 4
# Texts up to this length may be names.
_LONGEST_NAME = 32

# Totals: the column that counts them, and its name for people.
_LENGTHS = {
    "prompt_ids": "prompt tokens",
    "output_ids": "tokens sampled",
    "input_ids": "tokens",
    "suffix_ids": "tokens stored",
    "edge_target": "tokens trained",
}
_SUMS = {"loss_mask": "tokens trained", "suffix_mask": "tokens trained"}
_BASES = ("tokens", "tokens stored")
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)


@command(
    "stats",
    f"""
summarize the columns of a table

Print, for each column of a file of any table, its type, nulls, and the least, mean and
largest value: of lists and texts the length, of flags the share that is true, of names the
counts. Then sessions and tokens.
{TABLE}
--json
""",
)
def run(arguments: argparse.Namespace) -> None:
    """Print the summary."""
    summary = Summary()
    for table in stored_tables(arguments.source):
        summary.add(table)
    screen = Screen.of_stdout(colour=True)
    if arguments.json:
        screen.print(json.dumps(summary.to_json()))
        return
    screen.print(f"{summary.lines:,} lines\n")
    screen.print_table(
        [_HEAD, *(one.texts(name) for name, one in summary.columns.items())]
    )
    screen.print()
    for name, n in summary.totals.items():
        part = ""
        base = next((one for one in _BASES if one in summary.totals), None)
        if name == "tokens trained" and base is not None:
            part = f", {share(n, summary.totals[base])} of {base}"
        screen.print(f"{name}: {n:,}{part}")


@dataclass(slots=True)
class Column:
    """The sums of a column."""

    type: pa.DataType
    nulls: int = 0
    known: int = 0
    total: float = 0
    least: float = math.inf
    largest: float = -math.inf
    names: Counter[str] = field(default_factory=Counter)

    def add(self, values: pa.ChunkedArray) -> None:
        """Add values."""
        self.nulls += values.null_count
        of, measure = _measure(values.type)
        if pa.types.is_dictionary(values.type):
            self._count(values)
        if measure is None:
            return
        numbers = measure(values).drop_null()
        if not len(numbers):
            return
        ends = pc.min_max(numbers).as_py()
        self.least = min(ends["min"], self.least)
        self.largest = max(ends["max"], self.largest)
        self.known += len(numbers)
        self.total += pc.sum(numbers).as_py()
        if of == "characters" and self.largest <= _LONGEST_NAME:
            self._count(values)

    def _count(self, names: pa.ChunkedArray) -> None:
        for one in pc.value_counts(names.drop_null()).to_pylist():
            self.names[str(one["values"])] += one["counts"]

    def to_json(self) -> dict[str, Any]:
        """The sums as one object."""
        return {
            "type": _type_name(self.type),
            "of": _measure(self.type)[0],
            "nulls": self.nulls,
            "min": self.least if self.known else None,
            "mean": self.total / self.known if self.known else None,
            "max": self.largest if self.known else None,
            "names": dict(self.names.most_common()),
        }

    def texts(self, name: str) -> tuple[str, ...]:
        """The cells of the column's line."""
        sums = self.to_json()
        of = sums["of"] if self.known else ""
        if self.names:
            most = self.names.most_common(_MOST_NAMES)
            of = ", ".join(f"{visible(value)} {n:,}" for value, n in most)
        if len(self.names) > _MOST_NAMES:
            of = f"{len(self.names):,} names"
        return (
            shortened(name, 40),
            shortened(sums["type"], 24),
            f"{self.nulls:,}" if self.nulls else "",
            *(_number(sums[name]) for name in ("min", "mean", "max")),
            of,
        )


@dataclass(slots=True)
class Summary:
    """The sums of a table."""

    lines: int = 0
    columns: dict[str, Column] = field(default_factory=dict)
    sessions: set[str] = field(default_factory=set)
    totals: Counter[str] = field(default_factory=Counter)

    def add(self, table: pa.Table) -> None:
        """Add more lines."""
        self.lines += table.num_rows
        for name, values in zip(table.column_names, table.columns, strict=True):
            self.columns.setdefault(name, Column(values.type)).add(values)
            if name == "session_id":
                self.sessions.update(pc.unique(values).to_pylist())
                self.totals["sessions"] = len(self.sessions)
            if not isinstance(values.type, _LISTS):
                continue
            if name in _LENGTHS:
                n = pc.sum(pc.list_value_length(values)).as_py() or 0
                self.totals[_LENGTHS[name]] += n
            elif name in _SUMS:
                n = pc.sum(pc.list_flatten(values)).as_py() or 0
                self.totals[_SUMS[name]] += n

    def to_json(self) -> dict[str, object]:
        """The sums as one object."""
        found = {name: one.to_json() for name, one in self.columns.items()}
        return {"lines": self.lines, "columns": found, "totals": dict(self.totals)}


def _type_name(type_: pa.DataType) -> str:
    if isinstance(type_, _LISTS):
        return f"list of {_type_name(type_.value_type)}"
    if pa.types.is_struct(type_):
        return "struct"
    return "names" if pa.types.is_dictionary(type_) else str(type_)


def _measure(
    type_: pa.DataType,
) -> tuple[str, Callable[[pa.ChunkedArray], pa.ChunkedArray] | None]:
    """What is measured of values, and how; None: nothing is."""
    if isinstance(type_, _LISTS):
        return "length", pc.list_value_length
    if pa.types.is_boolean(type_):
        return "share of true", lambda values: values.cast(pa.int8())
    if pa.types.is_string(type_) or pa.types.is_large_string(type_):
        return "characters", pc.utf8_length
    if pa.types.is_integer(type_) or pa.types.is_floating(type_):
        return "value", lambda values: values
    return "value", None


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"

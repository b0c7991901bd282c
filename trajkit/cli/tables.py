"""``trajkit head`` and ``trajkit stats``: what is in a file of any table."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any

import pyarrow as pa
from cyclopts import Parameter
from rich.cells import cell_len

from trajkit.cli.files import Reads
from trajkit.cli.options import Count, Json, nothing, print_json
from trajkit.cli.screen import Screen, share, shortened, text_table, visible
from trajkit.files.sources import Paths
from trajkit.files.tables import iter_tables, log_files
from trajkit.tables import lazy_compute as pc

Tables = Annotated[
    list[str],
    Parameter(
        help="Parquet, Arrow IPC or JSON by suffix, or a directory, for its turns; - is "
        "standard input"
    ),
    Reads("turns"),
]

_MAX_CELL = 32
_SHOWN_ITEMS = 3

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


def stored_tables(source: Paths, batch_rows: int | None = None) -> Iterator[pa.Table]:
    """The tables of files, or the turns of directories, some lines at a time.

    No line at all is an error.
    """
    empty = True
    for file in log_files(source)[0]:
        for table in iter_tables(file, batch_rows=batch_rows):
            empty = empty and not table.num_rows
            yield table
    if empty:
        raise nothing(source, "lines")


def head(
    source: Tables,
    /,
    *,
    lines: Annotated[Count, Parameter(name=("--lines", "-n"))] = 10,
) -> None:
    """Print the first lines of a table.

    Print the first lines of a file of any table: turns, rows, packs, links, drift,
    sessions, a report. Lists are shortened, and columns that do not fit are named below.

    Parameters
    ----------
    lines
        The number of lines.
    """
    screen = Screen()
    wanted, tables = lines, []
    for table in stored_tables(source, lines):
        tables.append(table.slice(0, wanted))
        wanted -= tables[-1].num_rows
        if wanted == 0:
            break
    names = list(dict.fromkeys(name for table in tables for name in table.column_names))
    records = [record for table in tables for record in table.to_pylist()]
    cells = {name: [cell(record.get(name)) for record in records] for name in names}
    widths = (max(map(cell_len, [name, *cells[name]])) + 2 for name in names)
    room = 10**9 if screen.width is None else screen.width
    ends = zip(names, itertools.accumulate(widths), strict=True)
    shown = [name for name, end in ends if end - 2 <= room] or names[:1]
    screen.print(
        text_table(shown, [*zip(*(cells[name] for name in shown), strict=True)])
    )
    if len(shown) < len(names):
        screen.labelled("more", [(", ".join(names[len(shown) :]), "")])


def stats(source: Tables, /, *, json: Json = False) -> None:
    """Summarize the columns of a table.

    Print, for each column of a file of any table, its type, nulls, and the least, mean and
    largest value: of lists and texts the length, of flags the share that is true, of names
    the counts. Then sessions and tokens.
    """
    summary = Summary()
    for table in stored_tables(source):
        summary.add(table)
    if json:
        print_json(summary.to_json())
        return
    screen = Screen()
    screen.print(f"{summary.lines:,} lines\n")
    columns = [one.texts(name) for name, one in summary.columns.items()]
    screen.print(f"{text_table(_HEAD, columns)}\n")
    for name, n in summary.totals.items():
        part = ""
        base = next((one for one in _BASES if one in summary.totals), None)
        if name == "tokens trained" and base is not None:
            part = f", {share(n, summary.totals[base])} of {base}"
        screen.print(f"{name}: {n:,}{part}")


def cell(value: object) -> str:
    """A value on one short line.

    Examples
    --------
    >>> cell([1, 2, 3, 4, 5]), cell(None), cell(0.25), cell("a\\x1b")
    ('5: 1 2 3 ...', '', '0.25', 'a\\\\x1b')
    """
    if value is None:
        return ""
    if isinstance(value, list):
        items = " ".join(_item(one) for one in value[:_SHOWN_ITEMS])
        more = " ..." if len(value) > _SHOWN_ITEMS else ""
        return shortened(f"{len(value)}: {items}{more}", _MAX_CELL)
    return shortened(_item(value), _MAX_CELL)


def _item(value: object) -> str:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return ":".join(_item(one) for one in value.values() if one is not None)
    return "null" if value is None else str(value)


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

"""``trajkit head`` and ``trajkit stats``: what is in a file of any table."""

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Annotated, Any

import polars as pl
import pyarrow as pa
from cyclopts import Parameter

from trajkit.cli import options as opt
from trajkit.cli.screen import Screen, shortened, text_table, visible
from trajkit.files.sources import Paths
from trajkit.files.tables import iter_tables, log_files

# texts up to this length may be names; of more names than this, the number is shown
_LONGEST_NAME, _MOST_NAMES = 32, 4
# columns of a screen for a column of a table
_CELL = 14


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
        raise opt.nothing(source, "lines")


def head(
    source: opt.Source,
    /,
    *,
    lines: Annotated[opt.Count, Parameter(name=("--lines", "-n"))] = 10,
) -> None:
    """Print the first lines of a table.

    Print the first lines of a file of any table: turns, rows, packs, links, drift,
    sessions, a report. Lists are shortened, and columns that do not fit left out.

    Parameters
    ----------
    lines
        The number of lines.
    """
    screen = Screen()
    tables = [pl.DataFrame(one) for one in islice(stored_tables(source, lines), lines)]
    frame = pl.concat(tables, how="diagonal_relaxed").head(lines)
    texts = pl.col(pl.String).map_elements(visible, return_dtype=pl.String)
    width = screen.width or 0
    with pl.Config(
        fmt_str_lengths=_LONGEST_NAME,
        tbl_cols=max(width // _CELL, 1) if width else -1,
        tbl_formatting="NOTHING",
        tbl_hide_dataframe_shape=True,
        tbl_hide_dtype_separator=True,
        tbl_rows=-1,
        tbl_width_chars=width or -1,
    ):
        for line in str(frame.with_columns(texts)).split("\n"):
            screen.print(visible(line[1:]).rstrip())


def stats(source: opt.Source, /, *, json: opt.Json = False) -> None:
    """Summarize the columns of a table.

    Print, for each column of a file of any table, its type, nulls, and the least, mean and
    largest value and the sum: of lists and texts the length, of flags and masks the number
    that is true; of names the counts.
    """
    columns: dict[str, dict[str, Any]] = {}
    # a number for each value, see `_measured`
    parts: list[pl.DataFrame] = []
    for table in stored_tables(source):
        measures = []
        for field, values in zip(table.schema, pl.DataFrame(table), strict=True):
            name, (of, numbers) = field.name, _measured(values)
            measures.append(numbers.alias(name))
            first = {
                "type": str(values.dtype),
                "nulls": 0,
                "of": of,
                "names": Counter(),
            }
            column = columns.setdefault(name, first)
            column["nulls"] += values.null_count()
            longest: Any = numbers.max() if of == "characters" else None
            if values.dtype == pl.Categorical or (longest or 99) <= _LONGEST_NAME:
                counts = values.drop_nulls().cast(pl.String).value_counts()
                column["names"].update(dict(counts.rows()))
        parts.append(pl.DataFrame(measures))
    whole = pl.concat(parts, how="diagonal_relaxed")
    lines = []
    for name, column in columns.items():
        names, numbers = column["names"], whole[name]
        column |= {end: getattr(numbers, end)() for end in _ENDS}
        if names:
            shown = [f"{visible(value)} {n:,}" for value, n in names.most_common()]
            many = len(shown) > _MOST_NAMES
            column["of"] = f"{len(shown):,} names" if many else ", ".join(shown)
        of = "" if column["min"] is None and not names else column["of"]
        cells = [_number(column[end]) for end in ("nulls", *_ENDS)]
        lines.append([shortened(name, 40), shortened(column["type"], 24), *cells, of])
    head = ("column", "type", "nulls", *_ENDS, "of")
    text = f"{len(whole):,} lines\n\n{text_table(head, lines)}"
    opt.print_result({"lines": len(whole), "columns": columns}, text, json)


_ENDS = ("min", "mean", "max", "sum")


def _measured(values: pl.Series) -> tuple[str, pl.Series]:
    """What is measured of values, and the measures; null for those that have none."""
    if values.dtype == pl.Array:
        values = values.arr.to_list()
    if values.dtype == pl.List(pl.Boolean):
        return "true flags", values.list.sum()
    if values.dtype == pl.List:
        return "length", values.list.len()
    if values.dtype == pl.Boolean:
        return "true flags", values.cast(pl.Int64)
    if values.dtype == pl.String:
        return "characters", values.str.len_chars()
    nothing = pl.repeat(None, len(values), dtype=pl.Int64, eager=True)
    return "value", values if values.dtype.is_numeric() else nothing


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"

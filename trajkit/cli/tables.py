"""``trajkit head`` and ``trajkit stats``: what is in a file of any table."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import polars as pl
import pyarrow as pa
from cyclopts import Parameter
from rich.cells import cell_len

from trajkit.cli.files import Reads
from trajkit.cli.options import Count, Json, nothing, print_json
from trajkit.cli.screen import Screen, share, shortened, text_table, visible
from trajkit.files.sources import Paths
from trajkit.files.tables import iter_tables, log_files

Tables = Annotated[
    list[str],
    Parameter(
        help="Parquet, Arrow IPC or JSON by suffix, or a directory, for its turns; - is "
        "standard input"
    ),
    Reads("turns"),
]

_MAX_CELL, _SHOWN_ITEMS = 32, 3
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
    facts = summary(stored_tables(source))
    if json:
        print_json(facts)
        return
    screen, totals = Screen(), facts["totals"]
    screen.print(f"{facts['lines']:,} lines\n")
    lines = [_texts(name, one) for name, one in facts["columns"].items()]
    screen.print(f"{text_table(_HEAD, lines)}\n")
    base = next((one for one in _BASES if one in totals), None)
    for name, n in totals.items():
        of_base = name == "tokens trained" and base is not None
        part = f", {share(n, totals[base])} of {base}" if of_base else ""
        screen.print(f"{name}: {n:,}{part}")


def summary(tables: Iterable[pa.Table]) -> dict[str, Any]:
    """The number of lines, the columns and the totals of a table in parts."""
    columns: dict[str, dict[str, Any]] = {}
    sums: dict[str, tuple[int, Any]] = {}
    sessions: set[str] = set()
    totals: Counter[str] = Counter()
    n_lines = 0
    for table in tables:
        n_lines += table.num_rows
        for field, values in zip(table.schema, pl.DataFrame(table), strict=True):
            name, of = field.name, _measured(field.type)
            one = columns.setdefault(
                name,
                {"type": _type_name(field.type), "of": of, "nulls": 0}
                | dict.fromkeys(("min", "mean", "max"))
                | {"names": Counter()},
            )
            one["nulls"] += values.null_count()
            numbers: Any = _numbers(values, of).drop_nulls()
            if len(numbers):
                n, total = sums.get(name, (0, 0))
                sums[name] = n + len(numbers), total + numbers.sum()
                one["mean"] = sums[name][1] / sums[name][0]
                for end, bound in (("min", min), ("max", max)):
                    known = [one[end]] if one[end] is not None else []
                    one[end] = bound([*known, getattr(numbers, end)()])
            short = of == "characters" and (one["max"] or 0) <= _LONGEST_NAME
            if pa.types.is_dictionary(field.type) or short:
                counts = values.drop_nulls().cast(pl.String).value_counts(sort=True)
                one["names"].update(dict(counts.iter_rows()))
            if name == "session_id":
                sessions |= {*values.unique()}
                totals["sessions"] = len(sessions)
            if of == "length" and name in _LENGTHS:
                totals[_LENGTHS[name]] += numbers.sum()
            elif of == "length" and name in _SUMS:
                totals[_SUMS[name]] += int(values.explode().sum() or 0)
    for one in columns.values():
        one["names"] = dict(one["names"].most_common())
    return {"lines": n_lines, "columns": columns, "totals": dict(totals)}


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


def _texts(name: str, column: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a column's line."""
    names = column["names"]
    of = column["of"] if column["min"] is not None else ""
    if names:
        of = ", ".join(f"{visible(value)} {n:,}" for value, n in names.items())
    if len(names) > _MOST_NAMES:
        of = f"{len(names):,} names"
    numbers = [column[end] for end in ("min", "mean", "max")]
    texts = [f"{n:,}" if isinstance(n, int) else f"{n or 0:,.4g}" for n in numbers]
    return (
        shortened(name, 40),
        shortened(column["type"], 24),
        f"{column['nulls']:,}" if column["nulls"] else "",
        *("" if n is None else text for n, text in zip(numbers, texts, strict=True)),
        of,
    )


def _type_name(type_: pa.DataType) -> str:
    if isinstance(type_, _LISTS):
        return f"list of {_type_name(type_.value_type)}"
    if pa.types.is_struct(type_):
        return "struct"
    return "names" if pa.types.is_dictionary(type_) else str(type_)


def _measured(type_: pa.DataType) -> str:
    """What is measured of values."""
    if isinstance(type_, _LISTS):
        return "length"
    if pa.types.is_boolean(type_):
        return "share of true"
    texts = pa.types.is_string(type_) or pa.types.is_large_string(type_)
    return "characters" if texts else "value"


def _numbers(values: pl.Series, of: str) -> pl.Series:
    """The measures of values; none of those that have none."""
    if of == "length":
        lists = values if values.dtype == pl.List else values.arr.to_list()
        return lists.list.len()
    if of == "characters":
        return values.str.len_chars()
    if of == "share of true":
        return values.cast(pl.Int8)
    return values if values.dtype.is_numeric() else values.clear()

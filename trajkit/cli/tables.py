"""``trajkit head`` and ``trajkit stats``: what is in a file of any table."""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import polars as pl
import pyarrow as pa
from cyclopts import Parameter
from rich.cells import cell_len

from trajkit.cli.options import Count, Json, TurnsOrRows, nothing, print_result
from trajkit.cli.screen import Screen, share, shortened, text_table, visible
from trajkit.files.sources import Paths
from trajkit.files.tables import iter_tables, log_files

_MAX_CELL, _SHOWN_ITEMS = 32, 3
_HEAD = ("column", "type", "nulls", "min", "mean", "max", "of")
_MOST_NAMES = 4
# Texts up to this length may be names.
_LONGEST_NAME = 32

# Totals: the column that counts them, and its name for people.
_LENGTHS = {
    "prompt_ids": "prompt tokens",
    "input_ids": "tokens",
    "suffix_ids": "tokens stored",
    "output_ids": "tokens sampled",
    "edge_target": "tokens trained",
}
_SUMS = {"loss_mask": "tokens trained", "suffix_mask": "tokens trained"}


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
    source: TurnsOrRows,
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
    stored = (one for table in stored_tables(source, lines) for one in _records(table))
    records = [*itertools.islice(stored, lines)]
    names = list(dict.fromkeys(itertools.chain.from_iterable(records)))
    cells = {name: [cell(record.get(name)) for record in records] for name in names}
    widths = (max(map(cell_len, [name, *cells[name]])) + 2 for name in names)
    room = 10**9 if screen.width is None else screen.width
    n = sum(end - 2 <= room for end in itertools.accumulate(widths)) or 1
    columns = (cells[name] for name in names[:n])
    screen.print(text_table(names[:n], zip(*columns, strict=True)))
    if names[n:]:
        screen.labelled("more", [(", ".join(names[n:]), "")])


def _records(table: pa.Table) -> Iterator[dict[str, Any]]:
    return (table.slice(k, 1).to_pylist()[0] for k in range(table.num_rows))


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
        items = " ".join(map(_item, value[:_SHOWN_ITEMS]))
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


def stats(source: TurnsOrRows, /, *, json: Json = False) -> None:
    """Summarize the columns of a table.

    Print, for each column of a file of any table, its type, nulls, and the least, mean and
    largest value: of lists and texts the length, of flags the share that is true, of names
    the counts. Then sessions and tokens.
    """
    facts = summary(stored_tables(source))
    totals = facts["totals"]
    lines = [_line(name, one) for name, one in facts["columns"].items()]
    text = f"{facts['lines']:,} lines\n\n{text_table(_HEAD, lines)}\n"
    base = next((one for one in ("tokens", "tokens stored") if one in totals), "")
    for name, n in totals.items():
        text += f"\n{name}: {n:,}"
        if name == "tokens trained" and base:
            text += f", {share(n, totals[base])} of {base}"
    print_result(facts, text, json)


def summary(tables: Iterable[pa.Table]) -> dict[str, Any]:
    """The number of lines, the columns and the totals of a table in parts."""
    columns: dict[str, dict[str, Any]] = {}
    names: dict[str, Counter[str]] = {}
    totals: Counter[str] = Counter()
    # a number for each value: its length, if it is a list or a text
    parts: list[pl.DataFrame] = []
    for table in tables:
        measures = []
        for field, values in zip(table.schema, pl.DataFrame(table), strict=True):
            name, (of, numbers) = field.name, _measured(values)
            measures.append(numbers.alias(name))
            kind = {"type": _type_name(field.type), "of": of, "nulls": 0}
            columns.setdefault(name, kind)["nulls"] += values.null_count()
            own = names.setdefault(name, Counter())
            longest: Any = numbers.max() if of == "characters" else None
            short = longest is not None and longest <= _LONGEST_NAME
            if name == "session_id" or values.dtype == pl.Categorical or short:
                counts = values.drop_nulls().cast(pl.String).value_counts()
                own.update(dict(counts.iter_rows()))
            if name in _SUMS and of == "length":
                totals[_SUMS[name]] += int(values.explode().sum() or 0)
        parts.append(pl.DataFrame(measures))
    whole = pl.concat(parts, how="diagonal_relaxed")
    if "session_id" in names:
        totals["sessions"] = len(names["session_id"])
    for name, column in columns.items():
        numbers = whole[name]
        column |= {"min": numbers.min(), "mean": numbers.mean(), "max": numbers.max()}
        column["names"] = dict(names[name].most_common())
        if column["of"] == "length" and name in _LENGTHS:
            totals[_LENGTHS[name]] += int(numbers.sum())
    # in one order, whatever that of the columns
    known = ("sessions", *_LENGTHS.values())
    ordered = {name: totals[name] for name in known if name in totals}
    return {"lines": len(whole), "columns": columns, "totals": ordered}


def _measured(values: pl.Series) -> tuple[str, pl.Series]:
    """What is measured of values, and the measures; null for those that have none."""
    if values.dtype == pl.List:
        return "length", values.list.len()
    if values.dtype == pl.Array:
        return "length", values.arr.to_list().list.len()
    if values.dtype == pl.Boolean:
        return "share of true", values.cast(pl.Int8)
    if values.dtype == pl.String:
        return "characters", values.str.len_chars()
    nothing = pl.repeat(None, len(values), dtype=pl.Int64, eager=True)
    return "value", values if values.dtype.is_numeric() else nothing


def _type_name(type_: pa.DataType) -> str:
    if isinstance(type_, pa.ListType | pa.LargeListType | pa.FixedSizeListType):
        return f"list of {_type_name(type_.value_type)}"
    if pa.types.is_struct(type_):
        return "struct"
    return "names" if pa.types.is_dictionary(type_) else str(type_)


def _line(name: str, column: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a column's line."""
    names = column["names"]
    of = "" if column["min"] is None else column["of"]
    if len(names) > _MOST_NAMES:
        of = f"{len(names):,} names"
    elif names:
        of = ", ".join(f"{visible(value)} {n:,}" for value, n in names.items())
    numbers = [column[end] for end in ("min", "mean", "max")]
    return (
        shortened(name, 40),
        shortened(column["type"], 24),
        f"{column['nulls']:,}" if column["nulls"] else "",
        *(_number(n) for n in numbers),
        of,
    )


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"

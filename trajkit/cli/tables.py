"""``trajkit head`` and ``trajkit stats``: what is in a file of any table."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Annotated, Any

import polars as pl
import pyarrow as pa
from cyclopts import Parameter

from trajkit.cli import options as opt
from trajkit.cli.screen import Screen, share, shortened, text_table, visible
from trajkit.files.sources import Paths
from trajkit.files.tables import iter_tables, log_files

# texts up to this length may be names; of more names than this, the number is shown
_LONGEST_NAME, _MOST_NAMES = 32, 4
# columns of a screen for a column of a table
_CELL = 14

# Totals: what people call the lengths of lists, or the number of true flags.
_TOTALS = {
    "prompt_ids": "prompt tokens",
    "input_ids": "tokens",
    "suffix_ids": "tokens stored",
    "output_ids": "tokens sampled",
    "edge_target": "tokens trained",
    "loss_mask": "tokens trained",
    "suffix_mask": "tokens trained",
}
_MASKS = ("loss_mask", "suffix_mask")


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
    largest value: of lists and texts the length, of flags the share that is true, of names
    the counts. Then sessions and tokens.
    """
    facts = summary(stored_tables(source))
    totals = facts["totals"]
    head = ("column", "type", "nulls", "min", "mean", "max", "of")
    lines = [_line(name, one) for name, one in facts["columns"].items()]
    text = f"{facts['lines']:,} lines\n\n{text_table(head, lines)}\n"
    base = next((one for one in ("tokens", "tokens stored") if one in totals), "")
    for name, n in totals.items():
        text += f"\n{name}: {n:,}"
        if name == "tokens trained" and base:
            text += f", {share(n, totals[base])} of {base}"
    opt.print_result(facts, text, json)


def summary(tables: Iterable[pa.Table]) -> dict[str, Any]:
    """The number of lines, the columns and the totals of a table in parts."""
    columns: dict[str, dict[str, Any]] = {}
    names: dict[str, Counter[str]] = {}
    masks: Counter[str] = Counter()
    # a number for each value: its length, if it is a list or a text
    parts: list[pl.DataFrame] = []
    for table in tables:
        measures = []
        for field, values in zip(table.schema, pl.DataFrame(table), strict=True):
            name, (of, numbers) = field.name, _measured(values)
            measures.append(numbers.alias(name))
            kind = {"type": _type_name(field.type), "of": of, "nulls": 0}
            columns.setdefault(name, kind)["nulls"] += values.null_count()
            own, longest = names.setdefault(name, Counter()), _LONGEST_NAME
            if of == "characters":
                longest = int(numbers.max() or 0)  # type: ignore[arg-type]
            is_name = values.dtype == pl.Categorical or of == "characters"
            if (is_name and longest <= _LONGEST_NAME) or name == "session_id":
                own.update(
                    dict(values.drop_nulls().cast(pl.String).value_counts().rows())
                )
            if name in _MASKS and of == "length":
                masks[name] += int(values.explode().sum() or 0)
        parts.append(pl.DataFrame(measures))
    whole = pl.concat(parts, how="diagonal_relaxed")
    totals = {"sessions": len(names["session_id"])} if "session_id" in names else {}
    for name, column in columns.items():
        numbers = whole[name]
        column |= {"min": numbers.min(), "mean": numbers.mean(), "max": numbers.max()}
        column["names"] = dict(names[name].most_common())
    for name, words in _TOTALS.items():
        if name in columns and columns[name]["of"] == "length":
            totals[words] = masks[name] if name in _MASKS else int(whole[name].sum())
    return {"lines": len(whole), "columns": columns, "totals": totals}


def _measured(values: pl.Series) -> tuple[str, pl.Series]:
    """What is measured of values, and the measures; null for those that have none."""
    if values.dtype == pl.Array:
        values = values.arr.to_list()
    if values.dtype == pl.List:
        return "length", values.list.len()
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


def _line(name: str, column: dict[str, Any]) -> list[str]:
    """The cells of a column's line."""
    names = column["names"]
    of = "" if column["min"] is None else column["of"]
    if len(names) > _MOST_NAMES:
        of = f"{len(names):,} names"
    elif names:
        of = ", ".join(f"{visible(value)} {n:,}" for value, n in names.items())
    cells = [f"{column['nulls']:,}" if column["nulls"] else ""]
    for value in (column[end] for end in ("min", "mean", "max")):
        text = f"{value:,}" if isinstance(value, int) else f"{value or 0:,.4g}"
        cells.append("" if value is None else text)
    return [shortened(name, 40), shortened(column["type"], 24), *cells, of]

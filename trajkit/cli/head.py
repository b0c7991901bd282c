"""``trajkit head``: the first lines of a file of any table."""

import argparse
import itertools
from collections.abc import Iterator

import pyarrow as pa

from trajkit.cli.options import command, nothing
from trajkit.cli.terminal import Screen, columns, shortened
from trajkit.io.sources import Paths
from trajkit.io.tables import iter_tables, log_files

_MAX_CELL = 32
_SHOWN_ITEMS = 3


TABLE = """
source TABLE...  Parquet, Arrow IPC or JSON by suffix, or a directory, for its turns; - is
                 standard input
"""
"""The file of a table, as an option."""


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


@command(
    "head",
    f"""
print the first lines of a table

Print the first lines of a file of any table: turns, rows, packs, links, drift, sessions, a
report. Lists are shortened, and columns that do not fit are named below.
{TABLE}
-n N 10  number of lines (default: %(default)s)
""",
)
def run(arguments: argparse.Namespace) -> None:
    """Print the lines."""
    screen = Screen.of_stdout(colour=True)
    wanted, tables = arguments.n, []
    for table in stored_tables(arguments.source, arguments.n):
        tables.append(table.slice(0, wanted))
        wanted -= tables[-1].num_rows
        if wanted == 0:
            break
    names = list(dict.fromkeys(name for table in tables for name in table.column_names))
    lines = [line for table in tables for line in table.to_pylist()]
    cells = {name: [name, *(cell(line.get(name)) for line in lines)] for name in names}
    widths = {name: max(map(columns, texts)) for name, texts in cells.items()}
    room = 10**9 if screen.width is None else screen.width
    fitting = itertools.accumulate(widths[name] + 2 for name in names)
    shown = [name for name, end in zip(names, fitting, strict=True) if end - 2 <= room]
    shown = shown or names[:1]
    screen.print_table(
        [[cells[name][k] for name in shown] for k in range(len(lines) + 1)]
    )
    if len(shown) < len(names):
        screen.print_labelled("more", [(", ".join(names[len(shown) :]), "")])


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

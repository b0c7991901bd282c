"""What tables are made of: columns with their types, null rules and rules."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

SCHEMA_VERSION = 3
# versions that are read
SCHEMA_VERSIONS = (2, 3)

NAMES = pa.dictionary(pa.int8(), pa.string())
"""The type of a column with a small set of names."""

Rows: TypeAlias = npt.NDArray[np.int64]
Fault: TypeAlias = tuple[Rows, Callable[[int], str]]
"""Rows that break a rule, and a function that explains the k-th of them."""

Check: TypeAlias = Callable[[pa.Table], Iterator[Fault]]
"""A rule of a table in canonical form. It may rely on the rules before it."""

Rule: TypeAlias = Callable[[str, pa.Table], Iterator[Fault]]
"""A rule of a column, given its name and the table."""


class Column(NamedTuple):
    """A column and its rules."""

    field: pa.Field
    rules: tuple[Rule, ...] = ()


def required(name: str, type_: pa.DataType, *rules: Rule) -> Column:
    """A column without nulls."""
    return Column(pa.field(name, type_, nullable=False), rules)


def column(name: str, type_: pa.DataType, *rules: Rule) -> Column:
    """A column in which null means unknown or none."""
    return Column(pa.field(name, type_), rules)


def all_required(type_: pa.DataType, names: str) -> tuple[Column, ...]:
    """Columns of one type without nulls."""
    return tuple(required(name, type_) for name in names.split())


_CHECKS: dict[pa.Schema, tuple[tuple[str | None, Check], ...]] = {}


def table(
    kind: str, *columns: Column | pa.Field, rules: tuple[Check, ...] = ()
) -> pa.Schema:
    """A schema of these columns, whose ``rules`` come after those of its columns."""
    own = [one if isinstance(one, Column) else Column(one) for one in columns]
    schema = pa.schema(
        [one.field for one in own],
        metadata={"trajkit.table": kind, "trajkit.version": str(SCHEMA_VERSION)},
    )
    of_columns = [
        (field.name, partial(rule, field.name)) for field, of in own for rule in of
    ]
    _CHECKS[schema] = (*of_columns, *((None, rule) for rule in rules))
    return schema


def checks_of(
    schema: pa.Schema, columns: tuple[str, ...] | None = None
) -> tuple[Check, ...]:
    """The rules of a table, or those of some of its columns alone."""
    return tuple(
        check for name, check in _CHECKS[schema] if columns is None or name in columns
    )


def defined(text: str) -> tuple[str, ...]:
    """The names that a text defines: those in the lines above its indented ones."""
    lines = re.findall(r"^([a-z_]+(?:, [a-z_]+)*)\n +\S", text, re.MULTILINE)
    return tuple(name for line in lines for name in line.split(", "))


TURN = (required("session_id", pa.string()), required("turn_index", pa.int32()))
"""The columns that say which turn a line is about."""

"""polars, imported on first use; the functions that need it raise ArgumentError without."""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from trajkit.errors import ArgumentError


def __getattr__(name: str) -> Any:
    try:
        import polars
    except ModuleNotFoundError:
        raise ArgumentError("this needs polars: pip install 'trajkit[look]'") from None
    return getattr(polars, name)


def frame(table: pa.Table, names: Sequence[str] | None = None) -> Any:
    """A table, or some of its columns, as a polars DataFrame."""
    return __getattr__("from_arrow")(table if names is None else table.select(names))

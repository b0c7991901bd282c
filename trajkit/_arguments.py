"""What callers pass: misspelled names, and tables and arrays of other libraries.

Nothing here imports another library. Objects are known by their methods.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import lru_cache
from operator import index
from typing import Any, get_args

import numpy as np
import pyarrow as pa

from trajkit.errors import ArgumentError, SchemaError

# From this likeness (difflib's ratio) on, a name is taken for a misspelled one, or
# another is suggested.
_MISSPELLED, _SUGGESTED = 0.85, 0.7
# names of other systems
_MEANT = {
    **dict.fromkeys(("score", "scores", "return", "returns"), "reward"),
    **dict.fromkeys(("group", "groups"), "group_id"),
    # keys of `trajkit.from_records`
    "prompt_messages": "messages",
    "response_message": "response",
}


@lru_cache(maxsize=1024)
def near_miss(
    name: str, known: tuple[str, ...], alike: float = _MISSPELLED
) -> str | None:
    """The known name that ``name`` is a misspelling of, or None."""
    if _MEANT.get(name) in known:
        return _MEANT[name]
    from difflib import get_close_matches  # takes a millisecond to import

    plain = {each.lower().replace("-", "_"): each for each in known}
    near = get_close_matches(name.lower().replace("-", "_"), plain, 1, alike)
    return plain[near[0]] if near else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for a name like a known one, else an empty text."""
    if not isinstance(name, str):
        return ""
    near = near_miss(name, tuple(known), _SUGGESTED)
    return "" if near is None else f" (did you mean {near!r}?)"


def check_choice(
    name: str, value: object, known: Any, error: type[ArgumentError] = ArgumentError
) -> None:
    """Raise ``error`` unless ``known``, names or a Literal type, contains the value."""
    names: tuple[str, ...] = get_args(known) or tuple(known)
    if not isinstance(value, str) or value not in names:
        raise error(
            f"{name}={value!r}{did_you_mean(value, names)}: expected one of "
            f"{', '.join(map(repr, names))}"
        )


def chosen_int(
    name: str,
    value: object,
    least: int = -(2**63),
    error: type[ArgumentError] = ArgumentError,
) -> int:
    """An integer of 64 bits, ``least`` or more; a bool is none. Else raises ``error``."""
    with suppress(TypeError):
        number = index(value)  # type: ignore[arg-type]
        if not isinstance(value, bool) and least <= number < 2**63:
            return number
    rule = f"of {least} or more" if least > -(2**63) else "of 64 bits"
    raise error(f"{name}={value!r}: expected an integer {rule}")


def check_number(
    name: str, value: object, least: float, *, above: bool = False
) -> None:
    """Raise ArgumentError unless a number is finite and ``least`` or, with ``above``,
    more.
    """
    number = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not number or not least <= float(value) < np.inf or (above and value == least):  # type: ignore[arg-type]
        rule = f"above {least}" if above else f"of {least} or more"
        raise ArgumentError(f"{name}={value!r}: expected a finite number {rule}")


def check_flag(name: str, value: object) -> None:
    """Raise ArgumentError unless the value is a bool."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name}={value!r}: expected True or False")


def chosen_names(
    name: str, value: object, error: type[ArgumentError] = ArgumentError
) -> tuple[str, ...]:
    """A list or tuple of names, such as those of columns; else raises ``error``."""
    if isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value):
        return tuple(value)
    raise error(f"{name}={value!r}: expected a sequence of names")


def arrow_source(given: Any) -> pa.Table | Any | None:
    """A table of any library as an object of the Arrow C stream interface; None for no
    table.

    That is an object with ``__arrow_c_stream__`` (pyarrow, polars, pandas, DuckDB), a
    polars LazyFrame, a Dataset of the library datasets, a BatchEncoding or another
    mapping of columns, or a list of dicts. An index of pandas is no column.
    """
    if isinstance(given, pa.RecordBatch | pa.Table | pa.RecordBatchReader):
        return given
    is_column = hasattr(given, "dtype") or isinstance(given, pa.ChunkedArray)
    if hasattr(given, "__arrow_c_stream__") and not is_column:
        if not hasattr(given, "iloc"):
            return given
        table = pa.RecordBatchReader.from_stream(given).read_all()
        names = [n for n in table.column_names if not n.startswith("__index_level_")]
        return table.select(names).replace_schema_metadata(None)
    if hasattr(given, "collect_schema"):  # a LazyFrame
        return given.collect()
    if hasattr(given, "with_format") and hasattr(given, "num_rows"):  # a Dataset
        table = given.with_format("arrow")[:]
        return table.replace_schema_metadata(None)
    if isinstance(given, list | tuple):
        if not all(isinstance(record, Mapping) for record in given) or not given:
            return None
        names = list(dict.fromkeys(name for record in given for name in record))
        given = {name: [record.get(name) for record in given] for name in names}
    if isinstance(given, Mapping) and all(isinstance(name, str) for name in given):
        try:
            return pa.table({name: _column(values) for name, values in given.items()})
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise SchemaError(f"these columns make no Arrow table: {error}") from None
    return None


def _column(values: Any) -> pa.Array:
    values = plain_array(values)
    if isinstance(values, np.ndarray) and values.ndim > 1:
        values = list(values)
    if isinstance(values, list):
        values = [plain_array(value) for value in values]
    return pa.array(values)


def plain_array(values: Any) -> Any:
    """A tensor as a numpy array, token ids of a BatchEncoding; else the object itself.

    A tensor of torch is detached and copied from its device. One of bfloat16, which
    numpy does not have, becomes float32. Of a BatchEncoding with one row, its row.
    Errors are those of the tensor's library.
    """
    if isinstance(values, Mapping) and "input_ids" in values:
        values = plain_array(values["input_ids"])
        if len(values) == 1 and not np.isscalar(values[0]):
            values = values[0]
    if hasattr(values, "detach") and hasattr(values, "cpu"):
        values = values.detach().cpu()
        try:
            return values.numpy()
        except TypeError:
            return values.float().numpy()
    return values


def whole_number(value: object) -> object:
    """A float of pandas as an integer if it is whole, as None if it is NaN."""
    if isinstance(value, float) and (value != value or value.is_integer()):
        return None if value != value else int(value)
    return value

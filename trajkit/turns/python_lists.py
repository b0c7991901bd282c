"""Token ids and logprobs of Python lists and arrays as flat buffers."""

from collections.abc import Mapping
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import plain_array
from trajkit.errors import InvalidTurnsError

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
ID_RULE = "token ids are integers in [0, 2**31)"


class ListBuilder:
    """A column of lists of numbers, list by list."""

    def __init__(self, type_: pa.DataType) -> None:
        self._type = type_
        self._values = bytearray()
        self._offsets = [0]
        self._null_lists: list[int] = []
        self._null_values: list[npt.NDArray[np.int64]] = []

    def append(
        self,
        values: npt.NDArray[np.generic] | None,
        valid: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Append a list (None: a null), whose values are null where ``valid`` is 0."""
        start = stop = self._offsets[-1]
        if values is None:
            self._null_lists.append(len(self._offsets) - 1)
        else:
            self._values += values.data
            stop += len(values)
        if valid is not None:
            self._null_values.append(start + np.flatnonzero(valid == 0))
        self._offsets.append(stop)

    def lists(self) -> pa.LargeListArray:
        """The column; values are not copied."""
        nulls, mask = None, None
        if self._null_values:
            nulls = np.zeros(self._offsets[-1], np.bool_)
            nulls[np.concatenate(self._null_values)] = True
        if self._null_lists:
            mask = np.zeros(len(self._offsets) - 1, np.bool_)
            mask[self._null_lists] = True
            mask = pa.array(mask)
        values = np.frombuffer(self._values, self._type.value_type.to_pandas_dtype())
        return pa.LargeListArray.from_arrays(
            pa.array(self._offsets, pa.int64()),
            pa.array(values, mask=nulls),
            type=self._type,
            mask=mask,
        )


def _is_flat(values: object, dtype: np.dtype[Any]) -> bool:
    """Whether it is a contiguous array; a subclass may mean more by it, as masks do."""
    return (
        type(values) is np.ndarray
        and values.dtype is dtype
        and values.ndim == 1
        and values.flags.c_contiguous
    )


def read_ids(values: object, what: str) -> npt.NDArray[np.int32]:
    """Token ids as a contiguous array. An int32 array is returned unchecked.

    ``what`` is their name in errors: ``session 'a', turn 7: prompt_ids``. Raises
    InvalidTurnsError for a value that is no token id.
    """
    if _is_flat(values, _INT32):
        return values  # type: ignore[return-value]  # the usual case, tested first
    array = _as_array(values, what, "integers")
    if not isinstance(array, list):
        if array.dtype.kind not in "iu":
            raise InvalidTurnsError(f"{what} is of {array.dtype}: {ID_RULE}")
        numbers: npt.NDArray[np.integer] = array  # type: ignore[assignment]
        bad = (numbers < 0) | (numbers > 0x7FFFFFFF)
        if bad.any():
            at = int(bad.argmax())
            raise InvalidTurnsError(f"{what}[{at}] is {numbers[at]}: {ID_RULE}")
        return numbers.astype(np.int32)
    ids = np.empty(len(array), np.int32)
    # the kernel stops at a value that is not an int; numpy integers are read here
    for k in range(_core.unbox_ids(array, ids), len(array)):
        value = array[k]
        try:
            plain = -1 if isinstance(value, (bool, np.bool_)) else index(value)  # type: ignore[arg-type]
        except TypeError:
            plain = -1
        if not 0 <= plain <= 0x7FFFFFFF:
            raise InvalidTurnsError(f"{what}[{k}] is {value!r}: {ID_RULE}")
        ids[k] = plain
    return ids


def checked_ids(values: object, what: str) -> npt.NDArray[np.int32]:
    """As `read_ids`, with every value checked."""
    ids = read_ids(values, what)
    if ids.min(initial=0) < 0:
        at = int((ids < 0).argmax())
        raise InvalidTurnsError(f"{what}[{at}] is {ids[at]}: {ID_RULE}")
    return ids


def read_logprobs(
    values: object, n_outputs: int, where: str
) -> tuple[npt.NDArray[np.float32] | None, npt.NDArray[np.uint8] | None]:
    """The logprobs of a call, and which are not null (None: all).

    None for None and for an empty list. Raises InvalidTurnsError if they are not
    numbers, or not one per output id.
    """
    if values is None:
        return None, None
    if _is_flat(values, _FLOAT32) and len(values) == n_outputs > 0:  # type: ignore[arg-type]
        return values, None  # type: ignore[return-value]
    array = _as_array(values, f"{where}output_logprobs", "numbers")
    if len(array) == 0:
        return None, None
    if len(array) != n_outputs:
        raise InvalidTurnsError(
            f"{where}{len(array)} logprobs for {n_outputs} output ids"
        )
    if isinstance(array, list):
        numbers, valid = np.empty(n_outputs, np.float32), np.empty(n_outputs, np.uint8)
        at = _core.unbox_logprobs(array, numbers, valid)
        for k in range(at, n_outputs):
            numbers[k], valid[k] = _logprob(array[k], f"{where}output_logprobs[{k}]")
        return numbers, None if valid.all() else valid
    if array.dtype.kind not in "fiu":
        raise InvalidTurnsError(
            f"{where}output_logprobs is of {array.dtype}: logprobs are numbers"
        )
    with np.errstate(over="ignore"):  # becomes infinite, which is refused later
        return np.ascontiguousarray(array, np.float32), None


def _logprob(value: object, what: str) -> tuple[float, bool]:
    """A logprob of any numeric type, and whether it is not None."""
    if value is None:
        return 0.0, False
    if isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(
        value, bool
    ):
        with np.errstate(over="ignore"):
            try:
                return float(np.float32(value)), True
            except OverflowError:  # an int that exceeds every float
                return float("inf") if value > 0 else float("-inf"), True
    raise InvalidTurnsError(
        f"{what} is {value!r}: logprobs are numbers{_unpack(value)}"
    )


def _unpack(value: object) -> str:
    """A hint how to extract numbers from an engine's own format of logprobs."""
    how = None
    if isinstance(value, Mapping) and "content" in value:
        how = "OpenAI's shape: [one['logprob'] for one in logprobs['content']]"
    elif isinstance(value, Mapping) and "logprob" in value:
        how = "OpenAI's shape: [one['logprob'] for one in content]"
    elif isinstance(value, Mapping):
        how = "vLLM's shape: [one[i].logprob for one, i in zip(logprobs, output_ids)]"
    elif isinstance(value, list | tuple):
        how = "SGLang's shape: [one[0] for one in output_token_logprobs]"
    return "" if how is None else f". This may be {how}"


def _as_array(
    values: object, what: str, expected: str
) -> list[object] | npt.NDArray[np.generic]:
    if isinstance(values, list):
        return values
    if type(values) is np.ndarray and values.ndim == 1:  # not a subclass
        return values
    if isinstance(values, (tuple, range)):
        return list(values)
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return values.to_numpy() if values.null_count == 0 else values.to_pylist()  # type: ignore[no-any-return]
    try:
        values = plain_array(values)
    except Exception as error:  # any error of the tensor's library
        raise InvalidTurnsError(
            f"{what} is a {type(values).__name__} that cannot be copied: {error}"
        ) from None
    if isinstance(values, list):
        return values
    if isinstance(values, (str, bytes, bytearray)):
        array = None
    elif isinstance(values, np.ma.MaskedArray):
        return list(values.tolist())  # None where masked
    elif isinstance(values, np.ndarray):
        array = values
    else:
        array = _from_buffer(values)
    if array is None:
        raise InvalidTurnsError(
            f"{what} is of type {type(values).__name__}: expected a list or an "
            f"array of {expected}{_unpack(values) if expected == 'numbers' else ''}"
        )
    if array.ndim != 1:
        raise InvalidTurnsError(
            f"{what} has the shape {array.shape}: expected one dimension"
        )
    return array


def _from_buffer(values: object) -> npt.NDArray[np.generic] | None:
    try:
        view = memoryview(values)  # type: ignore[arg-type]
    except TypeError:
        # tensors and other objects that numpy can convert
        return np.asarray(values) if hasattr(values, "__array__") else None
    # bytes may be wider integers that lost their type
    return None if view.itemsize == 1 else np.asarray(view)

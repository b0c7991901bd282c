"""Copy token ids and logprobs from Python lists and arrays into flat buffers."""

from collections.abc import Mapping
from operator import index
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import plain_array
from trajkit.errors import InvalidTurnsError

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
ID_RULE = "token ids are integers in [0, 2**31)"


_Number = TypeVar("_Number", bound=np.generic)


class ListBuilder(Generic[_Number]):
    """Lists of numbers, appended to arrays that are never copied.

    Parameters
    ----------
    dtype : type
        ``np.int32`` or ``np.float32``.
    """

    # elements of the first array; each next one is four times as large, up to 64 MiB.
    # Unwritten pages cost nothing, but every array costs its reader time.
    _FIRST, _LARGEST = 1 << 16, 1 << 24

    def __init__(self, dtype: type[_Number]) -> None:
        self._type = pa.large_list(pa.from_numpy_dtype(dtype))
        self._chunks: list[pa.Array] = []
        self._begin(np.empty(0, dtype))

    def _begin(self, values: npt.NDArray[_Number]) -> None:
        self._values = values
        self._offsets = [0]
        self._null_lists: list[int] = []
        self._null_values: list[npt.NDArray[np.int64]] = []

    def append(self, length: int) -> npt.NDArray[_Number]:
        """Append a list whose values are undefined."""
        start = self._offsets[-1]
        if len(self._values) - start < length:
            start, size = 0, self._FIRST << 2 * len(self._chunks)
            self._finish()
            size = max(min(size, self._LARGEST), length)
            self._begin(np.empty(size, self._values.dtype))
        self._offsets.append(start + length)
        return self._values[start : start + length]

    def append_null(self) -> None:
        """Append a null."""
        self.append(0)
        self._null_lists.append(len(self._offsets) - 2)

    def null_values(self, valid: npt.NDArray[np.uint8]) -> None:
        """Make the values of the last list null where ``valid`` is 0."""
        self._null_values.append(self._offsets[-2] + np.flatnonzero(valid == 0))

    def _finish(self) -> None:
        """Make an Arrow array of the lists since the last one, if there are any."""
        if len(self._offsets) == 1:
            return
        nulls, mask = None, None
        if self._null_values:
            nulls = np.zeros(self._offsets[-1], np.bool_)
            nulls[np.concatenate(self._null_values)] = True
        if self._null_lists:
            mask = np.zeros(len(self._offsets) - 1, np.bool_)
            mask[self._null_lists] = True
            mask = pa.array(mask)
        values = pa.array(self._values[: self._offsets[-1]], mask=nulls)
        offsets = pa.array(self._offsets, pa.int64())
        self._chunks.append(
            pa.LargeListArray.from_arrays(offsets, values, type=self._type, mask=mask)
        )

    def lists(self) -> pa.ChunkedArray:
        """The lists as ``large_list``, without a copy of the values."""
        self._finish()
        return pa.chunked_array(self._chunks, self._type)


def write_ids(
    builder: ListBuilder[np.int32], values: object, where: str, name: str
) -> int:
    """Append token ids to a builder and return their number.

    Parameters
    ----------
    values : list, tuple, range, or array or buffer of integers
    where, name : str
        For the error: ``session 'a', turn 7: `` and the field.

    Raises
    ------
    InvalidTurnsError
        A value is not a token id.
    """
    array = _as_array(values, f"{where}{name}", "integers")
    _fill_ids(array, builder.append(len(array)), f"{where}{name}")
    return len(array)


def read_ids(values: object, where: str, name: str) -> npt.NDArray[np.int32]:
    """Token ids as a contiguous array. An int32 array is returned unchecked.

    Parameters and errors as for `write_ids`.
    """
    if type(values) is np.ndarray and values.dtype is _INT32 and values.ndim == 1:
        return np.ascontiguousarray(values)  # the usual case, tested first
    if isinstance(values, np.ndarray) and values.dtype == np.int32 and values.ndim == 1:
        return np.ascontiguousarray(values)
    array = _as_array(values, f"{where}{name}", "integers")
    ids = np.empty(len(array), np.int32)
    _fill_ids(array, ids, f"{where}{name}")
    return ids


def _fill_ids(
    values: list[object] | npt.NDArray[np.generic],
    out: npt.NDArray[np.int32],
    what: str,
) -> None:
    if isinstance(values, list):
        _fill_id_list(values, out, what)
        return
    if values.dtype.kind not in "iu":
        raise InvalidTurnsError(f"{what} is of {values.dtype}: {ID_RULE}")
    numbers: npt.NDArray[np.integer] = values  # type: ignore[assignment]
    if numbers.dtype == np.int32 and numbers.min(initial=0) >= 0:
        out[:] = numbers  # in range without asking twice for each
        return
    bad = (numbers < 0) | (numbers > 0x7FFFFFFF)
    if bad.any():
        at = int(bad.argmax())
        raise InvalidTurnsError(f"{what}[{at}] is {numbers[at]}: {ID_RULE}")
    out[:] = numbers


def _fill_id_list(values: list[object], out: npt.NDArray[np.int32], what: str) -> None:
    at = _core.unbox_ids(values, out)
    # the kernel stops at a value that is not an int; numpy integers are read here
    for k in range(at, len(values)):
        value = values[k]
        try:
            plain = -1 if isinstance(value, (bool, np.bool_)) else index(value)  # type: ignore[arg-type]
        except TypeError:
            plain = -1
        if not 0 <= plain <= 0x7FFFFFFF:
            raise InvalidTurnsError(f"{what}[{k}] is {value!r}: {ID_RULE}")
        out[k] = plain


def write_logprobs(
    builder: ListBuilder[np.float32], values: object, n_outputs: int, where: str
) -> None:
    """Append the logprobs of a call to a builder; None and an empty list become null.

    Raises
    ------
    InvalidTurnsError
        They are not numbers, or not one per output id.
    """
    array = given_logprobs(values, n_outputs, where)
    if array is None:
        builder.append_null()
        return
    valid = fill_logprobs(array, builder.append(n_outputs), where)
    if valid is not None:
        builder.null_values(valid)


def given_logprobs(
    values: object, n_outputs: int, where: str
) -> list[object] | npt.NDArray[np.generic] | None:
    """The logprobs of a call, one per output id; None for None and for an empty list.

    Errors as for `write_logprobs`.
    """
    if values is None:
        return None
    array = _as_array(values, f"{where}output_logprobs", "numbers")
    if len(array) == 0:
        return None
    if len(array) != n_outputs:
        raise InvalidTurnsError(
            f"{where}{len(array)} logprobs for {n_outputs} output ids"
        )
    return array


def fill_logprobs(
    values: list[object] | npt.NDArray[np.generic],
    out: npt.NDArray[np.float32],
    where: str,
) -> npt.NDArray[np.uint8] | None:
    """Copy logprobs to ``out`` and return which are not null (None: all).

    Errors as for `write_logprobs`.
    """
    if isinstance(values, list):
        valid = np.empty(len(values), np.uint8)
        at = _core.unbox_logprobs(values, out, valid)
        for k in range(at, len(values)):
            out[k], valid[k] = _logprob(values[k], f"{where}output_logprobs[{k}]")
        return None if valid.all() else valid
    if values.dtype == np.float32:
        out[:] = values
    elif values.dtype.kind in "fiu":
        with np.errstate(over="ignore"):  # becomes infinite, which is refused later
            out[:] = values
    else:
        raise InvalidTurnsError(
            f"{where}output_logprobs is of {values.dtype}: logprobs are numbers"
        )
    return None


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

"""Token ids and logprobs of Python lists and arrays as flat buffers."""

from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from trajkit import _core
from trajkit._arguments import plain_array
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.tables.ragged import Ints, Ragged, offsets_of

_INT32, _FLOAT32 = np.dtype(np.int32), np.dtype(np.float32)
ID_RULE = "token ids are integers in [0, 2**31)"

Valid = npt.NDArray[np.uint8] | None
"""0 where a number is null; None: nowhere."""


def lists_of(
    parts: Sequence[bytes | memoryview | None],
    type_: pa.DataType,
    valid: Sequence[Valid] = (),
) -> pa.LargeListArray:
    """A column of lists of four-byte numbers, given their bytes; None is null."""
    null = np.array([part is None for part in parts], np.bool_)
    sizes = [0 if part is None else len(part) // 4 for part in parts]
    dtype = type_.value_type.to_pandas_dtype()
    values, mask = np.frombuffer(b"".join(filter(None, parts)), dtype), None
    if any(one is not None for one in valid):
        mask = np.zeros(len(values), np.bool_)
        for one, stop, n in zip(valid, np.cumsum(sizes), sizes, strict=True):
            if one is not None:
                mask[stop - n : stop] = one == 0
    lists = Ragged(pa.array(values, mask=mask), offsets_of(sizes))
    return lists.to_arrow(null, type_)


def _is_flat(values: object, dtype: np.dtype[Any]) -> bool:
    """Whether it is a contiguous array; a subclass may mean more by it, as masks do."""
    return (
        type(values) is np.ndarray
        and values.dtype is dtype
        and values.ndim == 1
        and values.flags.c_contiguous
    )


def read_ids(values: object, what: str) -> Ints:
    """Token ids as a contiguous array. An int32 array is returned unchecked.

    ``what`` is their name in errors: ``session 'a', turn 7: prompt_ids``. Raises
    InvalidTurnsError for a value that is no token id.
    """
    if _is_flat(values, _INT32):
        return values  # type: ignore[return-value]  # the usual case, tested first
    array = _as_array(values, what, "integers")
    if not isinstance(array, list):
        if array.dtype.kind not in "iu" and len(array):
            raise InvalidTurnsError(f"{what} is of {array.dtype}: {ID_RULE}")
        numbers: npt.NDArray[np.integer] = array  # type: ignore[assignment]
        bad = (numbers < 0) | (numbers > 0x7FFFFFFF)
        if bad.any():
            at = int(bad.argmax())
            raise InvalidTurnsError(f"{what}[{at}] is {numbers[at]}: {ID_RULE}")
        return np.ascontiguousarray(numbers, np.int32)
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


def checked_ids(values: object, what: str) -> Ints:
    """As `read_ids`, with every value checked."""
    ids = read_ids(values, what)
    if ids.min(initial=0) < 0:
        at = int((ids < 0).argmax())
        raise InvalidTurnsError(f"{what}[{at}] is {ids[at]}: {ID_RULE}")
    return ids


def lcp(a: object, b: object) -> int:
    """Length of the longest common prefix of two arrays of token ids.

    Parameters
    ----------
    a, b : int32 array, shape (n_tokens,)
        Contiguous int32 arrays are read in place; do not write to them during the call.
        Other lists, arrays and buffers are converted.

    Returns
    -------
    int
        0 if either is empty.

    Raises
    ------
    ArgumentError
        A value is no token id, or an array has more than one dimension.
    """
    try:
        return _core.lcp(read_ids(a, "a"), read_ids(b, "b"))
    except InvalidTurnsError as error:
        raise ArgumentError(str(error)) from None


def read_logprobs(
    values: object, n_outputs: int, where: str
) -> tuple[npt.NDArray[np.float32] | None, Valid]:
    """The logprobs of a call, and which are not null.

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
        words = f"{where}output_logprobs is of {array.dtype}: logprobs are numbers"
        raise InvalidTurnsError(words)
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
    if isinstance(value, Mapping) and "content" in value:
        how = "OpenAI's shape: [one['logprob'] for one in logprobs['content']]"
    elif isinstance(value, Mapping) and "logprob" in value:
        how = "OpenAI's shape: [one['logprob'] for one in content]"
    elif isinstance(value, Mapping):
        how = "vLLM's shape: [one[i].logprob for one, i in zip(logprobs, output_ids)]"
    elif isinstance(value, list | tuple):
        how = "SGLang's shape: [one[0] for one in output_token_logprobs]"
    else:
        return ""
    return f". This may be {how}"


def _as_array(
    values: object, what: str, expected: str
) -> list[object] | npt.NDArray[np.generic]:
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
    if isinstance(values, np.ma.MaskedArray):
        return list(values.tolist())  # None where masked
    array = values if isinstance(values, np.ndarray) else _from_buffer(values)
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
    """The numbers of a buffer or tensor; None for text, and for bytes.

    Bytes may be wider integers that lost their type.
    """
    try:
        view = memoryview(values)  # type: ignore[arg-type]
    except TypeError:
        return np.asarray(values) if hasattr(values, "__array__") else None
    return None if view.itemsize == 1 else np.asarray(view)

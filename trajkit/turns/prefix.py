"""Longest common prefix of two arrays of token ids."""

import numpy as np
import numpy.typing as npt

from trajkit import _core


def lcp(a: npt.ArrayLike, b: npt.ArrayLike) -> int:
    """Length of the longest common prefix of two arrays of token ids.

    Parameters
    ----------
    a, b : int32 array, shape (n_tokens,)
        Contiguous arrays and buffers of int32 are read in place; do not write to them
        during the call. Other values are converted.

    Returns
    -------
    int
        0 if either is empty.

    Raises
    ------
    ValueError
        An array has more than one dimension.
    OverflowError
        An id does not fit int32.
    """
    return _core.lcp(_ids(a), _ids(b))


def _ids(run: npt.ArrayLike) -> npt.NDArray[np.int32]:
    array = np.asarray(run)
    if array.dtype != np.int32:
        wide = array.astype(np.int64, casting="same_kind" if array.size else "unsafe")
        if wide.size and not (-(2**31) <= wide.min() and wide.max() < 2**31):
            raise OverflowError(f"token id {wide.max()}: ids are below 2**31")
        array = wide.astype(np.int32)
    return np.ascontiguousarray(array)

"""Longest common prefix of two arrays of token ids."""

from __future__ import annotations  # a signature shows the words below

import numpy as np
import numpy.typing as npt

from trajkit import _core
from trajkit.errors import ArgumentError


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
    ArgumentError
        An array has other values than integers that fit int32, or more than one
        dimension.
    """
    return _core.lcp(_ids("a", a), _ids("b", b))


def _ids(name: str, run: npt.ArrayLike) -> npt.NDArray[np.int32]:
    try:
        array = np.asarray(run)
    except ValueError:  # lists of several lengths
        array = np.empty((0, 0))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ArgumentError(f"{name}={run!r}: expected a list or an array of token ids")
    if array.dtype != np.int32:
        bad = (array < -(2**31)) | (array >= 2**31)
        if bad.any():
            at = int(bad.argmax())
            raise ArgumentError(f"{name}[{at}] is {array[at]}: ids are below 2**31")
        array = array.astype(np.int32)
    return np.ascontiguousarray(array)

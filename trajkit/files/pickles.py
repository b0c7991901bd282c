"""Pickles, and files of torch.save, read without calling what they name.

Tensors become numpy arrays, numpy's numbers those of Python, anything else an `Unknown`.
torch is not needed.
"""

import io
import pickle
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trajkit.errors import FormatError

_STORAGES = {
    "ByteStorage": "u1",
    "CharStorage": "i1",
    "ShortStorage": "<i2",
    "IntStorage": "<i4",
    "LongStorage": "<i8",
    "BoolStorage": "?",
    "HalfStorage": "<f2",
    "FloatStorage": "<f4",
    "DoubleStorage": "<f8",
}


class Unknown:
    """An object of any other class."""

    def __init__(self, *given: object, **named: object) -> None:
        pass

    def __repr__(self) -> str:
        return "an object of unknown class"

    def _ignore(self, *given: object) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _ignore


ARRAYS = (".pt", ".pkl", ".pickle")
"""Suffixes of the files that `read_arrays` reads."""


def read_arrays(file: Path) -> object:
    """The rows in a file that `load` reads."""
    value = load(file)
    return value.get("samples", value) if isinstance(value, dict) else value


def load(file: Path) -> object:
    """The value in a file of ``torch.save`` (its zip form) or of ``pickle.dump``."""
    try:
        if not zipfile.is_zipfile(file):
            with file.open("rb") as opened:
                return _Unpickler(opened, None).load()
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            found = [name for name in names if name.endswith("/data.pkl")]
            if len(found) != 1:
                raise FormatError(f"{file}: a zip file not of torch.save: unpack it")
            folder = found[0].removesuffix("data.pkl")
            order = f"{folder}byteorder"
            if order in names and archive.read(order) != b"little":
                raise FormatError(f"{file}: it is not little-endian")
            values = io.BytesIO(archive.read(found[0]))
            return _Unpickler(
                values, lambda key: archive.read(f"{folder}data/{key}")
            ).load()
    # damaged opcodes and zip fields can raise almost anything
    except Exception as error:
        # raised above, or the file cannot be opened
        if isinstance(error, FormatError) or getattr(error, "filename", None):
            raise
        text = str(error) or type(error).__name__
        raise FormatError(f"{file}: not a readable pickle: {text}") from None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, storage: Callable[[str], bytes] | None) -> None:
        super().__init__(file)
        self._storage = storage

    def find_class(self, module: str, name: str) -> object:
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        return _KNOWN.get((module, name), Unknown)

    def persistent_load(self, pid: object) -> object:
        if self._storage is None or not isinstance(pid, tuple) or len(pid) < 3:
            raise pickle.UnpicklingError(f"{pid!r} is not a storage")
        _, type_, key, *_ = pid
        if type_ not in _STORAGES:
            return Unknown()
        return np.frombuffer(self._storage(str(key)), _STORAGES[type_])


class _Rebuild:
    """torch's ``_rebuild_tensor_v2``, which a pickle may call, and use in no other way.

    A tensor is a view of a storage, with strides in items.
    """

    def __call__(
        self, storage: object, offset: int, size: Any, stride: Any, *_: object
    ) -> object:
        if not isinstance(storage, np.ndarray):
            return Unknown()
        steps = [step * storage.itemsize for step in stride]
        start = offset * storage.itemsize
        # numpy refuses what is beyond the storage
        return np.ndarray(size, storage.dtype, storage, start, steps).copy()

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a function has no state")


class _DType:
    """numpy's dtype of a number; its state is its byte order, and the like."""

    def __init__(self, name: object = "", *_: object) -> None:
        is_known = isinstance(name, str) and re.fullmatch("b1|[iuf][1248]", name)
        self.dtype = np.dtype(str(name)) if is_known and name != "f1" else None

    def __setstate__(self, state: Any) -> None:
        if state[1] == ">":
            self.dtype = None


class _Scalar(_Rebuild):
    """numpy's ``scalar``: a number becomes one of Python."""

    def __call__(self, kind: object, raw: object = b"", *_: object) -> object:
        dtype = kind.dtype if isinstance(kind, _DType) else None
        if dtype is None or not isinstance(raw, bytes) or len(raw) != dtype.itemsize:
            return Unknown()
        return np.frombuffer(raw, dtype).tolist()[0]


_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_KNOWN: dict[tuple[str, str], object] = {
    **{(module, "scalar"): _Scalar() for module in _NUMPY},
    ("numpy", "dtype"): _DType,
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _Rebuild(),
}

"""Read files of ``torch.save`` and ``pickle`` as data, without calling what they name.

Loading a pickle calls the classes and functions that it names. Here each name becomes a
harmless object: tensors and arrays become numpy arrays, anything else an `Unknown`, which
ignores its arguments. torch is not needed.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Sequence
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

    def _ignore(self, *given: object) -> None:
        pass

    __setstate__ = __setitem__ = append = extend = add = _ignore


def load(file: Path) -> object:
    """The value in a file of ``torch.save`` (its zip form) or of ``pickle.dump``."""
    import zipfile  # nothing else needs it

    try:
        if not zipfile.is_zipfile(file):
            with file.open("rb") as opened:
                return _Reader(opened, None).load()
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            (top,) = (name for name in names if name.endswith("/data.pkl"))
            folder = top.removesuffix("data.pkl")
            order = f"{folder}byteorder"
            if order in names and archive.read(order) != b"little":
                raise FormatError(f"{file}: it is not little-endian")
            values = io.BytesIO(archive.read(top))
            return _Reader(
                values, lambda key: archive.read(f"{folder}data/{key}")
            ).load()
    # damaged opcodes and zip fields can raise almost anything
    except Exception as error:
        # raised above, or the file cannot be opened
        if isinstance(error, FormatError) or getattr(error, "filename", None):
            raise
        text = str(error) or type(error).__name__
        raise FormatError(f"{file}: not a readable pickle: {text}") from None


def plain(value: object) -> object:
    """The numpy array of a shell; any other value unchanged."""
    return value.array if isinstance(value, _Shell) else value


class _Reader(pickle.Unpickler):
    def __init__(self, file: BinaryIO, storage: Callable[[str], bytes] | None) -> None:
        super().__init__(file)
        self._storage = storage

    def find_class(self, module: str, name: str) -> object:
        if module in ("torch", "torch.storage") and name.endswith("Storage"):
            return name
        return _KNOWN.get((module, name), Unknown)

    def persistent_load(self, pid: object) -> object:
        """The numbers of a tensor, from a type name and a file name."""
        if self._storage is None or not isinstance(pid, tuple) or len(pid) < 3:
            raise pickle.UnpicklingError(f"{pid!r} is not a storage")
        _, type_, key, *_ = pid
        if type_ not in _STORAGES:
            return Unknown()
        return np.frombuffer(self._storage(str(key)), _STORAGES[type_])


class _Made:
    """A function that a pickle may call, and use in no other way."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[..., object]) -> None:
        self._make = make

    def __call__(self, *given: object) -> object:
        return self._make(*given)

    def __setstate__(self, state: object) -> None:
        raise pickle.UnpicklingError("a function has no state")


def _tensor(
    storage: object, offset: int, size: Sequence[int], stride: Sequence[int], *_: object
) -> object:
    """torch's ``_rebuild_tensor_v2``: a view of a storage, with strides in items."""
    if not isinstance(storage, np.ndarray):
        return Unknown()
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if min([offset, *size, *stride]) < 0 or (0 not in size and last >= len(storage)):
        raise pickle.UnpicklingError("a tensor beyond its storage")
    steps = [step * storage.itemsize for step in stride]
    start = offset * storage.itemsize
    return np.ndarray(size, storage.dtype, storage, start, steps).copy()


class _Type:
    """A numpy dtype of numbers."""

    __slots__ = ("_text",)

    def __init__(self, text: str, *_: object) -> None:
        self._text = text

    def __setstate__(self, state: Sequence[object]) -> None:
        if state[1] == ">":
            self._text = f">{self._text}"

    def numbers(self, data: bytes) -> np.ndarray:
        found = np.dtype(self._text)
        if found.kind not in "biuf":
            raise pickle.UnpicklingError(f"an array of {found}")
        return np.frombuffer(data, found)


class _Shell:
    """A numpy array that is empty until its state is set."""

    __slots__ = ("array",)

    def __init__(self, *_: object) -> None:
        self.array: object = Unknown()

    def __setstate__(self, state: Sequence[Any]) -> None:
        _, shape, type_, by_column, data = state
        if isinstance(type_, _Type) and isinstance(data, bytes):
            order: Any = "F" if by_column else "C"
            self.array = type_.numbers(data).reshape(shape, order=order)


def _scalar(type_: object, data: object) -> object:
    known = isinstance(type_, _Type) and isinstance(data, bytes)
    return type_.numbers(data)[0].item() if known else Unknown()  # type: ignore[attr-defined]


_KNOWN: dict[tuple[str, str], object] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): tuple,
    ("torch._utils", "_rebuild_tensor_v2"): _Made(_tensor),
    # bytes, which pickle protocol 2 writes as latin1 text
    ("_codecs", "encode"): _Made(lambda text, codec: text.encode("latin1")),
    ("numpy", "dtype"): _Made(_Type),
    **{
        (f"numpy.{core}.multiarray", name): _Made(make)
        for core in ("core", "_core")
        for name, make in (("_reconstruct", _Shell), ("scalar", _scalar))
    },
}

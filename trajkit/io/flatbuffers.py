"""The metadata of Arrow IPC messages and files: flatbuffers (Message.fbs, File.fbs)."""

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# field numbers of Message, DictionaryBatch, RecordBatch and Footer
HEADER_TYPE, HEADER, BODY_LENGTH = 1, 2, 3
DATA = 1
LENGTH, NODES, BUFFERS, COMPRESSION = 0, 1, 2, 3
DICTIONARIES, BATCHES = 2, 3
# values of HEADER_TYPE
DICTIONARY, RECORDS = 2, 3

NODE = np.dtype([("length", "<i8"), ("nulls", "<i8")])
BUFFER = np.dtype([("offset", "<i8"), ("size", "<i8")])
BLOCK = np.dtype([("offset", "<i8"), ("head", "<i4"), ("_", "<i4"), ("body", "<i8")])


class Flatbuffer:
    """Tables that refer to their fields through a list of offsets.

    Arrays are views of the data, which begins at ``at``. A reference past the end of the
    data raises ArrowInvalid.
    """

    def __init__(self, data: bytes | bytearray, at: int = 0) -> None:
        self._data = data
        self.root = self._follow(at)

    def field(self, table: int, number: int) -> int | None:
        """The position of a field, or None."""
        offsets = table - self._number("<i", table)
        at = 4 + 2 * number
        if at + 2 > self._number("<H", offsets):
            return None
        offset = self._number("<H", offsets + at)
        return table + offset if offset else None

    def table(self, table: int, number: int) -> int | None:
        """The position of a table that a field refers to, or None."""
        at = self.field(table, number)
        return None if at is None else self._follow(at)

    def byte(self, table: int, number: int) -> int:
        """The byte in a field; 0 without the field."""
        at = self.field(table, number)
        return 0 if at is None else self._number("<B", at)

    def longs(self, table: int, number: int) -> npt.NDArray[np.int64]:
        """The integer of 64 bits in a field; shape (1,), or (0,) without the field."""
        at = self.field(table, number)
        return np.zeros(0, np.int64) if at is None else self._array("<i8", 1, at)

    def records(self, table: int, number: int, dtype: np.dtype[Any]) -> Any:
        """A list of structs; shape (n_structs,)."""
        at = self.table(table, number)
        if at is None:
            return np.zeros(0, dtype)
        return self._array(dtype, self._number("<I", at), at + 4)

    def _follow(self, at: int) -> int:
        return at + self._number("<I", at)

    def _number(self, form: str, at: int) -> int:
        try:
            (number,) = struct.unpack_from(form, self._data, at)
        except struct.error as error:
            raise pa.ArrowInvalid(f"a header is cut off: {error}") from None
        return int(number)

    def _array(self, dtype: Any, n: int, at: int) -> Any:
        try:
            return np.frombuffer(self._data, dtype, n, at)
        except ValueError as error:
            raise pa.ArrowInvalid(f"a header is cut off: {error}") from None

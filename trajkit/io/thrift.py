"""Integers in thrift's compact protocol, which frames the metadata of Parquet files.

pyarrow aborts the process on invalid metadata of a column, so the footer is read
here. Field numbers are those of parquet.thrift.
"""

import pyarrow as pa

_MAX_DEPTH = 12
_MAX_FIELD = (1 << 15) - 1
# kinds of values
_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _TEXT, _LIST = range(1, 10)
_STRUCT = 12


class ThriftStruct:
    """The integers in a struct, by the path of field numbers and places in lists.

    A field of another kind than its reader asks for counts as missing, as in thrift's own
    readers. A field that is stated twice is refused. An IndexError means that the data end
    before the struct does.
    """

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.n_bytes = 0
        self._numbers: dict[tuple[int, ...], tuple[int, int]] = {}
        self._read_struct(())

    def i32(self, *path: int) -> int:
        """The i32 at a path; 0 if it is missing or negative."""
        return self._count(_I32, path)

    def i64(self, *path: int) -> int:
        """The i64 at a path; 0 if it is missing or negative."""
        return self._count(_I64, path)

    def _count(self, kind: int, path: tuple[int, ...]) -> int:
        found, number = self._numbers.get(path, (kind, 0))
        return max(number, 0) if found == kind else 0

    def _byte(self) -> int:
        self.n_bytes += 1
        return self._data[self.n_bytes - 1]

    def _read_struct(self, path: tuple[int, ...]) -> None:
        field = 0
        while kind := self._byte():
            field = field + (kind >> 4) if kind >> 4 else self._signed()
            if not 0 < field <= _MAX_FIELD:
                raise pa.ArrowInvalid(f"Parquet metadata has a field {field}")
            kind &= 15
            if kind not in (_TRUE, _FALSE):  # the kind is the value
                self._read_value(kind, (*path, field))

    def _read_list(self, path: tuple[int, ...]) -> None:
        head = self._byte()
        n = head >> 4 if head >> 4 < 15 else self._unsigned()
        for k in range(n):
            self._read_value(head & 15, (*path, k))

    def _read_value(self, kind: int, path: tuple[int, ...]) -> None:
        if kind in (_I16, _I32, _I64):
            if path in self._numbers:
                raise pa.ArrowInvalid(f"Parquet metadata states field {path} twice")
            self._numbers[path] = kind, self._signed()
        elif kind == _TEXT:
            size = self._unsigned()
            self.n_bytes += size
        elif kind == _DOUBLE:
            self.n_bytes += 8
        elif kind in (_TRUE, _FALSE, _BYTE):
            self._byte()
        elif kind == _LIST and len(path) < _MAX_DEPTH:
            self._read_list(path)
        elif kind == _STRUCT and len(path) < _MAX_DEPTH:
            self._read_struct(path)
        else:
            raise pa.ArrowInvalid(f"Parquet metadata has a field of the kind {kind}")

    def _signed(self) -> int:
        number = self._unsigned()
        return number >> 1 ^ -(number & 1)

    def _unsigned(self) -> int:
        number = shift = 0
        while (byte := self._byte()) & 128 and shift < 63:
            number |= (byte & 127) << shift
            shift += 7
        return (number | (byte & 127) << shift) & ((1 << 64) - 1)

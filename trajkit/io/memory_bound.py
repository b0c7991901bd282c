"""A bound on the memory of one batch, checked before the batch is decompressed.

A few kilobytes can decompress to gigabytes. A file states the sizes in front of its
compressed bytes. Arrow allocates as much, and a codec writes no more. In an IPC message the
sizes precede the buffers (BodyCompression in Arrow's Message.fbs); in Parquet they are in
the headers of pages (PageHeader in parquet.thrift, compact protocol).
"""

import struct
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from trajkit.errors import FormatError
from trajkit.io import flatbuffers as fb
from trajkit.io.formats import bytes_limit
from trajkit.io.thrift import ThriftStruct

MAX_BATCH_BYTES = "TRAJKIT_MAX_BATCH_BYTES"
"""The environment variable with the bound."""
_DEFAULT = 4 << 30
# a body up to this size is read at once, of a larger one only the lengths
_SMALL_BODY = 1 << 20
# field numbers of PageHeader, and of the headers of data pages (5, 8)
_UNCOMPRESSED, _COMPRESSED, _N_VALUES = 2, 3, 1
_DATA_PAGES = (5, 8)
# field numbers of FileMetaData, RowGroup, ColumnChunk and ColumnMetaData
_GROUPS, _COLUMNS, _METADATA = 4, 1, 3
_ALL_COMPRESSED, _FIRST_DATA_PAGE, _DICTIONARY_PAGE = 7, 9, 11
# bytes of a value in memory; a text has an offset
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "INT96": 12}
_LEVELS = 4
_MAX_PAGE_HEADER = 16 << 20


class MemoryBound:
    """Raises FormatError before a batch of a file that needs more than the bound."""

    def __init__(self, source: pa.NativeFile, name: str) -> None:
        self._source, self._name = source, name
        self._most = bytes_limit(MAX_BATCH_BYTES, _DEFAULT)

    def check_stream(self) -> None:
        """Check the next batch of an IPC stream, with the dictionaries before it."""
        start = at = self._source.tell()
        n_bytes, kind = 0, fb.DICTIONARY
        try:
            while kind != fb.RECORDS and (message := self._message(at)) is not None:
                kind, size, at = message
                n_bytes += size
        finally:
            self._source.seek(start)  # Arrow asks for it after reads at a position
        self._check(n_bytes, f"the batch at byte {start}")

    def check_file(self) -> list[int]:
        """Check the dictionaries of an IPC file; return where its batches start."""
        size = self._source.size()
        (n_footer,) = struct.unpack("<i", self._read(size - 10, 4))
        footer = fb.Flatbuffer(self._read(size - 10 - n_footer, n_footer))
        dictionaries, batches = (
            footer.records(footer.root, field, fb.BLOCK)["offset"].tolist()
            for field in (fb.DICTIONARIES, fb.BATCHES)
        )
        self._check(sum(map(self._size_at, dictionaries)), "its dictionaries")
        return list(batches)

    def check_batch(self, start: int) -> None:
        """Check the batch of an IPC file that starts at this byte."""
        self._check(self._size_at(start), f"the batch at byte {start}")

    def check_row_group(self, schema: Any, group: int, columns: Iterable[int]) -> None:
        """Check the columns of a Parquet row group.

        A value that a page repeats counts with its width and its levels; a text that it
        repeats counts as an offset.
        """
        n_bytes = 0
        for k in columns:
            type_ = schema.column(k)
            width = _WIDTHS.get(type_.physical_type, 8)
            if type_.physical_type == "FIXED_LEN_BYTE_ARRAY":
                width = type_.length
            size, at, first = (
                self._footer.i64(_GROUPS, group, _COLUMNS, k, _METADATA, field)
                for field in (_ALL_COMPRESSED, _FIRST_DATA_PAGE, _DICTIONARY_PAGE)
            )
            # a column may lack a data page (it has no values) or a dictionary
            if first and not 0 < at < first:
                at = first
            stop = at + size
            while at < stop and (page := self._page(at, stop)):
                n_values = sum(page.i32(k, _N_VALUES) for k in _DATA_PAGES)
                n_bytes += page.i32(_UNCOMPRESSED) + n_values * (width + _LEVELS)
                at += page.n_bytes + page.i32(_COMPRESSED)
        self._check(n_bytes, f"row group {group}")

    @cached_property
    def _footer(self) -> ThriftStruct:
        """FileMetaData of a Parquet file that Arrow could open."""
        end = self._source.size() - 8
        (size,) = struct.unpack("<I", self._read(end, 4))
        try:
            return ThriftStruct(self._read(end - size, size))
        except IndexError:
            raise pa.ArrowInvalid("the footer is cut off") from None

    def _check(self, n_bytes: int, what: str) -> None:
        if n_bytes > self._most:
            raise FormatError(
                f"{self._name}: {what} needs {n_bytes} bytes of memory, more than "
                f"{self._most}: set the environment variable {MAX_BATCH_BYTES} to allow "
                "more"
            )

    def _read(self, at: int, size: int) -> bytes:
        return bytes(self._source.read_at(size, at))

    def _size_at(self, start: int) -> int:
        message = self._message(start)
        return 0 if message is None else message[1]

    def _message(self, at: int) -> tuple[int, int, int] | None:
        """Kind, decompressed bytes and end of a message; None at the end of a stream.

        A message that is cut off has no bytes that could be decompressed.
        """
        head = self._read(at, 8)
        marker = 4 if head[:4] == b"\xff\xff\xff\xff" else 0  # none before Arrow 0.15
        if len(head) < 8:
            return None
        (n_header,) = struct.unpack_from("<i", head, marker)
        at += marker + 4
        header = self._read(at, max(n_header, 0))
        if n_header <= 0 or len(header) < n_header:
            return None
        data = fb.Flatbuffer(header)
        kind = data.byte(data.root, fb.HEADER_TYPE)
        batch = data.table(data.root, fb.HEADER)
        body = at + n_header
        n_body = max(sum(data.longs(data.root, fb.BODY_LENGTH).tolist()), 0)
        if kind == fb.DICTIONARY and batch is not None:
            batch = data.table(batch, fb.DATA)
        if kind not in (fb.DICTIONARY, fb.RECORDS) or batch is None:
            return kind, 0, body + n_body
        size = n_body
        if data.field(batch, fb.COMPRESSION) is not None:
            buffers = data.records(batch, fb.BUFFERS, fb.BUFFER)
            size = self._decompressed(body, n_body, buffers)
        return kind, size, body + n_body

    def _decompressed(self, body: int, n_body: int, buffers: Any) -> int:
        """The bytes of a compressed body after decompression, as its buffers state them."""
        buffers = buffers[buffers["size"] >= 8]
        starts = buffers["offset"]
        if n_body <= _SMALL_BODY and not (starts % 8).any():
            content = self._read(body, n_body // 8 * 8)
            if len(content) < n_body // 8 * 8:  # the file is cut off here
                return 0
            words = np.frombuffer(content, "<i8")
            if len(starts) and not 0 <= starts.min() <= starts.max() < 8 * len(words):
                raise pa.ArrowInvalid("a buffer lies outside its message")
            stated = words[starts // 8]
        else:
            prefixes = [self._read(body + start, 8) for start in starts.tolist()]
            stated = np.frombuffer(b"".join(p.ljust(8) for p in prefixes), "<i8")
        return sum(np.where(stated < 0, buffers["size"], stated).tolist())

    def _page(self, at: int, stop: int) -> ThriftStruct | None:
        """The header of a page; None if it is cut off."""
        size = 256
        while size <= _MAX_PAGE_HEADER:
            data = self._read(at, min(size, stop - at))
            try:
                return ThriftStruct(data)
            except IndexError:
                if len(data) < size:
                    return None
                size *= 16
        return None

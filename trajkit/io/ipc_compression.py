"""Batches as Arrow IPC messages of which only what shrinks is compressed, for logs.

Arrow compresses every buffer of a batch, or none. A turn has a few large ones, of token
ids and logprobs, and a hundred of a few bytes: compressed, these take twice the room and
nearly all of the time. The format (BodyCompression in Arrow's Message.fbs) lets a buffer
of a compressed body stand as it is, behind a length of -1.
"""

import struct

import numpy as np
import numpy.typing as npt
import pyarrow as pa

# shorter buffers stand as they are: a frame of zstd has a dozen bytes of its own
_LEAST = 256
_AS_IT_IS = struct.pack("<q", -1)
# Of a message: the mark, and the length of what tells of its body. Of the flatbuffer tables
# Message and RecordBatch: which of their fields these are.
_HEAD = 8
_HEADER, _BODY_LENGTH = 2, 3
_LENGTH, _NODES, _BUFFERS = 0, 1, 2


class Squeezer:
    """What serializes the batches of a schema.

    Parameters
    ----------
    schema : Schema
        Of no dictionaries, which are messages of their own, and no views, whose number of
        buffers differs.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._codec = pa.Codec("zstd")
        # The messages of a schema differ in numbers only. One that Arrow made has the rest,
        # that the body is compressed above all; of no row it would lack a length.
        row = [pa.nulls(1, type_) for type_ in schema.types]
        nullable = pa.schema([field.with_nullable(True) for field in schema])
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, nullable, options=options) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(row, schema=nullable))
        data = sink.getvalue()
        self._told = _Told(memoryview(data)[nullable.serialize().size :])

    def __call__(self, batch: pa.RecordBatch) -> pa.Buffer:
        """The message of a batch.

        Raises
        ------
        ValueError
            The batch has no rows: its message says of none how many there are.
        """
        if not batch.num_rows:
            raise ValueError("a batch without rows is no part of a log")
        plain = batch.serialize()
        data = memoryview(plain)
        told = _Told(data)
        made = _Told(self._told.data)
        made.length[:], made.nodes[:] = told.length, told.nodes
        body = bytearray()
        places = []
        whole = data[told.size :]
        for start, size in told.places.tolist():
            piece = self._piece(whole[start : start + size])
            places.append((len(body), len(piece)))
            body += piece
            body += bytes(-len(body) % 8)
        made.places[:] = places
        made.body_length[:] = len(body)
        return pa.py_buffer(made.data + body)

    def _piece(self, buffer: memoryview) -> bytes:
        """A buffer of a compressed body: its length, and what it is compressed to."""
        if not buffer:
            return b""
        if len(buffer) >= _LEAST:
            squeezed: bytes = self._codec.compress(buffer, asbytes=True)
            if len(squeezed) < len(buffer):
                return struct.pack("<q", len(buffer)) + squeezed
        return _AS_IT_IS + buffer


class _Told:
    """What stands before the body of a batch's message: a copy, and numbers in it.

    Attributes
    ----------
    data : bytearray
    size : int
        Where the body starts.
    length, body_length : ndarray of int64, shape (1,)
        Rows of the batch; bytes of the body.
    nodes : ndarray of int64, shape (n_nodes, 2)
        Of each array: its length, and how many of it are null.
    places : ndarray of int64, shape (n_buffers, 2)
        Where in the body each buffer starts, and how many bytes it has.
    """

    def __init__(self, message: bytes | bytearray | memoryview) -> None:
        self.size = _HEAD + int.from_bytes(message[4:8], "little")
        self.data = bytearray(message[: self.size])
        top = self._target(_HEAD)
        self.body_length = self._longs(self._field(top, _BODY_LENGTH), 1)
        batch = self._target(self._field(top, _HEADER))
        self.length = self._longs(self._field(batch, _LENGTH), 1)
        self.nodes = self._pairs(self._target(self._field(batch, _NODES)))
        self.places = self._pairs(self._target(self._field(batch, _BUFFERS)))

    # Of flatbuffers: tables and vectors stand so far behind the place that points at them;
    # before a table stands, or is shared with another, where each of its fields is.

    def _target(self, at: int) -> int:
        (distance,) = struct.unpack_from("<I", self.data, at)
        return at + int(distance)

    def _field(self, table: int, number: int) -> int:
        (back,) = struct.unpack_from("<i", self.data, table)
        (offset,) = struct.unpack_from("<H", self.data, table - back + 4 + 2 * number)
        return table + int(offset)

    def _longs(self, at: int, n: int) -> npt.NDArray[np.int64]:
        return np.frombuffer(self.data, "<i8", n, at)

    def _pairs(self, vector: int) -> npt.NDArray[np.int64]:
        (n,) = struct.unpack_from("<I", self.data, vector)
        return self._longs(vector + 4, 2 * n).reshape(n, 2)

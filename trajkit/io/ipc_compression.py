"""Arrow IPC messages in which each buffer is compressed only if that makes it smaller.

Arrow compresses all buffers of a batch, or none. The batch of a turn has a few large ones
(token ids, logprobs) and a hundred of a few bytes, which compression doubles. The format
(BodyCompression in Arrow's Message.fbs) allows an uncompressed buffer after a length of -1.
For the turns of a 131,072-token rollout in delta form this takes 0.15 ms a turn instead of
0.53 ms with Arrow's zstd, and 5 % fewer bytes; Arrow's lz4 takes 0.16 ms and 24 % more.
"""

import struct

import pyarrow as pa

from trajkit.io import flatbuffers as fb

# shorter buffers are not compressed: a zstd frame adds a dozen bytes
_MIN_BYTES = 256
_UNCOMPRESSED = struct.pack("<q", -1)
# to a multiple of 8 bytes
_PADDING = [bytes(-n % 8) for n in range(8)]
# bytes of a message before its header: continuation marker and header length
_HEAD = 8


class IpcCompressor:
    """Serializes record batches of one schema.

    The schema has no dictionaries, which are messages of their own, and no views, whose
    number of buffers varies.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._codec = pa.Codec("zstd")
        # Messages of one schema differ only in numbers, so a compressed message of Arrow
        # is the template. It has a row, because an empty batch lacks the length field.
        row = [pa.nulls(1, type_) for type_ in schema.types]
        nullable = pa.schema([field.with_nullable(True) for field in schema])
        sink = pa.BufferOutputStream()
        options = pa.ipc.IpcWriteOptions(compression="zstd")
        with pa.ipc.new_stream(sink, nullable, options=options) as writer:
            writer.write_batch(pa.RecordBatch.from_arrays(row, schema=nullable))
        data = sink.getvalue()
        self._template = _IpcHeader(memoryview(data)[nullable.serialize().size :])

    def __call__(self, batch: pa.RecordBatch) -> pa.Buffer:
        """The message of a batch, which has rows: otherwise it lacks the length field."""
        if not batch.num_rows:
            raise ValueError("a batch without rows cannot be written to a log")
        data = memoryview(batch.serialize())
        source = _IpcHeader(data)
        made = _IpcHeader(self._template.data)
        made.length[:], made.nodes[:] = source.length, source.nodes
        pieces: list[bytes | bytearray | memoryview] = [made.data]
        locations, end = [], 0
        for start, size in source.buffers.tolist():
            length = 0
            # of an empty buffer the length is not written either
            if size:
                buffer: bytes | memoryview = data[source.size + start :][:size]
                head = _UNCOMPRESSED
                if size >= _MIN_BYTES:
                    smaller = self._codec.compress(buffer, asbytes=True)
                    if len(smaller) < size:
                        head, buffer = struct.pack("<q", size), smaller
                length = len(head) + len(buffer)
                pieces += head, buffer, _PADDING[length % 8]
            locations.append((end, length))
            end += length + -length % 8
        made.buffers[:] = locations
        made.body_length[:] = end
        return pa.py_buffer(b"".join(pieces))


class _IpcHeader:
    """The header of a batch's message: a copy, and views of the numbers in it.

    ``size`` is the offset of the body; ``length`` and ``body_length`` have one element,
    ``nodes`` one per array, and ``buffers`` one per buffer.
    """

    def __init__(self, message: memoryview | bytearray) -> None:
        self.size = _HEAD + int.from_bytes(message[4:8], "little")
        self.data = bytearray(message[: self.size])
        header = fb.Flatbuffer(self.data, _HEAD)
        batch = header.table(header.root, fb.HEADER) or 0
        self.body_length = header.longs(header.root, fb.BODY_LENGTH)
        self.length = header.longs(batch, fb.LENGTH)
        self.nodes = header.records(batch, fb.NODES, fb.NODE)
        self.buffers = header.records(batch, fb.BUFFERS, fb.BUFFER)

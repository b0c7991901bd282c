"""Messages of which only what shrinks is compressed: what Arrow reads of them."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajkit._arrow.take import empty_batch
from trajkit.io.ipc_compression import IpcCompressor
from trajkit.schema import MESSAGE

SCHEMA = pa.schema(
    [
        pa.field("name", pa.string(), nullable=False),
        pa.field("ids", pa.large_list(pa.int32())),
        pa.field("shown", pa.large_list(pa.bool_())),
        pa.field("messages", pa.large_list(MESSAGE)),
        pa.field("response", MESSAGE),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("none", pa.null()),
    ],
    metadata={"of": "a test"},
)

texts = st.text(max_size=3) | st.integers(0, 900).map(lambda n: "so " * n)
said = st.fixed_dictionaries(
    {
        "key": st.binary(min_size=16, max_size=16),
        "role": texts,
        "body": st.none() | texts,
    }
)
# runs of one number, which shrink, and any numbers, which may not
numbers = st.lists(st.integers(0, 2**31 - 1), max_size=5) | st.integers(0, 900).map(
    lambda n: [7] * n
)
rows = st.fixed_dictionaries(
    {
        "name": texts,
        "ids": st.none() | numbers,
        "shown": st.none() | st.integers(0, 9000).map(lambda n: [True, False] * n),
        "messages": st.none() | st.lists(st.none() | said, max_size=3),
        "response": st.none() | said,
        "at": st.none() | st.datetimes(),
    }
)


def zipped(batch):
    """What the stream of a batch is as Arrow compresses it."""
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.ipc.new_stream(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch)
    return sink.getvalue()


@given(st.lists(st.lists(rows, min_size=1, max_size=3), max_size=3))
def test_arrow_reads_what_was_squeezed(drawn):
    squeeze = IpcCompressor(SCHEMA)
    batches = [pa.RecordBatch.from_pylist(some, SCHEMA) for some in drawn]
    pieces = [squeeze(batch).to_pybytes() for batch in batches]
    assert all(len(piece) % 8 == 0 for piece in pieces)
    data = SCHEMA.serialize().to_pybytes() + b"".join(pieces)
    with pa.ipc.open_stream(data) as reader:
        found = list(reader)
    assert found == batches
    for batch in found:
        batch.validate(full=True)


def test_large_buffers_are_compressed_and_small_ones_stand_as_they_are():
    ids = pa.array([[7] * 10_000], SCHEMA.field("ids").type)
    batch = pa.RecordBatch.from_arrays([ids], ["ids"])
    plain = batch.serialize().size
    assert IpcCompressor(batch.schema)(batch).size < plain // 50
    noise = np.random.default_rng(0).integers(0, 2**31, 100, np.int32)
    ids = pa.array([noise], SCHEMA.field("ids").type)
    batch = pa.RecordBatch.from_arrays([ids], ["ids"])
    # a length for each of two buffers, and that the body may be compressed
    assert (
        IpcCompressor(batch.schema)(batch).size <= batch.serialize().size + 2 * 8 + 24
    )


def test_no_rows_are_refused():
    with pytest.raises(ValueError, match="without rows"):
        IpcCompressor(SCHEMA)(empty_batch(SCHEMA))

"""Columns handed to Arrow in one call."""

import gc
import weakref

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given

from tests.strategies import batch_columns
from trajkit import _core
from trajkit.tables.export import Column, record_batch


@given(batch_columns())
def test_a_batch_has_the_columns_that_were_handed_over(case):
    fields, columns, expected = case
    schema = pa.schema(fields)
    batch = record_batch(schema, len(expected[0]), columns)
    batch.validate(full=True)
    assert batch.schema == schema
    assert [column.to_pylist() for column in batch.columns] == expected


def test_buffers_live_as_long_as_the_batch_and_no_longer():
    class Counted(np.ndarray):
        pass

    values = np.arange(4, dtype=np.int32).view(Counted)
    alive = weakref.ref(values)
    schema = pa.schema([pa.field("n", pa.int32())])
    batch = record_batch(schema, 4, [Column(4, (None, values))])
    del values
    gc.collect()
    assert alive() is not None
    column = batch.column(0)
    del batch
    assert column.to_pylist() == [0, 1, 2, 3]
    del column
    gc.collect()
    assert alive() is None


NO_BUFFER = (TypeError, ValueError, BufferError, AttributeError)


@pytest.mark.parametrize(
    ("columns", "refusal"),
    [
        ([Column(2, (None, "no buffer"))], NO_BUFFER),
        ([Column(2, (None, np.arange(4)[::2]))], NO_BUFFER),
        ([Column(2, (None,), children=(Column(2, (None, 3)),))], NO_BUFFER),
        ([3], NO_BUFFER),
        ([], pa.ArrowInvalid),
    ],
)
def test_of_what_is_refused_nothing_is_kept(columns, refusal):
    values = np.arange(2, dtype=np.int32)
    alive = weakref.ref(values)
    schema = pa.schema([pa.field("n", pa.int32()), pa.field("m", pa.int32())])
    with pytest.raises(refusal):
        record_batch(schema, 2, [Column(2, (None, values)), *columns])
    del values
    gc.collect()
    assert alive() is None


def test_what_was_not_taken_is_given_back():
    values = np.arange(2, dtype=np.int32)
    alive = weakref.ref(values)
    columns = (Column(2, (None, values)),)
    assert _core.hand_over(2, columns, None, lambda address, schema: "left") == "left"
    del values, columns
    gc.collect()
    assert alive() is None

"""Spark on two local cores: mapInArrow with the step."""

import os
import sys

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import from_arrow_schema

import trajkit as tk
from tests.engines.runs import in_order, turns_of, write_scattered
from trajkit.engines import LinearizeStep


@pytest.fixture(scope="module")
def spark():
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYTHONPATH"] = os.pathsep.join(p or os.getcwd() for p in sys.path)
    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.sql.shuffle.partitions", "4")
        .getOrCreate()
    )
    yield session
    session.stop()


def test_map_in_arrow(tmp_path, spark):
    turns = turns_of()
    write_scattered(turns, tmp_path / "turns")
    step = LinearizeStep()
    table = spark.read.parquet(str(tmp_path / "turns")).repartition("session_id")
    table = table.sortWithinPartitions("session_id", "turn_index")
    rows = table.mapInArrow(step, from_arrow_schema(step.schema))
    rows.write.parquet(str(tmp_path / "rows"))
    expected = tk.linearize(turns)
    assert in_order(tk.read_rows(tmp_path / "rows")) == in_order(expected)

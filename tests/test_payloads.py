"""Per-token columns of turns that are carried into rows."""

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests import reference
from tests.strategies import chosen_policies, payload_lists, row_limits, runs
from tests.tables import by_session, in_delta_form, turns_table
from trajkit.errors import InvalidTurnsError, SchemaError

EXPERTS = pa.large_list(pa.list_(pa.int16(), 2))


def two_turns(**columns):
    table = tk.from_records(
        [
            {"session_id": "s", "prompt_ids": [1, 2], "output_ids": [3, 4]},
            {"session_id": "s", "prompt_ids": [1, 2, 3, 4, 5], "output_ids": [6]},
        ]
    )
    for name, column in columns.items():
        table = table.append_column(name, column)
    return table


def test_one_element_per_output_id():
    turns = two_turns(experts=pa.array([[[1, 2], [3, 4]], [[5, 6]]], EXPERTS))
    rows = tk.linearize(turns, payloads=["experts"])
    assert rows.schema.field("experts").type == EXPERTS
    assert rows["experts"].to_pylist() == [
        [None, None, [1, 2], [3, 4], None, [5, 6]],
    ]


def test_one_element_per_prompt_and_output_id():
    """What the last turn did not sample has what that turn says of its prompt."""
    turns = two_turns(
        top=pa.array([[0.5, 1.5, 2.5, 3.5], [10.0, 11.0, 12.0, 13.0, 14.0, 15.0]])
    )
    rows = tk.linearize(turns, payloads=["top"])
    assert rows["top"].to_pylist() == [[10.0, 11.0, 2.5, 3.5, 14.0, 15.0]]


def test_a_turn_without_a_payload_has_none_of_another_s():
    turns = two_turns(top=pa.array([None, [0, 1, 2, 3, 4, 5]], pa.list_(pa.uint8())))
    rows = tk.linearize(turns, payloads=["top"])
    assert rows["top"].to_pylist() == [[0, 1, None, None, 4, 5]]


def payload_by_twin(turns, name, row):
    """The payload of each token of a row of a session."""
    called = dict(zip(reference.turn_indices(turns), turns, strict=True))
    last = called[row["last_turn"]]
    result = [None] * len(row["input_ids"])
    if last[name] is not None and len(last[name]) == len(reference.held(last)):
        result = last[name][: len(result)]
    for span in row["spans"]:
        turn = called[span["turn_index"]]
        for k in range(span["stop"] - span["start"]):
            at = span["output_start"] + k
            if turn[name] is None:
                value = None
            elif len(turn[name]) == len(turn["output_ids"]):
                value = turn[name][at]
            else:
                value = turn[name][len(turn["prompt_ids"]) + at]
            result[span["start"] + k] = value
    return result


LAYOUTS = [
    pa.list_(pa.list_(pa.int16(), 2)),
    EXPERTS,
    pa.list_view(pa.list_(pa.int16(), 2)),
]


@given(st.data(), runs(), chosen_policies(), row_limits, st.sampled_from(LAYOUTS))
def test_rows_have_the_payload_of_their_tokens(data, turns, chosen, limit, layout):
    """In any list layout, full or delta form, sliced, as a table or as a stream."""
    name, choices = chosen
    policy = tk.policy(name, **choices)
    turns = [
        {**turn, "experts": data.draw(payload_lists(turn))}
        for session in by_session(turns).values()
        for turn in session
    ]
    table = turns_table([{**turn, "experts": None} for turn in turns])
    if "experts" in table.column_names:
        table = table.drop_columns("experts")
    if data.draw(st.booleans()):
        table = in_delta_form(
            table, lambda options: data.draw(st.sampled_from(options))
        )
    lists = pa.array([None, *(turn["experts"] for turn in turns)], layout)
    table = table.append_column("experts", pa.chunked_array([lists[1:]]))
    options = {"policy": policy, "max_row_tokens": limit, "payloads": ["experts"]}
    rows = tk.linearize(table, **options)
    assert rows.drop_columns("experts").equals(
        tk.linearize(table, policy, max_row_tokens=limit)
    )
    sessions = by_session(turns)
    for row in rows.to_pylist():
        expected = payload_by_twin(sessions[row["session_id"]], "experts", row)
        assert row["experts"] == expected
    batches = iter(table.to_batches(max_chunksize=2))
    streamed = [
        r for batch in tk.linearize(batches, **options) for r in batch.to_pylist()
    ]
    assert streamed == rows.to_pylist()
    assert tk.verify(rows, table, policy, max_row_tokens=limit).num_rows == 0


def test_polars_and_files_take_them_along(tmp_path):
    turns = two_turns(experts=pa.array([[[1, 2], [3, 4]], [[5, 6]]], EXPERTS))
    rows = tk.linearize(pl.from_arrow(turns), payloads=["experts"])
    assert rows["experts"].to_pylist() == [
        [None, None, [1, 2], [3, 4], None, [5, 6]],
    ]
    tk.write_turns(turns, tmp_path / "turns.parquet")
    again = tk.linearize(
        tk.read_turns(tmp_path / "turns.parquet"), payloads=["experts"]
    )
    assert again["experts"].to_pylist() == rows["experts"].to_pylist()
    tk.write_rows(rows, tmp_path / "rows.parquet")
    stored = tk.read_rows(tmp_path / "rows.parquet")
    assert stored["experts"].to_pylist() == rows["experts"].to_pylist()


@pytest.mark.parametrize(
    ("payloads", "column", "error", "match"),
    [
        pytest.param(
            ["x"],
            pa.array([[1, 2], [3, 4]]),
            InvalidTurnsError,
            "session 's', turn 1: 2 of x for 1 output ids, 6 with the prompt's",
            id="length",
        ),
        pytest.param("x", pa.array([1, 2]), SchemaError, "payloads='x'", id="a string"),
        pytest.param(
            [1], pa.array([1, 2]), SchemaError, "payloads has 1", id="a number"
        ),
        pytest.param(
            ["y"], pa.array([1, 2]), SchemaError, "'y' is no column", id="none"
        ),
        pytest.param(
            ["x"],
            pa.array([1, 2]),
            SchemaError,
            "'x' is int64: expected a list",
            id="type",
        ),
        pytest.param(
            ["x", "x"], pa.array([[1], [2]]), SchemaError, "named twice", id="twice"
        ),
        pytest.param(
            ["logprobs"], pa.array([1, 2]), SchemaError, "a column of rows", id="taken"
        ),
    ],
)
def test_what_is_no_payload_is_refused(payloads, column, error, match):
    with pytest.raises(error, match=match):
        tk.linearize(two_turns(x=column), payloads=payloads)


def test_no_turns_give_a_column_without_rows():
    turns = two_turns(x=pa.array([[1, 2], [3]], pa.list_(pa.int8()))).slice(0, 0)
    rows = tk.linearize(turns, payloads=["x"])
    assert rows.schema.field("x").type == pa.large_list(pa.int8())
    assert rows.num_rows == 0


def test_the_values_of_a_long_payload_are_its_own():
    rng = np.random.default_rng(0)
    experts = rng.integers(0, 64, (400, 8), np.int8)
    prompt, output = list(range(1, 301)), list(range(100))
    turns = tk.from_records(
        [{"session_id": "s", "prompt_ids": prompt, "output_ids": output}]
    ).append_column(
        "experts", pa.array([list(experts)], pa.list_(pa.list_(pa.int8(), 8)))
    )
    rows = tk.linearize(turns, payloads=["experts"])
    assert np.array_equal(np.array(rows["experts"][0].as_py()), experts)

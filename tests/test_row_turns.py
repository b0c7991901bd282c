"""What rows say of their turns: which they are, which weights sampled them, the step."""

import pyarrow as pa
import pytest

import trajkit as tk
from trajkit.errors import SchemaError


def versions(*pieces):
    return [dict(zip(("version", "start", "stop"), p, strict=True)) for p in pieces]


CALLS = [
    {
        "prompt_ids": [1],
        "output_ids": [2, 3],
        "weight_versions": versions(("a", 0, 1), ("b", 1, 2)),
        "step": 4,
    },
    {"prompt_ids": [1, 2, 3, 9], "output_ids": [], "step": 4},
    {
        "prompt_ids": [1, 2, 3, 9],
        "output_ids": [4],
        "weight_versions": versions(("c", 0, 1)),
        "step": 5,
    },
    {"prompt_ids": [1, 2, 3, 9, 5], "output_ids": [4], "step": None},
]
TURNS = tk.from_records({"session_id": "s", **call} for call in CALLS)


def test_rows_list_their_turns_weights_and_step():
    rows = tk.linearize(TURNS, payloads=["weight_version"])
    assert rows["turns"].to_pylist() == [[0, 1, 2], [0, 1, 3]]
    assert rows["step"].to_pylist() == [5, None]
    assert rows["weight_versions"].to_pylist() == [
        {"first": "a", "last": "c"},
        {"first": "a", "last": "b"},
    ]
    assert rows["weight_version"].to_pylist() == [
        [None, "a", "b", None, "c"],
        [None, "a", "b", None, None, None],
    ]
    assert tk.verify(rows, TURNS).num_rows == 0


def test_rows_of_turns_that_do_not_tell():
    bare = TURNS.drop_columns(["weight_versions", "step"])
    rows = tk.linearize(bare, payloads=["weight_version"])
    for name in ("weight_versions", "step"):
        assert rows[name].null_count == rows.num_rows
    assert set(rows["weight_version"][0].as_py()) == {None}
    unknown = rows.drop_columns(["turns", "weight_versions", "step"])
    assert tk.verify(unknown, TURNS).num_rows == 0


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("turns", [1, 2], "turns [1, 2] lack 0 or its order"),
        ("turns", [0, 7, 2], "turns [0, 7, 2] are not all in the session"),
        ("weight_versions", None, "weight_versions is null, expected {'first'"),
    ],
)
def test_verify_sees_other_turns_and_weights(name, value, said):
    rows = tk.linearize(TURNS)
    lines = rows.to_pylist()
    lines[0][name] = value
    wrong = pa.Table.from_pylist(lines, rows.schema)
    found = tk.verify(wrong, TURNS).to_pylist()
    assert {one["rule"] for one in found} == {name}
    assert found[0]["detail"].startswith(said)


def test_a_step_that_is_no_integer_is_refused():
    at = TURNS.column_names.index("step")
    turns = TURNS.set_column(at, "step", pa.array([0.5] * 4))
    with pytest.raises(
        SchemaError, match="'step' of turns is double: expected integers"
    ):
        tk.linearize(turns)

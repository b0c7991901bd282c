"""Tokens of old weights are masked before rows are made."""

import pytest

import trajkit as tk
from tests.made_tables import linearized
from trajkit.errors import ArgumentError, InvalidTurnsError
from trajkit.turns import untrain_stale


def turn(outputs, *spans, **fields):
    names = ("version", "start", "stop")
    return {
        "session_id": "a",
        "prompt_ids": [1],
        "output_ids": outputs,
        "weight_versions": [dict(zip(names, span, strict=True)) for span in spans]
        or None,
        **fields,
    }


CALLS = [
    turn([2, 3, 4], ("7", 0, 1), ("9", 1, 3)),
    turn([5, 6], ("10", 0, 2)),
    turn([7, 8], ("8", 0, 2), output_mask=[True, False]),
    turn([9]),
    turn([10], ("8", 0, 1), ("10", 1, 1)),
]


@pytest.mark.parametrize("form", [tk.expand, tk.compact])
@pytest.mark.parametrize(
    ("max_lag", "expected"),
    [
        (3, [None, None, [True, False], None, None]),
        (2, [[False, True, True], None, [True, False], None, None]),
        (1, [[False, True, True], None, [False, False], None, [False]]),
        (0, [[False] * 3, None, [False, False], None, [False]]),
    ],
)
def test_tokens_of_old_weights_are_masked(form, max_lag, expected):
    turns = form(tk.from_records(CALLS))
    found = untrain_stale(turns, max_lag)
    assert found["output_mask"].to_pylist() == expected
    assert found.drop_columns("output_mask") == turns.drop_columns("output_mask")
    assert tk.validate(found).equals(found)
    n_masked = sum(mask.count(False) for mask in expected if mask)
    rows, report = linearized(found, "per_call")
    assert report["lost_masked"].to_pylist() == [n_masked]
    assert tk.verify(rows, found, "per_call").num_rows == 0


def test_an_order_of_names():
    turns = tk.from_records(
        [turn([2, 3], ("warm", 0, 1), ("cold", 1, 2)), turn([4], ("best", 0, 1))]
    )
    order = ["warm", "cold", "best", "newest"]
    masks = untrain_stale(turns, 1, versions=order)["output_mask"].to_pylist()
    assert masks == [[False, False], None]
    with pytest.raises(
        InvalidTurnsError, match="turn 0: the weight version 'warm' is no"
    ):
        untrain_stale(turns, 1)
    with pytest.raises(
        InvalidTurnsError, match=r"turn 1: .* 'best' is not in versions"
    ):
        untrain_stale(turns, 1, versions=order[:2])
    with pytest.raises(ArgumentError, match="a version occurs twice"):
        untrain_stale(turns, 1, versions=["warm", "warm"])


def test_turns_without_versions_and_no_turns_stay():
    turns = tk.from_records([turn([2]), turn([3], output_mask=[False])])
    assert untrain_stale(turns, 0).equals(turns)
    assert untrain_stale(turns.slice(0, 0), 0).equals(turns.slice(0, 0))

"""Policy nemo where the source recorded which call continues which."""

import polars as pl
import pytest

import trajkit as tk
from tests.made_tables import turns_table


def call(name, prompt, output, resolution=None, parent=None, **more):
    return {
        "request_id": name,
        "prompt_ids": prompt,
        "output_ids": output,
        "parent_resolution": resolution,
        "parent_request": parent,
        **more,
    }


A, B = call("a", [1, 2], [3], "root"), [1, 2, 3, 4]
A1, A2 = call("a1", [1, 2], [3], "root"), call("a2", [1, 2], [3], "root")
T = call("t", [9], [8], "root", started_at=0.0)


@pytest.mark.parametrize(
    ("turns", "rows", "main", "reasons"),
    [
        pytest.param(
            [A, call("b", B, [5], "unresolved")],
            [[1, 2, 3], [1, 2, 3, 4, 5]],
            [1, 2, 3],
            ["root", "no_parent"],
            id="an unresolved parent is none, though a path begins the prompt",
        ),
        pytest.param(
            [A1, A2, call("b", B, [5], "resolved", "a2")],
            [[1, 2, 3, 4, 5]],
            [1, 2, 3, 4, 5],
            ["superseded", "root", "recorded"],
            id="a recorded parent decides between equal paths",
        ),
        pytest.param(
            [A1, {**A2, "output_ids": [4]}],
            [[1, 2, 3]],
            [1, 2, 3],
            ["unresolved_kept", "unresolved"],
            id="of retries that nothing continues the first is kept",
        ),
        pytest.param(
            [A1, {**A2, "output_ids": [4], "scored": True}],
            [[1, 2, 4]],
            [1, 2, 4],
            ["superseded", "root"],
            id="or the scored one",
        ),
        pytest.param(
            [
                T,
                {**A, "started_at": 1.0},
                call("b", B, [5], "resolved", "a", scored=True),
                call("c", [*B, 5, 6], [7], "resolved", "b"),
            ],
            [[1, 2, 3, 4, 5], [9, 8]],
            [1, 2, 3, 4, 5],
            ["root", "root", "recorded", "chain_quarantined"],
            id="the chain of the scored turn is main and ends with it",
        ),
        pytest.param(
            [
                A,
                call("b", B, [], "resolved", "a"),
                call("c", [*B, 5], [6], "resolved", "b"),
            ],
            [[1, 2, 3, 4, 5, 6]],
            [1, 2, 3, 4, 5, 6],
            ["root", "empty", "tokens"],
            id="a missing parent is the only path that begins the prompt",
        ),
        pytest.param(
            [
                A1,
                A2,
                call("b", B, [5], "resolved", "gone"),
                call("c", [*B, 5, 6], [7], "resolved", "b"),
            ],
            [[1, 2, 3], [1, 2, 3, 4, 5, 6, 7]],
            [1, 2, 3],
            ["unresolved_kept", "unresolved", "no_parent", "recorded"],
            id="a missing parent is none if several paths begin the prompt",
        ),
        pytest.param(
            [A, call("b", [1, 2, 9, 4], [5], "resolved", "a")],
            [[1, 2, 3], [1, 2, 9, 4, 5]],
            [1, 2, 3],
            ["root", "no_parent"],
            id="a recorded parent that the tokens contradict",
        ),
        pytest.param(
            [A, call("b", B, [5])],
            [[1, 2, 3], [1, 2, 3, 4, 5]],
            [1, 2, 3],
            ["root", "no_parent"],
            id="nothing recorded, though of other turns",
        ),
    ],
)
def test_what_nemo_gym_does(turns, rows, main, reasons):
    """The entries of NeMo Gym that its builder was run on, or its source was read for."""
    table = turns_table(turns)
    assert tk.linearize(table, "nemo")["input_ids"].to_pylist() == rows
    policy = tk.policy("nemo", row_selection="main")
    assert tk.linearize(table, policy)["input_ids"].to_pylist() == [main]
    frame = pl.from_arrow(table)
    names = pl.col("request_id", "parent_resolution", "parent_request")
    for turns in (table, frame.with_columns(names.cast(pl.Categorical))):
        assert tk.link(turns, "nemo")["link_reason"].to_pylist() == reasons

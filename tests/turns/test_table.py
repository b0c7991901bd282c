"""A turns table as a sequence of sessions."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import replaced
from trajkit.tables import limits
from trajkit.tables.ragged import runs_of


@given(st.lists(st.integers(0, 5)), st.integers(1, 12))
def test_runs_are_as_long_as_they_may_be(sizes, most):
    runs = list(runs_of(np.array(sizes, np.int64), most))
    assert [k for lo, hi in runs for k in range(lo, hi)] == [*range(len(sizes))]
    for lo, hi in runs:
        assert hi - lo == 1 or sum(sizes[lo:hi]) <= most
        assert hi == len(sizes) or sum(sizes[lo : hi + 1]) > most


@pytest.mark.parametrize("threads", [1, 2])
def test_a_fault_is_told_of_the_turn_that_has_it_whichever_part_it_is_in(threads):
    table = tk.from_records(
        {"session_id": name, "prompt_ids": [1, 2, 3], "output_ids": [4, 5]}
        for name in "abcd"
        for _ in range(3)
    )
    table = replaced(table, "turn_index", [0, 1, 2, 0, 1, 2, 0, 2, 1, 0, 0, 1])
    parts = {"MIN_PART_TOKENS": 1, "PART_TOKENS": 1}
    wrong = r"^session 'c', turn 1: turn_index 1 follows 2: it must ascend"
    with (
        mock.patch.multiple(limits, **parts),
        pytest.raises(tk.errors.InvalidTurnsError, match=wrong),
    ):
        tk.linearize(table, "per_call", threads=threads)

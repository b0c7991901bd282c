"""A recorder of sessions of 40 to 300 calls.

Only such sessions outgrow the arrays that the recorder begins with, and have paths that
differ in length by a factor of a hundred.
"""

from hypothesis import given
from hypothesis import strategies as st

import trajkit as tk
from tests.made_tables import policy_of, turns_table
from tests.recorder import test_recorder
from tests.strategies import few, many_calls, policies, row_limits


@few
@given(many_calls(), policies, row_limits | st.integers(41, 800))
def test_a_recorder_keeps_what_it_is_given(turns, choice, limit):
    """Also where it is asked while the session grows."""
    test_recorder.test_each_call_is_placed_on_arrival.hypothesis.inner_test(turns)
    recorder, policy = tk.Recorder(), policy_of(choice)
    for k, turn in enumerate(turns):
        test_recorder.record(recorder, turn)
        if k % 61 == 16 or k == len(turns) - 1:
            table = turns_table(turns[: k + 1])
            found = recorder.turns("s")
            assert found == tk.compact(table)
            assert tk.linearize(found, policy, max_row_tokens=limit) == tk.linearize(
                table, policy, max_row_tokens=limit
            )


def test_calls_that_begin_like_a_longer_one_share_what_they_have_of_it():
    recorder = tk.Recorder()
    recorder.record("s", prompt_ids=range(499), output_ids=[7])
    for k in range(15):
        recorder.record("s", prompt_ids=[1000 + k], output_ids=[])
    for k, output in enumerate([[5], [3, 4, 5], []]):
        found = recorder.record(
            "s", prompt_ids=[0, 1, 2, 9][: 4 - k], output_ids=output
        )
        assert (found.turn_index, found.shared_length) == (16 + k, [3, 3, 2][k])
    turns = tk.expand(recorder.turns("s"))
    assert turns["prompt_ids"].to_pylist()[16:] == [[0, 1, 2, 9], [0, 1, 2], [0, 1]]

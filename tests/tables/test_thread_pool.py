"""Work is spread over threads: the same results, in order, and the first error."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajkit.tables import threads


@given(st.lists(st.integers(), max_size=8), st.integers(1, 4))
def test_results_come_in_order(parts, n_threads):
    assert threads.parallel_map(lambda part: part + 1, parts, n_threads) == [
        part + 1 for part in parts
    ]


@given(st.lists(st.booleans(), max_size=8), st.integers(1, 4))
def test_the_first_part_that_fails_is_the_one_that_is_told(good, n_threads):
    def work(k):
        if not good[k]:
            raise ValueError(k)
        return k

    parts = range(len(good))
    if all(good):
        assert threads.parallel_map(work, parts, n_threads) == [*parts]
    else:
        with pytest.raises(ValueError, match=rf"^{good.index(False)}$"):
            threads.parallel_map(work, parts, n_threads)

"""Work is spread over threads: the same results, in order, and the first error."""

import multiprocessing
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajkit.tables import thread_pool


@given(st.lists(st.integers(), max_size=8), st.integers(1, 4))
def test_results_come_in_order(parts, n_threads):
    assert thread_pool.parallel_map(lambda part: part + 1, parts, n_threads) == [
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
        assert thread_pool.parallel_map(work, parts, n_threads) == [*parts]
    else:
        with pytest.raises(ValueError, match=rf"^{good.index(False)}$"):
            thread_pool.parallel_map(work, parts, n_threads)


def test_several_threads_work_at_a_time():
    both = threading.Barrier(2, timeout=60)
    assert len({*thread_pool.parallel_map(lambda _: both.wait(), range(2), 2)}) == 2


def test_one_thread_is_the_calling_one():
    me = threading.get_ident()
    assert (
        thread_pool.parallel_map(lambda _: threading.get_ident(), range(3), 1)
        == [me] * 3
    )


def _work_in_child(results):
    results.put(thread_pool.parallel_map(lambda part: part, range(4), 2))


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_child_of_a_fork_has_threads_of_its_own():
    thread_pool.parallel_map(lambda part: part, range(4), 2)
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    child = context.Process(target=_work_in_child, args=(results,))
    child.start()
    assert results.get(timeout=60) == [0, 1, 2, 3]
    child.join()
    assert child.exitcode == 0

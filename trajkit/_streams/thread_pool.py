"""A parallel map over threads that stay alive between calls."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")

_pools: list[ThreadPoolExecutor] = []


def parallel_map(
    work: Callable[[_Part], _Result], parts: Sequence[_Part], n_threads: int
) -> list[_Result]:
    """The result of ``work`` for each part, in order.

    Parameters
    ----------
    work : callable
        Called once per part, on several threads at a time.
    parts : sequence
    n_threads : int
        The most threads that work, including the calling one; the pool has one thread
        per core.

    Raises
    ------
    Exception
        What ``work`` raised on the first part that failed. Later parts may be skipped.
    """
    # the GIL makes sure that each index is taken once, in order
    todo = iter(range(len(parts)))
    done: dict[int, _Result] = {}
    failed: dict[int, BaseException] = {}

    def work_on() -> None:
        for k in todo:
            try:
                done[k] = work(parts[k])
            except BaseException as error:  # raised below, by the calling thread
                failed[k] = error
                for _ in todo:  # parts that other threads took are finished
                    pass

    n_helpers = min(n_threads, len(parts)) - 1
    helpers = [_pool().submit(work_on) for _ in range(n_helpers)]
    work_on()
    for helper in helpers:
        if not helper.cancel():  # a busy pool may not have started it
            helper.result()
    if failed:
        raise failed[min(failed)]
    return [done[k] for k in range(len(parts))]


def _pool() -> ThreadPoolExecutor:
    if not _pools:
        _pools.append(ThreadPoolExecutor(os.cpu_count(), "trajkit"))
    return _pools[-1]


# a forked child has none of its parent's threads
os.register_at_fork(after_in_child=_pools.clear)

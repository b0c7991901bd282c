"""Work spread over threads that stay.

A thread that has to be started first costs a millisecond or more, which is what a small
table takes as a whole.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")

_pools: list[ThreadPoolExecutor] = []


def spread(
    work: Callable[[_Part], _Result], parts: Sequence[_Part], n_threads: int
) -> list[_Result]:
    """What ``work`` makes of each part, in order.

    Parameters
    ----------
    work : callable
        Called once for each part, on several threads at a time.
    parts : sequence
    n_threads : int
        At most so many threads work, the calling one among them. There are never more
        than one for each core and the calling one.

    Raises
    ------
    Exception
        What ``work`` raised on the first part that failed. Parts behind it may not have
        been worked on.
    """
    # under the GIL each number is given out once, in order
    todo = iter(range(len(parts)))
    done: dict[int, _Result] = {}
    failed: dict[int, BaseException] = {}

    def go_on() -> None:
        for k in todo:
            try:
                done[k] = work(parts[k])
            except BaseException as error:  # raised below, by the calling thread
                failed[k] = error
                for _ in todo:  # what was given out before goes to its end
                    pass

    n_helpers = min(n_threads, len(parts)) - 1
    helpers = [_pool().submit(go_on) for _ in range(n_helpers)]
    go_on()
    for helper in helpers:
        if not helper.cancel():  # it came to nothing where the pool was busy
            helper.result()
    if failed:
        raise failed[min(failed)]
    return [done[k] for k in range(len(parts))]


def _pool() -> ThreadPoolExecutor:
    if not _pools:
        _pools.append(ThreadPoolExecutor(os.cpu_count(), "trajkit"))
    return _pools[-1]


# the child of a fork has none of its parent's threads
os.register_at_fork(after_in_child=_pools.clear)

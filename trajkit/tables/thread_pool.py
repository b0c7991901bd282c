"""A parallel map over threads."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def parallel_map(
    work: Callable[[_Part], _Result], parts: Sequence[_Part], n_threads: int
) -> list[_Result]:
    """The result of ``work`` for each part, in order, by at most ``n_threads`` threads.

    One thread is the calling one. The error of the first part that failed is raised;
    later parts may be skipped.
    """
    n_threads = min(n_threads, len(parts))
    if n_threads <= 1:
        return [work(part) for part in parts]
    with ThreadPoolExecutor(n_threads, "trajkit") as pool:
        return list(pool.map(work, parts))

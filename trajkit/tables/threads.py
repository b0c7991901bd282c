"""Work on other threads: a parallel map, and an iterator that is read ahead."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def parallel_map(
    work: Callable[[_Item], _Result], parts: Sequence[_Item], n_threads: int
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


def prefetch(items: Iterator[_Item], stack: ExitStack) -> Iterator[_Item]:
    """The items; a thread computes the next one while one is in use.

    When the stack ends, so does the thread, and the iterator is closed.
    """
    pool = ThreadPoolExecutor(1, "trajkit prefetch")
    end = object()

    def received() -> Iterator[_Item]:
        while (item := coming.pop().result()) is not end:
            coming.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]
            del item

    def close() -> None:
        pool.shutdown()
        if hasattr(items, "close"):
            items.close()

    stack.callback(close)
    coming = [pool.submit(next, items, end)]
    return received()

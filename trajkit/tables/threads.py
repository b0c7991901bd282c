"""An iterator that is read ahead on another thread."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TypeVar

_Item = TypeVar("_Item")


def prefetch(items: Iterator[_Item], stack: ExitStack) -> Iterator[_Item]:
    """The items; a thread computes the next one while one is in use."""
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

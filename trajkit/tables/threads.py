"""What threads need: values that are made once, and an iterator that is read ahead."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Generic, TypeVar

_Item = TypeVar("_Item")


class once(Generic[_Item]):
    """A property that is kept once it was made, in the instance's ``__dict__``.

    That of functools has a lock in Python 3.11, one for all instances: threads that each
    make the value of their own instance would wait for one another.
    """

    def __init__(self, make: Callable[[Any], _Item]) -> None:
        self._make, self.__doc__ = make, make.__doc__

    def __get__(self, instance: object, owner: object = None) -> _Item:
        made = instance.__dict__[self._make.__name__] = self._make(instance)
        return made


def prefetch(
    items: Iterator[_Item], stack: ExitStack, n_ahead: int = 1
) -> Iterator[_Item]:
    """The items; a thread computes the next ``n_ahead`` while one is in use."""
    pool = ThreadPoolExecutor(1, "trajkit prefetch")
    end = object()

    def received() -> Iterator[_Item]:
        while (item := coming.popleft().result()) is not end:
            coming.append(pool.submit(next, items, end))
            yield item  # type: ignore[misc]
            del item

    def close() -> None:
        pool.shutdown(cancel_futures=True)
        if hasattr(items, "close"):
            items.close()

    stack.callback(close)
    coming = deque(pool.submit(next, items, end) for _ in range(n_ahead))
    return received()

"""An iterator that is advanced by a thread of its own."""

from collections.abc import Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import TypeVar

_Item = TypeVar("_Item")


def prefetch(items: Iterator[_Item], stack: ExitStack) -> Iterator[_Item]:
    """The items; a thread computes the next one while one is in use.

    Parameters
    ----------
    items : iterator
        Only the thread advances it. The thread closes it when the stack ends.
    stack : ExitStack
        Ends the thread.
    """
    queue: SimpleQueue[tuple[bool, _Item | BaseException | None]] = SimpleQueue()
    room, ended = Semaphore(1), Event()

    def read() -> None:
        try:
            for item in items:
                queue.put((True, item))
                del item
                room.acquire()
                if ended.is_set():
                    break
            else:
                queue.put((False, None))
        except BaseException as error:  # raised again by the thread that asks
            queue.put((False, error))
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    thread = Thread(target=read, name="trajkit prefetch")

    def end() -> None:
        ended.set()
        room.release()
        thread.join()

    def received() -> Iterator[_Item]:
        while True:
            more, item = queue.get()
            if not more:
                if isinstance(item, BaseException):
                    raise item
                return
            room.release()
            yield item  # type: ignore[misc]
            del item

    thread.start()
    stack.callback(end)
    return received()

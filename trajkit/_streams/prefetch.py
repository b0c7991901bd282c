"""What an iterator gives, made by a thread of its own while the last of it is used."""

from collections.abc import Iterator
from contextlib import ExitStack
from queue import SimpleQueue
from threading import Event, Semaphore, Thread
from typing import TypeVar

_Item = TypeVar("_Item")


def read_ahead(items: Iterator[_Item], stack: ExitStack) -> Iterator[_Item]:
    """The items, of which the next is made while one is used.

    Parameters
    ----------
    items : iterator
        Used in the thread alone, and closed there when the stack ends.
    stack : ExitStack
        When it ends, the thread does.
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
        # whatever it is, it is for the thread that asks
        except BaseException as error:
            queue.put((False, error))
        finally:
            close = getattr(items, "close", None)
            if close is not None:
                close()

    thread = Thread(target=read, name="trajkit reads ahead")

    def end() -> None:
        ended.set()
        room.release()
        thread.join()

    def taken() -> Iterator[_Item]:
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
    return taken()

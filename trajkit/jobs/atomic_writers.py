"""Tables to files that are written while the next tables are made."""

import errno
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Condition, Thread
from types import TracebackType
from typing import Self, TypeAlias

import pyarrow as pa

from trajkit._arrow.take import empty_batch
from trajkit._streams import limits
from trajkit.io.formats import naming

Write: TypeAlias = Callable[[Iterator[pa.RecordBatch], Path], None]


class _Abandoned(Exception):
    """What is half written is not wanted."""


class AtomicWriter:
    """A file that is written by a thread of its own, whole or not at all.

    Parameters
    ----------
    path : Path
    write : function of an iterator of record batches and a path
        It must leave no file where the iterator raises, as `trajkit.write_rows` does.
    target : Path
        What errors call the file.
    """

    def __init__(self, path: Path, write: Write, target: Path) -> None:
        self._changes = Condition()
        self._waiting = 0
        self._queue: SimpleQueue[pa.Table | BaseException | None] = SimpleQueue()
        self._error: BaseException | None = None
        self._write, self._path, self._target = write, path, target
        self._thread = Thread(target=self._run, name=f"trajkit writes {target.name}")

    def put(self, table: pa.Table) -> None:
        """Hand over a table; waits while too much waits already.

        Raises
        ------
        Exception
            What went wrong with a table before.
        """
        with self._changes:
            self._changes.wait_for(
                lambda: (
                    self._waiting <= limits.ROW_GROUP_BYTES or self._error is not None
                )
            )
            if self._error is not None:
                raise self._error
            self._waiting += table.nbytes
        self._queue.put(table)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._queue.put(None if error is None else _Abandoned())
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with naming(self._path, self._target):
                self._write(self._batches(), self._path)
        # whatever it is, it is for the thread that hands over tables
        except BaseException as error:
            with self._changes:
                self._error = error
                self._changes.notify()

    def _batches(self) -> Iterator[pa.RecordBatch]:
        while (table := self._queue.get()) is not None:
            if isinstance(table, BaseException):
                raise table
            with self._changes:
                self._waiting -= table.nbytes
                self._changes.notify()
            # in one piece each, so that row groups do not tell how many threads made it
            batches = table.combine_chunks().to_batches()
            # without rows a file still says of which columns it is
            none = empty_batch(table.schema)
            del table
            yield from batches or [none]


@contextmanager
def atomic_writers(
    targets: Mapping[str, tuple[Path, Write]],
) -> Iterator[dict[str, AtomicWriter]]:
    """An outlet for each target; the files get their names when all of them are whole.

    Where one cannot be written, or not put in its place, there is none of them, and what
    stood there before still stands. A process that dies while it gives several their
    names may leave some of the new files beside some of the old: what the new ones
    replaced then stands beside them as ``.PID~NAME``, and what was not yet named, whole,
    as ``.PID-NAME``.

    Parameters
    ----------
    targets : mapping of str to (Path, function)
        As for `AtomicWriter`.

    Raises
    ------
    OSError
        A file cannot be written, or not put in its place.
    """
    for path, _ in targets.values():
        _check_no_directory(path)
    # hidden from readers of directories; the suffix says the format
    drafts = {
        name: path.with_name(f".{os.getpid()}-{path.name}")
        for name, (path, _) in targets.items()
    }
    try:
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(AtomicWriter(drafts[name], write, path))
                for name, (path, write) in targets.items()
            }
        _name_all([(drafts[name], path) for name, (path, _) in targets.items()])
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


def _check_no_directory(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def _name_all(moves: Sequence[tuple[Path, Path]]) -> None:
    """Put whole files in their places, each (draft, path); where one fails, none."""
    kept: list[Path] = []
    with ExitStack() as undo:
        for n, (draft, path) in enumerate(moves):
            if n < len(moves) - 1:  # where the last one fails, its place is as it was
                old = _kept(path)
                undo.callback(_put_back, old, path)
                kept += [] if old is None else [old]
            os.replace(draft, path)
        undo.pop_all()
    for old in kept:
        old.unlink()


def _kept(path: Path) -> Path | None:
    """A second, hidden name for what stands there. None: nothing does."""
    _check_no_directory(path)
    if not os.path.lexists(path):
        return None
    old = path.with_name(f".{os.getpid()}~{path.name}")
    old.unlink(missing_ok=True)
    try:
        os.link(path, old, follow_symlinks=False)
    except OSError:  # a file has but one name in this file system
        os.rename(path, old)
    return old


def _put_back(old: Path | None, path: Path) -> None:
    if old is None:
        path.unlink(missing_ok=True)
    else:
        os.replace(old, path)
        old.unlink(missing_ok=True)  # two names of one file stay two

"""Output files that threads write, and the manifest of a directory of parts."""

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from threading import Thread
from types import TracebackType
from typing import Any, Self, TypeAlias

import pyarrow as pa

from trajkit._arrow.take import empty_batch
from trajkit.errors import FormatError
from trajkit.io.formats import naming

Write: TypeAlias = Callable[[Iterator[pa.RecordBatch], Path], None]

MANIFEST = "_manifest.json"
"""The manifest's file name; readers of directories skip names with an underscore."""

_VERSION = 1

# tables in memory that a writer thread has not taken yet
_MAX_WAITING = 1


class _Abandoned(Exception):
    """The output is not needed, because the job failed."""


class AtomicWriter:
    """A file that a thread writes, completely or not at all.

    Parameters
    ----------
    path : Path
    write : function of an iterator of record batches and a path
        It must leave no file if the iterator raises, as `trajkit.write_rows` does.
    target : Path
        What errors call the file.
    """

    def __init__(self, path: Path, write: Write, target: Path) -> None:
        self._queue: Queue[pa.Table | BaseException | None] = Queue(_MAX_WAITING)
        self._ended = False
        self._error: BaseException | None = None
        self._write, self._path, self._target = write, path, target
        self._thread = Thread(target=self._run, name=f"trajkit writes {target.name}")

    def put(self, table: pa.Table) -> None:
        """Queue a table; wait while `_MAX_WAITING` others are queued.

        Raises
        ------
        Exception
            The error of an earlier table.
        """
        if self._error is not None:
            raise self._error
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
        if error is not None:
            self._queue.put(_Abandoned())
        self._queue.put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            with naming(self._path, self._target):
                self._write(self._batches(), self._path)
        except BaseException as error:  # raised again in the thread that calls `put`
            self._error = error
            while not self._ended:  # that thread may wait for room in the queue
                self._ended = self._queue.get() is None

    def _batches(self) -> Iterator[pa.RecordBatch]:
        while (table := self._queue.get()) is not None:
            if isinstance(table, BaseException):
                raise table
            # one batch, so that row groups do not depend on the number of threads
            batches = table.combine_chunks().to_batches() or [empty_batch(table.schema)]
            del table
            yield from batches
        self._ended = True


@contextmanager
def atomic_writers(
    targets: Mapping[str, tuple[Path, Write]],
) -> Iterator[dict[str, AtomicWriter]]:
    """A writer per target; all files are renamed into place once all are complete.

    If a write or a rename fails, none is created and existing files are left untouched.
    A process that dies during the renames may leave some new files next to some old
    ones. Then a replaced file is still there as ``.PID~NAME``, and a complete file that
    was not renamed yet as ``.PID-NAME``.

    Parameters
    ----------
    targets : mapping of str to (Path, function)
        As for `AtomicWriter`.

    Raises
    ------
    OSError
        A file cannot be written or renamed.
    """
    for path, _ in targets.values():
        _check_no_directory(path)
    # readers of directories skip hidden files; the suffix determines the format
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
        _rename_all([(drafts[name], path) for name, (path, _) in targets.items()])
    finally:
        for draft in drafts.values():
            draft.unlink(missing_ok=True)


def _check_no_directory(path: Path) -> None:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))


def _rename_all(moves: Sequence[tuple[Path, Path]]) -> None:
    """Rename each (draft, path); if one fails, undo the others."""
    backups: list[Path] = []
    with ExitStack() as undo:
        for n, (draft, path) in enumerate(moves):
            if n < len(moves) - 1:  # a failed rename changes nothing: no backup needed
                old = _backup(path)
                undo.callback(_restore, old, path)
                backups += [] if old is None else [old]
            os.replace(draft, path)
        undo.pop_all()
    for old in backups:
        old.unlink()


def _backup(path: Path) -> Path | None:
    """A second, hidden name of an existing file; None if there is no file."""
    _check_no_directory(path)
    if not os.path.lexists(path):
        return None
    old = path.with_name(f".{os.getpid()}~{path.name}")
    old.unlink(missing_ok=True)
    try:
        os.link(path, old, follow_symlinks=False)
    except OSError:  # the file system has no hard links
        os.rename(path, old)
    return old


def _restore(old: Path | None, path: Path) -> None:
    if old is None:
        path.unlink(missing_ok=True)
    else:
        os.replace(old, path)
        old.unlink(missing_ok=True)  # replacing one link by another keeps both


@dataclass(slots=True)
class Manifest:
    """The parts that a job has written to a directory.

    Attributes
    ----------
    folder : Path
    job : dict
        Everything that the parts depend on, in JSON's types.
    ends : list of int
        For each part, the turns of the source that it and the earlier parts took.
    totals : Counter
        Sums over all parts, by name.
    finished : bool
        The last part reaches the end of the source.
    """

    folder: Path
    job: dict[str, Any]
    ends: list[int] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    finished: bool = False

    @classmethod
    def open(
        cls, folder: Path, job: dict[str, Any], others: Iterable[Path] = ()
    ) -> "Manifest":
        """Read the manifest of a job; create directory and manifest if needed.

        Parameters
        ----------
        folder : Path
        job : dict
        others : iterable of Path
            Other directories that the job writes to.

        Raises
        ------
        FormatError
            The directory has parts of another job; or a new job's directories contain
            files that no job wrote.
        """
        folder.mkdir(exist_ok=True)
        path = folder / MANIFEST
        job = json.loads(json.dumps(job))  # tuples become lists, as in the file
        if not path.exists():
            for directory in (folder, *others):
                _check_empty(directory)
            fresh = cls(folder, job)
            # saved first, so that a part without an entry is known to be the job's own
            fresh._save()
            return fresh
        try:
            saved = json.loads(path.read_text("utf-8"))
            ends, totals = saved["ends"], Counter(saved["totals"])
            if saved["version"] == _VERSION and saved["job"] == job:
                return cls(folder, job, ends, totals, saved["finished"])
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{path} is not a manifest: {error!r}") from None
        if not ends and os.listdir(folder) == [MANIFEST]:
            # another job stopped before its first part
            path.unlink()
            return cls.open(folder, job, others)
        raise FormatError(
            f"{folder} contains parts of another job (other files, or other options): "
            "pass an empty directory"
        )

    @property
    def done(self) -> int:
        """Turns of the source that the parts took."""
        return self.ends[-1] if self.ends else 0

    def part(self) -> str:
        """The name of the next part's files."""
        return f"part-{len(self.ends):05d}.parquet"

    def add(self, n_turns: int, totals: Counter[str]) -> None:
        """Record a part whose files are written."""
        self.ends.append(self.done + n_turns)
        self.totals.update(totals)
        self._save()

    def finish(self) -> None:
        """Record that there are no more parts."""
        self.finished = True
        self._save()

    def _save(self) -> None:
        text = json.dumps(
            {
                "version": _VERSION,
                "job": self.job,
                "ends": self.ends,
                "totals": self.totals,
                "finished": self.finished,
            },
            indent=1,
        )
        draft = self.folder / f".{MANIFEST}.tmp"
        draft.write_text(text + "\n", "utf-8")
        os.replace(draft, self.folder / MANIFEST)


def _check_empty(folder: Path) -> None:
    """Raise FormatError if a directory exists and contains visible files."""
    if folder.is_dir() and any(not n.startswith(".") for n in os.listdir(folder)):
        raise FormatError(
            f"{folder} contains files, but no {MANIFEST} that names their job: pass an "
            "empty directory"
        )


def fingerprint(
    source: str | os.PathLike[str], files: Iterable[Path]
) -> list[list[object]]:
    """Relative path, size and modification time of each file of a source."""
    root = Path(source)
    return [
        [str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns]
        for path in files
    ]

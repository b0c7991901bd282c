"""Files that appear together and are written by threads; the manifest of their parts."""

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from threading import Semaphore
from typing import Any, TypeAlias

import pyarrow as pa

from trajkit.errors import FormatError
from trajkit.files.formats import naming

Write: TypeAlias = Callable[[Iterator[pa.RecordBatch], Path], None]
Put: TypeAlias = Callable[[pa.RecordBatch], None]
"""Queues a batch for a file."""

MANIFEST = "_manifest.json"
"""The manifest's file name; readers of directories skip names with an underscore."""

_VERSION = 1


class _Abandoned(Exception):
    """The output is not needed, because the job failed."""


@contextmanager
def write_in_thread(path: Path, write: Write, target: Path) -> Iterator[Put]:
    """Queue batches for a thread that writes a file, completely or not at all.

    The function waits while another batch is queued, and raises the error of an earlier
    batch. ``write`` must leave no file if its iterator raises, as `trajkit.write_rows`
    does. Errors call the file ``target``.
    """
    queue = SimpleQueue[pa.RecordBatch | _Abandoned | None]()
    room = Semaphore()
    failed: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        while (batch := queue.get()) is not None:
            if isinstance(batch, _Abandoned):
                raise batch
            room.release()
            yield batch
            del batch

    def work() -> None:
        try:
            with naming(path, target):
                write(batches(), path)
        except BaseException as error:  # raised again in the thread that calls `put`
            failed.append(error)
            room.release()

    def put(batch: pa.RecordBatch) -> None:
        room.acquire()
        if failed:
            raise failed[0]
        queue.put(batch)

    with ThreadPoolExecutor(1, f"trajkit writes {target.name}") as pool:
        pool.submit(work)
        try:
            yield put
        except BaseException:
            queue.put(_Abandoned())
            raise
        queue.put(None)
    if failed:
        raise failed[0]


@contextmanager
def atomic_writers(
    targets: Mapping[str, Path], write: Write
) -> Iterator[dict[str, Put]]:
    """`write_in_thread` per target; files get their names once all are complete.

    If a write or a rename fails, none is created and existing files are left untouched.
    A process that dies during the renames may leave some new files next to some old
    ones. Then a replaced file is still there as ``.PID~NAME``, and a complete file that
    was not renamed yet as ``.PID-NAME``.
    """
    for path in targets.values():
        _check_no_directory(path)
    # readers of directories skip hidden files; the suffix determines the format
    drafts = {
        name: path.with_name(f".{os.getpid()}-{path.name}")
        for name, path in targets.items()
    }
    try:
        with ExitStack() as stack:
            yield {
                name: stack.enter_context(write_in_thread(drafts[name], write, path))
                for name, path in targets.items()
            }
        _rename_all([(drafts[name], path) for name, path in targets.items()])
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


@dataclass
class Manifest:
    """The parts that a job has written to a directory.

    ``job`` is everything that the parts depend on, in JSON's types. ``ends`` has, for
    each part, the turns of the source that it and the earlier parts took. ``totals`` are
    sums over all parts. The last part of a ``finished`` job reaches the source's end.
    """

    folder: Path
    version: int
    job: dict[str, Any]
    ends: list[int] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    finished: bool = False

    @classmethod
    def open(
        cls, folder: Path, job: dict[str, Any], others: Iterable[Path] = ()
    ) -> "Manifest":
        """Read the manifest of a job; create directory and manifest if needed.

        A FormatError says that the directory has parts of another job, or that a new
        job's directories (``folder`` and ``others``) contain files that no job wrote.
        """
        folder.mkdir(exist_ok=True)
        path = folder / MANIFEST
        job = json.loads(json.dumps(job))  # tuples become lists, as in the file
        if not path.exists():
            for directory in (folder, *others):
                _check_empty(directory)
            fresh = cls(folder, _VERSION, job)
            # saved first, so that a part without an entry is known to be the job's own
            fresh._save()
            return fresh
        try:
            saved = cls(folder, **json.loads(path.read_text("utf-8")))
            saved.totals = Counter(saved.totals)
        except (ValueError, TypeError) as error:
            raise FormatError(f"{path} is not a manifest: {error!r}") from None
        if (saved.version, saved.job) == (_VERSION, job):
            return saved
        if not saved.ends and os.listdir(folder) == [MANIFEST]:
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
            {k: v for k, v in vars(self).items() if k != "folder"}, indent=1
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


def fingerprint(paths: Sequence[Path], files: Iterable[Path]) -> list[list[object]]:
    """Path, size and modification time of each file; the path is relative to a directory
    if that is the only one of ``paths``.
    """
    root = paths[0] if len(paths) == 1 else Path()
    return [
        [str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns]
        for path in files
    ]

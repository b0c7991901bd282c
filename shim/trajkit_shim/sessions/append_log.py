"""A table that grows on disk batch by batch and survives the death of its writer.

Each batch is handed to the operating system before `AppendLog.append` returns, so a
killed process loses none. A kill can leave a torn last batch, which readers ignore.
"""

import errno
import math
import os
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

# Arrow IPC streaming format: the marker of a message, with length 0
END_OF_STREAM = b"\xff\xff\xff\xff\0\0\0\0"


class LogFullError(OSError):
    """The log has reached its maximum size."""


class AppendLog:
    """A series of Arrow IPC streams: ``STEM-00000.arrows``, ``STEM-00001.arrows``, ...

    ``fsync``: also write each batch to disk, so that it survives a crash of the machine.
    A batch that is larger than ``max_file_bytes`` gets a file of its own. Raises
    `FileExistsError`: the directory contains a file of the series.
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        schema: pa.Schema,
        *,
        fsync: bool = False,
        max_file_bytes: int | None = None,
        max_total_bytes: int | None = None,
    ) -> None:
        self._directory = directory
        self._stem = stem
        self._head = schema.serialize()
        self._fsync = fsync
        self._max_file_bytes, self.max_total_bytes = (
            math.inf if limit is None else limit
            for limit in (max_file_bytes, max_total_bytes)
        )
        self._file: int | None = None
        self._sizes: list[int] = []  # bytes of each file
        self._closed = False
        directory.mkdir(parents=True, exist_ok=True)
        first = self.path_of(0)
        if first.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(first))

    def path_of(self, number: int) -> Path:
        return self._directory / f"{self._stem}-{number:05d}.arrows"

    @property
    def total_bytes(self) -> int:
        return sum(self._sizes)

    def append(self, batch: pa.Buffer) -> None:
        """Write a serialized batch; on return the operating system has it.

        Raises `LogFullError`: the log would exceed its maximum size. `OSError`: the batch
        could not be written. The files are unchanged.
        """
        if self._closed:
            raise OSError(errno.EBADF, f"the {self._stem} are closed")
        total, head = self.total_bytes + batch.size, self._head.size
        starts = self._file is None
        if self._file is not None and self._sizes[-1] > head:
            starts = self._sizes[-1] + batch.size > self._max_file_bytes
            total += len(END_OF_STREAM) if starts else 0
        total += head if starts else 0
        if total > self.max_total_bytes:
            limit = f"the limit is {self.max_total_bytes}"
            message = f"the {self._stem} would take {total} bytes; {limit}"
            raise LogFullError(errno.ENOSPC, message)
        if starts:
            self.start()
        assert self._file is not None
        self._check_file(self._file)
        self._sizes[-1] = self._write(self._file, batch, self._sizes[-1])

    def _check_file(self, file: int) -> None:
        """Raise `OSError` if another program removed, replaced or changed the file."""
        path, own = self.path_of(len(self._sizes) - 1), os.fstat(file)
        try:
            there = os.stat(path)
        except FileNotFoundError:
            reason = "it was removed"
        else:
            if (there.st_ino, there.st_dev) != (own.st_ino, own.st_dev):
                reason = "another file is in its place"
            elif own.st_size != self._sizes[-1]:
                reason = (
                    f"it has {own.st_size} bytes, but {self._sizes[-1]} were written"
                )
            else:
                return
        raise OSError(
            errno.EIO, f"another program changed the log: {reason}", str(path)
        )

    def start(self) -> None:
        """Create the next file, then end the one before; done by `append` if needed."""
        path = self.path_of(len(self._sizes))
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        try:
            size = self._write(file, self._head, 0)
            if self._fsync:
                # the file's name must survive a crash as well
                folder = os.open(self._directory, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError:
            os.close(file)
            path.unlink()
            raise
        self._finish()
        self._file = file
        self._sizes.append(size)

    def close(self) -> None:
        self._closed = True
        self._finish()

    def _finish(self) -> None:
        if self._file is not None:
            # a stream without an end marker is complete too
            with suppress(OSError):
                size = self._write(self._file, END_OF_STREAM, self._sizes[-1])
                self._sizes[-1] = size
            file, self._file = self._file, None
            # its batches were written before; some file systems fail here
            with suppress(OSError):
                os.close(file)

    def _write(self, file: int, data: pa.Buffer | bytes, begin: int) -> int:
        """Write at the end of a file, which is at ``begin``; return the new end."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(file, left) :]
            if self._fsync:
                os.fsync(file)
        except OSError:
            # half a batch would hide all later ones from readers
            os.ftruncate(file, begin)
            os.lseek(file, begin, os.SEEK_SET)
            raise
        return begin + memoryview(data).nbytes

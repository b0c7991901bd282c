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


class AppendLog:
    """A series of Arrow IPC streams: ``STEM-00000.arrows``, ``STEM-00001.arrows``, ...

    The first file is created by `start`, or with the first batch. ``directory``:
    created if missing. ``stem``: start of the file names. ``schema``: of every batch.
    ``fsync``: also write each batch to disk, so that it survives a crash of the
    machine. ``max_file_bytes``, ``max_file_rows``: maximum size of a file. A larger
    batch gets a file of its own. Raises `FileExistsError`: the directory contains a
    file of the series.
    """

    def __init__(
        self,
        directory: Path,
        stem: str,
        schema: pa.Schema,
        *,
        fsync: bool = False,
        max_file_bytes: int | None = None,
        max_file_rows: int | None = None,
    ) -> None:
        self._directory = directory
        self._stem = stem
        self._schema = schema
        self._fsync = fsync
        self._max_file_bytes = math.inf if max_file_bytes is None else max_file_bytes
        self._max_file_rows = math.inf if max_file_rows is None else max_file_rows
        self._file: int | None = None
        self._rows = 0
        self._end = 0
        self._files = 0  # number of files
        self._closed = False
        self._full_bytes = 0  # bytes of all files but the last
        directory.mkdir(parents=True, exist_ok=True)
        first = self.path_of(0)
        if first.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(first))

    def path_of(self, number: int) -> Path:
        """Return the path of the file with that number."""
        return self._directory / f"{self._stem}-{number:05d}.arrows"

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return self._full_bytes + self._end

    def bytes_with(self, data: pa.Buffer, n_rows: int) -> int:
        """Return what `total_bytes` would be after a batch."""
        size = self.total_bytes + len(memoryview(data))
        if self._file is None or self._overflows(len(memoryview(data)), n_rows):
            size += len(memoryview(self._schema.serialize()))
            size += 0 if self._file is None else len(END_OF_STREAM)
        return size

    def append(self, batch: pa.RecordBatch) -> None:
        """Write one batch; on return the operating system has it.

        Raises `OSError`: it could not be written. The files are unchanged.
        """
        self.append_buffer(batch.serialize(), batch.num_rows)

    def append_buffer(self, data: pa.Buffer, n_rows: int) -> None:
        """Write a serialized batch as `append` does."""
        if self._closed:
            raise OSError(errno.EBADF, f"the {self._stem} are closed")
        if self._file is None or self._overflows(len(memoryview(data)), n_rows):
            self.start()
        self._write(data)
        self._rows += n_rows

    def close(self) -> None:
        """End the stream and close the file."""
        self._closed = True
        if self._file is not None:
            # a stream without an end marker is complete too
            with suppress(OSError):
                self._write(pa.py_buffer(END_OF_STREAM))
            os.close(self._file)
            self._file = None

    def _overflows(self, n_bytes: int, n_rows: int) -> bool:
        return self._rows > 0 and (
            self._end + n_bytes > self._max_file_bytes
            or self._rows + n_rows > self._max_file_rows
        )

    def start(self) -> None:
        """Create the next file, then end the full one; done by `append` if needed."""
        path = self.path_of(self._files)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        old, old_end = self._file, self._end
        self._file, self._end = os.open(path, flags, 0o644), 0
        try:
            self._write(self._schema.serialize())
            if self._fsync:
                # the file's name must survive a crash as well
                folder = os.open(self._directory, os.O_RDONLY)
                try:
                    os.fsync(folder)
                finally:
                    os.close(folder)
        except OSError:
            os.close(self._file)
            path.unlink()
            self._file, self._end = old, old_end
            raise
        self._files += 1
        self._rows = 0
        self._full_bytes += old_end
        if old is not None:
            # a stream without an end marker is complete too
            with suppress(OSError):
                self._full_bytes += os.write(old, END_OF_STREAM)
            os.close(old)

    def _write(self, buffer: pa.Buffer) -> None:
        assert self._file is not None
        left = memoryview(buffer)
        try:
            while left:
                left = left[os.write(self._file, left) :]
            if self._fsync:
                os.fsync(self._file)
        except OSError:
            # half a batch would hide all later ones from readers
            os.ftruncate(self._file, self._end)
            os.lseek(self._file, self._end, os.SEEK_SET)
            raise
        self._end += len(memoryview(buffer))

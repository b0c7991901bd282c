"""Which format a file is of, and how it is opened."""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias, get_args

import pyarrow as pa

from trajkit.errors import FormatError, TrajkitError

Format: TypeAlias = Literal[
    "parquet", "arrow", "arrows", "jsonl", "jsonl.gz", "jsonl.zst"
]

_SUFFIXES: dict[str, Format] = {
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
    ".arrows": "arrows",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".jsonl.gz": "jsonl.gz",
    ".ndjson.gz": "jsonl.gz",
    ".jsonl.zst": "jsonl.zst",
    ".ndjson.zst": "jsonl.zst",
}
_FIRST_BYTES: tuple[tuple[bytes, Format], ...] = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\xff\xff\xff\xff", "arrows"),
    (b"\x1f\x8b", "jsonl.gz"),
    (b"\x28\xb5\x2f\xfd", "jsonl.zst"),
    (b"{", "jsonl"),
)
_CODECS = {"jsonl.gz": "gzip", "jsonl.zst": "zstd"}


def is_json(kind: Format) -> bool:
    return kind.startswith("jsonl")


def name_of(file: Path | BinaryIO) -> str:
    """What errors and warnings call a file."""
    if isinstance(file, Path):
        return str(file)
    return str(getattr(file, "name", "open file"))


def format_of(file: Path | BinaryIO, *, writing: bool = False) -> Format:
    """The format by a path's suffix, or by the first bytes of an open file.

    Raises
    ------
    FormatError
        Neither says one.
    FileNotFoundError
        A path to read from says none, and there is nothing.
    """
    if isinstance(file, Path):
        kind = kind_of(file)
        if kind is None:
            if not writing and not file.exists():
                raise FileNotFoundError(
                    errno.ENOENT, os.strerror(errno.ENOENT), str(file)
                )
            raise FormatError(
                f"{file}: the suffix is of no known format: expected one of "
                f"{', '.join(_SUFFIXES)}"
            )
        return kind
    if writing:
        raise FormatError(
            "an open file has no suffix: give format= as one of "
            f"{', '.join(get_args(Format))}"
        )
    if not file.seekable():
        raise FormatError(
            f"{name_of(file)} cannot be read twice to find its format: give format= as "
            f"one of {', '.join(get_args(Format))}"
        )
    at = file.tell()
    head = file.read(8)
    file.seek(at)
    for magic, kind in _FIRST_BYTES:
        if head.startswith(magic):
            return kind
    raise FormatError(f"{name_of(file)} begins with {head!r}, as no known format does")


def check_text(head: bytes, name: str) -> None:
    """Raise FormatError if bytes that should be JSON begin as a file of another format."""
    for magic, kind in _FIRST_BYTES:
        if head.startswith(magic) and kind != "jsonl":
            raise FormatError(
                f"{name} is named as JSON lines and holds {kind}: rename it, or give "
                f"format={kind!r}"
            )


def kind_of(path: Path) -> Format | None:
    """The format that the suffix of a path says, or None."""
    name = path.name.lower()
    found = [suffix for suffix in _SUFFIXES if name.endswith(suffix)]
    return _SUFFIXES[max(found, key=len)] if found else None


def paths_in(path: Path) -> list[Path]:
    """The path itself, or the files of known formats below a directory, sorted.

    Raises
    ------
    FormatError
        A directory without any.
    """
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if kind_of(file) is not None
        and file.is_file()
        and not any(
            part.startswith((".", "_")) for part in file.relative_to(path).parts
        )
    )
    if not found:
        raise FormatError(
            f"{path} holds no file of a known format ({', '.join(_SUFFIXES)})"
        )
    return found


class _Borrowed:
    """The caller's open file, which stays open when Arrow closes what it was given."""

    def __init__(self, file: BinaryIO) -> None:
        self.closed = False
        self.read, self.write, self.flush = file.read, file.write, file.flush
        self.seek, self.tell = file.seek, file.tell
        self.seekable, self.readable = file.seekable, file.readable
        self.writable = file.writable

    def close(self) -> None:
        self.closed = True


def open_input(file: Path | BinaryIO, kind: Format) -> pa.NativeFile:
    """The file's content, decompressed."""
    raw = pa.OSFile(str(file)) if isinstance(file, Path) else _borrow(file, "r")
    codec = _CODECS.get(kind)
    if codec is None:
        return raw
    if isinstance(file, Path) and not raw.size():
        raise FormatError(f"{file} is empty: it has not even a header of {codec}")
    return pa.CompressedInputStream(raw, codec)


def _borrow(file: BinaryIO, mode: str) -> pa.PythonFile:
    return pa.PythonFile(_Borrowed(file), mode)


@contextmanager
def atomic(target: Path | BinaryIO, kind: Format) -> Iterator[pa.NativeFile]:
    """A file to write to; a path gets it whole when the block ends without an error."""
    codec = _CODECS.get(kind)
    if not isinstance(target, Path):
        with _borrow(target, "w") as raw:
            yield from _compressed(raw, codec)
        return
    with whole(target) as path, pa.OSFile(str(path), "w") as raw:
        yield from _compressed(raw, codec)


def check_folder(folder: Path) -> None:
    """Raise FileNotFoundError unless there is such a directory to write to."""
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))


@contextmanager
def naming(draft: Path, target: Path) -> Iterator[None]:
    """Errors inside that name the draft of a file name the file."""
    try:
        yield
    except (OSError, TrajkitError) as error:
        error.args = tuple(
            part.replace(draft.name, target.name) if isinstance(part, str) else part
            for part in error.args
        )
        if isinstance(error, OSError) and error.filename is not None:
            error.filename = str(error.filename).replace(draft.name, target.name)
        raise


@contextmanager
def whole(target: Path) -> Iterator[Path]:
    """A path that becomes the target when the block ends without an error."""
    check_folder(target.parent)
    handle, name = tempfile.mkstemp(
        prefix=f".{target.name}.", suffix=".tmp", dir=target.parent
    )
    os.close(handle)
    try:
        with naming(Path(name), target):
            yield Path(name)
        # mkstemp keeps others out; a file that is kept follows the user's umask
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _compressed(raw: pa.NativeFile, codec: str | None) -> Iterator[pa.NativeFile]:
    if codec is None:
        yield raw
    else:
        with pa.CompressedOutputStream(raw, codec) as file:
            yield file

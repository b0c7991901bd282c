"""File formats: how one is recognized, and how files are opened and replaced."""

import errno
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeAlias, get_args

import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit.errors import ArgumentError, FormatError, TrajkitError

Format: TypeAlias = Literal[
    "parquet",
    "arrow",
    "arrows",
    "jsonl",
    "jsonl.gz",
    "jsonl.zst",
    "json",
    "json.gz",
    "json.zst",
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
    ".json": "json",
    ".json.gz": "json.gz",
    ".json.zst": "json.zst",
}
_FIRST_BYTES: tuple[tuple[bytes, Format], ...] = (
    (b"PAR1", "parquet"),
    (b"ARROW1", "arrow"),
    (b"\xff\xff\xff\xff", "arrows"),
    (b"\x1f\x8b", "jsonl.gz"),
    (b"\x28\xb5\x2f\xfd", "jsonl.zst"),
    (b"{", "jsonl"),
    (b"[", "json"),
)
_CODECS = {"gz": "gzip", "zst": "zstd"}


def is_json(kind: Format) -> bool:
    """Whether a format is text: JSON lines, or one JSON value."""
    return kind.startswith("json")


def is_one_value(kind: Format) -> bool:
    """Whether a file may be one array or object of JSON. It may have lines, too."""
    return kind.split(".")[0] == "json"


def name_of(file: Path | BinaryIO) -> str:
    """What errors and warnings call a file."""
    if isinstance(file, Path):
        return str(file)
    return str(getattr(file, "name", "open file"))


def format_of(
    file: Path | BinaryIO, format: Format | None = None, *, writing: bool = False
) -> Format:
    """The format, if one is given; else of a path by suffix, of an open file by its first
    bytes.
    """
    if format is not None:
        check_choice("format", format, Format)
        return format
    if isinstance(file, Path):
        if not writing and kind_of(file) is None and not file.exists():
            raise _not_found(file)
        kinds = _SUFFIXES.items()
        # JSON is written as lines
        known = [end for end, kind in kinds if not (writing and is_one_value(kind))]
        return _SUFFIXES[check_suffix(file, known)]
    if writing or not file.seekable():
        why = "has no suffix" if writing else "cannot be read twice to find its format"
        raise FormatError(
            f"{name_of(file)} {why}: pass format=, one of {', '.join(get_args(Format))}"
        )
    start = file.tell()
    head = file.read(8)
    file.seek(start)
    for magic, kind in _FIRST_BYTES:
        if head.startswith(magic):
            return kind
    raise FormatError(
        f"{name_of(file)} begins with {head!r}: no known format begins like this"
    )


def check_suffix(path: Path, known: Iterable[str]) -> str:
    """The suffix that a path has of those ``known``; ArgumentError if it has none."""
    known = list(known)
    found = [suffix for suffix in known if path.name.lower().endswith(suffix)]
    if not found:
        raise ArgumentError(
            f"{path}: unknown suffix: expected one of {', '.join(known)}"
        )
    return max(found, key=len)


def check_text(head: bytes, name: str) -> None:
    """Raise FormatError if a file with a JSON suffix begins like another format."""
    for magic, kind in _FIRST_BYTES:
        if head.startswith(magic) and not is_json(kind):
            raise FormatError(
                f"{name} has the suffix of JSON lines but contains {kind}: rename it, or "
                f"pass format={kind!r}"
            )


def kind_of(path: Path) -> Format | None:
    """The format of a path's suffix, or None."""
    with suppress(ArgumentError):
        return _SUFFIXES[check_suffix(path, _SUFFIXES)]
    return None


def without_suffix(path: Path) -> Path:
    """The path without the suffix of its format."""
    with suppress(ArgumentError):
        return path.with_name(path.name[: -len(check_suffix(path, _SUFFIXES))])
    return path


def is_listed(path: Path) -> bool:
    """Whether readers of a directory take a file of this name.

    They leave out JSON that is not in lines by its suffix: directories of runs and models
    contain settings.
    """
    kind = kind_of(path)
    return kind is not None and not is_one_value(kind)


def paths_in(path: Path) -> list[Path]:
    """The path itself, or the files of known formats below a directory, sorted."""
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if is_listed(file)
        and file.is_file()
        and not any(p.startswith((".", "_")) for p in file.relative_to(path).parts)
    )
    if not found:
        raise FormatError(
            f"{path} contains no file of a known format ({', '.join(_SUFFIXES)}); a .json "
            "file is read where its own path is given"
        )
    return found


class _Borrowed:
    """The caller's open file; it stays open when Arrow closes this object."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.closed = file, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        self.closed = True


def _codec(kind: Format) -> str | None:
    return _CODECS.get(kind.rpartition(".")[2])


def open_input(file: Path | BinaryIO, kind: Format) -> pa.NativeFile:
    """The file's content, decompressed."""
    codec = _codec(kind)
    if not isinstance(file, Path):
        return pa.input_stream(_Borrowed(file), codec)
    if codec is not None and not file.stat().st_size:
        raise FormatError(f"{file} is empty: it lacks even the header of {codec}")
    return pa.input_stream(str(file), codec)


@contextmanager
def atomic(target: Path | BinaryIO, kind: Format) -> Iterator[pa.NativeFile]:
    """A file to write to; a path appears when the block ends without an error."""
    with ExitStack() as stack:
        into: object = _Borrowed(target)  # type: ignore[arg-type]
        if isinstance(target, Path):
            into = str(stack.enter_context(replacing(target)))
        yield stack.enter_context(pa.output_stream(into, _codec(kind)))


def check_folder(folder: Path) -> None:
    """Raise FileNotFoundError unless the directory exists."""
    if not folder.is_dir():
        raise _not_found(folder)


def _not_found(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


@contextmanager
def naming(draft: Path, target: Path) -> Iterator[None]:
    """Replace the draft's name by the target's in errors that the block raises."""
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
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path that replaces the target when the block ends without an error."""
    check_folder(target.parent)
    handle, name = tempfile.mkstemp(
        prefix=f".{target.name}.", suffix=".tmp", dir=target.parent
    )
    os.close(handle)
    try:
        with naming(Path(name), target):
            yield Path(name)
        # mkstemp makes private files; this one follows the user's umask
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise

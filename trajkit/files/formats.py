"""File formats: how one is recognized, and how files are opened and replaced."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO, Literal, TypeAlias, cast, get_args

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
_OTHERS = {".feather": "arrow", ".ipc": "arrow"}
_OTHERS |= {f".ndjson{codec}": f"jsonl{codec}" for codec in ("", ".gz", ".zst")}
_SUFFIXES = cast(
    dict[str, Format], {**{f".{kind}": kind for kind in get_args(Format)}, **_OTHERS}
)
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
    return str(file if isinstance(file, Path) else getattr(file, "name", "open file"))


def _suffix(path: Path) -> str:
    name = path.name.lower()
    return max((end for end in _SUFFIXES if name.endswith(end)), key=len, default="")


def kind_of(path: Path) -> Format | None:
    return _SUFFIXES.get(_suffix(path))


def without_suffix(path: Path) -> Path:
    return path.with_name(path.name[: len(path.name) - len(_suffix(path))])


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
        # JSON is written as lines
        kinds = _SUFFIXES.items()
        known = {end: one for end, one in kinds if not (writing and is_one_value(one))}
        if (end := _suffix(file)) not in known:
            text = f"{file}: unknown suffix: expected one of {', '.join(known)}"
            way = (
                "" if writing else ". Rename it, or pass it as standard input: - < FILE"
            )
            raise ArgumentError(text + way)
        return known[end]
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


def check_begins(head: bytes, kind: Format, name: str) -> None:
    """Raise FormatError if JSON lines or Arrow IPC begin like another format."""
    family, words = kind[:4], "JSON lines" if is_json(kind) else "Arrow IPC"
    for magic, other in _FIRST_BYTES:
        if head.startswith(magic) and (other[:4] != family or "." in other):
            raise FormatError(
                f"{name} has the suffix of {words} but contains {other}: rename it (in "
                f"Python, format={other!r} reads it, too)"
            )


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
        and not file.is_dir()
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

    def __init__(self, file: object) -> None:
        self._file, self.closed = file, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def close(self) -> None:
        self.closed = True


def _codec(kind: Format) -> str | None:
    return _CODECS.get(kind.rpartition(".")[2])


def open_input(file: Path | BinaryIO, kind: Format) -> pa.NativeFile:
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
        into: object = _Borrowed(target)
        if isinstance(target, Path):
            into = str(stack.enter_context(replacing(target)))
        yield stack.enter_context(pa.output_stream(into, _codec(kind)))


def not_found(path: str | Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def check_folder(folder: Path) -> None:
    if not folder.is_dir():
        raise not_found(folder)


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path that replaces the target when the block ends without an error.

    Errors that the block raises name the target.
    """
    check_folder(target.parent)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    # readers of directories skip hidden files; the suffix determines the format
    draft = target.with_name(f".{token_hex(8)}-{target.name}")
    try:
        draft.touch(exist_ok=False)
        yield draft
        os.replace(draft, target)
    except (OSError, TrajkitError) as error:
        error.args = tuple(
            part.replace(draft.name, target.name) if isinstance(part, str) else part
            for part in error.args
        )
        if isinstance(error, OSError) and error.errno is not None:
            name = str(
                error.filename or target
            )  # Arrow's errors of a full disk have none
            error.filename = name.replace(draft.name, target.name)
        raise
    finally:
        draft.unlink(missing_ok=True)

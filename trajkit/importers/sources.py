"""Where files come from: paths, patterns, directories, standard input, addresses."""

import glob
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from os import PathLike, fspath
from pathlib import Path, PurePosixPath
from typing import TypeAlias

from trajkit.errors import ArgumentError, FormatError
from trajkit.files.sources import fetched

Sources: TypeAlias = str | PathLike[str] | Iterable[str | PathLike[str]]
"""A path, or an iterable of paths."""

# files of a directory that may contain records
_JSON = (
    f".{kind}{end}"
    for kind in ("json", "jsonl", "ndjson")
    for end in ("", ".gz", ".zst")
)
SUFFIXES = (
    *_JSON,
    *(".db", ".sqlite", ".sqlite3", ".pt", ".pkl", ".eval", ".traj"),
    *(".parquet", ".arrow"),
)
"""Ends of the names of files in a directory that may contain records."""


@dataclass(frozen=True, slots=True)
class Local:
    """A file to read, and what the report calls it."""

    name: str
    path: Path


@dataclass(frozen=True, slots=True)
class Folder:
    """The files of a directory."""

    name: str
    files: list[Local]


def stem_of(path: Path) -> str:
    """The name of a file without its suffixes."""
    name = path.name
    for end in (".gz", ".zst"):
        name = name.removesuffix(end)
    return PurePosixPath(name).stem or path.name


def sources_of(source: Sources) -> list[str]:
    """The paths and addresses of a source; raises ArgumentError for anything else."""
    if isinstance(source, str | PathLike):
        source = [source]
    elif isinstance(source, bytes | dict) or not isinstance(source, Iterable):
        raise ArgumentError(
            f"source is a {type(source).__name__}: expected a path, or paths"
        )
    listed = list(source)
    for given in listed:
        if not isinstance(given, str | PathLike):
            raise ArgumentError(f"source has a {type(given).__name__}: expected paths")
    return [fspath(given) for given in listed]


def _resolved(text: str) -> list[str]:
    """The paths of a pattern; a path that exists, or that is none, itself."""
    if glob.has_magic(text) and not Path(text).exists():
        return sorted(glob.glob(text, recursive=True))
    return [text]


def files_of(source: Sources) -> Iterator[Local | Folder]:
    """The files and directories of a source; temporary copies last for one step."""
    for text in sources_of(source):
        yield from _of_path(text)


def _of_path(text: str) -> Iterator[Local | Folder]:
    if text == "-":
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "stdin")
            with path.open("wb") as copy:
                shutil.copyfileobj(sys.stdin.buffer, copy)
            yield Local("standard input", path)
        return
    if "://" in text:
        yield from _fetched(text)
        return
    path = Path(text)
    if path.is_dir():
        yield Folder(text, [Local(str(one), one) for one in _in_directory(path)])
        return
    found = _resolved(text)
    if found != [text]:
        if not found:
            raise FormatError(f"{text}: no file has a name of this pattern")
        for one in found:
            yield from _of_path(one)
        return
    path.stat()  # the same error in every format if it is missing
    yield Local(text, path)


def _in_directory(path: Path) -> list[Path]:
    return sorted(
        file
        for file in path.rglob("*")
        if file.name.lower().endswith(SUFFIXES)
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )


def _fetched(address: str) -> Iterator[Local | Folder]:
    """Temporary copies of what is at an address of fsspec."""
    with tempfile.TemporaryDirectory() as folder:
        copies = [
            Local(name, copy)
            for name, copy in fetched(
                address, Path(folder), lambda name: name.lower().endswith(SUFFIXES)
            )
        ]
        if len(copies) == 1 and copies[0].name.endswith(address.partition("://")[2]):
            yield copies[0]
        else:
            yield Folder(address, copies)

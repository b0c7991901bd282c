"""Outputs that would replace what is read, or one another.

Files are compared by device and inode, so that links, relative paths and the spellings of
a file system that ignores case are seen. What does not exist yet is compared by its path.
"""

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from unicodedata import normalize
from weakref import WeakKeyDictionary

from trajkit.errors import ArgumentError, FormatError
from trajkit.files.arrow import table_kind
from trajkit.files.formats import is_json, is_listed, kind_of, paths_in

AnyPath: TypeAlias = str | os.PathLike[str]

# Readers of turns skip files in a directory whose metadata name another kind of table.
_OF_TURNS = ("", "turns", "amendments", "sessions")

# unfinished scans of files, and what they read
_scans: WeakKeyDictionary[Iterator[Any], list[Path]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True)
class Input:
    """A file or a directory that is read.

    ``kinds`` are the kinds of tables that its reader takes in a directory, None for all,
    and ``suffixes`` the ends of names that it takes there, if they are not those of
    `trajkit.files.formats`.
    """

    path: Path
    kinds: tuple[str, ...] | None = None
    suffixes: tuple[str, ...] = ()

    def takes(self, file: Path) -> bool:
        """Whether the reader takes a file of this name in the directory."""
        if self.suffixes:
            return file.name.lower().endswith(self.suffixes)
        return is_listed(file)

    def files(self) -> Iterator[Path]:
        """The files that are read."""
        if not self.path.is_dir():
            yield self.path
            return
        for file in self.path.rglob("*") if self.suffixes else _paths_in(self.path):
            stored, kind = kind_of(file), None
            if self.kinds is not None and stored is not None and not is_json(stored):
                kind = table_kind(file, stored)
            if self.takes(file) and (self.kinds is None or (kind or "") in self.kinds):
                yield file


def turns_inputs(sources: Iterable[AnyPath]) -> list[Input]:
    """Turns are read from these paths."""
    return inputs_of(sources, _OF_TURNS)


def inputs_of(
    sources: Iterable[AnyPath],
    kinds: tuple[str, ...] | None = None,
    suffixes: tuple[str, ...] = (),
) -> list[Input]:
    """The inputs at paths and at those that match a pattern."""
    found = []
    for one in (os.fspath(source) for source in sources):
        pattern = glob.has_magic(one) and not os.path.lexists(one)
        paths = glob.glob(one, recursive=True) if pattern else [one]
        found += [Input(Path(path), kinds, suffixes) for path in paths]
    return found


def check_outputs(
    outputs: Mapping[str, tuple[AnyPath, str]],
    inputs: Iterable[Input],
    *,
    clobber: bool = True,
) -> None:
    """Raise ArgumentError if an output is an input, or two outputs are one.

    ``outputs`` have a path and the kind of their table, by what errors call them. A path
    that ends with a separator is a directory of parts. Without ``clobber`` no output may
    exist, except as a directory.
    """
    inputs = list(inputs)
    for name, (path, kind) in outputs.items():
        for one in inputs:
            if one.path.exists():
                _check_input(name, Path(path), kind, one, is_parts(path))
    _check_distinct(
        {name: (Path(path), is_parts(path)) for name, (path, _) in outputs.items()}
    )
    for name, (path, _) in outputs.items():
        if not clobber and os.path.lexists(path) and not os.path.isdir(path):
            raise ArgumentError(f"{name} {path} exists, and --no-clobber is given")


def is_parts(output: AnyPath) -> bool:
    """Whether the output is a directory of parts."""
    text = os.fspath(output)
    return text.endswith(os.sep) or os.path.isdir(text)


def _check_input(name: str, path: Path, kind: str, one: Input, parts: bool) -> None:
    """Raise ArgumentError if an output would replace an input, or be read as one."""
    own = identity(path)
    source = f"{one.path}"
    if own is not None and own == identity(one.path):
        raise ArgumentError(
            f"{name} {path} is the input {source}, which it would replace: choose another "
            "path"
        )
    if own is not None and not path.is_dir():
        for file in one.files():
            if identity(file) == own:
                raise ArgumentError(
                    f"{name} {path} is the input {file}, which it would replace: choose "
                    "another path"
                )
    if parts and any(identity(up) == own for up in _above(one.path) if own):
        raise ArgumentError(
            f"{name} {path} is a directory that contains the input {source}: choose "
            "another directory"
        )
    if not one.path.is_dir():
        return
    folder = identity(one.path)
    inside = next((up for up in _above(path) if identity(up) == folder), None)
    if inside is None:
        return
    part = path / "part-00000.parquet" if parts else path
    relative = part.absolute().relative_to(inside).parts
    hidden = any(word.startswith((".", "_")) for word in relative)
    stored = kind_of(part)
    named = stored is not None and not is_json(stored)
    skipped = one.kinds is not None and named and kind not in one.kinds
    if one.takes(part) and not hidden and not skipped:
        raise ArgumentError(
            f"{name} {path} is in the directory {source}, which is read: the next run "
            "would take it for an input. Choose a path outside of it"
        )


def _check_distinct(outputs: Mapping[str, tuple[Path, bool]]) -> None:
    """Raise ArgumentError if two outputs are one file, or one is inside another."""
    names: dict[object, tuple[str, Path]] = {}
    for name, (path, _) in outputs.items():
        keys = [_spelling(path), identity(path)]
        for key in filter(None, keys):
            other, first = names.setdefault(key, (name, path))
            if other != name:
                raise ArgumentError(
                    f"{other} {first} and {name} {path} are one path: each needs its own"
                )
    for name, (path, parts) in outputs.items():
        for other, (inner, _) in outputs.items():
            if parts and _spelling(path) in map(_spelling, _above(inner)):
                raise ArgumentError(
                    f"{other} {inner} is in the directory of parts {name} {path}: choose "
                    "a path outside of it"
                )


def identity(path: AnyPath) -> tuple[int, int] | None:
    """Device and inode of what a path leads to; None if nothing is there."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _spelling(path: Path) -> str:
    """A path as file systems compare it that ignore case and forms of Unicode."""
    return normalize("NFC", os.path.realpath(path)).casefold()


def _above(path: Path) -> list[Path]:
    """The directories that contain a path, as spelled and as links resolve."""
    return [*path.absolute().parents, *Path(os.path.realpath(path)).parents]


def _paths_in(folder: Path) -> list[Path]:
    try:
        return paths_in(folder)
    except FormatError:  # no file of a known format
        return []


def reading(scan: Iterator[Any], paths: list[Path]) -> None:
    """Note that an iterator reads paths, until it is exhausted or closed."""
    _scans[scan] = paths


def check_not_read(target: Path) -> None:
    """Raise ArgumentError if an unfinished scan reads the file that will be replaced."""
    own = identity(target)
    if own is None:
        return
    for scan, paths in list(_scans.items()):
        if getattr(scan, "gi_frame", None) is None:
            continue  # it has ended
        files = (file for path in paths for file in Input(path).files())
        if any(identity(file) == own for file in files):
            raise ArgumentError(
                f"{target} is read by a scan that has not ended, and would be replaced: "
                "write to another path"
            )

"""Outputs that would replace what is read, or one another.

Files are compared by device and inode, so that links, relative paths and the spellings of
a file system that ignores case are seen. What does not exist yet is compared by its path.
"""

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from unicodedata import normalize
from weakref import WeakKeyDictionary

from trajkit.errors import ArgumentError
from trajkit.files.arrow import table_kind
from trajkit.files.formats import format_of, is_json, is_listed, kind_of
from trajkit.files.sources import is_address, paths_of

AnyPath: TypeAlias = str | os.PathLike[str]

# Readers of turns skip files in a directory whose metadata name another kind of table.
_OF_TURNS = ("", "turns", "amendments", "sessions")

# unfinished scans of files, and what they read
_scans: WeakKeyDictionary[Iterator[Any], list[Path]] = WeakKeyDictionary()


class Input(NamedTuple):
    path: Path
    # kinds of tables that its reader takes in a directory; None: all
    kinds: tuple[str, ...] | None = None
    # ends of names that it takes there, if not those of `trajkit.files.formats`
    suffixes: tuple[str, ...] = ()

    def takes(self, file: Path, kind: str | None) -> bool:
        """Whether the reader of the directory takes a table of this kind in a file, whose
        path is relative to it.
        """
        if any(word.startswith((".", "_")) for word in file.parts):
            return False
        if self.suffixes:
            return file.name.lower().endswith(self.suffixes)
        # lines have no metadata
        skipped = self.kinds is not None and (kind or "") not in self.kinds
        return is_listed(file) and not (skipped and not is_json(format_of(file)))

    def reads(self, own: tuple[int, int]) -> Path | None:
        if not self.path.is_dir():
            return self.path if identity(self.path) == own else None
        for file in self.path.rglob("*"):
            if identity(file) == own and file.is_file():
                stored = kind_of(file)
                kind = None if stored is None else table_kind(file, stored)
                if self.takes(file.relative_to(self.path), kind):
                    return file
        return None


def turns_inputs(sources: Iterable[AnyPath]) -> list[Input]:
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
    inputs = [one for one in inputs if one.path.exists()]
    for name, (path, kind) in outputs.items():
        for one in inputs:
            if fault := _clash(Path(path), is_parts(path), kind, one):
                raise ArgumentError(f"{name} {Path(path)} {fault}")
    named: dict[object, str] = {}
    for name, (path, _) in outputs.items():
        text = f"{name} {Path(path)}"
        for key in filter(None, (_spelling(path), identity(path))):
            if (other := named.setdefault(key, text)) != text:
                raise ArgumentError(
                    f"{other} and {text} are one path: each needs its own"
                )
        for other, (inner, _) in outputs.items():
            if is_parts(path) and _spelling(path) in map(_spelling, _above(inner)):
                raise ArgumentError(
                    f"{other} {inner} is in the directory of parts {text}: choose a path "
                    "outside of it"
                )
        if not clobber and os.path.lexists(path) and not os.path.isdir(path):
            raise ArgumentError(f"{name} {path} exists, and --no-clobber is given")


def is_parts(output: AnyPath) -> bool:
    return os.fspath(output).endswith(os.sep) or os.path.isdir(output)


def _clash(path: Path, parts: bool, kind: str, one: Input) -> str:
    own, source = identity(path), identity(one.path)
    if own is not None:
        read = one.path if own == source else None
        if read is None and not path.is_dir():
            read = one.reads(own)
        if read is not None:
            return f"is the input {read}, which it would replace: choose another path"
        if parts and own in map(identity, _above(one.path)):
            return f"is a directory that contains the input {one.path}: choose another"
    inside = [up for up in _above(path) if one.path.is_dir() and identity(up) == source]
    part = path / "part-00000.parquet" if parts else path
    if inside and one.takes(part.absolute().relative_to(inside[0]), kind):
        return (
            f"is in the directory {one.path}, which is read: the next run would take it "
            "for an input. Choose a path outside of it"
        )
    return ""


def identity(path: AnyPath) -> tuple[int, int] | None:
    """Device and inode of what a path leads to; None if nothing is there."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _spelling(path: AnyPath) -> str:
    """A path as file systems compare it that ignore case and forms of Unicode."""
    return normalize("NFC", os.path.realpath(path)).casefold()


def _above(path: AnyPath) -> list[Path]:
    """The directories that contain a path, as spelled and as links resolve."""
    return [*Path(path).absolute().parents, *Path(os.path.realpath(path)).parents]


def reading(scan: Iterator[Any], source: Any) -> None:
    """Note that an iterator reads the paths of a source, until it ends or is closed."""
    given = source if isinstance(source, list | tuple) else [source]
    _scans[scan] = paths_of([one for one in given if not is_address(one)]) or []


def check_not_read(target: Path) -> None:
    """Raise ArgumentError if an unfinished scan reads the file that will be replaced."""
    own = identity(target)
    for scan, paths in list(_scans.items()):
        # a scan without a frame has ended
        if own is None or getattr(scan, "gi_frame", None) is None:
            continue
        if any(Input(path).reads(own) for path in paths):
            raise ArgumentError(
                f"{target} is read by a scan that has not ended, and would be replaced: "
                "write to another path"
            )

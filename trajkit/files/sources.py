"""Files that are read together: their paths, and the sessions that they share.

Two files may use one session id: because a log was continued in a second file, or because
two runs number their sessions alike. Calls of two runs must not become one session, so a
session whose calls start over in a second file is an error, unless its ids are made
distinct with a prefix.

No output may replace what is read, or another output (`check_outputs`). Files are compared
by device and inode, so that links, relative paths and the spellings of a file system that
ignores case are seen. What does not exist yet is compared by its path.
"""

import ast
import errno
import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Literal, NamedTuple, TypeAlias
from unicodedata import normalize

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError, TrajkitError
from trajkit.files import formats, jsonl
from trajkit.files.arrow import sized_batches, table_kind
from trajkit.tables import lazy_compute as pc
from trajkit.tables.columns import with_column
from trajkit.turns.records import from_records
from trajkit.turns.runs import Prompts

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, or a list of paths."""

SessionPrefix: TypeAlias = Literal["file", "folder", "no"]

_PLACE = re.compile(
    r"""session (?P<name>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"), (?:turn|row) (?P<n>\d+)"""
)
_RECORD = re.compile(r"record \d+\b")


def paths_of(source: object) -> list[Path] | None:
    """The paths of a source, which exist; None if it is none: an open file or a table.

    A path that does not exist and contains ``*``, ``?`` or ``[`` is a pattern of paths.
    """
    given: Sequence[Any] = [source]
    if isinstance(source, list | tuple) and source:
        given = source
    if not all(isinstance(one, str | os.PathLike) for one in given):
        return None
    found: list[Path] = []
    for text in map(os.fspath, given):
        matches = _matches(text)
        if not matches:
            raise FileNotFoundError(errno.ENOENT, "no file has such a name", text)
        for one in matches:
            if not os.path.exists(one):
                raise formats.not_found(one)
        found += map(Path, matches)
    check_distinct(found, set())
    return found


def _matches(text: str) -> list[str]:
    if os.path.lexists(text) or not glob.has_magic(text):
        return [text]
    return sorted(glob.glob(text, recursive=True))


def check_distinct(files: Iterable[Path], seen: set[Path]) -> None:
    """Add files to those that were seen; raise ArgumentError if one is there already."""
    for file in files:
        if file.resolve() in seen:
            raise ArgumentError(
                f"{file} is given twice, so its lines would count twice"
            )
        seen.add(file.resolve())


def is_address(source: object) -> bool:
    return isinstance(source, str) and "://" in source


def check_there(source: Any) -> None:
    """Raise now if a file is missing; addresses are looked at when they are read."""
    listed = source if isinstance(source, list | tuple) else [source]
    paths_of([one for one in listed if not is_address(one)])


@contextmanager
def local_files(source: Any) -> Iterator[Any]:
    """The source with temporary copies of what is at addresses (``s3://bucket/log``).

    Errors that the block raises name the address.
    """
    listed = list(source) if isinstance(source, list | tuple) else [source]
    if not any(map(is_address, listed)):
        yield source
        return
    addresses: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as root:
        for number, one in enumerate(listed):
            if not is_address(one):
                continue
            listed[number] = folder = Path(root, str(number))
            folder.mkdir()
            copies = fetched(one, folder, lambda name: formats.is_listed(Path(name)))
            addresses |= {str(copy): name for name, copy in copies}
            # a directory may have other tables, which its reader skips
            if len(copies) == 1 and copies[0][0].endswith(one.partition("://")[2]):
                listed[number] = copies[0][1]
        try:
            yield listed
        except TrajkitError as error:
            text = str(error)
            for copy, name in addresses.items():
                text = text.replace(copy, name)
            error.args = (text, *error.args[1:])
            raise


def fetched(
    address: str, folder: Path, takes: Callable[[str], bool]
) -> list[tuple[str, Path]]:
    """Addresses and copies of a file, or of the files of a directory or pattern whose
    names ``takes`` accepts.
    """
    try:
        import fsspec  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        raise ArgumentError(f"{address} needs fsspec: pip install fsspec") from None
    try:
        system, path = fsspec.core.url_to_fs(address)
    except (ImportError, ValueError) as error:
        raise ArgumentError(f"{address}: {error}") from None
    listed = [path]
    if glob.has_magic(path) or system.isdir(path):
        found = system.glob(path) if glob.has_magic(path) else system.find(path)
        listed = sorted(filter(takes, found))
        if not listed:
            raise FormatError(f"{address}: no file of a known format is there")
    copies = []
    for number, one in enumerate(listed):
        within = folder / f"{number:06d}"
        within.mkdir()
        copy, name = within / PurePosixPath(one).name, system.unstrip_protocol(one)
        try:
            system.get_file(one, str(copy))
        except FileNotFoundError:
            raise FormatError(f"{name}: no such file") from None
        copies.append((name, copy))
    return copies


class Naming(NamedTuple):
    """The prefixes of session ids, by file.

    ``mode`` "file" takes the path of the file without its suffix, "folder" that of its
    directory, both relative to ``root``. "no" and None: there is no prefix. None: a
    session that starts over in another file is an error.
    """

    mode: SessionPrefix | None
    root: Path

    @classmethod
    def of(cls, paths: Sequence[Path], mode: SessionPrefix | None) -> "Naming":
        if mode is not None:
            check_choice("session_prefix", mode, SessionPrefix)
        if len(paths) == 1 and paths[0].is_dir():
            return cls(mode, paths[0])
        parents = [os.path.abspath(path.parent) for path in paths]
        return cls(mode, Path(os.path.commonpath(parents) if parents else "."))

    def prefix(self, file: Path) -> str:
        if self.mode in (None, "no"):
            return ""
        own = Path(os.path.abspath(file)).relative_to(os.path.abspath(self.root))
        path = formats.without_suffix(own) if self.mode == "file" else own.parent
        text = path.as_posix()
        return f"{self.root.resolve().name if text == '.' else text}/"

    def table(self, table: pa.Table, file: Path) -> pa.Table:
        prefix = self.prefix(file)
        if not prefix or "session_id" not in table.column_names:
            return table
        ids = table.column("session_id").cast(pa.string())
        named = pc.binary_join_element_wise(prefix, ids, "")
        return with_column(table, "session_id", named)

    def records(
        self, files: Sequence[tuple[Path, Iterable[jsonl.Record]]]
    ) -> Iterator[jsonl.Record]:
        """The calls of files with prefixed session ids.

        A session that starts over in another file is refused. It continues where a prompt
        extends that of an earlier call, as each request of a conversation does. Calls with
        a ``turn_index`` have their place by it.
        """
        files_of = Continuations()
        for file, records in files:
            prefix = self.prefix(file)
            for record in records:
                name = record.get("session_id")
                if isinstance(name, str):
                    name = prefix + name
                    if self.mode != "no" and len(files) > 1:
                        files_of.check(name, str(file), record)
                    record = {**record, "session_id": name} if prefix else record
                yield record


class Continuations:
    """The files that sessions were in so far, and their prompts."""

    def __init__(self) -> None:
        # the last file of each session, and its prompts
        self._seen: dict[str, tuple[str, Prompts]] = {}

    def check(self, name: str, file: str, record: Mapping[str, object]) -> None:
        """Note a call of a session that is in this file; raise if it starts over there.

        It continues if its prompt extends that of an earlier call, as each request of a
        conversation does, or if it has a turn_index.
        """
        try:
            prompt = np.asarray(record.get("prompt_ids"), np.int64).tobytes()
        except (TypeError, ValueError, OverflowError):
            return  # reading the turns reports it
        last, prompts = self._seen.get(name, (file, Prompts()))
        if last != file and not prompts.extended(prompt):
            if record.get("turn_index") is None:
                raise _reused(name, last, file, "its calls start over there")
        prompts.add(prompt)
        self._seen[name] = file, prompts


def _reused(name: str, first: object, second: object, why: str) -> InvalidTurnsError:
    return InvalidTurnsError(
        f"session {name!r} is in {first} and in {second}, and {why}: if these are two "
        "sessions, pass --session-prefix file (session_prefix='file' in Python; 'folder' "
        "for one prefix per directory). If they are one, give each call its turn_index, "
        "or pass --session-prefix no"
    )


def placed(
    error: InvalidTurnsError,
    files: Sequence[Path],
    format: formats.Format | None,
    naming: Naming,
) -> InvalidTurnsError:
    """The error with the file, and for JSON the line, of the value that it names.

    Files are read again for that. A turn that is in two files is two sessions of one id.
    """
    text = str(error)
    if any(str(file) in text for file in files):
        return error
    found = _PLACE.match(text)
    places: list[tuple[Path, int | None]] = []
    if found is not None:
        name, number = ast.literal_eval(found["name"]), int(found["n"])
        places += _places(name, number, files, format, naming)
    elif _RECORD.match(text):
        for file in files:
            if not places and formats.is_json(kind := formats.format_of(file, format)):
                lines = jsonl.numbered_lines(file, kind)
                places += [(file, n) for n, one in lines if _is_refused(one, text)][:1]
    distinct = list(dict.fromkeys(file for file, _ in places))
    if len(distinct) > 1 and naming.mode != "no":
        return _reused(name, distinct[0], distinct[1], f"both have a turn {number}")
    where = str(files[0]) if len(files) == 1 else ""
    if places:
        file, line = places[-1]
        where = f"{file}" if line is None else f"{file}, line {line}"
    return type(error)(f"{where}: {text}") if where else error


def _places(
    name: str,
    number: int,
    files: Sequence[Path],
    format: formats.Format | None,
    naming: Naming,
) -> Iterator[tuple[Path, int | None]]:
    """Files that have a turn, or a row, of a session, and its line, if there are lines."""
    last = -1
    for file in files:
        kind = formats.format_of(file, format)
        own = name.removeprefix(naming.prefix(file))
        if formats.is_json(kind):
            for line, record in jsonl.numbered_lines(file, kind):
                if str(record.get("session_id")) == own:
                    given = record.get("turn_index", record.get("row_index"))
                    last = given if type(given) is int else last + 1
                    if last == number:
                        yield file, line
            continue
        for index in ("turn_index", "row_index"):
            for keys, *_ in sized_batches(file, kind, ("session_id", index)):
                if {"session_id", index} <= {*keys.schema.names}:
                    ids = keys.column("session_id").cast(pa.string()).to_numpy(False)
                    here = (ids == own) & (np.asarray(keys.column(index)) == number)
                    if here.any():
                        yield file, None


def _is_refused(record: jsonl.Record, text: str) -> bool:
    try:
        from_records([record])
    except InvalidTurnsError as error:
        return _RECORD.sub("", str(error)) == _RECORD.sub("", text)
    return False


AnyPath: TypeAlias = str | os.PathLike[str]

# Readers of turns skip files in a directory whose metadata name another kind of table.
_OF_TURNS = ("", "turns", "amendments", "sessions")


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
        return formats.is_listed(file) and not (
            skipped and not formats.is_json(formats.format_of(file))
        )

    def reads(self, file: Path) -> bool:
        stored = formats.kind_of(file)
        kind = None if stored is None else table_kind(file, stored)
        return file.is_file() and self.takes(file.relative_to(self.path), kind)


def turns_inputs(sources: Iterable[AnyPath]) -> list[Input]:
    return inputs_of(sources, _OF_TURNS)


def inputs_of(
    sources: Iterable[AnyPath],
    kinds: tuple[str, ...] | None = None,
    suffixes: tuple[str, ...] = (),
) -> list[Input]:
    paths = (path for source in sources for path in _matches(os.fspath(source)))
    return [Input(Path(path), kinds, suffixes) for path in paths]


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
    named: dict[object, str] = {}
    for name, (path, kind) in outputs.items():
        text = f"{name} {Path(path)}"
        for fault in (_clash(Path(path), is_parts(path), kind, one) for one in inputs):
            if fault:
                raise ArgumentError(f"{text} {fault}")
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
        read = [one.path] if own == source else []
        if not path.is_dir():
            same = (file for file in one.path.rglob("*") if identity(file) == own)
            read += filter(one.reads, same)
        if read:
            return (
                f"is the input {read[0]}, which it would replace: choose another path"
            )
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
    return normalize("NFC", os.path.realpath(path)).casefold()


def _above(path: AnyPath) -> list[Path]:
    """The directories that contain a path, as spelled and as links resolve."""
    return [*Path(path).absolute().parents, *Path(os.path.realpath(path)).parents]

"""Files that are read together: their paths, and the sessions that they share.

Two files may use one session id: because a log was continued in a second file, or because
two runs number their sessions alike. Calls of two runs must not become one session, so a
session whose calls start over in a second file is an error, unless its ids are made
distinct with a prefix.
"""

import ast
import errno
import glob
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypeAlias

import numpy as np
import pyarrow as pa

from trajkit._arguments import check_choice
from trajkit.errors import ArgumentError, FormatError, InvalidTurnsError, TrajkitError
from trajkit.files import jsonl
from trajkit.files.arrow import key_batches
from trajkit.files.formats import Format, format_of, is_json, is_listed, without_suffix
from trajkit.tables import lazy_compute as pc
from trajkit.tables.columns import with_column
from trajkit.turns.records import from_records

Paths: TypeAlias = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""A path, or a list of paths."""

SessionPrefix: TypeAlias = Literal["file", "folder", "no"]

_PLACE = re.compile(
    r"""session (?P<name>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"), (?:turn|row) (?P<n>\d+)"""
)
_RECORD = re.compile(r"record \d+\b")


def paths_of(source: object) -> list[Path] | None:
    """The paths of a source; None if it is none: an open file or a table.

    A path that does not exist and contains ``*``, ``?`` or ``[`` is a pattern of paths.
    """
    given: Sequence[object] = [source]
    if isinstance(source, list | tuple) and source:
        given = source
    if not all(isinstance(one, str | os.PathLike) for one in given):
        return None
    found: list[Path] = []
    for one in given:
        text = os.fspath(one)  # type: ignore[call-overload]
        if os.path.lexists(text) or not glob.has_magic(text):
            found.append(Path(text))
            continue
        matches = sorted(glob.glob(text, recursive=True))
        if not matches:
            raise FileNotFoundError(errno.ENOENT, "no file has such a name", text)
        found += map(Path, matches)
    names: set[Path] = set()
    for path in found:
        if path.resolve() in names:
            raise ArgumentError(
                f"{path} is given twice, so its lines would count twice"
            )
        names.add(path.resolve())
    return found


def is_address(source: object) -> bool:
    """Whether a source is at an address of fsspec."""
    return isinstance(source, str) and "://" in source


@contextmanager
def local_files(source: Any) -> Iterator[Any]:
    """The source with temporary copies of what is at addresses (``s3://bucket/log``).

    Errors that the block raises name the address.
    """
    listed = list(source) if isinstance(source, list | tuple) else [source]
    if not any(map(is_address, listed)):
        yield source
        return
    with tempfile.TemporaryDirectory() as root:
        found: list[Any] = []
        addresses: dict[str, str] = {}
        for number, one in enumerate(listed):
            if not is_address(one):
                found.append(one)
                continue
            folder = Path(root, str(number))
            folder.mkdir()
            copies = fetched(one, folder, lambda name: is_listed(Path(name)))
            addresses |= {str(copy): name for name, copy in copies}
            # a directory may have other tables, which its reader skips
            single = len(copies) == 1 and copies[0][0].endswith(one.partition("://")[2])
            found.append(copies[0][1] if single else folder)
        try:
            yield found
        except TrajkitError as error:
            text = str(error)
            for copy, name in addresses.items():
                text = text.replace(copy, name)
            error.args = (text, *error.args[1:])
            raise


def fetched(
    address: str, folder: Path, takes: Callable[[str], bool]
) -> list[tuple[str, Path]]:
    """Addresses and copies of a file, or of the files that a directory or pattern has.

    Of a directory or pattern, those whose names ``takes`` accepts.
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
        listed = sorted(one for one in found if takes(one))
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


@dataclass(frozen=True, slots=True)
class Naming:
    """The prefixes of session ids, by file.

    ``mode`` "file" takes the path of the file without its suffix, "folder" that of its
    directory, both relative to ``root``. "no" and None: there is no prefix. None: a
    session that starts over in another file is an error.
    """

    mode: SessionPrefix | None
    root: Path

    @classmethod
    def of(cls, paths: Sequence[Path], mode: SessionPrefix | None) -> "Naming":
        """The naming of files in or below ``paths``."""
        if mode is not None:
            check_choice("session_prefix", mode, SessionPrefix)
        if len(paths) == 1 and paths[0].is_dir():
            return cls(mode, paths[0])
        parents = [os.path.abspath(path.parent) for path in paths]
        return cls(mode, Path(os.path.commonpath(parents) if parents else "."))

    def prefix(self, file: Path) -> str:
        """The prefix of the sessions in a file; empty for none."""
        if self.mode in (None, "no"):
            return ""
        own = Path(os.path.abspath(file)).relative_to(os.path.abspath(self.root))
        path = without_suffix(own) if self.mode == "file" else own.parent
        text = path.as_posix()
        return f"{self.root.resolve().name if text == '.' else text}/"

    def table(self, table: pa.Table, file: Path) -> pa.Table:
        """A table of the file with prefixed session ids."""
        prefix = self.prefix(file)
        if not prefix or "session_id" not in table.column_names:
            return table
        ids = table.column("session_id").cast(pa.string())
        return with_column(
            table, "session_id", pc.binary_join_element_wise(prefix, ids, "")
        )

    def record(self, record: jsonl.Record, file: Path) -> jsonl.Record:
        """A call of the file with a prefixed session id."""
        prefix, name = self.prefix(file), record.get("session_id")
        if not prefix or not isinstance(name, str):
            return record
        return {**record, "session_id": prefix + name}

    def records(
        self, files: Iterable[tuple[Path, Iterable[jsonl.Record]]]
    ) -> Iterator[jsonl.Record]:
        """The calls of files, as `record`, if no session starts over in another file."""
        bare = ((file, ((b"", one) for one in records)) for file, records in files)
        return (record for _, record in self.lines(bare))

    def lines(
        self, files: Iterable[tuple[Path, Iterable[tuple[bytes, jsonl.Record]]]]
    ) -> Iterator[tuple[bytes, jsonl.Record]]:
        """As `records`, of calls with their text."""
        seams = _Seams() if self.mode is None else None
        for file, lines in files:
            for line, record in lines:
                if seams is not None:
                    seams.check(file, record)
                named = self.record(record, file)
                same = not line or named is record
                yield line if same else jsonl.text_of(named), named


@dataclass(slots=True)
class _Seen:
    file: Path
    # hashes of the prompts, by their length in bytes
    prompts: dict[int, set[int]] = field(default_factory=dict)


@dataclass(slots=True)
class _Seams:
    """Refuses sessions that start over in another file.

    A session continues where a prompt extends that of an earlier call, as each request of
    a conversation does. Calls with a ``turn_index`` have their place by it.
    """

    _sessions: dict[str, _Seen] = field(default_factory=dict)

    def check(self, file: Path, record: jsonl.Record) -> None:
        """Check the next call, which is of this file."""
        name = record.get("session_id")
        if not isinstance(name, str):
            return
        try:
            prompt = np.asarray(record.get("prompt_ids"), np.int64).tobytes()
        except (TypeError, ValueError, OverflowError):
            return  # reading the turns reports it
        seen = self._sessions.setdefault(name, _Seen(file))
        if seen.file != file:
            extends = any(
                0 < size < len(prompt) and hash(prompt[:size]) in known
                for size, known in seen.prompts.items()
            )
            if not extends and record.get("turn_index") is None:
                raise reused(name, seen.file, file, "its calls start over there")
            seen.file = file
        seen.prompts.setdefault(len(prompt), set()).add(hash(prompt))


def reused(name: str, first: Path, second: Path, why: str) -> InvalidTurnsError:
    """The error of a session id that two files use."""
    return InvalidTurnsError(
        f"session {name!r} is in {first} and in {second}, and {why}: if these are two "
        "sessions, pass --session-prefix file (session_prefix='file' in Python; 'folder' "
        "for one prefix per directory). If they are one, give each call its turn_index, "
        "or pass --session-prefix no"
    )


def placed(
    error: InvalidTurnsError,
    files: Sequence[Path],
    format: Format | None,
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
        name = ast.literal_eval(found["name"])
        places = list(_places(name, int(found["n"]), files, format, naming))
    elif _RECORD.match(text):
        places = list(_first_refused(text, files, format))
    distinct = list(dict.fromkeys(file for file, _ in places))
    if found is not None and len(distinct) > 1 and naming.mode != "no":
        turn = f"both have a turn {found['n']}"
        return reused(name, distinct[0], distinct[1], turn)
    if not places:
        where = str(files[0]) if len(files) == 1 else ""
    else:
        file, line = places[-1]
        where = f"{file}" if line is None else f"{file}, line {line}"
    return type(error)(f"{where}: {text}") if where else error


def _places(
    name: str,
    number: int,
    files: Sequence[Path],
    format: Format | None,
    naming: Naming,
) -> Iterator[tuple[Path, int | None]]:
    """Files and lines that have a turn, or a row, of a session."""
    last = -1
    for file in files:
        prefix = naming.prefix(file)
        kind = format_of(file, format)
        if not is_json(kind):
            if _has(file, kind, name.removeprefix(prefix), number):
                yield file, None
            continue
        for line, record in jsonl.numbered_lines(file, kind):
            if prefix + str(record.get("session_id")) != name:
                continue
            given = record.get("turn_index", record.get("row_index"))
            last = given if type(given) is int else last + 1
            if last == number:
                yield file, line


def _has(file: Path, kind: Format, name: str, number: int) -> bool:
    for index in ("turn_index", "row_index"):
        for keys, _ in key_batches(file, kind, ("session_id", index)):
            if {"session_id", index} <= set(keys.schema.names):
                ids = keys.column("session_id").cast(pa.string())
                same = pc.and_(
                    pc.equal(ids, name), pc.equal(keys.column(index), number)
                )
                if pc.any(same).as_py():
                    return True
    return False


def _first_refused(
    text: str, files: Sequence[Path], format: Format | None
) -> Iterator[tuple[Path, int]]:
    """File and line of the first record that is refused with this text."""
    for file in files:
        kind = format_of(file, format)
        for line, record in jsonl.numbered_lines(file, kind) if is_json(kind) else ():
            try:
                from_records([record])
            except InvalidTurnsError as error:
                if _RECORD.sub("", str(error)) == _RECORD.sub("", text):
                    yield file, line
                    return

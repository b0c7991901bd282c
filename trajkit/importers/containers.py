"""The files of a source, the objects in them, and what is found: calls, and why not."""

import os
import re
import struct
import tempfile
import zipfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from trajkit.errors import ArgumentError, FormatError
from trajkit.files import jsonl
from trajkit.files.arrow import read_batches
from trajkit.files.formats import Format as Codec
from trajkit.files.formats import is_one_value, kind_of, open_input
from trajkit.files.jsonl import EACH, Reader, Shape, split_lines
from trajkit.files.pickles import load
from trajkit.files.sources import check_there, fetched, is_address, paths_of
from trajkit.tables import limits
from trajkit.tables.canonical import UNREADABLE
from trajkit.turns.keys import list_of, object_of, text_of

Value: TypeAlias = dict[str, Any]
"""A record, or an object of records."""


class Refused(Exception):
    """A record is left out; the arguments are the detail, and the problem."""


@dataclass(slots=True)
class Finding:
    """A record of a foreign format.

    Inside ``with found:``, raising `Refused` marks the record as left out.
    """

    # its position in the file: "line 3"
    place: str
    # None: the record does not name it
    session: str | None = None
    # why it is left out (docs/import.md lists them); empty: its fields decide
    problem: str = ""
    detail: str = ""
    # keys of `trajkit.from_records` and of `reader.EXTRAS`. None: unknown
    fields: Value = field(default_factory=dict)
    # what it lacks if it is kept, with details
    remarks: list[tuple[str, str]] = field(default_factory=list)
    # what the source states about numbers of tokens: its name, "prompt_ids" or
    # "output_ids" ("ids": both), and the number
    claims: list[tuple[str, str, object]] = field(default_factory=list)
    # keys that may name the run, and keys that no field reads, with their values
    run_keys: Value = field(default_factory=dict)
    unread: Value = field(default_factory=dict)
    # whatever is beside the call and may be a mask of its tokens
    masks: Value = field(default_factory=dict)
    # texts and numbers beside a call without a session
    names: dict[str, str] = field(default_factory=dict)
    # of the request
    tools: object = None
    # tells apart the conversations of a file
    origin: str = ""

    def remark(self, problem: str, detail: str = "") -> None:
        self.remarks.append((problem, detail))

    def copy(self, suffix: str, *, first: bool = True) -> "Finding":
        """One of several calls of the record; what is unread counts for the first."""
        return replace(
            self,
            place=self.place + suffix,
            fields=dict(self.fields),
            remarks=list(self.remarks),
            claims=[],
            unread=self.unread if first else {},
        )

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> bool:
        if isinstance(error, Refused):
            self.detail, self.problem = (*error.args, "unreadable")[:2]
        return isinstance(error, Refused)


Placed: TypeAlias = tuple[str, Value | Finding]

_MAGIC = {b"\x80": "pickle", b"PAR1": "rows", b"ARROW1": "rows", b"PK\3\4": "zip"}
# files that are never text: one whose first bytes are damaged is no JSON
_BINARY = {
    ".eval": "inspect",
    **dict.fromkeys((".pt", ".pkl"), "pickle"),
    **dict.fromkeys((".parquet", ".arrow"), "rows"),
}
_CODECS: dict[bytes, Codec] = {
    b"\x1f\x8b": "jsonl.gz",
    b"\x28\xb5\x2f\xfd": "jsonl.zst",
}
_PACKED = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"7z\xbc\xaf": "7-Zip"}
_JSON = (".json", ".jsonl", ".ndjson")
SUFFIXES = (
    *(f"{kind}{end}" for kind in _JSON for end in ("", ".gz", ".zst")),
    *(".pt", ".pkl", ".eval", ".traj", ".parquet", ".arrow"),
)
"""Ends of the names of files in a directory that may contain records."""

# objects by which a format is recognized: the first may be one of an error
_MOST_SHOWN = 8


def listed(source: Any) -> list[Any]:
    """The paths and addresses of a source."""
    single = isinstance(source, str | os.PathLike | bytes | dict)
    found = list(source) if isinstance(source, Iterable) and not single else [source]
    for one in found:
        if not isinstance(one, str | os.PathLike):
            kind = type(one).__name__
            raise ArgumentError(
                f"source is, or has, a {kind}: expected a path, or paths"
            )
    return found


def path_of(name: str | os.PathLike[str]) -> Path:
    """A path, or what an address has after its scheme."""
    path, is_there, within = os.fspath(name).partition("://")
    return Path(f"/{within.lstrip('/')}") if is_there else Path(path)


def files_of(sources: list[Any]) -> Iterator[tuple[str, bool, list[tuple[str, Path]]]]:
    """Each path or address of a source, whether it is a directory, and its files.

    Files have a name, for the report, and a path. Temporary copies last for one step.
    """
    check_there(sources)
    for text in map(os.fspath, sources):
        if is_address(text):
            with tempfile.TemporaryDirectory() as folder:
                yield text, *_fetched(text, Path(folder))
            continue
        for path in sorted(paths_of(text) or (), key=_natural):
            below = path.rglob("*") if path.is_dir() else ()
            seen = [one for one in below if "/." not in f"/{one.relative_to(path)}"]
            files = sorted(filter(Path.is_file, seen), key=_natural)
            files = files if path.is_dir() else [path]
            yield str(path), path.is_dir(), [(str(file), file) for file in files]


def _fetched(address: str, folder: Path) -> tuple[bool, list[tuple[str, Path]]]:
    taken = dict[str, bool]()
    copies = fetched(address, folder, lambda x: taken.setdefault(x, is_listed(x)))
    scheme, _, name = address.partition("://")
    is_folder = len(copies) != 1 or not copies[0][0].endswith(name)
    skipped = [f"{scheme}://{one}" for one in taken if not taken[one]]
    return is_folder, [*copies, *((one, Path(one)) for one in skipped)]


def is_listed(name: str) -> bool:
    """Whether a file of a directory may contain records, by its name."""
    return name.lower().endswith(SUFFIXES)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Orders paths with the numbers in their names as numbers."""
    parts = re.findall("([0-9]{1,18})|([^0-9]+)", str(path))
    return [(int(digits or 0), text) for digits, text in parts]


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The beginning of a file, which identifies its format."""

    name: str
    file: Path
    container: str
    # its first complete objects
    values: tuple[Value, ...] = ()
    # why it could not be read
    trouble: str = ""
    # the first value that is no object
    odd: str = ""


def head_of(file: Path, name: str = "") -> Head:
    name, suffix = name or str(file), file.suffix.lower()
    container = _by_magic(file, _MAGIC, _BINARY.get(suffix, "json"))
    if container == "zip":
        container = "inspect" if suffix == ".eval" else "pickle"
    values, odd, trouble = list[Value](), "", ""
    try:
        for place, one in objects(file, container) if container != "pickle" else ():
            if isinstance(one, dict):
                values.append(one)
            elif not odd:
                odd = f"{place}: {one.detail}"
            if len(values) == _MOST_SHOWN:
                break
    except FormatError as error:
        values, trouble = [], str(error)
    return Head(name, file, container, tuple(values), trouble, odd)


def _by_magic(file: Path, kinds: dict[bytes, Any], default: Any) -> Any:
    with file.open("rb") as opened:
        begin = opened.read(16)
    known = (one for magic, one in kinds.items() if begin.startswith(magic))
    return next(known, default)


def objects(file: Path, container: str, shape: Shape | None = None) -> Iterator[Placed]:
    """Places and objects of a file; for a damaged one, what is wrong with it.

    ``shape`` names their long arrays (see `trajkit.files.jsonl`).
    """
    return _READERS[container](file, shape or {})


def _placed(place: str, value: object) -> Placed:
    if isinstance(value, dict):
        return place, value
    return _bad(place, f"a {type(value).__name__}, not an object")


def _bad(place: str, detail: str, problem: str = "unreadable") -> Placed:
    return place, Finding(place, None, problem, detail)


def _json(file: Path, shape: Shape) -> Iterator[Placed]:
    """The lines of a JSON file, the items of its array, or its only value.

    A file whose first line is a value has a value per line.
    """
    reader = Reader({**shape, EACH: shape})
    codec = _by_magic(file, _CODECS, "jsonl")
    lines = split_lines(open_input(file, codec), str(file))
    first = next((line.strip() for line, _ in lines if line.strip()), b"")
    if packed := "tar" if first[257:262] == b"ustar" else _by_magic(file, _PACKED, ""):
        raise FormatError(f"{file} is packed by {packed}: unpack it, or use gzip")
    try:
        whole = isinstance(reader.read(first), list)
    except ValueError:
        # a value over several lines, or a damaged line
        kind = kind_of(file)
        whole = (kind is not None and is_one_value(kind)) or first in (b"[", b"{")
    if whole:
        yield from _whole(file, codec, reader)
        return
    lines = split_lines(open_input(file, codec), str(file))
    for number, (line, complete) in enumerate(lines, 1):
        if line and not line.isspace():
            try:
                yield _placed(f"line {number}", reader.read(line))
            except ValueError as error:
                problem = "unreadable" if complete else "torn"
                yield _bad(f"line {number}", str(error), problem)


def _whole(file: Path, codec: Codec, reader: Reader) -> Iterator[Placed]:
    most = jsonl.MAX_LINE_BYTES
    try:
        with open_input(file, codec) as source:
            text = bytes(source.read(most + 1)).removeprefix(BOM_UTF8)
        if len(text) > most:
            raise FormatError(
                f"{file} is longer than {most} bytes: write a record per line"
            )
        value = reader.read(text) if text.strip() else []
    except (ValueError, *UNREADABLE) as error:
        yield _bad("file", str(error))
        return
    listed = value if isinstance(value, list) else [value]
    for k, item in enumerate(listed):
        yield _placed(f"item {k}" if listed is value else "file", item)


def _rows(file: Path, shape: Shape) -> Iterator[Placed]:
    usual: Codec = "parquet" if file.suffix.lower() == ".parquet" else "arrow"
    kind: Codec = _by_magic(file, {b"PAR1": "parquet", b"ARROW1": "arrow"}, usual)
    batches = read_batches(file, kind, limits.IMPORTED_RECORDS)
    values = (value for batch in batches for value in batch.to_pylist())
    return (_placed(f"row {number}", value) for number, value in enumerate(values))


def _pickle(file: Path, shape: Shape) -> Iterator[Placed]:
    """The samples of slime's dump; a session is the step and the rollout."""
    dump = load(file)
    step = text_of(object_of(dump).get("rollout_id")) or file.stem
    samples = object_of(dump).get("samples", dump)
    if not isinstance(samples, list):
        yield _bad("file", "it has no list of samples")
    for k, sample in enumerate(list_of(samples)):
        if isinstance(sample, dict):
            own = text_of(sample.get("rollout_id")) or text_of(sample.get("index"))
            sample = {**sample, "@session": f"{step}/{own or k}"}
        yield _placed(f"sample {k}", sample)


# --- Inspect's zip files

_ZSTANDARD = 93
# a damaged zip file can raise these
_ZIP = (
    *(zipfile.BadZipFile, zlib.error, struct.error, NotImplementedError, EOFError),
    *(RuntimeError, OSError, KeyError, ValueError),
)


def _inspect(file: Path, shape: Shape) -> Iterator[Placed]:
    reader, most = Reader(shape), jsonl.MAX_LINE_BYTES
    try:
        with zipfile.ZipFile(file) as archive:
            for name in sorted(archive.namelist()):
                if name.startswith("samples/"):
                    yield _sample(archive, name, reader, most)
    except _ZIP as error:
        raise FormatError(f"{file}: not a readable log of Inspect: {error}") from None


def _sample(archive: zipfile.ZipFile, name: str, reader: Reader, most: int) -> Placed:
    try:
        if archive.getinfo(name).file_size > most:
            return _bad(name, f"it is longer than {most} bytes")
        return _placed(name, reader.read(_member(archive, name)))
    except _ZIP as error:
        return _bad(name, str(error) or type(error).__name__)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a file in a zip file; Inspect compresses with Zstandard."""
    info, raw = archive.getinfo(name), archive.fp
    if info.compress_type != _ZSTANDARD or raw is None:
        return archive.read(name)
    # Python reads it from 3.14 on
    raw.seek(info.header_offset)
    raw.seek(sum(struct.unpack("<HH", raw.read(30)[26:30])), 1)
    packed = pa.BufferReader(raw.read(info.compress_size))
    with pa.CompressedInputStream(packed, "zstd") as stream:
        content = bytes(stream.read(info.file_size + 1))
    if len(content) != info.file_size or zlib.crc32(content) != info.CRC:
        raise zipfile.BadZipFile(f"{name} is damaged")
    return content


_READERS = {"json": _json, "rows": _rows, "pickle": _pickle, "inspect": _inspect}

"""The files of a source, and the objects in them, including damaged ones."""

import os
import struct
import tempfile
import zipfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pyarrow as pa

from trajkit.errors import ArgumentError, FormatError
from trajkit.files.arrow import read_batches
from trajkit.files.formats import Format as Codec
from trajkit.files.formats import open_input
from trajkit.files.json_numbers import EACH, Reader, Shape
from trajkit.files.jsonl import MAX_LINE_BYTES, max_line_bytes, split_lines
from trajkit.files.sources import fetched, is_address, paths_of
from trajkit.importers.findings import Finding, list_of, object_of, text_of
from trajkit.importers.pickles import load
from trajkit.tables import limits
from trajkit.tables.canonical import UNREADABLE

if TYPE_CHECKING:
    from sqlite3 import Connection

Placed: TypeAlias = tuple[str, "dict[str, Any] | Finding"]
_Read: TypeAlias = Callable[[bytes], object]

_MAGIC = {
    b"SQLite format 3\0": "sqlite",
    b"\x80": "pickle",
    b"PAR1": "rows",
    b"ARROW1": "rows",
}
_CODECS: dict[bytes, Codec] = {
    b"\x1f\x8b": "jsonl.gz",
    b"\x28\xb5\x2f\xfd": "jsonl.zst",
}
_JSON = (".json", ".jsonl", ".ndjson")
SUFFIXES = (
    *(f"{kind}{end}" for kind in _JSON for end in ("", ".gz", ".zst")),
    *(".db", ".sqlite", ".sqlite3", ".pt", ".pkl", ".eval", ".traj"),
    *(".parquet", ".arrow"),
)
"""Ends of the names of files in a directory that may contain records."""

# objects by which a format is recognized: the first may be one of an error
_MOST_SHOWN = 8


def files_of(source: Any) -> Iterator[tuple[str, bool, list[tuple[str, Path]]]]:
    """Each path or address of a source, whether it is a directory, and its files.

    Files have a name, for the report, and a path. Temporary copies last for one step.
    """
    single = isinstance(source, str | os.PathLike | bytes | dict)
    listed = list(source) if isinstance(source, Iterable) and not single else [source]
    for one in listed:
        if not isinstance(one, str | os.PathLike):
            kind = type(one).__name__
            raise ArgumentError(
                f"source is, or has, a {kind}: expected a path, or paths"
            )
    paths_of([one for one in listed if not is_address(one)])
    return (found for one in listed for found in _files_of(os.fspath(one)))


def _files_of(text: str) -> Iterator[tuple[str, bool, list[tuple[str, Path]]]]:
    if is_address(text):
        with tempfile.TemporaryDirectory() as folder:
            copies = fetched(text, Path(folder), _is_listed)
            single = len(copies) == 1
            single = single and copies[0][0].endswith(text.partition("://")[2])
            yield text, not single, copies
        return
    for path in paths_of(text) or ():
        path.stat()  # the same error in every format if it is missing
        files = [path]
        if path.is_dir():
            files = [
                file
                for file in sorted(path.rglob("*"))
                if _is_listed(file.name)
                and file.is_file()
                and not any(p.startswith(".") for p in file.relative_to(path).parts)
            ]
        yield str(path), path.is_dir(), [(str(file), file) for file in files]


def _unpacked(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".zst")


def _is_listed(name: str) -> bool:
    return name.lower().endswith(SUFFIXES)


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The beginning of a file, which identifies its format."""

    name: str
    file: Path
    container: str
    # its first complete objects
    values: tuple[dict[str, Any], ...] = ()
    # why it could not be read
    trouble: str = ""

    @property
    def stem(self) -> str:
        """The name of the file without its suffixes."""
        return Path(_unpacked(self.file.name)).stem or self.file.name


def head_of(file: Path, name: str = "") -> Head:
    """The container and the first objects of a file."""
    name = name or str(file)
    container = _by_magic(file, _MAGIC, "json")
    if _by_magic(file, {b"PK\3\4": "zip"}, ""):
        container = "inspect" if _is_inspect(file) else "pickle"
    if container in ("sqlite", "pickle"):
        return Head(name, file, container)
    good = (one for _, one in objects(file, container) if isinstance(one, dict))
    try:
        return Head(name, file, container, tuple(islice(good, _MOST_SHOWN)))
    except FormatError as error:
        return Head(name, file, container, trouble=str(error))


def _by_magic(file: Path, kinds: dict[bytes, Any], default: Any) -> Any:
    with file.open("rb") as opened:
        begin = opened.read(16)
    known = (one for magic, one in kinds.items() if begin.startswith(magic))
    return next(known, default)


def objects(file: Path, container: str, shape: Shape | None = None) -> Iterator[Placed]:
    """Places and objects of a file; for a damaged one, what is wrong with it.

    ``shape`` names their long arrays (see `trajkit.files.json_numbers`).
    """
    return _READERS[container](file, shape or {})


def _placed(place: str, value: object) -> Placed:
    if isinstance(value, dict):
        return place, value
    return _bad(place, f"a {type(value).__name__}, not an object")


def _bad(
    place: str, detail: str, session: str | None = None, problem: str = "unreadable"
) -> Placed:
    return place, Finding(place, session, problem, detail)


# --- JSON, Parquet and Arrow


def _json(file: Path, shape: Shape) -> Iterator[Placed]:
    """The lines of a JSON file, the items of its array, or its only value.

    A file whose first line is a value has a value per line.
    """
    read = Reader({**shape, EACH: shape}).read
    codec = _by_magic(file, _CODECS, "jsonl")
    single = _unpacked(file.name.lower()).endswith(".json")
    lines = split_lines(open_input(file, codec), str(file))
    two = [*islice((line.strip() for line, _ in lines if line.strip()), 2)]
    try:
        whole = isinstance(read(two[0] if two else b""), list)
    except ValueError:
        # a value over several lines, or a damaged line
        whole = single or (len(two) > 1 and two[0] in (b"[", b"{"))
    if whole or (single and len(two) < 2):
        yield from _whole(file, codec, read)
        return
    lines = split_lines(open_input(file, codec), str(file))
    for number, (line, complete) in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        try:
            yield _placed(f"line {number}", read(line))
        except ValueError as error:
            problem = "unreadable" if complete else "torn"
            yield _bad(f"line {number}", str(error), problem=problem)


def _whole(file: Path, codec: Codec, read: _Read) -> Iterator[Placed]:
    most = max_line_bytes()
    try:
        with open_input(file, codec) as source:
            text = bytes(source.read(most + 1)).removeprefix(BOM_UTF8)
        if len(text) > most:
            raise FormatError(
                f"{file} is longer than {most} bytes: set the environment variable "
                f"{MAX_LINE_BYTES} to allow more"
            )
        value = read(text) if text.strip() else []
    except (ValueError, *UNREADABLE) as error:
        yield _bad("file", str(error))
        return
    if isinstance(value, list):
        yield from (_placed(f"item {k}", item) for k, item in enumerate(value))
    else:
        yield _placed("file", value)


def _rows(file: Path, shape: Shape) -> Iterator[Placed]:
    """The rows of a Parquet or Arrow file."""
    kind: Codec = _by_magic(file, {b"PAR1": "parquet"}, "arrow")
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


def _is_inspect(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except _ZIP:
        return False
    return "header.json" in names or any(name.startswith("_journal/") for name in names)


def _inspect(file: Path, shape: Shape) -> Iterator[Placed]:
    """The samples of an Inspect log."""
    read, most = Reader(shape).read, max_line_bytes()
    with zipfile.ZipFile(file) as archive:
        for name in sorted(archive.namelist()):
            if not name.startswith("samples/"):
                continue
            try:
                if archive.getinfo(name).file_size > most:
                    yield _bad(name, f"it is longer than {most} bytes")
                else:
                    yield _placed(name, read(_member(archive, name)))
            except _ZIP as error:
                yield _bad(name, str(error) or type(error).__name__)


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a file in a zip file; Inspect compresses with Zstandard."""
    info, raw = archive.getinfo(name), archive.fp
    if info.compress_type != _ZSTANDARD or raw is None:
        return archive.read(name)
    # Python reads it from 3.14 on
    raw.seek(info.header_offset)
    lengths = struct.unpack("<HH", raw.read(30)[26:30])
    raw.seek(sum(lengths), 1)
    packed = pa.BufferReader(raw.read(info.compress_size))
    with pa.CompressedInputStream(packed, "zstd") as stream:
        content = bytes(stream.read(info.file_size + 1))
    if len(content) != info.file_size or zlib.crc32(content) != info.CRC:
        raise zipfile.BadZipFile(f"{name} is damaged")
    return content


# --- rLLM's SQLite store

_ORDER = """
SELECT s.session_id, {run}, s.trace_id, t.data
FROM trace_sessions s LEFT JOIN traces t ON t.trace_id = s.trace_id
ORDER BY s.created_at, s.rowid
"""
_APART = """
SELECT NULL, NULL, trace_id, data FROM traces
WHERE trace_id NOT IN (SELECT trace_id FROM trace_sessions)
ORDER BY rowid
"""


def _sqlite(file: Path, shape: Shape) -> Iterator[Placed]:
    """The traces of all sessions in order of time, then traces without a session."""
    import sqlite3  # nothing else needs it

    try:
        # read-only: it is neither created nor changed
        base = sqlite3.connect(f"{file.absolute().as_uri()}?mode=ro", uri=True)
        try:
            yield from _traces(base, Reader(shape).read)
        finally:
            base.close()
    except sqlite3.Error as error:
        raise FormatError(f"{file}: cannot read traces: {error}") from None


def _traces(base: "Connection", read: _Read) -> Iterator[Placed]:
    columns = {row[1] for row in base.execute("PRAGMA table_info(trace_sessions)")}
    run = "s.run_id" if "run_id" in columns else "''"
    runs: dict[str, set[str]] = {}
    names = f"SELECT DISTINCT session_id, {run} FROM trace_sessions s"
    for session, name in base.execute(names):
        runs.setdefault(session, set()).add(name)
    # traces that trace_sessions does not name come last, without a session
    lines = chain(base.execute(_ORDER.format(run=run)), base.execute(_APART))
    for session, name, trace, data in lines:
        # Several runs of the gateway may use one session id. In a damaged database the
        # index may lack rows of the table.
        once = len(runs.get(session, {name})) == 1
        named, place = (
            text_of(session if once else f"{name}/{session}"),
            f"trace {trace!r}",
        )
        if data is None:
            text = "its session refers to it, but it is missing"
            yield _bad(place, text, named, "lost")
            continue
        try:
            value = read(data if isinstance(data, bytes) else str(data).encode())
        except ValueError as error:
            yield _bad(place, str(error), named)
            continue
        if isinstance(value, dict):
            value |= {"@session": named, "trace_id": str(trace)}
        yield _placed(place, value)


_READERS: dict[str, Callable[[Path, Shape], Iterator[Placed]]] = {
    "json": _json,
    "rows": _rows,
    "pickle": _pickle,
    "inspect": _inspect,
    "sqlite": _sqlite,
}

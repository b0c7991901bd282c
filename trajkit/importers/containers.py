"""The objects in a file of any container, including damaged ones."""

import struct
import zipfile
import zlib
from codecs import BOM_UTF8
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa

from trajkit.errors import FormatError
from trajkit.files.arrow import read_batches
from trajkit.files.formats import Format as Codec
from trajkit.files.formats import open_input
from trajkit.files.json_numbers import EACH, Reader, Shape
from trajkit.files.jsonl import MAX_LINE_BYTES, max_line_bytes, split_lines
from trajkit.importers.findings import Finding, text_of
from trajkit.importers.pickles import load
from trajkit.tables import limits
from trajkit.tables.canonical import UNREADABLE

if TYPE_CHECKING:
    from sqlite3 import Connection

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


@dataclass(frozen=True, slots=True)
class Text:
    """An object of a file, or the finding about a damaged one."""

    place: str
    value: dict[str, object]
    bad: Finding | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """The beginning of a file, which identifies its format."""

    file: Path
    container: str
    # its first complete objects
    values: tuple[dict[str, object], ...] = ()
    # why it could not be read
    trouble: str = ""

    @property
    def value(self) -> dict[str, object] | None:
        """Its first complete object, if there is one."""
        return self.values[0] if self.values else None


# objects by which a format is recognized: the first may be one of an error
_MOST_SHOWN = 8


def head_of(file: Path) -> Head:
    """The container and the first object of a file."""
    with file.open("rb") as opened:
        magic = opened.read(16)
    known = (kind for start, kind in _MAGIC.items() if magic.startswith(start))
    container = next(known, "json")
    if magic.startswith(b"PK\3\4"):
        container = "inspect" if _is_inspect(file) else "pickle"
    if container in ("sqlite", "pickle"):
        return Head(file, container)
    try:
        good = (one.value for one in objects(file, container) if one.bad is None)
        return Head(file, container, tuple(islice(good, _MOST_SHOWN)))
    except FormatError as error:
        return Head(file, container, (), str(error))


def objects(file: Path, container: str, shape: Shape | None = None) -> Iterator[Text]:
    """The objects of a file; ``shape`` names their long arrays (see `json_numbers`)."""
    return _READERS[container](file, shape or {})


def _json(file: Path, shape: Shape) -> Iterator[Text]:
    """The lines of a JSON file, the items of its array, or its only value.

    A file whose first line is a value has a value per line.
    """
    read = Reader({**shape, EACH: shape}).read
    with file.open("rb") as opened:
        magic = opened.read(4)
    codec = next((c for start, c in _CODECS.items() if magic.startswith(start)), None)
    name = file.name.lower()
    single = name.removesuffix(".gz").removesuffix(".zst").endswith(".json")
    lines = split_lines(open_input(file, codec or "jsonl"), str(file))
    try:
        first = next((one for one in lines if one[0].strip()), (b"", True))
        more = next((one for one in lines if one[0].strip()), None)
    except FormatError:
        if not single:
            raise
        first, more = (b"", True), None
    start = first[0].removeprefix(BOM_UTF8).lstrip()
    try:
        whole = isinstance(read(start), list)
    except ValueError:
        # a value over several lines, or a damaged line
        whole = single or (more is not None and start.strip() in (b"[", b"{"))
    if whole or (single and more is None):
        yield from _whole(file, codec, read)
        return
    lines = split_lines(open_input(file, codec or "jsonl"), str(file))
    for number, (line, complete) in enumerate(lines, 1):
        line = line.removeprefix(BOM_UTF8) if number == 1 else line
        if not line or line.isspace():
            continue
        try:
            value = read(line)
        except ValueError as error:
            problem = "unreadable" if complete else "torn"
            yield _bad(f"line {number}", problem, str(error))
            continue
        yield _text(f"line {number}", value)


def _whole(
    file: Path, codec: Codec | None, read: Callable[[bytes], object]
) -> Iterator[Text]:
    try:
        text = _read_all(file, codec or "jsonl").removeprefix(BOM_UTF8)
        if not text.strip():
            return
        value = read(text)
    except ValueError as error:
        yield _bad("file", "unreadable", str(error))
        return
    if not isinstance(value, list):
        yield _text("file", value)
        return
    for k, item in enumerate(value):
        yield _text(f"item {k}", item)


def _read_all(file: Path, codec: Codec) -> bytes:
    most = max_line_bytes()
    with open_input(file, codec) as source:
        try:
            text = bytes(source.read(most + 1))
        except UNREADABLE as error:
            raise FormatError(f"{file} cannot be decompressed: {error}") from None
    if len(text) > most:
        raise FormatError(
            f"{file} is longer than {most} bytes: set the environment variable "
            f"{MAX_LINE_BYTES} to allow more"
        )
    return text


def _rows(file: Path, shape: Shape) -> Iterator[Text]:
    """The rows of a Parquet or Arrow file."""
    with file.open("rb") as opened:
        kind: Codec = "parquet" if opened.read(4) == b"PAR1" else "arrow"
    number = 0
    for batch in read_batches(file, kind, limits.IMPORTED_RECORDS):
        for value in batch.to_pylist():
            yield _text(f"row {number}", value)
            number += 1


# --- pickles: slime's dumps


def _pickle(file: Path, shape: Shape) -> Iterator[Text]:
    """The samples of a dump; a session is the step and the rollout."""
    dump = load(file)
    step = text_of(dump.get("rollout_id")) if isinstance(dump, dict) else None
    samples = dump.get("samples") if isinstance(dump, dict) else dump
    if not isinstance(samples, list):
        yield _bad("file", "unreadable", "it has no list of samples")
        return
    for k, sample in enumerate(samples):
        if isinstance(sample, dict):
            own = text_of(sample.get("rollout_id")) or text_of(sample.get("index"))
            session = f"{step or file.stem}/{own or k}"
            yield Text(f"sample {k}", {**sample, "@session": session})
        else:
            yield _bad(f"sample {k}", "unreadable", "a sample is not a dict")


# --- Inspect's zip files


def _is_inspect(file: Path) -> bool:
    try:
        with zipfile.ZipFile(file) as archive:
            names = archive.namelist()
    except (ValueError, *_ZIP):
        return False
    return "header.json" in names or any(name.startswith("_journal/") for name in names)


def _inspect(file: Path, shape: Shape) -> Iterator[Text]:
    """The samples of an Inspect log."""
    read = Reader(shape).read
    most = max_line_bytes()
    try:
        with zipfile.ZipFile(file) as archive:
            names = [n for n in archive.namelist() if n.startswith("samples/")]
            for name in sorted(names):
                if archive.getinfo(name).file_size > most:
                    yield _bad(name, "unreadable", f"it is longer than {most} bytes")
                    continue
                try:
                    yield _text(name, read(_member(archive, name)))
                except (ValueError, *_ZIP) as error:
                    yield _bad(name, "unreadable", str(error) or type(error).__name__)
    except _ZIP as error:
        raise FormatError(f"{file}: not a readable zip file: {error}") from None


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a file in a zip file; Inspect compresses with Zstandard."""
    info = archive.getinfo(name)
    if info.compress_type != _ZSTANDARD:
        return archive.read(name)
    # Python reads it from 3.14 on
    raw = archive.fp
    if raw is None:
        raise zipfile.BadZipFile(f"{name} is closed")
    raw.seek(info.header_offset)
    lengths = struct.unpack("<HH", raw.read(30)[26:30])
    raw.seek(sum(lengths), 1)
    packed = pa.BufferReader(raw.read(info.compress_size))
    with pa.CompressedInputStream(packed, "zstd") as stream:
        content = bytes(stream.read(info.file_size + 1))
    if len(content) != info.file_size or zlib.crc32(content) != info.CRC:
        raise zipfile.BadZipFile(f"{name} is damaged")
    return content


_ZSTANDARD = 93
# a damaged zip file can raise these
_ZIP = (
    zipfile.BadZipFile,
    NotImplementedError,
    EOFError,
    RuntimeError,
    OSError,
    KeyError,
    zlib.error,
    struct.error,
)


# --- rLLM's SQLite store

_ORDER = """
SELECT s.session_id, {run}, t.trace_id, t.data
FROM trace_sessions s JOIN traces t ON t.trace_id = s.trace_id
ORDER BY s.created_at, s.rowid
"""
_APART = """
SELECT NULL, NULL, trace_id, data FROM traces
WHERE trace_id NOT IN (SELECT trace_id FROM trace_sessions)
ORDER BY rowid
"""
_ORPHANS = """
SELECT session_id, trace_id FROM trace_sessions
WHERE trace_id NOT IN (SELECT trace_id FROM traces)
"""


def _sqlite(file: Path, shape: Shape) -> Iterator[Text]:
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


def _traces(base: "Connection", read: Callable[[bytes], object]) -> Iterator[Text]:
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
        named = text_of(session if once else f"{name}/{session}")
        place = f"trace {trace!r}"
        try:
            value = read(data if isinstance(data, bytes) else str(data).encode())
        except ValueError as error:
            yield _bad(place, "unreadable", str(error), named)
            continue
        text = _text(place, value)
        about = {"@session": named, "trace_id": str(trace)}
        yield text if text.bad else Text(place, {**text.value, **about})
    for session, trace in base.execute(_ORPHANS):
        detail = "its session refers to it, but it is missing"
        yield _bad(f"trace {trace!r}", "lost", detail, text_of(session))


_READERS: Mapping[str, Callable[[Path, Shape], Iterator[Text]]] = {
    "json": _json,
    "rows": _rows,
    "pickle": _pickle,
    "inspect": _inspect,
    "sqlite": _sqlite,
}


def _text(place: str, value: object) -> Text:
    if isinstance(value, dict):
        return Text(place, value)
    return _bad(place, "unreadable", f"a {type(value).__name__}, not an object")


def _bad(place: str, problem: str, detail: str, session: str | None = None) -> Text:
    bad = Finding(place, session, problem=problem, detail=detail)
    return Text(place, {}, bad)

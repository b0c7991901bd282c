"""JSON lines: turns as records of `trajkit.from_records`, other tables as objects."""

import io
import itertools
import json
import os
import re
import warnings
from base64 import b64decode, b64encode
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import pyarrow as pa

from trajkit.errors import FormatError, InvalidTurnsError, SchemaError, TornLogWarning
from trajkit.files.formats import (
    Format,
    check_text,
    is_json,
    is_one_value,
    kind_of,
    name_of,
    open_input,
)
from trajkit.files.json_numbers import IDS, ITEMS, Reader, Shape
from trajkit.schema import TURNS, TURNS_DELTA
from trajkit.tables import limits
from trajkit.tables.canonical import UNREADABLE, Plan, check_columns, check_kind, place
from trajkit.turns.messages import TooDeepError, parse_json
from trajkit.turns.records import MAX_DEPTH, is_too_deep

Record: TypeAlias = dict[str, object]

MAX_LINE_BYTES = "TRAJKIT_MAX_LINE_BYTES"
"""Environment variable: the longest line, in bytes, without compression."""

LINE = "trajkit.files.line"
"""Key of the text of a line, in `calls_with_lines`."""

# columns of turns that records spell differently, and those that are written as null
_MESSAGES = ("messages", "response")
_WRITTEN_NULL = ("use_tool",)

# Bytes become an object of this key and their base64, except in messages.
_BYTES, _BYTES_MARK = "$base64", b'{"$base64":'
_CHAT = ("prompt_messages", "response_message")

# the long arrays of a call
_CALL: Shape = {"prompt_ids": IDS, "output_ids": IDS, "prompt_messages": ITEMS}


def planned(objects: Iterator[Record], plan: Plan, name: str) -> Iterator[Record]:
    """The objects of a file; the first one's keys are checked against ``plan``."""
    for first in objects:
        try:
            schema = plan(list(first))
            if schema is TURNS:  # keys of a record are not columns
                check_kind(list(first), "turns")
            else:
                check_columns(pa.schema([(key, pa.null()) for key in first]), schema)
        except SchemaError as error:
            raise SchemaError(f"{name}: {error}") from None
        yield first
        yield from objects


def lines(file: Path | BinaryIO, kind: Format) -> Iterator[Record]:
    """The objects of a file of JSON lines; empty lines are skipped.

    A line that is not a JSON object is a FormatError, but if it is the last one and has no
    end, it gives a TornLogWarning.
    """
    return (value for _, value in numbered_lines(file, kind))


def numbered_lines(file: Path | BinaryIO, kind: Format) -> Iterator[tuple[int, Record]]:
    """`lines` with their numbers, from 1; in an array, the numbers of its items."""
    return ((number, value) for number, _, value in _lines(file, kind, _plain))


def row_placed(path: str, text: str) -> str:
    """An error of a row with its file, and with its line if that is JSON."""
    row, file = re.search(r"\brow (\d+)", text), Path(path)
    text = text.removeprefix(f"{path}: ")
    kind = kind_of(file) if row and file.is_file() else None
    if row is None or kind is None or not is_json(kind):
        return text if text.startswith(path) else f"{path}: {text}"
    lines = (number for number, _ in numbered_lines(file, kind))
    return f"{path}, line {next(itertools.islice(lines, int(row[1]), None))}: {text}"


def calls(file: Path | BinaryIO, kind: Format) -> Iterator[Record]:
    """`lines` of recorded calls, with ids as numpy arrays."""
    return (value for _, _, value in _lines(file, kind, Reader(_CALL).read))


def calls_with_lines(file: Path | BinaryIO, kind: Format) -> Iterator[Record]:
    """`calls`, each with its text as `LINE`."""
    for _, line, value in _lines(file, kind, Reader(_CALL).read):
        yield {**value, LINE: line}


def read_again(lines: Iterable[tuple[str | None, bytes]]) -> Iterator[Record]:
    """`calls` of lines that were read before, with their sessions."""
    read = Reader(_CALL).read
    for name, line in lines:
        value = _object(read(line), line)
        yield value if name is None else {**value, "session_id": name}


def _lines(
    file: Path | BinaryIO, kind: Format, read: Callable[[bytes], object]
) -> Iterator[tuple[int, bytes, Record]]:
    """The number, the text and the object of each line."""
    name = name_of(file)
    if is_one_value(kind) and (whole := _one_value(file, kind)) is not None:
        for number, item in enumerate(whole, 1):
            if not isinstance(item, dict):
                raise FormatError(f"{name}, item {number} is not a JSON object")
            item = _restored(item)
            text = json.dumps(item, default=_encoded).encode()
            yield number, text, _object(item, b"")
        return
    source = open_input(file, kind)
    for number, (line, complete) in enumerate(split_lines(source, name), 1):
        if not line or line.isspace():
            continue
        if number == 1:
            check_text(line, name)
        try:
            value = read(line)
        except ValueError as error:
            if complete or isinstance(error, TooDeepError):
                raise _invalid(f"{name}, line {number}", error) from None
            warnings.warn(
                f"{name} ends within line {number}: its last {len(line)} bytes were "
                "left out",
                TornLogWarning,
                stacklevel=2,
            )
            return
        if not isinstance(value, dict):
            raise FormatError(f"{name}, line {number} is not a JSON object")
        yield number, line, _object(value, line)


def _object(value: Any, line: bytes) -> Record:
    """The object of a line, with bytes restored; integers are names of sessions, too."""
    # one character is found much faster than several
    dollar = line.find(b"$")
    has_bytes = dollar > 0 and line.find(_BYTES_MARK, dollar - 2) >= 0
    record: Record = _restored(value) if has_bytes else value
    if type(record.get("session_id")) is int:
        record["session_id"] = str(record["session_id"])
    return record


def _invalid(where: str, error: ValueError) -> FormatError:
    if isinstance(error, json.JSONDecodeError):
        return FormatError(f"{where}, column {error.colno}: {error.msg}")
    return FormatError(f"{where}: {error}")


def _one_value(file: Path | BinaryIO, kind: Format) -> list[Any] | None:
    """The items of a file that is one JSON value; None if it has lines of objects."""
    most, name = max_line_bytes(), name_of(file)
    at = None if isinstance(file, Path) else file.tell()
    try:
        with open_input(file, kind) as source:
            text: bytes = source.read(most + 1).removeprefix(BOM_UTF8)
    except UNREADABLE as error:
        raise FormatError(f"{name} cannot be decompressed: {error}") from None
    if not isinstance(file, Path):
        file.seek(at or 0)
    first, _, rest = text.lstrip().partition(b"\n")
    if not first.startswith(b"["):
        with suppress(ValueError):  # an object over several lines, or no JSON
            if not first or (isinstance(_plain(first), dict) and rest.strip()):
                return None
    if len(text) > most:
        raise FormatError(
            f"{name} is one JSON value of more than {most} bytes: write a call per line, "
            f"or set the environment variable {MAX_LINE_BYTES} to allow more"
        )
    try:
        found = _plain(text)
    except ValueError as error:
        line = getattr(error, "lineno", None)
        raise _invalid(f"{name}, line {line}" if line else name, error) from None
    return found if isinstance(found, list) else [found]


def _plain(line: bytes) -> object:
    return parse_json(line.decode())


def max_line_bytes() -> int:
    """The most bytes of a line: 256 MB, or as the environment variable says."""
    text = os.environ.get(MAX_LINE_BYTES, str(1 << 28))
    if not text.isdecimal() or not 0 < int(text) < 1 << 62:
        raise FormatError(f"{MAX_LINE_BYTES} is {text!r}: expected a number of bytes")
    return int(text)


def split_lines(source: pa.NativeFile, name: str) -> Iterator[tuple[bytes, bool]]:
    """Lines without their line feeds, and whether they had one: they are complete."""
    most = max_line_bytes()
    with source, io.BufferedReader(source, limits.JSON_BYTES) as reader:
        for number in itertools.count(1):
            try:
                line = reader.readline(most + 1)
            except UNREADABLE as error:  # the codec found a damaged file
                raise FormatError(f"{name} cannot be decompressed: {error}") from None
            if number == 1:
                line = line.removeprefix(BOM_UTF8)
            complete = line.endswith(b"\n")
            if len(line) > most and not complete:
                raise FormatError(
                    f"{name}, line {number}: the line is longer than {most} bytes: set "
                    f"the environment variable {MAX_LINE_BYTES} to allow more"
                )
            if not line:
                return
            yield line[:-1] if complete else line, complete


def by_session(records: Iterator[Record], at_least: int) -> Iterator[list[Record]]:
    """Lists of at least ``at_least`` records that end where another session begins."""
    batch: list[Record] = []
    for _, own in itertools.groupby(records, lambda one: one.get("session_id")):
        if len(batch) >= at_least:
            yield batch
            batch = []
        batch += own
    if batch:
        yield batch


def tables(objects: Iterator[Record], file: str) -> Iterator[pa.Table]:
    first = 0
    while batch := list(itertools.islice(objects, limits.JSON_ROWS)):
        names = dict.fromkeys(name for value in batch for name in value)
        for name in names:
            if any(is_too_deep(value.get(name)) for value in batch):
                raise FormatError(
                    f"{file}: a value of {name!r} is nested deeper than {MAX_DEPTH} "
                    "levels: leave it out, or store it as text"
                )
        try:
            yield pa.table(
                {name: [value.get(name) for value in batch] for name in names}
            )
        except (pa.ArrowException, UnicodeError, OverflowError) as error:
            bad = (k for k, one in enumerate(batch) if not _makes_a_row(one))
            where = "".join(f"row {first + k}: " for k in itertools.islice(bad, 1))
            raise FormatError(
                f"{file}: the lines do not make a table: {where}{error}"
            ) from None
        first += len(batch)


def _makes_a_row(value: Record) -> bool:
    try:
        pa.table({name: [one] for name, one in value.items()})
    except (pa.ArrowException, UnicodeError, OverflowError):
        return False
    return True


def write(tables: Iterator[pa.Table], schema: pa.Schema, file: pa.NativeFile) -> None:
    session: object = None
    # the latest body of each message key in the current session
    bodies: dict[bytes, str] = {}
    for table in tables:
        if table.column_names[: len(TURNS_DELTA)] == TURNS_DELTA.names:
            raise FormatError(
                "JSON lines cannot store turns in delta form: use trajkit.expand"
            )
        for start in range(0, len(table), limits.JSON_ROWS):
            part = table.slice(start, limits.JSON_ROWS)
            for k, row in enumerate(part.to_pylist()):
                if row.get("session_id") != session:
                    session, bodies = row.get("session_id"), {}
                text = _turn(row, bodies, part, k) if schema is TURNS else _dump(row)
                file.write(f"{text}\n".encode())


def _turn(row: dict[str, Any], bodies: dict[bytes, str], part: pa.Table, k: int) -> str:
    plain = {
        name: value
        for name, value in row.items()
        if name not in _MESSAGES
        and (value is not None or name in _WRITTEN_NULL or name not in TURNS.names)
    }
    text = _dump(plain)

    def body(message: dict[str, Any]) -> str:
        known = message["body"]
        if known is None and (known := bodies.get(message["key"])) is None:
            raise InvalidTurnsError(
                f"{place(part, k)}: a {message['role']} message has no body, here or "
                "earlier in the session: JSON lines hold messages in full"
            )
        bodies[message["key"]] = known
        return str(known)

    # bodies are JSON already
    if row["messages"] is not None:
        text = (
            f'{text[:-1]},"prompt_messages":[{",".join(map(body, row["messages"]))}]}}'
        )
    if row["response"] is not None:
        text = f'{text[:-1]},"response_message":{body(row["response"])}}}'
    return text


def _dump(row: Record) -> str:
    try:
        return _text(row)
    except (TypeError, ValueError):
        for name, value in row.items():
            try:
                _text(value)
            except (TypeError, ValueError) as error:
                raise FormatError(
                    f"JSON lines cannot store column {name!r}: {error}. Write Parquet or "
                    "Arrow IPC, or leave the column out"
                ) from None
        raise


def _text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=_encoded, allow_nan=False)


def _encoded(value: object) -> object:
    if isinstance(value, date):  # a datetime is one
        return value.isoformat()
    if isinstance(value, bytes):
        return {_BYTES: b64encode(value).decode()}
    raise TypeError(f"{type(value).__name__} {value!r}")


def _restored(value: Any) -> Any:
    """The value with bytes decoded that `_encoded` encoded."""
    if isinstance(value, list):
        return [_restored(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_BYTES} and isinstance(value[_BYTES], str):
        return b64decode(value[_BYTES])
    return {
        name: one if name in _CHAT else _restored(one) for name, one in value.items()
    }

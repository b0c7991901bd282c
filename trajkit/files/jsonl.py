"""JSON lines: turns as records of `trajkit.from_records`, other tables as objects.

A `Reader` knows the keys of the long arrays of token ids in a text (its shape), parses
them itself as numpy arrays, and leaves the rest to ``json``, with arrays that do not fit
the shape (an id of 3.0, a null): the value is the one of ``json.loads``. Prompts of a log
repeat earlier ones, and text that is equal to an earlier array's is not parsed again. Logs
are read at 14 times the speed of ``json.loads`` (docs/benchmarks.md); the kernels are in
``_native/text.pxi``.
"""

import io
import itertools
import json
import re
import warnings
from bisect import bisect_right
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any, BinaryIO, Final, Literal, NamedTuple, TypeAlias, Union

import numpy as np
import pyarrow as pa

from trajkit import _core
from trajkit.errors import FormatError, InvalidTurnsError, SchemaError, TornLogWarning
from trajkit.files.formats import (
    Format,
    check_begins,
    is_json,
    is_one_value,
    kind_of,
    name_of,
    open_input,
)
from trajkit.schema import TURNS, TURNS_DELTA
from trajkit.schema.engine import checks_of
from trajkit.tables import limits
from trajkit.tables.canonical import UNREADABLE, Plan, check_columns, check_kind, place
from trajkit.tables.ragged import Ints
from trajkit.turns.messages import TooDeepError, parse_json
from trajkit.turns.records import MAX_DEPTH, is_too_deep
from trajkit.turns.validation import check_all

Leaf: TypeAlias = Literal["ids", "items"]
Shape: TypeAlias = Mapping[str, Union["Shape", Leaf]]
"""The long arrays of an object by key; `EACH` stands for the elements of an array.

`IDS` is an array of integers in [0, 2**31), which becomes one of int32. `ITEMS` is an
array of anything; its elements are the same objects as in an earlier line with the same
text.
"""

IDS: Final[Leaf] = "ids"
ITEMS: Final[Leaf] = "items"
EACH: Final = "*"

_Cut: TypeAlias = Ints | list[object]

_SPACE = re.compile(rb"[ \t\n\r]*")
# a key without an escape, and what follows up to its value
_KEY = re.compile(rb'[ \t\n\r]*"([^"\\]*)"[ \t\n\r]*:[ \t\n\r]*')
# replaces an array in the text; the parser calls a hook for it
_HOLE = b"NaN"
# arrays to compare with, from sessions that were recorded at the same time
_KEPT = 32
# bytes of the shortest array to keep
_WORTH = 1 << 12


class _Seen(NamedTuple):
    """An array that was parsed: its text without brackets, and its values."""

    line: bytes
    start: int
    stop: int
    values: _Cut
    # where each item ends, counted from start; empty for ids
    ends: list[int]


_NOTHING = _Seen(b"", 0, 0, [], [])


class _Slot:
    def __init__(self, leaf: Leaf) -> None:
        self._read = _read_items if leaf == ITEMS else _read_ids
        self._seen: list[_Seen] = []

    def read(self, line: bytes, start: int) -> _Seen | None:
        """The array at ``start``; None if it has anything else than ids."""
        # the earlier array with the longest prefix in common
        before, same = _NOTHING, 0
        for one in reversed(self._seen):
            n = _core.json_shared(line, start, one.line, one.start, one.stop)
            if n > same:
                before, same = one, n
                if n == one.stop - one.start:
                    break
        array = found = self._read(line, start, before, same)
        if array is not None and array.stop - start >= _WORTH:
            # of two that share most of their text, the longer one is kept
            sizes = array.stop - start, before.stop - before.start
            if 2 * same > min(sizes):
                array = array if sizes[0] >= sizes[1] else before
                self._seen = [one for one in self._seen if one is not before]
            self._seen = [*self._seen, array][-_KEPT:]
        return found


_Places: TypeAlias = Mapping[bytes, Union["_Places", _Slot]]


class _OddError(ValueError):
    """The text does not fit the shape: Python's parser takes it."""


class _RepeatedKeyError(ValueError):
    """An object has a key twice, which would take one of two values for the other."""


class Reader:
    """Parses texts of one shape, one after another."""

    def __init__(self, shape: Shape) -> None:
        self._places = _places(shape)
        self._decoder = json.JSONDecoder(parse_constant=self._take)
        self._pieces: list[bytes] = []
        # the rest of the text begins here
        self._at = 0
        self._arrays: list[_Cut] = []
        self._cut: Iterator[_Cut] = iter([])

    def read(self, line: bytes) -> object:
        """The value of a JSON text, as ``json.loads`` but with numpy arrays.

        A key that stands twice in an object on the way to the shape's arrays is an error.
        """
        self._pieces, self._at, self._arrays = [], 0, []
        # invalid JSON, a NaN, or nested too deep: parse the text again
        try:
            self._value(line, _past_space(line, 0), self._places)
            if self._arrays:
                self._cut = iter(self._arrays)
                rest = b"".join((*self._pieces, line[self._at :])).decode()
                value: object = self._decoder.decode(rest)
                return value
        except _RepeatedKeyError:
            raise
        except (ValueError, RecursionError):
            pass
        return parse_json(line.decode())

    def _take(self, _: str) -> _Cut:
        for array in self._cut:
            return array
        raise _OddError

    def _value(self, line: bytes, at: int, within: _Places | _Slot | None) -> int:
        """Cut the shape's arrays out of the value at ``at``; returns its end."""
        opening = line[at : at + 1]
        if isinstance(within, _Slot):
            if opening == b"[" and (array := within.read(line, at + 1)) is not None:
                if len(array.values):
                    self._pieces += (line[self._at : at], _HOLE)
                    self._at = array.stop + 1
                    self._arrays.append(array.values)
                return array.stop + 1
        elif within is not None:
            if opening == b"{":
                return self._children(line, at + 1, b"}", within)
            if opening == b"[" and _EACH in within:
                return self._children(line, at + 1, b"]", within)
        return _end(line, at)

    def _children(self, line: bytes, at: int, closing: bytes, within: _Places) -> int:
        """Cut the arrays out of the members of an object or the elements of an array."""
        at = _past_space(line, at)
        if line[at : at + 1] == closing:
            return at + 1
        more, names = True, set[bytes]()
        while more:
            name = _EACH
            if closing == b"}":
                key = _KEY.match(line, at)
                if key is None:
                    raise _OddError
                name, at = key[1], key.end()
                if name in names:
                    raise _RepeatedKeyError(f"the key {name.decode()!r} is there twice")
                names.add(name)
            at, more = _next(line, self._value(line, at, within.get(name)), closing)
        return at


def _read_ids(line: bytes, start: int, before: _Seen, same: int) -> _Seen | None:
    stop = line.find(b"]", start + same)
    if stop < 0:
        raise _OddError
    # ids before the last comma of the shared text are known
    known = line.rfind(b",", start, start + same) + 1
    n_known = 0
    if known:
        after = before.start + known - start
        commas = before.line.count(b",", after, before.stop)
        n_known = len(before.values) - commas - 1
    n_new = line.count(b",", known or start, stop) + 1
    ids = np.empty(n_known + n_new, np.int32)
    if not _core.json_ids(line, known or start, ids[n_known:]):
        return None
    ids[:n_known] = np.asarray(before.values[:n_known], np.int32)
    return _Seen(line, start, stop, ids, [])


def _read_items(line: bytes, start: int, before: _Seen, same: int) -> _Seen:
    # an item that continues after the shared text (12, 123) has no comma there
    n_known = bisect_right(before.ends, same)
    items, ends = [*before.values[:n_known]], before.ends[:n_known]
    at = _past_space(line, start + ends[-1] if ends else start)
    more = True
    if ends:
        at, more = _next(line, at, b"]")
    elif line[at : at + 1] == b"]":
        at, more = at + 1, False
    first = at
    while more:
        end = _end(line, at)
        ends.append(end - start)
        at, more = _next(line, end, b"]")
    if len(ends) > n_known:
        items += json.loads(f"[{line[first:at].decode()}")
        if len(items) != len(ends):
            raise _OddError
    return _Seen(line, start, at - 1, items, ends)


def _past_space(line: bytes, at: int) -> int:
    return _SPACE.match(line, at).end()  # type: ignore[union-attr]


def _end(line: bytes, at: int) -> int:
    end: int = _core.json_value_end(line, at)
    if end <= at:
        raise _OddError
    return end


def _next(line: bytes, at: int, closing: bytes) -> tuple[int, bool]:
    at = _past_space(line, at)
    sign = line[at : at + 1]
    if sign == b",":
        return _past_space(line, at + 1), True
    if sign != closing:
        raise _OddError
    return at + 1, False


_EACH = EACH.encode()


def _places(shape: Shape) -> _Places:
    return {
        name.encode(): _Slot(within) if isinstance(within, str) else _places(within)
        for name, within in shape.items()
    }


Record: TypeAlias = dict[str, object]

MAX_LINE_BYTES = 1 << 30
"""The longest line, without compression."""

LINE = "trajkit.files.line"
"""Key of the text of a line, in `calls_with_lines`."""

# columns of turns that records spell differently, and those that are written as null
_MESSAGES = ("messages", "response")
_WRITTEN_NULL = ("use_tool",)

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


def numbered_lines(file: Path | BinaryIO, kind: Format) -> Iterator[tuple[int, Record]]:
    """The objects of a file of JSON lines with their numbers, from 1; in an array, the
    numbers of its items. Empty lines are skipped.

    A line that is not a JSON object is a FormatError, but if it is the last one and has no
    end, it gives a TornLogWarning.
    """
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
    """`numbered_lines` of recorded calls, without numbers and with ids as numpy arrays."""
    return (value for _, _, value in _lines(file, kind, Reader(_CALL).read))


def calls_with_lines(file: Path | BinaryIO, kind: Format) -> Iterator[Record]:
    """`calls`, each with its text as `LINE`."""
    for _, line, value in _lines(file, kind, Reader(_CALL).read):
        yield {**value, LINE: line}


def read_again(lines: Iterable[tuple[str | None, bytes]]) -> Iterator[Record]:
    """`calls` of lines that were read before, with their sessions."""
    read = Reader(_CALL).read
    for name, line in lines:
        value = _named(read(line))
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
            yield number, json.dumps(item).encode(), _named(item)
        return
    source = open_input(file, kind)
    for number, (line, complete) in enumerate(split_lines(source, name), 1):
        if not line or line.isspace():
            continue
        if number == 1:
            check_begins(line, kind, name)
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
        yield number, line, _named(value)


def _named(value: Any) -> Record:
    """The object of a line; integers are names of sessions, too."""
    record: Record = value
    if type(record.get("session_id")) is int:
        record["session_id"] = str(record["session_id"])
    return record


def _invalid(where: str, error: ValueError) -> FormatError:
    if isinstance(error, json.JSONDecodeError):
        return FormatError(f"{where}, column {error.colno}: {error.msg}")
    return FormatError(f"{where}: {error}")


def _one_value(file: Path | BinaryIO, kind: Format) -> list[Any] | None:
    """The items of a file that is one JSON value; None if it has lines of objects."""
    most, name = MAX_LINE_BYTES, name_of(file)
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
            f"{name} is one JSON value of more than {most} bytes: write a call per line"
        )
    try:
        found = _plain(text)
    except ValueError as error:
        line = getattr(error, "lineno", None)
        raise _invalid(f"{name}, line {line}" if line else name, error) from None
    return found if isinstance(found, list) else [found]


def _plain(line: bytes) -> object:
    return parse_json(line.decode())


def split_lines(source: pa.NativeFile, name: str) -> Iterator[tuple[bytes, bool]]:
    """Lines without their line feeds, and whether they had one: they are complete."""
    most = MAX_LINE_BYTES
    with source, io.BufferedReader(source, limits.JSON_BYTES) as reader:
        for number in itertools.count(1):
            try:
                line = reader.readline(most + 1)
            except UNREADABLE as error:  # the codec found a damaged file
                raise FormatError(f"{name} cannot be decompressed: {error}") from None
            if number == 1:
                if line.startswith((BOM_UTF16_BE, BOM_UTF16_LE)):
                    raise FormatError(
                        f"{name} is not UTF-8 but UTF-16, by its byte-order mark: convert "
                        "it, as with iconv -f UTF-16 -t UTF-8"
                    )
                line = line.removeprefix(BOM_UTF8)
            complete = line.endswith(b"\n")
            if len(line) > most and not complete:
                raise FormatError(
                    f"{name}, line {number}: the line is longer than {most} bytes: write "
                    "Parquet or Arrow IPC"
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
        if schema is TURNS:
            check_all(table, checks_of(TURNS, ("messages", "response")))
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
    raise TypeError(f"{type(value).__name__} {value!r:.60}")

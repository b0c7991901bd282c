"""JSON lines: turns as the records of `trajkit.from_records`, rows as objects."""

import json
import warnings
from collections.abc import Iterator
from datetime import date
from itertools import islice
from typing import Any, TypedDict

import pyarrow as pa

from trajkit.errors import FormatError, InvalidTurnsError, TornLogWarning
from trajkit.json_arrays import IDS, ITEMS, NUMBERS, Reader, Shape
from trajkit.json_text import parse
from trajkit.schema import TURNS, TURNS_DELTA
from trajkit.tables import place

# read at a time; a longer line has twice that, and twice that again
_BLOCK_BYTES = 1 << 22
# rows that are Python objects at a time
_BATCH = 64

# columns of turns that a record spells otherwise, or not at all when null
_MESSAGES = ("messages", "response")
_WRITTEN_NULL = ("use_tool",)


# where a call has arrays that are worth a reader of their own
_CALL: Shape = {
    "prompt_ids": IDS,
    "output_ids": IDS,
    "output_logprobs": NUMBERS,
    "prompt_messages": ITEMS,
}


def calls(source: pa.NativeFile, name: str) -> Iterator[dict[str, object]]:
    """As `lines`, of recorded calls: their ids and logprobs are numpy arrays."""
    return lines(source, name, _CALL)


def lines(
    source: pa.NativeFile, name: str, shape: Shape | None = None
) -> Iterator[dict[str, object]]:
    """The objects of a file of JSON lines; empty lines are passed over.

    Parameters
    ----------
    source : NativeFile
    name : str
        What errors call it.
    shape : mapping, optional
        Where arrays of numbers stand, which become numpy arrays; see
        `trajkit.json_arrays.Reader`.

    Raises
    ------
    FormatError
        A line is no JSON object; the text names file and line.

    Warns
    -----
    TornLogWarning
        The last line has no end and is no JSON.
    """
    return (value for _, value in raw_lines(source, name, shape))


def raw_lines(
    source: pa.NativeFile, name: str, shape: Shape | None = None
) -> Iterator[tuple[bytes, dict[str, object]]]:
    """`lines`, each with its text."""
    read = _plain if shape is None else Reader(shape).read
    for number, (line, whole) in enumerate(split_lines(source, name), 1):
        if not line or line.isspace():
            continue
        try:
            value = read(line)
        except ValueError as error:
            if whole:
                raise FormatError(f"{name}, line {number}: {error}") from None
            warnings.warn(
                f"{name} ends within line {number}: its last {len(line)} bytes were "
                "left out",
                TornLogWarning,
                stacklevel=2,
            )
            return
        if not isinstance(value, dict):
            raise FormatError(f"{name}, line {number} is no JSON object")
        yield line, value


def _plain(line: bytes) -> object:
    return parse(line.decode())


def split_lines(source: pa.NativeFile, name: str) -> Iterator[tuple[bytes, bool]]:
    """Lines without their end, and whether they had one."""
    # one piece of memory for the whole file, and one copy out of it for each line
    room = bytearray(_BLOCK_BYTES)
    held = 0
    with source:
        while True:
            if held == len(room):
                room += bytes(len(room))
            try:
                with memoryview(room)[held:] as free:
                    n_read = source.readinto(free)
            except OSError as error:  # of the codec: a broken or cut file
                raise FormatError(f"{name} cannot be read whole: {error}") from None
            if not n_read:
                break
            stop, searched, at = held + n_read, held, 0
            while (end := room.find(b"\n", searched, stop)) >= 0:
                with memoryview(room)[at:end] as line:
                    yield line.tobytes(), True
                searched = at = end + 1
            room[: stop - at] = room[at:stop]
            held = stop - at
    if held:
        yield bytes(room[:held]), False


def by_session(
    records: Iterator[dict[str, object]], at_least: int
) -> Iterator[list[dict[str, object]]]:
    """Runs of records that end where another session begins."""
    batch: list[dict[str, object]] = []
    for record in records:
        if len(batch) >= at_least and record.get("session_id") != batch[-1].get(
            "session_id"
        ):
            yield batch
            batch = []
        batch.append(record)
    if batch:
        yield batch


def tables(objects: Iterator[dict[str, object]]) -> Iterator[pa.Table]:
    """Objects as tables of whatever types they turn out to have."""
    while batch := list(islice(objects, _BATCH)):
        names = dict.fromkeys(name for value in batch for name in value)
        try:
            yield pa.table(
                {name: [value.get(name) for value in batch] for name in names}
            )
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise FormatError(f"the lines make no table: {error}") from None


def write(pieces: Iterator[pa.Table], schema: pa.Schema, file: pa.NativeFile) -> None:
    """Write tables in canonical form as JSON lines.

    Raises
    ------
    FormatError
        The table is in delta form, or JSON cannot say a value of a further column.
    InvalidTurnsError
        A message's body is not in the table.
    """
    told = _Bodies()
    for piece in pieces:
        if piece.column_names[: len(TURNS_DELTA)] == TURNS_DELTA.names:
            raise FormatError("turns in delta form have no form in JSON lines")
        for start in range(0, len(piece), _BATCH):
            part = piece.slice(start, _BATCH)
            for k, row in enumerate(part.to_pylist()):
                if schema is TURNS:
                    text = _turn(row, told, part, k)
                else:
                    text = _dump(row)
                file.write(f"{text}\n".encode())


class _Message(TypedDict):
    key: bytes
    role: str
    body: str | None


def _turn(row: dict[str, Any], told: "_Bodies", part: pa.Table, k: int) -> str:
    plain = {
        name: value
        for name, value in row.items()
        if name not in _MESSAGES
        and (value is not None or name in _WRITTEN_NULL or name not in TURNS.names)
    }
    text = _dump(plain)
    told.begin(row["session_id"])
    messages: list[_Message] | None = row["messages"]
    response: _Message | None = row["response"]
    # bodies are JSON already, however deep
    if messages is not None:
        bodies = ",".join(told.body(message, part, k) for message in messages)
        text = f'{text[:-1]},"prompt_messages":[{bodies}]}}'
    if response is not None:
        text = f'{text[:-1]},"response_message":{told.body(response, part, k)}}}'
    return text


class _Bodies:
    """The body that each key of the present session was last shown with."""

    def __init__(self) -> None:
        self._session: object = None
        self._by_key: dict[bytes, str] = {}

    def begin(self, session: object) -> None:
        if session != self._session:
            self._session, self._by_key = session, {}

    def body(self, message: _Message, part: pa.Table, k: int) -> str:
        key, body = message["key"], message["body"]
        if body is not None:
            self._by_key[key] = body
            return body
        known = self._by_key.get(key)
        if known is None:
            raise InvalidTurnsError(
                f"{place(part, k)}: a {message['role']} message has no body, here or "
                "earlier in the session: JSON lines hold messages in full"
            )
        return known


def _dump(value: dict[str, object]) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=_say, allow_nan=False)
    except ValueError as error:
        raise FormatError(f"JSON cannot say a value: {error}") from None


def _say(value: object) -> str:
    if isinstance(value, date):  # a datetime is one
        return value.isoformat()
    raise FormatError(f"JSON cannot say the {type(value).__name__} {value!r}")

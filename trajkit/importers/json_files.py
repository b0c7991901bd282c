"""JSON files of foreign formats, record by record, including damaged records."""

from codecs import BOM_UTF8
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trajkit._arrow.canonical import UNREADABLE
from trajkit.errors import FormatError
from trajkit.importers.findings import Finding
from trajkit.io.formats import Format, open_input
from trajkit.io.json_numbers import EACH, Reader, Shape
from trajkit.io.jsonl import MAX_LINE_BYTES, max_line_bytes, split_lines

_CODECS: dict[str, Format] = {".gz": "jsonl.gz", ".zst": "jsonl.zst"}


@dataclass(frozen=True, slots=True)
class Text:
    """An object of a file, or the finding about a damaged one."""

    place: str
    value: dict[str, object]
    bad: Finding | None = None


def objects(file: Path, shape: Shape | None = None) -> Iterator[Text]:
    """The objects of a JSON file: its lines, the items of its array, or its only value.

    A ``.json`` file has one value, others a value per line. ``shape`` names the long
    arrays of an object (see `trajkit.io.json_numbers`).
    """
    within = shape or {}
    read = Reader({**within, EACH: within}).read
    name = file.name.lower()
    codec = next((c for end, c in _CODECS.items() if name.endswith(end)), None)
    if name.removesuffix(".gz").removesuffix(".zst").endswith(".json"):
        try:
            value = read(_read_all(file, codec or "jsonl").removeprefix(BOM_UTF8))
        except ValueError as error:
            yield _bad("file", "unreadable", str(error))
            return
        if not isinstance(value, list):
            yield _text("file", value)
            return
        for k, item in enumerate(value):
            yield _text(f"item {k}", item)
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


def findings(
    file: Path,
    read: Callable[[str, dict[str, object]], Iterator[Finding]],
    shape: Shape | None = None,
) -> Iterator[Finding]:
    """What ``read`` finds in each of `objects`, and the findings about damaged ones."""
    for text in objects(file, shape):
        if text.bad is not None:
            yield text.bad
        else:
            yield from read(text.place, text.value)


def first_object(file: Path) -> dict[str, object] | None:
    """The first complete object of a JSON file, or None."""
    return next((text.value for text in objects(file) if text.bad is None), None)


def _read_all(file: Path, codec: Format) -> bytes:
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


def _text(place: str, value: object) -> Text:
    if isinstance(value, dict):
        return Text(place, value)
    return _bad(place, "unreadable", f"a {type(value).__name__}, not an object")


def _bad(place: str, problem: str, detail: str) -> Text:
    return Text(place, {}, Finding(place, problem=problem, detail=detail))

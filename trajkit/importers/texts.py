"""JSON files of foreign formats, record by record, damaged ones among them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trajkit.errors import FormatError
from trajkit.importers.found import Found
from trajkit.io_formats import Format, is_json, kind_of, open_input
from trajkit.io_json import split_lines
from trajkit.json_arrays import EACH, Reader, Shape


@dataclass(frozen=True, slots=True)
class Text:
    """An object of a file, or what is wrong in its place."""

    place: str
    value: dict[str, object]
    bad: Found | None = None


def objects(file: Path, shape: Shape | None = None) -> Iterator[Text]:
    """The objects of a JSON file: its lines, the items of its array, or the one it is.

    Parameters
    ----------
    file : Path
        ``.json``: one value. Else a value per line, maybe compressed.
    shape : mapping, optional
        Where the long arrays of an object stand; see `trajkit.json_arrays`.

    Raises
    ------
    FormatError
        The file's codec cannot read it.
    """
    within = shape or {}
    read = Reader({**within, EACH: within}).read
    if file.suffix.lower() == ".json":
        try:
            value = read(file.read_bytes())
        except ValueError as error:
            yield _bad("file", "unreadable", str(error))
            return
        many = isinstance(value, list)
        for k, item in enumerate(value if isinstance(value, list) else [value]):
            yield _text(f"item {k}" if many else "file", item)
        return
    kind = kind_of(file)
    codec: Format = kind if kind is not None and is_json(kind) else "jsonl"
    lines = split_lines(open_input(file, codec), str(file))
    for number, (line, whole) in enumerate(lines, 1):
        if not line or line.isspace():
            continue
        try:
            value = read(line)
        except ValueError as error:
            problem = "unreadable" if whole else "torn"
            yield _bad(f"line {number}", problem, str(error))
            continue
        yield _text(f"line {number}", value)


def first_object(file: Path) -> dict[str, object] | None:
    """The first whole object of a JSON file; None where there is none."""
    try:
        return next((text.value for text in objects(file) if text.bad is None), None)
    except FormatError:
        return None


def _text(place: str, value: object) -> Text:
    if isinstance(value, dict):
        return Text(place, value)
    return _bad(place, "unreadable", f"a {type(value).__name__}, no object")


def _bad(place: str, problem: str, detail: str) -> Text:
    return Text(place, {}, Found(place, problem=problem, detail=detail))

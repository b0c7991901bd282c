"""Validates JSON from clients; each error names the path, the value and the rule.

A request of a session mostly begins with the bytes of an earlier one. What was read of
those is not read again (`Body`).
"""

import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

from trajkit_shim.errors import GatewayError

Json: TypeAlias = dict[str, object]
T = TypeVar("T")
Reader: TypeAlias = Callable[[object, str], T]
"""Returns a value, or raises a 400 that names where it is."""

# different ignored fields that are counted, and the length of their names
_MOST_IGNORED = 100
_LONGEST_IGNORED = 100

# code that walks a body may recurse
MAX_DEPTH = 100

_HALF = re.compile("[\ud800-\udfff]")


def refuse(where: str, rule: str, *, code: str | None = None) -> NoReturn:
    """Raise a 400 that names the parameter ``where`` and the violated rule."""
    raise GatewayError(f"{where}: {rule}", code=code, param=where)


async def read_body(chunks: AsyncIterator[bytes], max_bytes: int) -> bytes:
    """Return a request's body; raise a 413 once it is longer than ``max_bytes``."""
    received, length = [], 0
    async for chunk in chunks:
        # the last chunk may be empty; joining the only one does not copy it
        received += [chunk] if chunk else []
        length += len(chunk)
        if length > max_bytes:
            message = f"the body is longer than {max_bytes} bytes"
            raise GatewayError(message, 413, code="body_too_long")
    return b"".join(received)


def parse_object(body: bytes) -> Json:
    """Return the JSON object in a request body.

    It must be UTF-8, and its numbers finite. Its texts may have halves of surrogate pairs,
    which a model can sample within JSON, and clients send back.
    """
    try:
        value = DECODER.decode(body.decode("utf-8"))
    except ValueError as error:
        raise GatewayError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise GatewayError("the body is nested too deep") from error
    return _checked(value)


def _checked(value: object) -> Json:
    """The value of a body, if it is an object that is not nested too deep."""
    if not isinstance(value, dict):
        raise GatewayError(f"the body is {_kind(value)}, not a JSON object")
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for outer in level
            for item in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(item, (dict, list))
        ]
        if not level:
            return value
    raise GatewayError(f"the body is nested deeper than {MAX_DEPTH} levels")


class Mark(NamedTuple):
    """The end of an element of a list in a body."""

    number: int  # from 1
    end: int
    digest: bytes  # of the body up to there


Known: TypeAlias = tuple[Any, Counter[str]]
"""What an element was read as, and what of it had no effect."""

# Marks are kept of the first elements, which tell conversations apart, and of the last
# ones, which some clients change later.
_FIRST, _LAST = 2, 8
_SPACE = re.compile(r"[ \t\n\r]*")
# between an element that ends and what follows it in its list
_GAP = re.compile(rb"[ \t\n\r]*(?:,[ \t\n\r]*(?![ \t\n\r\]])|(?=\]))")


class Body:
    """A request's body, which may begin with the bytes of ``earlier`` ones of its session.

    The elements of its list ``listed`` that it shares with one of those are neither
    parsed again nor read (`Fields.each`); if it departs between two marks, those before
    the first of them. ``purpose`` is hashed before the bytes, so bodies for different
    purposes share nothing.
    """

    def __init__(
        self,
        data: bytes,
        listed: str = "",
        purpose: bytes = b"",
        earlier: "Iterable[Body]" = (),
    ) -> None:
        self._data, self._listed, self._purpose = data, listed, purpose
        self._hasher, self._head = self._hash(), 0
        self._marks: list[Mark] = []
        # of the elements so far
        self.known: list[Known] = []
        for other in earlier:
            marks, hasher = other._shared(data, self._hash())
            if len(marks) > len(self._marks):
                self._marks, self._hasher, self._head = marks, hasher, other._head
                self.known = other.known[: marks[-1].number]
        self.n_bytes, self.n_new_bytes = len(data), len(data) - self._end

    @property
    def _end(self) -> int:
        return self._marks[-1].end if self._marks else 0

    def _hash(self) -> Any:
        return blake2b(self._purpose, digest_size=16)

    def _shared(self, data: bytes, hasher: Any) -> tuple[list[Mark], Any]:
        """The marks that a body has as well, and what hashed it up to the last."""
        shared, view, at = list[Mark](), memoryview(data), 0
        for mark in self._marks:
            # of a list that was not read, because another value followed under its name
            if mark.number > len(self.known) or mark.end > len(data):
                break
            longer = hasher.copy()
            longer.update(view[at : mark.end])
            if longer.digest() != mark.digest:
                break
            shared.append(mark)
            hasher, at = longer, mark.end
        return shared, hasher

    def parse(self) -> Json:
        """Return its object without the known elements; raises as `parse_object`.

        Afterwards ``digest`` is that of purpose and body.
        """
        try:
            value, ends = self._parse()
        except (ValueError, LookupError, RecursionError, GatewayError):
            # raises the error of the whole body
            value, ends = parse_object(self._data), []
            self.known, self._marks, self._hasher = [], [], self._hash()
        view, at, n_known = memoryview(self._data), self._end, len(self.known)
        for number, end in enumerate(ends, n_known + 1):
            if number <= _FIRST or number > n_known + len(ends) - _LAST:
                self._hasher.update(view[at:end])
                self._marks.append(Mark(number, end, self._hasher.digest()))
                at = end
        self._marks[_FIRST : -2 * _LAST] = []
        self._hasher.update(view[at:])
        self.digest: bytes = self._hasher.digest()
        self._data = b""
        return value

    def _parse(self) -> tuple[Json, list[int]]:
        """The object without the known elements, and where the others end."""
        head, rest = b"", 0
        if self._marks:
            gap = _GAP.match(self._data, self._end)
            if gap is None:
                raise ValueError
            head, rest = self._data[: self._head], gap.end()
        text = (head + self._data[rest:]).decode()
        value, *places = _scan(text, self._listed)
        if not text.isascii():
            at = size = 0
            for i, place in enumerate(places):
                size += len(text[at:place].encode())
                at, places[i] = place, size
        if head and places[0] != len(head):
            # a second list of this name
            raise ValueError
        self._head = places[0]
        return _checked(value), [place + rest - len(head) for place in places[1:]]


def _scan(text: str, listed: str) -> list[Any]:
    """Return an object, where its list ``listed`` begins, and where the elements end.

    Raises `ValueError` or `LookupError`: it is not one JSON object.
    """
    value: Json = {}
    places, decode, space = [0], DECODER.raw_decode, _SPACE.match

    def after(at: int, expected: str = "") -> int:
        """Where white space ends, after a character that is expected before it."""
        if expected and text[at] != expected:
            raise ValueError
        return space(text, at + len(expected)).end()  # type: ignore[union-attr]

    def item_after(at: int, end: str) -> int:
        """Where the next item of a list or object begins, or its end."""
        at = after(at)
        if text[at] != end:
            at = after(at, ",")
            if text[at] == end:
                raise ValueError
        return at

    at = after(after(0), "{")
    while text[at] != "}":
        if text[at] != '"':
            raise ValueError
        name, at = scanstring(text, at + 1, True)
        at = after(after(at), ":")
        if name == listed and text[at] == "[":
            places, items = [at + 1], []
            at = after(at, "[")
            while text[at] != "]":
                item, at = decode(text, at)
                items.append(item)
                places.append(at)
                at = item_after(at, "]")
            value[name], at = items, at + 1
        else:
            value[name], at = decode(text, at)
        at = item_after(at, "}")
    if after(at + 1) != len(text):
        raise ValueError
    return [value, *places]


def without_halves(value: Json) -> Json:
    """Return a JSON object with U+FFFD for each half of a surrogate pair in its texts.

    UTF-8 has no halves, but JSON can spell them.
    """
    text = json.dumps(value, ensure_ascii=False)
    cleaned: Json = json.loads(_HALF.sub("\ufffd", text))
    return cleaned


def _no_constant(name: str) -> NoReturn:
    raise GatewayError(f"the body is not JSON: it contains {name}")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise GatewayError(f"the body contains {text[:40]}, too large for a double")
    return number


DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)
"""Decodes JSON, and refuses numbers that are not finite."""


def _kind(value: object) -> str:
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", dict: "an object", list: "a list"}
    return names.get(type(value), "a number")


def _typed(kind: type[T], name: str) -> Reader[T]:

    def read(value: object, where: str) -> T:
        if not isinstance(value, kind):
            refuse(where, f"{_kind(value)}, not {name}")
        return value

    return read


as_object: Reader[Json] = _typed(dict, "an object")
as_list: Reader[list[object]] = _typed(list, "a list")
as_text: Reader[str] = _typed(str, "a string")
as_flag: Reader[bool] = _typed(bool, "a boolean")


def list_of(read: Reader[T]) -> Reader[list[T]]:
    return lambda value, where: [
        read(item, f"{where}[{i}]") for i, item in enumerate(as_list(value, where))
    ]


def as_name(value: object, where: str) -> str:
    """Return ``value`` if it is a non-empty string."""
    text = as_text(value, where)
    if not text:
        refuse(where, "an empty string")
    return text


def as_integer(
    value: object, where: str, *, minimum: int, maximum: int = 2**31 - 1
) -> int:
    """Return ``value`` if it is an integer in ``[minimum, maximum]``."""
    if isinstance(value, bool) or not isinstance(value, int):
        kind = value if isinstance(value, float) else _kind(value)
        refuse(where, f"{kind}, not an integer")
    if not minimum <= value <= maximum:
        refuse(where, f"{value} is not in [{minimum}, {maximum}]")
    return value


def as_number(value: object, where: str, *, minimum: float, maximum: float) -> float:
    """Return ``value`` if it is a finite number in ``[minimum, maximum]``."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        refuse(where, f"{_kind(value)}, not a number")
    try:
        number = float(value)
    # an integer too large for a double
    except OverflowError:
        number = math.inf
    if not (math.isfinite(number) and minimum <= number <= maximum):
        refuse(where, f"{number} is not in [{minimum:g}, {maximum:g}]")
    return number


@dataclass(slots=True)
class Reading:
    """What comes up while one request is read."""

    # what to do with images, and those that were taken (`chat.images`)
    image_policy: Any = "refuse"
    # fields that are not counted
    silent: Collection[str] = ()
    # elements that were read (`Body`)
    known: list[Known] = field(default_factory=list)
    images: list[Any] = field(default_factory=list)
    # fields and values that have no effect, and how often they were given
    ignored: Counter[str] = field(default_factory=Counter)
    opened: "list[Fields]" = field(default_factory=list)

    def ignore(self, where: str, times: int = 1) -> None:
        if where in self.ignored or len(self.ignored) < _MOST_IGNORED:
            self.ignored[where[:_LONGEST_IGNORED]] += times

    def count_unread(self, first: int = 0) -> None:
        """Count the fields that nobody read, but none without a content."""
        for fields in self.opened[first:]:
            for name, value in fields.json.items():
                if name in fields.seen or name in self.silent:
                    continue
                if value or value == {}:
                    fields.ignore(name)
        del self.opened[first:]


class Fields:
    """The fields of a JSON object, and its path in errors (empty for the body).

    `need` reads a required field with one of the functions above, `get` one that may be
    missing or null. With a ``reading``, what has no effect is counted there.
    """

    __slots__ = ("json", "path", "reading", "seen")

    def __init__(
        self, json: Json, path: str = "", reading: Reading | None = None
    ) -> None:
        self.json, self.path = json, path
        self.seen: set[str] = set()
        self.reading = Reading() if reading is None else reading
        self.reading.opened.append(self)

    def at(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def refuse(self, name: str, rule: str, code: str | None = None) -> NoReturn:
        """Raise a 400 for a field."""
        refuse(self.at(name), rule, code=code)

    def ignore(self, name: str, value: str = "") -> None:
        """Count a field, or one of its values, that has no effect."""
        where = re.sub(r"\[\d+\]", "[]", self.at(name))
        # a client chooses the names
        self.reading.ignore(f"{where}={value}" if value else where)

    def only(self, known: Collection[str]) -> None:
        """Refuse a field that is not null and not ``known``."""
        for name, value in self.json.items():
            if value is not None and name not in known:
                self.refuse(
                    name, "not supported by this gateway", "unsupported_parameter"
                )

    def whole(self) -> Json:
        """Return all fields, which count as read."""
        self.seen.update(self.json)
        return self.json

    def peek(self, name: str) -> Any:
        """Return a field of any type; None: it is missing."""
        self.seen.add(name)
        return self.json.get(name)

    def need(self, name: str, read: Reader[T]) -> T:
        return read(self.peek(name), self.at(name))

    def get(self, name: str, read: Reader[T]) -> T | None:
        return None if self.peek(name) is None else read(self.json[name], self.at(name))

    def text(self, name: str) -> str:
        return self.need(name, as_text)

    def name(self, name: str) -> str:
        """Return a required non-empty string."""
        return self.need(name, as_name)

    def one_of(self, name: str, known: Collection[str], default: str = "") -> str:
        """Return a string of ``known``, or the default if it is missing."""
        value = self.peek(name)
        value = default or None if value is None else value
        if value is None:
            self.refuse(name, "missing")
        if not isinstance(value, str) or value not in known:
            self.refuse(name, f"{value!r} is not one of {', '.join(sorted(known))}")
        return value

    def get_text(self, name: str) -> str | None:
        return self.get(name, as_text)

    def get_object(self, name: str) -> Json | None:
        return self.get(name, as_object)

    def flag(self, name: str) -> bool:
        return bool(self.get(name, as_flag))

    def object(self, name: str) -> "Fields":
        return Fields(self.need(name, as_object), self.at(name), self.reading)

    def section(self, name: str) -> "Fields":
        """Return the fields of an object, by default an empty one."""
        return Fields(self.get_object(name) or {}, self.at(name), self.reading)

    def objects(self, name: str) -> "Iterator[Fields]":
        """Yield the objects of a list, by default an empty one."""
        for i, item in enumerate(self.get(name, as_list) or ()):
            where = f"{self.at(name)}[{i}]"
            yield Fields(as_object(item, where), where, self.reading)

    def each(self, name: str, read: "Callable[[Fields], T]") -> list[T]:
        """Return what each object of a required list is read as; known ones are not read.

        ``read`` must not depend on anything but the object.
        """
        given, reading = self.need(name, as_list), self.reading
        if not given and not reading.known:
            self.refuse(name, "an empty list")
        for i, item in enumerate(given, len(reading.known)):
            where, first = f"{self.at(name)}[{i}]", len(reading.opened)
            others, reading.ignored = reading.ignored, Counter()
            result = read(Fields(as_object(item, where), where, reading))
            reading.count_unread(first)
            reading.known.append((result, reading.ignored))
            reading.ignored = others
        for _, counted in reading.known:
            for where, times in counted.items():
                reading.ignore(where, times)
        return [result for result, _ in reading.known]

    def filled(self, name: str) -> "list[Fields]":
        """Return the objects of a required list that is not empty."""
        if not self.need(name, as_list):
            self.refuse(name, "an empty list")
        return list(self.objects(name))

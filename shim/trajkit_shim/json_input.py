"""Validates JSON from clients; each error names the path, the value and the rule."""

import json
import math
import re
from collections import Counter
from collections.abc import (
    AsyncIterator,
    Callable,
    Collection,
    Iterator,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeAlias, TypeVar

import orjson

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

HALF = re.compile("[\ud800-\udfff]")
"""Half of a surrogate pair: JSON can spell it, but UTF-8 has none."""


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
        value = orjson.loads(body)
        _check(value)
    # it takes no half of a pair, and rounds large integers
    except (ValueError, OverflowError):
        value = _decoded(body)
        _check(value, exact=True)
    checked: Json = value
    return checked


def as_json(value: object) -> bytes:
    """Return the JSON of a value, which may have arrays of numpy."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:
        # it has half a character, or an integer beyond 64 bits
        return json.dumps(value, default=lambda array: array.tolist()).encode()


class Element(NamedTuple):
    """What an element of a request's list was read as."""

    result: Any
    ignored: Counter[str]  # what of it had no effect


Elements: TypeAlias = dict[bytes, Element]
"""Elements by protocol and JSON: later requests with the same do not read it again."""


def _decoded(data: bytes) -> Any:
    try:
        return _DECODER.decode(data.decode())
    except ValueError as error:
        raise GatewayError(f"the body is not JSON: {error}") from error
    except RecursionError as error:
        raise GatewayError("the body is nested too deep") from error


def _check(value: object, *, exact: bool = False) -> None:
    """Refuse a body that is no object, or is nested too deep.

    Raises `OverflowError` if it may have a rounded integer, unless all are ``exact``.
    """
    if not isinstance(value, dict):
        raise GatewayError(f"the body is {_kind(value)}, not a JSON object")
    level = list[Any]([value])
    for _ in range(MAX_DEPTH):
        inner = (v.values() if isinstance(v, dict) else v for v in level)
        # most are texts
        items = [v for v in chain.from_iterable(inner) if not isinstance(v, str)]
        if not exact and any(abs(v) >= 2.0**63 for v in items if isinstance(v, float)):
            raise OverflowError
        level = [item for item in items if isinstance(item, (dict, list))]
        if not level:
            return
    raise GatewayError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _no_constant(name: str) -> NoReturn:
    raise GatewayError(f"the body is not JSON: it contains {name}")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise GatewayError(f"the body contains {text[:40]}, too large for a double")
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_float=_finite)


def add_counts(counts: Counter[str], more: Mapping[str, int]) -> None:
    """Add counts of ignored fields to others, but not of any number of names."""
    for name, times in more.items():
        shown = name[:_LONGEST_IGNORED]
        if shown in counts or len(counts) < _MOST_IGNORED:
            counts[shown] += times


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
    return as_text(value, where) or refuse(where, "an empty string")


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

    # whether images are taken; ``images`` has those that were, by their names
    takes_images: bool = False
    # fields that are not counted
    silent: Collection[str] = ()
    protocol: str = ""
    # what `Fields.each` reads, and what it read for earlier requests
    elements: Elements = field(default_factory=dict)
    earlier: Sequence[Elements] = ()
    # the replies that a request may name
    replies: Mapping[str, Any] = field(default_factory=dict)
    images: dict[str, Any] = field(default_factory=dict)
    # fields and values that have no effect, and how often they were given
    ignored: Counter[str] = field(default_factory=Counter)
    # the objects that are read, their paths, and the fields that were read; not `Fields`,
    # which would be in a cycle with all of a refused body
    opened: list[tuple[Json, str, set[str]]] = field(default_factory=list)

    def key(self, item: object) -> bytes:
        """Return the key of an element; empty: it is read each time, as images are."""
        if self.takes_images:
            return b""
        try:
            return self.protocol.encode() + orjson.dumps(item)
        except TypeError:
            # half a character, or an integer beyond 64 bits
            return b""

    def count_unread(self, first: int = 0) -> None:
        """Count the fields that nobody read, but none without a content."""
        for fields, path, seen in self.opened[first:]:
            for name, value in fields.items():
                if name in seen or name in self.silent:
                    continue
                if value or value == {}:
                    self.ignore(_at(path, name))
        del self.opened[first:]

    def ignore(self, where: str) -> None:
        add_counts(self.ignored, {re.sub(r"\[\d+\]", "[]", where): 1})


def _at(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


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
        self.reading.opened.append((json, path, self.seen))

    def at(self, name: str) -> str:
        return _at(self.path, name)

    def refuse(self, name: str, rule: str, code: str | None = None) -> NoReturn:
        """Raise a 400 for a field."""
        refuse(self.at(name), rule, code=code)

    def ignore(self, name: str, value: str = "") -> None:
        """Count a field, or one of its values, that has no effect."""
        self.reading.ignore(f"{self.at(name)}={value}" if value else self.at(name))

    def leave_out(self, kind: str) -> None:
        """Count the object, as one of a kind that has no effect."""
        self.ignore("type", kind)
        self.whole()

    def only(self, known: Collection[str]) -> None:
        """Refuse a field that is not null and not ``known``."""
        for name, value in self.json.items():
            if value is not None and name not in known:
                rule = "not supported by this gateway"
                self.refuse(name, rule, "unsupported_parameter")

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
        if value is None:
            return default or self.refuse(name, "missing")
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

    def objects(self, name: str, *, needed: bool = False) -> "Iterator[Fields]":
        """Yield the objects of a list, by default an empty one unless it is needed."""
        given = self.need(name, as_list) if needed else self.get(name, as_list) or []
        if needed and not given:
            self.refuse(name, "an empty list")
        for i, item in enumerate(given):
            where = f"{self.at(name)}[{i}]"
            yield Fields(as_object(item, where), where, self.reading)

    def each(self, name: str, read: "Callable[[Fields], T]") -> list[T]:
        """Return what each object of a required list is read as; known ones are not read.

        ``read`` must not depend on anything but the object.
        """
        given, reading, results = self.need(name, as_list), self.reading, list[T]()
        if not given:
            self.refuse(name, "an empty list")
        known = (reading.elements, *reading.earlier)
        for i, item in enumerate(given):
            key = reading.key(item)
            for each in known:
                if (element := each.get(key)) is not None:
                    break
            else:
                where, first = f"{self.at(name)}[{i}]", len(reading.opened)
                others, reading.ignored = reading.ignored, Counter()
                result = read(Fields(as_object(item, where), where, reading))
                reading.count_unread(first)
                element = Element(result, reading.ignored)
                reading.ignored = others
            if key:
                reading.elements[key] = element
            results.append(element.result)
            if element.ignored:
                add_counts(reading.ignored, element.ignored)
        return results

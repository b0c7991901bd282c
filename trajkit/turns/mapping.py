"""Where the records of another system keep what a call needs: a path per field.

A path has the keys on the way to a value, with dots between them: ``choices.0.token_ids``.
``a|b`` is the first of two that a record has, ``a+b`` is both as one text, ``a/b``. A path
that begins with a slash begins at the object around the record, and ``@file`` is the
name of the file without its suffix.
"""

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from trajkit._arguments import near_miss
from trajkit.errors import ArgumentError

SHORT = {"logprobs": "output_logprobs", "messages": "prompt_messages"}
"""Other names of fields."""

_TYPED = ("stringValue", "intValue", "doubleValue", "boolValue")
# settings of a mapping besides its fields
_SETTINGS = ("format", "each", "only")


class Part(NamedTuple):
    """A path: its keys, and whether it begins at the object around the record."""

    keys: tuple[str, ...]
    outer: bool = False

    def find(self, record: object, outer: object, file: str | None) -> object:
        """The value at the path; None if there is none."""
        if self.keys == ("@file",):
            return file
        source = outer if self.outer else record
        return source if self.keys == ("@self",) else _find(source, self.keys)


class Route(NamedTuple):
    """The paths of one field: of each way, those whose values it joins."""

    text: str
    ways: tuple[tuple[Part, ...], ...]

    def find(
        self, record: object, outer: object = None, file: str | None = None
    ) -> object:
        """The value of the first path that a record has; None without one."""
        for parts in self.ways:
            values = [part.find(record, outer, file) for part in parts]
            if len(values) == 1:
                if values[0] is not None:
                    return values[0]
            elif all(_is_text(value) for value in values):
                return "/".join(map(str, values))
        return None

    def parts(self) -> Iterator[Part]:
        """All of its paths."""
        return (part for parts in self.ways for part in parts)


def route(text: object) -> Route:
    """The paths that a text, or a list of texts, describes."""
    if isinstance(text, list | tuple):
        text = "|".join(map(str, text))
    if not isinstance(text, str) or not text.strip():
        raise ArgumentError(f"map: the path {text!r}: expected keys, such as a.b")

    def part(keys: str) -> Part:
        keys = keys.strip()
        return Part(tuple(keys.removeprefix("/").split(".")), keys.startswith("/"))

    ways = (tuple(map(part, way.split("+"))) for way in text.split("|"))
    return Route(text, tuple(ways))


@dataclass(frozen=True, slots=True)
class Map:
    """A mapping of a user."""

    fields: Mapping[str, Route]
    # the name of a format, whose other fields count, too
    format: str | None = None
    # the path of a list of records in each object
    each: str | None = None
    # "path=value": the records that are calls
    only: str | None = None

    def renamed(self, record: Mapping[str, object]) -> dict[str, object]:
        """The record with its values under the names of the fields."""
        used = {part.keys[0] for one in self.fields.values() for part in one.parts()}
        kept = {name: value for name, value in record.items() if name not in used}
        found = {name: one.find(record, record) for name, one in self.fields.items()}
        return kept | {name: v for name, v in found.items() if v is not None}


MapLike: TypeAlias = Map | Mapping[str, Any] | str | os.PathLike[str]
"""A mapping as users write it: a dict, ``"field=path,..."``, or a TOML file."""


def read_map(given: MapLike, known: tuple[str, ...] | None = None) -> Map:
    """A mapping from what a user wrote; ``known`` are the fields that it may have."""
    if not isinstance(given, Map):
        given = _read(dict(_entries(given)))
    for name in given.fields:
        if known is not None and name not in known:
            near = near_miss(name, known, 0.7)
            hint = f"did you mean {near}?" if near else f"expected {', '.join(known)}"
            raise ArgumentError(f"map: {name!r} is not a field: {hint}")
    return given


def _read(entries: dict[str, Any]) -> Map:
    settings = {name: entries.pop(name) for name in _SETTINGS if name in entries}
    for name, value in settings.items():
        if not isinstance(value, str):
            raise ArgumentError(f"map: {name} is {value!r}: expected text")
    table = entries.pop("fields", {})
    if not isinstance(table, Mapping):
        raise ArgumentError(f"map: fields is {table!r}: expected fields with paths")
    fields: dict[str, Route] = {}
    for name, path in {**entries, **table}.items():
        target = SHORT.get(name, name)
        if target in fields:
            raise ArgumentError(f"map: {target} is given twice")
        fields[target] = route(path)
    if not fields and not settings:
        raise ArgumentError("map has no fields: expected FIELD=PATH")
    return Map(fields, **settings)


def _entries(given: object) -> Mapping[str, Any]:
    """The fields, with their paths, and the settings that a user wrote."""
    if isinstance(given, Mapping):
        return given
    if isinstance(given, str) and "=" in given:
        entries: dict[str, str] = {}
        for pair in filter(None, map(str.strip, given.split(","))):
            name, equals, path = map(str.strip, pair.partition("="))
            if not equals or not name:
                raise ArgumentError(f"map: {pair!r}: expected FIELD=PATH")
            if name in entries:
                raise ArgumentError(f"map: {name} is given twice")
            entries[name] = path
        return entries
    if not isinstance(given, str | os.PathLike):
        raise ArgumentError(
            f"map is a {type(given).__name__}: expected a dict, text of FIELD=PATH, or "
            "the path of a TOML file"
        )
    try:
        return tomllib.loads(Path(given).read_text("utf-8"))
    except (ValueError, IsADirectoryError) as error:
        raise ArgumentError(f"map: {given}: {error}") from None
    except FileNotFoundError:
        raise ArgumentError(
            f"map: {str(given)!r} is neither FIELD=PATH,... nor a TOML file"
        ) from None


def merged_map(given: list[str] | None) -> Map | None:
    """Several mappings of a command line as one."""
    merged = None
    for one in map(read_map, given or ()):
        before = merged or Map({})
        if twice := before.fields.keys() & one.fields.keys():
            raise ArgumentError(f"map: {min(twice)} is given twice")
        settings = [getattr(one, n) or getattr(before, n) for n in _SETTINGS]
        merged = Map({**before.fields, **one.fields}, *settings)
    return merged


def _is_text(value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number or (isinstance(value, str) and bool(value))


def _find(value: object, keys: tuple[str, ...]) -> object:
    if not keys:
        return value
    if isinstance(value, str) and value[:1] in ("{", "["):
        # attributes of OpenTelemetry hold JSON as text
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return None
    if isinstance(value, list):
        if keys[0].lstrip("-").isdecimal():
            at = int(keys[0][:9])
            inside = -len(value) <= at < len(value)
            return _find(value[at], keys[1:]) if inside else None
        # the attributes of OpenTelemetry's JSON, a list of keys and typed values
        pairs = [one for one in value if isinstance(one, dict) and "key" in one]
        value = {str(one["key"]): _typed(one.get("value")) for one in pairs}
    if isinstance(value, dict):
        # names may contain dots themselves, as those of OpenTelemetry do
        for n in range(1, len(keys) + 1):
            found = _find(value.get(".".join(keys[:n])), keys[n:])
            if found is not None:
                return found
    return None


def _typed(value: object) -> object:
    """The value in an object that names its type: ``{"intValue": "5"}``."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    if kind == "arrayValue" and isinstance(inner, dict):
        listed = inner.get("values")
        return [_typed(one) for one in listed] if isinstance(listed, list) else []
    if kind == "intValue" and isinstance(inner, str):
        # Python may refuse to parse more digits
        return int(inner) if inner.isdecimal() and len(inner) < 20 else inner
    return inner if kind in _TYPED else value

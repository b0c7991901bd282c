"""Where the records of another system keep what a call needs: a path per field.

A path has the keys on the way to a value, with dots between them: ``choices.0.token_ids``.
``a|b`` is the first of two that a record has, ``a+b`` is both as one text, ``a/b``. A path
that begins with a slash begins at the object around the record. ``@file`` is the name of
the file without its suffix, ``@folder`` that of its folder, and ``@name`` the place of the
record: ``log.jsonl, line 3``.
"""

import json
import os
import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trajkit._arguments import near_miss
from trajkit.errors import ArgumentError
from trajkit.turns.keys import CONTRARY, SPELLED, is_name, parsed, word_of

SHORT = {"logprobs": "output_logprobs", "messages": "prompt_messages"}
"""Other names of fields."""

# fields that may take a key, by its words
_TAKEN_BY = {
    "output_mask": "(?<!prompt_)masks?",
    "reward": "rewards?|scores?|returns?|ret",
    "group_id": "groups?|uid",
    "agent_id": "agent(_(id|name))?",
    "trainable": "trainable",
    "weight_version": "versions?",
    "session_id": "(trajectory|traj|rollout|run|episode)(_(id|uid|uuid|key|idx|index))?$",
}
_TYPED = ("stringValue", "intValue", "doubleValue", "boolValue")
# settings of a mapping besides its fields
_SETTINGS = ("format", "each", "only")


Names: TypeAlias = Mapping[str, str]
"""``@file``, ``@folder`` and ``@name`` of a record; after a slash, of what is around it."""


def stem_of(file: Path) -> str:
    """The name of a file without its suffixes."""
    name = file.name.removesuffix(".gz").removesuffix(".zst")
    return Path(name).stem or file.name


def names_of(file: Path, place: str, around: str = "") -> Names:
    """The names of a record at a place in a file, and of the object around it."""
    own = {"@file": stem_of(file), "@folder": file.absolute().parent.name}
    own["@name"] = f"{file.name}, {place}"
    outer = own | {"@name": f"{file.name}, {around or place}"}
    return own | {f"/{name}": text for name, text in outer.items()}


class Part(NamedTuple):
    """A path: its keys, and whether it begins at the object around the record."""

    keys: tuple[str, ...]
    outer: bool = False

    def find(self, record: object, outer: object, names: Names) -> object:
        """The value at the path; None if there is none."""
        if self.keys[0] in ("@file", "@folder", "@name"):
            return names.get("/" * self.outer + self.keys[0])
        source = outer if self.outer else record
        if len(self.keys) == 1 and isinstance(source, dict):
            return source if self.keys[0] == "@self" else source.get(self.keys[0])
        return source if self.keys == ("@self",) else _find(source, self.keys)


class Route(NamedTuple):
    """The paths of one field: of each way, those whose values it joins."""

    text: str
    ways: tuple[tuple[Part, ...], ...]

    def find(
        self, record: object, outer: object = None, names: Names = MappingProxyType({})
    ) -> object:
        """The value of the first path that a record has; None without one."""
        for parts in self.ways:
            values = [part.find(record, outer, names) for part in parts]
            if len(values) == 1:
                if values[0] is not None:
                    return values[0]
            elif all(is_name(value) for value in values):
                return "/".join(map(str, values))
        return None

    def parts(self) -> Iterator[Part]:
        """All of its paths."""
        return (part for parts in self.ways for part in parts)


def elements(value: Any, path: str, place: str = "") -> Iterator[tuple[str, Any]]:
    """Places and values at a path with "*" for the elements of lists; an object without
    the path, or any value of an empty path, is one itself.
    """
    found = [(place, value)]
    for key in keys_of(path):
        deeper: list[tuple[str, Any]] = []
        for where, within in found:
            if key == "*":
                several = enumerate(within if isinstance(within, list) else ())
                if isinstance(within, dict):
                    deeper += [(f"{where}, {k}", one) for k, one in within.items()]
                deeper += [(f"{where}, item {k}", one) for k, one in several]
            elif isinstance(within, Mapping) and key in within:
                deeper.append((where, within[key]))
            elif within is value:
                yield place, value
                return
        found = deeper
    yield from found


def keys_of(path: str) -> list[str]:
    """The keys of the path of a list's elements."""
    keys = path.split(".") if path else []
    return [*keys, "*"] if keys and keys[-1] != "*" else keys


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

    def records(self, root: Any, place: str = "") -> Iterator[tuple[str, Any]]:
        """Places and records of an object: those at ``each`` that ``only`` selects.

        An object without the list is a record itself.
        """
        path, _, wanted = (self.only or "").partition("=")
        only = route(path) if path else None
        for where, one in elements(root, self.each or "", place):
            value = only.find(one, root) if only else wanted
            alone = self.each and one is root and value is None
            if str(value) == wanted or alone or not isinstance(one, Mapping):
                yield where, one

    def renamed(self, record: object, names: Names) -> Iterator[Any]:
        """The calls of a record, with their values under the names of the fields."""
        known = {**{name: route(text) for name, text in SPELLED.items()}, **self.fields}
        for where, one in self.records(record):
            if not isinstance(one, Mapping) or not isinstance(record, Mapping):
                yield one
                continue
            here = {**names, "@name": f"{names['@name']}{where}"}
            found = {
                name: parsed(way.find(one, record, here)) for name, way in known.items()
            }
            if type(found["session_id"]) is int:
                found["session_id"] = str(found["session_id"])
            # arrays and tensors stay as they are, and odd values, which are refused later
            reply, logprobs = found["response_message"], found["output_logprobs"]
            found["response_message"] = reply_of(reply) or reply or None
            if isinstance(logprobs, dict | list) and (source := logprobs_of(logprobs)):
                found["output_logprobs"] = source[1]
            found["prompt_messages"] = without_reply(found, known)
            found = {name: v for name, v in found.items() if v is not None}
            used = {
                *(part.keys[0] for name in found for part in known[name].parts()),
                *(self.each or "").split(".")[:1],
            }
            own = {**record, **one}
            yield {name: v for name, v in own.items() if name not in used} | found


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


def reply_of(value: object) -> dict[str, Any] | None:
    """A reply: a message, a list of one, or the text of an assistant's message."""
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    if isinstance(one, str) and one:
        return {"role": "assistant", "content": one}
    return one if isinstance(one, dict) and one else None


def without_reply(fields: Mapping[str, Any], routes: Mapping[str, Route]) -> Any:
    """The messages of a prompt, without the reply if that is taken from their end."""
    messages, reply = fields.get("prompt_messages"), fields.get("response_message")
    ways = [
        [part.keys for part in routes[name].parts()] if name in routes else []
        for name in ("prompt_messages", "response_message")
    ]
    within = any(keys[:-1] in ways[0] for keys in ways[1])
    if within and reply is not None and isinstance(messages, list):
        return messages[:-1] if messages[-1:] == [reply] else messages
    return messages


def logprobs_of(value: Any) -> tuple[list[Any] | None, list[Any]] | None:
    """Ids (None: unknown) and their logprobs: of numbers, of entries that name an id, or
    of a choice's ``logprobs``.
    """
    given = value if isinstance(value, dict) else {}
    entries = given.get("content") if given else value
    entries = list(entries) if isinstance(entries, list | np.ndarray) else []
    if any(isinstance(one, dict) and "logprob" not in one for one in entries):
        return None
    if not given and entries and not isinstance(entries[0], dict | list):
        return None, entries
    if not entries:
        values, texts = (given.get(name) or [] for name in ("token_logprobs", "tokens"))
        values = values if isinstance(values, list) else []
        texts = texts if len(texts) == len(values) else [None] * len(values)
        entries = [
            list(pair) for pair in zip(values, map(_spelled, texts), strict=True)
        ]
    pairs = list(map(_pair, entries))
    named = all(type(token) is int for _, token in pairs)
    ids = [token for _, token in pairs] if named else None
    return (ids, [logprob for logprob, _ in pairs]) if pairs else None


def _pair(entry: Any) -> list[Any]:
    if isinstance(entry, dict):
        named = entry.get("token_id", _spelled(entry.get("token")))
        return [entry.get("logprob"), named]
    return entry[:2] if isinstance(entry, list) and len(entry) > 1 else [None, None]


def _spelled(token: object) -> int | None:
    """The id in a token that vLLM writes as ``token_id:5`` on request."""
    # Python may refuse to parse more digits
    found = re.fullmatch(
        "token_id:([0-9]{1,10})", token if isinstance(token, str) else ""
    )
    return int(found[1]) if found else None


def map_option(field: str, path: str) -> str:
    """The option of a command that maps a field; empty if no mapping has such a path."""
    return "" if {*path} & {*",|+"} else f"--map {shlex.quote(f'{field}={path}')}"


def hint_for(path: str, value: object) -> str:
    """How a field takes a key that is not read; empty if none does."""
    word = word_of(path)
    words = (
        x for x, one in _TAKEN_BY.items() if re.search(rf"(^|_)({one})(_|$)", word)
    )
    field = next(words, "")
    if field == "reward":
        option = reward_option(path, value)
    else:
        is_mask = isinstance(value, list) and not CONTRARY.search(word)
        fits = is_mask if field == "output_mask" else is_name(value)
        option = map_option(field, path) if field and fits else ""
    return f": {option} takes it" if option else ""


def reward_option(
    path: str, value: object, number: Callable[[Any], object] = lambda value: value
) -> str:
    """The option that takes the first finite number in a value as the reward, or empty."""
    own: Any = number(value)
    if type(own) in (int, float) and abs(own) <= sys.float_info.max:
        return map_option("reward", path)
    parts: dict[str, Any] = value if isinstance(value, dict) else {}
    names = sorted(parts, key=lambda name: name != "value")
    found = (reward_option(f"{path}.{name}", parts[name], number) for name in names)
    return next(filter(None, found), "")


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
        value = by_key(value)
    if isinstance(value, dict):
        # names may contain dots themselves, as those of OpenTelemetry do
        for n in range(1, len(keys) + 1):
            found = _find(value.get(".".join(keys[:n])), keys[n:])
            if found is not None:
                return found
    return None


def by_key(value: object) -> dict[str, Any]:
    """Attributes of OpenTelemetry: an object, or a list of keys and typed values."""
    if isinstance(value, dict):
        return value
    listed = value if isinstance(value, list) else []
    pairs = [one for one in listed if isinstance(one, dict) and "key" in one]
    return {str(one["key"]): _typed(one.get("value")) for one in pairs}


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

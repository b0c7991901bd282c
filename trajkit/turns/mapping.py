"""Where the records of another system keep what a call needs: a path per field.

A path has the keys on the way to a value, with dots between them: ``choices.0.token_ids``.
``a|b`` is the first of two that a record has, ``a+b`` is both as one text, ``a/b``. A path
that begins with a slash begins at the object around the record, and ``@file`` is the
name of the file without its suffix.
"""

import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from trajkit._arguments import near_miss
from trajkit.errors import ArgumentError
from trajkit.schema import PAYLOADS

SHORT = {"logprobs": "output_logprobs", "messages": "prompt_messages"}
"""Other names of fields."""

SPELLED = {
    "session_id": "session_id|metadata.session_id|extra.session_id",
    "prompt_ids": "prompt_token_ids|prompt_ids|input_token_ids|prompt_tokens|input_ids|"
    "input_tokens",
    "output_ids": "output_token_ids|completion_token_ids|response_token_ids|"
    "generation_token_ids|generated_token_ids|token_ids|output_ids|completion_ids|"
    "response_ids|output_tokens|completion_tokens|response_tokens",
    "output_logprobs": "output_logprobs|completion_logprobs|response_logprobs|"
    "generation_log_probs|output_token_logprobs|rollout_log_probs|token_logprobs|"
    "logprobs|log_probs|old_log_probs|logprob",
    "prompt_messages": "prompt_messages|messages",
    "response_message": "response_message|message|response|completion",
    "finish_reason": "finish_reason|stop_reason",
}
"""Where records of any system may have fields that no mapping names."""

_WORD = re.compile(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])")
RUN = re.compile(
    r"(x_)?((agent|parent|root|task|source|user)_)?(session|trajectory|traj|rollout|run|"
    r"episode|conversation|conv|thread|trace|task|sample|instance|attempt|trial|"
    r"example|chat|dialog|dialogue|problem|question|prompt|group|env|game|user|job|"
    r"workflow|experiment)(_(id|ids|uid|uuid|name|key|index|idx|no|num|number|hash))"
    r"|index|idx|session|trajectory|rollout|run|episode|trial|attempt|seed"
)
# any other key beside a call that names something, but for parts of a call
NAMED = re.compile(
    r"(?!(.*_)?(request|req|response|call|span|parent|message|msg|completion|model|step|"
    r"turn|event|observation|tool|policy|checkpoint|adapter|project|organization)_)"
    r"(\w+_)?(id|uid|uuid|guid|((agent|worker|actor|thread|process|slot|replica|host|node|"
    r"machine|client|player|env|gpu)(_(name|key|index|idx|no|num|number|rank))?)|rank|"
    r"pid|hostname)"
)
# keys that name a run even if they are empty
EMPTY_RUN = re.compile(
    r"(agent_)?(session|trajectory|traj|rollout|run|episode|conversation)(_(id|uuid|key))?"
)
# a number of tokens that a source states: a side of the call with a measure
SIDE = "(prompt|input|completion|output|response|generated|generation|candidates|eval)"
COUNT = re.compile(
    rf"(?=.*(?:len|tokens?|count|total))(?:n|num|number|of|the|ids?|tokens?|counts?|"
    rf"len(?:gth)?|logprobs|(?=prompt_?eval)prompt_?eval|{SIDE[1:-1]}|total_?tokens?|_)+"
)
USAGE = re.compile(r"(\w+_)?usage(_\w+)?|tokens?(_counts?)?")
# fields that may take a key, by its words
_TAKEN_BY = {
    "output_mask": "masks?",
    "reward": "rewards?|scores?|returns?",
    "group_id": "groups?|uid",
    "agent_id": "agent(_(id|name))?",
    "trainable": "trainable",
    "weight_version": "versions?",
}
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

    def renamed(
        self, record: Mapping[str, object], file: str | None = None
    ) -> Iterator[dict[str, object]]:
        """The calls of a record, with their values under the names of the fields."""
        known = {**{name: route(text) for name, text in SPELLED.items()}, **self.fields}
        only, _, value = (self.only or "").partition("=")
        listed = _find(record, tuple(self.each.split("."))) if self.each else [record]
        for one in listed if isinstance(listed, list) else [record]:
            if only and str(route(only).find(one, record)) != value:
                continue
            found = {
                name: parsed(way.find(one, record, file)) for name, way in known.items()
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
            own = {**record, **(one if isinstance(one, Mapping) else {})}
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


def parsed(value: object) -> object:
    """The value of a text of JSON; anything else unchanged."""
    if not isinstance(value, str) or value.lstrip()[:1] not in ("{", "["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


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


def word_of(path: str) -> str:
    """The last key of a path in lower case, with underscores between its words."""
    return "_".join(_WORD.findall(path.rpartition(".")[2])).lower()


def claims_of(
    usage: Mapping[str, Any], name: str, *, only: bool = True
) -> list[tuple[str, str, object]]:
    """The numbers of tokens that a usage states, as name, field and number; ``only``: it
    has nothing else.
    """
    if str(usage.get("unit") or "tokens").lower() != "tokens":
        return []
    words = {word_of(key): key for key in usage}
    # some sources take cached or reasoning tokens out of a number, beside which they stand
    apart = [
        word for word, key in words.items() if type(usage[key]) is int and usage[key]
    ]
    found = []
    for word, key in words.items():
        stated, bare = usage[key], only and re.fullmatch(SIDE, word)
        is_number = type(stated) in (int, float)
        if not (bare or COUNT.fullmatch(word)) or not (
            is_number or (only and isinstance(stated, str | bool))
        ):
            continue
        sides = {"prompt"} if "prompt" in word else {*re.findall(SIDE, word)}
        total = "total" in word
        if len(sides) != (not total):
            continue
        side = "" if total else next(iter(sides))
        beside = ["cache", "reasoning"] if total else ["cache"] * (side == "input")
        beside += [f"{side}_"] * (word == side)
        if not any(part in one for part in beside for one in apart):
            target = "prompt_ids" if side in ("prompt", "input") else "output_ids"
            where = name if key == name.rpartition(".")[2] else f"{name}.{key}"
            found.append((where.lstrip("."), "ids" if total else target, stated))
    return found


def unheeded(record: Mapping[str, Any], name: str) -> bool:
    """Whether a key is a mask, or states other numbers of tokens than a call has."""
    value, word = record[name], word_of(name)
    if name in PAYLOADS:
        return False
    if re.search("(^|_)masks?(_|$)", word):
        return value is not None
    stated = value if USAGE.fullmatch(word) else None
    stated = {name: value} if COUNT.fullmatch(word) else stated
    claims = claims_of(stated, name) if isinstance(stated, Mapping) else []
    sizes: dict[str, Any] = {target: record.get(target) for _, target, _ in claims}
    return any(
        type(n) is int and hasattr(sizes[target], "__len__") and n != len(sizes[target])
        for _, target, n in claims
    )


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
        fits = isinstance(value, list) if field == "output_mask" else _is_text(value)
        option = map_option(field, path) if field and fits else ""
    return f": {option} takes it" if option else ""


def reward_option(
    path: str, value: object, number: Callable[[Any], object] = lambda value: value
) -> str:
    """The option that takes the first number in a value as the reward, or empty."""
    own = number(value)
    if isinstance(own, int | float) and not isinstance(own, bool):
        return map_option("reward", path)
    parts: dict[str, Any] = value if isinstance(value, dict) else {}
    names = sorted(parts, key=lambda name: name != "value")
    found = (reward_option(f"{path}.{name}", parts[name], number) for name in names)
    return next(filter(None, found), "")


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

"""Parse JSON of any nesting depth."""

import json
import re
from collections.abc import Iterable, Mapping
from json import decoder

_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {
    "null": None,
    "true": True,
    "false": False,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
_WORD = re.compile("|".join(_WORDS))
_OPEN: dict[str, type[dict[str, object]] | type[list[object]]] = {"{": dict, "[": list}


MAX_DEPTH = 32
"""Maximum nesting depth of a value in an extra column."""


def is_too_deep(value: object) -> bool:
    """Whether lists and dicts are nested deeper than `MAX_DEPTH` levels.

    Arrow infers types by recursion without a limit, which overflows the stack. It writes
    at most 63 levels to files, and reads fewer from Parquet.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in _children(one)]
    return bool(level)


def _children(value: object) -> Iterable[object]:
    """The values of a list or dict that contains lists or dicts."""
    values: Iterable[object] = ()
    if isinstance(value, Mapping):
        values = value.values()
    elif isinstance(value, (list, tuple)):
        values = value
    # most lists contain only numbers, which the set of types shows quickly
    nested = any(issubclass(t, (list, tuple, Mapping)) for t in set(map(type, values)))
    return values if nested else ()


def parse(text: str) -> object:
    """As ``json.loads``, which fails at a depth of some thousand levels.

    Raises
    ------
    ValueError
        The text is not JSON. NaN and the infinities are accepted, as ``json`` does.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return _parse_deep(text)


def _parse_deep(text: str) -> object:
    # open containers, innermost last, and the keys that wait for their values
    stack: list[object] = []
    keys: list[str] = []
    at = _skip(text, 0)
    while True:
        opening = _OPEN.get(text[at : at + 1])
        if opening is not None:
            value: object = opening()
            at = _skip(text, at + 1)
            if text[at : at + 1] != ("}" if opening is dict else "]"):
                stack.append(value)
                if opening is dict:
                    at = _key(text, at, keys)
                continue
            at += 1
        else:
            value, at = _leaf(text, at)
        # add the value to its container, then close every container that ends here
        while True:
            at = _skip(text, at)
            if not stack:
                if at != len(text):
                    raise json.JSONDecodeError("Extra data", text, at)
                return value
            within = stack[-1]
            if isinstance(within, dict):
                within[keys.pop()] = value
                closing = "}"
            elif isinstance(within, list):
                within.append(value)
                closing = "]"
            sign = text[at : at + 1]
            if sign == ",":
                at = _skip(text, at + 1)
                if isinstance(within, dict):
                    at = _key(text, at, keys)
                break
            if sign != closing:
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            at += 1
            value = stack.pop()


def _skip(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    return at if found is None else found.end()


def _key(text: str, at: int, keys: list[str]) -> int:
    if text[at : at + 1] != '"':
        raise json.JSONDecodeError("Expecting a property name in quotes", text, at)
    key, at = _string(text, at + 1)
    at = _skip(text, at)
    if text[at : at + 1] != ":":
        raise json.JSONDecodeError("Expecting ':' delimiter", text, at)
    keys.append(key)
    return _skip(text, at + 1)


def _string(text: str, at: int) -> tuple[str, int]:
    value, end = decoder.scanstring(text, at, True)  # type: ignore[attr-defined]
    return value, end


def _leaf(text: str, at: int) -> tuple[object, int]:
    if text[at : at + 1] == '"':
        return _string(text, at + 1)
    word = _WORD.match(text, at)
    if word is not None:
        return _WORDS[word[0]], word.end()
    number = _NUMBER.match(text, at)
    if number is None:
        raise json.JSONDecodeError("Expecting value", text, at)
    whole = number[2] is None and number[3] is None
    return (int(number[0]) if whole else float(number[0])), number.end()

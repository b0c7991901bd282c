"""JSON to Python values, however deep it is nested."""

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
"""Levels of lists and dicts that a value may have of which a column is made."""


def is_too_deep(value: object) -> bool:
    """Whether lists and dicts are nested deeper than `MAX_DEPTH` levels.

    Arrow makes a type of such a value by recursion without a limit, which overflows the
    stack. It writes 63 levels at most to files, and reads fewer from Parquet.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for one in level for child in _children(one)]
    return bool(level)


def _children(value: object) -> Iterable[object]:
    """What is in a list or dict that has lists or dicts in it."""
    values: Iterable[object] = ()
    if isinstance(value, Mapping):
        values = value.values()
    elif isinstance(value, (list, tuple)):
        values = value
    # most lists hold numbers alone, and their types are found quickly
    nested = any(issubclass(t, (list, tuple, Mapping)) for t in set(map(type, values)))
    return values if nested else ()


def parse(text: str) -> object:
    """As ``json.loads``, which gives up some thousand levels down.

    Raises
    ------
    ValueError
        The text is no JSON; NaN and the infinities are let through as ``json`` does.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return _parse_deep(text)


def _parse_deep(text: str) -> object:
    # containers still open, the innermost last, and the key that waits for its value
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
        # put the value where it belongs, and close what ends behind it
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

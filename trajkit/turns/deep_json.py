"""Parse JSON of any nesting depth."""

import json
import re
from collections.abc import Iterable, Mapping

# a sign, a string, or a number or word
_TOKEN = re.compile(
    r'[ \t\n\r]*([][{},:]|"[^"\\]*(?:\\.[^"\\]*)*"|[^][{},:" \t\n\r]+)', re.DOTALL
)


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

    Raises ValueError for what is not JSON; NaN and the infinities are, as in ``json``.
    """
    try:
        return json.loads(text)
    except RecursionError:
        return _parse_deep(text)


def _parse_deep(text: str) -> object:
    # open containers, innermost last, each with the key that waits for its value
    stack: list[tuple[dict[str, object] | list[object], str]] = []
    at = 0

    def token() -> str:
        nonlocal at
        found = _TOKEN.match(text, at)
        if found is None:
            raise json.JSONDecodeError("Expecting value", text, at)
        at = found.end()
        return found[1]

    def key(quoted: str) -> str:
        if quoted[0] != '"' or token() != ":":
            raise json.JSONDecodeError("Expecting a key and ':'", text, at)
        return str(json.loads(quoted))

    sign = token()
    while True:
        # a value begins with the sign; what opens is closed at once if it is empty
        value: object
        if sign in ("{", "["):
            value, closing = ({}, "}") if sign == "{" else ([], "]")
            sign = token()
            if sign != closing:
                is_dict = isinstance(value, dict)
                stack.append((value, key(sign) if is_dict else ""))  # type: ignore[arg-type]
                sign = token() if is_dict else sign
                continue
        else:
            value = json.loads(sign)
        # add the value to its container, then close every container that ends here
        while stack:
            within, name = stack.pop()
            if isinstance(within, dict):
                within[name] = value
            else:
                within.append(value)
            sign = token()
            if sign == ",":
                sign = token()
                if isinstance(within, dict):
                    name, sign = key(sign), token()
                stack.append((within, name))
                break
            if sign != ("}" if isinstance(within, dict) else "]"):
                raise json.JSONDecodeError("Expecting ',' delimiter", text, at)
            value = within
        else:
            if text[at:].strip(" \t\n\r"):
                raise json.JSONDecodeError("Extra data", text, at)
            return value

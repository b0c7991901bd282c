"""Converts values that a model wrote as text to JSON, by the tool's schema."""

import json

from trajkit_shim.replies.parsers.form import Tools
from trajkit_shim.replies.parsers.json_text import decoder

# some templates write values as Python does
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS = {bool: "boolean", int: "integer", float: "number"}
_KINDS |= {str: "string", dict: "object", list: "array", type(None): "null"}
_NUMBERS = frozenset({"integer", "number"})
# accepted without a schema, because text rarely looks like them by chance
_UNSAID = frozenset({"object", "array"})


def kinds_of(tools: Tools, name: str) -> dict[str, frozenset[str]]:
    """Return the JSON types of each parameter of a tool, as far as its schema has them."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            schema = function.get("parameters")
            fields = schema.get("properties") if isinstance(schema, dict) else None
            if isinstance(fields, dict):
                return {str(key): _kinds(value) for key, value in fields.items()}
    return {}


def _kinds(schema: object) -> frozenset[str]:
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset({named})
    if isinstance(named, list):
        return frozenset(filter(lambda kind: isinstance(kind, str), named))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(_kind_of, schema["enum"]))
    either = schema.get("anyOf") or schema.get("oneOf")
    if isinstance(either, list):
        # only one level of alternatives
        return frozenset().union(
            *(_kinds({"type": one.get("type")}) for one in either if _is_typed(one))
        )
    return frozenset()


def _is_typed(schema: object) -> bool:
    return isinstance(schema, dict) and "type" in schema


def json_text(written: str, kinds: frozenset[str] | None) -> str:
    """Return the JSON text of a value.

    The text is used as JSON if it has a type, other than string, that the parameter may
    have; else it becomes a string. A parameter of unknown type (``kinds`` is None or
    empty) may be an object or a list.
    """
    text = written.strip()
    text = _PYTHON.get(text, text)
    try:
        kind = _kind_of(json.loads(text, parse_constant=decoder.parse_constant))
    except (ValueError, RecursionError):
        kind = "string"
    allowed = kinds or _UNSAID
    if allowed & _NUMBERS:
        allowed |= _NUMBERS
    if kind != "string" and kind in allowed:
        return text
    return json.dumps(written, ensure_ascii=False)


def _kind_of(value: object) -> str:
    return _KINDS[type(value)]


def json_object(fields: dict[str, str]) -> str:
    """Return the JSON text of an object whose values are JSON texts."""
    pairs = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in fields.items())
    return "{" + ", ".join(pairs) + "}"

"""Values that a model wrote as text, made JSON by what the tool says of them."""

import json

from trajkit_shim.parsers.form import Tools
from trajkit_shim.parsers.json_text import decoder

# Templates that write values as Python does.
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_NUMBERS = frozenset({"integer", "number"})
# What no text is taken for by chance, where the tool does not say what it takes.
_UNSAID = frozenset({"object", "array"})


def kinds_of(tools: Tools, name: str) -> dict[str, frozenset[str]]:
    """The JSON types that each parameter of a tool may have, where its schema says."""
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
        # one level: deeper ones are not said
        return frozenset().union(
            *(_kinds({"type": one.get("type")}) for one in either if _is_typed(one))
        )
    return frozenset()


def _is_typed(schema: object) -> bool:
    return isinstance(schema, dict) and "type" in schema


def json_text(written: str, kinds: frozenset[str] | None) -> str:
    """The JSON text of a value.

    It is the JSON that was written where that is of a type, other than a string, that
    the parameter may have; else the text is a string. A parameter of unknown type may
    be an object or a list.

    Parameters
    ----------
    written : str
        The value's text.
    kinds : frozenset of str or None
        From `kinds_of`; None or empty: unknown.
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
    if value is None:
        return "null"
    kinds = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        dict: "object",
        list: "array",
    }
    return kinds[type(value)]


def json_object(fields: dict[str, str]) -> str:
    """The JSON text of an object whose values are JSON texts."""
    pairs = (f"{json.dumps(k, ensure_ascii=False)}: {v}" for k, v in fields.items())
    return "{" + ", ".join(pairs) + "}"

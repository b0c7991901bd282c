"""Reads JSON from a text without losing its spelling."""

import json

from trajkit_shim.replies.parsers.form import skip


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def fields_at(text: str, offset: int) -> tuple[dict[str, str], int]:
    """Return the source text of each value of the object at ``offset``, and its end.

    Raises `ValueError`: there is no object, or two fields have the same name.
    `RecursionError`: it is nested too deep.
    """
    fields: dict[str, str] = {}
    offset = _expect(text, skip(text, offset), "{")
    while True:
        key, offset = decoder.raw_decode(text, skip(text, offset))
        if not isinstance(key, str) or key in fields:
            raise ValueError(f"{key!r} is not a string, or a repeated field name")
        start = skip(text, _expect(text, skip(text, offset), ":"))
        _, end = decoder.raw_decode(text, start)
        fields[key] = text[start:end]
        offset = skip(text, end)
        if not text.startswith(",", offset):
            return fields, _expect(text, offset, "}")
        offset += 1


def named_at(text: str, offset: int) -> tuple[str, dict[str, str], int] | None:
    """Return ``name``, all fields and the end of a named object at ``offset``, if any."""
    try:
        fields, end = fields_at(text, offset)
        name = json.loads(fields["name"])
    except (ValueError, KeyError, RecursionError):
        return None
    return (name, fields, end) if isinstance(name, str) and name else None


def _expect(text: str, offset: int, mark: str) -> int:
    if text[offset : offset + 1] != mark:
        raise ValueError(f"no {mark!r} at {offset}")
    return offset + 1

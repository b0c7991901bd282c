"""JSON in a text, read without losing how it is written."""

import json

from trajkit_shim.parsers.form import skip


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def fields_at(text: str, at: int) -> tuple[dict[str, str], int]:
    """The source text of each value of the JSON object at ``at``, and where it ends.

    Raises
    ------
    ValueError
        There is no object, or two of its fields have one name.
    RecursionError
        It is nested too deep.
    """
    fields: dict[str, str] = {}
    at = _expect(text, skip(text, at), "{")
    while True:
        key, at = decoder.raw_decode(text, skip(text, at))
        if not isinstance(key, str) or key in fields:
            raise ValueError(f"{key!r} is no new name of a field")
        start = skip(text, _expect(text, skip(text, at), ":"))
        _, end = decoder.raw_decode(text, start)
        fields[key] = text[start:end]
        at = skip(text, end)
        if not text.startswith(",", at):
            return fields, _expect(text, at, "}")
        at += 1


def named_at(text: str, at: int) -> tuple[str, dict[str, str], int] | None:
    """The object at ``at`` that has a name: it, all its fields, and where it ends."""
    try:
        fields, end = fields_at(text, at)
        name = json.loads(fields["name"])
    except (ValueError, KeyError, RecursionError):
        return None
    return (name, fields, end) if isinstance(name, str) and name else None


def _expect(text: str, at: int, mark: str) -> int:
    if text[at : at + 1] != mark:
        raise ValueError(f"no {mark!r} at {at}")
    return at + 1

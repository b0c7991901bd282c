"""Encodes JSON and server-sent events."""

import json
import secrets
from dataclasses import dataclass

from trajkit_shim.json_input import Json


@dataclass(frozen=True, slots=True)
class RawJson:
    """A JSON text to be sent unchanged as a value."""

    text: str


def encode(value: Json) -> bytes:
    """Encode a value that may contain `RawJson` anywhere.

    Half a surrogate pair, which a model can spell but UTF-8 cannot, is escaped.
    """
    raws: list[str] = []
    mark = secrets.token_hex(12)

    def stand_in(raw: object) -> str:
        if not isinstance(raw, RawJson):
            raise TypeError(f"{type(raw).__name__} is not JSON")
        raws.append(raw.text)
        return f"{mark}{len(raws)}"

    text = json.dumps(value, ensure_ascii=False, default=stand_in, allow_nan=False)
    for number, raw in enumerate(raws, 1):
        text = text.replace(f'"{mark}{number}"', raw)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-8", "backslashreplace")


def event(value: Json, name: str | None = None) -> bytes:
    """Encode one server-sent event, with a name if the protocol uses one."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encode(value) + b"\n\n"

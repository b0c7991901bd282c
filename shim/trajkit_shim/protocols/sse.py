"""JSON and server-sent events on their way out."""

import json
import secrets
from dataclasses import dataclass

from trajkit_shim.wire import Json


@dataclass(frozen=True, slots=True)
class RawJson:
    """A JSON text that goes out as it is, in the place of a value."""

    text: str


def encode(value: Json) -> bytes:
    """The JSON of a value that may hold `RawJson` anywhere.

    Half a surrogate pair, which a model can spell and UTF-8 cannot, goes out as its
    escape.
    """
    raws: list[str] = []
    mark = secrets.token_hex(12)

    def stand_in(raw: object) -> str:
        if not isinstance(raw, RawJson):
            raise TypeError(f"{type(raw).__name__} is no JSON")
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
    """One server-sent event, with a name where the protocol gives it one."""
    head = b"" if name is None else f"event: {name}\n".encode()
    return head + b"data: " + encode(value) + b"\n\n"

"""The blocks of a reply, and how JSON and events are encoded."""

import base64
import json
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TypeAlias

from trajkit_shim.chat.reply import Reply, ToolCall
from trajkit_shim.chat.request import assistant_message
from trajkit_shim.json_input import Json


@dataclass(frozen=True, slots=True)
class Thought:
    """The reasoning of a reply."""

    text: str


Block: TypeAlias = Thought | str | ToolCall


def blocks(reply: Reply, *, spaces: bool = False) -> list[Block]:
    """Return reasoning, texts and calls, in order; at least one block.

    White space alone is a block only with ``spaces``, because clients reject it.
    """
    thought = [] if reply.reasoning is None else [Thought(reply.reasoning)]
    parts = (p for p in reply.parts if spaces or isinstance(p, ToolCall) or p.strip())
    return [*thought, *parts] or [reply.text]


def assistant(parts: Iterable[Thought | str | Json]) -> Json:
    """Return the canonical message of an assistant's reasoning, texts and calls."""
    given = list(parts)
    return assistant_message(
        "".join(part for part in given if isinstance(part, str)),
        "".join(part.text for part in given if isinstance(part, Thought)),
        [part for part in given if isinstance(part, dict)],
    )


def signature(reply: Reply) -> str:
    """Return what protocols with signed reasoning get as signature."""
    return base64.b64encode(f"trajkit:{reply.reply_id}".encode()).decode()


# the fields of messages, blocks and items that a stream fills
_EMPTY: Json = {
    "arguments": "",
    "content": [],
    "encrypted_content": None,
    "input": {},
    "logprobs": [],
    "signature": "",
    "status": "in_progress",
    "stop_reason": None,
    "stop_sequence": None,
    "text": "",
    "thinking": "",
}


def begun(value: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object before a stream fills it."""
    return {name: _EMPTY.get(name, filled) for name, filled in value.items()}


@dataclass(frozen=True, slots=True)
class RawJson:
    """A JSON text to be sent as a value, unchanged except for its line breaks."""

    text: str


def encode(value: Json) -> bytes:
    """Encode a value that may contain `RawJson` anywhere.

    Half a surrogate pair, which a model can spell but UTF-8 cannot, is escaped.
    """
    raws: dict[str, str] = {}

    def mark(raw: RawJson) -> str:
        name = secrets.token_hex(12)
        # JSON has line breaks only between tokens, and in an event they end its line
        raws[f'"{name}"'] = raw.text.replace("\n", " ").replace("\r", " ")
        return name

    text = json.dumps(value, ensure_ascii=False, default=mark, allow_nan=False)
    for name, raw in raws.items():
        text = text.replace(name, raw)
    return text.encode(errors="backslashreplace")


def event(value: Json) -> bytes:
    """Encode one server-sent event, which is named if its JSON has a type."""
    head = f"event: {value['type']}\n" if "type" in value else ""
    return f"{head}data: ".encode() + encode(value) + b"\n\n"

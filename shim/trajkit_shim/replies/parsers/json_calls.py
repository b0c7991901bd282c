"""Tool calls as JSON objects, whose arguments keep their spelling.

Hermes and Qwen models write them between two markers, Llama models without:

    <tool_call>
    {"name": "ls", "arguments": {"path": "."}}
    </tool_call>

    {"name": "ls", "parameters": {"path": "."}}

Without markers an object is a call if its first field is its name. Other objects are text.
"""

import json

from trajkit_shim.chat.reply import Call
from trajkit_shim.replies.parse import ToolForm, Tools, skip

OPEN = "<tool_call>"
CLOSE = "</tool_call>"


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


decoder = json.JSONDecoder(parse_constant=_refuse_constant)


def _fields_at(text: str, offset: int) -> tuple[dict[str, str], int]:
    """The source text of each value of the object at an offset, and its end.

    Raises `ValueError`: there is no object, or two fields have the same name.
    `RecursionError`: it is nested too deep.
    """
    fields: dict[str, str] = {}
    offset = _after("{", text, offset)
    while True:
        key, offset = decoder.raw_decode(text, skip(text, offset))
        if not isinstance(key, str) or key in fields:
            raise ValueError(f"{key!r} is not a string, or a repeated field name")
        start = skip(text, _after(":", text, offset))
        _, end = decoder.raw_decode(text, start)
        fields[key] = text[start:end]
        offset = skip(text, end)
        if not text.startswith(",", offset):
            return fields, _after("}", text, offset)
        offset += 1


def _after(mark: str, text: str, offset: int) -> int:
    offset = skip(text, offset)
    if not text.startswith(mark, offset):
        raise ValueError(f"no {mark!r} at {offset}")
    return offset + len(mark)


def _read_hermes(text: str, offset: int, _: Tools) -> tuple[Call, int] | None:
    try:
        fields, end = _fields_at(text, offset + len(OPEN))
        call = _call(fields, fields.get("arguments", "{}"))
        return call, _after(CLOSE, text, end)
    except (ValueError, KeyError, RecursionError):
        return None


def _read_plain(text: str, offset: int, _: Tools) -> tuple[Call, int] | None:
    try:
        fields, end = _fields_at(text, offset)
        (given,) = (fields[key] for key in ("parameters", "arguments") if key in fields)
        return _call(fields, given), end
    except (ValueError, KeyError, RecursionError):
        return None


def _call(fields: dict[str, str], arguments: str) -> Call:
    name = json.loads(fields["name"])
    if not isinstance(name, str) or not name or not arguments.startswith("{"):
        raise ValueError("no name, or arguments that are not an object")
    return Call(name, arguments)


HERMES = ToolForm(
    name="hermes",
    opens=OPEN,
    lead="{",
    closes=CLOSE,
    read=_read_hermes,
    begin=lambda name: f'{OPEN}\n{{"name": {json.dumps(name)}, "arguments": ',
    end=f"}}\n{CLOSE}",
    known_by=(OPEN,),
)
PLAIN_JSON = ToolForm(
    name="plain-json",
    opens='{"name"',
    lead=":",
    closes="}",
    read=_read_plain,
    begin=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ',
    end="}",
    known_by=('{"name"', '"parameters"'),
)

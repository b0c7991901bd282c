"""Tool calls of Hermes and Qwen models: a JSON object between two markers.

<tool_call>
{"name": "ls", "arguments": {"path": "."}}
</tool_call>
"""

import json

from trajkit_shim.replies.parsers.form import ToolCall, ToolForm, Tools, skip
from trajkit_shim.replies.parsers.json_text import named_at

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


def _read(text: str, offset: int, _: Tools) -> tuple[ToolCall, int] | None:
    found = named_at(text, offset + len(_OPEN))
    if found is None:
        return None
    name, fields, end = found
    end = skip(text, end)
    arguments = fields.get("arguments", "{}")
    if not text.startswith(_CLOSE, end) or not arguments.startswith("{"):
        return None
    return ToolCall(name, arguments), end + len(_CLOSE)


def _begin(name: str) -> str:
    return f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": '


HERMES = ToolForm(
    name="hermes",
    opens=_OPEN,
    lead="{",
    closes=_CLOSE,
    read=_read,
    begin=_begin,
    end=f"}}\n{_CLOSE}",
    known_by=(_OPEN,),
)

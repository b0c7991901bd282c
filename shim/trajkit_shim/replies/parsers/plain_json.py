"""Tool calls of Llama models: a JSON object without markers.

    {"name": "ls", "parameters": {"path": "."}}

An object is a call if its first field is its name, and its parameters, or arguments, are
an object. Other objects are text.
"""

import json

from trajkit_shim.replies.parsers.form import ToolCall, ToolForm, Tools
from trajkit_shim.replies.parsers.json_text import named_at


def _read(text: str, offset: int, _: Tools) -> tuple[ToolCall, int] | None:
    found = named_at(text, offset)
    if found is None:
        return None
    name, fields, end = found
    given = [fields[key] for key in ("parameters", "arguments") if key in fields]
    if len(given) != 1 or not given[0].startswith("{"):
        return None
    return ToolCall(name, given[0]), end


PLAIN_JSON = ToolForm(
    name="plain-json",
    opens='{"name"',
    lead=":",
    closes="}",
    read=_read,
    begin=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ',
    end="}",
    known_by=('{"name"', '"parameters"'),
)

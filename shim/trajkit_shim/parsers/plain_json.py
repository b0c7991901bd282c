"""The plain form of Llama models: a JSON object without markers.

    {"name": "ls", "parameters": {"path": "."}}

An object is a call where its first field is its name, and its parameters, or arguments,
are an object. Any other is text.
"""

from trajkit_shim.parsers.form import ToolCall, ToolForm, Tools
from trajkit_shim.parsers.json_text import named_at


def _read(text: str, at: int, _: Tools) -> tuple[ToolCall, int] | None:
    found = named_at(text, at)
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
    known_by=('{"name"', '"parameters"'),
)

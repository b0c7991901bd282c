"""The form of Qwen3-Coder models: tags around the bare text of each value.

    <tool_call>
    <function=ls>
    <parameter=path>
    .
    </parameter>
    </function>
    </tool_call>

One line break on either side of a value is its frame. A value is the JSON that it reads
as where the tool takes that (`trajkit_shim.parsers.values`), else a string.
"""

from trajkit_shim.parsers.form import ToolCall, ToolForm, Tools, skip
from trajkit_shim.parsers.tags import until
from trajkit_shim.parsers.values import json_object, json_text, kinds_of

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_END_FUNCTION = "</function>"
_PARAMETER = "<parameter="
_END_PARAMETER = "</parameter>"


def _read(text: str, at: int, tools: Tools) -> tuple[ToolCall, int] | None:
    at = skip(text, at + len(_OPEN))
    if not text.startswith(_FUNCTION, at):
        return None
    named = _name(text, at + len(_FUNCTION))
    if named is None:
        return None
    name, at = named
    kinds = kinds_of(tools, name)
    fields: dict[str, str] = {}
    at = skip(text, at)
    while text.startswith(_PARAMETER, at):
        keyed = _name(text, at + len(_PARAMETER))
        if keyed is None or keyed[0] in fields:
            return None
        key, at = keyed
        value = until(text, at, _END_PARAMETER, (_PARAMETER, _END_FUNCTION))
        if value is None:
            return None
        written, at = value
        written = written.removeprefix("\n").removesuffix("\n")
        fields[key] = json_text(written, kinds.get(key))
    if not text.startswith(_END_FUNCTION, at):
        return None
    end = skip(text, at + len(_END_FUNCTION))
    if not text.startswith(_CLOSE, end):
        return None
    return ToolCall(name, json_object(fields)), end + len(_CLOSE)


def _name(text: str, at: int) -> tuple[str, int] | None:
    end = text.find(">", at)
    name = text[at:end]
    if end < 0 or not name or set(name) & set("<\n"):
        return None
    return name, end + 1


QWEN3_CODER = ToolForm(
    name="qwen3-coder",
    opens=_OPEN,
    lead=_FUNCTION,
    closes=_CLOSE,
    read=_read,
    known_by=(_FUNCTION, _PARAMETER),
)

"""Tool calls of Qwen3-Coder models: tags around the bare text of each value.

    <tool_call>
    <function=ls>
    <parameter=path>
    .
    </parameter>
    </function>
    </tool_call>

One line break on each side of a value is dropped. A value is JSON if the tool accepts it
as such (`trajkit_shim.replies.parsers.values`), else a string.
"""

from trajkit_shim.replies.parsers.form import ToolCall, ToolForm, Tools, skip
from trajkit_shim.replies.parsers.tags import until
from trajkit_shim.replies.parsers.values import json_object, json_text, kinds_of

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_FUNCTION = "<function="
_END_FUNCTION = "</function>"
_PARAMETER = "<parameter="
_END_PARAMETER = "</parameter>"


def _read(text: str, offset: int, tools: Tools) -> tuple[ToolCall, int] | None:
    offset = skip(text, offset + len(_OPEN))
    if not text.startswith(_FUNCTION, offset):
        return None
    named = _name(text, offset + len(_FUNCTION))
    if named is None:
        return None
    name, offset = named
    kinds = kinds_of(tools, name)
    fields: dict[str, str] = {}
    offset = skip(text, offset)
    while text.startswith(_PARAMETER, offset):
        keyed = _name(text, offset + len(_PARAMETER))
        if keyed is None or keyed[0] in fields:
            return None
        key, offset = keyed
        value = until(text, offset, _END_PARAMETER, (_PARAMETER, _END_FUNCTION))
        if value is None:
            return None
        written, offset = value
        written = written.removeprefix("\n").removesuffix("\n")
        fields[key] = json_text(written, kinds.get(key))
    if not text.startswith(_END_FUNCTION, offset):
        return None
    end = skip(text, offset + len(_END_FUNCTION))
    if not text.startswith(_CLOSE, end):
        return None
    return ToolCall(name, json_object(fields)), end + len(_CLOSE)


def _name(text: str, offset: int) -> tuple[str, int] | None:
    end = text.find(">", offset)
    name = text[offset:end]
    if end < 0 or not name or set(name) & set("<\n"):
        return None
    return name, end + 1


QWEN3_CODER = ToolForm(
    name="qwen3-coder",
    opens=_OPEN,
    lead=_FUNCTION,
    closes=_CLOSE,
    read=_read,
    begin=lambda name: f"{_OPEN}\n{_FUNCTION}{name}>\n",
    end=f"\n{_END_FUNCTION}\n{_CLOSE}",
    style="qwen_xml",
    known_by=(_FUNCTION, _PARAMETER),
)

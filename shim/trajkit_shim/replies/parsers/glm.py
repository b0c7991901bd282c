"""Tool calls of GLM-4.5 models: a name, then keys and values between tags.

    <tool_call>ls
    <arg_key>path</arg_key>
    <arg_value>.</arg_value>
    </tool_call>

A value is JSON if the tool accepts it as such (`replies.parsers.values`), else a string.
"""

from trajkit_shim.replies.parsers.form import ToolCall, ToolForm, Tools, skip
from trajkit_shim.replies.parsers.tags import until
from trajkit_shim.replies.parsers.values import json_object, json_text, kinds_of

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_KEY, _END_KEY = "<arg_key>", "</arg_key>"
_VALUE, _END_VALUE = "<arg_value>", "</arg_value>"


def _read(text: str, offset: int, tools: Tools) -> tuple[ToolCall, int] | None:
    offset += len(_OPEN)
    end = text.find("<", offset)
    name = text[offset : max(end, offset)].strip()
    if not name or "\n" in name:
        return None
    kinds = kinds_of(tools, name)
    fields: dict[str, str] = {}
    offset = end
    while text.startswith(_KEY, offset):
        keyed = until(text, offset + len(_KEY), _END_KEY, (_VALUE,))
        if keyed is None or not keyed[0] or keyed[0] in fields:
            return None
        key, offset = keyed
        value = until(text, offset + len(_VALUE), _END_VALUE, (_KEY, _CLOSE))
        if value is None:
            return None
        fields[key] = json_text(value[0], kinds.get(key))
        offset = skip(text, value[1])
    if not text.startswith(_CLOSE, offset):
        return None
    return ToolCall(name, json_object(fields)), offset + len(_CLOSE)


GLM = ToolForm(
    name="glm",
    opens=_OPEN,
    closes=_CLOSE,
    read=_read,
    begin=lambda name: f"{_OPEN}{name}\n",
    end=f"\n{_CLOSE}",
    style="glm_xml",
    known_by=(_KEY, _VALUE),
)

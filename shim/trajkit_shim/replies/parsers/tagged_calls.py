"""Tool calls whose values are bare text between tags, without escaping.

Qwen3-Coder and GLM-4.5 models write them as follows. One line break on each side of a
value of Qwen3-Coder is dropped.

    <tool_call>                           <tool_call>ls
    <function=ls>                         <arg_key>path</arg_key>
    <parameter=path>                      <arg_value>.</arg_value>
    .                                     </tool_call>
    </parameter>
    </function>
    </tool_call>

A value may contain its closing tag: the first one that another tag of the call follows
ends it. It is JSON if it has a type, other than string, that the tool's schema permits,
else a string.
"""

import json
import re
from collections.abc import Callable

from trajkit_shim.chat.reply import Call
from trajkit_shim.chat.request import function_of
from trajkit_shim.replies.parse import ToolForm, Tools
from trajkit_shim.replies.parsers.json_calls import CLOSE, OPEN, decoder

# some templates write values as Python does
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS = {bool: "boolean", int: "integer", float: "number"}
_KINDS |= {str: "string", dict: "object", list: "array", type(None): "null"}
_NUMBERS = frozenset({"integer", "number"})
# accepted without a schema, because text rarely looks like them by chance
_UNSAID = frozenset({"object", "array"})


def _reader(
    opening: str, value: str, closing: str
) -> Callable[[str, int, Tools], tuple[Call, int] | None]:
    """A `ToolForm.read` from three patterns. Their groups: a name; a key and its value.

    A space in a pattern is any white space. Nothing that has matched is matched otherwise
    when the rest does not match, because that takes long.
    """
    patterns = (p.replace(" ", "[ \t\n\r]*+") for p in (opening, value, closing))
    first, pair, last = (re.compile(p, re.DOTALL) for p in patterns)

    def read(text: str, offset: int, tools: Tools) -> tuple[Call, int] | None:
        opened = first.match(text, offset)
        if opened is None:
            return None
        kinds = _kinds_of(tools, opened[1])
        values: dict[str, str] = {}
        offset = opened.end()
        while found := pair.match(text, offset):
            key, written = found.groups()
            if key in values:
                return None
            values[key] = _json_text(written, kinds.get(key) or _UNSAID)
            offset = found.end()
        closed = last.match(text, offset)
        if closed is None:
            return None
        pairs = (f"{_dumps(key)}: {text}" for key, text in values.items())
        return Call(opened[1], "{" + ", ".join(pairs) + "}"), closed.end()

    return read


def _kinds_of(tools: Tools, name: str) -> dict[str, frozenset[str]]:
    """The JSON types of each parameter of a tool, as far as its schema has them."""
    for function in map(function_of, tools):
        schema = function.get("parameters")
        fields = schema.get("properties") if isinstance(schema, dict) else None
        if function["name"] == name and isinstance(fields, dict):
            return {str(key): _kinds(value) for key, value in fields.items()}
    return {}


def _kinds(schema: object) -> frozenset[str]:
    """The types that a schema permits, also in alternatives; empty: unknown."""
    if not isinstance(schema, dict):
        return frozenset()
    named = schema.get("type")
    if named is not None:
        named = named if isinstance(named, list) else [named]
        return frozenset(kind for kind in named if isinstance(kind, str))
    if isinstance(schema.get("enum"), list):
        return frozenset(_KINDS[type(value)] for value in schema["enum"])
    either = schema.get("anyOf") or schema.get("oneOf")
    either = either if isinstance(either, list) else []
    return frozenset().union(*map(_kinds, either))


def _json_text(written: str, kinds: frozenset[str]) -> str:
    """The JSON text of a value, whose type is one of ``kinds`` or string."""
    text = written.strip()
    text = _PYTHON.get(text, text)
    try:
        kind = _KINDS[type(json.loads(text, parse_constant=decoder.parse_constant))]
    except (ValueError, RecursionError):
        kind = "string"
    if kinds & _NUMBERS:
        kinds |= _NUMBERS
    return text if kind != "string" and kind in kinds else _dumps(written)


def _dumps(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


QWEN3_CODER = ToolForm(
    name="qwen3-coder",
    opens=OPEN,
    lead="<function=",
    closes=CLOSE,
    read=_reader(
        f"{OPEN} <function=([^<\n>]+)> ",
        "<parameter=([^<\n>]+)>\n?(.*?)\n?</parameter> (?=<parameter=|</function>)",
        f"</function> {CLOSE}",
    ),
    begin=lambda name: f"{OPEN}\n<function={name}>\n",
    end=f"\n</function>\n{CLOSE}",
    style="qwen_xml",
    known_by=("<function=", "<parameter="),
)
GLM = ToolForm(
    name="glm",
    opens=OPEN,
    closes=CLOSE,
    read=_reader(
        rf"{OPEN}\s*+([^<\n]*[^<\s])\s*+(?=<)",
        "<arg_key>(?>(.+?)</arg_key> <arg_value>)(.*?)</arg_value> "
        f"(?=<arg_key>|{CLOSE})",
        CLOSE,
    ),
    begin=lambda name: f"{OPEN}{name}\n",
    end=f"\n{CLOSE}",
    style="glm_xml",
    known_by=("<arg_key>", "<arg_value>"),
)

"""The formats in which models write tool calls.

JSON objects, whose arguments keep their spelling. Hermes and Qwen models write them
between two markers, Llama models without. There an object is a call if its first field is
its name, and other objects are text.

    <tool_call>
    {"name": "ls", "arguments": {"path": "."}}
    </tool_call>

    {"name": "ls", "parameters": {"path": "."}}

Values that are bare text between tags, without escaping: Qwen3-Coder and GLM-4.5. One
line break on each side of a value of Qwen3-Coder is dropped.

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
from collections.abc import Collection
from functools import cache, partial

from trajkit_shim.chat.reply import Call
from trajkit_shim.chat.request import function_of
from trajkit_shim.json_input import Json
from trajkit_shim.replies.parse import ReadCall, ToolForm, Tools

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"
_dumps = partial(json.dumps, ensure_ascii=False)
# some templates write values as Python does
_PYTHON = {"True": "true", "False": "false", "None": "null"}
_KINDS = {bool: "boolean", int: "integer", float: "number"}
_KINDS |= {str: "string", dict: "object", list: "array", type(None): "null"}
_NUMBERS = frozenset({"integer", "number"})
# accepted without a schema, because text rarely looks like them by chance
_UNSAID = frozenset({"object", "array"})


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
"""Decodes JSON; raises `ValueError` also for NaN and infinities."""


@cache
def _pattern(source: str) -> re.Pattern[str]:
    """A pattern in which a space is any white space."""
    return re.compile(source.replace(" ", "[ \t\n\r]*+"), re.DOTALL)


def _after(source: str, text: str, offset: int) -> int:
    """The end of a pattern at an offset."""
    found = _pattern(source).match(text, offset)
    if found is None:
        raise ValueError(f"no {source!r} at {offset}")
    return found.end()


def _fields_at(text: str, offset: int) -> tuple[dict[str, str], int]:
    """The source text of each value of the object at an offset, and its end.

    Raises `ValueError`: there is no object, or two fields have the same name.
    `RecursionError`: it is nested too deep.
    """
    fields: dict[str, str] = {}
    mark = r" \{ "
    while begun := _pattern(mark).match(text, offset):
        key, offset = DECODER.raw_decode(text, begun.end())
        if not isinstance(key, str) or key in fields:
            raise ValueError(f"{key!r} is not a string, or a repeated field name")
        start = _after(" : ", text, offset)
        _, offset = DECODER.raw_decode(text, start)
        fields[key] = text[start:offset]
        mark = " , "
    return fields, _after(r" \}", text, offset)


def _json_reader(
    opening: str, keys: Collection[str], default: Collection[str], closing: str
) -> ReadCall:
    """Read JSON objects; exactly one of ``keys`` has the arguments, or ``default``.

    ``closing`` is a `_pattern`.
    """

    def read(text: str, offset: int, _: Tools) -> tuple[Call, int] | None:
        try:
            fields, end = _fields_at(text, offset + len(opening))
            name = json.loads(fields["name"])
            (given,) = [fields[key] for key in keys if key in fields] or default
            end = _after(closing, text, end)
        except (ValueError, KeyError, RecursionError):
            return None
        if not isinstance(name, str) or not name or not given.startswith("{"):
            return None
        return Call(name, given), end

    return read


def _tag_reader(opening: str, value: str, closing: str) -> ReadCall:
    """Read tags by three `_pattern`. Their groups: a name; a key and its value.

    Nothing that has matched is matched otherwise when the rest does not match, because
    that takes long.
    """
    first, pair, last = map(_pattern, (opening, value, closing))

    def read(text: str, offset: int, tools: Tools) -> tuple[Call, int] | None:
        opened = first.match(text, offset)
        if opened is None:
            return None
        schemas = _schemas(tools, opened[1])
        values: dict[str, str] = {}
        offset = opened.end()
        while found := pair.match(text, offset):
            key, written = found.groups()
            if key in values:
                return None
            values[key] = _json_text(written, _kinds(schemas.get(key)) or _UNSAID)
            offset = found.end()
        closed = last.match(text, offset)
        if closed is None:
            return None
        pairs = (f"{_dumps(key)}: {text}" for key, text in values.items())
        return Call(opened[1], "{" + ", ".join(pairs) + "}"), closed.end()

    return read


def _schemas(tools: Tools, name: str) -> Json:
    """The schema of each parameter of a tool, as far as it has one."""
    for function in map(function_of, tools):
        match function:
            case {"name": known, "parameters": {"properties": dict(schemas)}}:
                if known == name:
                    return schemas
    return {}


def _kinds(schema: object) -> frozenset[str]:
    """The types that a schema permits, also in alternatives; empty: unknown."""
    match schema:
        case {"type": str(kind)}:
            return frozenset({kind})
        case {"type": [*kinds]}:
            return frozenset(kind for kind in kinds if isinstance(kind, str))
        case {"enum": [*values]}:
            return frozenset(_KINDS[type(value)] for value in values)
        case {"anyOf": [*either]} | {"oneOf": [*either]}:
            return frozenset().union(*map(_kinds, either))
    return frozenset()


def _json_text(written: str, kinds: frozenset[str]) -> str:
    """The JSON text of a value, whose type is one of ``kinds`` or string."""
    text = written.strip()
    text = _PYTHON.get(text, text)
    try:
        kind = _KINDS[type(json.loads(text, parse_constant=_refuse_constant))]
    except (ValueError, RecursionError):
        kind = "string"
    if kinds & _NUMBERS:
        kinds |= _NUMBERS
    return text if kind != "string" and kind in kinds else _dumps(written)


HERMES = ToolForm(
    name="hermes",
    opens=_OPEN,
    closes=_CLOSE,
    read=_json_reader(_OPEN, ["arguments"], ["{}"], f" {_CLOSE}"),
    begin=lambda name: f'{_OPEN}\n{{"name": {json.dumps(name)}, "arguments": ',
    end=f"}}\n{_CLOSE}",
    known_by=(_OPEN,),
)
PLAIN_JSON = ToolForm(
    name="plain-json",
    opens='{"name"',
    closes="}",
    read=_json_reader("", ["parameters", "arguments"], [], ""),
    begin=lambda name: f'{{"name": {json.dumps(name)}, "parameters": ',
    end="}",
    known_by=('{"name"', '"parameters"'),
)
QWEN3_CODER = ToolForm(
    name="qwen3-coder",
    opens=_OPEN,
    closes=_CLOSE,
    read=_tag_reader(
        f"{_OPEN} <function=([^<\n>]+)> ",
        "<parameter=([^<\n>]+)>\n?(.*?)\n?</parameter> (?=<parameter=|</function>)",
        f"</function> {_CLOSE}",
    ),
    begin=lambda name: f"{_OPEN}\n<function={name}>\n",
    end=f"\n</function>\n{_CLOSE}",
    style="qwen_xml",
    known_by=("<function=", "<parameter="),
)
GLM = ToolForm(
    name="glm",
    opens=_OPEN,
    closes=_CLOSE,
    read=_tag_reader(
        rf"{_OPEN}\s*+([^<\n]*[^<\s])\s*+(?=<)",
        "<arg_key>(?>(.+?)</arg_key> <arg_value>)(.*?)</arg_value> "
        f"(?=<arg_key>|{_CLOSE})",
        _CLOSE,
    ),
    begin=lambda name: f"{_OPEN}{name}\n",
    end=f"\n{_CLOSE}",
    style="glm_xml",
    known_by=("<arg_key>", "<arg_value>"),
)
# in order of precedence, if a template matches several
FORMS = {form.name: form for form in (QWEN3_CODER, GLM, HERMES, PLAIN_JSON)}


def form_of(chat_template: str) -> ToolForm:
    """Return the format of calls that a chat template asks for, by default Hermes'."""
    # quotes within a string of the template may be escaped
    text = chat_template.replace('\\"', '"')
    known = (f for f in FORMS.values() if all(mark in text for mark in f.known_by))
    return next(known, HERMES)

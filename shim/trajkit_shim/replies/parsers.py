"""The formats in which models write tool calls.

JSON objects between two markers, whose arguments keep their spelling (``hermes``,
``toolcall``, ``mistral``), or alone (``plain-json``: an object is a call if its name comes
first):

    <tool_call>
    {"name": "ls", "arguments": {"path": "."}}
    </tool_call>

A name and its arguments as JSON, each after a marker of its own (``kimi``, ``deepseek``,
``mistral-args``, ``gpt-oss``). Values that are bare text between tags, without escaping
(``qwen3-coder``, ``glm``, ``seed-oss``, ``dsml``, ``minimax``). One line break on each side
of a value of Qwen3-Coder is dropped:

    <tool_call>                           <tool_call>ls
    <function=ls>                         <arg_key>path</arg_key>
    <parameter=path>                      <arg_value>.</arg_value>
    .                                     </tool_call>
    </parameter>
    </function>
    </tool_call>

A value may contain its closing tag: the first one that another tag of the call follows
ends it. It is JSON if it has a type, other than string, that the tool's schema permits,
else a string. ``pythonic`` calls are a list of Python expressions.
"""

import ast
import json
import re
from functools import cache, partial
from typing import Any

from trajkit_shim.chat.reply import ToolCall
from trajkit_shim.chat.request import function_of
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.render import ChatRenderer
from trajkit_shim.replies.parse import CallForm, ReadCalls, ToolForm, Tools

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
_ALL = frozenset(_KINDS.values())


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


# names of the field with the arguments of a call
_ARGUMENTS = ("arguments", "parameters")


def _json_reader(
    opening: str, closing: str, *, needs_arguments: bool = True
) -> ReadCalls:
    """Read a JSON object, or a list of some, between two `_pattern`."""

    def read(text: str, offset: int, _: Tools) -> tuple[list[ToolCall], int] | None:
        calls = []
        try:
            offset = _after(opening, text, offset)
            several = _pattern(r"\[ ").match(text, offset)
            offset = several.end() if several else offset
            while True:
                fields, offset = _fields_at(text, offset)
                calls.append(_json_call(fields, needs_arguments))
                comma = _pattern(" , ").match(text, offset) if several else None
                if comma is None:
                    break
                offset = comma.end()
            offset = _after(r" \]" if several else "", text, offset)
            return calls, _after(closing, text, offset)
        except (ValueError, KeyError, RecursionError):
            return None

    return read


def _json_call(fields: dict[str, str], needs_arguments: bool) -> ToolCall:
    """The call with these fields; raises `ValueError` or `KeyError` if it is none."""
    name = json.loads(fields["name"])
    given = [fields[key] for key in _ARGUMENTS if key in fields]
    if not given and not needs_arguments and fields.keys() <= {"name", "type", "id"}:
        given = ["{}"]
    (arguments,) = given
    call_id = json.loads(fields.get("id", '""'))
    if not isinstance(name, str) or not name or not arguments.startswith("{"):
        raise ValueError("not a call")
    return ToolCall(name, arguments, call_id if isinstance(call_id, str) else "")


def _named_reader(opening: str, head: str, tail: str, closing: str) -> ReadCalls:
    """Read calls whose arguments are JSON after a `_pattern` with groups name and id."""

    def read(text: str, offset: int, _: Tools) -> tuple[list[ToolCall], int] | None:
        calls = []
        try:
            offset = _after(opening, text, offset)
            while begun := _pattern(head).match(text, offset):
                given, stop = DECODER.raw_decode(text, begun.end())
                if not isinstance(given, dict):
                    return None
                named = begun.groupdict()
                name = next(v for k, v in named.items() if k.startswith("name") and v)
                arguments = text[begun.end() : stop]
                calls.append(ToolCall(name.strip(), arguments, named.get("id") or ""))
                offset = _after(tail, text, stop)
                if not closing:
                    break
            return (calls, _after(closing, text, offset)) if calls else None
        except (ValueError, RecursionError):
            return None

    return read


def _tag_reader(
    opening: str, head: str, value: str, last: str, closing: str
) -> ReadCalls:
    """Read tags by five `_pattern`. Their groups: a name; a key and its value.

    ``value`` may have a third group: ``true`` if the value is a string, else ``false``.
    Nothing that has matched is matched otherwise when the rest does not match, because
    that takes long.
    """
    first, pair, ends = map(_pattern, (head, value, last))

    def read(text: str, offset: int, tools: Tools) -> tuple[list[ToolCall], int] | None:
        begun, calls = _pattern(opening).match(text, offset), list[ToolCall]()
        if begun is None:
            return None
        offset = begun.end()
        while opened := first.match(text, offset):
            schemas = _schemas(tools, opened[1])
            values: dict[str, str] = {}
            offset = opened.end()
            while found := pair.match(text, offset):
                key, written = found["key"], found["value"]
                if key in values:
                    return None
                kinds = _kinds(schemas.get(key)) or _UNSAID
                stated = found.groupdict().get("text")
                if stated is not None:
                    kinds = frozenset() if stated == "true" else _ALL
                values[key] = _json_text(written, kinds)
                offset = found.end()
            closed = ends.match(text, offset)
            if closed is None:
                return None
            pairs = (f"{_dumps(key)}: {text}" for key, text in values.items())
            calls.append(ToolCall(opened[1], "{" + ", ".join(pairs) + "}"))
            offset = closed.end()
            if not closing:
                break
        closed = _pattern(closing).match(text, offset)
        return (calls, closed.end()) if calls and closed else None

    return read


def _read_pythonic(
    text: str, offset: int, _: Tools
) -> tuple[list[ToolCall], int] | None:
    """Read a list of Python calls with keywords, which is all of a text."""
    calls = []
    try:
        (statement,) = ast.parse(text[offset:].strip()).body
        for item in statement.value.elts:  # type: ignore[attr-defined]
            given = {one.arg: ast.literal_eval(one.value) for one in item.keywords}
            if item.args or None in given:
                return None
            calls.append(
                ToolCall(ast.unparse(item.func), _dumps(given, allow_nan=False))
            )
    except (AttributeError, ValueError, SyntaxError, TypeError, RecursionError):
        return None
    return calls, len(text)


# a message of a reply: the recipient is before or after the channel
_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=(?P<before>[^\s<]+))?<\|channel\|>(?P<channel>\w+)"
    r"(?: to=(?P<after>[^\s<]+))?[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"(?P<body>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


def _split_channels(text: str) -> tuple[str, str]:
    """The analysis of a reply, and the rest of it; calls keep their header."""
    thoughts, rest, offset = [], [], 0
    for found in _MESSAGE.finditer(text):
        rest.append(text[offset : found.start()])
        offset = found.end()
        called = found["before"] or found["after"]
        if called:
            rest.append(f"<|channel|>commentary to={called}<|message|>{found['body']}")
            rest.append("<|call|>")
        elif found["channel"] == "analysis":
            thoughts.append(found["body"])
        else:
            rest.append(found["body"])
    return "\n".join(thoughts), "".join([*rest, text[offset:]])


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


_TO = r"<\|channel\|>commentary to="


FORMS: dict[str, ToolForm] = {}
"""In order of precedence, if a template matches several."""


def _form(
    name: str, template_marks: str, read: ReadCalls, starts: str = "", **more: Any
) -> None:
    """Add a format; its calls start with its first mark, or with a pattern."""
    marks = tuple(template_marks.split())
    pattern = re.compile(starts or re.escape(marks[0]))
    FORMS[name] = ToolForm(
        name=name, template_marks=marks, read=read, starts=pattern, **more
    )


_form(
    "gpt-oss",
    "<|channel|> <|message|>",
    _named_reader(
        *("", rf"{_TO}(?:functions\.)?(?P<name>[^\s<]+)<\|message\|> "),
        *(r" <\|call\|>", ""),
    ),
    starts=_TO,
    split=_split_channels,
)
_form(
    "kimi",
    "<|tool_calls_section_begin|>",
    _named_reader(
        r"<\|tool_calls_section_begin\|> ",
        r"<\|tool_call_begin\|> (?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+) "
        r"<\|tool_call_argument_begin\|> ",
        r" <\|tool_call_end\|> ",
        r"<\|tool_calls_section_end\|>",
    ),
)
_form(
    "dsml",
    "DSML invoke",
    _tag_reader(
        "<｜DSML｜(?:function|tool)_calls> ",
        '<｜DSML｜invoke name="([^"]+)"> ',
        '<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<text>true|false)">'
        "(?P<value>.*?)</｜DSML｜parameter> "
        "(?=<｜DSML｜parameter|</｜DSML｜invoke>)",
        "</｜DSML｜invoke> ",
        "</｜DSML｜(?:function|tool)_calls>",
    ),
    starts="<｜DSML｜(?:function|tool)_calls>",
)
_form(
    "deepseek",
    "tool▁calls▁begin",
    _named_reader(
        "<｜tool▁calls▁begin｜> ",
        "<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"
        "|(?P<name2>[^\n<]+)<｜tool▁sep｜>) ",
        "(?: ```)? <｜tool▁call▁end｜> ",
        "<｜tool▁calls▁end｜>",
    ),
    starts="<｜tool▁calls▁begin｜>",
)
_form(
    "minimax",
    "<minimax:tool_call>",
    _tag_reader(
        "<minimax:tool_call> ",
        '<invoke name="([^"]+)"> ',
        '<parameter name="(?P<key>[^"]+)">\n?(?P<value>.*?)\n?</parameter> '
        "(?=<parameter name=|</invoke>)",
        "</invoke> ",
        "</minimax:tool_call>",
    ),
)
_form(
    "seed-oss",
    "<seed:tool_call>",
    _tag_reader(
        "<seed:tool_call> ",
        "<function=([^<\n>]+)> ",
        "<parameter=(?P<key>[^<\n>]+)>(?P<value>.*?)</parameter> "
        "(?=<parameter=|</function>)",
        "</function> ",
        "</seed:tool_call>",
    ),
)
_form(
    "qwen3-coder",
    "<function= <parameter=",
    _tag_reader(
        f"(?:{_OPEN} )?",
        "<function=([^<\n>]+)> ",
        "<parameter=(?P<key>[^<\n>]+)>\n?(?P<value>.*?)\n?</parameter> "
        "(?=<parameter=|</function>)",
        "</function> ",
        _CLOSE,
    ),
    # the model leaves out the first tag at times
    starts=f"{_OPEN}|<function=",
    grammar=CallForm(
        opens=_OPEN,
        begin=lambda name: f"{_OPEN}\n<function={name}>\n",
        end=f"\n</function>\n{_CLOSE}",
        style="qwen_xml",
    ),
)
_form(
    "glm",
    "<arg_key> <arg_value>",
    _tag_reader(
        "",
        rf"{_OPEN}\s*+([^<\n]*[^<\s])\s*+(?=<)",
        "<arg_key>(?>(?P<key>.+?)</arg_key> <arg_value>)(?P<value>.*?)</arg_value> "
        f"(?=<arg_key>|{_CLOSE})",
        f"{_CLOSE} ",
        "",
    ),
    starts=_OPEN,
    grammar=CallForm(
        opens=_OPEN,
        begin=lambda name: f"{_OPEN}{name}\n",
        end=f"\n{_CLOSE}",
        style="glm_xml",
    ),
)
_form(
    "mistral-args",
    "[TOOL_CALLS] [ARGS]",
    _named_reader(
        "",
        r"\[TOOL_CALLS\] (?P<name>[\w.-]+) (?:\[CALL_ID\](?P<id>\w+))?\[ARGS\] ",
        *(" ", ""),
    ),
)
_form("mistral", "[TOOL_CALLS]", _json_reader(r"\[TOOL_CALLS\] ", ""))
_form("toolcall", "<TOOLCALL>", _json_reader("<TOOLCALL> ", " </TOOLCALL>\n?"))
_form(
    "phi",
    "<|tool_call|> <|/tool_call|>",
    _json_reader(r"<\|tool_call\|> ", r" <\|/tool_call\|>\n?"),
)
_form(
    "hermes",
    _OPEN,
    _json_reader(f"{_OPEN} ", f" {_CLOSE}", needs_arguments=False),
    grammar=CallForm(
        opens=_OPEN,
        begin=lambda name: f'{_OPEN}\n{{"name": {_dumps(name)}, "arguments": ',
        end=f"}}\n{_CLOSE}",
    ),
)
_form("pythonic", "(key=value)", _read_pythonic, starts=r"\A\s*\[[\w.]+\(")
_form(
    "plain-json",
    '{"name" "parameters"',
    _json_reader(r"(?:<\|python_tag\|> )?", ""),
    starts=r'(?:<\|python_tag\|>\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"',
    grammar=CallForm(
        opens='{"name"',
        begin=lambda name: f'{{"name": {_dumps(name)}, "parameters": ',
        end="}",
    ),
)


class UnknownFormError(ValueError):
    """A chat template has tools, in a format that no parser knows."""


def form_of(renderer: ChatRenderer) -> ToolForm | None:
    """Return the format of calls that a chat template asks for; None: it has no tools.

    Raises `UnknownFormError`.
    """
    # quotes within a string of the template may be escaped
    text = renderer.chat_template.replace('\\"', '"')
    for form in FORMS.values():
        if all(mark in text for mark in form.template_marks):
            return form
    if not renderer.shows_tools():
        return None
    raise UnknownFormError(
        "the chat template offers tools, but writes calls in a format that no parser "
        f"knows: give --parser with one of {', '.join(FORMS)}; engine: the parsers of "
        "the SGLang server; none: calls stay text"
    )

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

from trajkit_shim.chat.request import ToolCall, function_of
from trajkit_shim.json_input import Json
from trajkit_shim.prompting.render import ChatRenderer

Tools: TypeAlias = Sequence[Json]
"""The offered tools, in OpenAI's format."""

Calls: TypeAlias = tuple[list[ToolCall], int] | None
"""The calls at an offset of a text and their end, or None."""

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CallForm:
    """How a model writes tool calls, as far as a grammar needs it."""

    opens: str  # start of every call
    # what precedes and follows the arguments of a call of a tool, as the chat template
    # writes it, and the arguments' style in xgrammar's structural tags
    begin: Callable[[str], str]
    end: str
    style: str = "json"

    def tag(self, name: str, schema: Json) -> Json:
        """Return the tag of a grammar (`parse.grammar`) that a tool's call matches."""
        content: Json = {"type": "json_schema", "json_schema": schema}
        if self.style != "json":
            content["style"] = self.style
        begin = self.begin(name)
        return {"type": "tag", "begin": begin, "content": content, "end": self.end}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """How a family of models writes tool calls.

    Calls are between ``opening`` and ``closing``; without a ``closing`` there is one.
    A call is a ``head``, whose groups are its name and its id, arguments, and a ``tail``.
    Arguments are JSON, or each is a ``pair``, whose groups are key, value, and ``text``:
    ``true`` if the value is a string, else ``false``. Without a ``head`` calls are JSON
    objects with a name. All of these are a `_pattern`, and nothing that has matched is
    matched otherwise when the rest does not match, because that takes long.
    """

    name: str  # value of the command-line option
    # a chat template that contains all of them uses this format
    marks: tuple[str, ...]
    starts: re.Pattern[str]  # of calls
    opening: str = ""
    head: str = ""
    pair: str = ""
    tail: str = ""
    closing: str = ""
    needs_arguments: bool = True
    python: bool = False  # calls are Python, and all of the reply
    # splits a complete reply of another structure into reasoning and the rest
    split: Callable[[str], tuple[str, str]] | None = None
    grammar: CallForm | None = None  # None: no grammar can enforce calls

    def read(self, text: str, offset: int, tools: Tools) -> Calls:
        """Return the calls that begin at an offset."""
        failures = (AttributeError, KeyError, RecursionError, SyntaxError, TypeError)
        try:
            if self.python:
                return _python_calls(text[offset:].strip()), len(text)
            offset = _after(self.opening, text, offset)
            read = self._headed if self.head else self._objects
            calls, offset = read(text, offset, tools)
            return (calls, _after(self.closing, text, offset)) if calls else None
        except (ValueError, *failures):
            return None

    def _headed(
        self, text: str, offset: int, tools: Tools
    ) -> tuple[list[ToolCall], int]:
        calls = []
        while begun := _pattern(self.head).match(text, offset):
            found, start = begun.groupdict(), begun.end()
            name = str(found["name"] or found["name2"])
            if self.pair:
                arguments, stop = self._pairs(text, start, _schemas(tools, name))
            else:
                given, stop = DECODER.raw_decode(text, start)
                arguments = text[start:stop]
                if not isinstance(given, dict):
                    raise ValueError("arguments that are not an object")
            calls.append(ToolCall(name.strip(), arguments, found.get("id") or ""))
            offset = _after(self.tail, text, stop)
            if not self.closing:
                break
        return calls, offset

    def _pairs(self, text: str, offset: int, schemas: Json) -> tuple[str, int]:
        values: dict[str, str] = {}
        while found := _pattern(self.pair).match(text, offset):
            key, written = found["key"], found["value"]
            if key in values:
                raise ValueError(f"{key} twice")
            kinds = _kinds(schemas.get(key)) or _UNSAID
            stated = found.groupdict().get("text")
            if stated is not None:
                kinds = frozenset(_KINDS.values() if stated != "true" else ())
            values[key] = _json_text(written, kinds)
            offset = found.end()
        pairs = (f"{_dumps(key)}: {value}" for key, value in values.items())
        return "{" + ", ".join(pairs) + "}", offset

    def _objects(self, text: str, offset: int, _: Tools) -> tuple[list[ToolCall], int]:
        several = _pattern(r"\[ ").match(text, offset)
        calls, offset = list[ToolCall](), several.end() if several else offset
        while True:
            fields, offset = _fields_at(text, offset)
            calls.append(self._object(fields))
            comma = _pattern(" , ").match(text, offset) if several else None
            if comma is None:
                return calls, _after(r" \]" if several else "", text, offset)
            offset = comma.end()

    def _object(self, fields: dict[str, str]) -> ToolCall:
        name = json.loads(fields["name"])
        given = [fields[key] for key in ("arguments", "parameters") if key in fields]
        if not (given or self.needs_arguments) and fields.keys() <= {
            "name",
            "type",
            "id",
        }:
            given = ["{}"]
        (arguments,) = given
        call_id = json.loads(fields.get("id", '""'))
        if not isinstance(name, str) or not name or not arguments.startswith("{"):
            raise ValueError("not a call")
        return ToolCall(name, arguments, call_id if isinstance(call_id, str) else "")


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


def _python_calls(text: str) -> list[ToolCall]:
    """The calls of a list of Python calls with keywords."""
    calls, (statement,) = list[ToolCall](), ast.parse(text).body
    for item in statement.value.elts:  # type: ignore[attr-defined]
        given = {one.arg: ast.literal_eval(one.value) for one in item.keywords}
        if item.args or None in given:
            raise ValueError("an argument without a name")
        arguments = _dumps(given, allow_nan=False)
        calls.append(ToolCall(ast.unparse(item.func), arguments))
    return calls


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
        offset, called = found.end(), found["before"] or found["after"]
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


def _form(name: str, marks: str, starts: str = "", **more: Any) -> None:
    """Add a format; its calls start with its first mark, or with a pattern."""
    each = tuple(marks.split())
    pattern = re.compile(starts or re.escape(each[0]))
    FORMS[name] = ToolForm(name=name, marks=each, starts=pattern, **more)


_form(
    "gpt-oss",
    "<|channel|> <|message|>",
    starts=_TO,
    head=rf"{_TO}(?:functions\.)?(?P<name>[^\s<]+)<\|message\|> ",
    tail=r" <\|call\|>",
    split=_split_channels,
)
_form(
    "kimi",
    "<|tool_calls_section_begin|>",
    opening=r"<\|tool_calls_section_begin\|> ",
    head=r"<\|tool_call_begin\|> (?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+) "
    r"<\|tool_call_argument_begin\|> ",
    tail=r" <\|tool_call_end\|> ",
    closing=r"<\|tool_calls_section_end\|>",
)
_form(
    "dsml",
    "DSML invoke",
    starts="<｜DSML｜(?:function|tool)_calls>",
    opening="<｜DSML｜(?:function|tool)_calls> ",
    head='<｜DSML｜invoke name="(?P<name>[^"]+)"> ',
    pair='<｜DSML｜parameter name="(?P<key>[^"]+)" string="(?P<text>true|false)">'
    "(?P<value>.*?)</｜DSML｜parameter> "
    "(?=<｜DSML｜parameter|</｜DSML｜invoke>)",
    tail="</｜DSML｜invoke> ",
    closing="</｜DSML｜(?:function|tool)_calls>",
)
_form(
    "deepseek",
    "tool▁calls▁begin",
    starts="<｜tool▁calls▁begin｜>",
    opening="<｜tool▁calls▁begin｜> ",
    head="<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"
    "|(?P<name2>[^\n<]+)<｜tool▁sep｜>) ",
    tail="(?: ```)? <｜tool▁call▁end｜> ",
    closing="<｜tool▁calls▁end｜>",
)
_form(
    "minimax",
    "<minimax:tool_call>",
    opening="<minimax:tool_call> ",
    head='<invoke name="(?P<name>[^"]+)"> ',
    pair='<parameter name="(?P<key>[^"]+)">\n?(?P<value>.*?)\n?</parameter> '
    "(?=<parameter name=|</invoke>)",
    tail="</invoke> ",
    closing="</minimax:tool_call>",
)
_form(
    "seed-oss",
    "<seed:tool_call>",
    opening="<seed:tool_call> ",
    head="<function=(?P<name>[^<\n>]+)> ",
    pair="<parameter=(?P<key>[^<\n>]+)>(?P<value>.*?)</parameter> "
    "(?=<parameter=|</function>)",
    tail="</function> ",
    closing="</seed:tool_call>",
)
_form(
    "qwen3-coder",
    "<function= <parameter=",
    # the model leaves out the first tag at times
    starts=f"{_OPEN}|<function=",
    opening=f"(?:{_OPEN} )?",
    head="<function=(?P<name>[^<\n>]+)> ",
    pair="<parameter=(?P<key>[^<\n>]+)>\n?(?P<value>.*?)\n?</parameter> "
    "(?=<parameter=|</function>)",
    tail="</function> ",
    closing=_CLOSE,
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
    starts=_OPEN,
    head=rf"{_OPEN}\s*+(?P<name>[^<\n]*[^<\s])\s*+(?=<)",
    pair="<arg_key>(?>(?P<key>.+?)</arg_key> <arg_value>)(?P<value>.*?)</arg_value> "
    f"(?=<arg_key>|{_CLOSE})",
    tail=f"{_CLOSE} ",
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
    head=r"\[TOOL_CALLS\] (?P<name>[\w.-]+) (?:\[CALL_ID\](?P<id>\w+))?\[ARGS\] ",
    tail=" ",
)
_form("mistral", "[TOOL_CALLS]", opening=r"\[TOOL_CALLS\] ")
_form("toolcall", "<TOOLCALL>", opening="<TOOLCALL> ", closing=" </TOOLCALL>\n?")
_form(
    "phi",
    "<|tool_call|> <|/tool_call|>",
    opening=r"<\|tool_call\|> ",
    closing=r" <\|/tool_call\|>\n?",
)
_form(
    "hermes",
    _OPEN,
    opening=f"{_OPEN} ",
    closing=f" {_CLOSE}",
    needs_arguments=False,
    grammar=CallForm(
        opens=_OPEN,
        begin=lambda name: f'{_OPEN}\n{{"name": {_dumps(name)}, "arguments": ',
        end=f"}}\n{_CLOSE}",
    ),
)
_form("pythonic", "(key=value)", starts=r"\A\s*\[[\w.]+\(", python=True)
_form(
    "plain-json",
    '{"name" "parameters"',
    starts=r'(?:<\|python_tag\|>\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"',
    opening=r"(?:<\|python_tag\|> )?",
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
        if all(mark in text for mark in form.marks):
            return form
    if not renderer.shows_tools():
        return None
    raise UnknownFormError(
        "the chat template offers tools, but writes calls in a format that no parser "
        f"knows: give --parser with one of {', '.join(FORMS)}; engine: the parsers of "
        "the SGLang server; none: calls stay text"
    )

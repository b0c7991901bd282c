"""Splits a model's reply into reasoning, text and tool calls.

Reasoning between two tags comes first; if the prompt opened it, the reply contains only
its end. White space around it is dropped. The rest is text and calls in the model's form
(`FORMS`). A block that is not a valid call stays in the text, and the reply is ill-formed.
The result is what clients see and send back; the recorded ids are those that were sampled.

JSON keeps its spelling. A value that is bare text between tags may contain its closing
tag: the first one that another tag of the call follows ends it. It is JSON if it has a
type, other than string, that the tool's schema permits, else a string.

`grammar` is of the replies that clients require: a structural tag of xgrammar (0.2).
SGLang and vLLM sample under it, and give the logprobs of the distribution that it leaves.
"""

import ast
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, product
from os.path import commonprefix
from typing import Any, TypeAlias

from trajkit_shim.chat.request import (
    ANY_OBJECT,
    Parsed,
    Required,
    Spoken,
    Thought,
    ToolCall,
    assistant_message,
    function_of,
    squeezed,
    tool_message,
)
from trajkit_shim.engines.http import UNREADABLE, EngineClient, reading
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.json_input import HALF, Json
from trajkit_shim.prompting.render import PROBE, ChatRenderer, Ids

THINK, END_THINK = TAGS = ("<think>", "</think>")
_TAGS = [TAGS, ("<|channel>thought", "<channel|>"), ("[THINK]", "[/THINK]")]
_TAGS += [("<|START_THINKING|>", "<|END_THINKING|>")]
_TAGS += [("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]")]
Tools: TypeAlias = Sequence[Json]
"""The offered tools, in OpenAI's format."""

Found: TypeAlias = tuple[list[ToolCall], int]
"""Calls of a text, and where they end."""

_SPACE = " \t\n\r"
_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
# parameters of the engines that hold a grammar
_PINNED = frozenset("ebnf json_schema regex structural_tag structured_outputs".split())
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


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)


@cache
def _pattern(source: str) -> re.Pattern[str]:
    """A pattern in which a space is any white space."""
    return re.compile(source.replace(" ", "[ \t\n\r]*+"), re.DOTALL)


def _match(
    source: str, text: str, offset: int, find: Any = re.Pattern.match
) -> re.Match[str]:
    """The match of a pattern at an offset, or as ``find`` finds it."""
    found: re.Match[str] | None = find(_pattern(source), text, offset)
    if found is None:
        raise ValueError(f"no {source!r} from {offset} on")
    return found


# Forms of calls


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolForm:
    """How a family of models writes tool calls.

    Calls are between ``opening`` and ``closing``; without a ``closing`` there is one.
    A call is a ``head``, whose groups are its name and its id, arguments, and a ``tail``.
    Arguments are JSON, or each is a ``pair``, whose groups are key, value, and ``text``:
    ``true`` if the value is a string, else ``false``. Without a ``head`` calls are JSON
    objects with a name. Each is a `_pattern`, and is not matched in another way when what
    follows does not match, because that takes long.

    ``begin`` and ``end`` are what a grammar writes around the arguments of a call of the
    tool NAME; without them it cannot. ``style``: of the arguments, in structural tags.
    """

    name: str  # value of the command-line option
    starts: re.Pattern[str]  # of calls
    opening: str = ""
    head: str = ""
    pair: str = ""
    tail: str = ""
    closing: str = ""
    needs_arguments: bool = True
    python: bool = False  # calls are Python; without a ``closing`` all of the reply
    quote: str = ""  # around strings of arguments, which are JSON with bare keys
    # splits a complete reply of another structure into reasoning and the rest
    split: Callable[[str], tuple[str, str]] | None = None
    begin: str = ""
    end: str = ""
    style: str = "json"

    def tag(self, name: str, schema: Json) -> Json:
        """Return the tag of a grammar (`grammar`) that a tool's call matches."""
        content: Json = {"type": "json_schema", "json_schema": schema}
        if self.style == "json":
            name = _dumps(name)[1:-1]
        else:
            content["style"] = self.style
        begin = self.begin.replace("NAME", name)
        return {"type": "tag", "begin": begin, "content": content, "end": self.end}

    def read(self, text: str, offset: int, tools: Tools) -> Found | None:
        """Return the calls that begin at an offset, and their end; None: there is none."""
        try:
            calls, offset = list[ToolCall](), _match(self.opening, text, offset).end()
            if self.python:
                end = _match(self.closing or r"\Z", text, offset, re.Pattern.search)
                return _python_calls(text[offset : end.start()].strip()), end.end()
            if not self.head:
                calls, offset = self._objects(text, offset)
            while self.head and (begun := _pattern(self.head).match(text, offset)):
                found = begun.groupdict()
                name = str(found["name"] or found["name2"])
                arguments, stop = self._arguments(text, begun.end(), tools, name)
                calls.append(ToolCall(name.strip(), arguments, found.get("id") or ""))
                offset = _match(self.tail, text, stop).end()
                if not self.closing:
                    break
            return (calls, _match(self.closing, text, offset).end()) if calls else None
        except UNREADABLE:
            return None

    def ends_in(self, text: str) -> bool:
        """Return whether a text has the end of a call."""
        end = (self.closing or self.tail).strip()
        return bool(end and _pattern(end).search(text))

    def _arguments(
        self, text: str, start: int, tools: Tools, name: str
    ) -> tuple[str, int]:
        """The arguments at an offset as JSON, and their end."""
        if self.quote:
            stop = _match(self.tail, text, start, re.Pattern.search).start()
            return _unquoted(text[start:stop], self.quote), stop
        if not self.pair:
            given, stop = _DECODER.raw_decode(text, start)
            if not isinstance(given, dict):
                raise ValueError("arguments that are not an object")
            return text[start:stop], stop
        values, schemas = dict[str, str](), _schemas(tools, name)
        while found := _pattern(self.pair).match(text, start):
            key, stated = found["key"], found.groupdict().get("text")
            if key in values:
                raise ValueError(f"{key} twice")
            kinds = _kinds(schemas.get(key)) or _UNSAID
            if stated is not None:
                kinds = frozenset(_KINDS.values() if stated != "true" else ())
            values[key] = _json_text(found["value"], kinds)
            start = found.end()
        pairs = (f"{_dumps(key)}: {value}" for key, value in values.items())
        return "{" + ", ".join(pairs) + "}", start

    def _objects(self, text: str, offset: int) -> Found:
        """The object at an offset, or the list of objects there."""
        several, calls = _pattern(r"\[ ").match(text, offset), list[ToolCall]()
        found = several
        while found or not calls:
            fields, offset = _fields_at(text, found.end() if found else offset)
            calls.append(self._object(fields))
            found = _pattern(" , ").match(text, offset) if several else None
        return calls, _match(r" \]" if several else "", text, offset).end()

    def _object(self, fields: dict[str, str]) -> ToolCall:
        # the latter are Cohere's
        names, ids = (
            [json.loads(fields[key]) for key in keys if key in fields]
            for keys in (("name", "tool_name"), ("id", "tool_call_id"))
        )
        (name,), call_id = names, ids[0] if ids else ""
        given = [fields[key] for key in ("arguments", "parameters") if key in fields]
        bare = not self.needs_arguments and fields.keys() <= {"name", "type", "id"}
        (arguments,) = given or ["{}"] * bare
        if not isinstance(name, str) or not name or not arguments.startswith("{"):
            raise ValueError("not a call")
        return ToolCall(name, arguments, call_id if isinstance(call_id, str) else "")


def _fields_at(text: str, offset: int) -> tuple[dict[str, str], int]:
    """The source text of each value of the object at an offset, and its end."""
    fields: dict[str, str] = {}
    mark = r" \{ "
    while begun := _pattern(mark).match(text, offset):
        key, offset = _DECODER.raw_decode(text, begun.end())
        if not isinstance(key, str) or key in fields:
            raise ValueError(f"{key!r} is not a string, or a repeated field name")
        start = _match(" : ", text, offset).end()
        _, offset = _DECODER.raw_decode(text, start)
        fields[key], mark = text[start:offset], " , "
    return fields, _match(r" \}", text, offset).end()


def _unquoted(text: str, quote: str) -> str:
    """The JSON of an object with bare keys, and strings between quotes of its own."""
    parts = text.split(quote)
    parts[::2] = (_BARE.sub(_in_json, part) for part in parts[::2])
    parts[1::2] = map(_dumps, parts[1::2])
    if not isinstance(_DECODER.decode(text := "".join(parts)), dict):
        raise ValueError("arguments that are not an object")
    return text


# a word, and the colon after a key
_BARE = re.compile(r"([^\s{}\[\],:]+)(\s*+:)?")


def _in_json(found: re.Match[str]) -> str:
    word, colon = found.groups()
    return f"{_dumps(word)}{colon}" if colon else _PYTHON.get(word, word)


def _python_calls(text: str) -> list[ToolCall]:
    """The calls of a list of Python calls with keywords."""
    calls, (statement,) = list[ToolCall](), ast.parse(text).body
    for item in statement.value.elts:  # type: ignore[attr-defined]
        start = ""
        if isinstance(item, ast.BinOp) and isinstance(item.op, ast.Sub):
            # a name with hyphens
            start, item = f"{ast.unparse(item.left)}-".replace(" ", ""), item.right
        item = _Names().visit(item)
        given = {one.arg: ast.literal_eval(one.value) for one in item.keywords}
        name = start + ast.unparse(item.func)
        if item.args or None in given or not re.fullmatch(r"[\w.-]+", name):
            raise ValueError("not a call of a name, with keywords")
        calls.append(ToolCall(name, _spelled(given)))
    return calls


class _Names(ast.NodeTransformer):
    """Reads JSON's names of values in Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node


def _spelled(value: object) -> str:
    """A value as JSON; clients cannot send half a character back."""
    text = _dumps(value, allow_nan=False)
    return HALF.sub(lambda half: f"\\u{ord(half[0]):x}", text)


# a message of a reply: the recipient is before or after the channel
_MESSAGE = re.compile(
    r"(?:<\|start\|>assistant)?(?: to=(?P<before>[^\s<]+))?<\|channel\|>(?P<channel>\w+)"
    r"(?: to=(?P<after>[^\s<]+))?[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>"
    r"(?P<body>.*?)(?P<end><\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)


def _split_channels(text: str) -> tuple[str, str]:
    """The analysis of a reply, and the rest of it; calls keep their header."""
    thoughts, rest, offset = list[str](), list[str](), 0
    for found in _MESSAGE.finditer(text):
        rest.append(text[offset : found.start()])
        offset, body = found.end(), found["body"]
        if called := found["before"] or found["after"]:
            body = f"<|channel|>commentary to={called}<|message|>{body}<|call|>"
        elif found["end"] == "<|call|>":
            # a call of nobody stays text
            body = found[0]
        thinks = found["channel"] == "analysis" and not called
        (thoughts if thinks else rest).append(body)
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
        kind = _KINDS[type(_DECODER.decode(text))]
    except (ValueError, RecursionError):
        kind = "string"
        # some templates write lists and objects as Python does, too
        if kinds is not _UNSAID and "string" not in kinds:
            with suppress(*UNREADABLE):
                value = ast.literal_eval(text)
                if isinstance(value, dict | list):
                    kind, text = _KINDS[type(value)], _spelled(value)
    if kinds & _NUMBERS:
        kinds |= _NUMBERS
    return text if kind != "string" and kind in kinds else _dumps(written)


FORMS: dict[str, ToolForm] = {}
"""By their names."""


def _form(name: str, opening: str = "", *, starts: str = "", **more: Any) -> None:
    """Add a form; its calls start with its opening, or with a pattern."""
    pattern = re.compile(starts or opening.rstrip())
    FORMS[name] = ToolForm(name=name, starts=pattern, opening=opening, **more)


def _tags(
    call: str, attribute: str, around: str = "", prefix: str = "", kind: str = ""
) -> dict[str, str]:
    """The patterns of a call with an ``attribute``, and its parameters in tags.

    ``around`` each value; ``prefix`` of every tag; ``kind``: the tag of a value says it.
    """
    name, key = (attribute.replace("WORD", group) for group in ("name", "key"))
    tag, close = f"<{prefix}parameter", f"</{prefix}{call}>"
    pair = f"{tag}{key}{kind}>{around}(?P<value>.*?){around}</{prefix}parameter> "
    pair += f"(?={tag}{attribute.partition('(')[0]}|{close})"
    return {"head": f"<{prefix}{call}{name}> ", "pair": pair, "tail": f"{close} "}


_EQUALS, _QUOTED = "=(?P<WORD>[^<\n>]+)", ' name="(?P<WORD>[^"]+)"'
_TO = r"<\|channel\|>commentary to="

_form(
    "gpt-oss",
    starts=_TO,
    head=rf"{_TO}(?:functions\.)?(?P<name>[^\s<]+)<\|message\|> ",
    tail=r" <\|call\|>",
    split=_split_channels,
)
_form(
    "kimi",
    r"<\|tool_calls_section_begin\|> ",
    head=r"<\|tool_call_begin\|> (?P<id>(?:functions\.)?(?P<name>[\w.-]+):\d+) "
    r"<\|tool_call_argument_begin\|> ",
    tail=r" <\|tool_call_end\|> ",
    closing=r"<\|tool_calls_section_end\|>",
)
_form(
    "dsml",
    "<｜DSML｜(?:function|tool)_calls> ",
    closing="</｜DSML｜(?:function|tool)_calls>",
    **_tags("invoke", _QUOTED, "", "｜DSML｜", ' string="(?P<text>true|false)"'),
)
_form(
    "deepseek",
    "<｜tool▁calls▁begin｜> ",
    head="<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<name>[^\n<]+)\n```json\n"
    "|(?P<name2>[^\n<]+)<｜tool▁sep｜>) ",
    tail="(?: ```)? <｜tool▁call▁end｜> ",
    closing="<｜tool▁calls▁end｜>",
)
_form(
    "minimax",
    "<minimax:tool_call> ",
    closing="</minimax:tool_call>",
    **_tags("invoke", _QUOTED),
)
_form(
    "seed-oss",
    "<seed:tool_call> ",
    closing="</seed:tool_call>",
    **_tags("function", _EQUALS),
)
_form(
    "qwen3-coder",
    # the model leaves out the first tag at times
    f"(?:{_OPEN} )?",
    starts=f"{_OPEN}|<function=",
    closing=_CLOSE,
    **_tags("function", _EQUALS, "\n?"),
    begin=f"{_OPEN}\n<function=NAME>\n",
    end=f"\n</function>\n{_CLOSE}",
    style="qwen_xml",
)
_form(
    "glm",
    starts=_OPEN,
    head=rf'{_OPEN}\s*+(?P<name>[^<\n{{}}"]*[^<\s{{}}"])\s*+(?=<)',
    pair="<arg_key>(?>(?P<key>.+?)</arg_key> <arg_value>)(?P<value>.*?)</arg_value> "
    f"(?=<arg_key>|{_CLOSE})",
    tail=f"{_CLOSE} ",
    begin=f"{_OPEN}NAME\n",
    end=f"\n{_CLOSE}",
    style="glm_xml",
)
_form(
    "mistral-args",
    starts=r"\[TOOL_CALLS\]",
    head=r"\[TOOL_CALLS\] (?P<name>[\w.-]+) (?:\[CALL_ID\](?P<id>\w+))?\[ARGS\] ",
    tail=" ",
)
_form("mistral", r"\[TOOL_CALLS\] ")
_form("toolcall", "<TOOLCALL> ", closing=" </TOOLCALL>\n?")
_form("phi", r"<\|tool_call\|> ", closing=r" <\|/tool_call\|>\n?")
_form(
    "hermes",
    f"{_OPEN} ",
    closing=f" {_CLOSE}",
    needs_arguments=False,
    begin=f'{_OPEN}\n{{"name": "NAME", "arguments": ',
    end=f"}}\n{_CLOSE}",
)
for _name, _begin, _end, _quote in (
    ("gemma", r"<\|tool_call>call:", r"<tool_call\|> ", '<|"|>'),
    (
        "function-gemma",
        "<start_function_call>call:",
        "<end_function_call> ",
        "<escape>",
    ),
):
    _head = rf"{_begin}(?P<name>[^{{\s]+) "
    _form(_name, starts=_begin, head=_head, tail=_end, quote=_quote)
_form("lfm", r"<\|tool_call_start\|> ", closing=r"<\|tool_call_end\|>", python=True)
_form("pythonic", starts=r"\A\s*\[[\w.-]+\(", python=True)
_form(
    "plain-json",
    r"(?:<\|python_tag\|> )?",
    starts=r'(?:<\|python_tag\|>\s*)?\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"',
    begin='{"name": "NAME", "parameters": ',
    end="}",
)


# Trying a template out

_ASKED: Json = {"role": "user", "content": "wordquestion"}
# some templates take no other ids than those of their kind
_IDS = ("functions.probe{0}:{0}", "call0000{0}")
_THOUGHT = Thought("wordthought")


class UnknownFormError(ValueError):
    """Replies in the form of a chat template cannot be read, or only with an option."""


def parser_of(renderer: ChatRenderer, name: str | None = None) -> "FormParser":
    """Return the parser of the replies that a chat template writes.

    ``name``: of their form, which is not checked then. Raises `UnknownFormError`.
    """
    form = form_of(renderer) if name is None else FORMS.get(name)
    parser = FormParser(form, tags_of(renderer))
    fault = _fit(renderer, parser)
    if fault and name is None:
        raise UnknownFormError(fault)
    return parser


def _fit(renderer: ChatRenderer, parser: "FormParser") -> str:
    """Find out what a template writes around a text; why it cannot be told, or nothing."""
    for thought in ("", "wordthought"):
        try:
            _, text, ended = _written(renderer, [Thought(thought), "wordanswer"])
        except GatewayError:
            continue
        if "wordanswer" not in text or (thought and parser.splits):
            continue
        found = parser.read_written(text)
        if squeezed(found.text) == "wordthoughtwordanswer":
            # it has no tags for reasoning
            continue
        before, shown, after = found.text.partition("wordanswer")
        option = "--chat-template"
        if shown and (found.reasoning or "") == (thought if thought in text else ""):
            option = "" if ended else after and f"--stop-token {after.strip()!r}"
        if option:
            return (
                f"the chat template writes a reply as {text[:200]!r}, of which "
                f"{found.text!r} would be text; give {option}, or --parser to serve it so"
            )
        # white space is no frame
        edges = zip((before, after), parser.frame, strict=True)
        parser.frame = tuple(e if e.strip() else known for e, known in edges)
    return ""


def tags_of(renderer: ChatRenderer) -> tuple[str, str]:
    """Return the tags that a chat template writes around reasoning, else `TAGS`.

    The first one may be empty.
    """
    shown = r"([<\[][^<\[]*?)\s*wordthought\s*(\S[^<\[]*[>\]])"
    # some templates show it only beside calls
    for reply in ("wordanswer", ToolCall("probe0", "{}", _IDS[1].format(0))):
        with suppress(GatewayError):
            thinks, plain = (
                "".join(_written(renderer, [*first, reply])[:2])
                for first in ([_THOUGHT], [])
            )
            if "wordthought" not in thinks:
                continue
            if found := re.search(shown, thinks):
                # what every reply begins with is no tag
                bare = found[1] in plain and found[2] not in plain
                return "" if bare else found[1], found[2]
            break
    # a template may drop all reasoning
    return next((tags for tags in _TAGS if tags[1] in renderer.chat_template), TAGS)


def form_of(renderer: ChatRenderer) -> ToolForm | None:
    """Return the form that reads the calls that a chat template writes.

    None: it writes none, and shows no tools. Raises `UnknownFormError`.
    """
    fault = "does not show the calls of a reply"
    plain = FormParser(None, tags_of(renderer))
    unfit = _fit(renderer, plain)
    # one call where it does not take or show two
    for call_id, n_calls in product(_IDS, (2, 1)):
        wanted = [(f"probe{i}", [f"7031{i}"]) for i in range(n_calls)]
        calls = [
            ToolCall(f"probe{i}", f'{{"key": 7031{i}}}', call_id.format(i))
            for i in range(n_calls)
        ]
        try:
            text = _written(renderer, calls)[1]
        except GatewayError as error:
            fault = f"rejects a reply with calls: {error}"
            continue
        if f"7031{n_calls - 1}" not in text:
            continue
        text = plain.read_written(text).text
        for form in chain(FORMS.values(), _json_forms(text)):
            found = FormParser(form).read(text, [PROBE], opened=False)
            read = [(c.name, re.findall(r"\d+", c.arguments)) for c in found.calls]
            if read == wanted and not found.text.strip():
                return form
        fault = f"writes calls in a format that no parser knows: {text[:200]!r}"
        break
    if not renderer.shows_tools:
        return None
    raise UnknownFormError(
        unfit
        or f"the chat template offers tools, but {fault}; give --chat-template, "
        "--stop-token if the reply ends there, or --parser with one of "
        f"{', '.join(FORMS)}; engine: the parsers of the SGLang server; none: calls "
        "stay text"
    )


def _written(renderer: ChatRenderer, parts: Sequence[Spoken]) -> tuple[str, str, bool]:
    """What a template writes for a reply: in the generation prompt, and as the reply.

    Without the token that ends it, and whether there is one. Without one the text goes on
    to the next special token.
    """
    calls = [part for part in parts if isinstance(part, ToolCall)]
    results = [tool_message(call.call_id, ["wordresult"]) for call in calls]
    follows = results or [{**_ASKED, "content": "wordnext"}]
    opening, later = (
        renderer.text([_ASKED, *more], [PROBE]).rpartition("wordquestion")[2].lstrip()
        for more in ([], [assistant_message(parts), *follows])
    )
    # a reply may begin with another tag than the generation prompt ends with
    begun = commonprefix([opening, later])  # noqa: RUF071
    begun = re.sub(r"[<\[][^\s<>\[\]]*\Z", "", begun)
    text = re.split("word(?:next|result)", later.removeprefix(begun))[0]
    last = max(text.rfind(word) for word in ("wordanswer", *re.findall("7031.", text)))
    ends = [*renderer.control.finditer(text, max(last, 0))]
    stop = next((e.start() for e in ends if e[0] in renderer.end_tokens), None)
    if stop is not None or calls:
        return begun, text[:stop], stop is not None
    special = (e.end() for e in ends if renderer.special.fullmatch(e[0]))
    return begun, text[: next(special, last + len("wordanswer"))], False


def _json_forms(text: str) -> Iterator[ToolForm]:
    """Yield the form of a text that has JSON between the same other texts."""
    begin = re.compile(r"\[\s*\{|\{")
    if found := begin.search(text):
        with suppress(ValueError):
            _, stop = _DECODER.raw_decode(text, found.start())
            opening = text[: found.start()].strip()
            # another call may follow
            closing = begin.split(text[stop:])[0].strip().removesuffix(opening)
            opening, closing = (
                " ".join(["", *map(re.escape, part.split()), ""])
                for part in (opening, closing)
            )
            # without other texts calls are all of a reply
            starts = _pattern(opening.strip() or r'\A \[ \{ "(?:tool_)?name"')
            yield ToolForm(name="json", starts=starts, opening=opening, closing=closing)


# Parsers


def opens_reasoning(renderer: ChatRenderer, prompt_ids: Ids, tag: str = THINK) -> bool:
    """Return whether a prompt ends with the tag that begins the reply's reasoning."""
    # a tag and a line break in single bytes, and a few more
    end = renderer.decode(prompt_ids[-32:], ended=False).rstrip()
    return bool(tag) and end.endswith(tag)


class ReplyParser(ABC):
    """Parses replies."""

    form: ToolForm | None = None  # how a grammar writes calls; None: it cannot
    tags: tuple[str, str] = TAGS  # of reasoning

    @abstractmethod
    async def parse(self, text: str, tools: Tools | None, *, opened: bool) -> Parsed:
        """Return what a reply contains; one that the parser rejects stays text.

        The text is as sampled, without the end-of-message token. ``opened``: the prompt
        ends within the reasoning. Raises `EngineError`: the parser cannot be reached.
        """

    async def close(self) -> None:  # noqa: B027, most have nothing to close
        """Close its connections, if it has any."""


class FormParser(ReplyParser):
    """The gateway's own parser, for one form of calls; None: calls are text.

    ``tags`` are around reasoning, and ``frame`` around a text.
    """

    frame: tuple[str, ...] = "", ""

    def __init__(self, form: ToolForm | None, tags: tuple[str, str] = TAGS) -> None:
        self._form, self.tags = form, tags
        self.form = form if form is not None and form.begin else None
        self.splits = form is not None and form.split

    async def parse(self, text: str, tools: Tools | None, *, opened: bool) -> Parsed:
        return self.read(text, tools, opened=opened)

    def read_written(self, text: str) -> Parsed:
        """Parse what a template writes for a reply; the prompt may open its reasoning."""
        start, end = self.tags
        return self.read(text, None, opened=end in text and start not in text)

    def read(self, text: str, tools: Tools | None, *, opened: bool) -> Parsed:
        """Parse a complete reply.

        White space between two calls is dropped. Without form or tools calls are text.
        """
        thought, rest = self._without_reasoning(text, opened)
        rest = rest.removeprefix(self.frame[0]).removesuffix(self.frame[1])
        form = self._form if tools is not None else None
        parts, pieces, ill_formed, offset = list[Spoken](), list[str](), False, 0
        while form is not None and (begun := form.starts.search(rest, offset)):
            read = form.read(rest, begun.start(), tools or ())
            if read is None:
                # only the marker is text; a call may follow it
                ill_formed, stop = True, max(begun.end(), begun.start() + 1)
                pieces.append(rest[offset:stop])
                offset = stop
                continue
            text = "".join([*pieces, rest[offset : begun.start()]])
            parts += [text] * bool(text.strip(_SPACE) if parts else text)
            pieces, offset = [], read[1]
            parts += read[0]
        text = "".join([*pieces, rest[offset:]])
        parts += [text] * bool(text)
        if form is not None:
            # the end of a call that has no begin
            ill_formed |= any(form.ends_in(p) for p in parts if isinstance(p, str))
        thought = thought.strip(_SPACE)
        return Parsed(
            parts=(*[Thought(thought)] * bool(thought), *parts), ill_formed=ill_formed
        )

    def _without_reasoning(self, text: str, opened: bool) -> tuple[str, str]:
        if self.splits:
            return self.splits(text)
        start, end = self.tags
        begun = text.lstrip(_SPACE)
        if not opened and not begun.startswith(start):
            return "", text
        begun = text if opened else begun.removeprefix(start)
        inside, closed, rest = begun.partition(end)
        if not (start or closed):
            return "", text
        return inside, rest.lstrip("\n") if closed else ""


class SGLangParser(ReplyParser):
    """The parsers of an SGLang server (0.5.23): of ``calls`` and of ``thoughts``.

    Without one of them that part is not parsed. The arguments of a call are spelled as
    the server spells them.
    """

    def __init__(self, base_url: str, calls: str | None, thoughts: str | None) -> None:
        self._server, self._names = EngineClient("SGLang", base_url), (calls, thoughts)

    async def parse(self, text: str, tools: Tools | None, *, opened: bool) -> Parsed:
        (parser, thoughts), ask = self._names, self._server.post
        answer: Any = {"text": text}
        try:
            if thoughts:
                body: Json = {"text": f"{self.tags[0]}{text}" if opened else text}
                body["reasoning_parser"] = thoughts
                answer = await ask("/separate_reasoning", body)
            thought, rest = answer.get("reasoning_text"), answer.get("text") or ""
            answer = {"normal_text": rest}
            if parser and tools:
                body = {"text": rest, "tools": [*tools], "tool_call_parser": parser}
                answer = await ask("/parse_function_call", body)
            with reading("SGLang", "tool calls"):
                given = answer.get("calls") or ()
                calls = [(str(call["name"]), call["parameters"]) for call in given]
        except EngineError as error:
            if error.status != 400:
                raise
            calls = [("", None)]
        # no protocol can send other arguments
        if not all(_is_object(arguments) for _, arguments in calls):
            return Parsed(parts=(text,) if text else (), ill_formed=True)
        parts: list[Spoken] = [Thought(str(thought))] if thought else []
        parts += filter(None, [answer.get("normal_text")])
        return Parsed(parts=(*parts, *(ToolCall(*call) for call in calls)))

    async def close(self) -> None:
        await self._server.close()


def _is_object(text: Any) -> bool:
    """Whether a text is a JSON object."""
    with suppress(*UNREADABLE):
        return isinstance(_DECODER.decode(text), dict)
    return False


# Required replies


def grammar(
    required: Required,
    offered: Tools | None,
    form: ToolForm | None,
    pinned: Mapping[str, object],
    *,
    opened: bool,
    reasons: bool,
    holds: bool = True,
    around: tuple[str, str] = TAGS,
) -> Json | None:
    """Return the structural tag of a form that is ``required`` of a reply, or None.

    Arguments match the tool's schema if that is required, else they are any object.
    Reasoning ``around`` may come first: the prompt ``opened`` it, or the model may begin
    with it (``reasons``). ``pinned`` are the session's parameters of the engine, which
    ``holds`` grammars or not. Raises `GatewayError` (400): a required tool is not offered,
    the session has a grammar of its own, or nothing can enforce the form.
    """
    tools = {str(f["name"]): f for f in map(function_of, offered or ())}
    wanted = [name for name in required.names if name not in tools]
    if wanted or (required.call and not tools):
        which = f"the tool {wanted[0]!r}" if wanted else "a tool"
        rule = "required" if required.call else "allowed"
        raise GatewayError(f"a call of {which} is {rule}, which is not offered")
    if required.schema is None and not (required.limits_calls and tools):
        return None
    own, fault = _PINNED & pinned.keys(), ""
    if own:
        fault = f"the session fixes {min(own)}: a request cannot require another form"
    elif not holds:
        fault = "this engine has no grammars: no form of a reply can be required"
    elif tools and form is None:
        fault = "the parser of replies does not define how calls are written: "
        fault += "no form of a reply can be required"
    if fault:
        raise GatewayError(fault, code="unsupported_value")
    either: list[Json] = []
    if required.schema is not None and not required.call:
        either.append({"type": "json_schema", "json_schema": required.schema})
    if tools and form is not None:
        strict = required.strict
        schemas = {n: f.get("parameters") for n, f in tools.items() if n in strict}
        names = dict.fromkeys(required.names) or tools
        tags = [form.tag(n, _object_or_any(schemas.get(n))) for n in names]
        calls: Json = {"tags": tags, "stop_after_first": not required.parallel}
        if required.call or required.schema is not None:
            calls |= {"separator": "\n", "at_least_one": True}
            either.append({"type": "tags_with_separator", **calls})
        else:
            calls["triggers"] = [form.begin.partition("NAME")[0].partition("\n")[0]]
            either.append({"type": "triggered_tags", **calls})
    reply: Json = {"type": "or", "elements": either}
    reply = either[0] if len(either) == 1 else reply
    if opened or reasons:
        # it is optional unless the prompt opened it
        thought: Json = {"type": "tag", "content": {"type": "any_text"}}
        thought |= {"begin": "" if opened else around[0], "end": around[1]}
        thought = thought if opened else {"type": "optional", "content": thought}
        gap: Json = {"type": "regex", "pattern": "\\n{0,2}"}
        reply = {"type": "sequence", "elements": [thought, gap, reply]}
    return {"type": "structural_tag", "format": reply}


def _object_or_any(schema: object) -> Json:
    return schema if isinstance(schema, dict) else ANY_OBJECT

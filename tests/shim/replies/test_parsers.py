"""Replies: what each form takes for a call, grammars, and the parsers of a server."""

import json
import re
from pathlib import Path

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.shim.clients import TOOLS, USER
from tests.shim.engines.double import Double
from tests.shim.fakes import (
    AS_STRING,
    byte_renderer,
    called,
    cases,
    parse_reply,
    raises,
    said,
    sampled_call,
)
from tests.strategies import call_shards, plain_texts, typed_calls
from trajkit_shim import cli
from trajkit_shim.chat.request import Required
from trajkit_shim.cli import EngineOptions
from trajkit_shim.errors import EngineError, GatewayError
from trajkit_shim.replies import (
    END_THINK,
    FORMS,
    TAGS,
    THINK,
    FormParser,
    SGLangParser,
    UnknownFormError,
    form_of,
    grammar,
    parser_of,
    tags_of,
)

pytestmark = pytest.mark.anyio

# Replies of families

DATA = json.loads((Path(__file__).parents[1] / "models/families.json").read_text())
FAMILIES = DATA["families"]
FORMS_OF_FAMILIES = sorted({f["form"] for f in FAMILIES.values() if "form" in f})
REPLIES = [
    pytest.param(name, reply, id=f"{name}-{reply['id']}")
    for name, family in FAMILIES.items()
    for reply in family["replies"]
]


def squeezed(text):
    return " ".join((text or "").split())


@pytest.mark.parametrize(("name", "reply"), REPLIES)
def test_a_reply_of_a_family(name, reply):
    family = FAMILIES[name]
    ends = "|".join(map(re.escape, family["end_tokens"]["list"]))
    text = re.sub(f"(?:{ends})$", "", reply["sampled"])
    seed = name == "seed-oss"
    opened = not seed and END_THINK in text and THINK not in text
    tags = ("<seed:think>", "</seed:think>") if seed else TAGS
    form = FORMS.get(family.get("form"))
    found = FormParser(form, tags).read(text, DATA["tools"], opened=opened)
    assert not found.ill_formed
    assert squeezed(found.reasoning) == squeezed(reply["reasoning"])
    assert squeezed(found.text) == squeezed(reply["text"])
    assert [
        (call.name, json.loads(call.arguments), call.call_id) for call in found.calls
    ] == [(c["name"], c["arguments"], c.get("id", "")) for c in reply["calls"]]


@pytest.mark.parametrize("form", FORMS_OF_FAMILIES)
def test_half_of_a_call_is_ill_formed_text(form):
    """Where a call of the family is cut, nothing is lost and nothing is guessed."""
    family = next(each for each in FAMILIES.values() if each.get("form") == form)
    reply = next(reply for reply in family["replies"] if len(reply["calls"]) == 1)
    text = reply["sampled"].removesuffix(family["end_tokens"]["after_call"])
    if form == "gpt-oss":
        # its calls are found once the messages of the reply are taken apart
        text = text[text.index("<|channel|>commentary to=") :]
    start = FORMS[form].starts.search(text)
    cut = text[start.start() : (start.end() + len(text)) // 2]
    found = FormParser(FORMS[form]).read(f"So: {cut}", DATA["tools"], opened=False)
    assert found.calls == []
    assert found.ill_formed or form in ("pythonic", "plain-json")
    assert squeezed(found.text).startswith("So:")


# What a template renders is read again

TEXT = "{{ message.content }}"
OTHER_END = AS_STRING.replace("_end", "_start")
THOUGHT = "{{ '{t}' + message.thinking + '{/t}' if message.thinking }}"
OTHER_TAGS = AS_STRING.replace(TEXT, THOUGHT + TEXT)
# without a generation prompt
HEADLESS = AS_STRING.partition("{%- if add_generation_prompt")[0]
NEXT = "{{ '' if loop.first else '\n' }}"
JSON = '{"name": "{{ name }}", "arguments": {{ given | tojson }}}'
LIST = "{{ '[' if loop.first else ', ' }}" + JSON + "{{ ']' if loop.last }}"
VALUE = "{{ given[key] if given[key] is string else given[key] | tojson }}"
EACH = "{% for key in given %}", "{% endfor %}"
# how the chat templates of families write a call
WRITTEN = {
    "hermes": f"{NEXT}<tool_call>\n{JSON}\n</tool_call>",
    "plain-json": NEXT + JSON.replace("arguments", "parameters"),
    "qwen3-coder": f"{NEXT}<tool_call>\n<function={{{{ name }}}}>\n{EACH[0]}<parameter="
    f"{{{{ key }}}}>\n{VALUE}\n</parameter>\n{EACH[1]}</function>\n</tool_call>",
    "glm": f"{NEXT}<tool_call>{{{{ name }}}}\n{EACH[0]}<arg_key>{{{{ key }}}}</arg_key>\n"
    f"<arg_value>{VALUE}</arg_value>\n{EACH[1]}</tool_call>",
}


def writing(call, reply=TEXT):
    """The renderer of a template that writes replies and calls in its own way."""
    return byte_renderer(
        "{{ tools | tojson if tools }}{% for message in messages %}<|im_start|>"
        f"{reply}{{% for call in message.tool_calls or [] %}}"
        "{% set name, given = call.function.name, call.function.arguments %}"
        f"{call}{{% endfor %}}<|im_end|>{{% endfor %}}<|im_start|>"
    )


RENDERERS = {name: writing(call) for name, call in WRITTEN.items()}
forms = st.sampled_from(sorted(WRITTEN))


def spelled(renderer, lead, *calls):
    """A reply as a chat template writes it."""
    made = [called(f"c{i}", *call) for i, call in enumerate(calls)]
    text = renderer.without_mark(renderer.text([said(lead, tool_calls=made)], None))
    return text.removeprefix("<|im_start|>").removesuffix("<|im_end|><|im_start|>")


@given(
    forms,
    st.lists(typed_calls(), min_size=1, max_size=3),
    st.sampled_from(["", "é. \n"]),
    plain_texts,
)
def test_a_rendered_call_is_read_again(form, made, lead, last):
    by_name = {name: tool for tool, name, _ in made}
    calls = [
        (name, arguments) for tool, name, arguments in made if by_name[name] is tool
    ]
    spellings = [(name, json.dumps(arguments)) for name, arguments in calls]
    text = spelled(RENDERERS[form], lead, *spellings) + last
    parsed = parse_reply(text * 2, [*by_name.values()], FORMS[form])
    read = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    assert read == calls * 2
    # and all other text is kept
    assert "".join(parsed.text.split()) == "".join((lead + last).split()) * 2
    assert not parsed.ill_formed


@given(forms, st.lists(call_shards, max_size=12))
def test_no_text_is_lost(form, shards):
    """All that is not a call, or white space between two, is in the text."""
    # it does not begin with reasoning
    text = "".join(["a", *shards])
    parsed = parse_reply(text, (), FORMS[form])
    at = 0
    for part in parsed.parts:
        if isinstance(part, str):
            at = text.index(part, at) + len(part)
        else:
            json.loads(part.arguments)
            at = FORMS[form].starts.search(text, at).end()
    if not parsed.calls:
        assert parsed.text == text
        starts = FORMS[form].starts.search(text)
        assert parsed.ill_formed == bool(starts or FORMS[form].ends_in(text))


# Templates that are tried out


@pytest.mark.parametrize("name", WRITTEN)
def test_the_form_that_reads_what_the_template_writes(name):
    assert form_of(RENDERERS[name]) is FORMS[name]
    # and a grammar demands a call so
    tag, call = FORMS[name].tag("f", SCHEMA), spelled(RENDERERS[name], "", ("f", "{}"))
    assert (call.startswith(tag["begin"]), call.endswith(tag["end"])) == (True, True)


@cases(
    "call, lead",
    {
        "a block for each": (f"<|call|>\n{JSON}\n<|done|>", "So:"),
        "without an end": (f"\n<function_call> {JSON}", "So:"),
        "in one block": (
            "{{ '<c>' if loop.first }}" + LIST + "{{ '</c>' if loop.last }}",
            "So:",
        ),
        "nothing around": (LIST, ""),
        "words before it": (f"<|a|>\n\nfunction call<|b|>\n{JSON}", "So:"),
        "Cohere's fields": ("<|a|>" + JSON.replace('"name', '"tool_name'), "So:"),
    },
)
def test_calls_in_json_are_read_between_any_texts(call, lead):
    renderer, values = writing(call), ('{"a": "}\\""}', '{"a": "[{</c>"}')
    text = spelled(renderer, lead, *(("f", value) for value in values))
    parsed = parse_reply(text, (), form_of(renderer))
    assert [each.arguments for each in parsed.calls] == [*values]
    assert (parsed.text.strip(), parsed.ill_formed) == (lead, False)


@cases(
    "renderer, fault",
    {
        "no calls": (writing(""), "does not show the calls"),
        "no calls are taken": (writing("{{ none() }}"), "rejects a reply with calls: "),
        # has all that plain JSON has, but for its name
        "other JSON": (writing(LIST.replace('"name', '"call_name')), "no parser"),
        "another end": (byte_renderer(OTHER_END), "--stop-token '<.im_start"),
        "other tags": (byte_renderer(OTHER_TAGS), "writes a reply .*--chat-template"),
        "what surrounds calls is text": (writing(f"{{{{ name }}}}{JSON}!"), "writes"),
    },
)
def test_a_form_that_is_not_known_stops_the_start(renderer, fault):
    how = "(with one of gpt-.*none:|to serve it so)"
    with pytest.raises(UnknownFormError, match=rf"{fault}.*--parser {how}"):
        parser_of(renderer)


async def test_a_template_that_shows_no_tools(start):
    renderer = byte_renderer("{{ messages[0].content }}")
    assert form_of(renderer) is None
    session = await (await start("a", renderer=renderer)).open()
    await session.ask(tools=[function(a="integer")])
    assert (await session.shown())["ignored"] == {"tools": 1}
    # the command names every form
    assert set(FORMS) <= set(re.findall(r"[\w-]+", EngineOptions.__doc__))


def test_what_is_around_every_text_is_no_text():
    text = "<|im_start|>assistant\nYes. "
    parser = parser_of(byte_renderer(HEADLESS))
    assert parser.read(text, None, opened=False).text == "Yes. "


@cases(
    "before, after, tags",
    {
        "a name in the tag": ("<|channel>thought\n", "\n<channel|>", True),
        "brackets": ("[THINK]", "[/THINK]", True),
        "without a first one": ("", "[BEGIN]", True),
        "no tags": ("", "\n", False),
    },
)
async def test_reasoning_in_the_tags_of_the_template(start, before, after, tags):
    thought = f"{before}{{{{ message.reasoning_content }}}}{after}"
    thought = f"{{% if message.reasoning_content %}}{thought}{{% endif %}}"
    renderer = writing("<call>" + JSON, thought + "{{ message.content }}")
    own = (before.strip(), after.strip()) if tags else TAGS
    assert tags_of(renderer) == own
    # the prompt opens it
    renderer = byte_renderer(renderer.chat_template + own[0] + "\n")
    call = json.dumps({"name": "f", "arguments": {"a": 1}})
    gateway = await start(f"hm\n{own[1]}<call>{call}", renderer=renderer)
    message = await (await gateway.open()).ask(USER, tools=[function(a="integer")])
    assert (message["reasoning_content"], message["content"]) == ("hm", "")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 1}


# Hermes


def call(name="bash"):
    return sampled_call(name, "{}")


ORDERED = (
    '<tool_call>{"arguments":{"x":"</tool_call>"},"id":[1],"name":"f"}</tool_call>'
)


@cases(
    "text, shown, calls",
    {
        "an escaped name": (call("café"), "", "café"),
        "an end in a string, and fields in another order": (ORDERED, "", "f"),
        "a marker that opens none": (f"<tool_call> {call()}", "<tool_call> ", "bash"),
        "white space beside a broken call is kept": (
            f"{call('a')}\n<tool_call>no\n{call('b')}",
            *("\n<tool_call>no\n", "ab"),
        ),
    },
)
def test_text_around_calls(text, shown, calls):
    parsed = parse_reply(text)
    assert (parsed.text, parsed.ill_formed) == (shown, bool(shown))
    assert "".join(each.name for each in parsed.calls) == calls


@cases(
    "text, opened, reasoning, rest",
    {
        "none": ("hello", False, None, "hello"),
        "some": ("<think>\nhm \n</think>\n\n a\n", False, "hm", " a\n"),
        "nothing else": (" <think>hm</think>", False, "hm", ""),
        "empty": ("<think>\n\n</think>\n\na", False, None, "a"),
        "cut": ("<think>hm, <tool_call>", False, "hm, <tool_call>", ""),
        "late": ("a <think>b</think>", False, None, "a <think>b</think>"),
        "opened by the prompt": ("hm\n</think>\n\na", True, "hm", "a"),
        "opened and never closed": ("hm", True, "hm", ""),
        "closed at once": ("</think>a</think>b", True, None, "a</think>b"),
    },
)
@pytest.mark.parametrize("tools", [None, []])
def test_reasoning(text, opened, reasoning, rest, tools):
    parsed = parse_reply(text, tools, opened=opened)
    assert (parsed.reasoning, parsed.text) == (reasoning, rest)


# Values without quotes


def function(**kinds):
    properties = {key: {"type": kind} for key, kind in kinds.items()}
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


def coder(value, key="a"):
    return (
        f"<tool_call>\n<function=f>\n<parameter={key}>\n{value}\n</parameter>\n"
        "</function>\n</tool_call>"
    )


@cases(
    "schema, written, value",
    {
        "a number as a string": ({"type": "string"}, "42", "42"),
        "white space": ({"type": "string"}, " a\n ", " a\n "),
        "quotes": ({"type": "string"}, '"a"', '"a"'),
        "nothing": ({"type": "string"}, "", ""),
        "an integer": ({"type": "integer"}, "42", 42),
        "a number in the place of an integer": ({"type": "integer"}, "4.0", 4.0),
        "no integer": ({"type": "integer"}, "four", "four"),
        "no JSON": ({"type": "number"}, "NaN", "NaN"),
        "as Python writes it": ({"type": "boolean"}, "True", True),
        "as JSON writes it": ({"type": "boolean"}, "false", False),
        "no boolean": ({"type": "boolean"}, "1", "1"),
        "a list": ({"type": "array"}, "[1, {}]", [1, {}]),
        "a list in the place of an object": ({"type": "object"}, "[1]", "[1]"),
        "a list as in Python": ({"type": "array"}, "[{'b': True}]", [{"b": True}]),
        "too deep a list": ({"type": "array"}, "[" * 100_000, "[" * 100_000),
        "no list": ({"type": "array"}, "{'a'}", "{'a'}"),
        "one of two types": ({"type": ["integer", "null"]}, "None", None),
        "a string or null": ({"type": ["string", "null"]}, "null", None),
        "unknown, a number": ({"type": None}, "42", "42"),
        "unknown, an object": ({"type": None}, '{"b":  1}', {"b": 1}),
        "too deep": ({"type": None}, "[" * 100_000, "[" * 100_000),
        "an end that is none": ({"type": "string"}, "</parameter> x", "</parameter> x"),
        "enum": ({"enum": [1, 2]}, "1", 1),
        "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, "1", 1),
        "unknown anyOf": ({"anyOf": [{"$ref": "#/x"}]}, "1", "1"),
    },
)
def test_values_without_quotes(schema, written, value):
    tool = function(a=None)
    tool["function"]["parameters"]["properties"]["a"] = schema
    (found,) = parse_reply(coder(written), [tool], FORMS["qwen3-coder"]).calls
    assert json.loads(found.arguments)["a"] == value


# Calls that are off, or none

INSIDE = [
    *("", "bash ls", '["name"]', "{}", '{"arguments": {}}', '{"name" "f"}'),
    *('{"name": "", "arguments": {}}', '{"name": 3, "arguments": {}}'),
    *('{"name": "f", "arguments": "{}"}', '{"name": "f", "arguments": [1]}'),
    '{"name": "f", "arguments": {"a": 1}',
    '{"name": "f", "arguments": {"a": }}',
    *('{"name": "f", "name": "g"}', '{"name": "f"} {"name": "g"}', '{"name": "f",}'),
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": ' + "[" * 100_000,
]
TAG = "<tool_call>%s</tool_call>"
INVOCATION = '<invoke name="f"></invoke></minimax:tool_call>'
PAIR = "<arg_key>a</arg_key><arg_value>1</arg_value>"
BROKEN = {
    "hermes": [
        '<tool_call>\n{"name": "bash", "arguments": {}}\n',
        *('{"name": "f"}\n</tool_call>', TAG % '{"name": "f", "args": {"a": 1}}'),
        *(f"<tool_call>{inside}</tool_call>" for inside in INSIDE),
    ],
    "qwen3-coder": [
        "<tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=f></tool_call>",
        "<tool_call><function=f></function>",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        coder("1").replace("</function>", "<parameter=a>2</parameter></function>"),
        coder("1", key=""),
    ],
    "glm": [
        "<tool_call>f",
        "<tool_call>f\ng\n</tool_call>",
        "<tool_call>f<arg_key>a</arg_key></tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>",
        "<tool_call>f<arg_key></arg_key><arg_value>1</arg_value></tool_call>",
        f"<tool_call>f{PAIR * 2}</tool_call>",
        *(TAG % '{"name": "f"}', f"{PAIR}</tool_call>"),
    ],
    "minimax": [INVOCATION],
    "kimi": ["<|tool_call_begin|>f:0<|tool_call_end|><|tool_calls_section_end|>"],
    "plain-json": [
        *('{"name": "f"}', '{"name"}', '{"name": "", "parameters": {}}'),
        *('{"name": "f", "parameters": [1]}', '{"name": "f", "parameters": {}'),
        '{"name": "f", "parameters": {}, "arguments": {}}',
    ],
}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        pytest.param(form, text, id=f"{form} {i}")
        for form, texts in BROKEN.items()
        for i, text in enumerate(texts)
    ],
)
def test_what_does_not_read_as_a_call_stays_as_it_is(form, text):
    parsed = parse_reply(f"so: {text} \n", (), FORMS[form])
    assert (parsed.parts, parsed.ill_formed) == ((f"so: {text} \n",), True)


@cases(
    "form, text",
    {
        "no name": ("glm", "<tool_call>{}</tool_call>"),
        "keys": ("glm", "<tool_call>f<arg_key>a{}</tool_call>"),
        "values": ("qwen3-coder", "<tool_call><function=f>{}</tool_call>"),
    },
)
@pytest.mark.parametrize("repeated", [" ", "</arg_key><arg_value>x", "<parameter=a>"])
def test_the_time_for_a_call_that_does_not_read_is_linear(form, text, repeated):
    # quadratic time would exceed the limit of a test
    assert FORMS[form].read(text.format(repeated * 300_000), 0, []) is None


NAMED = '"name": "f", "parameters": {"a": 1}}'
UNTAGGED = coder("1").removeprefix("<tool_call>\n")
ONE = '{"a": 1}'
LINE = '<parameter name="a">x\n</parameter>'
ENDS_LINE = f"<minimax:tool_call>{INVOCATION.replace('></', f'>{LINE}</', 1)}"
Q, GEMMA = '<|"|>', "<|tool_call>call:f{a:%s}<tool_call|>"
OWN = '{"a":"b{c: \'d\'","e":[null,{"f":1}]}'
ESCAPED = "<start_function_call>call:f{a:<escape>1<escape>}<end_function_call>"
NOBODY = "<|channel|>commentary<|message|>{}<|call|>"


@cases(
    "form, written, arguments",
    {
        "another family's key": ("hermes", TAG % ("{" + NAMED), ONE),
        "no arguments": ("hermes", TAG % '{"name": "f"}', "{}"),
        "with a type": ("plain-json", '{"type": "function", ' + NAMED, ONE),
        "behind a tag": ("plain-json", "<|python_tag|>{" + NAMED, ONE),
        "no call": ("plain-json", '{"a": 1}', ""),
        "without its first tag": ("qwen3-coder", UNTAGGED, ONE),
        "a call of nobody": ("gpt-oss", NOBODY, None),
        "Python without a name": ("pythonic", "[f(1)]", None),
        "Python that is no value": ("pythonic", "[f(a=g())]", None),
        "Python too deep": ("pythonic", f"[f(a={'-' * 100_000}1)]", None),
        "Python that is no name": ("pythonic", "[f(a=1) - g(a=1)]", None),
        "a name with hyphens": ("pythonic", "[f-g.h-i(a=1)]", ONE),
        "JSON's names": ("pythonic", "[f(a=[true, null])]", '{"a": [true, null]}'),
        "half a character": ("pythonic", "[f(a='\\ud83d')]", r'{"a": "\ud83d"}'),
        "its own quotes": ("gemma", GEMMA % f"{Q}b{{c: 'd'{Q},e:[None,{{f:1}}]", OWN),
        "no quotes": ("gemma", GEMMA % "b c", None),
        "a list of its own": ("gemma", "<|tool_call>call:f[]<tool_call|>", None),
        "a number in quotes": ("function-gemma", ESCAPED, '{"a":"1"}'),
        "Python in tags": ("lfm", "<|tool_call_start|>[f(a=1)]<|tool_call_end|>", ONE),
        "Python without its end": ("lfm", "<|tool_call_start|>[f(a=1)]", None),
        "the end of a line": ("minimax", ENDS_LINE, r'{"a": "x\n"}'),
    },
)
def test_calls_that_are_slightly_off(form, written, arguments):
    lead = "I look.\n" if form == "qwen3-coder" else ""
    parsed = parse_reply(lead + written, [function(a="integer")], FORMS[form])
    assert parsed.ill_formed == (arguments is None)
    found = [each.arguments for each in parsed.calls]
    assert found == ([arguments] if arguments else [])
    assert parsed.text == lead + ("" if arguments else written)


# Grammars of required replies, compared with structural tags written by hand

SCHEMA = {"type": "object", "properties": {"n": {"type": "number"}}}
ANY = {"type": "object"}
TWO_TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": SCHEMA}}
    for name in ("f", "g")
]
TEXT = {"type": "json_schema", "json_schema": SCHEMA}
ANY_JSON = {"type": "json_schema", "json_schema": {}}
GAP = {"type": "regex", "pattern": "\\n{0,2}"}
ANYTHING = {"type": "any_text"}


def tag(name, schema=ANY):
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    }


def made(*, tools=TWO_TOOLS, form=FORMS["hermes"], pins=(), **required):
    how = {name: required.pop(name, False) for name in ("opened", "reasons")}
    how["around"] = required.pop("around", TAGS)
    return grammar(Required(**required), tools, form, dict.fromkeys(pins), **how)


def tags(kind, given, one, **fields):
    return {"type": kind, "tags": [*given], "stop_after_first": one, **fields}


def forced(*given, one=False):
    fields = {"separator": "\n", "at_least_one": True}
    return tags("tags_with_separator", given, one, **fields)


def free(*given, one=False):
    return tags("triggered_tags", given, one, triggers=["<tool_call>"])


def either(*given):
    return {"type": "or", "elements": [*given]}


F, G = tag("f"), tag("g")
EITHER = forced(F, G)


@cases(
    "required, wanted",
    {
        "a call": ({"call": True}, EITHER),
        "a call of g": ({"call": True, "names": ("g",)}, forced(G)),
        "calls of g only": ({"names": ("g",)}, free(G)),
        "one at most": ({"parallel": False}, free(F, G, one=True)),
        "exactly one": ({"call": True, "parallel": False}, forced(F, G, one=True)),
        "strict f": ({"strict": ("f",)}, free(tag("f", SCHEMA), G)),
        "a schema or calls": ({"schema": SCHEMA}, either(TEXT, EITHER)),
        "any JSON or calls": ({"schema": {}}, either(ANY_JSON, EITHER)),
        "a schema and a call": ({"schema": SCHEMA, "call": True}, EITHER),
        "a schema": ({"schema": SCHEMA, "tools": None}, TEXT),
        "nothing": ({"pins": ["regex"]}, None),
        "one call of none": ({"parallel": False, "tools": None}, None),
    },
)
def test_the_reply(required, wanted):
    found = {"type": "structural_tag", "format": wanted} if wanted else None
    assert made(**required) == found


def test_reasoning_comes_first():
    around = "[THINK]", "[/THINK]"
    inside = {"type": "tag", "begin": "", "content": ANYTHING, "end": around[1]}
    own = {**inside, "begin": "<think>", "end": "</think>"}
    opened = made(schema=SCHEMA, tools=None, opened=True, reasons=True, around=around)
    assert opened["format"] == {"type": "sequence", "elements": [inside, GAP, TEXT]}
    reasons = made(schema=SCHEMA, tools=None, reasons=True)
    optional = {"type": "optional", "content": own}
    assert reasons["format"] == {"type": "sequence", "elements": [optional, GAP, TEXT]}


@cases(
    "case, message",
    {
        "unknown": ({"call": True, "names": ("h",)}, "the tool 'h' is required"),
        "none": ({"call": True, "tools": None}, "a tool is required"),
        "only allowed": ({"names": ("f", "h")}, "the tool 'h' is allowed, which"),
        "pinned": ({"call": True, "pins": ["json_schema"]}, "fixes json_schema"),
        "no form": ({"call": True, "form": None}, "does not define how calls"),
    },
)
def test_what_is_refused(case, message):
    with raises(GatewayError, message, status=400):
        made(**case)


# The parsers of an SGLang server

# numbers and white space that no JSON library writes so
CALL = sampled_call("f", '{"n":  1.50e1}')
REPLY = f"<think>\nhm\n</think>\n\nLook.\n{CALL}"
BOTH = ("qwen25", "qwen3")
CALLS_ONLY = ("qwen25", None)


def server(**paths):
    """As real ones it drops white space and writes arguments anew (0.5.23)."""
    separated = {"reasoning_text": "hm", "text": CALL}
    called = {"normal_text": "", "calls": [{"name": "f", "parameters": '{"n": 15.0}'}]}
    found = {"separate_reasoning": separated, "parse_function_call": called, **paths}
    return Double("sglang", **found)


async def parsed(double, text, tools=TOOLS["openai_chat"], *, names=BOTH, opened=False):
    async with double.listening() as url:
        parser = SGLangParser(url, *names)
        try:
            return await parser.parse(text, tools, opened=opened)
        finally:
            await parser.close()


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        ((None, "qwen3"), ["/separate_reasoning"]),
        (CALLS_ONLY, ["/parse_function_call"]),
        (BOTH, ["/separate_reasoning", "/parse_function_call"]),
    ],
)
async def test_a_server_is_asked_for_what_it_has(names, asked):
    double = server()
    found = await parsed(double, f"hm</think>{CALL}", names=names, opened=True)
    assert [path for path, _ in double.asked] == asked
    assert (found.reasoning == "hm") == (names[1] is not None)
    assert bool(found.calls) == (names[0] is not None)
    # no tools: no calls are looked for
    double = server()
    assert (await parsed(double, CALL, None, names=names)).calls == []
    assert "/parse_function_call" not in double.counted()


@pytest.mark.parametrize("parser", [None, "qwen25"])
async def test_the_parsers_that_a_server_was_started_with(parser):
    double = Double("sglang", server_info={"tool_call_parser": parser})
    async with double.listening() as url:
        if parser is None:
            with pytest.raises(ConnectionError, match="neither --tool-call-parser"):
                await cli._own_parser(url)
        else:
            made = await cli._own_parser(url)
            assert made._names == (parser, None)


async def test_a_server_that_does_not_parse():
    refused, failed = (web.json_response({}, status=status) for status in (400, 500))
    found = await parsed(server(separate_reasoning=refused), REPLY)
    assert (found.parts, found.ill_formed) == ((REPLY,), True)
    with pytest.raises(EngineError, match="500"):
        await parsed(server(separate_reasoning=failed), REPLY)


@pytest.mark.parametrize("arguments", ["ls", "", '{"a"', "[1]", '{"a": NaN}', None])
async def test_a_call_without_an_object_as_arguments_is_text(arguments):
    calls = {"normal_text": "", "calls": [{"name": "f", "parameters": arguments}]}
    double = server(parse_function_call=calls)
    found = await parsed(double, "a call", names=CALLS_ONLY)
    assert (found.parts, found.ill_formed) == (("a call",), True)

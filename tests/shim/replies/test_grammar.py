"""Grammars of required replies, compared with structural tags written by hand."""

import pytest

from tests.shim.fakes import cases, parse_reply
from trajkit_shim.chat.request import ChatRequest, Required, SamplingParams
from trajkit_shim.errors import GatewayError
from trajkit_shim.replies.parse import grammar
from trajkit_shim.replies.parsers import FORMS

SCHEMA = {"type": "object", "properties": {"n": {"type": "number"}}}
ANY = {"type": "object"}
TOOLS = [
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


def made(*, tools=TOOLS, form=FORMS["hermes"].grammar, pins=(), **required):
    how = {name: required.pop(name, False) for name in ("opened", "reasons")}
    request = ChatRequest(
        messages=[],
        tools=tools,
        required=Required(**required),
        sampling=SamplingParams(),
        stream=False,
    )
    return grammar(request, form, dict.fromkeys(pins), **how)


def tags(kind, given, one, **fields):
    return {"type": kind, "tags": [*given], "stop_after_first": one, **fields}


def forced(*given, one=False):
    fields = {"separator": "\n", "at_least_one": True}
    return tags("tags_with_separator", given, one, **fields)


def free(*given, one=False):
    return tags("triggered_tags", given, one, triggers=["<tool_call>"])


@cases(
    "required, wanted",
    {
        "a call": ({"call": True}, forced(tag("f"), tag("g"))),
        "a call of g": ({"call": True, "names": ("g",)}, forced(tag("g"))),
        "calls of g only": ({"names": ("g",)}, free(tag("g"))),
        "one at most": ({"parallel": False}, free(tag("f"), tag("g"), one=True)),
        "exactly one": (
            {"call": True, "parallel": False},
            forced(tag("f"), tag("g"), one=True),
        ),
        "strict f": ({"strict": ("f",)}, free(tag("f", SCHEMA), tag("g"))),
        "a schema or calls": (
            {"schema": SCHEMA},
            {"type": "or", "elements": [TEXT, forced(tag("f"), tag("g"))]},
        ),
        "any JSON or calls": (
            {"schema": {}},
            {"type": "or", "elements": [ANY_JSON, forced(tag("f"), tag("g"))]},
        ),
        "a schema and a call": (
            {"schema": SCHEMA, "call": True},
            forced(tag("f"), tag("g")),
        ),
        "a schema": ({"schema": SCHEMA, "tools": None}, TEXT),
    },
)
def test_the_reply(required, wanted):
    assert made(**required) == {"type": "structural_tag", "format": wanted}


def test_no_grammar():
    assert made(pins=["regex"]) is None
    assert made(pins=["regex"], parallel=False, tools=None) is None


def test_reasoning_comes_first():
    inside = {"type": "tag", "begin": "", "content": ANYTHING, "end": "</think>"}
    own = {**inside, "begin": "<think>"}
    opened = made(schema=SCHEMA, tools=None, opened=True, reasons=True)
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
    with pytest.raises(GatewayError, match=message) as caught:
        made(**case)
    assert caught.value.status == 400


WRITTEN = {
    "hermes": '{"n": 1.5}',
    "plain-json": '{"n": 1.5}',
    "qwen3-coder": "<parameter=n>\n1.5\n</parameter>",
    "glm": "<arg_key>n</arg_key>\n<arg_value>1.5</arg_value>",
}


@pytest.mark.parametrize("name", [n for n, form in FORMS.items() if form.grammar])
def test_a_call_that_matches_its_tag_is_read(name):
    form = FORMS[name].grammar
    found = form.tag("f", SCHEMA)
    assert found["begin"].startswith(form.opens)
    text = found["begin"] + WRITTEN[name] + found["end"]
    (call,) = parse_reply(text, TOOLS, FORMS[name]).parts
    assert (call.name, call.arguments) == ("f", '{"n": 1.5}')

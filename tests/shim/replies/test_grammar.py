"""Grammars of required replies, compared with structural tags written by hand."""

import pytest

from tests.shim.fakes import parse_reply
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
GAP = {"type": "regex", "pattern": "\\n{0,2}"}
ANYTHING = {"type": "any_text"}


def tag(name, schema=ANY):
    return {
        "type": "tag",
        "begin": f'<tool_call>\n{{"name": "{name}", "arguments": ',
        "content": {"type": "json_schema", "json_schema": schema},
        "end": "}\n</tool_call>",
    }


def made(
    *,
    tools=TOOLS,
    form=FORMS["hermes"].grammar,
    opened=False,
    reasons=False,
    pins=(),
    **required,
):
    request = ChatRequest(
        messages=[],
        tools=tools,
        required=Required(**required),
        sampling=SamplingParams(),
        stream=False,
    )
    return grammar(request, form, dict.fromkeys(pins), opened=opened, reasons=reasons)


def forced(*tags, one=False):
    return {
        "type": "tags_with_separator",
        "separator": "\n",
        "tags": [*tags],
        "stop_after_first": one,
        "at_least_one": True,
    }


def free(*tags, one=False):
    return {
        "type": "triggered_tags",
        "triggers": ["<tool_call>"],
        "tags": [*tags],
        "stop_after_first": one,
    }


@pytest.mark.parametrize(
    ("required", "wanted"),
    [
        pytest.param({"call": True}, forced(tag("f"), tag("g")), id="a call"),
        pytest.param(
            {"call": True, "names": ("g",)}, forced(tag("g")), id="a call of g"
        ),
        pytest.param({"names": ("g",)}, free(tag("g")), id="calls of g only"),
        pytest.param(
            {"parallel": False}, free(tag("f"), tag("g"), one=True), id="one at most"
        ),
        pytest.param(
            {"call": True, "parallel": False},
            forced(tag("f"), tag("g"), one=True),
            id="exactly one",
        ),
        pytest.param(
            {"strict": ("f",)}, free(tag("f", SCHEMA), tag("g")), id="strict f"
        ),
        pytest.param(
            {"schema": SCHEMA},
            {"type": "or", "elements": [TEXT, forced(tag("f"), tag("g"))]},
            id="a schema or calls",
        ),
        pytest.param(
            {"schema": {}},
            {
                "type": "or",
                "elements": [
                    {"type": "json_schema", "json_schema": {}},
                    forced(tag("f"), tag("g")),
                ],
            },
            id="any JSON or calls",
        ),
        pytest.param(
            {"schema": SCHEMA, "call": True},
            forced(tag("f"), tag("g")),
            id="a schema and a call",
        ),
        pytest.param({"schema": SCHEMA, "tools": None}, TEXT, id="a schema"),
    ],
)
def test_the_reply(required, wanted):
    assert made(**required) == {"type": "structural_tag", "format": wanted}


@pytest.mark.parametrize(
    "required",
    [
        pytest.param({}, id="nothing"),
        pytest.param({"parallel": False, "tools": None}, id="one call, no tools"),
    ],
)
def test_no_grammar(required):
    assert made(**required, pins=["regex"]) is None


def test_reasoning_comes_first():
    inside = {"type": "tag", "begin": "", "content": ANYTHING, "end": "</think>"}
    own = {**inside, "begin": "<think>"}
    opened = made(schema=SCHEMA, tools=None, opened=True, reasons=True)
    assert opened["format"] == {"type": "sequence", "elements": [inside, GAP, TEXT]}
    reasons = made(schema=SCHEMA, tools=None, reasons=True)
    optional = {"type": "optional", "content": own}
    assert reasons["format"] == {"type": "sequence", "elements": [optional, GAP, TEXT]}


@pytest.mark.parametrize(
    ("case", "message"),
    [
        pytest.param(
            {"call": True, "names": ("h",)}, "the tool 'h' is required", id="unknown"
        ),
        pytest.param({"call": True, "tools": None}, "a tool is required", id="none"),
        pytest.param(
            {"names": ("f", "h")}, "the tool 'h' is allowed, which", id="only allowed"
        ),
        pytest.param(
            {"call": True, "pins": ["json_schema"]}, "fixes json_schema", id="pinned"
        ),
        pytest.param(
            {"call": True, "form": None}, "does not define how calls", id="no form"
        ),
    ],
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

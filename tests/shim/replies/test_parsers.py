"""The forms of tool calls: what a template renders is read again, and nothing gets lost."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import Environment

from tests.shim.clients import in_process
from tests.shim.fakes import ScriptedEngine, byte_renderer, cases, parse_reply
from tests.strategies import call_shards, typed_calls
from trajkit_shim.cli import EngineOptions
from trajkit_shim.replies import FORMS, FormParser, UnknownFormError, form_of

# How the chat templates of each family write the calls of a message. `tojson` is that of
# transformers: keys as they are, nothing escaped for HTML.
TEMPLATES = {
    "hermes": """\
{% for call in calls %}{{ "\\n" if not loop.first }}<tool_call>
{"name": "{{ call.name }}", "arguments": {{ call.arguments | tojson }}}
</tool_call>{% endfor %}""",
    "plain-json": """\
{% for call in calls %}{{ "\\n" if not loop.first -}}
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}
{%- endfor %}""",
    "qwen3-coder": """\
{% for call in calls %}{{ "\\n" if not loop.first }}<tool_call>
<function={{ call.name }}>
{% for key, value in call.arguments.items() %}<parameter={{ key }}>
{{ value | tojson if value is mapping or (value is sequence and value is not string)
   else value | string }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}""",
    "glm": """\
{% for call in calls %}{{ "\\n" if not loop.first }}<tool_call>{{ call.name }}
{% for key, value in call.arguments.items() %}<arg_key>{{ key }}</arg_key>
<arg_value>{{ value if value is string else value | tojson }}</arg_value>
{% endfor %}</tool_call>{% endfor %}""",
}
forms = st.sampled_from(sorted(TEMPLATES))


def tojson(value):
    return json.dumps(value, ensure_ascii=False)


ENVIRONMENT = Environment()
ENVIRONMENT.filters["tojson"] = tojson


def rendered(form, calls):
    template = ENVIRONMENT.from_string(TEMPLATES[form])
    return template.render(calls=[{"name": n, "arguments": a} for n, a in calls])


@given(
    forms,
    st.lists(typed_calls(), min_size=1, max_size=3),
    st.sampled_from(["", "é. \n"]),
)
def test_a_rendered_call_is_read_again(form, made, lead):
    by_name = {name: tool for tool, name, _ in made}
    calls = [
        (name, arguments) for tool, name, arguments in made if by_name[name] is tool
    ]
    text = lead + rendered(form, calls)
    parsed = parse_reply(text, [*by_name.values()], FORMS[form])
    read = [(call.name, json.loads(call.arguments)) for call in parsed.calls]
    assert read == calls
    assert parsed.text == lead
    assert not parsed.ill_formed


@given(forms, st.lists(call_shards, max_size=12))
def test_no_text_is_lost(form, shards):
    """All that is not a call, or white space between two, is in the text."""
    # it does not begin with reasoning
    text = "".join(["a", *shards])
    parsed = parse_reply(text, (), FORMS[form])
    assert parsed.sampled == text
    at = 0
    for part in parsed.parts:
        if isinstance(part, str):
            at = text.index(part, at) + len(part)
        else:
            json.loads(part.arguments)
            at = FORMS[form].starts.search(text, at).end()
    if not parsed.calls:
        assert parsed.text == text
        assert parsed.ill_formed == bool(FORMS[form].starts.search(text))


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
    "kind, written, value",
    {
        "a number as a string": ("string", "42", "42"),
        "white space": ("string", " a\n ", " a\n "),
        "quotes": ("string", '"a"', '"a"'),
        "nothing": ("string", "", ""),
        "an integer": ("integer", "42", 42),
        "a number in the place of an integer": ("integer", "4.0", 4.0),
        "no integer": ("integer", "four", "four"),
        "no JSON": ("number", "NaN", "NaN"),
        "as Python writes it": ("boolean", "True", True),
        "as JSON writes it": ("boolean", "false", False),
        "no boolean": ("boolean", "1", "1"),
        "a list": ("array", "[1, {}]", [1, {}]),
        "a list in the place of an object": ("object", "[1]", "[1]"),
        "one of two types": (["integer", "null"], "None", None),
        "a string or null": (["string", "null"], "null", None),
        "unknown, a number": (None, "42", "42"),
        "unknown, an object": (None, '{"b":  1}', {"b": 1}),
        "too deep": (None, "[" * 100_000, "[" * 100_000),
        "an end that is none": ("string", "</parameter> x", "</parameter> x"),
    },
)
def test_values_without_quotes(kind, written, value):
    tools = [function(a=kind)]
    (call,) = parse_reply(coder(written), tools, FORMS["qwen3-coder"]).calls
    assert json.loads(call.arguments) == {"a": value}


@cases(
    "schema, value",
    {
        "enum": ({"enum": [1, 2]}, 1),
        "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, 1),
        "unknown": ({"anyOf": [{"$ref": "#/x"}]}, "1"),
        "anything": (True, "1"),
    },
)
def test_types_that_a_schema_says_in_other_words(schema, value):
    tool = function()
    tool["function"]["parameters"]["properties"]["a"] = schema
    (call,) = parse_reply(coder("1"), [tool], FORMS["qwen3-coder"]).calls
    assert json.loads(call.arguments) == {"a": value}


BROKEN = {
    "hermes": [
        '<tool_call>\n{"name": "bash", "arguments": {}}\n',
        *(
            f"<tool_call>{inside}</tool_call>"
            for inside in (
                *("", "bash ls", '["name"]', "{}", '{"arguments": {}}'),
                '{"name": "", "arguments": {}}',
                '{"name": 3, "arguments": {}}',
                '{"name": "f", "arguments": "{}"}',
                '{"name": "f", "arguments": [1]}',
                '{"name": "f", "arguments": {"a": 1}',
                '{"name": "f", "arguments": {"a": }}',
                '{"name": "f", "name": "g"}',
                '{"name": "f"} {"name": "g"}',
                '{"name": "f",}',
                '{"name": "f", "arguments": {"a": NaN}}',
                '{"name" "f"}',
                '{"name": "f", "arguments": ' + "[" * 100_000,
            )
        ),
    ],
    "qwen3-coder": [
        "<tool_call>",
        "<tool_call>{}</tool_call>",
        "<tool_call><function=></function></tool_call>",
        "<tool_call><function=f</tool_call>",
        "<tool_call><function=f></tool_call>",
        "<tool_call><function=f></function>",
        "<tool_call><function=f><parameter=a>1</function></tool_call>",
        coder("1").replace("</function>", "<parameter=a>2</parameter></function>"),
        coder("1", key=""),
    ],
    "glm": [
        "<tool_call></tool_call>",
        "<tool_call>f",
        "<tool_call>f\ng\n</tool_call>",
        "<tool_call>f<arg_key>a</arg_key></tool_call>",
        "<tool_call>f<arg_key>a</arg_key><arg_value>1</tool_call>",
        "<tool_call>f<arg_key></arg_key><arg_value>1</arg_value></tool_call>",
        "<tool_call>f"
        + "<arg_key>a</arg_key><arg_value>1</arg_value>" * 2
        + "</tool_call>",
    ],
    "plain-json": [
        '{"name": "f"}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": {}, "arguments": {}}',
        '{"name": "f", "parameters": {}',
        '{"name": "", "parameters": {}}',
        '{"name"}',
    ],
}


@pytest.mark.parametrize(
    ("form", "text"),
    [
        pytest.param(form, text, id=f"{form} {i}")
        for form in BROKEN
        for i, text in enumerate(BROKEN[form])
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


@pytest.mark.parametrize("name", sorted(TEMPLATES))
def test_a_template_names_its_form(name):
    written = (
        TEMPLATES[name].replace('"', '\\"') if name == "plain-json" else TEMPLATES[name]
    )
    renderer = byte_renderer()
    renderer.chat_template = written
    assert form_of(renderer) is FORMS[name]


def test_a_template_of_no_known_form():
    plain = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    assert form_of(byte_renderer(plain)) is None
    offers = "{{ tools | tojson if tools }}" + plain
    with pytest.raises(UnknownFormError, match=r"--parser with one of gpt-oss.*none:"):
        form_of(byte_renderer(offers))


def test_the_command_names_every_form():
    words = re.findall(r"[\w-]+", EngineOptions.__doc__)
    assert set(FORMS) <= set(words)


def test_a_call_without_its_first_tag():
    text = coder("1").removeprefix("<tool_call>\n")
    parsed = parse_reply(
        f"I look.\n{text}", [function(a="integer")], FORMS["qwen3-coder"]
    )
    ((call,), said) = parsed.calls, parsed.text
    assert (call.arguments, said) == ('{"a": 1}', "I look.\n")


@cases(
    "form, written, arguments",
    {
        "another family's key": (
            "hermes",
            '<tool_call>{"name": "f", "parameters": {"a": 1}}</tool_call>',
            '{"a": 1}',
        ),
        "no arguments": ("hermes", '<tool_call>{"name": "f"}</tool_call>', "{}"),
        "an unknown key": (
            "hermes",
            '<tool_call>{"name": "f", "args": {"a": 1}}</tool_call>',
            None,
        ),
        "with a type": (
            "plain-json",
            '{"type": "function", "name": "f", "parameters": {"a": 1}}',
            '{"a": 1}',
        ),
        "behind a tag": (
            "plain-json",
            '<|python_tag|>{"name": "f", "parameters": {"a": 1}}',
            '{"a": 1}',
        ),
        "no call": ("plain-json", '{"a": 1}', ""),
        "Python": ("pythonic", "[f(a=1)]", '{"a": 1}'),
        "Python without a name": ("pythonic", "[f(1)]", None),
        "Python that is no value": ("pythonic", "[f(a=g())]", None),
    },
)
def test_calls_that_are_slightly_off(form, written, arguments):
    parsed = parse_reply(written, [], FORMS[form])
    assert parsed.ill_formed == (arguments is None)
    assert [call.arguments for call in parsed.calls] == (
        [arguments] if arguments else []
    )
    assert arguments or parsed.text == written


@pytest.mark.anyio
async def test_the_gateway_reads_the_form_of_its_template(tmp_path):
    template = byte_renderer().chat_template + "{# <function= <parameter= #}"
    tool = function(a="integer")
    for options in ({}, {"reply_parser": FormParser(FORMS["hermes"])}):
        engine = ScriptedEngine(coder("1"))
        async with in_process(
            engine, byte_renderer(template), tmp_path / str(len(options)), **options
        ) as gateway:
            client = await gateway.open()
            reply = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "a"}], tools=[tool]
            )
        message = reply.choices[0].message
        if options:
            assert message.content == coder("1")
        else:
            (call,) = message.tool_calls
            assert json.loads(call.function.arguments) == {"a": 1}

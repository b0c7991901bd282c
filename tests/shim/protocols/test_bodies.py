"""Bodies of requests in each protocol: as which chat they are read, and what is refused."""

import gc
import json
import re
import weakref
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.shim.clients import BODIES, BY_NAME, FIELDS, USER
from tests.shim.fakes import TOOL, called, cases, raises, said, tool, user
from trajkit_shim import json_input
from trajkit_shim.errors import GatewayError

OBJECT = {"type": "object"}
CALL = called("1", "f", '{"é": 1}')
A = "a" * 32


def read(name, body, *given):
    return BY_NAME[name].read({**BODIES[name], **body}, *given)


def messages(*given):
    return {"messages": [*given]}


def part(**fields):
    return messages({"role": "user", "content": [fields]})


def thought(**fields):
    return messages({"role": "assistant", "content": [fields]}, USER)


def contents(*given):
    return {"contents": [*given]}


def turn(*parts, role="user"):
    shown = [{"text": one} if isinstance(one, str) else one for one in parts]
    return {"role": role, "parts": shown}


def text(shown, kind="input_text"):
    return [{"type": kind, "text": shown}]


def items(*given):
    return {"input": [*given]}


def item(what="x", **fields):
    return {"role": "assistant", "content": text(what, "output_text"), **fields}


def call(**fields):
    given = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}
    return {**given, **fields}


def reasoning(**fields):
    return {"type": "reasoning", "id": "rs_1", "summary": [], **fields}


def result(name, **fields):
    return {"type": "tool_result", "tool_use_id": name, **fields}


def function_call(name, **fields):
    return {"functionCall": {"name": name, **fields}}


def response(name, given):
    return {"functionResponse": {"name": name, "response": given}}


MARKED = {"cache_control": {"type": "ephemeral"}}
BILLING = "x-anthropic-billing-header: cc_version=2.1; x=y;"
F = "{"
# protocol, body, and the messages that it is read as
READ = [
    ("openai_chat", messages({"role": "developer", "content": "be"}), [
        {"role": "system", "content": "be"}]),
    ("openai_chat", messages(
        {"role": "user", "content": [*text("a", "text"), *text("b", "text")],
         "name": "ann"}), [{**user("a\nb"), "name": "ann"}]),
    ("openai_chat", messages({**user("a"), **MARKED}), [user("a")]),
    ("openai_chat", messages(tool("1", "")), [tool("1", "")]),
    ("openai_chat", messages(
        said(None, refusal=None, annotations=[], audio=None, function_call=None,
             provider_specific_fields={"a": 1}, tool_calls=[{**CALL, "index": 0}])),
     [said("", tool_calls=[CALL])]),
    ("openai_chat", messages({"role": "assistant", "tool_calls": []}), [said("")]),
    ("openai_chat", messages(
        said("", reasoning_content="hm",
             tool_calls=[{"id": "", "function": {"name": "f"}}])),
     [said("", reasoning_content="hm", tool_calls=[called("", "f", "")])]),
    ("openai_chat", messages(said("a", reasoning="hm")),
     [said("a", reasoning_content="hm")]),
    # as Claude Code asks
    ("anthropic", {
        "model": "claude-opus-4-8",
        "system": [{"type": "text", "text": BILLING},
                   {"type": "text", "text": "be", **MARKED}, *text("brief", "text")],
        "messages": [
            user([*text("context", "text"), {"type": "text", "text": "do", **MARKED}]),
            {"role": "system", "content": text("late", "text")}],
        "metadata": {"user_id": "{}"}, "thinking": {"type": "adaptive"},
        "context_management": {"edits": []}, "output_config": {"effort": "high"},
        "stream": True},
     [{"role": "system", "content": "be\nbrief"}, user("context\ndo"),
      {"role": "system", "content": "late"}]),
    ("anthropic", messages(
        said([
            {"type": "thinking", "thinking": "hm", "signature": "s"},
            {"type": "thinking", "thinking": ", so", "signature": "s"},
            *text("", "text"), *text("a", "text"),
            {"type": "tool_use", "id": "1", "name": "f", "input": {"é": 1}},
            *text("b", "text")]),
        user([result("1", content="x", is_error=True),
              result("2", content=text("and", "text") * 2, is_error=False),
              result("3"), *text("and your role", "text")])),
     [said("ab", reasoning_content="hm, so", tool_calls=[CALL]),
      tool("1", "x", is_error=True), tool("2", "and\nand"), tool("3", ""),
      user("and your role")]),
    # as Codex asks
    ("openai_responses", {
        **items(
            {"type": "message", "id": "msg_ad35246c-f054-5fad-a2f7-f71f3bb6f90b",
             "role": "developer", "content": [*text("a"), *text("b")]},
            {"type": "message", "role": "user", "content": text("do")}),
        "model": "m", "stream": True, "tool_choice": "auto", "store": False,
        "parallel_tool_calls": True, "reasoning": {"summary": "auto"},
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k",
        "client_metadata": {"thread_id": "t"}},
     [{"role": "system", "content": "a\nb"}, user("do")]),
    ("openai_responses", items(item(), call(), call()),
     [said("x", tool_calls=[called("c", "f", F)] * 2)]),
    ("openai_responses", items(call(id=f"fc_{A}_0"), item("y", id=f"msg_{A}_1")),
     [said("y", tool_calls=[called("c", "f", F)])]),
    ("openai_responses", items(item(), reasoning(), item("y")), [said("x"), said("y")]),
    ("openai_responses", items(item(), user("u"), item("y")),
     [said("x"), user("u"), said("y")]),
    *(("openai_responses", items(reasoning(**fields), call()),
       [said("", reasoning_content="hm", tool_calls=[called("c", "f", F)])])
      for fields in (
        {"content": text("hm", "reasoning_text")},
        {"encrypted_content": "trajkit1.aG0=", "content": None})),
    ("openai_responses", items(call(namespace="n")),
     [said("", tool_calls=[called("c", "n__f", F)])]),
    # calls without ids keep their results
    ("gemini", contents(
        turn("hi"),
        turn(function_call("f", args={}), function_call("g"), function_call("f"),
             role="model"),
        turn(response("g", {"output": "1"}), response("f", {"result": "2"}),
             response("f", {"error": "3"}), "and"),
        turn(function_call("f"), role="model"),
        turn(response("f", {"a": 1, "é": []}))),
     [user("hi"),
      said("", tool_calls=[called("f-1", "f"), called("g-2", "g"), called("f-3", "f")]),
      tool("g-2", "1"), tool("f-1", "2"), tool("f-3", "3", is_error=True), user("and"),
      said("", tool_calls=[called("f-1", "f")]), tool("f-1", '{"a": 1, "é": []}')]),
    ("gemini", {"systemInstruction": {"parts": [{"text": "be"}]}, **contents(turn("a"))},
     [{"role": "system", "content": "be"}, user("a")]),
    ("gemini", {"system_instruction": turn("be"), **contents(
        turn({"function_call": {"name": "f", "args": {"my_arg": 1}}}, role="model"),
        turn({"function_response": {"name": "f", "response": {"an_error": ""}}}))},
     [{"role": "system", "content": "be"},
      said("", tool_calls=[called("f-1", "f", '{"my_arg": 1}')]),
      tool("f-1", '{"an_error": ""}')]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body", "expected"), READ)
def test_the_messages_of_a_body(name, body, expected):
    assert read(name, body).messages == expected
    # canonical messages stay as they are
    if name == "openai_chat":
        assert read(name, {"messages": expected}).messages == expected


def test_a_request_in_full_and_in_short():
    asked = {"max_tokens": 7, "temperature": 0.5, "top_p": 1, "top_k": 20, "seed": -3}
    # of no effect, and not counted
    off = {"n": 1, "frequency_penalty": 0.0, "logit_bias": None, "user": "someone"}
    off |= {"response_format": {"type": "text"}, "tool_choice": "auto", "model": "any"}
    more = {"max_completion_tokens": 7, "stop": "\n", "stream": True, "tools": [TOOL]}
    streams = {"stream_options": {"include_usage": True}}
    request = read("openai_chat", asked | off | more | streams)
    assert (request.tools, request.ignored) == ([TOOL], {})
    assert request.sampling == {**asked, "stop": ("\n",)}
    assert (request.stream, request.include_usage) == (True, True)
    for body in ({"tools": []}, {"tools": [TOOL], "tool_choice": "none"}):
        request = read("openai_chat", body)
        assert (request.tools, request.sampling) == (None, {})
        assert (request.stream, request.include_usage) == (False, False)


def test_a_schema_in_google_s_words():
    def schema(of_object, of_string):
        inner = {"type": {"type": of_string}}
        return {"type": of_object, "properties": inner, "enum": ["STRING"]}

    function = {"name": "f", "parameters": schema("OBJECT", "STRING")}
    tools = [{"functionDeclarations": [function]}, {"googleSearch": {}}]
    request = read("gemini", {"tools": tools})
    parameters = request.tools[0]["function"]["parameters"]
    assert parameters == schema("object", "string")
    assert request.ignored == {"tools[].googleSearch": 1}


CHOICE = "tool_choice"
CONFIG = "generationConfig"
CALLING = "toolConfig.functionCallingConfig"
# by protocol: a body, and the parameter that the error names
REFUSED = {
    "openai_chat": [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (messages(user(3)), "messages[0].content"),
        (part(type="image_url"), "messages[0].content[0].image_url"),
        (messages({"role": "tool", "content": ""}), "messages[0].tool_call_id"),
        (messages(said("", tool_calls=[called("1", "f", {})])),
         "messages[0].tool_calls[0].function.arguments"),
        (messages(said("", tool_calls=[{"id": "x"}])),
         "messages[0].tool_calls[0].function"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({CHOICE: {"type": "function"}}, "tool_choice.name"),
        ({"n": 0}, "n"), ({"n": 2}, "n"), ({"n": True}, "n"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {}}, "response_format.type"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"model": 3}, "model"), ({"stream": "yes"}, "stream"),
        ({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 1.0}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"), ({"temperature": True}, "temperature"),
        ({"temperature": 2.1}, "temperature"), ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"top_k": 0}, "top_k"), ({"top_k": -2}, "top_k"),
        ({"stop": ""}, "stop"), ({"stop": ["a", ""]}, "stop[1]"), ({"stop": 3}, "stop"),
        ({"seed": 2**63}, "seed"),
    ],
    "anthropic": [
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"), ({"messages": [3]}, "messages[0]"),
        (messages({"role": "system"}), "messages"),
        (part(type="image"), "messages[0].content[0].source"),
        (part(type="document", source={"type": "text", "data": "x"}),
         "messages[0].content[0].type"),
        (thought(type="tool_use", id="1", name="f", input="{}"),
         "messages[0].content[0].input"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "f", "input_schema": {}, "strict": 1}]}, "tools[0].strict"),
        ({CHOICE: {"type": "tool"}}, "tool_choice.name"),
        ({CHOICE: {"type": "required"}}, "tool_choice.type"),
        ({"stop_sequences": [""]}, "stop_sequences[0]"), ({"top_p": 2}, "top_p"),
        ({"output_config": {"format": {}}}, "output_config.format.type"),
        ({"compaction": {"type": "summarize"}}, "compaction"),
    ],
    "openai_responses": [
        ({"input": []}, "input"), ({"input": None}, "input"), ({"input": 3}, "input"),
        ({"previous_response_id": "r"}, "previous_response_id"),
        ({"conversation": "c"}, "conversation"), ({"prompt": {"id": "p"}}, "prompt"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"tools": [{**TOOL, "name": "f", "strict": 1}]}, "tools[0].strict"),
        (items(user([{"type": "input_file"}])), "input[0].content[0].type"),
        (items(user([{"type": {}}])), "input[0].content[0].type"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
    "gemini": [
        ({"contents": []}, "contents"),
        ({"cachedContent": "c"}, "cachedContent"),
        (contents(turn(response("f", {}))), "contents[0].parts[0].functionResponse"),
        (contents(turn(function_call("f"), role="model"), turn({"functionResponse": {
            "name": "f", "parts": [{"inlineData": {"mimeType": "image/x", "data": ""}}]}})),
         "contents[1].parts[0].functionResponse.parts[0].inlineData"),
        ({CONFIG: {"candidateCount": 0}}, "generationConfig.candidateCount"),
        ({CONFIG: {"candidateCount": 2}}, "generationConfig.candidateCount"),
        ({CONFIG: {"responseMimeType": "text/x.enum"}},
         "generationConfig.responseMimeType"),
        ({CONFIG: {"responseSchema": OBJECT}}, "generationConfig.responseMimeType"),
        ({CONFIG: {"topP": 2}}, "generationConfig.topP"),
        ({CONFIG: {"topK": 1.5}}, "generationConfig.topK"),
        ({"toolConfig": {"functionCallingConfig": {"mode": "SOME"}}},
         f"{CALLING}.mode"),
    ],
}  # fmt: skip
# the same, of what has no effect, and is counted
IGNORED = {
    "openai_chat": [
        (messages(said("a")), "continuation of the last message"),
        (messages({"role": "function", "content": ""}), "messages[0].role"),
        (part(type="refusal"), "messages[0].content[0].type"),
        (messages(USER, {**USER, "tool_calls": [CALL]}), "messages[1].tool_calls"),
        (messages({**USER, "thinking": "x"}), "messages[0].thinking"),
        ({"tools": [{"type": "custom"}]}, "tools[0].type"),
        ({CHOICE: "any"}, CHOICE), ({CHOICE: {"type": "custom"}}, CHOICE),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"logprobs": True, "top_logprobs": 1}, "logprobs"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"presence_penalty": 0.1}, "presence_penalty"), ({"best_of": 2}, "best_of"),
        ({"stream_options": {"x": 1}}, "stream_options.x"),
    ],
    "anthropic": [
        (messages(said("a")), "continuation of the last message"),
        (messages({"role": "ctx", "content": "a"}), "messages[0].role"),
        (messages(USER, {"role": "system", "output_config": {"effort": "low"}}),
         "messages[1].output_config"),
        (part(type="tool_use"), "messages[0].content[0].type"),
        (part(type="text", text="a", mark=1), "messages[0].content[0].mark"),
        (thought(type="redacted_thinking", data="x"), "messages[0].content[0].type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools[0].type"),
        ({"n": 2}, "n"),
    ],
    "openai_responses": [
        (items(item()), "continuation of the last message"),
        ({"background": True}, "background"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"top_logprobs": 1}, "top_logprobs"), ({CHOICE: {"type": "web_search"}}, CHOICE),
        ({"tools": [{"type": "custom", "name": "apply_patch"}]}, "tools[0].type"),
        ({"tools": [{"type": "namespace", "name": "n", "tools": [
            {"type": "namespace", "name": "m"}]}]}, "tools[0].tools[0].type"),
        (items({"type": "custom_tool_call"}, USER), "input[0].type"),
        (items({"role": "tool", "content": ""}), "input[0].role"),
        (items(reasoning(encrypted_content="gAAA"), USER), "input[0].encrypted_content"),
        (items({**USER, "mood": 1}), "input[0].mood"),
        (items(user([{**text("a")[0], "mood": 1}])), "input[0].content[0].mood"),
    ],
    "gemini": [
        (contents(turn("a", role="model")), "continuation of the last message"),
        (contents(turn("a", role="system")), "contents[0].role"),
        (contents(turn({"executableCode": {}})), "contents[0].parts[0].executableCode"),
        ({"tools": [{"computerUse": {}}]}, "tools[0].computerUse"),
        ({CONFIG: {"responseLogprobs": True, "logprobs": 1}},
         "generationConfig.logprobs"),
    ],
}  # fmt: skip


def rows(table):
    given = [(name, *row) for name, each in table.items() for row in each]
    return pytest.mark.parametrize(("name", "body", "param"), given)


@rows(REFUSED)
def test_what_is_refused(name, body, param):
    with raises(GatewayError, re.escape(param), status=400, param=param):
        read(name, body)


@rows(IGNORED)
def test_what_is_ignored_and_counted(name, body, param):
    request = read(name, body)
    where = re.sub(r"\[\d+\]", "[]", param)
    counted = {name.partition("=")[0] for name in request.ignored}
    assert where in counted


@cases(
    "body, match",
    {
        "nothing": (b"", "not JSON"),
        "half": (b"{", "not JSON"),
        "no text": (b"\xff", "not JSON"),
        "NaN": (b'{"a": NaN}', "NaN"),
        "-Infinity": (b'{"a": -Infinity}', "Infinity"),
        "a large number": (b'{"metadata": {"x": [1e400]}}', "1e400"),
        "a list": (b"[]", "a list, not a JSON object"),
        "null": (b"null", "null, not a JSON object"),
        "digits": (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
        "deep": (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "deeper than 100"),
        "very deep": (b'{"a": ' + b"[" * 100_000, "too deep"),
    },
)
def test_bodies_that_are_refused(body, match):
    with raises(GatewayError, match, status=400):
        json_input.parse_object(body)


def test_bodies_that_are_taken():
    deep: list[object] = []
    for _ in range(98):
        deep = [deep]
    value = {"a": "\U0001f600", "b": deep, "c": -1500.0}
    # what a parser of 64 bits would round or refuse
    for each in (value, {"d": 2**64 + 1}, {"d": -(2**63) - 1}, {"d": "\ud83d"}):
        assert json_input.parse_object(json.dumps(each).encode()) == each


# Bodies of one session, which begin alike

_WORDS = st.text(st.sampled_from('ab" ,]}\u00e9\U0001f600'), max_size=6)
_MESSAGES = st.fixed_dictionaries(
    {"role": st.sampled_from(("user", "assistant", "robot")), "content": _WORDS},
    optional={"odd": st.integers(0, 2), "cache_control": st.just({"type": "x"})},
)
_SPACES = st.sampled_from(("", " ", "\n\t"))


def written(listed_as, talk, gap, tail, first):
    """A body as a client writes it, with or without fields before the messages."""
    comma = f"{gap},{gap}"
    listed = comma.join(json.dumps(one, ensure_ascii=False) for one in talk)
    fields = [f'"{listed_as}"{gap}:{gap}[{gap}{listed}{tail}]', '"max_tokens": 9']
    if first:
        fields.reverse()
    return f"{gap}{{{gap}{comma.join(fields)}{gap}}}{gap}".encode()


def read_or_error(protocol, data, earlier=()):
    """What a body is read as, or its error."""
    try:
        return protocol.read(json_input.parse_object(data), earlier)
    except GatewayError as error:
        return str(error)


@given(
    st.sampled_from(("openai_chat", "anthropic", "openai_responses")),
    st.lists(
        st.tuples(st.lists(_MESSAGES, max_size=5), st.integers(0, 14)), max_size=6
    ),
    *[_SPACES] * 2,
    st.sampled_from(("", "", ",", "{}", "]", ', "x"')),
    st.booleans(),
)
def test_a_body_that_begins_as_earlier_ones_is_read_as_if_alone(
    name, steps, gap, tail, broken, first
):
    protocol, talk, earlier = BY_NAME[name], [], []
    wrongs = [""] * len(steps)
    for (added, kept), wrong in zip(steps, [*wrongs[1:], broken], strict=False):
        talk = [*talk[:kept], *added]
        data = written(FIELDS[name], talk, gap, tail + wrong, first)
        alone, found = (read_or_error(protocol, data, each) for each in ([], earlier))
        if isinstance(alone, str):
            assert found == alone
            continue
        assert found.messages == alone.messages
        assert found.ignored == alone.ignored
        assert found.elements == alone.elements
        earlier = [*earlier, found.elements][-2:]


def test_gemini_in_snake_case():
    # as litellm 1.110 writes it, whose own names in schemas stay
    schema = {"type": "object", "properties": {"my_arg": OBJECT}}
    body = {
        "tools": [{"function_declarations": [{"name": "f", "parameters": schema}]}],
        "tool_config": {"function_calling_config": {"mode": "ANY"}},
        "generation_config": {"max_output_tokens": 5},
    }
    found = read("gemini", body)
    assert (found.sampling, found.ignored) == ({"max_tokens": 5}, {})
    assert found.tools[0]["function"] == {"name": "f", "parameters": schema}


@pytest.mark.parametrize("name", BY_NAME)
def test_a_refused_body_is_freed_at_once(name):
    # not by the next collection of garbage
    body = type("Body", (dict,), {})({FIELDS[name]: [3]})
    freed = weakref.ref(body)
    gc.disable()
    with suppress(GatewayError):
        BY_NAME[name].read(body)
    del body
    gc.enable()
    assert freed() is None


def test_what_bodies_share_is_not_read_again():
    talk = [{**user(f"message {i}"), "odd": {}} for i in range(20)]

    def read(messages, *earlier, name="openai_chat"):
        found = BY_NAME[name].read({"messages": messages}, earlier)
        return found.messages, found.elements, found.ignored

    first, known, _ = read(talk[:19])
    again, _, ignored = read(talk, read([USER])[1], known)
    assert [a is b for a, b in zip(first, again, strict=False)] == [True] * 19
    assert (len(again), ignored) == (20, {"messages[].odd": 20})
    # those of another protocol are, and numbers that are only equal
    other = read(talk, known, name="anthropic")
    assert other == read(talk, name="anthropic")
    result = {"type": "tool_result", "tool_use_id": "c", "is_error": True}
    _, known, _ = read([{"role": "user", "content": [result]}], name="anthropic")
    result["is_error"] = 1
    with pytest.raises(GatewayError, match="is_error: a number, not a boolean"):
        read([{"role": "user", "content": [result]}], known, name="anthropic")

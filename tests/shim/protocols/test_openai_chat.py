"""Requests: what is taken, how messages are made canonical, and what is refused."""

import json
import re

import pytest

from trajkit_shim import json_input
from trajkit_shim.chat.sampling_params import SamplingParams
from trajkit_shim.errors import GatewayError
from trajkit_shim.json_input import Fields
from trajkit_shim.protocols.openai_chat import OPENAI_CHAT, canonical_message


def parse_request(body):
    return OPENAI_CHAT.read(body)


USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {}}}
CALL = {
    "id": "call_1",
    "type": "function",
    "function": {"name": "bash", "arguments": '{"a":  1}'},
}


@pytest.mark.parametrize(
    ("message", "canonical"),
    [
        pytest.param(
            {"role": "developer", "content": "be brief"},
            {"role": "system", "content": "be brief"},
            id="developer is system",
        ),
        pytest.param(
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a", "cache_control": {"type": "x"}},
                    {"type": "text", "text": "b"},
                ],
                "name": "ann",
            },
            {"role": "user", "content": "a\nb", "name": "ann"},
            id="text parts",
        ),
        pytest.param(
            {"role": "tool", "content": "", "tool_call_id": "call_1"},
            {"role": "tool", "content": "", "tool_call_id": "call_1"},
            id="a tool that said nothing",
        ),
        pytest.param(
            {
                "role": "assistant",
                "content": None,
                "refusal": None,
                "annotations": [],
                "audio": None,
                "function_call": None,
                "provider_specific_fields": {"a": 1},
                "tool_calls": [{**CALL, "index": 0}],
            },
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            id="a client's echo of a tool call",
        ),
        pytest.param(
            {"role": "assistant", "tool_calls": []},
            {"role": "assistant", "content": ""},
            id="an assistant that said nothing",
        ),
        pytest.param(
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "hm",
                "tool_calls": [{"id": "", "function": {"name": "f"}}],
            },
            {
                "role": "assistant",
                "content": "",
                "reasoning_content": "hm",
                "tool_calls": [
                    {
                        "id": "",
                        "type": "function",
                        "function": {"name": "f", "arguments": ""},
                    }
                ],
            },
            id="reasoning, and a call without arguments",
        ),
    ],
)
def test_canonical_message(message, canonical):
    assert canonical_message(Fields(message, "messages[0]")) == canonical
    # canonical messages stay as they are
    assert canonical_message(Fields(canonical, "messages[0]")) == canonical


def test_a_request_in_full():
    request = parse_request(
        {
            "model": "any",
            "messages": [{"role": "developer", "content": "x"}, USER],
            "tools": [TOOL],
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "max_completion_tokens": 7,
            "max_tokens": 7,
            "temperature": 0.5,
            "top_p": 1,
            "top_k": 20,
            "stop": "\n",
            "seed": -3,
            "n": 1,
            "frequency_penalty": 0.0,
            "response_format": {"type": "text"},
            "logit_bias": None,
            "user": "someone",
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )
    assert request.messages == [{"role": "system", "content": "x"}, USER]
    assert request.tools == [TOOL]
    assert request.sampling == SamplingParams(
        max_tokens=7, temperature=0.5, top_p=1.0, top_k=20, stop=("\n",), seed=-3
    )
    assert request.stream
    assert request.include_usage


def test_a_request_in_short():
    request = parse_request({"messages": [USER], "tools": []})
    assert (request.tools, request.stream, request.include_usage) == (
        None,
        False,
        False,
    )
    assert request.sampling == SamplingParams()


def test_no_tool_may_be_called_where_the_choice_is_none():
    request = parse_request(
        {"messages": [USER], "tools": [TOOL], "tool_choice": "none"}
    )
    assert request.tools is None


def part(kind: str) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": [{"type": kind, kind: {}}]}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"messages": None}, "messages", id="no messages"),
        pytest.param({"messages": []}, "messages", id="empty messages"),
        pytest.param({"messages": "hi"}, "messages", id="messages as text"),
        pytest.param({"messages": ["hi"]}, "messages[0]", id="a message as text"),
        pytest.param({"messages": [{}]}, "messages[0].role", id="no role"),
        pytest.param(
            {"messages": [{"role": "user"}]}, "messages[0].content", id="no content"
        ),
        pytest.param(
            {"messages": [{"role": "user", "content": 3}]},
            "messages[0].content",
            id="content as a number",
        ),
        pytest.param(part("image_url"), "messages[0].content[0].type", id="an image"),
        pytest.param(
            {"messages": [{"role": "tool", "content": ""}]},
            "messages[0].tool_call_id",
            id="a tool result of no call",
        ),
        pytest.param(
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [
                            {**CALL, "function": {"name": "f", "arguments": {}}}
                        ],
                    }
                ]
            },
            "messages[0].tool_calls[0].function.arguments",
            id="arguments as an object",
        ),
        pytest.param(
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
            "messages[0].tool_calls[0].function",
            id="a call of nothing",
        ),
        pytest.param(
            {"tools": [{"type": "function", "function": {}}]},
            "tools[0].function.name",
            id="a nameless tool",
        ),
        pytest.param(
            {"tool_choice": {"type": "function"}},
            "tool_choice.name",
            id="a choice without a name",
        ),
        pytest.param({"n": 0}, "n", id="no choice"),
        pytest.param({"n": 129}, "n", id="too many choices"),
        pytest.param({"n": True}, "n", id="true choices"),
        pytest.param({"logprobs": 0}, "logprobs", id="logprobs as a number"),
        pytest.param(
            {"response_format": {"type": "xml"}}, "response_format.type", id="xml"
        ),
        pytest.param({"response_format": {}}, "response_format.type", id="no format"),
        pytest.param({"parallel_tool_calls": 1}, "parallel_tool_calls", id="one"),
        pytest.param({"model": 3}, "model", id="a model that is no name"),
        pytest.param({"stream": "yes"}, "stream", id="stream as text"),
        pytest.param({"max_tokens": 0}, "max_tokens", id="no tokens"),
        pytest.param({"max_tokens": 1.0}, "max_tokens", id="max_tokens as a float"),
        pytest.param(
            {"max_tokens": 3, "max_completion_tokens": 4},
            "max_completion_tokens",
            id="two limits",
        ),
        pytest.param({"temperature": -0.1}, "temperature", id="temperature below 0"),
        pytest.param({"temperature": True}, "temperature", id="true temperature"),
        pytest.param({"temperature": 2.1}, "temperature", id="temperature above 2"),
        pytest.param({"top_p": 0}, "top_p", id="top_p of 0"),
        pytest.param({"top_p": 1.1}, "top_p", id="top_p above 1"),
        pytest.param({"top_k": 0}, "top_k", id="top_k of 0"),
        pytest.param({"top_k": -2}, "top_k", id="top_k below -1"),
        pytest.param({"stop": ""}, "stop", id="an empty stop"),
        pytest.param({"stop": ["a", ""]}, "stop[1]", id="an empty stop in a list"),
        pytest.param({"stop": 3}, "stop", id="stop as a number"),
        pytest.param({"seed": 2**63}, "seed", id="a seed beyond 64 bits"),
    ],
)
def test_what_is_refused(body, param):
    with pytest.raises(GatewayError) as caught:
        parse_request({"messages": [USER], **body})
    assert caught.value.status == 400
    assert caught.value.param == param
    assert param in caught.value.message


IGNORED = [
    pytest.param(
        {"messages": [{"role": "function", "content": ""}]},
        "messages[0].role",
        id="a role of old",
    ),
    pytest.param(part("refusal"), "messages[0].content[0].type", id="a refusal"),
    pytest.param(
        {"messages": [USER, {**USER, "tool_calls": [CALL]}]},
        "messages[1].tool_calls",
        id="a user that calls",
    ),
    pytest.param(
        {"messages": [{**USER, "thinking": "x"}]},
        "messages[0].thinking",
        id="an unknown field of a message",
    ),
    pytest.param({"tools": [{"type": "custom"}]}, "tools[0].type", id="custom tool"),
    pytest.param({"tool_choice": "any"}, "tool_choice", id="another choice"),
    pytest.param(
        {"tool_choice": {"type": "custom"}}, "tool_choice", id="a custom choice"
    ),
    pytest.param({"logit_bias": {"1": 5}}, "logit_bias", id="logit_bias"),
    pytest.param(
        {"logprobs": True, "top_logprobs": 1}, "top_logprobs", id="top logprobs"
    ),
    pytest.param({"presence_penalty": 0.1}, "presence_penalty", id="a penalty"),
    pytest.param({"best_of": 2}, "best_of", id="an unknown parameter"),
    pytest.param(
        {"stream": True, "stream_options": {"x": 1}},
        "stream_options.x",
        id="an unknown stream option",
    ),
]


@pytest.mark.parametrize(("body", "param"), IGNORED)
def test_what_is_ignored_and_counted(body, param):
    request = parse_request({"messages": [USER], **body})
    counted = {*request.ignored, *(f"tools[].type={one}" for one in request.left_out)}
    where = re.sub(r"\[\d+\]", "[]", param)
    assert any(name.partition("=")[0] == where for name in counted), counted


@pytest.mark.parametrize(
    ("body", "match"),
    [
        pytest.param(b"", "not JSON", id="nothing"),
        pytest.param(b"{", "not JSON", id="half"),
        pytest.param(b"\xff", "not JSON", id="no UTF-8"),
        pytest.param(b'{"a": NaN}', "NaN", id="NaN"),
        pytest.param(b'{"a": -Infinity}', "Infinity", id="an infinity"),
        pytest.param(b"[]", "a list, not a JSON object", id="a list"),
        pytest.param(b"null", "null, not a JSON object", id="null"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}", "not JSON", id="too many digits"),
        pytest.param(
            b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "deeper than 100", id="deep"
        ),
        pytest.param(b'{"a": ' + b"[" * 100_000, "too deep", id="far too deep"),
    ],
)
def test_bodies_that_are_refused(body, match):
    with pytest.raises(GatewayError, match=match) as caught:
        json_input.parse_object(body)
    assert caught.value.status == 400


def test_bodies_that_are_taken():
    deep: list[object] = []
    for _ in range(98):
        deep = [deep]
    value = {"a": "\U0001f600", "b": deep}
    assert json_input.parse_object(json.dumps(value).encode()) == value

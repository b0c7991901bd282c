"""The echo: what a client sends back of a reply equals what was recorded of it."""

import json

import pytest
from hypothesis import example, given
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.shim.fakes import parse_reply
from tests.strategies import reply_texts
from trajkit_shim.chat.request import Usage, canonical_reply, make_reply
from trajkit_shim.json_input import Fields
from trajkit_shim.protocols.openai_chat import (
    OPENAI_CHAT,
    canonical_message,
    write,
)

USAGE = Usage(prompt_tokens=5, output_tokens=3, cached_tokens=None)
CALL = '<tool_call>\n{"name": "bash", "arguments": {"a":  1}}\n</tool_call>'


def reply_to(text, finish="stop"):
    return make_reply(parse_reply(text), finish, model="m", usage=USAGE)


def chunks(reply, *, usage=False):
    asked = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    asked["stream_options"] = {"include_usage": usage}
    request = OPENAI_CHAT.read(asked)
    *events, done = OPENAI_CHAT.stream(reply, request, 0)
    assert done == b"data: [DONE]\n\n"
    for event in events:
        assert event.startswith(b"data: ")
        assert event.endswith(b"\n\n")
        yield ChatCompletionChunk.model_validate_json(event[6:])


def assembled(reply):
    """The message that a client puts together from the events."""
    message = {"role": None, "content": None}
    calls = {}
    for chunk in chunks(reply):
        delta = chunk.choices[0].delta
        message["role"] = message["role"] or delta.role
        if delta.content is not None:
            message["content"] = (message["content"] or "") + delta.content
        for call in delta.tool_calls or []:
            calls[call.index] = call.model_dump(exclude={"index"})
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


@given(reply_texts)
@example("")
@example("hello")
@example(CALL)
@example(f" Look.\n{CALL}")
@example(f"{CALL}\n{CALL} and\n")
@example("<tool_call>\n{broken\n</tool_call>")
@example(f"<tool_call>{CALL}")
def test_the_echo_equals_the_record(text):
    reply = reply_to(text)
    recorded = {k: v for k, v in canonical_reply(reply).items() if k != "sampled"}
    parsed = ChatCompletion.model_validate_json(json.dumps(write(reply, None)))
    message = parsed.choices[0].message
    echoes = [
        message.model_dump(),
        message.model_dump(exclude_none=True),
        message.model_dump(exclude_unset=True),
        message.to_dict(),
        json.loads(message.model_dump_json()),
        assembled(reply),
    ]
    for echo in echoes:
        assert canonical_message(Fields(echo, "echo")) == recorded


@pytest.mark.parametrize(
    ("text", "finish", "expected"),
    [
        pytest.param("hi", "stop", "stop", id="text"),
        pytest.param("hi", "length", "length", id="cut text"),
        pytest.param(CALL, "stop", "tool_calls", id="a call"),
        pytest.param(CALL, "length", "length", id="a call and then cut"),
        pytest.param("hi", "eos", "stop", id="another engine's word"),
    ],
)
def test_finish_reason(text, finish, expected):
    body = write(reply_to(text, finish), None)
    assert body["choices"][0]["finish_reason"] == expected
